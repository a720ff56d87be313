//! Causal attention at the shapes of the presets and at long sequences: GFLOP/s, forward and backward, in both
//! precisions, counted as the pairs that the mask keeps.
//!
//! `cargo bench -p meshwork-tensor --bench attention` measures with all threads; `MESHWORK_THREADS=1` with one. An
//! argument keeps the shapes whose name contains it. Without `--bench`, among the tests, each shape runs once, small.

use meshwork_core::pool;
use meshwork_tensor::cpu::kernels::attention::{Dims, Saved, backward, forward};
use meshwork_tensor::cpu::kernels::matmul::Precision;
use meshwork_tensor::family::AttentionShape;
use meshwork_tensor::random::{fill_normal, key};
use std::time::Instant;

/// Name, then batch, sequence, heads and features of a head.
const SHAPES: [(&str, [usize; 4]); 7] = [
    ("tiny", [16, 128, 4, 32]),
    ("small", [12, 256, 6, 64]),
    ("medium", [8, 256, 8, 64]),
    ("gpt2", [4, 512, 12, 64]),
    ("long 1024", [2, 1024, 12, 64]),
    ("long 4096", [1, 4096, 4, 64]),
    ("long 4096, wide", [1, 4096, 4, 128]),
];

/// Seconds spent on a shape, at least.
const SECONDS: f64 = 0.5;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let measured = arguments.iter().any(|argument| argument == "--bench");
    let only = arguments.iter().find(|argument| !argument.starts_with('-'));
    println!("{} threads; GFLOP/s, best/median", pool::threads());
    print!("{:<16} {:<20}", "shape", "batch seq heads dim");
    println!(" {:>13} {:>13} {:>13} {:>13}", "forward", "backward", "bf16 forward", "bf16 backward");
    for (name, shape) in SHAPES {
        if only.is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let [batch, seq, heads, head_dim] = if measured { shape } else { [1, shape[1].min(40), 1, shape[3]] };
        print!("{name:<16} {:<20}", format!("{batch} {seq} {heads} {head_dim}"));
        for precision in [Precision::F32, Precision::Bf16] {
            let [forward, backward] = rates(precision, AttentionShape { batch, seq, heads, head_dim }, measured);
            print!(" {forward:>13} {backward:>13}");
        }
        println!();
    }
}

/// GFLOP/s forward and backward, as text.
fn rates(precision: Precision, shape: AttentionShape, measured: bool) -> [String; 2] {
    let AttentionShape { batch, seq, heads, head_dim } = shape;
    let dims = Dims { batch, seq, heads, head_dim };
    let elements = batch * seq * heads * head_dim;
    let normal = |name: &str, len: usize| {
        let mut x = vec![0.0_f32; len];
        fill_normal(key(0, name), 0, &mut x);
        x
    };
    let (qkv, dout) = (normal("qkv", 3 * elements), normal("dout", elements));
    let (mut out, mut lse, mut dqkv) = (vec![0.0; elements], vec![0.0; batch * heads * seq], vec![0.0; 3 * elements]);
    let there = rate(shape.forward_flops(), measured, || forward(precision, dims, &qkv, &mut out, &mut lse, None));
    let saved = Saved { qkv: &qkv, out: &out, lse: &lse };
    let back = rate(shape.backward_flops(), measured, || backward(precision, dims, saved, &dout, &mut dqkv, None));
    [there, back]
}

/// Best and median GFLOP/s of a call.
fn rate(flops: u64, measured: bool, mut call: impl FnMut()) -> String {
    let start = Instant::now();
    let mut times = Vec::new();
    while times.is_empty() || measured && (times.len() < 5 || start.elapsed().as_secs_f64() < SECONDS) {
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let rate = |seconds: f64| flops as f64 / seconds * 1e-9;
    format!("{:.1}/{:.1}", rate(times[0]), rate(times[times.len() / 2]))
}
