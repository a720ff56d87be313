//! Dry runs: one step of one rank on the meta device with recording communicators. A dry run executes the same code as
//! training.

pub use crate::step::prediction::{Prediction, bytes_on, crowded, peak_bytes, predict};

use crate::prelude::*;
use crate::step::prediction::{blank_batch, blank_device, trainer};
use crate::{Compress, ScheduleSpec, Trainer, Watch, Zero};
use meshwork_core::profile::{self, Recorder};
use meshwork_pipeline::{ActionKind, Event, Generator, Phase};
use meshwork_tensor::profiled::Profiled;

/// Runs a step of the rank `world_rank` on a device of its own with recording communicators, for the errors of a device
/// without contents.
///
/// # Errors
/// As [`predict`], with an error for an operation that the device lacks:
/// [`TrainError::lack`](crate::TrainError::lack) recognises it. Other errors may come from the zeros of such a device.
pub fn attempt(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize, device: Arc<dyn Device>) -> Result<()> {
    let mut trainer = trainer(model, plan, world_rank, device)?;
    let batch = blank_batch(&trainer);
    trainer.step(&batch)?;
    Ok(())
}

/// Shows every value of a step of the rank `world_rank` to `watch`: shapes and types, without contents.
///
/// # Errors
/// As [`predict`].
pub fn watch(model: &Arc<dyn Model>, plan: &Plan, world_rank: usize, watch: Arc<dyn Watch>) -> Result<()> {
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
) -> Result<()> {
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
pub fn one_layer_a_stage(model: &dyn Model, plan: &Plan, samples: usize) -> Result<Plan> {
    let mut partition = vec![1; model.num_layers() + 2];
    (partition[0], partition[model.num_layers() + 1]) = (0, 0);
    Ok(Plan {
        mesh: Mesh::of_degrees([1; Axis::NAMED.len()])?,
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
pub fn costs(model: &Arc<dyn Model>, plan: &Plan) -> Result<Vec<u64>> {
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
