//! Trains two steps as a configuration says and compares them with those of one rank.

use crate::configurations::draw::Case;
use meshwork_core::Rank;
use meshwork_core::World;
use meshwork_core::comm::thread::Options;
use meshwork_cpu::Cpu;
use meshwork_engine::{ScheduleSpec, StepReport, dry_run};
use meshwork_pipeline::Generator;
use meshwork_train::config::{Args, Config, Dtype, MatmulDtype, SavedDtype};
use meshwork_train::{Data, StartWeights, TrainError, Trainer, load};
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Steps to compare: the second sees the update of the first.
const STEPS: u64 = 2;

/// What the ranks report.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Losses of what was evaluated after the last step, which see its update.
    after: Vec<f64>,
}

/// What a configuration must have in common with one rank.
pub enum Same {
    /// Every bit.
    Bits,
    /// Numbers up to rounding.
    Numbers,
    /// The same in the first step, before an update that depends on the schedule.
    FirstStep,
    /// Nothing: the first step has several such updates.
    Nothing,
}

/// Everything that says how the work is split, and what is measured, left out.
const ALONE: [(&str, Option<&str>); 29] = [
    ("parallelism.ep", None),
    ("parallelism.expert_tensor_parallel", None),
    ("parallelism.dp", None),
    ("parallelism.tp", None),
    ("parallelism.pp", None),
    ("parallelism.cp", None),
    ("parallelism.context_parallel_order", None),
    ("parallelism.ring_degree", None),
    ("parallelism.sequence_parallel", None),
    ("pipeline.schedule", Some("gpipe")),
    ("pipeline.schedule_file", None),
    ("pipeline.virtual_stages", None),
    ("pipeline.num_microbatches", Some("1")),
    ("pipeline.partition", None),
    ("pipeline.replication", None),
    ("pipeline.vertical_sync", None),
    ("pipeline.scatter_gather", None),
    ("training.micro_batch_size", None),
    ("training.verify", None),
    ("training.replay_every", None),
    ("training.replay_mesh", None),
    ("parallelism.zero_stage", None),
    ("parallelism.zero_group", None),
    ("memory.recompute", None),
    ("memory.offload", None),
    ("memory.offload_dir", None),
    ("metrics.profile", None),
    // It would go on from what the mesh has saved.
    ("checkpoint.resume", None),
    // An export replaces no other without being asked.
    ("checkpoint.export", None),
];

/// The same on one rank, as it is trained.
pub fn alone(case: &Case, config: &Config) -> Result<(Config, Data), String> {
    // In canonical numerics one rank sums over the parts of a sequence that any cp has.
    alone_with(case, config, config.training.numerics == "canonical")
}

/// The same on one rank, with the operations of attention over cp or without them.
pub fn alone_with(case: &Case, config: &Config, method: bool) -> Result<(Config, Data), String> {
    const METHOD: &str = "parallelism.context_parallel_method";
    let mut alone = case.with(&ALONE);
    // In canonical numerics one rank loses what every mesh does.
    if config.training.numerics != "canonical" {
        alone.keys.retain(|key, _| !key.starts_with("compress."));
    }
    alone.keys.remove(METHOD);
    if method {
        alone.keys.insert(METHOD.to_owned(), config.parallelism.context_parallel_method.name().to_owned());
    }
    load(&Args::parse(alone.flags())).map_err(|error| format!("refused on one rank:\n{error}"))
}

/// Trains a configuration that was accepted.
pub fn run(case: &Case, config: &Config, data: Data) -> Result<(), String> {
    if config.training.steps == 0 {
        let predicted = config.plan().and_then(|plan| dry_run::predict(&config.model(), &plan, 0));
        return predicted.map(drop).map_err(|error| format!("not predicted: {error}"));
    }
    let (alone, data_alone) = alone(case, config)?;
    if config.metrics.profile {
        let run = |config: &Config, data: &Data| {
            let outcome = meshwork_train::train(config, data, None, &AtomicBool::new(false));
            outcome.map_err(|error| error.to_string())
        };
        let (outcome, wanted) = (run(config, &data)?, run(&alone, &data_alone)?);
        if outcome.steps != config.training.steps || outcome.profile.is_none() {
            return Err(format!("{} steps of {}, or no profile", outcome.steps, config.training.steps));
        }
        let losses = |loss: Option<f64>| Numbers { losses: loss.into_iter().collect(), norms: vec![], after: vec![] };
        let same = match same(config) {
            Same::FirstStep => Same::Nothing, // the last step is reported
            same => same,
        };
        return compare(&losses(outcome.loss), &losses(wanted.loss), &same, rounds(config));
    }
    let got = train(case, config, data)?;
    let wanted = train(case, &alone, data_alone).map_err(|error| format!("on one rank: {error}"))?;
    compare(&got, &wanted, &same(config), rounds(config))
}

/// Whether something is rounded to fewer bits: an error in the last bit may then be one of these.
pub fn rounds(config: &Config) -> bool {
    config.training.dtype != Dtype::F32
        || config.training.matmul_dtype != MatmulDtype::F32
        || config.memory.saved_dtype != SavedDtype::F32
}

pub fn same(config: &Config) -> Same {
    let lossy = config.plan().is_ok_and(|plan| plan.compress.is_some());
    match config.pipeline.spec() {
        _ if lossy && config.training.numerics != "canonical" => Same::Nothing,
        Ok(ScheduleSpec::Named { generator: Generator::PipeDream2Bw, .. }) => Same::FirstStep,
        Ok(ScheduleSpec::Named { generator: Generator::PipeDream, .. }) => match config.pipeline.num_microbatches {
            1 => Same::FirstStep,
            _ => Same::Nothing,
        },
        _ if config.training.numerics == "canonical" => Same::Bits,
        _ => Same::Numbers,
    }
}

/// The first targets of a sample masked, a number of them that differs from sample to sample.
pub fn masked(case: &Case, data: Data, seq_len: usize) -> Data {
    // Of examples, prompts are masked already.
    match case.get("training.objective") {
        None | Some("pretrain") => data.masked(|at| case.masked && at % seq_len < at / seq_len % 5),
        Some(_) => data,
    }
}

/// Trains on a mesh of threads; every rank must report the same.
pub fn train(case: &Case, config: &Config, data: Data) -> Result<Numbers, String> {
    let mesh = config.mesh().map_err(|error| error.to_string())?;
    let seq_len = config.model.seq_len;
    let data = masked(case, data, seq_len);
    let options = Options { timeout: config.comm.timeout() };
    let ranks = World::threads(&mesh).run_with(options, |world| {
        let rank = Arc::new(Rank::new(&mesh, world.communicator().clone())?);
        let device = Arc::new(Cpu::new(config.training.matmul_dtype.precision()));
        let mut trainer = Trainer::new(config.model(), &config.plan()?, rank, device)?;
        if let Some(start) = StartWeights::from_config(config)? {
            trainer.load_weights(|spec, slice| start.read(spec, slice))?;
        }
        Ok::<_, Box<dyn Error + Send + Sync>>(numbers(trainer, config, &data)?)
    });
    let ranks = ranks.map_err(|error| error.to_string())?;
    match ranks.iter().position(|rank| bits(rank) != bits(&ranks[0])) {
        Some(rank) => Err(format!("rank {rank} reports {:?}, rank 0 {:?}", ranks[rank], ranks[0])),
        None => Ok(ranks[0].clone()),
    }
}

fn numbers(mut trainer: Trainer, config: &Config, data: &Data) -> Result<Numbers, TrainError> {
    let (global, rows) = (config.training.global_batch_size, trainer.samples());
    let mut reports = Vec::new();
    for step in 0..STEPS.min(config.training.steps) {
        reports.extend(trainer.start_step(&data.batch(step, global, rows.clone())?, || false, |_| ())?);
    }
    reports.extend(trainer.flush(|_| ())?);
    let mut after = vec![trainer.evaluate([data.batch(0, global, rows.clone())?])?.loss];
    if config.validation.every > 0 {
        let batches = 0..data.validation_batches(config.validation.steps, global);
        after.push(
            trainer.evaluate(batches.map(|at| data.validation_batch(at, global, rows.clone()).expect("data")))?.loss,
        );
    }
    // A step that is skipped, because its gradients overflow, has no norm.
    let norm = |report: &StepReport| if report.skipped { 0.0 } else { report.grad_norm };
    let (losses, norms) = reports.iter().map(|report| (report.loss, norm(report))).unzip();
    Ok(Numbers { losses, norms, after })
}

fn bits(numbers: &Numbers) -> Vec<u64> {
    let Numbers { losses, norms, after } = numbers;
    losses.iter().chain(norms).chain(after).map(|number| number.to_bits()).collect()
}

pub fn compare(got: &Numbers, wanted: &Numbers, same: &Same, rounds: bool) -> Result<(), String> {
    if bits(got).len() != bits(wanted).len() || got.losses.is_empty() {
        return Err(format!("{got:?}, one rank {wanted:?}"));
    }
    let first = |numbers: &Numbers| Numbers {
        losses: numbers.losses[..1].to_vec(),
        norms: numbers.norms[..numbers.norms.len().min(1)].to_vec(),
        after: vec![],
    };
    let (got, wanted) = match same {
        Same::Bits | Same::Numbers => (got.clone(), wanted.clone()),
        Same::FirstStep => (first(got), first(wanted)),
        Same::Nothing => {
            let finite = got.losses.iter().chain(&got.norms).chain(&got.after).all(|number| number.is_finite());
            return if finite { Ok(()) } else { Err(format!("not finite: {got:?}")) };
        }
    };
    if matches!(same, Same::Bits) && bits(&got) != bits(&wanted) {
        return Err(format!("other bits: {got:?}, one rank {wanted:?}"));
    }
    // Far above the rounding of these sizes, far below the effect of a term too many or too few.
    let (of_loss, of_norm) = if rounds { (2e-3, 2e-2) } else { (2e-5, 1e-3) };
    let near =
        |got: &[f64], wanted: &[f64], by: f64| got.iter().zip(wanted).all(|(a, b)| (a - b).abs() <= by * b.abs());
    let losses = near(&got.losses, &wanted.losses, of_loss) && near(&got.after, &wanted.after, of_loss);
    match losses && near(&got.norms, &wanted.norms, of_norm) {
        true => Ok(()),
        false => Err(format!("other numbers: {got:?}, one rank {wanted:?}")),
    }
}
