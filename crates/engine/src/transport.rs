//! Pipeline messages over the pp group.

use crate::TrainError;
use crate::chunk::Message;
use meshwork_core::{Axis, Buffer, Group, Pending, Rank, Ty};
use meshwork_nn::Activation;
use meshwork_pipeline::{Direction, Tag};
use meshwork_tensor::{Category, Device, Shape, Tensor};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// Sends activations and their gradients to other pp ranks. A message carries a fingerprint of shape, dtype and SPMD types;
/// the receiver refuses any other than it expects.
///
/// A value that is `Invariant` on tp is the same on every tp rank, so it is sent once and not once per tp rank: each
/// rank sends its part to its counterpart, and the receivers gather the parts over tp (the scatter/gather of PTD-P,
/// Narayanan et al. 2021, section 4.1).
#[derive(Debug)]
pub struct PipeTransport {
    group: Group,
    tp: Group,
    device: Arc<dyn Device>,
    /// The activation that each stage but the last sends.
    activations: Rc<[Activation]>,
    scatter: bool,
    /// Messages that may be in flight to one receiver.
    in_flight: usize,
    /// Messages in flight, per receiver and oldest first. Each owns its memory until it is waited for.
    sends: BTreeMap<usize, VecDeque<Pending>>,
}

impl PipeTransport {
    /// A transport of these activations. Up to `in_flight` messages may be in flight to each pp rank; this must be the
    /// number that the schedule [needs](meshwork_pipeline::Report::in_flight). With `scatter`, a value that is the same
    /// on every tp rank is sent in parts.
    pub fn new(
        rank: &Rank,
        device: Arc<dyn Device>,
        activations: Rc<[Activation]>,
        scatter: bool,
        in_flight: usize,
    ) -> Self {
        let (group, tp) = (rank.group(Axis::Pp).clone(), rank.group(Axis::Tp).clone());
        Self { group, tp, device, activations, scatter, in_flight, sends: BTreeMap::new() }
    }

    /// The activation that a message with this tag carries: the tag names the stage that made it.
    fn expected(&self, tag: Tag) -> Activation {
        match tag.direction {
            Direction::Activation => self.activations[tag.stage],
            Direction::Gradient => {
                let activation = self.activations[tag.stage - 1];
                Activation { types: activation.types.dual(), ..activation }
            }
        }
    }

    /// Elements of one part, if the message is sent in parts.
    fn part(&self, message: &Activation) -> Option<usize> {
        let (count, parts) = (message.shape.count(), self.tp.size());
        let same = message.types.get(Axis::Tp) == Some(Ty::Invariant);
        (self.scatter && same && parts > 1 && count.is_multiple_of(parts)).then_some(count / parts)
    }

    /// Waits until every message sent has been received.
    pub fn flush(&mut self) -> Result<(), TrainError> {
        for pending in self.sends.values_mut().flat_map(|sends| sends.drain(..)) {
            pending.wait()?;
        }
        Ok(())
    }

    /// Receives activations that are no longer needed.
    pub fn discard(&mut self, from_rank: usize, messages: &[Tag]) -> Result<(), TrainError> {
        messages.iter().try_for_each(|&tag| self.receive(from_rank, tag).map(drop))
    }

    /// The message, or this rank's part of it.
    fn receive(&mut self, from_rank: usize, tag: Tag) -> Result<Buffer, TrainError> {
        let expected = self.expected(tag);
        let shape = self.part(&expected).map_or(expected.shape, |part| Shape::new(&[part]));
        let _buffers = self.device.meter().enter(Category::Buffers);
        let buffer = self.device.alloc(expected.dtype, shape.count())?;
        Ok(self.group.recv(buffer, from_rank, expected.types.signature(expected.dtype, &shape))?)
    }
}

impl meshwork_pipeline::Transport for PipeTransport {
    type Message = Message;
    type Error = TrainError;

    /// Does not send the tag: between two ranks, messages are received in the order in which they are sent.
    fn send(&mut self, to_rank: usize, _: Tag, message: Message) -> Result<(), TrainError> {
        let Message { tensor, types } = message;
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let part = self.part(&Activation { dtype, shape, types });
        let signature = types.signature(dtype, &part.map_or(shape, |part| Shape::new(&[part])));
        let buffer = match part {
            None => tensor.into_buffer(),
            Some(part) => {
                tensor.buffer().slice(part * self.tp.rank()..part * (self.tp.rank() + 1)).map_err(as_tensor)?
            }
        };
        let sends = self.sends.entry(to_rank).or_default();
        // Limits how far the sender runs ahead of the receiver. With the number of messages in flight that the schedule
        // needs, no rank waits forever. Waiting for the oldest message, instead of freeing any that is done, keeps the
        // peak of memory independent of timing.
        if sends.len() >= self.in_flight.max(1)
            && let Some(oldest) = sends.pop_front()
        {
            oldest.wait()?;
        }
        sends.push_back(self.group.start_send(buffer, to_rank, signature)?);
        Ok(())
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Message, TrainError> {
        let expected = self.expected(tag);
        let mut buffer = self.receive(from_rank, tag)?;
        if self.part(&expected).is_some() {
            let _buffers = self.device.meter().enter(Category::Buffers);
            let whole = self.device.alloc(expected.dtype, expected.shape.count())?;
            buffer = self.tp.all_gather(buffer, whole)?;
        }
        Ok(Message { tensor: Tensor::from_buffer(&self.device, buffer, expected.shape)?, types: expected.types })
    }

    fn finish(&mut self) -> Result<(), TrainError> {
        self.flush()
    }
}

fn as_tensor(error: meshwork_core::BufferError) -> TrainError {
    meshwork_tensor::Error::from(error).into()
}
