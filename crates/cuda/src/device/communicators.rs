//! The communicators of NCCL of one rank: who attends to their work, and how they end.

use super::memory::Pool;
use super::prelude::*;
use crate::driver::{DriverError, Nccl, NcclComm, Watch};
use meshwork_core::Communicator;
use meshwork_core::comm::{Call, CommError, Fault, Op, OpKind, Pending, Site};
use std::result::Result as Outcome;
use std::sync::{Arc, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// The communicators of one rank.
#[derive(Debug)]
pub(super) struct Communicators {
    /// The control group of all ranks.
    world: Arc<dyn Communicator>,
    pub(super) pool: Arc<Pool>,
    ends: Mutex<Ends>,
    /// The place of the last operation on the device that began.
    last: Mutex<Option<Site>>,
    /// The fault that stopped the world, and the place of the operation that heard of it.
    stopped: OnceLock<(Site, Arc<Fault>)>,
}

#[derive(Debug, Default)]
struct Ends {
    comms: Vec<NcclComm>,
    /// The meetings of operations whose handles were dropped.
    detached: Vec<Pending>,
}

impl Communicators {
    /// None yet. The ranks of `world` meet here, and from now on attend there to their devices.
    pub(super) fn new(world: Arc<dyn Communicator>, pool: Arc<Pool>) -> Outcome<Arc<Self>, CommError> {
        let met = world.start(Call::new(Op::Barrier, None, None))?;
        let (ends, last) = (Mutex::default(), Mutex::new(met.site().cloned()));
        let (watches, driver) = (met.site().is_some(), pool.driver.clone());
        let new = Arc::new(Self { world, pool, ends, last, stopped: OnceLock::new() });
        // Ranks of one process end together, and have no such place.
        if watches {
            let watch: Arc<dyn Watch> = new.clone();
            new.pool.watched.set(Arc::downgrade(&watch));
            driver.watch(Arc::downgrade(&watch));
        }
        met.wait()?;
        Ok(new)
    }

    pub(super) fn nccl(&self) -> Outcome<&dyn Nccl, DriverError> {
        self.pool.driver.nccl()
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keep(&self, comm: NcclComm) -> NcclComm {
        self.ends().comms.push(comm);
        comm
    }

    /// An operation on the device begins at this place.
    pub(super) fn began(&self, site: &Site) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(site.clone());
    }

    /// Blocks until `done`, or until the control group says that the world has stopped.
    fn attend(&self, done: &mut dyn FnMut() -> bool) -> Outcome<(), DriverError> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(site) = last else { return Ok(()) };
        self.world.membership().attend(&site, done).map_err(|fault| {
            let stopped = self.pool.keep(DriverError::Stopped { site, fault });
            self.abort();
            stopped
        })
    }

    /// What NCCL has met in one of the communicators. They are locked, so that none is ended meanwhile.
    fn health(&self) -> Outcome<(), DriverError> {
        let (nccl, ends) = (self.nccl()?, self.ends());
        ends.comms.iter().try_for_each(|comm| nccl.health(*comm))
    }

    /// The error of a call of a group.
    pub(super) fn explained(&self, control: &dyn Communicator, op: OpKind, fault: DriverError) -> CommError {
        match self.pool.reason(fault) {
            DriverError::Stopped { site, fault } => CommError::Stopped { site, fault },
            fault => {
                self.abort();
                backend(control, op, fault.to_string())
            }
        }
    }

    /// Ends all communicators because of an error of the control group, which later operations get too.
    pub(super) fn stop(&self, error: &CommError) {
        if let CommError::Stopped { site, fault } = error {
            _ = self.stopped.set((site.clone(), fault.clone()));
        }
        self.abort();
    }

    /// The error of operations after a fault.
    pub(super) fn going(&self) -> Outcome<(), CommError> {
        let stopped =
            |(site, fault): &(Site, Arc<Fault>)| CommError::Stopped { site: site.clone(), fault: fault.clone() };
        self.stopped.get().map_or(Ok(()), |of| Err(stopped(of)))
    }

    /// Nobody waits for an operation whose ranks will have met then.
    pub(super) fn detach(&self, met: Option<Pending>) {
        let detached = &mut self.ends().detached;
        detached.retain(|met| !met.is_done());
        detached.extend(met);
    }

    /// Ends all communicators at once: operations in flight would wait for ranks that do not come.
    pub(super) fn abort(&self) {
        let mut ends = self.ends();
        if let Ok(nccl) = self.nccl() {
            ends.comms.drain(..).for_each(|comm| _ = nccl.abort(comm));
        }
    }
}

impl Watch for Communicators {
    fn attend(&self, done: &mut dyn FnMut() -> Outcome<bool, DriverError>) -> Outcome<(), DriverError> {
        let (mut over, mut looked) = (Ok(false), Instant::now());
        self.attend(&mut || {
            over = done();
            if let Ok(false) = over
                && looked.elapsed() >= LOOK
            {
                looked = Instant::now();
                over = self.health().map(|()| false);
            }
            !matches!(over, Ok(false))
        })?;
        over.map(drop)
    }

    fn reason(&self, error: DriverError) -> DriverError {
        let begun = Instant::now();
        self.attend(&mut || begun.elapsed() >= EXPLAINED).err().unwrap_or(error)
    }
}

impl Drop for Communicators {
    /// Where operations are in flight whose handles were dropped, a thread waits until the others have come to them, or
    /// until they have stopped.
    fn drop(&mut self) {
        if thread::panicking() {
            return self.abort();
        }
        let ends = self.ends.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (detached, comms) = (std::mem::take(&mut ends.detached), std::mem::take(&mut ends.comms));
        let pool = self.pool.clone();
        let end = move || {
            let begun = Instant::now();
            while detached.iter().any(|met| !met.is_done()) && begun.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(1));
            }
            let met = |met: Pending| met.is_done() && met.wait().is_ok();
            let all_met = detached.into_iter().all(met);
            let Ok(nccl) = pool.driver.nccl() else { return };
            // Parts before the communicator that they were split off.
            for comm in comms.into_iter().rev() {
                _ = if all_met { nccl.leave(comm) } else { nccl.abort(comm) };
            }
        };
        // Without a thread the communicators stay until the process ends.
        _ = thread::Builder::new().name("nccl ends".to_owned()).spawn(end);
    }
}

/// How often a host that waits asks NCCL whether its communicators are well.
const LOOK: Duration = Duration::from_millis(100);

/// The time that the control group has to explain a failed collective or communicator. After it, NCCL's error is
/// reported.
const EXPLAINED: Duration = Duration::from_secs(5);

/// How long a rank that ended keeps its communicators for operations that others have not come to.
const PATIENCE: Duration = Duration::from_secs(60);

/// An error of a call of a group.
pub(super) fn backend(comm: &dyn Communicator, op: OpKind, message: String) -> CommError {
    let world_rank = comm.world_ranks().get(comm.rank()).copied().unwrap_or_default();
    CommError::Backend { op, group: comm.name().to_owned(), world_rank, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idle::Idle;
    use meshwork_core::comm::{Activity, Ended, FaultKind, Membership, PendingOp};
    use meshwork_tensor::Category;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A control group of one rank, which finds a fault after some looks, if at all.
    #[derive(Debug)]
    struct Control {
        finds: bool,
        asked: AtomicU64,
    }

    /// An operation of it, which is over.
    struct Met(Site);

    impl PendingOp for Met {
        fn wait(self: Box<Self>) -> Outcome<Buffer, CommError> {
            Ok(Buffer::empty())
        }

        fn is_done(&self) -> bool {
            true
        }

        fn site(&self) -> Option<&Site> {
            Some(&self.0)
        }
    }

    impl Communicator for Control {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn world_ranks(&self) -> &[usize] {
            &[0]
        }

        fn name(&self) -> &str {
            "world"
        }

        fn start(&self, _: Call) -> Outcome<Pending, CommError> {
            let site = Site { group: "world".into(), group_id: 0, world_rank: 0, seq: 0, op: None };
            Ok(Pending::new(Met(site)))
        }

        fn split(&self, name: &str, _: &[usize]) -> Outcome<Arc<dyn Communicator>, CommError> {
            Err(backend(self, OpKind::Barrier, format!("no part {name}")))
        }

        fn membership(&self) -> &dyn Membership {
            self
        }
    }

    impl Membership for Control {
        fn origin(&self) -> Instant {
            Instant::now()
        }

        fn fork(&self, name: &str) -> Outcome<Arc<dyn Communicator>, CommError> {
            self.split(name, &[0])
        }

        fn attend(&self, _: &Site, done: &mut dyn FnMut() -> bool) -> Outcome<(), Arc<Fault>> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let over = (0..3).any(|_| done());
            let kind = FaultKind::Gone { rank: 1, how: Activity::Computing };
            let fault = Fault { kind, site: None, ranks: Vec::new() };
            if over || !self.finds { Ok(()) } else { Err(Arc::new(fault)) }
        }

        fn end(&self, _: Activity) -> Ended {
            Ended::default()
        }
    }

    /// The device finds that members of a collective differ before the control group does, by a race that an all-to-all
    /// of unequal counts lost in four of five runs.
    #[test]
    fn the_verdict_of_the_control_group_goes_before_what_the_device_found() {
        let of_comm =
            || DriverError::Comm { call: "ncclSend and ncclRecv", why: "rank 0 sends no 16 bytes".to_owned() };
        let of_device = || DriverError::Call { call: "cuMemAlloc", why: "of this device".to_owned() };
        for finds in [true, false] {
            let pool = Arc::new(Pool::new(Arc::new(Idle::new("cuda"))).unwrap());
            let control = Arc::new(Control { finds, asked: AtomicU64::new(0) });
            let comms = Communicators::new(control.clone(), pool.clone()).unwrap();
            // The three ways by which an error of the driver leaves the device.
            let ways = |fault: fn() -> DriverError| {
                let refused = pool.refused("download", Category::default(), fault()).to_string();
                [refused, pool.told(fault()), comms.explained(&*control, OpKind::Send, fault()).to_string()]
            };
            assert!(ways(of_device).iter().all(|told| told.contains("of this device")), "{:?}", ways(of_device));
            assert_eq!(control.asked.load(Ordering::Relaxed), 0);
            let wanted = if finds { "stopped because rank 1 " } else { "rank 0 sends no 16 bytes" };
            for told in ways(of_comm) {
                assert!(told.contains(wanted), "{told}");
            }
            assert_eq!(control.asked.load(Ordering::Relaxed), 3);
        }
    }
}
