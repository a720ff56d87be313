//! The log of communications, in logical bytes, the same for every backend.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::OpKind;
use crate::dtype::DType;

/// One call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Name of the group.
    pub group: String,
    /// The operation.
    pub op: OpKind,
    /// Element type; bytes for a barrier, which has none.
    pub dtype: DType,
    /// Elements of the full buffer; for an all-to-all or a send, those that leave the rank.
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
pub struct CommLog(Arc<Mutex<Vec<Record>>>);

impl CommLog {
    /// Adds a record.
    pub fn push(&self, record: Record) {
        self.records().push(record);
    }

    /// Takes all records, in the order of the calls.
    pub fn drain(&self) -> Vec<Record> {
        std::mem::take(&mut *self.records())
    }

    /// Logical bytes per group, of the records not yet drained.
    pub fn bytes_by_group(&self) -> BTreeMap<String, f64> {
        let mut bytes = BTreeMap::new();
        for record in self.records().iter() {
            match bytes.get_mut(&record.group) {
                Some(sum) => *sum += record.bytes(),
                None => drop(bytes.insert(record.group.clone(), record.bytes())),
            }
        }
        bytes
    }

    fn records(&self) -> MutexGuard<'_, Vec<Record>> {
        // A panic between two pushes leaves the log complete.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
