//! The stages of a rank as the pipeline's interpreter runs them.

use crate::TrainError;
use crate::chunk::Chunk;
use crate::compress::codec::Codec;
use crate::message::Message;
use crate::pass::{Pass, Purpose};
use crate::weights::WeightStore;
use meshwork_pipeline::{Direction, Schedule, Tag};
use meshwork_tensor::Category;
use meshwork_tensor::tape::Weights;
use std::cell::{Cell, RefCell};

/// Counts the live activations of a rank. An activation lives from its forward until its backward ends, gradients of
/// weights included.
#[derive(Debug, Default)]
pub struct LiveActivations {
    now: Cell<usize>,
    most: Cell<usize>,
}

impl LiveActivations {
    fn acquire(&self) {
        self.now.update(|now| now + 1);
        self.most.update(|most| most.max(self.now.get()));
    }

    fn release(&self) {
        self.now.update(|now| now.saturating_sub(1));
    }

    /// Sets the number of live activations to zero, after a failure.
    pub fn clear(&self) {
        self.now.set(0);
    }

    /// The largest number alive at once so far, in units of one micro-batch through one stage.
    pub fn most(&self) -> usize {
        self.most.get()
    }
}

/// A chunk in one pass, as the pipeline's interpreter sees it.
pub struct Running<'a> {
    /// The chunk.
    pub chunk: &'a mut Chunk,
    /// The pass.
    pub pass: &'a Pass,
    /// Weights, and the buffers of their gradients.
    pub weights: &'a RefCell<WeightStore>,
    /// Codes what crosses cuts.
    pub codec: &'a RefCell<Codec>,
    /// Where the stages are.
    pub schedule: &'a Schedule,
    /// Counts the live activations of this rank.
    pub live: &'a LiveActivations,
    /// The version of the weights, as a number of updates, that each (stage, micro-batch as the schedule counts them)
    /// reads; `None` for the newest.
    pub versions: &'a dyn Fn(usize, usize) -> Option<u64>,
}

impl Running<'_> {
    fn walk_back(
        &mut self,
        micro: usize,
        grad: Option<Message>,
        weights: Weights,
    ) -> Result<Option<Message>, TrainError> {
        let _activations = self.pass.device.meter().enter(Category::Activations);
        let grad =
            self.chunk.backward(self.pass, micro + self.pass.ahead, grad, weights, (self.weights, self.codec))?;
        self.leave(Tag { direction: Direction::Gradient, stage: self.chunk.number, micro }, grad)
    }

    /// What the next stage gets of a message, as far as this rank knows: what crosses a virtual cut to a stage on this
    /// rank is coded here.
    fn leave(&self, tag: Tag, message: Option<Message>) -> Result<Option<Message>, TrainError> {
        let Some(message) = message else { return Ok(None) };
        let before = if tag.direction == Direction::Activation { tag.stage } else { tag.stage - 1 };
        let [here, there] = [before, before + 1].map(|stage| self.schedule.rank_of(stage, tag.micro));
        let mut codec = self.codec.borrow_mut();
        if here != there || !codec.is_virtual_between(before) {
            return Ok(Some(message));
        }
        let site = codec.site(tag);
        codec.cross(site, message).map(Some)
    }
}

impl meshwork_pipeline::StageRunner for Running<'_> {
    type Message = Message;
    type Error = TrainError;

    fn forward(&mut self, micro: usize, input: Option<Message>) -> Result<Option<Message>, TrainError> {
        if self.pass.purpose == Purpose::Train {
            self.live.acquire();
        }
        let _activations = self.pass.device.meter().enter(Category::Activations);
        let store = self.weights.borrow();
        let params = match (self.versions)(self.chunk.number, micro) {
            None => store.params(),
            Some(updates) => {
                let gone = "the version of the weights that it must read is gone";
                store.version(updates).ok_or_else(|| self.chunk.out_of_turn(micro, gone))?
            }
        };
        let output = self.chunk.forward(self.pass, micro + self.pass.ahead, params.clone(), input, self.codec)?;
        self.leave(Tag { direction: Direction::Activation, stage: self.chunk.number, micro }, output)
    }

    fn backward_input(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.walk_back(micro, grad, Weights::Deferred)
    }

    fn backward_weights(&mut self, micro: usize) -> Result<(), TrainError> {
        self.live.release();
        let _activations = self.pass.device.meter().enter(Category::Activations);
        self.chunk.weight_gradients(micro + self.pass.ahead, self.weights)
    }

    /// Walks the tape once, so that values needed by both gradients are read once.
    fn backward(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.live.release();
        self.walk_back(micro, grad, Weights::Now)
    }

    fn update(&mut self, micro: usize) -> Result<(), TrainError> {
        // The pass begins at the first micro-batch of its step; an update may still belong to the step before.
        let pass = self.pass;
        let step = pass.position.step + u64::from(micro + pass.ahead >= pass.first_micro);
        self.weights.borrow_mut().update_within(step, (1.0 / pass.loss_scale) as f32)
    }
}
