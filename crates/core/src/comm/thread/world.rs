//! The world that its ranks share, and the communicator that each of them holds.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::operation::Key;
use super::state::{State, Step};
use super::watch::Watch;
use super::work::{Post, PostError};
use crate::buffer::Buffer;
use crate::comm::pending::PendingOp;
use crate::comm::{
    Activity, Call, CommError, Communicator, Fault, OpInfo, OpKind, Pending, ReductionOrder, Site, check_members,
};
use crate::pool;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{self, Condvar, Mutex, MutexGuard};

/// The state shared by the ranks of a world.
pub(super) struct World {
    state: Mutex<State>,
    ranks: Vec<RankSignals>,
    timeout: Duration,
}

/// One rank's signals. Aligned, so that a heartbeat does not disturb another rank's cache line.
#[derive(Default)]
#[repr(align(64))]
struct RankSignals {
    /// The rank parks here.
    wake: Condvar,
    /// Grows as long as the rank makes progress.
    beats: AtomicU64,
}

impl World {
    pub(super) fn new(ranks: usize, timeout: Duration) -> World {
        let state = Mutex::new(State::new(ranks));
        World { state, ranks: (0..ranks).map(|_| RankSignals::default()).collect(), timeout }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under the lock should panic; if it does, errors still reach every rank.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock, then does the work that had to wait for that.
    fn release(&self, mut state: MutexGuard<'_, State>) {
        let errands = std::mem::take(&mut state.errands);
        drop(state);
        for rank in errands.wake {
            self.ranks[rank].wake.notify_all();
        }
        drop((errands.drop, errands.drop_posts));
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.release(state);
        result
    }

    fn beat(&self, rank: usize) {
        self.ranks[rank].beats.fetch_add(1, Ordering::Relaxed);
    }

    /// Records how a rank ended; only its first end counts.
    pub(super) fn end(&self, rank: usize, how: Activity) {
        self.with(|state| state.end(rank, how));
    }

    /// The rank that failed first, why, and what stopped the others.
    pub(super) fn first_failure(&self) -> (usize, String, Option<Arc<Fault>>) {
        self.with(|state| {
            let (rank, cause) = state.first_failure.clone().unwrap_or_default();
            (rank, cause, state.fault.clone())
        })
    }

    /// Blocks until the operation is over for the member in `slot`.
    fn wait(&self, key: Key, slot: usize, site: &Site) -> Result<Buffer, CommError> {
        let (rank, mut watch) = (site.world_rank, Watch::default());
        // Often enough that a timeout is noticed at most a quarter of its duration late.
        let tick = (self.timeout / 4).max(Duration::from_millis(1));
        let mut state = self.lock();
        state.ranks[rank].waiting.push(key);
        let result = loop {
            match state.step(key, slot, site) {
                Step::Done(post) => break Ok(post),
                Step::Failed(error) => break Err(error),
                Step::Work(claim) => {
                    self.release(state);
                    let ran = claim.run();
                    state = self.lock();
                    state.finish(&claim, ran, rank);
                }
                Step::Park if !state.errands.is_empty() => {
                    self.release(state);
                    state = self.lock();
                }
                Step::Park => {
                    #[cfg(shuttle)]
                    if sync::model::planted(sync::model::Bug::RankSleepsLate) {
                        drop(state);
                        state = self.lock();
                    }
                    let timed_out;
                    let wake = &self.ranks[rank].wake;
                    (state, timed_out) = pool::yield_core(|| sync::wait_timeout(wake, &self.state, state, tick));
                    if timed_out {
                        let beats = |rank: usize| self.ranks[rank].beats.load(Ordering::Relaxed);
                        // The next step finds the fault, if there is one.
                        let _ = watch.look(&mut state, site, beats, self.timeout);
                    }
                }
            }
        };
        state.ranks[rank].waiting.retain(|waiting| *waiting != key);
        if result.is_err() {
            state.detach(key, slot);
        }
        self.release(state);
        self.beat(rank);
        let Some(post) = result? else { return Ok(Buffer::empty()) };
        post.into_result().map_err(|message| CommError::Backend {
            op: site.op.as_ref().map_or(OpKind::Barrier, |op| op.kind),
            group: site.group.to_string(),
            world_rank: rank,
            message,
        })
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World({} ranks)", self.ranks.len())
    }
}

/// Held by all communicators and operations of a rank: when it is dropped, the rank has ended.
#[derive(Debug)]
pub(super) struct RankLife {
    world: Arc<World>,
    rank: usize,
}

impl RankLife {
    pub(super) fn new(world: Arc<World>, rank: usize) -> Arc<RankLife> {
        Arc::new(RankLife { world, rank })
    }
}

impl Drop for RankLife {
    fn drop(&mut self) {
        // `run` reports how its ranks ended before their lives are dropped: here the ranks of `world` report.
        let how = match std::thread::panicking() {
            true => Activity::Panicked("the thread that held its communicators".to_owned()),
            false => Activity::Left,
        };
        self.world.end(self.rank, how);
    }
}

/// One rank's end of a group.
#[derive(Debug)]
pub(super) struct ThreadComm {
    life: Arc<RankLife>,
    group: usize,
    member: usize,
    name: Arc<str>,
    /// Shared by the members: worlds of thousands of ranks have as many ends of groups of as many.
    ranks: Arc<[usize]>,
}

impl ThreadComm {
    /// A rank's end of the whole world.
    pub(super) fn of_world(life: Arc<RankLife>) -> ThreadComm {
        let (member, ranks) = (life.rank, life.world.with(|state| Arc::clone(&state.groups[0].ranks)));
        ThreadComm { life, group: 0, member, name: "world".into(), ranks }
    }
}

impl Communicator for ThreadComm {
    fn rank(&self) -> usize {
        self.member
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn world_ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        let (world, rank, kind) = (&self.life.world, self.life.rank, call.op.kind());
        // Checked again, although `Group` has checked, because the pieces of work use pointers and rely on it.
        call.check(self.member, self.size()).map_err(|error| error.on(self, kind))?;
        world.beat(rank);
        let info = call.info(&self.ranks);
        let post = Post::new(call).map_err(|error| match error {
            PostError::Comm(error) => error,
            PostError::Device(message) => {
                CommError::Backend { op: kind, group: self.name.to_string(), world_rank: rank, message }
            }
        })?;
        let (key, slot, mut claim) = world.with(|state| {
            let posted = state.post(self.group, self.member, post, info.clone());
            posted.map(|(key, slot)| (key, slot, state.claim(key)))
        })?;
        while let Some(work) = claim {
            let ran = work.run();
            claim = world.with(|state| {
                state.finish(&work, ran, rank);
                state.claim(key)
            });
        }
        let life = Arc::clone(&self.life);
        Ok(Pending::new(ThreadPending { life, key, slot, info, group: Arc::clone(&self.name), taken: false }))
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let ranks = check_members(self, name, members)?;
        let life = Arc::clone(&self.life);
        life.world.beat(life.rank);
        let (group, ranks) = life.world.with(|state| state.split(self.group, self.member, name, &ranks))?;
        // `check_members` found this rank among the members.
        let member = members.iter().position(|&rank| rank == self.member).unwrap_or_default();
        Ok(Arc::new(ThreadComm { life, group, member, name: name.into(), ranks }))
    }

    fn heartbeat(&self) {
        self.life.world.beat(self.life.rank);
    }

    fn reduction_order(&self) -> ReductionOrder {
        ReductionOrder::BalancedTree
    }
}

/// A member's claim on the result of an operation.
struct ThreadPending {
    life: Arc<RankLife>,
    key: Key,
    slot: usize,
    info: OpInfo,
    group: Arc<str>,
    taken: bool,
}

impl PendingOp for ThreadPending {
    fn wait(mut self: Box<Self>) -> Result<Buffer, CommError> {
        self.taken = true;
        let site = Site {
            group: Arc::clone(&self.group),
            group_id: self.key.group as u64,
            world_rank: self.life.rank,
            seq: self.key.seq,
            op: Some(self.info.clone()),
        };
        self.life.world.wait(self.key, self.slot, &site)
    }

    fn is_done(&self) -> bool {
        self.life.world.with(|state| state.is_over(self.key))
    }
}

impl Drop for ThreadPending {
    fn drop(&mut self) {
        if !self.taken {
            self.life.world.with(|state| state.detach(self.key, self.slot));
        }
    }
}
