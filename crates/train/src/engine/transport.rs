//! Pipeline messages over the pp group.

use super::{Message, TrainError};
use meshwork_core::{Buffer, DType, Group, Pending};
use meshwork_models::Boundary;
use meshwork_pipeline::{Direction, Tag};
use meshwork_tensor::{Device, Tensor};
use std::collections::VecDeque;
use std::sync::Arc;

/// Sends hidden states and their gradients to other pp ranks. A message carries a fingerprint of shape, dtype and SPMD types;
/// the receiver refuses another than it expects.
#[derive(Debug)]
pub struct PipeTransport {
    group: Group,
    device: Arc<dyn Device>,
    boundary: Boundary,
    /// Messages on their way, per direction and oldest first. Each owns its memory until it is waited for.
    sends: [VecDeque<Pending>; 2],
}

impl PipeTransport {
    /// A transport between stages whose hidden states all look like `boundary`.
    pub fn new(group: Group, device: Arc<dyn Device>, boundary: Boundary) -> Self {
        Self { group, device, boundary, sends: Default::default() }
    }

    fn expected(&self, direction: Direction) -> Boundary {
        match direction {
            Direction::Activation => self.boundary,
            Direction::Gradient => Boundary { types: self.boundary.types.dual(), ..self.boundary },
        }
    }
}

impl meshwork_pipeline::Transport for PipeTransport {
    type Message = Message;
    type Error = TrainError;

    fn send(&mut self, to_rank: usize, tag: Tag, message: Message) -> Result<(), TrainError> {
        let Message { tensor, types } = message;
        let signature = types.signature(tensor.dtype(), &tensor.shape());
        let buffer: Buffer = tensor.into_buffer();
        let sends = &mut self.sends[tag.direction as usize];
        // Not to run ahead of the receiver without end. As many messages as stages never block a rank for good: neighbours in
        // gpipe and 1f1b are at most that many micro-batches apart. Waiting for a given one, and not letting go of whatever is
        // done, keeps the peak of memory independent of timing.
        if sends.len() >= self.group.size()
            && let Some(oldest) = sends.pop_front()
        {
            oldest.wait()?;
        }
        sends.push_back(self.group.start_send(buffer, to_rank, signature)?);
        Ok(())
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Message, TrainError> {
        let Boundary { shape, types } = self.expected(tag.direction);
        let buffer = self.device.alloc(DType::F32, shape.count())?;
        let buffer = self.group.recv(buffer, from_rank, types.signature(DType::F32, &shape))?;
        Ok(Message { tensor: Tensor::from_buffer(&self.device, buffer, shape)?, types })
    }

    fn finish(&mut self) -> Result<(), TrainError> {
        for pending in self.sends.iter_mut().flat_map(|sends| sends.drain(..)) {
            pending.wait()?;
        }
        Ok(())
    }
}
