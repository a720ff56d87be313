//! What a run would do, without doing it: one step of one rank on the meta device with recording communicators. The code that runs
//! is the code that will train.

use crate::{Plan, ScheduleSpec, TrainError, Trainer, Watch};
use meshwork_core::{Axis, Mesh, Rank, Record};
use meshwork_nn::{Batch, Model};
use meshwork_pipeline::{ActionKind, Generator, Phase};
use meshwork_tensor::Device;
use meshwork_tensor::meta::Meta;
use std::sync::Arc;

/// What one rank holds, computes and communicates in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Elements of the parameters on this rank, padding not counted.
    pub parameters: usize,
    /// Bytes of weights, gradients and optimizer states.
    pub model_bytes: u64,
    /// Most bytes alive at once: those and the activations.
    pub peak_bytes: u64,
    /// Floating point operations of matrix products and attention.
    pub flops: u64,
    /// Every communication, in order.
    pub records: Vec<Record>,
}

impl Prediction {
    /// Logical bytes per step on the groups of that name.
    pub fn bytes_on(&self, group: &str) -> f64 {
        self.records.iter().filter(|record| record.group == group).fold(0.0, |sum, record| sum + record.bytes())
    }
}

/// Predicts a step of the rank `world_rank` of the plan's mesh.
///
/// # Errors
/// A plan that does not fit, and a program that is wrongly distributed.
pub fn predict(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<Prediction, TrainError> {
    let device = blank_device(plan);
    let mut trainer = trainer(model, plan, world_rank, device.clone())?;
    let parameters = trainer.local_elements();
    let model_bytes = device.meter().live_bytes();
    // A step as it is when those that overlap with it are under way.
    let batch = blank_batch(&trainer);
    let mut reports = Vec::new();
    let mut flops = 0;
    for _ in 0..=trainer.steps_ahead() {
        let before = device.meter().total_flops();
        reports.extend(trainer.start_step(&batch, || false, |_| {})?);
        flops = device.meter().total_flops() - before;
    }
    reports.extend(trainer.flush(|_| {})?);
    let records = reports.pop().map_or(Vec::new(), |report| report.records);
    Ok(Prediction { parameters, model_bytes, peak_bytes: device.meter().peak_bytes(), flops, records })
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

/// The plan of one rank on which every layer of a model is a stage of its own, behind a first stage that has what the model binds to
/// its beginning and before a last one that has its end and the loss. Micro-batches have `samples` samples, and a step has one.
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
        ..plan.clone()
    })
}

/// What the parts of a model cost: floating point operations of matrix products and attention, forward and backward of one
/// sample, from the model's sizes alone. First what is bound to the beginning (an embedding), then each layer, then the end (head and
/// loss).
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

/// What stands in for the device that will train.
fn blank_device(plan: &Plan) -> Arc<dyn Device> {
    Arc::new(Meta::new(plan.precision))
}

/// A rank's samples, all zero.
fn blank_batch(trainer: &Trainer) -> Batch {
    Batch::blank(&trainer.plan().model().fields(), trainer.samples().len())
}
