//! The sum of `small`'s gradients (GPT-2 of 6 layers and 384 features) over two ranks by PowerSGD of rank 4 with error
//! feedback.
//!
//! `cargo bench -p meshwork-compress --bench powersgd -- [--json]`: each rank is a thread. A time is the median of ten
//! sums behind two, of the slower rank. The error is that of the mean of all these sums of one gradient: ‖mean -
//! gradient‖² / ‖gradient‖². `benches/peers/powersgd.py` does the same with the hook of PyTorch, on the same gradients.
//! Without `--bench` (as under `cargo test`) two sums of a tiny model are made.

use meshwork_compress::{CompressError, Feedback, Partial, Reduction, Scheme, Shape};
use meshwork_core::ReduceOp;
use meshwork_core::World;
use meshwork_core::comm::thread::Options;
use std::time::{Duration, Instant};

const RANKS: usize = 2;

/// Rows and columns of the matrices of a GPT-2 with tied embeddings, and the elements of its vectors together.
fn shapes(vocab: usize, layers: usize, hidden: usize, seq: usize) -> (Vec<[usize; 2]>, usize) {
    let mut matrices = vec![[vocab, hidden], [seq, hidden]];
    for _ in 0..layers {
        matrices.extend([[hidden, 3 * hidden], [hidden, hidden], [hidden, 4 * hidden], [4 * hidden, hidden]]);
    }
    (matrices, layers * 13 * hidden + 2 * hidden)
}

/// The gradient of a rank: a few directions that get weaker, common to all ranks, and noise.
fn gradient(number: usize, [rows, cols]: [usize; 2], rank: usize) -> Vec<f32> {
    let wave = |at: usize, step: f64, k: usize| (step * (k + 1) as f64 * at as f64 + 1.3 * (k + number) as f64).cos();
    let of = |step: f64, count: usize| -> Vec<[f64; 12]> {
        (0..count).map(|at| std::array::from_fn(|k| wave(at, step, k))).collect()
    };
    let (left, right) = (of(0.37, rows), of(0.21, cols));
    let noise = |at: usize| ((at as f64 * 0.618_033_988_749_895 + 0.25 * rank as f64) % 1.0 - 0.5) * 0.02;
    let element = |at: usize| {
        let (a, b) = (&left[at / cols], &right[at % cols]);
        let sum: f64 = (0..12).map(|k| a[k] * b[k] / ((k + 1) * (k + 1)) as f64).sum();
        (sum + noise(at)) as f32
    };
    (0..rows * cols).map(element).collect()
}

/// Seconds of each sum, and the error of their mean.
fn sums(world: &meshwork_core::Group, small: bool, count: usize) -> Result<(Vec<f64>, f64, usize), CompressError> {
    let (matrices, vectors) = if small { shapes(256, 6, 384, 256) } else { shapes(32, 1, 16, 8) };
    let (me, scheme): (usize, Scheme) = (world.rank(), "powersgd:4".parse()?);
    let gradients: Vec<Vec<f32>> = (0..).zip(&matrices).map(|(number, &shape)| gradient(number, shape, me)).collect();
    let mut reductions = Vec::new();
    for (number, [rows, cols]) in matrices.iter().enumerate() {
        let (name, shape) = (format!("gradient {number}"), Shape::matrix(*rows, *cols)?);
        reductions.push(Reduction::new(&name, Box::new(scheme), Feedback::Ef, shape, [me, RANKS], 1)?);
    }
    let mut vector = vec![1.0; vectors];
    let mut means: Vec<Vec<f64>> = gradients.iter().map(|gradient| vec![0.0; gradient.len()]).collect();
    let mut times = Vec::new();
    for step in 0..count {
        world.barrier()?;
        let begun = Instant::now();
        let mut kept = Vec::new();
        for (reduction, gradient) in reductions.iter_mut().zip(&gradients) {
            kept.push(reduction.all_reduce(world, step as u64, Partial(gradient))?);
        }
        world.all_reduce_slice(&mut vector, ReduceOp::Sum)?;
        world.barrier()?;
        times.push(begun.elapsed().as_secs_f64());
        vector.fill(1.0);
        for (sum, mean) in kept.iter().zip(&mut means) {
            mean.iter_mut().zip(sum.iter()).for_each(|(mean, sum)| *mean += f64::from(*sum) / count as f64);
        }
    }
    let (mut lost, mut all) = (0.0, 0.0);
    for (gradient, mean) in gradients.into_iter().zip(&means) {
        let mut whole = gradient;
        world.all_reduce_slice(&mut whole, ReduceOp::Sum)?;
        lost += whole.iter().zip(mean).map(|(whole, mean)| (f64::from(*whole) - mean).powi(2)).sum::<f64>();
        all += whole.iter().map(|whole| f64::from(*whole).powi(2)).sum::<f64>();
    }
    let elements = matrices.iter().map(|[rows, cols]| rows * cols).sum::<usize>() + vectors;
    Ok((times, lost / all, 4 * elements))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (full, json) = (args.iter().any(|arg| arg == "--bench"), args.iter().any(|arg| arg == "--json"));
    let options = Options { timeout: Duration::from_secs(600) };
    let ranks = World::Threads(RANKS).run_with(options, |world| sums(&world, full, if full { 12 } else { 4 }));
    let (mut times, error, bytes) = ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0);
    times.drain(..2);
    times.sort_by(f64::total_cmp);
    let us = times[times.len() / 2] * 1e6;
    match json {
        true => println!("{{\"op\": \"powersgd\", \"bytes\": {bytes}, \"us\": {us:.0}, \"error\": {error:.5}}}"),
        false => println!("powersgd:4 of {bytes} bytes: {:.2} ms, error {error:.5}", us / 1e3),
    }
}
