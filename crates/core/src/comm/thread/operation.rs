//! An operation in flight: which members have posted, which pieces are claimed, and which members have taken the
//! result.
//!
//! Life of an operation: members post; with the last post it has a plan, whose pieces are claimed and done outside the
//! lock; when all are done, each member takes its own post back, and the operation is removed with the last one. A
//! fault stops claims; the memory is freed when the pieces in progress are over.

use super::work::{Plan, Post};
use crate::comm::device::Moment;
use crate::comm::{Op, OpInfo, Peer};
use crate::pool;
#[cfg(shuttle)]
use crate::sync;
use std::ops::Range;
use std::sync::Arc;

/// Identifies an operation. Messages have a sequence of their own for each sender and receiver: their order relative to
/// collectives does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) group: usize,
    /// Sender and receiver of a message, as ranks in the group.
    pub(super) message: Option<(usize, usize)>,
    pub(super) seq: u64,
}

/// Pieces to do, outside the lock. Must be given back with [`State::finish`](super::state::State::finish).
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) key: Key,
    plan: Arc<Plan>,
    pieces: Range<usize>,
}

impl Claim {
    /// Does the pieces, or lets devices do them. Of devices it returns the moments after which the buffers are the
    /// members' again, or the refusal.
    pub(super) fn run(&self) -> Result<Vec<Moment>, String> {
        if let Some(carried) = self.plan.carry() {
            return carried;
        }
        // SAFETY: the posts exist, checked and agreeing, until every claim is given back: `Operation::idle` holds for
        // none with an open claim, and only idle operations are dropped or give posts back. Each piece is claimed
        // once, under the lock.
        unsafe { self.plan.run(self.pieces.clone()) }
        Ok(Vec::new())
    }
}

#[derive(Debug)]
enum Slot {
    /// The member has not posted yet.
    Missing,
    Posted {
        post: Box<Post>,
        info: OpInfo,
        detached: bool,
    },
    /// The member has its buffer back, or does not want it.
    Taken,
}

/// One operation in flight.
#[derive(Debug)]
pub(super) struct Operation {
    /// World rank of each slot. Collectives have one slot per member, messages one for the sender and one for the
    /// receiver.
    pub(super) ranks: Arc<[usize]>,
    slots: Vec<Slot>,
    /// Members that have taken their post, or will not.
    over: usize,
    /// The slot that posted first, with which the others are compared.
    first: usize,
    missing: usize,
    plan: Option<Arc<Plan>>,
    claimed: usize,
    done: usize,
    /// Open claims.
    active: usize,
}

impl Operation {
    pub(super) fn new(ranks: Arc<[usize]>, first: usize) -> Operation {
        let missing = ranks.len();
        let slots = ranks.iter().map(|_| Slot::Missing).collect();
        Operation { ranks, slots, over: 0, first, missing, plan: None, claimed: 0, done: 0, active: 0 }
    }

    /// World ranks of the members that have not posted.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        let slots = self.slots.iter().zip(&*self.ranks);
        let missing = if self.is_full() { 0 } else { self.slots.len() };
        slots.take(missing).filter(|(slot, _)| matches!(slot, Slot::Missing)).map(|(_, &rank)| rank)
    }

    /// Whether every member has posted.
    pub(super) fn is_full(&self) -> bool {
        self.missing == 0
    }

    /// Whether the result is complete.
    pub(super) fn is_done(&self) -> bool {
        #[cfg(shuttle)]
        if sync::model::planted(sync::model::Bug::DoneWhenClaimed) {
            return self.plan.as_ref().is_some_and(|plan| self.claimed == plan.len());
        }
        self.plan.as_ref().is_some_and(|plan| self.done == plan.len())
    }

    /// Whether no rank works on the memory now.
    pub(super) fn idle(&self) -> bool {
        #[cfg(shuttle)]
        if sync::model::planted(sync::model::Bug::DoneWhenClaimed) {
            return true;
        }
        self.active == 0
    }

    /// The call that `rank` posted, if the post is still there.
    pub(super) fn info(&self, rank: usize) -> Option<OpInfo> {
        let slot = self.ranks.iter().position(|&r| r == rank)?;
        match &self.slots[slot] {
            Slot::Posted { info, .. } => Some(info.clone()),
            Slot::Missing | Slot::Taken => None,
        }
    }

    /// The first member whose operation differs from `post` of the member in `slot`: its operation, and the operation
    /// of the member in `slot`, as far as they differ.
    pub(super) fn disagreement(
        &self,
        slot: usize,
        post: &Post,
        info: &OpInfo,
    ) -> Option<((usize, OpInfo), (usize, OpInfo))> {
        let Slot::Posted { info: theirs, .. } = &self.slots[self.first] else { return None };
        let (me, first) = (self.ranks[slot], self.ranks[self.first]);
        if !theirs.agrees(info) {
            return Some(((first, theirs.clone()), (me, info.clone())));
        }
        let Op::AllToAll { send_counts, recv_counts } = post.op() else { return None };
        self.slots.iter().enumerate().find_map(|(other, theirs)| {
            let Slot::Posted { post: theirs, .. } = theirs else { return None };
            let Op::AllToAll { send_counts: sends, recv_counts: receives } = theirs.op() else {
                return None;
            };
            let them = self.ranks[other];
            let part = |elements, peer| OpInfo { elements, peer: Some(peer), ..info.clone() };
            if sends[slot] != recv_counts[other] {
                let sent = part(sends[slot], Peer::To(me));
                return Some(((them, sent), (me, part(recv_counts[other], Peer::From(them)))));
            }
            if receives[slot] != send_counts[other] {
                let received = part(receives[slot], Peer::From(me));
                return Some(((them, received), (me, part(send_counts[other], Peer::To(them)))));
            }
            None
        })
    }

    /// Adds a post that agrees with the previous ones. With the last post the work can begin.
    pub(super) fn accept(&mut self, slot: usize, post: Post, info: OpInfo) {
        self.slots[slot] = Slot::Posted { post: Box::new(post), info, detached: false };
        self.missing -= 1;
        if self.is_full() {
            let posts = self.slots.iter_mut().filter_map(|slot| match slot {
                Slot::Posted { post, .. } => Some(&mut **post),
                Slot::Missing | Slot::Taken => None,
            });
            let mut posts: Vec<_> = posts.collect();
            let plan = match Post::trade(&mut posts) {
                true => Plan::empty(),
                false => Plan::new(&posts.iter().map(|post| &**post).collect::<Vec<_>>()),
            };
            self.plan = Some(Arc::new(plan));
        }
    }

    /// Pieces that no rank has claimed.
    pub(super) fn claim(&mut self, key: Key) -> Option<Claim> {
        let plan = self.plan.as_ref()?;
        if self.claimed == plan.len() {
            return None;
        }
        let pieces = self.claimed..plan.claim_end(self.claimed);
        self.claimed = pieces.end;
        self.active += 1;
        Some(Claim { key, plan: Arc::clone(plan), pieces })
    }

    /// Number of members that could help the last one: at most one for each claim besides its own first, and one for
    /// each core besides its own.
    pub(super) fn helpers(&self) -> usize {
        let Some(plan) = &self.plan else { return 0 };
        let next = |start: &usize| Some(plan.claim_end(*start)).filter(|&end| end < plan.len());
        std::iter::successors(next(&self.claimed), next).take(pool::threads() - 1).count()
    }

    /// Takes a claim back whose pieces are done, or queued until these moments.
    pub(super) fn finish(&mut self, claim: &Claim, moments: Vec<Moment>) {
        self.active -= 1;
        self.done += claim.pieces.len();
        if moments.is_empty() {
            return; // in host memory what is done is over
        }
        let moments: Arc<[Moment]> = moments.into();
        for slot in &mut self.slots {
            if let Slot::Posted { post, .. } = slot {
                post.set_done(moments.clone());
            }
        }
    }

    /// Takes a claim back whose pieces cannot be done.
    pub(super) fn give_up(&mut self) {
        self.active -= 1;
    }

    /// Returns a member's post to it, if the operation is done.
    pub(super) fn take(&mut self, slot: usize) -> Option<Post> {
        debug_assert!(self.idle() && self.is_done());
        match std::mem::replace(&mut self.slots[slot], Slot::Taken) {
            Slot::Posted { post, detached, .. } => {
                self.over += usize::from(!detached);
                Some(*post)
            }
            Slot::Missing | Slot::Taken => None,
        }
    }

    /// Records that a member will not take its post back.
    pub(super) fn detach(&mut self, slot: usize) {
        if let Slot::Posted { detached, .. } = &mut self.slots[slot] {
            self.over += usize::from(!std::mem::replace(detached, true));
        }
    }

    /// Whether every member has taken its post, or will not. Then an operation that is done can be removed.
    pub(super) fn is_over(&self) -> bool {
        self.over == self.slots.len()
    }
}
