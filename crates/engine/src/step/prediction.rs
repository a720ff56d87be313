//! Memory, work and communication of a step of one rank, found by running it on a device without values.

use super::prelude::*;
use crate::offload::Traffic;
use crate::{Compress, ScheduleSpec};
use meshwork_pipeline::Shape;
use meshwork_tensor::MemoryUse;
use meshwork_tensor::meta::Meta;

/// The memory, computation and communication of one rank in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Elements of the parameters on this rank, padding not counted.
    pub parameters: usize,
    /// Bytes of weights, gradients and optimizer states.
    pub model_bytes: u64,
    /// The use of memory at the moment when most bytes are alive.
    pub memory: MemoryUse,
    /// Floating point operations of matrix products and attention.
    pub flops: u64,
    /// Every communication, in order; in a run that compresses, of a step that compresses.
    pub records: Vec<Record>,
    /// Every communication of the first step of such a run, where it does not compress yet: before `start_step`, or of
    /// AQ-SGD's samples that are all new.
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
pub fn predict(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<Prediction> {
    predict_on(blank_device(plan), model, plan, world_rank)
}

/// The memory of the same step if the tokens of all ranks choose the experts of this one. [`predict`] assumes an even
/// load; the memory of both is the same where the rows of a rank's experts do not depend on the data.
///
/// # Errors
/// As [`predict`].
pub fn crowded(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<MemoryUse> {
    let device = Arc::new(Meta::new(plan.precision).taking_all());
    Ok(predict_on(device, model, plan, world_rank)?.memory)
}

/// The [peak](Prediction::peak_bytes) of [`predict`], from a step of as few micro-batches as need be: in the middle of
/// a long step a rank holds the same again and again.
///
/// # Errors
/// As [`predict`].
pub fn peak_bytes(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<u64> {
    let (micros, few) = (plan.num_microbatches()?, few_micros(plan)?);
    // A reference takes a pass over all samples before the step.
    if few < micros && model.reference().is_none() {
        let samples = plan.global_batch_size;
        let short = Plan { global_batch_size: samples / micros * few, num_microbatches: Some(few), ..plan.clone() };
        let mut trainer = trainer(model, &short, world_rank, blank_device(plan))?;
        // Each micro-batch leaves notes of statistics until the end of the step.
        if trainer.cut.layout.declarations.statistics().is_empty() {
            // The losses of all samples of the long step have room on the device.
            trainer.plan.global_batch_size = samples;
            return Ok(measured(trainer, false)?.peak_bytes());
        }
    }
    Ok(predict(model, plan, world_rank)?.peak_bytes())
}

/// The fewest micro-batches of a step in which ranks hold what they hold in a step of this plan. All of them where
/// this depends on their number: sums in the order of a tree, activations of samples, gradients that are parked.
fn few_micros(plan: &Plan) -> Result<usize> {
    let micros = plan.num_microbatches()?;
    let parks = plan.offload.as_ref().is_some_and(|of| of.gradients || of.activations || of.samples);
    Ok(match plan.schedule {
        ScheduleSpec::Named { generator, virtual_stages, .. }
            if plan.blocks().is_none() && !plan.compress.is_some() && plan.compress.aqsgd.is_none() && !parks =>
        {
            let shape = generator.shape(plan.mesh.degree(Axis::Pp), micros);
            generator.few_micros(Shape { virtual_stages: virtual_stages.unwrap_or(shape.virtual_stages), ..shape })
        }
        _ => micros,
    })
}

fn predict_on(device: Arc<dyn Device>, model: &Arc<dyn Model>, plan: &Plan, world_rank: usize) -> Result<Prediction> {
    // Memory is the most of both: a step that does not compress yet, and a step that does.
    let begins_later = plan.compress.is_some() && plan.compress.start_step > 1;
    let start_step = plan.compress.start_step.min(2);
    let plan = &Plan { compress: Compress { start_step, ..plan.compress }, ..plan.clone() };
    measured(trainer(model, plan, world_rank, device)?, begins_later)
}

/// Runs steps of a trainer on a device without values, and measures the last one.
fn measured(mut trainer: Trainer, begins_later: bool) -> Result<Prediction> {
    let device = trainer.device.clone();
    let parameters = trainer.local_elements();
    let model_bytes = device.meter().live_bytes();
    // Measure the last of these steps: the steps that overlap with it are then under way.
    let batch = blank_batch(&trainer);
    let mut reports = Vec::new();
    let (mut flops, mut moved) = (0, Traffic::default());
    // With AQ-SGD the step in which samples are new takes the most memory, and a later step says what is sent.
    let has_new = trainer.plan.compress.aqsgd.is_some();
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

pub(crate) fn trainer(
    model: &Arc<dyn Model>,
    plan: &Plan,
    world_rank: usize,
    device: Arc<dyn Device>,
) -> Result<Trainer> {
    Trainer::new(model.clone(), plan, Arc::new(Rank::recording(&plan.mesh, world_rank)?), device)
}

/// The meta device that replaces the training device.
pub(crate) fn blank_device(plan: &Plan) -> Arc<dyn Device> {
    Arc::new(Meta::new(plan.precision))
}

/// A rank's samples, all zero.
pub(crate) fn blank_batch(trainer: &Trainer) -> Batch {
    Batch::blank(&trainer.plan().model().fields(), trainer.samples().len())
}
