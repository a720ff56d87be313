//! Trains on the images, and scores the held-out ones.

use crate::show;
use meshwork::core::{Axis, Rank, RunError, World};
use meshwork::cpu::Cpu;
use meshwork::engine::{Evaluation, Plan, TrainError, Trainer};
use meshwork::models::network::ACCURACY;
use meshwork::nn::Model;
use meshwork::train::data::Images;
use meshwork::train::profile::{Probe, Profile, Profiler};
use std::sync::Arc;
use std::time::Instant;

/// Steps of a profile.
const PROFILED: u64 = 3;

/// Trains for some epochs, every rank a thread, or a process where a launcher started several, and prints a line after
/// each: the loss, and the scores of the images held out. The last images of an epoch that do not fill a mini-batch are
/// left out; each epoch has another order. Returns a profile of some steps if requested.
pub fn train(
    world: &World,
    model: &Arc<dyn Model>,
    plan: &Plan,
    epochs: usize,
    profiled: bool,
    [images, held_out]: [&Images; 2],
) -> Result<Option<Profile>, RunError> {
    let (batch, dp) = (plan.global_batch_size, plan.mesh.degree(Axis::Dp));
    let steps_of_epoch = images.len() / batch;
    let steps = (epochs * steps_of_epoch) as u64;
    let profiler = profiled.then(|| match world.leads() {
        true => Profiler::new(steps, PROFILED, &*Cpu::device()),
        false => Profiler::follow(steps, PROFILED),
    });
    let started = Instant::now();
    let tracks = world.run(|world| {
        let probe = profiler.as_ref().map_or_else(Probe::off, |profiler| profiler.probe(&**world.communicator()));
        let rank = Arc::new(Rank::new(&plan.mesh, probe.communicator(world.communicator().clone()))?);
        let first = rank.coords().get(Axis::Dp) * (batch / dp);
        let own = |images: &Images| images.gather(&(first..first + batch / dp).collect::<Vec<_>>()).to_batch();
        let mut trainer = Trainer::new(model.clone(), plan, rank.clone(), probe.device(Cpu::device()))?;
        for epoch in 1..=epochs {
            let (order, mut loss, mut peak) = (images.order(plan.seed, epoch), 0.0, 0);
            for indices in order.chunks_exact(batch) {
                let own = own(&images.gather(indices))?;
                let step = trainer.steps_done() + 1;
                let report = probe.step(step, || trainer.observed_step(&own, |event| probe.observe(event)))?;
                loss += report.loss / steps_of_epoch as f64;
                peak = report.peak_bytes().into_iter().max().unwrap_or(0);
            }
            let parts = held_out.parts(batch).map(|part| own(&part)).collect::<Result<Vec<_>, _>>()?;
            let Evaluation { loss: of_held_out, metrics } = trainer.evaluate(parts)?;
            let accuracy = metrics.iter().find(|(name, _)| *name == ACCURACY).map_or(0.0, |(_, share)| 100.0 * share);
            if rank.world_rank() == 0 {
                let (memory, seconds) = (peak as f64 / f64::from(1 << 20), started.elapsed().as_secs_f64());
                _ = show(&format_args!(
                    "epoch {epoch:2} | loss {loss:.4} | held out: loss {of_held_out:.4}, accuracy {accuracy:.1}% | peak {memory:.1} MiB | {seconds:.0} s\n"
                ));
            }
        }
        Ok::<_, TrainError>(probe.tracks(&rank)?)
    })?;
    Ok(profiler.map(|profiler| profiler.profile(tracks.into_iter().flatten())))
}
