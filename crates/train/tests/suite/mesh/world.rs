//! Trainers on every rank of a mesh, and the whole model, assembled from the parts of all ranks.

use crate::mesh::cases::Case;
use meshwork_core::RunError;
use meshwork_core::comm::thread::Options;
use meshwork_core::{Coords, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_engine::Vector;
use meshwork_tensor::Device;
use meshwork_train::config::Config;
use meshwork_train::{Data, StepReport, TrainError, Trainer};
use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A device of one rank of a configuration.
pub fn cpu(config: &Config) -> Arc<dyn Device> {
    Arc::new(Cpu::new(config.training.matmul_dtype.precision()))
}

/// Runs `body` on every rank of the configuration's mesh, each a thread with a trainer on the device that `device`
/// makes for it.
pub fn try_on_mesh<T: Send>(
    config: &Config,
    options: Options,
    device: impl Fn(Coords) -> Arc<dyn Device> + Sync,
    body: impl Fn(Trainer) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, RunError> {
    let mesh = config.mesh().unwrap();
    World::threads(&mesh).run_with(options, |world| {
        let rank = Arc::new(Rank::new(&mesh, world.communicator().clone())?);
        let device = device(rank.coords());
        body(Trainer::new(config.model(), &config.plan()?, rank, device)?)
    })
}

/// The same on the devices of the configuration; a failure panics.
#[track_caller]
pub fn on_mesh<T: Send>(config: &Config, body: impl Fn(Trainer) -> Result<T, TrainError> + Sync) -> Vec<T> {
    let done = try_on_mesh(config, Options::default(), |_| cpu(config), body);
    done.unwrap_or_else(|error| panic!("{error}"))
}

/// Trains one step on this rank's rows of the data's batch.
pub fn train(trainer: &mut Trainer, data: &Data, config: &Config) -> Result<StepReport, TrainError> {
    let batch = data.batch(trainer.steps_done(), config.training.global_batch_size, trainer.samples())?;
    trainer.step(&batch)
}

/// One rank's part of a vector of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Runs of elements: (start in the whole, range here).
    pub runs: Vec<(usize, Range<usize>)>,
    /// The elements, padding included.
    pub values: Vec<f32>,
}

impl Deref for Part {
    type Target = Vec<f32>;

    fn deref(&self) -> &Vec<f32> {
        &self.values
    }
}

/// One rank's part of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The parameter.
    pub name: String,
    /// Elements of the whole parameter.
    pub whole: usize,
    /// Whether it is not trained: then it has neither gradient nor states.
    pub frozen: bool,
    /// The weights.
    pub weights: Part,
    /// The gradient of the last step.
    pub gradient: Part,
    /// The optimizer's states.
    pub states: Vec<Part>,
}

/// A rank's part of every parameter of its stages.
pub fn pieces(trainer: &Trainer) -> Result<Vec<Piece>, TrainError> {
    let params = trainer.params();
    let declarations = params.declarations();
    let piece = |id| {
        let spec = declarations.spec(id);
        let part = |vector, values| {
            let (mut runs, mut before) = (Vec::new(), 0);
            for slice in trainer.slices(id, vector) {
                slice.for_each_run(spec.dims, |start, range| {
                    runs.push((start as usize, before + range.start..before + range.end));
                });
                before += slice.stored.count();
            }
            Part { runs, values }
        };
        let states = trainer.optimizer_states(id)?;
        Ok(Piece {
            name: spec.name.clone(),
            whole: spec.global_elements(),
            frozen: spec.group.frozen,
            weights: part(Vector::Weights, params.read(id)?),
            gradient: part(Vector::Gradients, trainer.gradient(id)?),
            states: states.into_iter().map(|state| part(Vector::States, state)).collect(),
        })
    };
    declarations.ids().map(piece).collect()
}

/// Assembles whole parameters from the pieces of all ranks: their weights, or their gradients.
///
/// Ranks that hold the same element must hold the same bits, padding must be zero, and no element may be missing.
pub fn assemble(case: &str, ranks: &[Vec<Piece>], values: impl Fn(&Piece) -> &Part) -> BTreeMap<String, Vec<f32>> {
    let mut wholes: BTreeMap<String, Vec<Option<f32>>> = BTreeMap::new();
    for (rank, piece) in ranks.iter().enumerate().flat_map(|(rank, pieces)| pieces.iter().map(move |it| (rank, it))) {
        let (Piece { name, whole, .. }, Part { runs, values }) = (piece, values(piece));
        let whole = wholes.entry(name.clone()).or_insert_with(|| vec![None; *whole]);
        let mut padding = values.clone();
        for (start, range) in runs {
            for (place, value) in padding[range.clone()].iter_mut().enumerate() {
                let (at, here) = (start + place, std::mem::take(value));
                let there = *whole[at].get_or_insert(here);
                assert!(
                    there.to_bits() == here.to_bits(),
                    "{case}: element {at} of {name} is {here} on rank {rank}, {there} on a rank before it"
                );
            }
        }
        assert!(padding.iter().all(|&value| value == 0.0), "{case}: padding of {name} on rank {rank} is not zero");
    }
    let complete = |(name, whole): (String, Vec<Option<f32>>)| {
        let held: Vec<f32> = whole.iter().flatten().copied().collect();
        assert_eq!(held.len(), whole.len(), "{case}: elements of {name} that some rank holds");
        (name, held)
    };
    wholes.into_iter().map(complete).collect()
}

/// The results of one step on a whole mesh.
#[derive(Debug)]
pub struct Stepped {
    /// Per rank, the report of the step.
    pub reports: Vec<StepReport>,
    /// Per rank, its memory and computation.
    pub usage: Vec<RankUsage>,
    /// Every gradient of a parameter that is trained, whole.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// Every parameter after the step, whole.
    pub weights: BTreeMap<String, Vec<f32>>,
}

/// The memory and computation of one rank by the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankUsage {
    /// Elements of its parameters.
    pub parameters: usize,
    /// Floating point operations.
    pub flops: u64,
    /// Most bytes alive at once.
    pub peak_bytes: u64,
}

/// One step of a case.
pub fn one_step(case: &Case, more: &str) -> Stepped {
    step_of(&case.to_string(), &case.config(more), &case.model.data())
}

/// One step of a configuration.
pub fn step_of(name: &str, config: &Config, data: &Data) -> Stepped {
    step_from(name, config, data, |_| Ok(()))
}

/// The same of a trainer that `begin` has given other weights.
pub fn step_from(
    name: &str,
    config: &Config,
    data: &Data,
    begin: impl Fn(&mut Trainer) -> Result<(), TrainError> + Sync,
) -> Stepped {
    let ranks = on_mesh(config, |mut trainer| {
        begin(&mut trainer)?;
        let report = train(&mut trainer, data, config)?;
        let meter = trainer.device().meter();
        let usage = RankUsage {
            parameters: trainer.local_elements(),
            flops: meter.total_flops(),
            peak_bytes: meter.peak_bytes(),
        };
        Ok((report, usage, pieces(&trainer)?))
    });
    let (mut reports, mut usage, mut held) = (Vec::new(), Vec::new(), Vec::new());
    for rank in ranks {
        reports.push(rank.0);
        usage.push(rank.1);
        held.push(rank.2);
    }
    let weights = assemble(name, &held, |piece| &piece.weights);
    held.iter_mut().for_each(|pieces| pieces.retain(|piece| !piece.frozen));
    let gradients = assemble(name, &held, |piece| &piece.gradient);
    Stepped { reports, usage, gradients, weights }
}

/// Compares two reports of one rank's step, bit by bit except for the sign of zeros.
#[track_caller]
pub fn assert_same_report(what: &str, got: &StepReport, wanted: &StepReport) {
    for (call, (got, wanted)) in got.records.iter().zip(&wanted.records).enumerate() {
        assert_eq!(got, wanted, "{what}: call {call}");
    }
    let short = |report: &StepReport| StepReport { records: Vec::new(), offload: None, ..report.clone() };
    assert_eq!(short(got), short(wanted), "{what}: report");
    assert_eq!(got.records.len(), wanted.records.len(), "{what}: number of calls");
}

/// Compares the parameters of two trainers of one rank, bit by bit.
#[track_caller]
pub fn assert_same_pieces(what: &str, got: &[Piece], wanted: &[Piece]) {
    assert_eq!(got.len(), wanted.len(), "{what}: number of parameters");
    for (got, wanted) in got.iter().zip(wanted) {
        let name = &wanted.name;
        assert_eq!((&got.name, &got.weights.runs), (name, &wanted.weights.runs), "{what}: parameters");
        for (kind, got, wanted) in
            [("gradient", &got.gradient, &wanted.gradient), ("weights", &got.weights, &wanted.weights)]
        {
            let differs = got.iter().zip(wanted.iter()).position(|(got, wanted)| got.to_bits() != wanted.to_bits());
            let pair = differs.map(|at| (at, got[at], wanted[at]));
            assert!(
                pair.is_none(),
                "{what}: other bits in the {kind} of {name}, first (element, here, there): {pair:?}"
            );
        }
    }
}

/// Trains a case three steps, twice, and compares every rank's reports and parameters bit by bit.
#[track_caller]
pub fn assert_same_bits_on_every_run(case: Case, config: &Config) {
    let data = case.model.data();
    let run = || {
        on_mesh(config, |mut trainer| {
            let reports = (0..3).map(|_| train(&mut trainer, &data, config)).collect::<Result<Vec<_>, _>>()?;
            Ok((reports, pieces(&trainer)?))
        })
    };
    for (rank, (got, wanted)) in run().iter().zip(run()).enumerate() {
        let what = format!("{case}: rank {rank}");
        got.0.iter().zip(&wanted.0).for_each(|(got, wanted)| assert_same_report(&what, got, wanted));
        assert_same_pieces(&what, &got.1, &wanted.1);
    }
}
