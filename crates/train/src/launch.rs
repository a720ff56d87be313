//! A whole run in one process: every rank of the mesh a thread, rank 0 the one that reports.

use crate::config::Config;
use crate::data::Data;
use crate::engine::{Blueprint, TrainError};
use crate::generate::generate;
use crate::metrics::{Event, Metrics, Start, Step};
use crate::profile::{Ceilings, Probe, Profile, layers, write_layers};
use crate::progress::Progress;
use crate::step::{StepReport, Trainer};
use meshwork_core::comm::thread::{self, Options, WorldError};
use meshwork_core::profile::Class;
use meshwork_core::{Rank, ReduceOp};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// How a run ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Steps that were trained.
    pub steps: u64,
    /// Loss of the last of them.
    pub loss: Option<f64>,
    /// Text that the trained model wrote after a few tokens of the data.
    pub sample: String,
    /// Whether the run was asked to stop before its last step.
    pub stopped: bool,
    /// Where the time of some steps went, if that was asked for.
    pub profile: Option<Profile>,
}

/// Trains as the configuration says, with every rank of its mesh as a thread of this process. `stop` ends the run after the step
/// under way. Metrics go to a file if asked; progress to standard output, whose reader ends the run by leaving.
pub fn train(
    config: &Config,
    data: &Data,
    metrics: Option<&Path>,
    stop: &AtomicBool,
) -> Result<Outcome, WorldError<TrainError>> {
    let parallelism = &config.parallelism;
    let world_size = parallelism.dp * parallelism.tp * parallelism.pp;
    let options = Options { timeout: config.comm.timeout() };
    // Measured while no rank is there to disturb it.
    let layers = match &config.metrics.layer_profile {
        Some(path) => Some((Path::new(path), layers(config, data)?)),
        None => None,
    };
    let ceilings = config.metrics.profile.then(|| Ceilings::measure(&*config.device.open(config.training.dtype)));
    let origin = ceilings.is_some().then(Instant::now);
    let ends = thread::run(world_size, options, |world| {
        if let (Some((path, layers)), 0) = (&layers, world.rank()) {
            write_layers(layers, path)?;
        }
        let blueprint = Blueprint::new(config)?;
        let probe = Probe::new(config, origin);
        let rank = Arc::new(Rank::new(blueprint.mesh(), probe.communicator(world.communicator().clone()))?);
        let outcome = run_rank(config, data, metrics, stop, rank.clone(), &probe)?;
        Ok((outcome, probe.track(&rank)))
    })?;
    let (outcomes, tracks): (Vec<Outcome>, Vec<_>) = ends.into_iter().unzip();
    let profile = ceilings.map(|ceilings| Profile { tracks: tracks.into_iter().flatten().collect(), ceilings });
    // Every rank ends with the same outcome.
    let outcome = outcomes.into_iter().next().unwrap_or_default();
    Ok(Outcome { profile, ..outcome })
}

/// One rank's run.
fn run_rank(
    config: &Config,
    data: &Data,
    metrics: Option<&Path>,
    stop: &AtomicBool,
    rank: Arc<Rank>,
    probe: &Probe,
) -> Result<Outcome, TrainError> {
    let steps = config.training.steps;
    let started = Instant::now();
    // Dropped last: that waits for whoever reads the progress, and the other ranks must not wait along.
    let mut reporter = match rank.world_rank() {
        0 => Some(Reporter::new(config, data, metrics)?),
        _ => None,
    };
    let device = probe.device(config.device.open(config.training.dtype));
    let mut trainer = Trainer::new(config, rank, device)?;
    let mut outcome = Outcome::default();
    let mut begun = 0;
    let mut began = Instant::now();
    while begun < steps && !outcome.stopped {
        let asked = || stop.load(Ordering::Relaxed);
        let validates = config.validation.every > 0 && (begun + 1).is_multiple_of(config.validation.every);
        let mut reports = probe.step(begun + 1, || {
            let read = || data.batch(begun, config.training.global_batch_size, trainer.rows());
            let batch = probe.time(Class::Data, "batch", read);
            trainer.advance(&batch, asked, |event| probe.observe(event))
        })?;
        begun += 1;
        let stopped = begun < steps && reports.iter().any(|report| report.stop);
        if validates || stopped || begun == steps {
            reports.extend(trainer.settle(|event| probe.observe(event))?);
        }
        if let (Some(reporter), false) = (&mut reporter, reports.is_empty()) {
            let seconds = std::mem::replace(&mut began, Instant::now()).elapsed().as_secs_f64() / reports.len() as f64;
            for report in &reports {
                reporter.step(config, report, seconds)?;
            }
            if reporter.progress.is_unread() {
                stop.store(true, Ordering::Relaxed);
            }
        }
        if let Some(last) = reports.last() {
            outcome = Outcome { steps: last.step, loss: Some(last.loss), stopped, ..outcome };
        }
        if validates {
            let loss = validate(config, data, &mut trainer)?;
            if let Some(reporter) = &mut reporter {
                reporter.validation(begun, loss)?;
            }
        }
    }
    if let Some(reporter) = &mut reporter {
        reporter.end(&outcome, started)?;
    }
    if outcome.steps > 0 && !outcome.stopped {
        outcome.sample = generate(config, data, &mut trainer, stop)?;
    }
    Ok(outcome)
}

/// Whether some rank has seen that the run is to stop. Collective: all of them learn it at the same place.
pub(crate) fn agree_to_stop(rank: &Rank, stop: &AtomicBool) -> Result<bool, TrainError> {
    let mut asked = [i32::from(stop.load(Ordering::Relaxed))];
    rank.world().all_reduce_slice(&mut asked, ReduceOp::Max)?;
    Ok(asked[0] > 0)
}

fn validate(config: &Config, data: &Data, trainer: &mut Trainer) -> Result<f64, TrainError> {
    let global = config.training.global_batch_size;
    let rows = trainer.rows();
    let batches = 0..data.validation_batches(config.validation.steps, global);
    trainer.evaluate(batches.map(|index| data.validation_batch(index, global, rows.clone())))
}

/// What rank 0 tells the world outside.
struct Reporter {
    metrics: Option<Metrics>,
    progress: Progress,
}

impl Reporter {
    fn new(config: &Config, data: &Data, metrics: Option<&Path>) -> Result<Self, TrainError> {
        let parameters = Blueprint::new(config)?.parameters()?;
        let parameters = parameters.iter().map(|spec| spec.global_elements() as u64).sum();
        let mut metrics = metrics.map(Metrics::create).transpose()?;
        if let Some(metrics) = &mut metrics {
            metrics.write(&Event::Start(Start::new(config, parameters, data.hash())))?;
        }
        Ok(Self { metrics, progress: Progress::new(config.training.steps) })
    }

    fn step(&mut self, config: &Config, report: &StepReport, seconds: f64) -> Result<(), TrainError> {
        let tokens = config.training.global_batch_size * config.model.seq_len;
        let step = Step {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: report.lr,
            step_ms: seconds * 1e3,
            tokens_per_s: tokens as f64 / seconds,
            comm_bytes: report.comm_bytes.iter().map(|(&name, &bytes)| (name, bytes.round() as u64)).collect(),
            peak_bytes: report.peak_bytes.clone(),
        };
        self.progress.step(&step);
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&Event::Step(step))?;
        }
        Ok(())
    }

    fn validation(&mut self, step: u64, loss: f64) -> Result<(), TrainError> {
        self.progress.validation(step, loss);
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&Event::Validation { step, loss })?;
        }
        Ok(())
    }

    /// The end of training.
    fn end(&mut self, outcome: &Outcome, started: Instant) -> Result<(), TrainError> {
        if let Some(metrics) = &mut self.metrics {
            let seconds = started.elapsed().as_secs_f64();
            metrics.write(&Event::End { steps: outcome.steps, loss: outcome.loss, seconds })?;
        }
        Ok(())
    }
}
