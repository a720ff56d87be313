//! Brings together flat vectors of weights of which each rank has a slice, just before they are used.

use crate::vectors::{VectorError, Vectors};
use meshwork_core::{Buffer, CommError, Group, Pending};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// An event of a vector, for the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatherEvent {
    /// Its gather was started.
    Started(usize),
    /// It was used: from now on the vectors before it are no longer kept.
    Used(usize),
}

/// The messages that ranks send in place of their slices. Every rank uses the values restored from the messages,
/// also of its own slice; so all ranks use the same values.
pub trait Messages: Debug + Send + Sync {
    /// The message of this rank's slice of a vector, and memory for the messages of all ranks, in their order. `None`:
    /// the slice itself is sent.
    fn pack(&self, vector: usize, slice: &Buffer) -> Result<Option<[Buffer; 2]>, VectorError>;

    /// The whole vector that the messages of all ranks restore to.
    ///
    /// # Errors
    /// No memory; a message that is malformed.
    fn restore(&self, vector: usize, messages: &Buffer) -> Result<Buffer, VectorError>;
}

/// Why a vector could not be brought together.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum GatherError {
    /// A communication failed.
    #[error("gathering the weights of vector {vector}: {source}")]
    Comm { vector: usize, source: Box<CommError> },
    /// There is no memory for it, or a message is malformed.
    #[error("the weights of vector {vector}: {source}")]
    Vectors { vector: usize, source: VectorError },
}

meshwork_core::debug_as_display!(GatherError);

/// Gathers vectors in an order that was recorded before: while one is used, the next one is on its way, and one that is
/// not used again is dropped. Every rank must use the same vectors in the same order; one that the order does not have
/// is gathered when it is asked for.
#[derive(Debug)]
pub struct Gatherer {
    /// By vector: the ranks that have its slices, in order; `None` if every rank has it whole.
    sharers: Vec<Option<Group>>,
    vectors: Box<dyn Vectors>,
    messages: Option<Box<dyn Messages>>,
    pass: Mutex<Pass>,
}

/// A pass over vectors.
#[derive(Debug, Default)]
struct Pass {
    /// The vectors in the order in which they are used.
    order: Vec<usize>,
    /// The place in it of the vector that was used last.
    at: usize,
    slices: Vec<Buffer>,
    here: BTreeMap<usize, Gathered>,
    events: Vec<(Instant, GatherEvent)>,
}

#[derive(Debug)]
enum Gathered {
    /// Slices, or the messages of them.
    Coming(Pending, Sent),
    Here(Buffer),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Slices,
    Messages,
}

impl Gatherer {
    /// A gatherer of vectors that these ranks share out, in slices of one length and in their order; `None` if every
    /// rank has one whole. `vectors` has memory for the whole ones.
    pub fn new(sharers: Vec<Option<Group>>, vectors: impl Vectors + 'static) -> Self {
        Self { sharers, vectors: Box::new(vectors), messages: None, pass: Mutex::default() }
    }

    /// Sends messages in place of slices. Every rank makes messages of the same length, of the same vectors.
    #[must_use]
    pub fn with_messages(self, messages: impl Messages + 'static) -> Self {
        Self { messages: Some(Box::new(messages)), ..self }
    }

    /// Begins a pass that uses vectors in this order; `slices` are this rank's of all of them. It ends, and what is
    /// left of it is freed, when the guard is dropped.
    pub fn begin<'a>(&'a self, order: &[usize], slices: &[Buffer]) -> GatherPass<'a> {
        let mut pass = self.pass();
        let events = std::mem::take(&mut pass.events);
        *pass = Pass { order: order.to_vec(), slices: slices.to_vec(), events, ..Pass::default() };
        GatherPass(self)
    }

    /// A whole vector, of which `slice` is here. Its memory is freed when nothing holds it any more.
    ///
    /// # Errors
    /// No memory; ranks that do not answer.
    ///
    /// # Panics
    /// If every rank has the vector whole.
    pub fn whole(&self, vector: usize, slice: &Buffer) -> Result<Buffer, GatherError> {
        let pass = &mut *self.pass();
        pass.events.push((Instant::now(), GatherEvent::Used(vector)));
        let place = pass.order[pass.at.min(pass.order.len())..].iter().position(|&other| other == vector);
        if let Some(ahead) = place {
            pass.at += ahead;
        }
        let rest = &pass.order[pass.at.min(pass.order.len())..];
        pass.here.retain(|kept, _| rest.contains(kept));
        let gathered = match pass.here.remove(&vector) {
            Some(gathered) => gathered,
            None => self.start(vector, slice.clone(), &mut pass.events)?,
        };
        // The next one is on its way while this one is used.
        let next = rest.iter().copied().find(|&other| other != vector).filter(|_| place.is_some());
        if let Some(next) = next
            && !pass.here.contains_key(&next)
        {
            let coming = self.start(next, pass.slices[next].clone(), &mut pass.events)?;
            pass.here.insert(next, coming);
        }
        let whole = match gathered {
            Gathered::Here(whole) => whole,
            Gathered::Coming(pending, sent) => {
                let received =
                    pending.wait().map_err(|source| GatherError::Comm { vector, source: Box::new(source) })?;
                match self.messages.as_ref().filter(|_| sent == Sent::Messages) {
                    Some(messages) => {
                        messages.restore(vector, &received).map_err(|source| of_vector(vector, source))?
                    }
                    None => received,
                }
            }
        };
        if place.is_some() {
            pass.here.insert(vector, Gathered::Here(whole.clone()));
        }
        Ok(whole)
    }

    /// Whether ranks share out a vector.
    pub fn is_shared(&self, vector: usize) -> bool {
        self.sharers.get(vector).is_some_and(Option::is_some)
    }

    /// The timeline since it was cleared last.
    pub fn events(&self) -> Vec<(Instant, GatherEvent)> {
        self.pass().events.clone()
    }

    /// Begins a new timeline.
    pub fn clear_events(&self) {
        self.pass().events.clear();
    }

    fn start(
        &self,
        vector: usize,
        slice: Buffer,
        events: &mut Vec<(Instant, GatherEvent)>,
    ) -> Result<Gathered, GatherError> {
        let Some(sharers) = &self.sharers[vector] else { panic!("vector {vector} is whole on every rank") };
        events.push((Instant::now(), GatherEvent::Started(vector)));
        let packed = self.messages.as_ref().map_or(Ok(None), |messages| messages.pack(vector, &slice));
        let (sent, [part, room]) = match packed.map_err(|source| of_vector(vector, source))? {
            Some(message) => (Sent::Messages, message),
            None => {
                let room = self.vectors.like(&slice, sharers.size() * slice.count());
                (Sent::Slices, [slice, room.map_err(|source| of_vector(vector, source))?])
            }
        };
        let started = sharers.start_all_gather(part, room);
        let pending = started.map_err(|source| GatherError::Comm { vector, source: Box::new(source) })?;
        Ok(Gathered::Coming(pending, sent))
    }

    fn pass(&self) -> std::sync::MutexGuard<'_, Pass> {
        self.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of_vector(vector: usize, source: VectorError) -> GatherError {
    GatherError::Vectors { vector, source }
}

/// A pass that is under way.
#[derive(Debug)]
pub struct GatherPass<'a>(&'a Gatherer);

impl Drop for GatherPass<'_> {
    fn drop(&mut self) {
        let mut pass = self.0.pass();
        let events = std::mem::take(&mut pass.events);
        *pass = Pass { events, ..Pass::default() };
    }
}
