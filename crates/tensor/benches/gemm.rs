//! GFLOP/s of the products of a training step, per preset, layer, pass and precision.
//!
//! Run with `cargo bench -p meshwork-tensor --bench gemm [-- PRESET]`: on one thread, and shared by all (`MESHWORK_THREADS`
//! or the cores), median and best. A product is timed with its packing, on operands that lie as training has them.
//! Without `--bench` (as under `cargo test`), everything runs once on small matrices.

use std::time::{Duration, Instant};

use meshwork_core::pool;
use meshwork_tensor::cpu::kernels::matmul::{Epilogue, Precision, Update, gemm_in, gemm_shared};

/// Preset, tokens of a step, hidden size, vocabulary.
const PRESETS: [(&str, usize, usize, usize); 4] =
    [("tiny", 2048, 128, 256), ("small", 3072, 384, 256), ("medium", 2048, 512, 50_257), ("gpt2", 2048, 768, 50_304)];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let full = args.iter().any(|arg| arg == "--bench");
    let asked = |preset: &str| args.iter().all(|arg| arg.starts_with('-') || arg == preset);
    let threads = pool::threads();
    println!("GFLOP/s, median (best); {threads} threads share");
    println!("{:34} {:>18} {:>4} {:>11} {:>11}", "", "m x n x k", "", "alone", "shared");
    for (preset, tokens, hidden, vocabulary) in PRESETS.into_iter().filter(|(preset, ..)| asked(preset)) {
        let layers = [
            ("qkv", 3 * hidden, hidden),
            ("projection", hidden, hidden),
            ("up", 4 * hidden, hidden),
            ("down", hidden, 4 * hidden),
            ("head", vocabulary, hidden),
        ];
        for (layer, out, inner) in layers {
            // Y = X Wᵀ, dX = dY W, dW = dYᵀ X.
            let passes = [("y", [tokens, out, inner]), ("dx", [tokens, inner, out]), ("dw", [out, inner, tokens])];
            for (pass, dims) in passes {
                let [m, n, k] = if full { dims } else { dims.map(|dim| dim.min(40)) };
                let a = (&numbers(m * k), if pass == "dw" { (1, m) } else { (k, 1) });
                let b = (&numbers(k * n), if pass == "y" { (1, k) } else { (n, 1) });
                let mut c = numbers(m * n);
                for precision in [Precision::F32, Precision::Bf16] {
                    let budget = if full { Duration::from_millis(400) } else { Duration::ZERO };
                    let alone = rate([m, n, k], budget, || {
                        gemm_in(precision, [m, n, k], (a.0, a.1), (b.0, b.1), (&mut c, (n, 1)), Update::Overwrite);
                    });
                    let shared = rate([m, n, k], budget, || {
                        let (a, b) = ((&a.0[..], a.1), (&b.0[..], b.1));
                        gemm_shared(precision, [m, n, k], a, b, &mut c, Update::Overwrite, Epilogue::Nothing);
                    });
                    let (name, shape) = (format!("{preset} {layer} {pass}"), format!("{m}x{n}x{k}"));
                    let precision = if precision == Precision::F32 { "f32" } else { "bf16" };
                    println!("{name:34} {shape:>18} {precision:>4} {alone:>11} {shared:>11}");
                }
            }
        }
    }
}

/// Numbers between -0.5 and 0.5.
fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| (((i * 2_654_435_761) >> 12) & 0xffff) as f32 / 65_536.0 - 0.5).collect()
}

/// Median and best rate of a product run for a while, at least once.
fn rate([m, n, k]: [usize; 3], budget: Duration, mut product: impl FnMut()) -> String {
    if !budget.is_zero() {
        product(); // warms caches and buffers
    }
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.is_empty() || begun.elapsed() < budget {
        let start = Instant::now();
        product();
        times.push(start.elapsed());
    }
    times.sort();
    let rate = |time: Duration| 2.0 * (m * n * k) as f64 / time.as_nanos().max(1) as f64;
    format!("{:.0} ({:.0})", rate(times[times.len() / 2]), rate(times[0]))
}
