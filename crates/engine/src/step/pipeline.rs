//! Messages: micro-batches through the stages of this rank, in the order of a schedule, and values over cuts.

use super::cut::Cut;
use super::driver::Driver;
use super::prelude::*;
use super::stored::Store;
use crate::chunk::{Chunk, LiveActivations};
use crate::compress::codec::Codec;
use crate::compress::crossing::Staged;
use crate::message::Message;
use crate::transport::PipeTransport;
use meshwork_nn::Activation;
use meshwork_pipeline::{Interpreter, Lowered, forward_only_replicated};
use meshwork_tensor::tape::Encoding;
use std::mem::take;

/// See the module docs.
pub(super) struct Pipeline {
    pub driver: Driver,
    /// The schedules of passes that do not train.
    pub evaluation: Lowered,
    pub prediction: Lowered,
    /// The stages of this rank.
    pub chunks: Vec<Chunk>,
    pub interpreter: Interpreter<Message>,
    pub transport: PipeTransport,
    /// Compresses what crosses cuts.
    pub codec: Rc<RefCell<Codec>>,
    /// The activation that each stage but the last sends.
    pub activations: Rc<[Activation]>,
    /// How what backward needs is encoded meanwhile.
    pub saved: Rc<[Encoding]>,
    pub live: LiveActivations,
}

impl Pipeline {
    /// Takes the stages of `cut`. Collective over the world.
    pub fn new(
        plan: &Plan,
        cut: &mut Cut,
        driver: Driver,
        store: &Store,
        rank: &Arc<Rank>,
        device: &Arc<dyn Device>,
    ) -> Result<Self> {
        let (count, model, schedule) = (cut.model.stages().len(), &cut.model, &cut.schedule);
        let stages = take(&mut cut.local.stages).into_iter();
        let micro = Batch::blank(&model.model().fields(), cut.micro_batch);
        let activations: Rc<[Activation]> = model.activations(&micro)?.into();
        let disk = store.disk.as_ref().filter(|_| plan.offload.as_ref().is_some_and(|offload| offload.samples));
        let staged = Staged { plan, model, schedule };
        let codec = Codec::training(staged, take(&mut cut.crossings), rank, disk, device)?;
        let codec = Rc::new(RefCell::new(codec));
        let forward = |micros| lower(&forward_only_replicated(&schedule.placement, &schedule.replicas, micros));
        let (sent, in_flight) = (activations.clone(), driver.in_flight());
        Ok(Self {
            evaluation: forward(cut.micros)?,
            prediction: forward(1)?,
            chunks: stages.map(|(number, segments)| Chunk::new(number, count, segments)).collect(),
            interpreter: Interpreter::default(),
            transport: PipeTransport::new(rank, device.clone(), sent, codec.clone(), plan.scatter_gather, in_flight),
            codec,
            activations,
            saved: plan.saved.as_slice().into(),
            live: LiveActivations::default(),
            driver,
        })
    }
}
