//! The stages of a rank as the pipeline's interpreter runs them.

use crate::chunk::{Chunk, Workspace};
use crate::message::Message;
use crate::pass::Purpose;
use crate::prelude::*;
use meshwork_pipeline::Tag;
use meshwork_tensor::tape::Weights;

/// A stage in one pass.
pub struct Running<'a> {
    pub chunk: &'a mut Chunk,
    pub on: &'a Workspace<'a>,
}

impl Running<'_> {
    fn walk_back(&mut self, micro: usize, grad: Option<Message>, weights: Weights) -> Result<Option<Message>> {
        let pass = self.on.pass;
        let _activations = pass.device.meter().enter(Category::Activations);
        let grad = self.chunk.backward(self.on, micro + pass.ahead, grad, weights)?;
        self.leave(Tag { direction: Direction::Gradient, stage: self.chunk.number, micro }, grad)
    }

    /// The message as the next stage gets it. A message that crosses a virtual cut to a stage on this rank is
    /// compressed here.
    fn leave(&self, tag: Tag, message: Option<Message>) -> Result<Option<Message>> {
        let Some(message) = message else { return Ok(None) };
        let before = if tag.direction == Direction::Activation { tag.stage } else { tag.stage - 1 };
        let [here, there] = [before, before + 1].map(|stage| self.on.schedule.rank_of(stage, tag.micro));
        let mut codec = self.on.codec.borrow_mut();
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

    fn forward(&mut self, micro: usize, input: Option<Message>) -> Result<Option<Message>> {
        let Workspace { pass, weights, live, versions, .. } = self.on;
        if pass.purpose == Purpose::Train {
            live.acquire();
        }
        let _activations = pass.device.meter().enter(Category::Activations);
        let store = weights.borrow();
        let params = match versions(self.chunk.number, micro) {
            None => store.params(),
            Some(updates) => {
                let gone = "the version of the weights that it must read is gone";
                store.version(updates).ok_or_else(|| self.chunk.out_of_turn(micro, gone))?
            }
        };
        let output = self.chunk.forward(self.on, micro + pass.ahead, params.clone(), input)?;
        self.leave(Tag { direction: Direction::Activation, stage: self.chunk.number, micro }, output)
    }

    fn backward_input(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>> {
        self.walk_back(micro, grad, Weights::Deferred)
    }

    fn backward_weights(&mut self, micro: usize) -> Result<()> {
        let Workspace { pass, live, .. } = self.on;
        live.release();
        let _activations = pass.device.meter().enter(Category::Activations);
        self.chunk.weight_gradients(self.on, micro + pass.ahead)
    }

    /// Walks the tape once, so that values needed by both gradients are read once.
    fn backward(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>> {
        self.on.live.release();
        self.walk_back(micro, grad, Weights::Now)
    }

    fn update(&mut self, micro: usize) -> Result<()> {
        // The pass begins at the first micro-batch of its step; an update may still belong to the step before.
        let pass = self.on.pass;
        let step = pass.position.step + u64::from(micro + pass.ahead >= pass.first_micro);
        self.on.weights.borrow_mut().update_within(step, (1.0 / pass.loss_scale) as f32)
    }
}
