//! The least that a launch of a kernel can take: bytes that it must move, operations that it must do, and the time of both on a card. `kernels/floors.md` is the
//! table, which [`report`] makes of this and of the arguments' types.
//!
//! Kernels of a step of dense models, each at the sizes at which `crates/cuda/benches/ops.rs` times it: those of a model of 1.3 billion parameters.

use crate::families::KERNELS;
use crate::kernel::{Arg, Type};
use std::fmt::Write;

/// What a launch of a kernel must do.
#[derive(Debug)]
pub struct Floor {
    /// The kernel.
    pub kernel: &'static str,
    /// The sizes of the launch.
    pub sizes: &'static str,
    /// Elements that each argument with an address must have moved: those that are read and written twice.
    pub moved: &'static [(&'static str, u64)],
    /// Operations of tensor cores on bf16.
    pub operations: u64,
    /// Powers of two.
    pub powers: u64,
}

/// What a card can do at most in a second.
struct Card {
    bytes: f64,
    operations: f64,
    /// 16 a clock on each of 132 SMs, at 1.755 GHz.
    powers: f64,
}

/// An H100 and an H200, as `crates/train/src/cost/cards.rs` has them.
const CARDS: [Card; 2] = [
    Card { bytes: 3.35e12, operations: 989.4e12, powers: 16.0 * 132.0 * 1.755e9 },
    Card { bytes: 4.8e12, operations: 989.4e12, powers: 16.0 * 132.0 * 1.755e9 },
];

macro_rules! floors {
    ($($kernel:ident, $sizes:literal; $($arg:ident $count:expr),+; $operations:expr, $powers:expr;)*) => {
        /// Of each kernel the least that a launch can take.
        pub static FLOORS: &[Floor] = &[$(Floor {
            kernel: stringify!($kernel),
            sizes: $sizes,
            moved: &[$((stringify!($arg), $count)),+],
            operations: $operations,
            powers: $powers,
        }),*];
    };
}

/// Tokens, features, elements of both, and parts of 64 tokens.
const T: u64 = 32_768;
const H: u64 = 2048;
const X: u64 = T * H;
const PARTS: u64 = T / 64;
/// Ids, and rows of logits.
const V: u64 = 50_304;
const ROWS: u64 = 8192;
/// Elements of a flat vector.
const FLAT: u64 = 1 << 28;
/// Elements of an operand of attention, numbers of its rows, and pairs of a query and a key that it sees: 32 × 1024 tokens of 12 heads of 64, 4 × 4096 of 16 of 128.
const A64: u64 = 32 * 1024 * 12 * 64;
const R64: u64 = 32 * 1024 * 12;
const P64: u64 = 32 * 12 * 1024 * 1025 / 2;
const A128: u64 = 4 * 4096 * 16 * 128;
const R128: u64 = 4 * 4096 * 16;
const P128: u64 = 4 * 16 * 4096 * 4097 / 2;

#[rustfmt::skip] // A table: one launch, one line. `maps` stands for what is copied by them, in words of 8 bytes.
floors! {
    layer_norm_forward_f32, "32768 × 2048"; x X, gamma H, beta H, y X, mean T, rstd T; 0, 0;
    layer_norm_forward_bf16, "32768 × 2048"; x X, gamma H, beta H, y X, mean T, rstd T; 0, 0;
    layer_norm_backward, "32768 × 2048"; dy X, x X, gamma H, mean T, rstd T, dx X; 0, 0;
    layer_norm_backward_parts, "32768 × 2048"; dy X, x X, mean T, rstd T, starts PARTS, dgamma PARTS * H, dbeta PARTS * H; 0, 0;
    rms_norm_forward_f32, "32768 × 2048"; x X, weight H, y X, rstd T; 0, 0;
    rms_norm_forward_bf16, "32768 × 2048"; x X, weight H, y X, rstd T; 0, 0;
    rms_norm_backward, "32768 × 2048"; dy X, x X, weight H, rstd T, dx X; 0, 0;
    rms_norm_backward_parts, "32768 × 2048"; dy X, x X, rstd T, starts PARTS, dweight PARTS * H; 0, 0;
    add, "32768 × 2048"; a X, b X, out X; 0, 0;
    add_assign, "32768 × 2048"; a 2 * X, b X; 0, 0;
    bias, "32768 × 2048"; x X, bias H, out X; 0, 0;
    bias_residual, "32768 × 2048"; x X, bias H, residual X, out X; 0, 0;
    sum_parts, "32768 × 2048 by 64"; x X, starts PARTS, sums PARTS * H; 0, 0;
    gelu_forward_f32, "32768 × 8192"; x 4 * X, bias 4 * H, out 4 * X; 0, 0;
    gelu_forward_bf16, "32768 × 8192"; x 4 * X, bias 4 * H, out 4 * X; 0, 0;
    gelu_backward, "32768 × 8192"; x 4 * X, bias 4 * H, dy 8 * X; 0, 0;
    swiglu_forward_f32, "32768 × 8192"; x 8 * X, out 4 * X; 0, 0;
    swiglu_forward_bf16, "32768 × 8192"; x 8 * X, out 4 * X; 0, 0;
    swiglu_backward, "32768 × 8192"; dy 4 * X, x 16 * X; 0, 0;
    dropout, "32768 × 2048"; x X, sizes 12, y X; 0, 0;
    f32_to_bf16, "32768 × 2048"; from X, to X; 0, 0;
    embedding_forward, "32768 × 2048"; ids T, table X, out X; 0, 0;
    cross_entropy_stats, "8192 × 50304"; logits ROWS * V, targets ROWS, max ROWS, sum ROWS, target ROWS; 0, ROWS * V;
    cross_entropy_backward, "8192 × 50304"; logits 2 * ROWS * V, targets ROWS, lse ROWS, scale 8; 0, ROWS * V;
    flash_forward_64, "32 × 1024 × 12 × 64"; q A64, k A64, v A64, out A64, lse R64; 4 * 64 * P64, P64;
    flash_forward_128, "4 × 4096 × 16 × 128"; q A128, k A128, v A128, out A128, lse R128; 4 * 128 * P128, P128;
    flash_forward_sm90_64, "32 × 1024 × 12 × 64"; maps 3 * A64 / 4, out A64, lse R64; 4 * 64 * P64, P64;
    flash_forward_sm90_128, "4 × 4096 × 16 × 128"; maps 3 * A128 / 4, out A128, lse R128; 4 * 128 * P128, P128;
    flash_dots, "32 × 1024 × 12 × 64"; dout A64, out A64, dots R64; 0, 0;
    flash_backward_q_64, "32 × 1024 × 12 × 64"; q A64, k A64, v A64, dout A64, lse R64, dots R64, dq A64; 6 * 64 * P64, P64;
    flash_backward_q_128, "4 × 4096 × 16 × 128"; q A128, k A128, v A128, dout A128, lse R128, dots R128, dq A128; 6 * 128 * P128, P128;
    flash_backward_kv_64, "32 × 1024 × 12 × 64"; q A64, k A64, v A64, dout A64, lse R64, dots R64, dk A64, dv A64; 8 * 64 * P64, P64;
    flash_backward_kv_128, "4 × 4096 × 16 × 128"; q A128, k A128, v A128, dout A128, lse R128, dots R128, dk A128, dv A128; 8 * 128 * P128, P128;
    flash_backward_sm90_q_64, "32 × 1024 × 12 × 64"; maps A64, lse R64, dots R64, dq A64; 6 * 64 * P64, P64;
    flash_backward_sm90_q_128, "4 × 4096 × 16 × 128"; maps A128, lse R128, dots R128, dq A128; 6 * 128 * P128, P128;
    flash_backward_sm90_kv_64, "32 × 1024 × 12 × 64"; maps A64, lse R64, dots R64, dk A64, dv A64; 8 * 64 * P64, P64;
    flash_backward_sm90_kv_128, "4 × 4096 × 16 × 128"; maps A128, lse R128, dots R128, dk A128, dv A128; 8 * 128 * P128, P128;
    adamw, "2²⁸"; weights 2 * FLAT, grads FLAT, mean 2 * FLAT, square 2 * FLAT, starts 2, counts 1; 0, 0;
    sgd, "2²⁸"; weights 2 * FLAT, grads FLAT, starts 2, counts 1; 0, 0;
    sgd_momentum, "2²⁸"; weights 2 * FLAT, grads FLAT, buffer 2 * FLAT, starts 2, counts 1; 0, 0;
    sum_of_squares, "2²⁸"; x FLAT, starts 2, counts 1, parts FLAT / crate::SQUARES_PIECE; 0, 0;
    scale_forward, "2²⁸"; x FLAT, out FLAT; 0, 0;
}

impl Type {
    /// Bytes of an element.
    fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::Bits16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }
}

impl Floor {
    /// Bytes that must be moved: by the types that the arguments have.
    pub fn bytes(&self) -> u64 {
        let args = KERNELS.iter().find(|kernel| kernel.name == self.kernel).map_or(&[][..], |kernel| kernel.args);
        let of = |name: &str| args.iter().find(|arg| arg.name == name).map_or(0, |arg: &Arg| arg.of.bytes());
        self.moved.iter().map(|(name, count)| of(name) * count).sum()
    }

    /// Seconds on a card that nothing can beat, and what it waits for.
    fn on(&self, card: &Card) -> (f64, &'static str) {
        let times = [
            (self.bytes() as f64 / card.bytes, "bytes"),
            (self.operations as f64 / card.operations, "operations"),
            (self.powers as f64 / card.powers, "powers of two"),
        ];
        times.into_iter().fold((0.0, ""), |most, time| if time.0 > most.0 { time } else { most })
    }
}

/// The table of `kernels/floors.md`.
///
/// ```
/// let line = meshwork_kernels::floors::report().lines().find(|line| line.contains("`adamw`")).unwrap().to_owned();
/// assert_eq!(line, "| `adamw` | 2²⁸ | 7516.2 MB | 0 | 0 | 2243.6 µs | 1565.9 µs | bytes |");
/// ```
pub fn report() -> String {
    let mut text = "# The least that kernels can take\n\n\
        Written by `kernels/src/floors.rs`, from what each argument must have moved and its type; a test holds this page against it, and says how to renew it. Bytes are those that must\n\
        be read and written once, operations those of tensor cores on bf16, powers of two those of the special function units. A floor is the longest of the three at the card's peaks: \
        3.35 TB/s (H100)\nand 4.8 TB/s (H200), 989 TFLOP/s, 3.7·10¹² powers a second. Nothing here is measured: `cargo bench -p meshwork-cuda --features cuda --bench ops` times operations at these sizes on a GPU, \
        and `scripts/gpu-check.sh speed`\nholds them against the card's own rates. Of other kernels the heads of the files say the bytes.\n\n\
        | kernel | sizes | bytes | operations | powers | H100 | H200 | waits for |\n|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for floor in FLOORS {
        let [h100, h200] = CARDS.each_ref().map(|card| floor.on(card));
        let waits = if h100.1 == h200.1 { h100.1.to_owned() } else { format!("{}; {}", h100.1, h200.1) };
        let giga = |count: u64| if count == 0 { "0".to_owned() } else { format!("{:.2}·10⁹", count as f64 / 1e9) };
        let Floor { kernel, sizes, operations, powers, .. } = floor;
        let megabytes = floor.bytes() as f64 / 1e6;
        let [h100, h200] = [h100.0, h200.0].map(|seconds| seconds * 1e6);
        let (operations, powers) = (giga(*operations), giga(*powers));
        _ = writeln!(
            text,
            "| `{kernel}` | {sizes} | {megabytes:.1} MB | {operations} | {powers} | {h100:.1} µs | {h200:.1} µs | {waits} |"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every argument with an address is named once, but for `firsts`, `positions` and others that a launch may leave out.
    #[test]
    fn every_address_is_counted() {
        for floor in FLOORS {
            let kernel = crate::kernel(floor.kernel).unwrap_or_else(|| panic!("no kernel {}", floor.kernel));
            let addresses = kernel.args.iter().filter(|arg| !arg.pass.is_number() && arg.name != "firsts");
            let names: Vec<&str> = addresses.map(|arg| arg.name).collect();
            let counted: Vec<&str> = floor.moved.iter().map(|(name, _)| *name).collect();
            assert_eq!(counted, names, "{}", floor.kernel);
        }
    }

    #[test]
    fn the_page_is_what_this_says() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/floors.md");
        let kept = std::fs::read_to_string(page).unwrap_or_default();
        if kept != report() {
            let fresh = std::env::temp_dir().join("floors.md");
            std::fs::write(&fresh, report()).unwrap();
            panic!(
                "kernels/floors.md is not what src/floors.rs says. To renew it:\n    cp {} kernels/floors.md",
                fresh.display()
            );
        }
    }
}
