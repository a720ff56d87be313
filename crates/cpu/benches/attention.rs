//! Causal attention at the shapes of the presets and at long sequences: GFLOP/s, forward and backward, in both
//! precisions, counting the pairs that the mask keeps. Also for the same heads in groups that share keys and values,
//! rotated by their positions.
//!
//! `cargo bench -p meshwork-cpu --bench attention` measures with all threads; `MESHWORK_THREADS=1` with one. An
//! argument selects the shapes whose name contains it. With `--once` each runs once in f32, in its size: for tools that
//! count, such as `valgrind --tool=callgrind`. Without `--bench`, among the tests, each shape runs once, small.
//! With `--json` there is a line for each direction in f32, which `benches/compare.py` compares with a peer's, and its
//! share of the rate of a product beside it: all tokens times the weight of queries, keys and values. They are timed
//! in turn, and the share is the median of the shares of the turns.

use meshwork_core::pool;
use meshwork_cpu::kernels::attention::{
    Angles, Dims, Groups, Masks, Packing, Saved, Tiled, backward, forward, grouped_backward, grouped_forward,
};
use meshwork_cpu::kernels::matmul::{Epilogue, Factors, MatmulOperand, Update, gemm_shared};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{AttentionShape, GroupedShape};
use meshwork_tensor::random::{fill_normal, key};
use std::time::Instant;

/// Name, then batch, sequence, heads and features of a head, heads to a group if they are grouped, documents of a
/// sequence, each of the same length, and a sliding window.
type Shape = (&'static str, [usize; 4], Option<usize>, usize, Option<usize>);

/// The pairs between documents or outside of the window are counted too, so that the speeds show what leaving them out
/// saves.
const SHAPES: [Shape; 16] = [
    ("tiny", [16, 128, 4, 32], None, 1, None),
    ("small", [12, 256, 6, 64], None, 1, None),
    ("medium", [8, 256, 8, 64], None, 1, None),
    ("gpt2", [4, 512, 12, 64], None, 1, None),
    ("long 1024", [2, 1024, 12, 64], None, 1, None),
    ("long 4096", [1, 4096, 4, 64], None, 1, None),
    ("long 4096, wide", [1, 4096, 4, 128], None, 1, None),
    ("long 16384", [1, 16_384, 6, 64], None, 1, None),
    ("tiny, grouped", [16, 128, 4, 32], Some(2), 1, None),
    ("small, grouped", [12, 256, 6, 64], Some(3), 1, None),
    ("gpt2, grouped", [4, 512, 12, 64], Some(3), 1, None),
    ("long 4096, grouped", [1, 4096, 4, 128], Some(2), 1, None),
    ("gpt2, documents", [4, 512, 12, 64], None, 8, None),
    ("long 4096, grouped, documents", [1, 4096, 4, 128], Some(2), 8, None),
    ("long 4096, window", [1, 4096, 4, 64], None, 1, Some(512)),
    ("long 4096, grouped, window", [1, 4096, 4, 128], Some(2), 1, Some(512)),
];

/// Seconds spent on a shape, at least.
const SECONDS: f64 = 0.5;

/// Turns of `--json`.
const TURNS: usize = 3;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let measured = arguments.iter().any(|argument| argument == "--bench");
    let only = arguments.iter().find(|argument| !argument.starts_with('-'));
    let [json, once] = ["--json", "--once"].map(|name| arguments.iter().any(|argument| argument == name));
    if json {
        let shapes = SHAPES.into_iter().filter(|(name, _, group, documents, window)| {
            let (plain, asked) =
                (group.is_none() && *documents == 1, only.is_some_and(|only| name.contains(only.as_str())));
            plain && if window.is_some() { asked } else { only.is_none() || asked }
        });
        return shapes.for_each(|(_, shape, .., window)| beside_products(shape, window, measured));
    }
    println!("{} threads; GFLOP/s, best/median", pool::threads());
    print!("{:<30} {:<20}", "shape", "batch seq heads dim");
    println!(" {:>13} {:>13} {:>13} {:>13}", "forward", "backward", "bf16 forward", "bf16 backward");
    for (name, shape, group, documents, window) in SHAPES {
        if only.is_some_and(|only| !name.contains(only.as_str())) {
            continue;
        }
        let [batch, seq, heads, head_dim] =
            if measured || once { shape } else { [1, shape[1].min(40), group.unwrap_or(1), shape[3]] };
        print!("{name:<30} {:<20}", format!("{batch} {seq} {heads} {head_dim}"));
        for precision in [Precision::F32, Precision::Bf16].into_iter().take(if once { 1 } else { 2 }) {
            let shape = AttentionShape { batch, seq, heads, head_dim };
            let [forward, backward] = match group {
                None => rates(precision, shape, (documents, window), measured),
                Some(group) => grouped_rates(precision, shape, group, (documents, window), measured),
            };
            print!(" {forward:>13} {backward:>13}");
        }
        println!();
    }
}

/// Prints the rates of both directions, and their shares of the rate of a product.
fn beside_products([batch, seq, heads, head_dim]: [usize; 4], window: Option<usize>, measured: bool) {
    let (seq, turns) = if measured { (seq, TURNS) } else { (seq.min(40), 1) };
    let (dims, hidden, tokens) = (Dims::new([batch, seq, heads, head_dim]), heads * head_dim, batch * seq);
    let shape = GroupedShape::alone(AttentionShape { batch, seq, heads, head_dim });
    let (x, weight, dout) =
        (normal("x", tokens * hidden), normal("w", 3 * hidden * hidden), normal("dout", tokens * hidden));
    let (mut qkv, mut dqkv) = (vec![0.0; 3 * tokens * hidden], vec![0.0; 3 * tokens * hidden]);
    let (mut out, mut lse) = (vec![0.0; tokens * hidden], vec![0.0; tokens * heads]);
    let (tiles, masks, none) = (f32::tiles(Precision::F32), Masks { window, ..Masks::default() }, Default::default());
    let seconds = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    let product_flops = (2 * tokens * 3 * hidden * hidden) as f64;
    let flops = [shape.forward_flops(&none) as f64, shape.backward_flops(&none) as f64];
    let mut rates = Vec::new();
    for turn in 0..=turns {
        let a = MatmulOperand::Full(&x, (hidden, 1));
        let b = MatmulOperand::Full(&weight, (1, hidden));
        let factors = Factors { precision: Precision::F32, dims: [tokens, 3 * hidden, hidden], a, b };
        // Often, for it is short; between the others, which heat the cores as much.
        let mut products: Vec<f64> = (0..9)
            .map(|_| seconds(&mut || gemm_shared(factors, &mut qkv, Update::Overwrite, Epilogue::Nothing)))
            .collect();
        products.sort_by(f64::total_cmp);
        let there = seconds(&mut || forward(tiles, dims, &qkv, &mut out, &mut lse, masks));
        let saved = Saved { q: &qkv, kv: &qkv, out: &out, lse: &lse };
        let back = seconds(&mut || backward(tiles, dims, saved, &dout, &mut dqkv, masks));
        if turn > 0 {
            let product = product_flops / products[products.len() / 2];
            rates.push([product, flops[0] / there, flops[1] / back, (flops[0] + flops[1]) / (there + back)]);
        }
    }
    let median = |of: &dyn Fn(&[f64; 4]) -> f64| {
        let mut values: Vec<f64> = rates.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let window = window.map_or_else(String::new, |window| format!(", window {window}"));
    let size = format!("f32 {batch}x{seq}x{heads}x{head_dim}{window}");
    println!(r#"{{"product": "product beside attention", "gflops": {:.1}}}"#, median(&|rates| 1e-9 * rates[0]));
    for (at, words) in [(1, "attention"), (2, "attention gradient"), (3, "attention and gradient")] {
        println!(r#"{{"product": "{words} {size}", "gflops": {:.1}}}"#, median(&|rates| 1e-9 * rates[at]));
        println!(r#"{{"share": "{words} of products", "value": {:.4}}}"#, median(&|rates| rates[at] / rates[0]));
    }
}

/// GFLOP/s forward and backward, as text.
fn rates(
    precision: Precision,
    shape: AttentionShape,
    (documents, window): (usize, Option<usize>),
    measured: bool,
) -> [String; 2] {
    let packing = packed(shape, documents);
    let masks = Masks { packing: packing.as_ref(), window, ..Masks::default() };
    let AttentionShape { batch, seq, heads, head_dim } = shape;
    let dims = Dims::new([batch, seq, heads, head_dim]);
    let elements = batch * seq * heads * head_dim;
    let (qkv, dout) = (normal("qkv", 3 * elements), normal("dout", elements));
    let (mut out, mut lse, mut dqkv) = (vec![0.0; elements], vec![0.0; batch * heads * seq], vec![0.0; 3 * elements]);
    let there = rate(GroupedShape::alone(shape).forward_flops(&Default::default()), measured, || {
        forward(f32::tiles(precision), dims, &qkv, &mut out, &mut lse, masks)
    });
    let saved = Saved { q: &qkv, kv: &qkv, out: &out, lse: &lse };
    let back = rate(GroupedShape::alone(shape).backward_flops(&Default::default()), measured, || {
        backward(f32::tiles(precision), dims, saved, &dout, &mut dqkv, masks)
    });
    [there, back]
}

/// The same for groups of `size` heads.
fn grouped_rates(
    precision: Precision,
    shape: AttentionShape,
    size: usize,
    (documents, window): (usize, Option<usize>),
    measured: bool,
) -> [String; 2] {
    let packing = packed(shape, documents);
    let masks = Masks { packing: packing.as_ref(), window, ..Masks::default() };
    let AttentionShape { batch, seq, heads, head_dim } = shape;
    let dims = Dims::new([batch, seq, heads, head_dim]);
    let groups = Groups { size, kv_heads: heads / size, first: 0 };
    let (of_q, of_kv) = (batch * seq * heads * head_dim, 2 * batch * seq * groups.kv_heads * head_dim);
    let (q, kv, dout) = (normal("q", of_q), normal("kv", of_kv), normal("dout", of_q));
    let angle =
        |at: usize| (at / head_dim) as f32 * 1e4_f32.powf(-2.0 * (at % (head_dim / 2)) as f32 / head_dim as f32);
    let turn = |at: usize| if at % head_dim < head_dim / 2 { angle(at).cos() } else { angle(at).sin() };
    let angles: Vec<f32> = (0..seq * head_dim).map(turn).collect();
    let angles = Some(Angles(&angles));
    let (mut out, mut lse) = (vec![0.0; of_q], vec![0.0; batch * heads * seq]);
    let (mut dq, mut dkv) = (vec![0.0; of_q], vec![0.0; of_kv]);
    let there = rate(GroupedShape::alone(shape).forward_flops(&Default::default()), measured, || {
        grouped_forward(f32::tiles(precision), dims, groups, angles, [&q, &kv], &mut out, &mut lse, masks, None);
    });
    let saved = Saved { q: &q, kv: &kv, out: &out, lse: &lse };
    let back = rate(GroupedShape::alone(shape).backward_flops(&Default::default()), measured, || {
        grouped_backward(f32::tiles(precision), dims, groups, angles, saved, &dout, [&mut dq, &mut dkv], masks, None);
    });
    [there, back]
}

/// Sequences of several documents.
fn packed(AttentionShape { batch, seq, .. }: AttentionShape, documents: usize) -> Option<Packing> {
    let positions: Vec<i32> = (0..batch * seq).map(|at| (at % seq % seq.div_ceil(documents)) as i32).collect();
    (documents > 1).then(|| Packing::new(&positions, [batch, seq], true).expect("documents one after the other"))
}

fn normal(name: &str, len: usize) -> Vec<f32> {
    let mut x = vec![0.0_f32; len];
    fill_normal(key(0, name), 0, &mut x);
    x
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
