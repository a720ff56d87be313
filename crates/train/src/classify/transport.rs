//! Messages between stages whose boundaries differ in shape: a transport of the engine for each boundary.

use crate::engine::{Message, PipeTransport, TrainError};
use meshwork_core::Rank;
use meshwork_models::Boundary;
use meshwork_pipeline::{Direction, Tag, Transport};
use meshwork_tensor::Device;
use std::sync::Arc;

/// A [`PipeTransport`] for each boundary: the `i`-th lies behind stage i.
#[derive(Debug)]
pub(super) struct Boundaries(Vec<PipeTransport>);

impl Boundaries {
    /// `in_flight` messages, which must be what the schedule needs, may be on their way over each boundary.
    pub(super) fn new(rank: &Rank, device: &Arc<dyn Device>, boundaries: &[Boundary], in_flight: usize) -> Self {
        let pipe = |&at: &Boundary| PipeTransport::new(rank, Arc::clone(device), at, false, in_flight);
        Self(boundaries.iter().map(pipe).collect())
    }

    /// The transport that a message takes: its tag names the stage that made it.
    fn of(&mut self, tag: Tag) -> &mut PipeTransport {
        match tag.direction {
            Direction::Activation => &mut self.0[tag.stage],
            Direction::Gradient => &mut self.0[tag.stage - 1],
        }
    }
}

impl Transport for Boundaries {
    type Message = Message;
    type Error = TrainError;

    fn send(&mut self, to_rank: usize, tag: Tag, message: Message) -> Result<(), TrainError> {
        self.of(tag).send(to_rank, tag, message)
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Message, TrainError> {
        self.of(tag).recv(from_rank, tag)
    }

    fn finish(&mut self) -> Result<(), TrainError> {
        self.0.iter_mut().try_for_each(Transport::finish)
    }
}
