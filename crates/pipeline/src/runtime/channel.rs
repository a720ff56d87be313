//! A ready transport for ranks that are threads of one process: bounded channels of `crossbeam-channel`.

use super::Transport;
use crate::{Lowered, Tag};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::error::Error;

/// The messages of one rank to and from the others, over channels. [`channels`] makes one for each rank.
///
/// A send waits only while [`Report::in_flight`](crate::Report::in_flight) messages wait for the same receiver. This is
/// the number that the schedule needs, so a pipeline holds no more messages than necessary and still cannot deadlock.
/// Dropping a transport closes its channels: peers that wait for a message of this rank, or send it one, get
/// [`ChannelError::PeerGone`]. Therefore the thread of each rank should own its transport.
#[derive(Debug)]
pub struct ChannelTransport<M> {
    rank: usize,
    to: BTreeMap<usize, Sender<(Tag, M)>>,
    from: BTreeMap<usize, Receiver<(Tag, M)>>,
}

/// Connects the ranks of a schedule: a transport for each, in rank order.
///
/// There is a channel between two ranks where the schedule sends a message from one to the other. The same transports
/// serve any number of runs of the schedule, one after the other.
///
/// ```
/// use std::convert::Infallible;
/// use std::thread;
///
/// use meshwork_pipeline::{StageRunner, channels, forward_only, lower, run};
///
/// /// A stage that adds one.
/// struct AddOne { is_last: bool, result: f32 }
///
/// impl StageRunner for AddOne {
///     type Message = f32;
///     type Error = Infallible;
///     fn forward(&mut self, _micro: usize, input: Option<f32>) -> Result<Option<f32>, Infallible> {
///         self.result = input.unwrap_or(0.0) + 1.0;
///         Ok((!self.is_last).then_some(self.result))
///     }
///     # fn backward_input(&mut self, _: usize, _: Option<f32>) -> Result<Option<f32>, Infallible> { Ok(None) }
///     # fn backward_weights(&mut self, _: usize) -> Result<(), Infallible> { Ok(()) }
///     # fn update(&mut self, _: usize) -> Result<(), Infallible> { Ok(()) }
/// }
///
/// // Four stages on two ranks, two each.
/// let schedule = lower(&forward_only(&[0, 1, 0, 1], 3))?;
/// let mut ranks = [false, true].map(|ends| [false, ends].map(|is_last| AddOne { is_last, result: 0.0 }));
/// thread::scope(|scope| {
///     for (rank, (stages, mut transport)) in ranks.iter_mut().zip(channels(&schedule)).enumerate() {
///         let schedule = &schedule;
///         scope.spawn(move || run(schedule, rank, stages, &mut transport, &mut |_| {}).expect("nothing fails"));
///     }
/// });
/// assert_eq!(ranks[1][1].result, 4.0);
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
#[must_use]
pub fn channels<M>(lowered: &Lowered) -> Vec<ChannelTransport<M>> {
    let schedule = lowered.schedule();
    let mut ranks: Vec<ChannelTransport<M>> =
        (0..schedule.ranks).map(|rank| ChannelTransport { rank, to: BTreeMap::new(), from: BTreeMap::new() }).collect();
    for from in 0..schedule.ranks {
        let sends = lowered.actions(from).iter().filter(|action| action.kind.is_send());
        for receive in sends.filter_map(|send| send.counterpart()) {
            let to = schedule.rank_of(receive.stage, receive.micro);
            if let Entry::Vacant(vacant) = ranks[from].to.entry(to) {
                let (sender, receiver) = bounded(lowered.report().in_flight);
                vacant.insert(sender);
                ranks[to].from.insert(from, receiver);
            }
        }
    }
    ranks
}

impl<M> Transport for ChannelTransport<M> {
    type Message = M;
    type Error = ChannelError;

    fn send(&mut self, to_rank: usize, tag: Tag, message: M) -> Result<(), ChannelError> {
        let channel = self.to.get(&to_rank).ok_or(ChannelError::NoChannel { from: self.rank, to: to_rank })?;
        channel.send((tag, message)).map_err(|_| ChannelError::PeerGone { rank: to_rank, tag })
    }

    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<M, ChannelError> {
        let channel = self.from.get(&from_rank).ok_or(ChannelError::NoChannel { from: from_rank, to: self.rank })?;
        match channel.recv() {
            Ok((found, message)) if found == tag => Ok(message),
            Ok((found, _)) => Err(ChannelError::OutOfTurn { rank: from_rank, expected: tag, found }),
            Err(_) => Err(ChannelError::PeerGone { rank: from_rank, tag }),
        }
    }

    /// There is nothing to wait for: a sent message stays in its channel until it is received, even if this transport
    /// is dropped.
    fn finish(&mut self) -> Result<(), ChannelError> {
        Ok(())
    }
}

messages! {
    /// Why a message could not be moved.
    #[derive(Clone, PartialEq, Eq)]
    pub enum ChannelError {
        /// The other rank has dropped its transport: it has failed, or it ran another schedule that ends earlier.
        PeerGone { rank: usize, tag: Tag } => "pp rank {rank} is gone, at the {tag}";
        /// The schedule of the channels sends nothing from one rank to the other.
        NoChannel { from: usize, to: usize }
            => "no channel from pp rank {from} to pp rank {to}: make the channels of the schedule that is run";
        /// A different message arrived than the expected one: the two ranks run different schedules.
        OutOfTurn { rank: usize, expected: Tag, found: Tag }
            => "pp rank {rank} sent the {found} where the {expected} was expected: all ranks must run the same schedule";
    }
}

debug_as_display!(ChannelError);

impl Error for ChannelError {}
