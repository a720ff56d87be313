//! Trains a small ResNet or VGG on the 8×8 handwritten digits of the UCI repository, through the pipeline:
//! `cargo run --release --features digits --example digits -- --model resnet --pp 2 --schedule gpipe --micro 4 --recompute`.

mod options;

use meshwork::core::comm::thread::{self, WorldError};
use meshwork::core::{Axis, Rank};
use meshwork::engine::{Evaluation, Plan, TrainError, Trainer};
use meshwork::models::network::{ACCURACY, Network};
use meshwork::tensor::cpu::Cpu;
use meshwork::train::data::Images;
use options::{Options, usage};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

fn main() -> ExitCode {
    let options = match Options::read(std::env::args_os().skip(1)) {
        Ok(None) => return show(&usage("cargo run --release --features digits --example digits --")),
        Ok(Some(options)) => options,
        Err(error) => return fail(2, &error),
    };
    // Every fifth image is held out: 359 of 1797.
    let (images, held_out) = digits().hold_out(5);
    let plan = match options.plan(images.len()) {
        Ok(plan) => plan,
        Err(error) => return fail(2, &*error),
    };
    let Options { model, schedule, pp, dp, micros, recompute, .. } = &options;
    let begun = show(&format!(
        "{model} on {} images, {} held out; {schedule}, pp={pp} dp={dp}, {micros} micro-batches{}\n",
        images.len(),
        held_out.len(),
        if *recompute { ", activations recomputed" } else { "" }
    ));
    if begun != ExitCode::SUCCESS {
        return begun;
    }
    match train(Arc::new(options.network()), &plan, options.epochs, &images, &held_out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(1, &error),
    }
}

/// Trains for some epochs, with a thread per rank, and evaluates on the held-out images after each. Images at the end
/// of an epoch that do not fill a mini-batch are left out; each epoch has a different order.
fn train(
    network: Arc<Network>,
    plan: &Plan,
    epochs: usize,
    images: &Images,
    held_out: &Images,
) -> Result<(), WorldError<TrainError>> {
    let (batch, dp, started) = (plan.global_batch_size, plan.mesh.degree(Axis::Dp), Instant::now());
    thread::run(plan.mesh.world_size(), thread::Options::default(), |world| {
        let rank = Arc::new(Rank::new(&plan.mesh, world.communicator().clone())?);
        let first = rank.coords().get(Axis::Dp) * (batch / dp);
        let own = |images: &Images| images.gather(&(first..first + batch / dp).collect::<Vec<_>>()).to_batch();
        let mut trainer = Trainer::new(network.clone(), plan, rank.clone(), Cpu::device())?;
        for epoch in 1..=epochs {
            let (order, mut loss, mut peak) = (images.order(plan.seed, epoch), 0.0, 0);
            for indices in order.chunks_exact(batch) {
                let report = trainer.step(&own(&images.gather(indices))?)?;
                loss += report.loss / (order.len() / batch) as f64;
                peak = report.peak_bytes.into_iter().max().unwrap_or(0);
            }
            let parts = held_out.parts(batch).map(|part| own(&part)).collect::<Result<Vec<_>, _>>()?;
            let Evaluation { loss: of_held_out, metrics } = trainer.evaluate(parts)?;
            let accuracy = metrics.iter().find(|(name, _)| *name == ACCURACY).map_or(0.0, |(_, share)| 100.0 * share);
            if rank.world_rank() == 0 {
                let (memory, seconds) = (peak as f64 / f64::from(1 << 20), started.elapsed().as_secs_f64());
                _ = show(&format!(
                    "epoch {epoch:2} | loss {loss:.4} | held out: loss {of_held_out:.4}, accuracy {accuracy:.1}% | peak {memory:.1} MiB | {seconds:.0} s\n"
                ));
            }
        }
        Ok(())
    })
    .map(drop)
}

/// The digits of the crate `smartcore`: 64 numbers from 0 to 16 each, scaled to 0 to 1 here.
fn digits() -> Images {
    let all = smartcore::dataset::digits::load_dataset();
    let pixels = all.data.iter().map(|pixel| pixel / 16.0).collect();
    Images::new([8, 8, 1], pixels, all.target.iter().map(|&class| class as i32).collect())
}

/// Writes to standard output. A reader that closes the pipe (`| head`) is not a failure.
fn show(text: &str) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => fail(1, &error),
        _ => ExitCode::SUCCESS,
    }
}

fn fail(code: u8, error: &dyn std::fmt::Display) -> ExitCode {
    _ = writeln!(io::stderr(), "error: {error}");
    ExitCode::from(code)
}
