//! Runs the reductions of buckets.
//!
//! More than 400 lines: a bucket's way from its first share to its sum, and to where it is parked, is one state
//! machine, beside its documented types.

use crate::parking::Parking;
use crate::sum::Sum;
use crate::vectors::{VectorError, Vectors};
use meshwork_core::{Axis, Buffer, CommError, FlatSlice, Group, Pending, Rank, ReduceOp};
use std::collections::VecDeque;
use std::ops::Range;

/// The groups that sum gradients that are Partial on `axes`, one after the other. The batch is split over dp (with ep)
/// and cp, whose ranks form one group; each other axis has its own, in the given order. Axes of degree 1 need none.
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
    let (batch, others): (Vec<_>, Vec<_>) = axes.into_iter().partition(|&axis| cuts_batch(axis));
    let groups = std::iter::once(rank.group_over(&batch)).chain(others.iter().map(|&axis| rank.group(axis)));
    groups.filter(|group| group.size() > 1).cloned().collect()
}

/// Whether the ranks of an axis have other parts of the batch.
pub fn cuts_batch(axis: Axis) -> bool {
    axis.is_data() || axis.is_context()
}

/// Gradients that are reduced as one flat vector.
#[derive(Debug)]
pub struct Bucket {
    /// The range of each member.
    pub members: Vec<Range<usize>>,
    /// Number of elements; with [`scatter`](Self::scatter), without the padding that makes slices equal.
    pub elements: usize,
    /// The gradients are summed over the first of these groups, the result over the second, and so on. Only the first
    /// round overlaps. Without rounds, the gradients are not changed. See [`rounds`].
    pub rounds: Vec<Group>,
    /// How the first round is summed, if not by an all-reduce or a reduce-scatter.
    pub sum: Option<Box<dyn Sum>>,
    /// A group to sum over after the rounds whose ranks make their buckets ready in different orders. It never
    /// overlaps: [`Reducer::finish`] sums over it, bucket by bucket. The ranks of the group must have such buckets in
    /// one order.
    pub last: Option<Group>,
    /// Whether the first round leaves each of its ranks only its [slice](FlatSlice) of the sum (a reduce-scatter),
    /// which the later ones sum. The gradients then need memory of their own only until that round.
    pub scatter: bool,
    /// How often each member is made ready before the bucket is reduced: once for each tape that reads it and adds to
    /// the same sum.
    pub shares: usize,
    /// How often the bucket is filled and reduced in a step. More than once needs [`scatter`](Self::scatter): the
    /// slices add up.
    pub fills: usize,
}

impl Bucket {
    /// The slice of the sum that this rank ends with.
    pub fn slice(&self) -> FlatSlice {
        match self.rounds.first() {
            Some(group) if self.scatter => FlatSlice::new(self.elements, group.size(), group.rank()),
            _ => FlatSlice::whole(self.elements),
        }
    }
}

/// An event of a bucket, for the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketEvent {
    /// Its first reduction was started: all its gradients are final.
    Started(usize),
    /// Its reductions are done on every rank.
    Done(usize),
}

/// Why a reduction failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum ReduceError {
    /// A communication failed.
    #[error("reducing gradient bucket {bucket}: {source}")]
    Comm { bucket: usize, source: Box<CommError> },
    /// Memory for gradients, or a sum of them.
    #[error("gradient bucket {bucket}: {source}")]
    Vectors { bucket: usize, source: VectorError },
    /// A gradient was touched after its reduction had started.
    #[error("gradient {member} of bucket {bucket} was {what} after its reduction had started")]
    TooLate { bucket: usize, member: usize, what: &'static str },
    /// Something waited for a reduction while gradients were still missing.
    #[error("bucket {bucket} still waits for gradient {member}")]
    Missing { bucket: usize, member: usize },
    /// An earlier reduction of the bucket failed, and its gradients are lost.
    #[error("the gradients of bucket {bucket} are lost: an earlier reduction of it failed")]
    Lost { bucket: usize },
}

meshwork_core::debug_as_display!(ReduceError);

/// A member while its bucket is filled.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// How often it was made ready in this step.
    ready: usize,
    /// Whether it has been written in this fill.
    written: bool,
}

#[derive(Debug)]
struct Slot {
    bucket: Bucket,
    members: Vec<Progress>,
    /// Fills that were reduced in this step.
    reduced: usize,
    /// The gradients that come in.
    filling: Option<Buffer>,
    /// The first round of the last fill.
    reducing: Option<Pending>,
    /// The sum, or this rank's slice of it, of the fills whose first round is over.
    sum: Option<Buffer>,
    /// Of `filling` and of `sum`: whether it is parked, and whether it has changed since it came back.
    away: [bool; 2],
    changed: [bool; 2],
    /// Whether this step is summed by the bucket's own method.
    own_sum: bool,
    /// Whether a reduction failed.
    lost: bool,
}

/// Fills that may be on their way to slices at once: one that is reduced while the next is started. Each holds the
/// memory of a whole bucket. That a further one waits for the oldest, whether or not that is done, keeps the peak of
/// memory independent of timing.
const IN_FLIGHT: usize = 2;

/// The two of a slot's vectors that can be parked.
const FILLING: usize = 0;
const SUM: usize = 1;

/// Buckets that may be in memory where gradients are parked: the one that is being filled, and the one before it, to
/// which a deferred gradient may still come.
const HERE: usize = 2;

/// The parked vectors.
#[derive(Debug)]
struct Lot {
    parking: Box<dyn Parking>,
    /// Buckets with gradients in memory; the one used last is at the back.
    here: VecDeque<usize>,
}

/// Reduces buckets of gradients as early as possible.
///
/// In a step, add to [`gradient`](Self::gradient)s, call [`ready`](Self::ready) for each as often as its bucket says,
/// then [`finish`](Self::finish). Every rank of a bucket's rounds must make its buckets ready in the same order; the
/// ranks of [`Bucket::last`] need not.
#[derive(Debug)]
pub struct Reducer {
    slots: Vec<Slot>,
    vectors: Box<dyn Vectors>,
    /// Buckets whose slices are on their way, the oldest first.
    in_flight: VecDeque<usize>,
    lot: Option<Lot>,
}

impl Reducer {
    /// A reducer of these buckets, whose gradients lie in such vectors, all zero.
    pub fn new(buckets: Vec<Bucket>, vectors: impl Vectors + 'static) -> Result<Self, ReduceError> {
        Self::parked(buckets, vectors, None)
    }

    /// The same, whose gradients wait in `parking`, if there is one, while nothing is added to them: two buckets of
    /// them are in memory, and those that are on their way to slices. A reduction is waited for before a third bucket
    /// is filled. Between steps nothing is parked.
    pub fn parked(
        buckets: Vec<Bucket>,
        vectors: impl Vectors + 'static,
        parking: Option<Box<dyn Parking>>,
    ) -> Result<Self, ReduceError> {
        let slot = |(at, bucket): (usize, Bucket)| {
            // Where only slices stay, there is nothing before the first reduction.
            let sum =
                (!bucket.scatter && parking.is_none()).then(|| zeros(&vectors, at, bucket.elements)).transpose()?;
            let members = vec![Progress::default(); bucket.members.len()];
            let (filling, reducing, away, changed) = Default::default();
            Ok(Slot { bucket, members, reduced: 0, filling, reducing, sum, away, changed, own_sum: false, lost: false })
        };
        let slots = buckets.into_iter().enumerate().map(slot).collect::<Result<_, ReduceError>>()?;
        let lot = parking.map(|parking| Lot { parking, here: VecDeque::new() });
        Ok(Self { slots, vectors: Box::new(vectors), in_flight: VecDeque::new(), lot })
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.slots.len()
    }

    /// The range of a member in the gradients of its bucket.
    ///
    /// # Panics
    /// If there is no such bucket or member.
    pub fn range(&self, bucket: usize, member: usize) -> Range<usize> {
        self.slots[bucket].bucket.members[member].clone()
    }

    /// The slice of a bucket's sum that this rank ends with.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn slice(&self, bucket: usize) -> FlatSlice {
        self.slots[bucket].bucket.slice()
    }

    /// Begins a step, or an update of several in a step, of this number: slices of the last one are freed.
    pub fn begin(&mut self, number: u64) {
        for slot in &mut self.slots {
            slot.own_sum = slot.bucket.sum.as_mut().is_some_and(|sum| sum.begin(number));
            slot.members.fill(Progress::default());
            slot.reduced = 0;
            slot.sum.take_if(|_| slot.bucket.scatter);
            if slot.bucket.scatter {
                (slot.away, slot.changed) = Default::default();
            }
        }
        let Some(lot) = &mut self.lot else { return };
        for slot in &mut self.slots {
            slot.filling = None;
            slot.away[FILLING] = false;
            // The last sums can be looked at until the next ones come in.
            if !slot.changed[SUM] && slot.sum.take().is_some() {
                slot.away[SUM] = true;
            }
        }
        lot.here.retain(|&bucket| self.slots[bucket].sum.is_some());
        lot.parking.begin();
    }

    /// Counts a bucket as used, and parks those in whose place it comes.
    fn hold(&mut self, bucket: usize) -> Result<(), ReduceError> {
        let Some(lot) = &mut self.lot else { return Ok(()) };
        lot.here.retain(|&other| other != bucket);
        lot.here.push_back(bucket);
        while let Some(lot) = self.lot.as_mut().filter(|lot| lot.here.len() > HERE)
            && let Some(oldest) = lot.here.pop_front()
        {
            self.park(oldest)?;
        }
        Ok(())
    }

    /// Parks what a bucket has in memory, once its sum over ranks is there.
    fn park(&mut self, bucket: usize) -> Result<(), ReduceError> {
        if !self.slots[bucket].bucket.scatter {
            self.land(bucket)?;
        }
        let (Some(lot), slot) = (&mut self.lot, &mut self.slots[bucket]) else { return Ok(()) };
        for which in [FILLING, SUM] {
            let Some(gradients) = slot.part(which).take() else { continue };
            slot.away[which] = true;
            // A bucket that came back and was only read is still parked.
            if std::mem::take(&mut slot.changed[which]) {
                let parked = lot.parking.put(slot.place(bucket, which), gradients);
                parked.map_err(|source| ReduceError::Vectors { bucket, source })?;
            }
        }
        Ok(())
    }

    /// Brings back what a bucket has parked.
    fn bring(&mut self, bucket: usize, which: usize) -> Result<(), ReduceError> {
        let (Some(lot), slot) = (&mut self.lot, &mut self.slots[bucket]) else { return Ok(()) };
        if std::mem::take(&mut slot.away[which]) {
            let back = lot.parking.get(slot.place(bucket, which));
            *slot.part(which) = Some(back.map_err(|source| ReduceError::Vectors { bucket, source })?);
        }
        Ok(())
    }

    /// Brings back what a bucket's gradients are added to.
    fn fetch_filling(&mut self, bucket: usize) -> Result<(), ReduceError> {
        self.hold(bucket)?;
        let (slot, parks) = (&mut self.slots[bucket], self.lot.is_some());
        if parks && !slot.bucket.scatter && slot.filling.is_none() && !slot.away[FILLING] {
            // The first share of a sum that takes the place of the last one.
            slot.sum = None;
            (slot.away[SUM], slot.changed[SUM]) = (false, false);
        }
        self.bring(bucket, FILLING)
    }

    /// Brings back the gradients of a bucket that were reduced last, if they are parked: before
    /// [`gradients`](Self::gradients).
    ///
    /// # Errors
    /// The error of the parking.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn fetch(&mut self, bucket: usize) -> Result<(), ReduceError> {
        self.hold(bucket)?;
        self.bring(bucket, SUM)
    }

    /// The gradients of a bucket, the range of a member in them, and whether it holds nothing of this fill yet: then
    /// write to it, else add to it.
    ///
    /// # Panics
    /// If there is no such bucket or member.
    pub fn gradient(&mut self, bucket: usize, member: usize) -> Result<(&mut Buffer, Range<usize>, bool), ReduceError> {
        self.fetch_filling(bucket)?;
        let slot = &mut self.slots[bucket];
        if slot.lost {
            return Err(ReduceError::Lost { bucket });
        }
        if slot.is_final(member) {
            return Err(ReduceError::TooLate { bucket, member, what: "written" });
        }
        let first = !std::mem::replace(&mut slot.members[member].written, true);
        let range = slot.bucket.members[member].clone();
        slot.changed[FILLING] = true;
        Ok((slot.filling(bucket, &*self.vectors)?, range, first))
    }

    /// How often a member must still be made ready before its bucket can be reduced.
    ///
    /// # Panics
    /// If there is no such bucket or member.
    pub fn awaits(&self, bucket: usize, member: usize) -> usize {
        let slot = &self.slots[bucket];
        (slot.bucket.shares * (slot.reduced + 1)).saturating_sub(slot.members[member].ready)
    }

    /// Counts a tape that has added its share to a gradient. The last one of a bucket starts its reduction, which is
    /// returned as an event; what has no share at all is zero.
    ///
    /// # Panics
    /// If there is no such bucket or member.
    pub fn ready(&mut self, bucket: usize, member: usize) -> Result<Option<BucketEvent>, ReduceError> {
        let slot = &mut self.slots[bucket];
        if slot.is_final(member) {
            return Err(ReduceError::TooLate { bucket, member, what: "said to be final" });
        }
        slot.members[member].ready += 1;
        let wanted = slot.bucket.shares * (slot.reduced + 1);
        if slot.members.iter().any(|member| member.ready < wanted) {
            return Ok(None);
        }
        self.fetch_filling(bucket)?;
        let (slot, vectors) = (&mut self.slots[bucket], &*self.vectors);
        for at in 0..slot.members.len() {
            if !std::mem::take(&mut slot.members[at].written) {
                let range = slot.bucket.members[at].clone();
                slot.changed[FILLING] = true;
                let gradients = slot.filling(bucket, vectors)?;
                vectors.zero(gradients, range).map_err(|source| ReduceError::Vectors { bucket, source })?;
            }
        }
        slot.reduced += 1;
        match slot.bucket.rounds.first() {
            None => {}
            Some(_) if slot.bucket.scatter => self.scatter(bucket)?,
            Some(group) => {
                let Some(gradients) = slot.filling.take() else { return Err(ReduceError::Lost { bucket }) };
                slot.lost = true;
                let pending = match slot.bucket.sum.as_mut().filter(|_| slot.own_sum) {
                    Some(sum) => sum.start(group, gradients).map_err(|source| not_summed(bucket, source))?,
                    None => {
                        group.start_all_reduce(gradients, ReduceOp::Sum).map_err(|source| failed(bucket, source))?
                    }
                };
                (slot.lost, slot.reducing) = (false, Some(pending));
            }
        }
        Ok(Some(BucketEvent::Started(bucket)))
    }

    /// Starts the first round of a fill whose sum is cut into slices.
    fn scatter(&mut self, bucket: usize) -> Result<(), ReduceError> {
        while self.in_flight.len() >= IN_FLIGHT || self.slots[bucket].reducing.is_some() {
            let Some(oldest) = self.in_flight.pop_front() else { break };
            self.land(oldest)?;
            self.hold(oldest)?;
        }
        self.fetch_filling(bucket)?;
        let slot = &mut self.slots[bucket];
        let (Some(group), Some(gradients)) = (slot.bucket.rounds.first(), slot.filling.take()) else { return Ok(()) };
        let count = slot.bucket.slice().count();
        let pending = match slot.bucket.sum.as_mut().filter(|_| slot.own_sum) {
            Some(sum) => {
                slot.lost = true;
                sum.start(group, gradients).map_err(|source| not_summed(bucket, source))?
            }
            None => {
                let room = self.vectors.alloc(count).map_err(|source| ReduceError::Vectors { bucket, source })?;
                slot.lost = true;
                group.start_reduce_scatter(gradients, room, ReduceOp::Sum).map_err(|source| failed(bucket, source))?
            }
        };
        (slot.lost, slot.reducing) = (false, Some(pending));
        self.in_flight.push_back(bucket);
        Ok(())
    }

    /// Waits for the first round of a bucket's last fill, and adds its slice to the earlier slices.
    fn land(&mut self, bucket: usize) -> Result<(), ReduceError> {
        let Some(pending) = self.slots[bucket].reducing.take() else { return Ok(()) };
        self.bring(bucket, SUM)?;
        let slot = &mut self.slots[bucket];
        slot.changed[SUM] = true;
        slot.lost = true;
        let mut reduced = pending.wait().map_err(|source| failed(bucket, source))?;
        let (own, group) = (slot.bucket.sum.as_mut().filter(|_| slot.own_sum), slot.bucket.rounds.first());
        if let (Some(sum), Some(group)) = (own, group) {
            reduced = sum.finish(group, reduced).map_err(|source| not_summed(bucket, source))?;
        }
        match &mut slot.sum {
            Some(sum) => {
                self.vectors.add(sum, &reduced).map_err(|source| ReduceError::Vectors { bucket, source })?;
            }
            sum @ None => *sum = Some(reduced),
        }
        slot.lost = false;
        Ok(())
    }

    /// Whether the first reduction of a bucket's last fill is over on this rank; without a round, whether its gradients
    /// are final.
    pub fn is_reduced(&self, bucket: usize) -> bool {
        let slot = &self.slots[bucket];
        let pending = slot.reducing.as_ref().is_none_or(Pending::is_done);
        let all = !slot.bucket.rounds.is_empty() || slot.bucket.last.is_none();
        slot.reduced == slot.bucket.fills && pending && all && !slot.lost
    }

    /// Waits for every bucket, and runs the rounds after the first and the last sum. Afterwards buckets hold the sums
    /// and can be filled again.
    pub fn finish(&mut self, mut on_event: impl FnMut(BucketEvent)) -> Result<(), ReduceError> {
        self.in_flight.clear();
        for bucket in 0..self.slots.len() {
            let slot = &self.slots[bucket];
            if slot.lost {
                return Err(ReduceError::Lost { bucket });
            }
            if let Some(member) = (0..slot.members.len()).find(|&member| !slot.is_final(member)) {
                return Err(ReduceError::Missing { bucket, member });
            }
            self.hold(bucket)?;
            self.land(bucket)?;
            [FILLING, SUM].into_iter().try_for_each(|which| self.bring(bucket, which))?;
            let slot = &mut self.slots[bucket];
            // A sum without a first round is kept as it came in.
            let (reduced, filled) = (slot.sum.take(), slot.filling.take());
            slot.changed[SUM] |= reduced.is_none() && slot.changed[FILLING];
            slot.lost = true;
            let mut sum = reduced.or(filled).ok_or(ReduceError::Lost { bucket })?;
            for group in slot.bucket.rounds.iter().skip(1).chain(&slot.bucket.last) {
                slot.changed[SUM] = true;
                sum = group.all_reduce(sum, ReduceOp::Sum).map_err(|source| failed(bucket, source))?;
            }
            slot.sum = Some(sum);
            slot.lost = false;
            slot.members.fill(Progress::default());
            slot.reduced = 0;
            on_event(BucketEvent::Done(bucket));
        }
        Ok(())
    }

    /// How the first round of a bucket is summed, if not by an all-reduce or a reduce-scatter.
    pub fn sum_mut(&mut self, bucket: usize) -> Option<&mut (dyn Sum + 'static)> {
        self.slots[bucket].bucket.sum.as_deref_mut()
    }

    /// Whether gradients are parked, so that few buckets are in memory at a time.
    pub fn parks(&self) -> bool {
        self.lot.is_some()
    }

    /// A copy in host memory of the gradients of a bucket that were reduced last, if they are parked, which they still
    /// are afterwards.
    ///
    /// # Errors
    /// The error of the parking.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn peek(&self, bucket: usize) -> Result<Option<Buffer>, ReduceError> {
        let (slot, lot) = (&self.slots[bucket], self.lot.as_ref());
        let parked = lot.filter(|_| slot.away[SUM]).map(|lot| lot.parking.peek(slot.place(bucket, SUM)));
        parked.transpose().map_err(|source| ReduceError::Vectors { bucket, source })
    }

    /// The gradients of a bucket that were reduced last, or this rank's slice of them; nothing while a reduction is
    /// under way, or if they are parked.
    pub fn gradients(&self, bucket: usize) -> Option<&Buffer> {
        self.slots[bucket].sum.as_ref()
    }

    /// The same, for writing.
    pub fn gradients_mut(&mut self, bucket: usize) -> Option<&mut Buffer> {
        self.slots[bucket].changed[SUM] = true;
        self.slots[bucket].sum.as_mut()
    }
}

impl Slot {
    /// Whether nothing may be added to a member any more in this step.
    fn is_final(&self, member: usize) -> bool {
        self.members[member].ready >= self.bucket.shares * self.bucket.fills
    }

    fn part(&mut self, which: usize) -> &mut Option<Buffer> {
        if which == FILLING { &mut self.filling } else { &mut self.sum }
    }

    /// Where a part is parked. Without slices the sum is what came in, and there is no other.
    fn place(&self, bucket: usize, which: usize) -> usize {
        2 * bucket + if self.bucket.scatter { which } else { 0 }
    }

    /// Memory for the gradients that come in: the memory of the last sum, or new memory where only a slice of the sum
    /// is kept.
    fn filling(&mut self, bucket: usize, vectors: &dyn Vectors) -> Result<&mut Buffer, ReduceError> {
        let gradients = match (self.filling.take(), self.bucket.scatter) {
            (Some(gradients), _) => gradients,
            (None, false) => match self.sum.take() {
                Some(sum) => sum,
                None => zeros(vectors, bucket, self.bucket.elements)?,
            },
            (None, true) => {
                let (elements, padded) = (self.bucket.elements, self.bucket.slice().padded());
                let failed = |source| ReduceError::Vectors { bucket, source };
                let mut gradients = vectors.alloc(padded).map_err(failed)?;
                vectors.zero(&mut gradients, elements..padded).map_err(failed)?;
                gradients
            }
        };
        Ok(self.filling.insert(gradients))
    }
}

fn zeros(vectors: &dyn Vectors, bucket: usize, count: usize) -> Result<Buffer, ReduceError> {
    let failed = |source| ReduceError::Vectors { bucket, source };
    let mut vector = vectors.alloc(count).map_err(failed)?;
    vectors.zero(&mut vector, 0..count).map_err(failed)?;
    Ok(vector)
}

/// A failure of a bucket's own method. One of a communication stays one.
fn not_summed(bucket: usize, source: VectorError) -> ReduceError {
    match source.downcast::<CommError>() {
        Ok(source) => ReduceError::Comm { bucket, source },
        Err(source) => ReduceError::Vectors { bucket, source },
    }
}

fn failed(bucket: usize, source: CommError) -> ReduceError {
    ReduceError::Comm { bucket, source: Box::new(source) }
}
