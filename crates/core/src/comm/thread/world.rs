//! The world that its ranks share, and the communicator that each of them holds.

use super::operation::Key;
use super::state::{State, Step};
use super::watch::Watch;
use super::work::{Post, PostError};
use crate::buffer::Buffer;
use crate::comm::pending::PendingOp;
use crate::comm::{
    Activity, Call, CommError, Communicator, Ended, Membership, Op, OpInfo, OpKind, Pending, ReductionOrder, Site,
    check_members,
};
use crate::pool;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{self, Condvar, Instant, Mutex, MutexGuard};
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// The timeout of a fork: it has none.
const PATIENT: Duration = Duration::from_secs(1 << 40);

/// The state shared by the ranks of a world.
pub(super) struct World {
    state: Mutex<State>,
    ranks: Vec<RankSignals>,
    timeout: Duration,
    /// When it began: see [`Membership::origin`].
    origin: std::time::Instant,
    forks: Mutex<Forks>,
}

/// The worlds beside a world, in the order in which every rank comes to them.
struct Forks {
    worlds: Vec<Arc<World>>,
    /// The number of forks that each rank came to.
    come: Vec<usize>,
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
    /// `ranks` ranks in one group of this name.
    pub(super) fn new(name: &str, ranks: usize, timeout: Duration, origin: std::time::Instant) -> World {
        let state = Mutex::new(State::new(name, ranks));
        let forks = Mutex::new(Forks { worlds: Vec::new(), come: vec![0; ranks] });
        World { state, ranks: (0..ranks).map(|_| RankSignals::default()).collect(), timeout, origin, forks }
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

    /// Records how a rank ended; only its first end counts. It will not come to forks where it is not yet.
    pub(super) fn end(&self, rank: usize, how: Activity) {
        self.with(|state| state.end(rank, how.clone()));
        let missed: Vec<_> = {
            let forks = self.forks();
            forks.worlds.iter().skip(forks.come[rank]).cloned().collect()
        };
        missed.iter().for_each(|fork| fork.end(rank, how.clone()));
    }

    /// How its ranks ended so far.
    pub(super) fn ended(&self) -> Ended {
        self.with(|state| state.ended())
    }

    /// Waits until all ranks have ended, and after a fault at most for the timeout.
    fn wait_for_ends(&self, rank: usize) {
        let (mut state, mut stopped) = (self.lock(), None);
        while !state.all_ended() {
            if state.fault.is_some() && stopped.get_or_insert_with(Instant::now).elapsed() >= self.timeout {
                return;
            }
            (state, _) = sync::wait_timeout(&self.ranks[rank].wake, &self.state, state, self.tick());
        }
    }

    /// The longest that a rank sleeps: so often that a timeout is noticed at most a quarter of its duration late.
    fn tick(&self) -> Duration {
        (self.timeout / 4).max(Duration::from_millis(1))
    }

    /// The next world beside this one for `rank`, made by the first rank that comes.
    fn fork(&self, rank: usize, name: &str) -> Arc<World> {
        let mut forks = self.forks();
        let number = forks.come[rank];
        forks.come[rank] += 1;
        if forks.worlds.len() == number {
            let ranks = self.ranks.len();
            forks.worlds.push(Arc::new(World::new(name, ranks, PATIENT, self.origin)));
        }
        let ends = self.with(|state| state.ranks.iter().map(|rank| rank.ended.clone()).collect::<Vec<_>>());
        let missed = ends.into_iter().zip(&forks.come).enumerate().filter(|(_, (_, come))| **come <= number);
        let missed: Vec<_> = missed.filter_map(|(rank, (how, _))| Some((rank, how?))).collect();
        let fork = Arc::clone(&forks.worlds[number]);
        drop(forks);
        missed.into_iter().for_each(|(rank, how)| fork.end(rank, how));
        fork
    }

    fn forks(&self) -> MutexGuard<'_, Forks> {
        self.forks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until the operation is over for the member in `slot`.
    fn wait(&self, key: Key, slot: usize, site: &Site) -> Result<Buffer, CommError> {
        let (rank, mut watch) = (site.world_rank, Watch::default());
        let tick = self.tick();
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

impl Membership for RankLife {
    fn heartbeat(&self) {
        self.world.beat(self.rank);
    }

    fn origin(&self) -> std::time::Instant {
        self.world.origin
    }

    fn fork(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(communicator(&self.world.fork(self.rank, name), self.rank))
    }

    fn end(&self, how: Activity) -> Ended {
        self.world.end(self.rank, how);
        self.world.wait_for_ends(self.rank);
        self.world.ended()
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

/// A rank's end of the group of all ranks.
pub(super) fn communicator(world: &Arc<World>, rank: usize) -> Arc<dyn Communicator> {
    let life = Arc::new(RankLife { world: Arc::clone(world), rank });
    let (name, ranks) = world.with(|state| (Arc::clone(&state.groups[0].name), Arc::clone(&state.groups[0].ranks)));
    Arc::new(ThreadComm { life, group: 0, member: rank, name, ranks })
}

impl ThreadComm {
    /// What others compare of a call. It is checked again, although `Group` has checked, because the pieces of work use
    /// pointers and rely on it.
    fn checked(&self, call: &Call) -> Result<OpInfo, CommError> {
        call.check(self.member, self.size()).map_err(|error| error.on(self, call.op.kind()))?;
        Ok(call.info(&self.ranks))
    }

    /// Begins an operation that others compare by `info`, and by its parts or those of the one that `meets`.
    fn begin(&self, call: Call, info: OpInfo, meets: Option<Op>) -> Result<Pending, CommError> {
        let (world, rank, kind) = (&self.life.world, self.life.rank, call.op.kind());
        world.beat(rank);
        let mut post = Post::new(call).map_err(|error| match error {
            PostError::Comm(error) => error,
            PostError::Device(message) => {
                CommError::Backend { op: kind, group: self.name.to_string(), world_rank: rank, message }
            }
        })?;
        post.meets = meets;
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
        let info = self.checked(&call)?;
        self.begin(call, info, None)
    }

    fn meet(&self, call: &Call) -> Result<Pending, CommError> {
        let info = self.checked(call)?;
        self.begin(call.without_elements(self.size()), info, Some(call.op.clone()))
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

    fn membership(&self) -> &dyn Membership {
        &*self.life
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
