//! Runs the reductions of buckets.

use meshwork_core::{Axis, Buffer, CommError, Group, Pending, Rank, ReduceOp};
use std::ops::Range;

/// The rounds that sum gradients that are Partial on `axes`. The batch is split over dp (with ep) and cp, whose ranks form one
/// group and one round; each other axis has its own round, in the given order. Axes of degree 1 need none.
///
/// ```
/// use meshwork_core::{Axis, Rank};
/// use meshwork_data_parallel::rounds;
///
/// let rank = Rank::recording(&"dp=2,cp=2,tp=2".parse()?, 0)?;
/// let rounds = rounds(&rank, [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp]);
/// assert_eq!(rounds.iter().map(|group| group.name()).collect::<Vec<_>>(), ["dp+cp", "tp"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rounds(rank: &Rank, axes: impl IntoIterator<Item = Axis>) -> Vec<Group> {
    let (batch, others): (Vec<_>, Vec<_>) = axes.into_iter().partition(|axis| axis.is_data() || *axis == Axis::Cp);
    let groups = std::iter::once(rank.group_over(&batch)).chain(others.iter().map(|&axis| rank.group(axis)));
    groups.filter(|group| group.size() > 1).cloned().collect()
}

/// A flat buffer of gradients that is reduced as one.
#[derive(Debug)]
pub struct Bucket {
    /// The gradients.
    pub gradients: Buffer,
    /// The range of each member.
    pub members: Vec<Range<usize>>,
    /// The gradients are summed over the first of these groups, the result over the second, and so on. Only the first
    /// round overlaps. Without rounds, the gradients are not changed. See [`rounds`].
    pub rounds: Vec<Group>,
    /// A group to sum over after the rounds whose ranks make their buckets ready in different orders. It never overlaps:
    /// [`Reducer::finish`] sums over it, bucket by bucket. The ranks of the group must have such buckets in one order.
    pub last: Option<Group>,
}

/// What happened to a bucket, for the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketEvent {
    /// Its first reduction was started: all its gradients are final.
    Started(usize),
    /// Its reductions are done on every rank.
    Done(usize),
}

/// Why a reduction failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReduceError {
    /// A communication failed.
    #[error("reducing gradient bucket {bucket}: {source}")]
    Comm {
        /// The bucket.
        bucket: usize,
        /// What failed.
        source: Box<CommError>,
    },
    /// A gradient was touched after its reduction had started.
    #[error("gradient {member} of bucket {bucket} was {what} after its reduction had started")]
    TooLate {
        /// The bucket.
        bucket: usize,
        /// The member within it.
        member: usize,
        /// `written` or `said to be final`.
        what: &'static str,
    },
    /// Something waited for a reduction while gradients were still missing.
    #[error("bucket {bucket} still waits for gradient {member}")]
    Missing {
        /// The bucket.
        bucket: usize,
        /// The first member that is not final.
        member: usize,
    },
    /// An earlier reduction of the bucket failed, and its gradients are lost.
    #[error("the gradients of bucket {bucket} are lost: an earlier reduction of it failed")]
    Lost {
        /// The bucket.
        bucket: usize,
    },
}

#[derive(Debug)]
enum State {
    /// Some gradients are not final.
    Filling(Buffer),
    /// The first reduction runs.
    Reducing(Pending),
    /// A reduction failed.
    Lost,
}

#[derive(Debug)]
struct Slot {
    state: State,
    members: Vec<Range<usize>>,
    is_final: Vec<bool>,
    rounds: Vec<Group>,
    last: Option<Group>,
}

/// Reduces buckets of gradients, each once per step, as early as possible.
///
/// In a step, add to [`gradient`](Self::gradient)s, call [`ready`](Self::ready) once for each when it is final, then
/// [`finish`](Self::finish). Every rank of a bucket's rounds must make its buckets ready in the same order; the ranks of
/// [`Bucket::last`] need not.
#[derive(Debug)]
pub struct Reducer {
    slots: Vec<Slot>,
}

impl Reducer {
    /// A reducer of these buckets.
    pub fn new(buckets: Vec<Bucket>) -> Self {
        let slots = buckets
            .into_iter()
            .map(|bucket| Slot {
                state: State::Filling(bucket.gradients),
                is_final: vec![false; bucket.members.len()],
                members: bucket.members,
                rounds: bucket.rounds,
                last: bucket.last,
            })
            .collect();
        Self { slots }
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.slots.len()
    }

    /// The gradients of a bucket, and the range of a member in them, for adding to it.
    ///
    /// # Panics
    /// If there is no such bucket or member.
    pub fn gradient(&mut self, bucket: usize, member: usize) -> Result<(&mut Buffer, Range<usize>), ReduceError> {
        let slot = &mut self.slots[bucket];
        let late = ReduceError::TooLate { bucket, member, what: "written" };
        match &mut slot.state {
            State::Filling(buffer) if !slot.is_final[member] => Ok((buffer, slot.members[member].clone())),
            _ => Err(late),
        }
    }

    /// Marks a gradient as final. The last one of a bucket starts its reduction, which is returned as an event.
    ///
    /// # Panics
    /// If there is no such bucket or member.
    pub fn ready(&mut self, bucket: usize, member: usize) -> Result<Option<BucketEvent>, ReduceError> {
        let slot = &mut self.slots[bucket];
        if std::mem::replace(&mut slot.is_final[member], true) {
            return Err(ReduceError::TooLate { bucket, member, what: "said to be final" });
        }
        if slot.is_final.contains(&false) {
            return Ok(None);
        }
        slot.state = match (std::mem::replace(&mut slot.state, State::Lost), slot.rounds.first()) {
            (State::Filling(buffer), Some(group)) => {
                State::Reducing(group.start_all_reduce(buffer, ReduceOp::Sum).map_err(|source| failed(bucket, source))?)
            }
            // Without rounds there is nothing to start.
            (state, _) => state,
        };
        Ok(Some(BucketEvent::Started(bucket)))
    }

    /// Whether the first reduction of a bucket is over on this rank; without a round, whether its gradients are final.
    pub fn is_reduced(&self, bucket: usize) -> bool {
        let slot = &self.slots[bucket];
        match &slot.state {
            State::Reducing(pending) => pending.is_done(),
            State::Filling(_) => slot.rounds.is_empty() && slot.last.is_none() && !slot.is_final.contains(&false),
            State::Lost => false,
        }
    }

    /// Waits for every bucket, and runs the rounds after the first and the last sum. Afterwards buckets hold the sums and can be filled
    /// again.
    pub fn finish(&mut self, mut on_event: impl FnMut(BucketEvent)) -> Result<(), ReduceError> {
        for (bucket, slot) in self.slots.iter_mut().enumerate() {
            if let Some(member) = slot.is_final.iter().position(|is_final| !is_final) {
                return Err(ReduceError::Missing { bucket, member });
            }
            let mut buffer = match std::mem::replace(&mut slot.state, State::Lost) {
                State::Reducing(pending) => pending.wait().map_err(|source| failed(bucket, source))?,
                State::Filling(buffer) => buffer,
                State::Lost => return Err(ReduceError::Lost { bucket }),
            };
            for group in slot.rounds.iter().skip(1).chain(&slot.last) {
                buffer = group.all_reduce(buffer, ReduceOp::Sum).map_err(|source| failed(bucket, source))?;
            }
            slot.is_final.fill(false);
            slot.state = State::Filling(buffer);
            on_event(BucketEvent::Done(bucket));
        }
        Ok(())
    }

    /// The gradients of a bucket, if no reduction is running.
    pub fn gradients(&self, bucket: usize) -> Option<&Buffer> {
        match &self.slots[bucket].state {
            State::Filling(buffer) => Some(buffer),
            _ => None,
        }
    }
}

fn failed(bucket: usize, source: CommError) -> ReduceError {
    ReduceError::Comm { bucket, source: Box::new(source) }
}
