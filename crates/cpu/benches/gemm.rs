//! GFLOP/s of the products of a training step, per preset, layer, pass and precision.
//!
//! Run with `cargo bench -p meshwork-cpu --bench gemm [-- WORD..]`, for the products with every word in their names,
//! such as `small dw f32`: the layers of presets, and squares of 128 to 4,096. In `y` B is transposed, in `dw` A.
//! `benches/engine.py` makes a table of all of them. `MESHWORK_SIMD=avx2` measures the products of narrower vectors.
//! Three columns, median and best of each, and the share of the peak in f32: the best run over the best run of a loop
//! of fused multiply-adds in registers, on as many threads, one after each product.
//!
//! - `alone`: one thread, always with the same operands, which are in the caches as far as they fit;
//! - `shared`: the same by all threads (`MESHWORK_THREADS` or the cores);
//! - `cold`: all threads, on the next of so many copies that none is left in the last-level cache, in huge pages as in
//!   the arena. A weight is touched once per pass of a step, so it comes from memory; an activation is often still in
//!   the last-level cache. A real step is between `shared` and `cold`.
//!
//! In bf16, operands that only products read are stored rounded, as in a step: the activations (A of `y`, B of `dw`)
//! that norms and GELU make. Weights, gradients and everything else are in f32.
//!
//! A product is timed with its packing and the operations that follow it in a step. With `--json` there is a line for
//! each with the median of `shared`, of the product alone and not accumulating, which `benches/compare.py` compares
//! with a peer's. With `--once` every product runs once, in its size, on one thread: for tools that count, such as
//! `valgrind --tool=callgrind`. Without `--bench` (as under `cargo test`), everything runs once on small matrices.

use bytemuck::Pod;
use meshwork_core::simd::{Level, level, wide};
use meshwork_core::{Block, pool};
use meshwork_cpu::kernels::matmul::{Epilogue, Factors, MatmulOperand, Strides, Update, gemm, gemm_shared};
use meshwork_cpu::kernels::round::{Stored, round};
use meshwork_tensor::Precision;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Preset, tokens of a step, hidden size, vocabulary. `token` and `tokens..` are of decoding: a product of one row
/// reads its weight at twice as many bytes per second as it has operations. `square..` has the projection alone, whose
/// extents are all the same. `sample` is `small` with one sample at a time, `chunk..` are `medium` with the logits of
/// some tokens at a time.
const PRESETS: [(&str, usize, usize, usize); 16] = [
    ("token", 1, 768, 50_257),
    ("tokens4", 4, 768, 50_257),
    ("tokens16", 16, 768, 50_257),
    ("tiny", 2048, 128, 256),
    ("small", 3072, 384, 256),
    ("sample", 256, 384, 256),
    ("chunk128", 128, 512, 50_304),
    ("chunk256", 256, 512, 50_304),
    ("medium", 2048, 512, 50_257),
    ("gpt2", 2048, 768, 50_304),
    ("square128", 128, 128, 0),
    ("square256", 256, 256, 0),
    ("square512", 512, 512, 0),
    ("square1024", 1024, 1024, 0),
    ("square2048", 2048, 2048, 0),
    ("square4096", 4096, 4096, 0),
];

/// Layer, its outputs and inputs in units of (hidden size, vocabulary, [`RANK`]), and the operation that follows it.
/// The gated layer has four hidden sizes, so that `tiny`, with `projection`, `gated`, `down` and `head`, is
/// `llama-tiny` too. `loraA` and `loraB` are the adapter beside `up`: what reads or writes its features is added to
/// those of `up`.
const LAYERS: [(&str, [usize; 3], [usize; 3], Then); 8] = [
    ("qkv", [3, 0, 0], [1, 0, 0], Then::Nothing),
    ("projection", [1, 0, 0], [1, 0, 0], Then::Nothing),
    ("up", [4, 0, 0], [1, 0, 0], Then::BiasGelu),
    ("gated", [8, 0, 0], [1, 0, 0], Then::Swiglu),
    ("down", [1, 0, 0], [4, 0, 0], Then::Nothing),
    ("head", [0, 1, 0], [1, 0, 0], Then::Nothing),
    ("loraA", [0, 0, 1], [1, 0, 0], Then::Nothing),
    ("loraB", [4, 0, 0], [0, 0, 1], Then::Nothing),
];

/// Rank of the adapter.
const RANK: usize = 8;

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Nothing,
    BiasGelu,
    Swiglu,
}

/// Least number of bytes of all copies of a product's operands together: several times the last-level cache.
const COLD: usize = 256 << 20;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let full = args.iter().any(|arg| arg == "--bench");
    let asked =
        |name: &str| args.iter().filter(|arg| !arg.starts_with('-')).all(|arg| name.split(' ').any(|word| word == arg));
    let [json, once] = ["--json", "--once"].map(|name| args.iter().any(|arg| arg == name));
    if !json && !once {
        println!("GFLOP/s, median (best) share of the peak; {} threads share; {:?}", pool::threads(), level());
        println!("{:26} {:>18} {:>19} {:>19} {:>19}", "", "m x n x k", "alone", "shared", "cold");
    }
    for (preset, tokens, hidden, vocabulary) in PRESETS {
        for (layer, outputs, inputs, then) in LAYERS {
            let [out, inner] = [outputs, inputs].map(|[h, v, r]| h * hidden + v * vocabulary + r * RANK);
            // Y = X Wᵀ, dX = dY W, dW = dYᵀ X, and the last one added to the sum of earlier micro-batches.
            let passes = [
                ("y", [tokens, out, inner]),
                ("dx", [tokens, inner, out]),
                ("dw", [out, inner, tokens]),
                ("dw+", [out, inner, tokens]),
            ];
            for (pass, dims) in passes {
                for (precision, in_words) in [(Precision::F32, "f32"), (Precision::Bf16, "bf16")] {
                    let name = format!("{preset} {layer} {pass} {in_words}");
                    let in_preset = tokens != hidden || layer == "projection";
                    let in_json = pass != "dw+" && layer != "gated" && !layer.starts_with("lora");
                    if !in_preset || !asked(&name) || json && !in_json {
                        continue;
                    }
                    let dims = if full || once { dims } else { dims.map(|dim| dim.min(40)) };
                    let then = if pass == "y" && !json { then } else { Then::Nothing };
                    let update = match (layer, pass) {
                        (_, "dw+") | ("loraA", "dx") | ("loraB", "y") => Update::Accumulate,
                        _ => Update::Overwrite,
                    };
                    let rounded = rounded(layer, pass, precision);
                    let product = Product { pass, dims, precision, update, then, rounded };
                    if once {
                        let [_] = product.rates(false, [Column::Alone]);
                        println!("{name}");
                    } else if json {
                        let [Rate { median, .. }] = product.rates(full, [Column::Shared]);
                        println!(r#"{{"product": "{layer} {pass}", "gflops": {median:.1}}}"#);
                    } else {
                        let rates = product.rates(full, [Column::Alone, Column::Shared, Column::Cold]);
                        let [alone, shared, cold] =
                            rates.map(|Rate { median, best, share }| format!("{median:.1} ({best:.1}) {share:.3}"));
                        let [m, n, k] = dims;
                        let shape = format!("{m}x{n}x{k}");
                        println!("{name:26} {shape:>18} {alone:>19} {shared:>19} {cold:>19}");
                    }
                }
            }
        }
    }
}

/// Whether A and B are stored rounded. The projection follows attention, which writes f32.
fn rounded(layer: &str, pass: &str, precision: Precision) -> [bool; 2] {
    let activation = layer != "projection" && precision == Precision::Bf16;
    match pass {
        "y" => [activation, false],
        "dx" => [false, false],
        _ => [false, activation],
    }
}

struct Product {
    pass: &'static str,
    dims: [usize; 3],
    precision: Precision,
    update: Update,
    /// The operation that follows.
    then: Then,
    /// Whether A and B are stored in bf16.
    rounded: [bool; 2],
}

/// GFLOP/s.
struct Rate {
    median: f64,
    best: f64,
    /// The best as a share of the peak.
    share: f64,
}

/// How a product is timed, see above.
#[derive(Clone, Copy, PartialEq)]
enum Column {
    Alone,
    Shared,
    Cold,
}

impl Product {
    fn rates<const N: usize>(&self, full: bool, columns: [Column; N]) -> [Rate; N] {
        let [m, n, k] = self.dims;
        let sizes = [m * k, k * n, m * n, if self.then == Then::Nothing { 0 } else { m * n }];
        let [a_rounded, b_rounded] = self.rounded;
        let rounded = [a_rounded, b_rounded, false, self.precision == Precision::Bf16];
        let sets = match (columns.contains(&Column::Cold), full) {
            (false, _) => 1,
            (true, true) => 1 + COLD / (4 * sizes.iter().sum::<usize>()),
            (true, false) => 2,
        };
        let mut sets: Vec<[Block; 4]> =
            (0..sets).map(|_| std::array::from_fn(|i| numbers(sizes[i], rounded[i]))).collect();
        let bias = numbers(n, false);
        let budget = if full { Duration::from_millis(250) } else { Duration::ZERO };
        let update = self.update;
        let a_strides = if self.pass.starts_with("dw") { (1, m) } else { (k, 1) };
        let b_strides = if self.pass == "y" { (1, k) } else { (n, 1) };
        columns.map(|column| {
            let copies = if column == Column::Cold { sets.len() } else { 1 };
            let threads = if column == Column::Alone { 1 } else { pool::threads() };
            self.rate(budget, threads, |turn| {
                let [a, b, c, out] = &mut sets[turn % copies];
                let (a, b, c) = (factor(a, a_strides, a_rounded), factor(b, b_strides, b_rounded), cast_mut(c));
                let factors = Factors { precision: self.precision, dims: self.dims, a, b };
                if column == Column::Alone {
                    return gemm(factors, (c, (n, 1)), update);
                }
                let out = if rounded[3] { Stored::Bf16(cast_mut(out)) } else { Stored::Full(cast_mut(out)) };
                let epilogue = match self.then {
                    Then::Nothing => Epilogue::Nothing,
                    Then::BiasGelu => Epilogue::BiasGelu(cast(&bias), out),
                    Then::Swiglu => Epilogue::Swiglu(out),
                };
                gemm_shared(factors, c, update, epilogue);
            })
        })
    }

    /// The rate of a product that runs on `threads` threads for a while, at least once. It gets the number of its
    /// earlier runs.
    fn rate(&self, budget: Duration, threads: usize, mut product: impl FnMut(usize)) -> Rate {
        if !budget.is_zero() {
            product(0); // warms buffers, and caches if they can be
        }
        let (begun, mut times, mut peak) = (Instant::now(), Vec::new(), 0.0_f64);
        while times.is_empty() || begun.elapsed() < budget {
            let start = Instant::now();
            product(times.len() + 1);
            times.push(start.elapsed());
            peak = peak.max(peak_of(threads, if budget.is_zero() { 1 } else { ROUNDS }));
        }
        times.sort();
        let flops = 2.0 * self.dims.iter().product::<usize>() as f64;
        let rate = |time: Duration| flops / time.as_nanos().max(1) as f64;
        let best = rate(times[0]);
        Rate { median: rate(times[times.len() / 2]), best, share: best / peak }
    }
}

/// Fused multiply-adds in a chain of the loop that measures the peak: some 50 µs.
const ROUNDS: usize = 30_000;

/// Independent chains, enough to hide the latency of an instruction; with both factors they stay in 16 registers.
const CHAINS: usize = 10;

/// GFLOP/s of fused multiply-adds in registers, on `threads` threads at once.
fn peak_of(threads: usize, rounds: usize) -> f64 {
    let lanes = if level() == Level::Avx512 { 16 } else { 8 };
    let start = Instant::now();
    pool::for_each(0..threads, |_| if lanes == 16 { chains::<16>(rounds) } else { chains::<8>(rounds) });
    let flops = 2 * threads * rounds * CHAINS * lanes;
    flops as f64 / start.elapsed().as_nanos().max(1) as f64
}

/// Runs independent chains of fused multiply-adds, whose vectors have `LANES` numbers.
fn chains<const LANES: usize>(rounds: usize) {
    let (x, y) = black_box(([0.5_f32; LANES], [1.0_f32; LANES]));
    black_box(wide!({
        let mut sums = [[0.0_f32; LANES]; CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                for l in 0..LANES {
                    sum[l] = sum[l].mul_add(x[l], y[l]);
                }
            }
        }
        sums
    }));
}

/// `len` numbers between -0.5 and 0.5, in `f32` or rounded.
fn numbers(len: usize, rounded: bool) -> Block {
    let mut block = Block::zeroed(4 * len);
    let numbers = cast_mut::<f32>(&mut block).iter_mut().enumerate();
    numbers.for_each(|(i, x)| *x = (((i * 2_654_435_761) >> 12) & 0xffff) as f32 / 65_536.0 - 0.5);
    if !rounded {
        return block;
    }
    let mut stored = Block::zeroed(2 * len);
    round(&cast(&block)[..len], &mut cast_mut(&mut stored)[..len]);
    stored
}

fn factor(block: &Block, strides: Strides, rounded: bool) -> MatmulOperand<'_, f32> {
    if rounded { MatmulOperand::Rounded(cast(block), strides) } else { MatmulOperand::Full(cast(block), strides) }
}

fn cast<T: Pod>(block: &Block) -> &[T] {
    bytemuck::cast_slice(block.as_slice())
}

fn cast_mut<T: Pod>(block: &mut Block) -> &mut [T] {
    bytemuck::cast_slice_mut(block.as_mut_slice())
}
