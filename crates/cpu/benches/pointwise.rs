//! Nanoseconds per element and GB/s of the kernels that are not products: element-wise, along rows, over flat vectors.
//!
//! Run with `cargo bench -p meshwork-cpu --bench pointwise [-- PRESETS]`: the kernels run as on the device, on one
//! thread and on all (`MESHWORK_THREADS` or the cores); the output shows medians. Bytes are those that must be read and
//! written once; `cached` is a problem that stays in a core's cache. Without `--bench` (as under `cargo test`),
//! everything runs once on a few rows.

use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, DType, pool};
use meshwork_cpu::Cpu;
use meshwork_optim::{AdamW, Rule, Update};
use meshwork_tensor::kernel::{DropoutMask, FlatParts, Map, Picks, TableGrad, VocabShard, Zip};
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Error, random};
use std::slice::from_ref;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Preset, tokens of a step, hidden size, vocabulary.
const PRESETS: [(&str, usize, usize, usize); 5] = [
    ("cached", 64, 128, 4096),
    ("tiny", 2048, 128, 256),
    ("small", 3072, 384, 256),
    ("medium", 2048, 512, 50_257),
    ("gpt2", 2048, 768, 50_304),
];

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let full = args.iter().any(|arg| arg == "--bench");
    let presets: Vec<&String> = args.iter().filter(|arg| !arg.starts_with('-')).collect();
    let asked = |preset: &str| presets.is_empty() || presets.iter().any(|asked| *asked == preset);
    println!("{} threads share", pool::threads());
    println!("{:26} {:>10} {:>8} {:>8} {:>8} {:>8}", "", "elements", "ns alone", "GB/s", "ns all", "GB/s");
    for (preset, tokens, hidden, vocab) in PRESETS.into_iter().filter(|(preset, ..)| asked(preset)) {
        let tokens = if full { tokens } else { 3 };
        let budget = if full { Duration::from_millis(250) } else { Duration::ZERO };
        run(preset, [tokens, hidden, vocab], budget)?;
    }
    Ok(())
}

fn run(preset: &str, [tokens, hidden, vocab]: [usize; 3], budget: Duration) -> Result<(), Error> {
    let device = Cpu::device();
    let (count, wide) = (tokens * hidden, 4 * tokens * hidden);
    let (x, dy, gamma) = (numbers(wide), numbers(wide), numbers(4 * hidden));
    // Where the slope is one, a gradient does not change, however often it is taken.
    let (mut graded, far) = (numbers(wide), Buffer::from_vec(vec![40.0_f32; wide]));
    let [x_narrow, dy_narrow, narrow] = [numbers(count), numbers(count), numbers(hidden)];
    let (_, mean, rstd) = device.norm()?.layer_norm(&x_narrow, [&narrow, &narrow], 1e-5, DType::F32)?;
    // Pairs whose gradient is zero, however often it is taken; they have half as many features.
    let (mut pairs, still) = (numbers(wide), Buffer::zeros(DType::F32, wide / 2));
    let (_, rms_rstd) = device.norm()?.rms_norm(&x_narrow, &narrow, 1e-5, DType::F32)?;
    let mask = DropoutMask {
        p: 0.1,
        key: random::key(0, "bench"),
        ndim: 2,
        local: [tokens, hidden, 1, 1, 1, 1],
        offset: [0; 6],
        global: [tokens as u64, hidden as u64, 1, 1, 1, 1],
    };
    let shard = VocabShard { first: 0, valid: vocab, width: vocab, skipped: 0, pitch: vocab, vocab };
    let ids: Vec<i32> = (0..tokens).map(|i| (i * 7919 % vocab) as i32).collect();
    let ids = Buffer::from_slice(&ids);
    // With this lse, repeated gradients go to a fixed point.
    let (logits, mut turned, lse) =
        (numbers(tokens * vocab), numbers(tokens * vocab), Buffer::from_vec(vec![3.0_f32; tokens]));
    let scale = Buffer::from_slice(&[1.0_f64]);
    let table = numbers(vocab * hidden);
    let weights = 12 * hidden * hidden;
    let rule = Rule::from(AdamW::default());
    let update = Update { step: 7, lr: 1e-6, grad_scale: 0.9, decay_factor: 1.0 };
    let mut sum = Buffer::zeros(DType::F64, 1);
    let mut digits = Buffer::zeros(DType::F64, LIMBS);
    let [mut w, g, m, v] = [(); 4].map(|()| numbers(weights));
    let mut states = [m, v];
    let mut zeroed = Buffer::zeros(DType::F32, weights);
    let mut dtable = Buffer::zeros(DType::F32, vocab * hidden);

    let zip = |y: &Buffer, shape| device.elementwise()?.zip(Zip::Mul, &x_narrow, y, shape).map(drop);
    let order = Buffer::from_vec((0..tokens).rev().map(|token| token as i32).collect::<Vec<_>>());
    let picks = Picks { outer: 1, extent: tokens, inner: hidden, count: tokens, each: false };

    // Name, elements, bytes of each, and the work.
    type Work<'a> = Box<dyn FnMut() -> Result<(), Error> + Send + 'a>;
    let works: Vec<(&str, usize, usize, Work<'_>)> = vec![
        ("add", count, 12, Box::new(|| device.pointwise()?.add(&x_narrow, &dy_narrow).map(drop))),
        ("bias", wide, 8, Box::new(|| device.pointwise()?.bias(&x, &gamma).map(drop))),
        (
            "bias_residual",
            count,
            12,
            Box::new(|| device.pointwise()?.bias_residual(&x_narrow, &narrow, &dy_narrow).map(drop)),
        ),
        ("bias_grad", wide, 4, Box::new(|| device.pointwise()?.bias_grad(&dy, 4 * hidden, RowBlocks::WHOLE).map(drop))),
        ("gelu", wide, 8, Box::new(|| device.pointwise()?.gelu(&x).map(drop))),
        ("gelu_grad", wide, 12, Box::new(|| device.pointwise()?.gelu_grad(&dy, &x).map(drop))),
        ("bias_gelu", wide, 8, Box::new(|| device.pointwise()?.bias_gelu(&x, &gamma, DType::F32).map(drop))),
        (
            "bias_gelu_grad",
            wide,
            12,
            Box::new(|| device.pointwise()?.bias_gelu_grad(&mut graded, &far, &gamma, RowBlocks::WHOLE).map(drop)),
        ),
        ("swiglu", wide / 2, 12, Box::new(|| device.pointwise()?.swiglu(&x, DType::F32).map(drop))),
        ("swiglu_grad", wide / 2, 20, Box::new(|| device.pointwise()?.swiglu_grad(&still, &mut pairs))),
        ("dropout", count, 8, Box::new(|| device.pointwise()?.dropout(&x_narrow, &mask).map(drop))),
        ("log", count, 8, Box::new(|| device.elementwise()?.map(Map::Log, &x_narrow).map(drop))),
        ("mul", count, 12, Box::new(|| zip(&dy_narrow, [1, 1, count]))),
        ("mul by a row", count, 8, Box::new(|| zip(&narrow, [1, tokens, hidden]))),
        ("mul by a number a row", count, 8, Box::new(|| zip(&rstd, [tokens, hidden, 1]))),
        ("argmax of rows", count, 4, Box::new(|| device.indexing()?.argmax(&x_narrow, [tokens, hidden, 1]).map(drop))),
        ("index_select", count, 8, Box::new(|| device.indexing()?.pick(&x_narrow, &order, picks).map(drop))),
        ("index_select_grad", count, 8, Box::new(|| device.indexing()?.pick_grad(&x_narrow, &order, picks).map(drop))),
        (
            "layer_norm",
            count,
            8,
            Box::new(|| device.norm()?.layer_norm(&x_narrow, [&narrow, &narrow], 1e-5, DType::F32).map(drop)),
        ),
        (
            "layer_norm_grad",
            count,
            12,
            Box::new(|| {
                let (norm, stats) = (device.norm()?, [&mean, &rstd]);
                norm.layer_norm_grad(&dy_narrow, &x_narrow, &narrow, stats, RowBlocks::WHOLE, None).map(drop)
            }),
        ),
        ("rms_norm", count, 8, Box::new(|| device.norm()?.rms_norm(&x_narrow, &narrow, 1e-5, DType::F32).map(drop))),
        (
            "rms_norm_grad",
            count,
            12,
            Box::new(|| {
                let norm = device.norm()?;
                norm.rms_norm_grad(&dy_narrow, &x_narrow, &narrow, &rms_rstd, RowBlocks::WHOLE, None).map(drop)
            }),
        ),
        ("loss forward", tokens * vocab, 4, Box::new(|| device.loss()?.row_stats(&logits, &ids, shard).map(drop))),
        ("loss backward", tokens * vocab, 8, Box::new(|| device.loss()?.grad(&mut turned, &ids, &lse, &scale, shard))),
        ("lookup", count, 8, Box::new(|| device.embedding()?.lookup(&ids, &table, 0..vocab, vocab, hidden).map(drop))),
        // The table is written once; the rows added to it are few in comparison.
        (
            "lookup_grad",
            vocab * hidden,
            4,
            Box::new(|| {
                let dtable = TableGrad {
                    buffer: &mut dtable,
                    start: 0,
                    rows: vocab,
                    width: hidden,
                    accumulate: false,
                    blocks: 1,
                };
                device.embedding()?.lookup_grad(&ids, &dy_narrow, 0..vocab, dtable)
            }),
        ),
        (
            "positions",
            count,
            8,
            Box::new(|| device.embedding()?.positions(&x_narrow, &dy_narrow, 0, tokens, hidden).map(drop)),
        ),
        ("sum_of_squares", weights, 4, Box::new(|| device.optim()?.sum_of_squares(from_ref(&g), &mut sum, 0))),
        (
            "exact_sum_of_squares",
            weights,
            4,
            Box::new(|| device.optim()?.exact_sum_of_squares(from_ref(&g), &mut digits, 0)),
        ),
        (
            "adamw",
            weights,
            28,
            Box::new(|| {
                let all = 0..weights;
                let flat = FlatParts { weights: &mut w, grads: &g, states: &mut states, ranges: from_ref(&all) };
                device.optim()?.update(&rule, update, &mut [flat])
            }),
        ),
        ("zero", weights, 4, Box::new(|| device.optim()?.zero(&mut zeroed, 0..weights))),
    ];
    for (name, elements, bytes, mut work) in works {
        let alone = alone(|| median(budget, &mut work))?;
        let shared = median(budget, &mut work)?;
        let (ns, rate) = (|time: f64| time / elements as f64, |time: f64| (elements * bytes) as f64 / time);
        let name = format!("{preset} {name}");
        let figures = [ns(alone), rate(alone), ns(shared), rate(shared)].map(|figure| format!("{figure:>8.3}"));
        println!("{name:26} {elements:>10} {}", figures.join(" "));
    }
    Ok(())
}

/// Numbers between -3 and 3.
fn numbers(len: usize) -> Buffer {
    let numbers: Vec<f32> =
        (0..len).map(|i| (((i * 2_654_435_761) >> 12) & 0xffff) as f32 * (6.0 / 65_536.0) - 3.0).collect();
    Buffer::from_slice(&numbers)
}

/// Runs `work` inside one of two items of the pool, where no work is shared further.
fn alone<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let (work, result) = (Mutex::new(Some(work)), Mutex::new(None));
    pool::for_each(0..2, |_| {
        let mine = work.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = mine {
            let value = work();
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        }
    });
    let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
    result.unwrap_or_else(|| unreachable!("one of the items takes the work"))
}

/// Median of the nanoseconds of a call, over the time `budget` but at least once.
fn median(budget: Duration, work: &mut impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    if !budget.is_zero() {
        work()?; // warms caches and the arena
    }
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.is_empty() || begun.elapsed() < budget {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_nanos().max(1) as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
