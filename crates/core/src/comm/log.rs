//! The log of communications, in logical bytes, the same for every backend; and the calls of the program that
//! communicate.

use super::{Caller, OpKind};
use crate::dtype::DType;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Name of the group.
    pub group: String,
    /// The operation.
    pub op: OpKind,
    /// Element type; bytes for a barrier, which has none.
    pub dtype: DType,
    /// Elements of the full buffer; for an all-to-all or a send, the elements that leave the rank.
    pub elements: usize,
    /// Ranks in the group.
    pub ranks: usize,
}

impl Record {
    /// Logical bytes, averaged over the ranks of the group, however a backend moves them. With `n` ranks and a
    /// full buffer of `b` bytes: all-reduce 2b(n-1)/n; reduce-scatter, all-gather and broadcast b(n-1)/n;
    /// all-to-all and send: the bytes that leave the rank; receive and barrier: 0.
    pub fn bytes(&self) -> f64 {
        let full = (self.elements * self.dtype.size()) as f64;
        let others = (self.ranks - 1) as f64 / self.ranks as f64;
        match self.op {
            OpKind::AllReduce => 2.0 * full * others,
            OpKind::ReduceScatter | OpKind::AllGather | OpKind::Broadcast => full * others,
            OpKind::AllToAll | OpKind::Send => full,
            OpKind::Recv | OpKind::Barrier => 0.0,
        }
    }
}

/// The calls of one rank, over all its groups. Clones write to the same log.
#[derive(Clone, Debug, Default)]
pub struct CommLog(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    records: Vec<Record>,
    /// The calls that the rank is in, the innermost last.
    callers: Vec<Arc<Caller>>,
    /// Objects that were numbered, by kind.
    numbers: BTreeMap<&'static str, usize>,
    /// The time of all waits.
    waited: Duration,
}

/// A rank is in a call as long as this lives: see [`CommLog::enter`].
#[must_use = "the call is left when this is dropped"]
#[derive(Debug)]
pub struct Entered(CommLog);

impl CommLog {
    /// The rank begins a call that every rank makes, such as `Trainer::evaluate`. Until the result is dropped, what the
    /// rank communicates carries this name, or the name of a call within. Faults print it, and the
    /// [threads](super::thread)' communicator refuses ranks that meet in a collective of different calls.
    pub fn enter(&self, caller: impl Into<Caller>) -> Entered {
        self.log().callers.push(Arc::new(caller.into()));
        Entered(self.clone())
    }

    /// A log that is thrown away: for communications that are no part of a step. Faults name the same call
    /// for them.
    pub(crate) fn aside(&self) -> CommLog {
        let log = Log { callers: self.caller().into_iter().collect(), ..Log::default() };
        CommLog(Arc::new(Mutex::new(log)))
    }

    /// The innermost call that the rank is in.
    pub fn caller(&self) -> Option<Arc<Caller>> {
        self.log().callers.last().cloned()
    }

    /// A name for an object that every rank makes, in the same order: `Trainer`, then `Trainer 2`. It begins the names
    /// of the object's calls, so that ranks which call two objects in different orders are refused.
    pub fn name_next(&self, kind: &'static str) -> String {
        let mut log = self.log();
        let number = log.numbers.entry(kind).or_default();
        *number += 1;
        if *number == 1 { kind.to_owned() } else { format!("{kind} {number}") }
    }

    /// Adds a record.
    pub fn push(&self, record: Record) {
        self.log().records.push(record);
    }

    /// Takes all records, in the order of the calls.
    pub fn drain(&self) -> Vec<Record> {
        std::mem::take(&mut self.log().records)
    }

    /// The time that the rank has waited for operations.
    pub fn waited(&self) -> Duration {
        self.log().waited
    }

    /// Adds the time of a wait.
    pub(super) fn wait(&self, time: Duration) {
        self.log().waited += time;
    }

    /// Logical bytes per group, of the records not yet drained.
    pub fn bytes_by_group(&self) -> BTreeMap<String, f64> {
        let mut bytes = BTreeMap::new();
        for record in &self.log().records {
            match bytes.get_mut(&record.group) {
                Some(sum) => *sum += record.bytes(),
                None => drop(bytes.insert(record.group.clone(), record.bytes())),
            }
        }
        bytes
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        // A panic between two changes leaves the log complete.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.log().callers.pop();
    }
}
