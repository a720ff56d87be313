//! Collectives between devices of different processes: [`Communicator`] over NCCL.
//!
//! ```text
//! a call ─┬─ on host memory ───────────────────────────────────────▶ the control group
//!         └─ on the device ─┬─ the same call without elements ─────▶ the control group: ranks meet and are compared
//!                           └─ the elements ───────────────────────▶ NCCL, in the stream of collectives
//! ```
//! NCCL carries elements, and a communicator of the same ranks for host memory, the control group, carries everything
//! else: numbers on the host, the unique id, the life of ranks. It also lets the members of each operation meet. So
//! ranks in different operations, ranks that are gone, slow or dead get the faults of the control group, and a fault
//! aborts NCCL's communicators, whose work would never end.
//!
//! Every group has a communicator, split off the world's. A pair of ranks has one more for each direction, with a
//! stream of its own, because NCCL runs the work of a communicator in order: two ranks that both send before they
//! receive would wait for each other. Everything else is in the device's stream of collectives, so that members must
//! start the collectives of all groups in one order, as ranks of one program do.
//!
//! Once the ranks have met, hosts go on, and a process that ends or stands still then leaves the work of the others
//! without an end. So a host that waits for its device, or for NCCL while it makes communicators, attends to it in the
//! control group ([`Watch`]), which knows whose process is missing: its verdict aborts the communicators, and is the
//! error of this and of every later use of the device.
//!
//! [`Reduction::Tree`] reduces without NCCL: each rank receives its part of all others, reduces these in the balanced
//! tree by the kernel that ranks in threads use, and sends the result to all. That has the bits of ranks in threads,
//! for the same number of bytes on each link as a ring.

use super::communicators::{Communicators, backend};
use super::exchange::{Queue, places, round};
use super::memory::{DeviceMemory, Pool};
use super::prelude::*;
use crate::driver::{Event, Exchange, Message, NcclComm, Stream, UniqueId};
use meshwork_core::comm::{Call, CommError, Membership, Op, OpKind, Pending, PendingOp, ReductionOrder};
use meshwork_core::{Communicator, Group};
use std::any::Any;
use std::result::Result as Outcome;
use std::sync::{Arc, OnceLock};

/// How elements on devices of several processes are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Reduction {
    /// By NCCL, in an order that it does not state. It rounds 16-bit sums at each rank, and its maxima and minima may
    /// ignore NaN.
    #[default]
    Library,
    /// In the balanced tree, with the bits of ranks in threads.
    Tree,
}

/// Ranks of the largest group whose members send each other messages from device memory: each pair has two
/// communicators, made when the group is.
pub const MOST_LINKED: usize = 16;

impl CudaDevice {
    /// A communicator of the ranks of `control`, whose collectives on the memory of this device go through NCCL.
    /// Collective over `control`, which carries everything else, and finds processes that are missing.
    ///
    /// # Errors
    /// A device without NCCL, two ranks on one device, or an error of `control`.
    pub fn nccl(
        &self,
        control: Arc<dyn Communicator>,
        reduction: Reduction,
    ) -> Outcome<Arc<dyn Communicator>, CommError> {
        let shared = Communicators::new(control.clone(), self.pool.clone())?;
        let new = || shared.nccl()?.unique_id();
        // Rank 0 sends the reason if it has no id, so that no rank waits for one.
        let told = if control.rank() > 0 { Ok(UniqueId([0; UniqueId::BYTES])) } else { new() };
        let message = match &told {
            Ok(id) => id.0.to_vec(),
            Err(fault) => fault.to_string().into_bytes(),
        };
        let message = Group::from(control.clone()).broadcast_bytes(message, 0)?;
        let failed = |message| backend(&*control, OpKind::Broadcast, message);
        let id = <[u8; UniqueId::BYTES]>::try_from(&message[..]);
        let id = id.map_err(|_| failed(String::from_utf8_lossy(&message).into_owned()))?;
        let joined = shared.nccl().and_then(|nccl| nccl.join(&UniqueId(id), control.rank(), control.size()));
        let comm = joined.map_err(|fault| shared.explained(&*control, OpKind::Broadcast, fault))?;
        // Of its own, so that the numbers of its operations begin at 0.
        let control = control.split(control.name(), &(0..control.size()).collect::<Vec<_>>())?;
        control.connect()?;
        let ends = OnceLock::from(Ends::new(&*control, &shared, comm)?);
        Ok(Arc::new(NcclGroup { control, shared, reduction, parent: comm, color: 0, ends }))
    }
}

/// The communicator of messages to one rank, or from it, and its stream once it is used.
#[derive(Debug)]
struct Link {
    comm: NcclComm,
    stream: OnceLock<Stream>,
}

/// One rank's end of a group.
#[derive(Debug)]
struct NcclGroup {
    control: Arc<dyn Communicator>,
    shared: Arc<Communicators>,
    reduction: Reduction,
    /// What its communicator is split off, and by which color.
    parent: NcclComm,
    color: usize,
    /// There once its ranks are connected.
    ends: OnceLock<Ends>,
}

/// One rank's ends of the communicators of a group.
#[derive(Debug)]
struct Ends {
    comm: NcclComm,
    /// To and from each other rank; none in a group that is too large for it.
    links: Vec<Option<[Link; 2]>>,
}

impl Ends {
    /// Makes those of messages beside `comm`. Collective.
    fn new(control: &dyn Communicator, shared: &Communicators, comm: NcclComm) -> Outcome<Self, CommError> {
        shared.keep(comm);
        let (rank, n) = (control.rank(), control.size());
        let failed = |fault| shared.explained(control, OpKind::Send, fault);
        let mut links: Vec<Option<[Link; 2]>> = (0..n).map(|_| None).collect();
        if (2..=MOST_LINKED).contains(&n) {
            let nccl = shared.nccl().map_err(failed)?;
            for number in 0..n - 1 + n % 2 {
                let peer = (0..n).find(|&peer| peer != rank && round(n, rank, peer) == number);
                let color = peer.map(|peer| rank.min(peer));
                let split = || nccl.split(comm, color, rank);
                // Both ranks make the one to the higher rank first.
                let [up, down] = [split().map_err(failed)?, split().map_err(failed)?];
                if let (Some(peer), Some(up), Some(down)) = (peer, up, down) {
                    let [to, from] = if rank < peer { [up, down] } else { [down, up] };
                    let link = |comm| Link { comm: shared.keep(comm), stream: OnceLock::new() };
                    links[peer] = Some([link(to), link(from)]);
                }
            }
        }
        Ok(Self { comm, links })
    }
}

impl NcclGroup {
    fn ends(&self) -> Outcome<&Ends, String> {
        self.ends.get().ok_or_else(|| "its ranks were not connected after the split".to_owned())
    }

    /// The address of a buffer of this device; null if there is none.
    fn place(&self, buffer: Option<&Buffer>) -> Outcome<Address, String> {
        let Some(buffer) = buffer else { return Ok(Address::NULL) };
        let memory: &dyn Any = &**buffer.memory();
        let own = memory.downcast_ref::<DeviceMemory>().filter(|memory| memory.is_of(&self.shared.pool));
        let at = own.map(|memory| memory.at().offset(buffer.offset() * buffer.dtype().size()));
        let name = self.shared.pool.driver.name();
        at.ok_or_else(|| format!("{buffer:?} is not in the memory of this rank's {name} device, as the others must be"))
    }

    /// The communicator and the stream of an operation, and the other rank's place in the communicator of messages.
    fn way(&self, op: &Op) -> Outcome<(NcclComm, Stream, usize), String> {
        let Ends { comm, links } = self.ends()?;
        let (peer, direction) = match *op {
            Op::Send { to, .. } => (to, 0),
            Op::Recv { from, .. } => (from, 1),
            _ => return Ok((*comm, self.shared.pool.collectives, 0)),
        };
        let lacks = || {
            let n = self.control.size();
            format!("messages of device memory need a group of at most {MOST_LINKED} ranks, and this one has {n}")
        };
        let Link { comm, stream } = &links[peer].as_ref().ok_or_else(lacks)?[direction];
        let stream = match stream.get() {
            Some(stream) => *stream,
            None => {
                let new = self.shared.pool.driver.stream().map_err(|fault| self.shared.pool.told(fault))?;
                *stream.get_or_init(|| new)
            }
        };
        Ok((*comm, stream, usize::from(peer > self.control.rank())))
    }

    /// Queues the elements of a call. The event after them, in their stream.
    fn queue(&self, call: &Call) -> Outcome<Event, String> {
        let pool = &self.shared.pool;
        let told = |fault| pool.told(fault);
        let (comm, stream, peer) = self.way(&call.op)?;
        let (input, to) = (self.place(call.input.as_ref())?, self.place(call.output.as_ref())?);
        let from = if call.input.is_some() { input } else { to };
        pool.driver.record(pool.compute).and_then(|ready| pool.driver.wait(stream, ready)).map_err(told)?;
        let queue = Queue { pool, rank: self.rank(), size: self.size(), comm, stream };
        let buffer = call.input.as_ref().or(call.output.as_ref());
        let (dtype, bytes) = buffer.map_or((DType::U8, 0), |buffer| (buffer.dtype(), buffer.bytes()));
        match (&call.op, self.reduction) {
            (&Op::AllReduce(reduce), Reduction::Library) => {
                let count = bytes / dtype.size();
                queue.exchange(Exchange::AllReduce { from, to, count, dtype, reduce })
            }
            (&Op::ReduceScatter(reduce), Reduction::Library) => {
                let count = bytes / dtype.size() / self.control.size();
                queue.exchange(Exchange::ReduceScatter { from, to, count, dtype, reduce })
            }
            (&Op::AllReduce(reduce), Reduction::Tree) => {
                let own = queue.reduce_parts(from, bytes, dtype, reduce, |part| to.offset(part.start))?;
                queue.share(to, bytes, dtype.size(), own)
            }
            (&Op::ReduceScatter(reduce), Reduction::Tree) => {
                queue.reduce_parts(from, bytes, dtype, reduce, |_| to).map(drop)
            }
            (Op::AllGather, _) => queue.exchange(Exchange::AllGather { from, to, bytes }),
            (&Op::Broadcast { root }, _) => queue.exchange(Exchange::Broadcast { at: to, bytes, root }),
            (Op::AllToAll { send_counts, recv_counts }, _) => {
                let [sent, received] = [send_counts, recv_counts].map(|counts| places(counts, dtype.size()));
                queue.all_to_all(from, &sent, to, &received)
            }
            (Op::Send { .. }, _) => {
                queue.exchange(Exchange::Messages(vec![Message { peer, sends: true, at: from, bytes }]))
            }
            (Op::Recv { .. }, _) => {
                queue.exchange(Exchange::Messages(vec![Message { peer, sends: false, at: to, bytes }]))
            }
            (Op::Barrier, _) => Ok(()),
        }?;
        pool.driver.record(stream).map_err(told)
    }
}

impl Communicator for NcclGroup {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn world_ranks(&self) -> &[usize] {
        self.control.world_ranks()
    }

    fn name(&self) -> &str {
        self.control.name()
    }

    fn start(&self, call: Call) -> Outcome<Pending, CommError> {
        if [&call.input, &call.output].into_iter().flatten().all(Buffer::is_host) {
            return self.control.start(call);
        }
        let kind = call.op.kind();
        let explained = |fault| self.shared.explained(&*self.control, kind, fault);
        self.shared.pool.sound().map_err(explained)?;
        self.shared.going()?;
        let done = self.queue(&call).map_err(|message| {
            // A fault of the world that was found meanwhile is its reason.
            let found = self.shared.pool.sound().err();
            found.map(explained).unwrap_or_else(|| {
                self.shared.abort();
                backend(&*self.control, kind, message)
            })
        })?;
        // After the elements are queued: once the ranks have met, NCCL waits for no host.
        let met = match self.size() {
            1 => None,
            _ => Some(self.control.meet(&call).inspect_err(|error| self.shared.stop(error))?),
        };
        if let Some(site) = met.as_ref().and_then(Pending::site) {
            self.shared.began(site);
        }
        let sends = call.op.kind() == OpKind::Send;
        let Call { input, output, .. } = call;
        let (result, read) = if sends { (input, None) } else { (output, input) };
        let wait = Some(Waits { met, done, result, _read: read });
        Ok(Pending::new(Flight { shared: self.shared.clone(), wait }))
    }

    /// NCCL's own split waits for ranks that never come: it follows when all have met.
    fn split(&self, name: &str, members: &[usize]) -> Outcome<Arc<dyn Communicator>, CommError> {
        let (control, shared) = (self.control.split(name, members)?, self.shared.clone());
        let parent = self.ends().map_err(|message| backend(&*control, OpKind::Barrier, message))?.comm;
        let (color, ends) = (members.first().copied().unwrap_or_default(), OnceLock::new());
        Ok(Arc::new(NcclGroup { control, shared, reduction: self.reduction, parent, color, ends }))
    }

    fn connect(&self) -> Outcome<(), CommError> {
        if self.ends.get().is_some() {
            return Ok(());
        }
        let Self { control, shared, .. } = self;
        control.connect()?;
        let new = shared.nccl().and_then(|nccl| nccl.split(self.parent, Some(self.color), self.rank()));
        let new = new.map_err(|fault| shared.explained(&**control, OpKind::Barrier, fault))?;
        let none = || backend(&**control, OpKind::Barrier, "NCCL made no communicator of the part".to_owned());
        _ = self.ends.set(Ends::new(&**control, shared, new.ok_or_else(none)?)?);
        Ok(())
    }

    fn membership(&self) -> &dyn Membership {
        self.control.membership()
    }

    /// NCCL promises none. The tree has the order of ranks in threads, if the control group has.
    fn reduction_order(&self) -> ReductionOrder {
        match self.reduction {
            Reduction::Library => ReductionOrder::Unspecified,
            Reduction::Tree => self.control.reduction_order(),
        }
    }
}

/// An operation in flight.
struct Flight {
    shared: Arc<Communicators>,
    wait: Option<Waits>,
}

/// What an operation waits for, and what it owns until then.
struct Waits {
    /// The meeting of the ranks.
    met: Option<Pending>,
    /// The event after its work.
    done: Event,
    result: Option<Buffer>,
    _read: Option<Buffer>,
}

impl Flight {
    /// Later work of the device waits for the operation, so that its memory may be used again.
    fn resume(&self, done: Event) {
        let Pool { driver, compute, .. } = &*self.shared.pool;
        if let Err(fault) = driver.wait(*compute, done) {
            self.shared.pool.keep(fault);
        }
    }
}

impl PendingOp for Flight {
    fn wait(mut self: Box<Self>) -> Outcome<Buffer, CommError> {
        let Some(Waits { met, done, result, _read }) = self.wait.take() else { return Ok(Buffer::empty()) };
        let met = met.map_or(Ok(()), |met| met.wait().map(drop));
        if let Err(error) = &met {
            self.shared.stop(error);
        }
        self.resume(done);
        met.map(|()| result.unwrap_or_else(Buffer::empty))
    }

    fn is_done(&self) -> bool {
        self.wait.as_ref().and_then(|wait| wait.met.as_ref()).is_none_or(Pending::is_done)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some(Waits { met, done, result, _read }) = self.wait.take() {
            self.resume(done);
            self.shared.detach(met);
            drop((result, _read));
        }
    }
}
