//! Emulated communicators of NCCL. A collective runs when it is the next work of a stream of every member, as NCCL's
//! kernels wait for each other: members that queue them in different orders wait for ever, which is found.
//!
//! It promises no more than NCCL does. Sums are in the order of a ring, which begins at another rank for each part, and
//! sums of 16-bit floats are rounded at each rank; maxima and minima ignore NaN; no message is buffered.

use super::memory::Memory;
use crate::driver::{Address, DriverError, Exchange, Message, NcclComm, Result, UniqueId};
use half::{bf16, f16};
use meshwork_core::{DType, ReduceOp};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

/// The communicators of a machine, and the ranks' ends of them.
#[derive(Debug, Default)]
pub(super) struct Comms {
    named: HashMap<UniqueId, usize>,
    all: Vec<Comm>,
    ends: Vec<End>,
}

#[derive(Debug, Default)]
struct Comm {
    /// The ranks' ends, by their key.
    ends: BTreeMap<usize, usize>,
    size: usize,
    /// The parts of each split so far, by color, and how many ranks have come to it.
    splits: Vec<(HashMap<usize, usize>, usize)>,
    aborted: bool,
}

#[derive(Clone, Copy, Debug)]
struct End {
    comm: usize,
    device: usize,
    /// The splits of its communicator so far.
    splits: usize,
    left: bool,
}

fn invalid(call: &'static str, why: String) -> DriverError {
    DriverError::Call { call, why: format!("ncclInvalidUsage: {why}") }
}

/// The error of a collective whose members differ. NCCL would not find it, and stand still or give wrong numbers.
fn differ(call: &'static str, why: String) -> DriverError {
    DriverError::Comm { call, why }
}

impl Comms {
    /// A new name.
    pub(super) fn unique_id(&mut self) -> UniqueId {
        let mut id = [0; UniqueId::BYTES];
        id[..8].copy_from_slice(&(self.named.len() as u64).to_le_bytes());
        let id = UniqueId(id);
        self.all.push(Comm::default());
        self.named.insert(id, self.all.len() - 1);
        id
    }

    pub(super) fn join(&mut self, id: &UniqueId, rank: usize, size: usize, device: usize) -> Result<NcclComm> {
        let call = "ncclCommInitRankConfig";
        let &comm = self.named.get(id).ok_or_else(|| invalid(call, "no rank has made this unique id".to_owned()))?;
        let known = &mut self.all[comm];
        if rank >= size || (known.size > 0 && known.size != size) || known.ends.contains_key(&rank) {
            let why = format!("rank {rank} of {size} joins a communicator of {} ranks, or joins it twice", known.size);
            return Err(invalid(call, why));
        }
        known.size = size;
        self.enter(call, comm, rank, device)
    }

    pub(super) fn split(&mut self, of: NcclComm, color: Option<usize>, key: usize) -> Result<Option<NcclComm>> {
        let call = "ncclCommSplit";
        let End { comm: parent, device, splits, .. } = self.end(call, of)?;
        self.ends[of.0 as usize].splits += 1;
        let new = self.all.len();
        let Comm { splits: all, .. } = &mut self.all[parent];
        if all.len() == splits {
            all.push(Default::default());
        }
        all[splits].1 += 1;
        let entered = match color {
            None => None,
            Some(color) => {
                let part = *all[splits].0.entry(color).or_insert(new);
                if part == new {
                    self.all.push(Comm::default());
                }
                Some(self.enter(call, part, key, device)?)
            }
        };
        // Until the last rank has come, nobody knows how many there are.
        let Comm { splits: all, size, .. } = &self.all[parent];
        let missing = usize::from(all[splits].1 < *size);
        for part in all[splits].0.values().copied().collect::<Vec<_>>() {
            self.all[part].size = self.all[part].ends.len() + missing;
        }
        Ok(entered)
    }

    fn enter(&mut self, call: &'static str, comm: usize, key: usize, device: usize) -> Result<NcclComm> {
        let other = self.all[comm].ends.iter().find(|(_, end)| self.ends[**end].device == device);
        if let Some((rank, _)) = other {
            return Err(invalid(
                call,
                format!("Duplicate GPU detected: rank {key} and rank {rank} both on device {device}"),
            ));
        }
        self.ends.push(End { comm, device, splits: 0, left: false });
        let end = self.ends.len() - 1;
        if self.all[comm].ends.insert(key, end).is_some() {
            return Err(invalid(call, format!("two ranks have key {key}")));
        }
        Ok(NcclComm(end as u64))
    }

    fn end(&self, call: &'static str, of: NcclComm) -> Result<End> {
        let end = usize::try_from(of.0).ok().and_then(|at| self.ends.get(at)).filter(|end| !end.left);
        end.copied().ok_or_else(|| DriverError::Unknown { call, what: format!("{of:?}") })
    }

    /// Checks that a device may use this end.
    pub(super) fn check(&self, call: &'static str, of: NcclComm, device: usize) -> Result<()> {
        match self.end(call, of)? {
            end if end.device == device => Ok(()),
            end => Err(invalid(call, format!("{of:?} is of device {}, and device {device} uses it", end.device))),
        }
    }

    pub(super) fn is_aborted(&self, of: NcclComm) -> bool {
        self.ends.get(of.0 as usize).is_none_or(|end| self.all[end.comm].aborted)
    }

    pub(super) fn abort(&mut self, of: NcclComm) -> Result<()> {
        let comm = self.end("ncclCommAbort", of)?.comm;
        self.all[comm].aborted = true;
        self.leave(of)
    }

    pub(super) fn leave(&mut self, of: NcclComm) -> Result<()> {
        self.end("ncclCommFinalize", of)?;
        self.ends[of.0 as usize].left = true;
        Ok(())
    }

    /// The ends of the communicator of `of`, by rank; `None` until all ranks have joined.
    pub(super) fn members(&self, of: NcclComm) -> Option<Vec<NcclComm>> {
        let comm = &self.all[self.ends.get(of.0 as usize)?.comm];
        let ends = comm.ends.values().map(|end| NcclComm(*end as u64));
        (comm.ends.len() == comm.size).then(|| ends.collect())
    }

    pub(super) fn device(&self, of: NcclComm) -> usize {
        self.ends[of.0 as usize].device
    }
}

/// The streams that wait for each other for ever. Of each stream the others that its next work waits for; `None` if it
/// can go on, or waits for work that is not queued yet.
pub(super) fn stuck(waits: &[Option<Vec<usize>>]) -> Vec<usize> {
    let mut hopeful: Vec<bool> = waits.iter().map(Option::is_none).collect();
    let waits_for_hopeful = |hopeful: &[bool], at: usize| {
        !hopeful[at] && waits[at].as_ref().is_some_and(|others| others.iter().any(|&other| hopeful[other]))
    };
    while let Some(more) = (0..waits.len()).find(|&at| waits_for_hopeful(&hopeful, at)) {
        hopeful[more] = true;
    }
    (0..waits.len()).filter(|&at| !hopeful[at]).collect()
}

/// The error of streams that wait for each other.
pub(super) fn crossed(streams: &[String]) -> DriverError {
    let why = "streams wait for each other, because ranks queued collectives in different orders";
    DriverError::Call { call: "ncclCommGetAsyncError", why: format!("{why}: {}", streams.join(", ")) }
}

/// A rank's part in a collective: its call, and the bytes that it [reads](sources).
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) exchange: Exchange,
    pub(super) read: Vec<Vec<u8>>,
}

/// Where a rank of `n` reads in a collective, and how many bytes.
pub(super) fn sources(exchange: &Exchange, rank: usize, n: usize) -> Vec<(Address, usize)> {
    match *exchange {
        Exchange::AllReduce { from, count, dtype, .. } => vec![(from, count * dtype.size())],
        Exchange::ReduceScatter { from, count, dtype, .. } => vec![(from, count * dtype.size() * n)],
        Exchange::AllGather { from, bytes, .. } => vec![(from, bytes)],
        Exchange::Broadcast { at, bytes, root } => Vec::from_iter((rank == root).then_some((at, bytes))),
        Exchange::Messages(ref all) => {
            all.iter().filter(|message| message.sends).map(|message| (message.at, message.bytes)).collect()
        }
    }
}

/// Runs a collective: the calls of all ranks, each with its device, by rank.
pub(super) fn run(memory: &mut Memory, calls: &[(usize, Exchange)]) -> Result<()> {
    let part = |(rank, (device, exchange)): (usize, &(usize, Exchange))| {
        let read = sources(exchange, rank, calls.len()).into_iter();
        let read = read.map(|(at, bytes)| Ok(memory.read(*device, at, bytes, exchange.name())?.to_vec()));
        Ok(Part { exchange: exchange.clone(), read: read.collect::<Result<_>>()? })
    };
    let parts = calls.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
    for ((device, exchange), written) in calls.iter().zip(results(&parts)?) {
        for (at, bytes) in written.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            memory.write(*device, at, bytes.len(), exchange.name())?.copy_from_slice(&bytes);
        }
    }
    Ok(())
}

/// Bytes that a rank writes, and where.
type Written = (Address, Vec<u8>);

/// What each rank writes in a collective, and where, from the parts of all by rank. An error if these differ.
pub(super) fn results(parts: &[Part]) -> Result<Vec<Vec<Written>>> {
    let Some(Part { exchange: first, .. }) = parts.first() else { return Ok(Vec::new()) };
    let kind = |exchange: &Exchange| match exchange {
        Exchange::AllReduce { count, dtype, reduce, .. } | Exchange::ReduceScatter { count, dtype, reduce, .. } => {
            format!("{}({count} of {dtype}, {})", exchange.name(), reduce.name())
        }
        Exchange::AllGather { bytes, .. } => format!("{}({bytes} bytes)", exchange.name()),
        Exchange::Broadcast { bytes, root, .. } => format!("{}({bytes} bytes of rank {root})", exchange.name()),
        Exchange::Messages(_) => exchange.name().to_owned(),
    };
    if let Some(rank) = parts.iter().position(|part| kind(&part.exchange) != kind(first)) {
        let why = format!("rank 0 is in {}, and rank {rank} in {}", kind(first), kind(&parts[rank].exchange));
        return Err(differ(first.name(), why));
    }
    let (call, n) = (first.name(), parts.len());
    let inputs = || parts.iter().filter_map(|part| part.read.first().cloned()).collect::<Vec<_>>();
    let messages = |rank: usize| match &parts[rank].exchange {
        Exchange::Messages(all) => &all[..],
        _ => &[],
    };
    let count = |sends| (0..n).flat_map(messages).filter(|message| message.sends == sends).count();
    if count(true) != count(false) {
        return Err(differ(call, format!("{} messages are sent and {} received", count(true), count(false))));
    }
    // What all ranks get, or get parts of.
    let whole = match first {
        Exchange::AllReduce { dtype, reduce, .. } | Exchange::ReduceScatter { dtype, reduce, .. } => {
            reduced(&inputs(), *dtype, *reduce)
        }
        Exchange::AllGather { .. } => inputs().concat(),
        Exchange::Broadcast { root, .. } => {
            let source = parts.get(*root).and_then(|part| part.read.first());
            source.ok_or_else(|| differ(call, format!("there is no rank {root}")))?.clone()
        }
        Exchange::Messages(_) => Vec::new(),
    };
    let of_rank = |rank: usize| match &parts[rank].exchange {
        Exchange::AllReduce { to, .. } | Exchange::AllGather { to, .. } => Ok(vec![(*to, whole.clone())]),
        Exchange::Broadcast { at, .. } => Ok(vec![(*at, whole.clone())]),
        Exchange::ReduceScatter { to, count, dtype, .. } => {
            let bytes = count * dtype.size();
            Ok(vec![(*to, whole[rank * bytes..][..bytes].to_vec())])
        }
        Exchange::Messages(all) => {
            let receive = |&Message { peer, at, bytes, .. }: &Message| {
                let sent = if peer < n { messages(peer) } else { &[] };
                let is_it = |other: &Message| other.peer == rank && other.bytes == bytes;
                let found = sent.iter().filter(|message| message.sends).position(is_it);
                let lacks = || differ(call, format!("rank {peer} sends no {bytes} bytes to rank {rank}"));
                Ok((at, parts[peer].read[found.ok_or_else(lacks)?].clone()))
            };
            all.iter().filter(|message| !message.sends).map(receive).collect()
        }
    };
    (0..n).map(of_rank).collect()
}

/// The reduction of the inputs, in the order of a ring: each n-th of the elements begins at another rank.
fn reduced(inputs: &[Vec<u8>], dtype: DType, reduce: ReduceOp) -> Vec<u8> {
    let (n, size) = (inputs.len(), dtype.size());
    let mut out = inputs[0].clone();
    let part = (out.len() / size).div_ceil(n).max(1);
    for (at, element) in out.chunks_exact_mut(size).enumerate() {
        let first = at / part;
        element.copy_from_slice(&inputs[first % n][at * size..][..size]);
        for rank in first + 1..first + n {
            combine(element, &inputs[rank % n][at * size..][..size], dtype, reduce);
        }
    }
    out
}

fn combine(element: &mut [u8], other: &[u8], dtype: DType, reduce: ReduceOp) {
    macro_rules! numbers {
        ($t:ty, $add:expr, $max:expr, $min:expr) => {{
            let [mut a, mut b] = [[0; size_of::<$t>()]; 2];
            (a.copy_from_slice(element), b.copy_from_slice(other));
            let (a, b) = (<$t>::from_le_bytes(a), <$t>::from_le_bytes(b));
            let value: $t = match reduce {
                ReduceOp::Sum => $add(a, b),
                ReduceOp::Max => $max(a, b),
                ReduceOp::Min => $min(a, b),
            };
            element.copy_from_slice(&value.to_le_bytes());
        }};
    }
    match dtype {
        DType::F32 => numbers!(f32, |a, b| a + b, f32::max, f32::min),
        DType::F64 => numbers!(f64, |a, b| a + b, f64::max, f64::min),
        DType::Bf16 => numbers!(bf16, |a, b| a + b, bf16::max, bf16::min),
        DType::F16 => numbers!(f16, |a, b| a + b, f16::max, f16::min),
        DType::I32 => numbers!(i32, i32::wrapping_add, Ord::max, Ord::min),
        DType::I64 => numbers!(i64, i64::wrapping_add, Ord::max, Ord::min),
        _ => numbers!(u8, u8::wrapping_add, Ord::max, Ord::min),
    }
}
