//! All bookkeeping of a world, under one lock: groups, operations in flight, what each rank does, the first fault.
//!
//! With one lock the questions that decide whether to wait have exact answers: has every member posted, does a rank
//! wait for this one, do the waits form a cycle? Only bookkeeping happens under it: pieces are done, memory is dropped
//! and ranks are woken outside.
//!
//! More than 400 lines: everything that the one lock guards.

use super::operation::{Claim, Key, Operation};
use super::progress::Progress;
use super::work::Post;
use crate::comm::device::Moment;
use crate::comm::{Activity, CommError, Ended, Fault, FaultKind, Op, OpInfo, RankReport, Site};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct State {
    pub(super) groups: Vec<GroupState>,
    /// Splits of a group, by its number and the number of earlier splits.
    splits: HashMap<(usize, u64), Split>,
    ops: HashMap<Key, Operation>,
    pub(super) ranks: Vec<RankState>,
    /// The number of ranks that have ended.
    ended: usize,
    pub(super) fault: Option<Arc<Fault>>,
    /// The rank that failed first and the cause: a fault, or an error of its own.
    pub(super) first_failure: Option<(usize, String)>,
    pub(super) errands: Errands,
    pub(super) progress: Progress,
}

/// Work to be done after the lock is released: a woken rank needs the lock, and dropping memory may take long or call
/// an arena.
#[derive(Debug, Default)]
pub(super) struct Errands {
    pub(super) wake: Vec<usize>,
    pub(super) drop: Vec<Operation>,
    pub(super) drop_posts: Vec<Post>,
}

impl Errands {
    pub(super) fn is_empty(&self) -> bool {
        self.wake.is_empty() && self.drop.is_empty() && self.drop_posts.is_empty()
    }
}

#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) name: Arc<str>,
    /// World ranks of the members.
    pub(super) ranks: Arc<[usize]>,
    /// Collectives that each member has started.
    collectives: Vec<u64>,
    /// Messages that each sender and receiver have started.
    messages: HashMap<(usize, usize), [u64; 2]>,
    /// Number of splits that each member has made.
    splits: Vec<u64>,
}

/// The parts of a split so far.
#[derive(Debug, Default)]
struct Split {
    parts: Vec<SplitPart>,
    /// The part of each rank that is in one.
    part_of: HashMap<usize, usize>,
}

/// One part of a split, as named by the members that have arrived.
#[derive(Debug)]
struct SplitPart {
    name: String,
    /// World ranks.
    ranks: Arc<[usize]>,
    group: usize,
    /// The first member that named it.
    named_by: usize,
}

#[derive(Debug, Default)]
pub(super) struct RankState {
    /// How it ended, if it did.
    pub(super) ended: Option<Activity>,
    /// The operations for which it waits: at most one, except for ranks with several threads.
    pub(super) waiting: Vec<Key>,
    /// The operation that it started last.
    last: Option<(Key, OpInfo)>,
}

/// The next step of a waiting rank.
pub(super) enum Step {
    /// The operation is done; this is the rank's post.
    Done(Option<Post>),
    /// The world stopped.
    Failed(CommError),
    /// There is work to help with.
    Work(Claim),
    /// Others must act first.
    Park,
}

impl State {
    /// `ranks` ranks in one group of this name.
    pub(super) fn new(name: &str, ranks: usize) -> State {
        let mut state = State {
            groups: Vec::new(),
            splits: HashMap::new(),
            ops: HashMap::new(),
            ranks: (0..ranks).map(|_| RankState::default()).collect(),
            ended: 0,
            fault: None,
            first_failure: None,
            errands: Errands::default(),
            progress: Progress::default(),
        };
        state.add_group(name, (0..ranks).collect());
        state
    }

    fn add_group(&mut self, name: &str, ranks: Arc<[usize]>) -> usize {
        self.groups.push(GroupState {
            name: name.into(),
            collectives: vec![0; ranks.len()],
            messages: HashMap::new(),
            splits: vec![0; ranks.len()],
            ranks,
        });
        self.groups.len() - 1
    }

    /// The member's group after a split, whose parts are added as their members arrive, and its ranks. `ranks` are
    /// world ranks.
    pub(super) fn split(
        &mut self,
        parent: usize,
        member: usize,
        name: &str,
        ranks: &[usize],
    ) -> Result<(usize, Arc<[usize]>), CommError> {
        let group = &mut self.groups[parent];
        let (rank, cut) = (group.ranks[member], group.splits[member]);
        group.splits[member] += 1;
        let site = Site { group: group.name.clone(), group_id: parent as u64, world_rank: rank, seq: cut, op: None };
        if let Some(fault) = &self.fault {
            return Err(CommError::Stopped { site, fault: Arc::clone(fault) });
        }
        let split = self.splits.entry((parent, cut)).or_default();
        // Others have named the part of this rank, or it names the first part of all of its ranks, unless one of these
        // is in another.
        let found = split.part_of.get(&rank).or_else(|| ranks.iter().find_map(|other| split.part_of.get(other)));
        let Some(part) = found.map(|&part| &split.parts[part]) else {
            let ranks: Arc<[usize]> = ranks.into();
            let group = self.add_group(name, Arc::clone(&ranks));
            let split = self.splits.entry((parent, cut)).or_default();
            split.part_of.extend(ranks.iter().map(|&member| (member, split.parts.len())));
            split.parts.push(SplitPart { name: name.to_owned(), ranks: Arc::clone(&ranks), group, named_by: rank });
            return Ok((group, ranks));
        };
        if part.name == name && *part.ranks == *ranks {
            return Ok((part.group, Arc::clone(&part.ranks)));
        }
        let first = (part.named_by, part.name.clone(), part.ranks.to_vec());
        let second = (rank, name.to_owned(), ranks.to_vec());
        let (first, second) = if first.0 < second.0 { (first, second) } else { (second, first) };
        Err(self.stop(FaultKind::SplitDisagreement { first, second }, site))
    }

    /// Adds a member's part of an operation. Returns the operation and the member's slot in it.
    pub(super) fn post(
        &mut self,
        group: usize,
        member: usize,
        post: Post,
        info: OpInfo,
    ) -> Result<(Key, usize), CommError> {
        let state = &mut self.groups[group];
        let (key, slot) = state.place(group, member, &post.call.op);
        let rank = state.ranks[member];
        let site = Site {
            group: Arc::clone(&state.name),
            group_id: group as u64,
            world_rank: rank,
            seq: key.seq,
            op: Some(info.clone()),
        };
        self.ranks[rank].last = Some((key, info.clone()));
        if let Some(fault) = &self.fault {
            self.errands.drop_posts.push(post);
            return Err(CommError::Stopped { site, fault: Arc::clone(fault) });
        }
        let op = self.ops.entry(key).or_insert_with(|| Operation::new(state.slot_ranks(key), slot));
        if let Some((a, b)) = op.disagreement(slot, &post, &info) {
            self.errands.drop_posts.push(post);
            let (first, second) = if a.0 < b.0 { (a, b) } else { (b, a) };
            return Err(self.stop(FaultKind::Disagreement { first, second }, site));
        }
        op.accept(slot, post, info);
        if let Some(gone) = ended_of(&self.ranks, self.ended, op) {
            return Err(self.gone(gone, site));
        }
        let wake = if op.is_done() { usize::MAX } else { op.helpers() };
        self.wake_waiting(key, wake);
        Ok((key, slot))
    }

    /// Pieces of an operation that no rank has claimed.
    pub(super) fn claim(&mut self, key: Key) -> Option<Claim> {
        if self.fault.is_some() { None } else { self.ops.get_mut(&key)?.claim(key) }
    }

    /// Takes a claim back from `rank`, which ran it. With the last one the operation is done; what a device refused
    /// stops the world.
    pub(super) fn finish(&mut self, claim: &Claim, ran: Result<Vec<Moment>, String>, rank: usize) {
        let Some(op) = self.ops.get_mut(&claim.key) else { return };
        match ran {
            Ok(moments) => op.finish(claim, moments),
            Err(message) => {
                op.give_up();
                let site = self.site(claim.key, rank, self.info(claim.key, rank));
                self.stop(FaultKind::Device { rank, message }, site);
                return;
            }
        }
        if op.is_done() {
            self.wake_waiting(claim.key, usize::MAX);
            self.remove_if_over(claim.key);
        } else if op.idle() && self.fault.is_some() {
            self.errands.drop.extend(self.ops.remove(&claim.key));
        }
    }

    /// The next step of the rank that waits for `key`.
    pub(super) fn step(&mut self, key: Key, slot: usize, site: &Site) -> Step {
        let Some(op) = self.ops.get_mut(&key) else {
            return Step::Failed(self.stopped(site));
        };
        if op.is_done() {
            let post = op.take(slot);
            self.remove_if_over(key);
            return Step::Done(post);
        }
        if self.fault.is_some() {
            return Step::Failed(self.stopped(site));
        }
        if op.is_full() {
            return op.claim(key).map_or(Step::Park, Step::Work);
        }
        if let Some(gone) = ended_of(&self.ranks, self.ended, op) {
            return Step::Failed(self.gone(gone, site.clone()));
        }
        match self.cycle(site.world_rank) {
            Some(cycle) => Step::Failed(self.stop(FaultKind::Deadlock { cycle }, site.clone())),
            None => Step::Park,
        }
    }

    /// Whether a wait for the operation would return at once.
    pub(super) fn is_over(&self, key: Key) -> bool {
        self.fault.is_some() || self.ops.get(&key).is_none_or(Operation::is_done)
    }

    /// Records that a member will not wait (any more).
    pub(super) fn detach(&mut self, key: Key, slot: usize) {
        if let Some(op) = self.ops.get_mut(&key) {
            op.detach(slot);
            self.remove_if_over(key);
        }
    }

    fn remove_if_over(&mut self, key: Key) {
        if self.ops.get(&key).is_some_and(|op| op.is_done() && op.is_over()) {
            self.errands.drop.extend(self.ops.remove(&key));
        }
    }

    /// Marks ranks that wait for the operation to be woken.
    fn wake_waiting(&mut self, key: Key, limit: usize) {
        let Some(op) = self.ops.get(&key) else { return };
        let waiting = |rank: &usize| self.ranks[*rank].waiting.contains(&key);
        self.errands.wake.extend(op.ranks.iter().copied().filter(waiting).take(limit));
    }

    /// Records the end of a rank, and stops the world if another rank waits for it.
    pub(super) fn end(&mut self, rank: usize, how: Activity) {
        if self.ranks[rank].ended.is_some() {
            return;
        }
        self.ranks[rank].ended = Some(how.clone());
        self.ended += 1;
        if self.all_ended() {
            self.errands.wake.extend(0..self.ranks.len()); // where they wait for the last one
        }
        if self.fault.is_some() {
            return;
        }
        match how {
            Activity::Panicked(message) => {
                self.poison(FaultKind::Panicked { rank, message }, None);
                return;
            }
            Activity::Failed(_) | Activity::Lost(_) if self.first_failure.is_none() => {
                self.first_failure = Some((rank, how.failure(rank)));
            }
            _ => {}
        }
        let needs_it = |waiter: usize| {
            let waiting = self.ranks[waiter].waiting.iter();
            waiting.copied().find(|key| self.ops.get(key).is_some_and(|op| op.missing().any(|r| r == rank)))
        };
        let needed = (0..self.ranks.len()).find_map(|waiter| Some((waiter, needs_it(waiter)?)));
        if let Some((waiter, key)) = needed {
            let site = self.site(key, waiter, self.info(key, waiter));
            self.gone(rank, site);
        }
    }

    pub(super) fn all_ended(&self) -> bool {
        self.ended == self.ranks.len()
    }

    /// How the ranks ended so far.
    pub(super) fn ended(&self) -> Ended {
        let ranks = (0..self.ranks.len()).map(|rank| self.report(rank).activity).collect();
        Ended { first: self.first_failure.clone(), fault: self.fault.clone(), ranks }
    }

    /// A place in the program, for messages.
    pub(super) fn site(&self, key: Key, world_rank: usize, op: Option<OpInfo>) -> Site {
        let group = Arc::clone(&self.groups[key.group].name);
        Site { group, group_id: key.group as u64, world_rank, seq: key.seq, op }
    }

    fn info(&self, key: Key, rank: usize) -> Option<OpInfo> {
        self.ops.get(&key)?.info(rank)
    }

    fn gone(&mut self, rank: usize, site: Site) -> CommError {
        let how = self.ranks[rank].ended.clone().unwrap_or(Activity::Left);
        self.stop(FaultKind::Gone { rank, how }, site)
    }

    /// Stops the world, and returns the error of the rank that noticed.
    pub(super) fn stop(&mut self, kind: FaultKind, site: Site) -> CommError {
        let fault = self.poison(kind, Some(site.clone()));
        CommError::Stopped { site, fault }
    }

    fn stopped(&mut self, site: &Site) -> CommError {
        match &self.fault {
            Some(fault) => CommError::Stopped { site: site.clone(), fault: Arc::clone(fault) },
            // An operation is removed only when its last member has taken its post, or by a fault, so a wait always
            // finds the operation or a fault.
            None => self.stop(FaultKind::Gone { rank: site.world_rank, how: Activity::Computing }, site.clone()),
        }
    }

    /// Records the first fault: from now on every operation that is not done fails.
    fn poison(&mut self, kind: FaultKind, site: Option<Site>) -> Arc<Fault> {
        if let Some(fault) = &self.fault {
            return Arc::clone(fault);
        }
        let ranks = (0..self.ranks.len()).map(|rank| self.report(rank)).collect();
        let fault = Arc::new(Fault { kind, site, ranks });
        if self.first_failure.is_none() {
            self.first_failure = Some((fault.kind.culprit(), fault.headline()));
        }
        let stuck = |_: &Key, op: &mut Operation| !op.is_done() && op.idle();
        self.errands.drop.extend(self.ops.extract_if(stuck).map(|(_, op)| op));
        self.errands.wake.extend(0..self.ranks.len());
        self.fault = Some(Arc::clone(&fault));
        fault
    }

    fn report(&self, rank: usize) -> RankReport {
        let state = &self.ranks[rank];
        let (waiting, last) = (state.waiting.last().copied(), state.last.clone());
        let activity = match (&state.ended, waiting) {
            (Some(how), _) => how.clone(),
            (None, Some(_)) => Activity::Waiting,
            (None, None) => Activity::Computing,
        };
        let site = match waiting {
            Some(key) => Some(self.site(key, rank, self.info(key, rank))),
            None => last.map(|(key, info)| self.site(key, rank, Some(info))),
        };
        RankReport { rank, activity, site }
    }

    /// Whether some operation in flight lacks `rank`.
    pub(super) fn is_awaited(&self, rank: usize) -> bool {
        self.ops.values().any(|op| op.missing().any(|missing| missing == rank))
    }

    /// Ranks without which `rank` cannot continue: it waits for operations that they have not posted.
    pub(super) fn awaited(&self, rank: usize) -> impl Iterator<Item = usize> {
        let ops = self.ranks[rank].waiting.iter().filter_map(|key| self.ops.get(key));
        ops.flat_map(Operation::missing)
    }
}

/// A rank that has ended without its part of an operation. Looks for one only if `ended` ranks, at least one, have.
fn ended_of(ranks: &[RankState], ended: usize, op: &Operation) -> Option<usize> {
    if ended == 0 { None } else { op.missing().find(|&rank| ranks[rank].ended.is_some()) }
}

impl GroupState {
    /// The key of a member's next operation, and the member's slot in it.
    fn place(&mut self, group: usize, member: usize, op: &Op) -> (Key, usize) {
        let message = match *op {
            Op::Send { to, .. } => Some((member, to, 0)),
            Op::Recv { from, .. } => Some((from, member, 1)),
            _ => None,
        };
        let next = |count: &mut u64| std::mem::replace(count, *count + 1);
        match message {
            Some((from, to, slot)) => {
                let seq = next(&mut self.messages.entry((from, to)).or_default()[slot]);
                (Key { group, message: Some((from, to)), seq }, slot)
            }
            None => {
                let seq = next(&mut self.collectives[member]);
                (Key { group, message: None, seq }, member)
            }
        }
    }

    /// World rank of each slot of an operation.
    fn slot_ranks(&self, key: Key) -> Arc<[usize]> {
        match key.message {
            Some((from, to)) => [self.ranks[from], self.ranks[to]].into(),
            None => Arc::clone(&self.ranks),
        }
    }
}
