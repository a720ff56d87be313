//! A communicator with a log: the interface that programs use.

use super::{
    Call, Caller, CommError, CommLog, Communicator, Op, Pending, Record, ReduceOp, ReductionOrder, world_rank,
};
use crate::buffer::{Buffer, BufferError};
use crate::dtype::{DType, Element};
use std::sync::Arc;

/// The ranks that this rank talks to, over one mesh axis or several. Cheap to clone.
///
/// Every call is checked here once, and logged. In a group of one rank every collective is the identity; it is done
/// here and not logged.
///
/// Each operation comes in three forms: `start_x` returns at once and owns its buffers until [`Pending::wait`]; `x`
/// takes buffers and gives the output back; `x_slice` works on slices in host memory.
#[derive(Clone, Debug)]
pub struct Group {
    comm: Arc<dyn Communicator>,
    log: CommLog,
}

impl Group {
    /// A group that writes to `log`.
    pub fn new(comm: Arc<dyn Communicator>, log: CommLog) -> Group {
        Group { comm, log }
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// World rank of each member.
    pub fn world_ranks(&self) -> &[usize] {
        self.comm.world_ranks()
    }

    /// World rank of this rank.
    pub fn world_rank(&self) -> usize {
        world_rank(&*self.comm)
    }

    /// Name of the group.
    pub fn name(&self) -> &str {
        self.comm.name()
    }

    /// The backend's communicator.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// The log of this rank's calls, over all its groups.
    pub fn log(&self) -> &CommLog {
        &self.log
    }

    /// Tells the world that this rank makes progress: see [`Membership::heartbeat`](super::Membership::heartbeat).
    pub fn heartbeat(&self) {
        self.comm.membership().heartbeat();
    }

    /// The group of all ranks in another world beside this one: see [`Membership::fork`](super::Membership::fork).
    pub fn fork(&self, name: &str) -> Result<Group, CommError> {
        self.comm.membership().fork(name).map(Group::from)
    }

    /// The order in which reductions add up: see [`Communicator::reduction_order`].
    pub fn reduction_order(&self) -> ReductionOrder {
        self.comm.reduction_order()
    }

    /// The same group, of whose operations no record is kept.
    pub(crate) fn unlogged(&self) -> Group {
        Group::new(self.comm.clone(), self.log.aside())
    }

    /// Cuts the group into parts: see [`Communicator::split`]. The new group writes to the same log.
    ///
    /// Waits until every rank of the group is here, so that a missing rank is named, and not met later in another
    /// group.
    pub fn split(&self, name: &str, members: &[usize]) -> Result<Group, CommError> {
        self.split_as("Group::split", name, members)
    }

    /// [`split`](Self::split), by the name of the call that a program made.
    pub(crate) fn split_as(&self, call: &str, name: &str, members: &[usize]) -> Result<Group, CommError> {
        let part = Group::new(self.comm.split(name, members)?, self.log.clone());
        if self.size() > 1 {
            let caller = Some(Arc::new(Caller { name: call.into(), about: Some(name.into()) }));
            self.comm.start(Call { caller, ..Call::new(Op::Barrier, None, None) })?.wait()?;
        }
        part.comm.connect()?;
        Ok(part)
    }

    /// Starts any operation. All calls to the backend go through here.
    pub fn start(&self, mut call: Call) -> Result<Pending, CommError> {
        let (size, op) = (self.size(), call.op.kind());
        call.check(self.rank(), size).map_err(|error| error.on(&*self.comm, op))?;
        if size == 1 {
            return match identity(call)? {
                Identity::Done(buffer) => Ok(Pending::done(buffer)),
                Identity::Device(call) => self.comm.start(call),
            };
        }
        let dtype = call.input.as_ref().or(call.output.as_ref()).map_or(DType::U8, Buffer::dtype);
        let elements = leaving(&call, self.rank());
        call.caller = call.caller.take().or_else(|| self.log.caller());
        let pending = self.comm.start(call)?.timed(&self.log);
        self.log.push(Record { group: self.name().to_owned(), op, dtype, elements, ranks: size });
        Ok(pending)
    }
}

/// Elements as a [`Record`] counts them: without the elements that an all-to-all keeps on its own rank.
fn leaving(call: &Call, rank: usize) -> usize {
    if let Op::AllToAll { send_counts, .. } = &call.op { call.elements() - send_counts[rank] } else { call.elements() }
}

enum Identity {
    Done(Buffer),
    /// Only the backend can copy memory that is not on the host.
    Device(Call),
}

/// A collective of one rank: the output is the input. (A message to oneself is not a valid call.)
fn identity(mut call: Call) -> Result<Identity, BufferError> {
    match (call.input.take(), call.output.take()) {
        (Some(input), Some(output)) if !(input.is_host() && output.is_host()) => {
            Ok(Identity::Device(Call { input: Some(input), output: Some(output), ..call }))
        }
        (Some(input), Some(mut output)) => {
            output.as_bytes_mut()?.copy_from_slice(input.as_bytes()?);
            Ok(Identity::Done(output))
        }
        (_, output) => Ok(Identity::Done(output.unwrap_or_else(Buffer::empty))),
    }
}

/// Forms that return at once.
impl Group {
    /// Starts [`Op::AllReduce`].
    pub fn start_all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::new(Op::AllReduce(op), None, Some(buffer)))
    }

    /// Starts [`Op::AllReduce`] with an input, which may be shared and is not changed.
    pub fn start_all_reduce_into(&self, input: Buffer, output: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::new(Op::AllReduce(op), Some(input), Some(output)))
    }

    /// Starts [`Op::ReduceScatter`].
    pub fn start_reduce_scatter(&self, input: Buffer, output: Buffer, op: ReduceOp) -> Result<Pending, CommError> {
        self.start(Call::new(Op::ReduceScatter(op), Some(input), Some(output)))
    }

    /// Starts [`Op::AllGather`].
    pub fn start_all_gather(&self, input: Buffer, output: Buffer) -> Result<Pending, CommError> {
        self.start(Call::new(Op::AllGather, Some(input), Some(output)))
    }

    /// Starts [`Op::Broadcast`].
    pub fn start_broadcast(&self, buffer: Buffer, root: usize) -> Result<Pending, CommError> {
        self.start(Call::new(Op::Broadcast { root }, None, Some(buffer)))
    }

    /// Starts [`Op::AllToAll`].
    pub fn start_all_to_all(
        &self,
        input: Buffer,
        output: Buffer,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        let (send_counts, recv_counts) = (send_counts.to_vec(), recv_counts.to_vec());
        let op = Op::AllToAll { send_counts, recv_counts };
        self.start(Call::new(op, Some(input), Some(output)))
    }

    /// Starts [`Op::Send`].
    pub fn start_send(&self, buffer: Buffer, to: usize, signature: u64) -> Result<Pending, CommError> {
        self.start(Call::new(Op::Send { to, signature }, Some(buffer), None))
    }

    /// Starts [`Op::Recv`].
    pub fn start_recv(&self, buffer: Buffer, from: usize, signature: u64) -> Result<Pending, CommError> {
        self.start(Call::new(Op::Recv { from, signature }, None, Some(buffer)))
    }

    /// Starts [`Op::Barrier`].
    pub fn start_barrier(&self) -> Result<Pending, CommError> {
        self.start(Call::new(Op::Barrier, None, None))
    }
}

/// Blocking forms on buffers.
impl Group {
    /// The reduction of all ranks' buffers.
    pub fn all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_all_reduce(buffer, op)?.wait()
    }

    /// The reduction of all ranks' inputs, in `output`. The input may be shared and is not changed. A rank may do this
    /// while others reduce in place.
    pub fn all_reduce_into(&self, input: Buffer, output: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_all_reduce_into(input, output, op)?.wait()
    }

    /// This rank's part of the reduction of all ranks' inputs.
    pub fn reduce_scatter(&self, input: Buffer, output: Buffer, op: ReduceOp) -> Result<Buffer, CommError> {
        self.start_reduce_scatter(input, output, op)?.wait()
    }

    /// The inputs of all ranks, one after the other.
    pub fn all_gather(&self, input: Buffer, output: Buffer) -> Result<Buffer, CommError> {
        self.start_all_gather(input, output)?.wait()
    }

    /// The buffer of `root`.
    pub fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Buffer, CommError> {
        self.start_broadcast(buffer, root)?.wait()
    }

    /// The elements that each rank has for this one, one after the other.
    pub fn all_to_all(
        &self,
        input: Buffer,
        output: Buffer,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Buffer, CommError> {
        self.start_all_to_all(input, output, send_counts, recv_counts)?.wait()
    }

    /// Sends a buffer, and returns it when the receiver has it. If nothing else refers to its memory, sender and
    /// receiver may trade memory instead of copying: it then holds what the receiver's buffer held.
    pub fn send(&self, buffer: Buffer, to: usize, signature: u64) -> Result<Buffer, CommError> {
        self.start_send(buffer, to, signature)?.wait()
    }

    /// Fills a buffer with the elements that `from` sends.
    pub fn recv(&self, buffer: Buffer, from: usize, signature: u64) -> Result<Buffer, CommError> {
        self.start_recv(buffer, from, signature)?.wait()
    }

    /// Waits until every rank is here.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.start_barrier()?.wait().map(drop)
    }
}

/// Blocking forms on slices in host memory. They copy through a buffer, because a borrowed slice could end before the
/// other ranks are done with it.
impl Group {
    /// Replaces the elements by their reduction over all ranks.
    pub fn all_reduce_slice<T: Element>(&self, elements: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        if self.size() == 1 {
            return Ok(());
        }
        give(self.all_reduce(Buffer::from_slice(elements), op)?, elements)
    }

    /// Fills `output` with this rank's part of the reduction of all inputs.
    pub fn reduce_scatter_slice<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let room = Buffer::zeros(T::DTYPE, output.len());
        give(self.reduce_scatter(Buffer::from_slice(input), room, op)?, output)
    }

    /// Fills `output` with the inputs of all ranks, one after the other.
    pub fn all_gather_slice<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), CommError> {
        let room = Buffer::zeros(T::DTYPE, output.len());
        give(self.all_gather(Buffer::from_slice(input), room)?, output)
    }

    /// Replaces the elements by `root`'s.
    pub fn broadcast_slice<T: Element>(&self, elements: &mut [T], root: usize) -> Result<(), CommError> {
        give(self.broadcast(Buffer::from_slice(elements), root)?, elements)
    }

    /// Fills `output` with the elements that each rank has for this one, one after the other.
    pub fn all_to_all_slice<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        let room = Buffer::zeros(T::DTYPE, output.len());
        give(self.all_to_all(Buffer::from_slice(input), room, send_counts, recv_counts)?, output)
    }

    /// Sends the elements.
    pub fn send_slice<T: Element>(&self, elements: &[T], to: usize, signature: u64) -> Result<(), CommError> {
        self.send(Buffer::from_slice(elements), to, signature).map(drop)
    }

    /// Fills the slice with the elements that `from` sends.
    pub fn recv_slice<T: Element>(&self, elements: &mut [T], from: usize, signature: u64) -> Result<(), CommError> {
        give(self.recv(Buffer::zeros(T::DTYPE, elements.len()), from, signature)?, elements)
    }
}

/// Messages of any length. No record of them is kept.
impl Group {
    /// The messages of all ranks, on each of them.
    pub fn all_gather_bytes(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let group = self.unlogged();
        let mut lengths = vec![0; group.size()];
        group.all_gather_slice(&[message.len() as i64], &mut lengths)?;
        let longest = lengths.iter().copied().max().unwrap_or_default() as usize;
        let (mut padded, mut all) = (message.to_vec(), vec![0; group.size() * longest]);
        padded.resize(longest, 0);
        group.all_gather_slice(&padded, &mut all)?;
        let part = |(rank, &length): (usize, &i64)| all[rank * longest..][..length as usize].to_vec();
        Ok(lengths.iter().enumerate().map(part).collect())
    }

    /// The messages of all ranks on rank 0 of the group; none on the others.
    pub fn gather_bytes(&self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        let group = self.unlogged();
        if group.rank() > 0 {
            group.send_slice(&[message.len() as i64], 0, 0)?;
            group.send_slice(&message, 0, 0)?;
            return Ok(Vec::new());
        }
        let mut all = vec![message];
        for rank in 1..group.size() {
            let mut length = [0i64];
            group.recv_slice(&mut length, rank, 0)?;
            let mut message = vec![0; length[0] as usize];
            group.recv_slice(&mut message, rank, 0)?;
            all.push(message);
        }
        Ok(all)
    }

    /// The message of `root`, on every rank.
    pub fn broadcast_bytes(&self, mut message: Vec<u8>, root: usize) -> Result<Vec<u8>, CommError> {
        let group = self.unlogged();
        let mut length = [message.len() as i64];
        group.broadcast_slice(&mut length, root)?;
        message.resize(length[0] as usize, 0);
        group.broadcast_slice(&mut message, root)?;
        Ok(message)
    }
}

fn give<T: Element>(buffer: Buffer, elements: &mut [T]) -> Result<(), CommError> {
    elements.copy_from_slice(buffer.as_slice()?);
    Ok(())
}

impl From<Arc<dyn Communicator>> for Group {
    /// A group with a log of its own.
    fn from(comm: Arc<dyn Communicator>) -> Group {
        Group::new(comm, CommLog::default())
    }
}
