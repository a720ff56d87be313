//! Trains a language model written with candle over four ranks, each a thread, and compares the losses and weights with
//! the results of one rank. Then trains it asynchronously, with gradients that are one to eight steps old, to show the
//! cost of staleness.
//!
//! ```sh
//! cargo run --release --manifest-path examples/ddp_candle/Cargo.toml
//! ```

mod model;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, loss::cross_entropy};
use meshwork_core::comm::thread::Options;
use meshwork_core::{Group, ReduceOp, World};
use meshwork_data_parallel::Ddp;
use model::Model;

const TEXT: &[u8] = include_bytes!("../../../README.md");
const RANKS: usize = 4;
const STEPS: usize = 100;
const MICRO_BATCHES: usize = 2;
const BATCH: usize = 16;
const LENGTH: usize = 32;

/// Rows of a batch: tokens and the next tokens.
fn rows(step: usize, rows: std::ops::Range<usize>) -> candle_core::Result<(Tensor, Tensor)> {
    let row = |row: usize, shift: usize| {
        let start = (step * BATCH + row) * LENGTH % (TEXT.len() - LENGTH - 1) + shift;
        TEXT[start..start + LENGTH].iter().map(|&byte| u32::from(byte)).collect::<Vec<_>>()
    };
    let shape = (rows.len(), LENGTH);
    let tokens = |shift| rows.clone().flat_map(|at| row(at, shift)).collect::<Vec<_>>();
    Ok((Tensor::from_vec(tokens(0), shape, &Device::Cpu)?, Tensor::from_vec(tokens(1), shape, &Device::Cpu)?))
}

fn floats(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// One rank's training from the given weights, with gradients that are `staleness` steps old: the mean losses of the
/// steps, and the weights after them.
fn train(world: Group, start: &[Vec<f32>], staleness: usize) -> Result<(Vec<f64>, Vec<Vec<f32>>)> {
    let (model, parameters) = Model::new()?;
    for (parameter, values) in parameters.iter().zip(start) {
        parameter.set(&Tensor::from_slice(values, parameter.dims(), &Device::Cpu)?)?;
    }
    let mut optimizer = AdamW::new(parameters.clone(), ParamsAdamW { lr: 3e-3, ..Default::default() })?;
    let elements: Vec<usize> = parameters.iter().map(|parameter| parameter.elem_count()).collect();
    let mut ddp = Ddp::with_staleness(world.clone(), &elements, 64 << 10, staleness)?;

    let per_micro = BATCH / world.size() / MICRO_BATCHES;
    let samples = (per_micro * LENGTH) as f64;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let mut loss_sum = [0.0];
        // The summed loss of a micro-batch, and its gradients.
        let mut micro_batch = |ddp: &mut Ddp, micro: usize| {
            let first = (world.rank() * MICRO_BATCHES + micro) * per_micro;
            let (tokens, next) = rows(step, first..first + per_micro)?;
            let loss = (cross_entropy(&model.forward(&tokens)?.flatten(0, 1)?, &next.flatten_all()?)? * samples)?;
            loss_sum[0] += f64::from(loss.to_scalar::<f32>()?);
            let grads = loss.backward()?;
            for (at, parameter) in parameters.iter().enumerate().rev() {
                match grads.get(parameter) {
                    Some(gradient) => ddp.gradient(at, &floats(gradient)?)?,
                    None => ddp.unused(at)?,
                }
            }
            anyhow::Ok(grads)
        };
        ddp.no_sync(|ddp| (1..MICRO_BATCHES).try_for_each(|micro| micro_batch(ddp, micro).map(drop)))?;
        let mut grads = micro_batch(&mut ddp, 0)?;
        if ddp.finish(samples * MICRO_BATCHES as f64)? {
            for (at, parameter) in parameters.iter().enumerate() {
                grads.insert(parameter, Tensor::from_slice(ddp.reduced(at)?, parameter.dims(), &Device::Cpu)?);
            }
            optimizer.step(&grads)?;
        }
        world.all_reduce_slice(&mut loss_sum, ReduceOp::Sum)?;
        losses.push(loss_sum[0] / (BATCH * LENGTH) as f64);
    }
    let weights = parameters.iter().map(|parameter| floats(parameter.as_tensor())).collect::<Result<_, _>>()?;
    Ok((losses, weights))
}

fn main() -> Result<()> {
    let (_, parameters): (_, Vec<Var>) = Model::new()?;
    let start = parameters.iter().map(|parameter| floats(parameter.as_tensor())).collect::<Result<Vec<_>, _>>()?;
    let over = |ranks, staleness| {
        let options = Options::default();
        anyhow::Ok(World::Threads(ranks).run_with(options, |world| {
            train(world, &start, staleness).map_err(|error| error.to_string())
        })?)
    };
    let (one, many) = (over(1, 0)?, over(RANKS, 0)?);
    let (losses, weights) = &one[0];
    println!("step   one rank   {RANKS} ranks");
    for step in (0..STEPS).step_by(20).chain([STEPS - 1]) {
        println!("{:>4} {:>10.6} {:>9.6}", step + 1, losses[step], many[0].0[step]);
    }
    for (rank, (of_rank, weights_of_rank)) in many.iter().enumerate() {
        ensure!(weights_of_rank == &many[0].1, "the weights of rank {rank} are not those of rank 0");
        let apart = losses.iter().zip(of_rank).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        ensure!(apart < 1e-4, "rank {rank}'s losses are {apart} from one rank's");
    }
    let apart =
        weights.iter().flatten().zip(many[0].1.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    ensure!(apart < 1e-2, "weights are {apart} from one rank's");
    ensure!(losses[STEPS - 1] < losses[0] * 0.8, "the model did not learn: {} to {}", losses[0], losses[STEPS - 1]);
    println!("equal: {RANKS} ranks have one rank's losses, and weights within {apart:.1e}");

    println!("\nstaleness   mean loss of the last ten steps");
    for staleness in [0, 1, 2, 4, 8] {
        let asynchronous = over(RANKS, staleness)?;
        println!("{staleness:>9} {:>12.4}", asynchronous[0].0[STEPS - 10..].iter().sum::<f64>() / 10.0);
    }
    Ok(())
}
