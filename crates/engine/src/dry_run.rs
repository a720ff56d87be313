//! Dry runs: one step of one rank on the meta device with recording communicators. A dry run executes the same code as
//! training.

use crate::offload::Traffic;
use crate::{Compress, Plan, ScheduleSpec, TrainError, Trainer, Watch, Zero};
use meshwork_core::profile::{self, Recorder};
use meshwork_core::{Axis, Mesh, Rank, Record};
use meshwork_nn::{Batch, Model};
use meshwork_pipeline::{ActionKind, Event, Generator, Phase};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::profiled::Profiled;
use meshwork_tensor::{Device, MemoryUse};
use std::sync::Arc;

/// What one rank holds, computes and communicates in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Elements of the parameters on this rank, padding not counted.
    pub parameters: usize,
    /// Bytes of weights, gradients and optimizer states.
    pub model_bytes: u64,
    /// What holds memory at the moment when most bytes are alive.
    pub memory: MemoryUse,
    /// Floating point operations of matrix products and attention.
    pub flops: u64,
    /// Every communication, in order; in a run that compresses, that of a step that does.
    pub records: Vec<Record>,
    /// That of the first step of such a run, where it does not compress yet: before `start_step`, or of AQ-SGD's
    /// samples that are all new.
    pub exact: Option<Vec<Record>>,
    /// Bytes that the offload of a step reads and writes, and the most room that it takes.
    pub offloaded: Traffic,
}

impl Prediction {
    /// Most bytes alive at once: the model's bytes and the activations.
    pub fn peak_bytes(&self) -> u64 {
        self.memory.total()
    }

    /// Logical bytes per step on the groups of that name.
    pub fn bytes_on(&self, group: &str) -> f64 {
        bytes_on(&self.records, group)
    }
}

/// Logical bytes of some communication on the groups of that name.
pub fn bytes_on(records: &[Record], group: &str) -> f64 {
    records.iter().filter(|record| record.group == group).fold(0.0, |sum, record| sum + record.bytes())
}

/// Predicts a step of the rank `world_rank` of the plan's mesh.
///
/// # Errors
/// A plan that does not fit, and a program that is wrongly distributed.
pub fn predict(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<Prediction, TrainError> {
    // Memory is that of both: a step which does not compress yet, and one that does.
    let begins_later = plan.compress.is_some() && plan.compress.start_step > 1;
    let start_step = plan.compress.start_step.min(2);
    let plan = &Plan { compress: Compress { start_step, ..plan.compress }, ..plan.clone() };
    let device = blank_device(plan);
    let mut trainer = trainer(model, plan, world_rank, device.clone())?;
    let parameters = trainer.local_elements();
    let model_bytes = device.meter().live_bytes();
    // Measure the last of these steps: the steps that overlap with it are then under way.
    let batch = blank_batch(&trainer);
    let mut reports = Vec::new();
    let (mut flops, mut moved) = (0, Traffic::default());
    // With AQ-SGD, that in which samples are new takes the most memory, and a later one says what is sent.
    let has_new = plan.compress.aqsgd.is_some();
    let before = trainer.steps_ahead() + usize::from(has_new) + usize::from(begins_later);
    for step in 0..=before {
        if step < before {
            trainer.forget_samples(); // in all steps but the last they are new
        }
        let before = device.meter().total_flops();
        moved = trainer.offloaded();
        reports.extend(trainer.start_step(&batch, || false, |_| {})?);
        flops = device.meter().total_flops() - before;
    }
    reports.extend(trainer.flush(|_| {})?);
    let records = reports.pop().map_or(Vec::new(), |report| report.records);
    let exact = reports.into_iter().next().map(|report| report.records).filter(|_| has_new || begins_later);
    let offloaded = trainer.offloaded().since(moved);
    Ok(Prediction { parameters, model_bytes, memory: device.meter().peak(), flops, records, exact, offloaded })
}

/// Runs a step of the rank `world_rank` on a device of its own with recording communicators, for the errors of a device
/// without contents.
///
/// # Errors
/// As [`predict`], and what the device lacks: [`TrainError::lack`] tells that from the rest, which the zeros of such a
/// device can cause.
pub fn attempt(
    model: &Arc<dyn Model>,
    plan: &Plan,
    world_rank: usize,
    device: Arc<dyn Device>,
) -> Result<(), TrainError> {
    let mut trainer = trainer(model, plan, world_rank, device)?;
    let batch = blank_batch(&trainer);
    trainer.step(&batch)?;
    Ok(())
}

/// Shows every value of a step of the rank `world_rank` to `watch`: shapes and types, without contents.
///
/// # Errors
/// As [`predict`].
pub fn watch(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize, watch: Arc<dyn Watch>) -> Result<(), TrainError> {
    let mut trainer = trainer(model, plan, world_rank, blank_device(plan))?;
    trainer.watch(watch);
    let batch = blank_batch(&trainer);
    trainer.step(&batch)?;
    Ok(())
}

/// Runs a step of the rank `world_rank` whose operations and collectives `recorder` keeps, with their FLOPs and bytes:
/// what a step is made of, without a clock. `observe` sees every action of the pipeline start and end, and may record
/// frames.
///
/// # Errors
/// As [`predict`].
pub fn observe(
    model: &Arc<dyn Model>,
    plan: &Plan,
    world_rank: usize,
    recorder: &Recorder,
    observe: impl FnMut(Event),
) -> Result<(), TrainError> {
    let alone = Rank::recording(&plan.mesh, world_rank)?;
    let world = profile::communicator(alone.world().communicator().clone(), recorder.clone());
    let rank = Arc::new(Rank::new(&plan.mesh, world)?);
    let device = Profiled::device(blank_device(plan), recorder.clone());
    let mut trainer = Trainer::new(model.clone(), plan, rank, device)?;
    let batch = blank_batch(&trainer);
    recorder.resume();
    let done = trainer.observed_step(&batch, observe);
    recorder.pause();
    done.map(drop)
}

/// A plan for one rank in which every layer of a model is a stage. The first stage has only the beginning of the model
/// (such as an embedding), the last one only its end and the loss. A step has one micro-batch of `samples` samples.
pub fn one_layer_a_stage(model: &dyn Model, plan: &Plan, samples: usize) -> Result<Plan, TrainError> {
    let mut partition = vec![1; model.num_layers() + 2];
    (partition[0], partition[model.num_layers() + 1]) = (0, 0);
    Ok(Plan {
        mesh: Mesh::new([(Axis::Dp, 1), (Axis::Tp, 1), (Axis::Pp, 1)])?,
        schedule: ScheduleSpec::Named {
            generator: Generator::BreadthFirst,
            virtual_stages: Some(partition.len()),
            vertical_sync: false,
        },
        partition,
        global_batch_size: samples,
        num_microbatches: Some(1),
        zero: Zero::default(), // one rank has nobody to share with
        offload: None,
        compress: Compress::default(),
        virtual_cuts: Vec::new(),
        ..plan.clone()
    })
}

/// The cost of each part of a model: floating point operations of matrix products and attention, forward and backward
/// of one sample. It depends only on the sizes of the model. The parts are the beginning (an embedding), each layer,
/// and the end (head and loss).
///
/// # Errors
/// As [`predict`].
pub fn costs(model: &Arc<dyn Model>, plan: &Plan) -> Result<Vec<u64>, TrainError> {
    let plan = one_layer_a_stage(&**model, plan, 1)?;
    let device = blank_device(&plan);
    let mut trainer = trainer(model, &plan, 0, device.clone())?;
    let batch = blank_batch(&trainer);
    let (mut costs, mut before) = (vec![0; plan.partition.len()], 0);
    trainer.observed_step(&batch, |event| {
        let done = device.meter().total_flops();
        match (event.phase, event.action.kind) {
            (Phase::Started, _) => before = done,
            (Phase::Finished, ActionKind::Forward | ActionKind::Backward) => costs[event.action.stage] += done - before,
            _ => {}
        }
    })?;
    Ok(costs)
}

fn trainer(
    model: &Arc<dyn Model>,
    plan: &Plan,
    world_rank: usize,
    device: Arc<dyn Device>,
) -> Result<Trainer, TrainError> {
    Trainer::new(model.clone(), plan, Arc::new(Rank::recording(&plan.mesh, world_rank)?), device)
}

/// The meta device that replaces the training device.
fn blank_device(plan: &Plan) -> Arc<dyn Device> {
    Arc::new(Meta::new(plan.precision))
}

/// A rank's samples, all zero.
fn blank_batch(trainer: &Trainer) -> Batch {
    Batch::blank(&trainer.plan().model().fields(), trainer.samples().len())
}
