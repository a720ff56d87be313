//! Sums by the reductions of the library: `comm.reduction = "native"`.
//!
//! A group has a communicator of the library for them, made at its first sum. That call blocks until all members have
//! come, so a thread of its own makes it, and the sums of the group wait in their order. Nothing else blocks: sums are
//! tested when the wire is polled.
//!
//! Members tell each other what they do by a barrier of our own, which goes on at the same time (see
//! [`Plan`](crate::plan::Plan)), and none has its result before. So faults are found as in every other operation; a sum
//! that they leave behind keeps its memory until the library is done with it, which may be never.

use std::sync::mpsc::{self, Receiver};
use std::thread;

use meshwork_core::{Call, DType, Op, ReduceOp};
use rustc_hash::FxHashMap;

use crate::cells::Cells;
use crate::ground::Claim;
use crate::library::{Handle, Library, Summed};
use crate::packet::Bytes;

/// How sums over processes are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// By meshwork, in the order of the balanced tree: the bits of [threads](meshwork_core::comm::thread).
    #[default]
    Tree,
    /// Sums of f32 and f64 whose members are all in different processes by the library, in an order that it chooses:
    /// MPI promises only that all members of an all-reduce get the same bits. All other reductions by the tree, which
    /// adds 16-bit floats up in f32.
    Native,
}

impl Reduction {
    /// What the library adds up of a call of members in these cells, if it takes the sum.
    pub(crate) fn of(self, call: &Call, cells: &Cells) -> Option<Summed> {
        let are_apart = cells.len() == cells.members() && cells.len() > 1;
        let scatters = match call.op {
            Op::AllReduce(ReduceOp::Sum) => false,
            Op::ReduceScatter(ReduceOp::Sum) => true,
            _ => return None,
        };
        // It counts in C `int`s.
        let counts = (1..=i32::MAX as usize).contains(&call.elements());
        if self == Reduction::Tree || !are_apart || !counts {
            return None;
        }
        match call.output.as_ref()?.dtype() {
            DType::F32 => Some(Summed { is_double: false, scatters }),
            DType::F64 => Some(Summed { is_double: true, scatters }),
            _ => None,
        }
    }
}

/// A sum of this process and others.
pub(crate) struct Sum<T> {
    /// The world, and the group in it.
    pub(crate) group: (u64, u64),
    pub(crate) summed: Summed,
    /// If it scatters; otherwise `into` has it.
    pub(crate) input: Option<Bytes>,
    pub(crate) into: Claim,
    /// What it is for.
    pub(crate) what: T,
}

/// A communicator that is being made, and the sums that wait for it.
struct Making<T> {
    group: (u64, u64),
    made: Receiver<Result<Handle, i32>>,
    sums: Vec<Sum<T>>,
}

/// The sums of a process, and the communicators of its groups.
pub(crate) struct Natives<T> {
    library: Library,
    largest_tag: usize,
    comms: FxHashMap<(u64, u64), Handle>,
    making: Vec<Making<T>>,
    /// Sums under way. The library has the addresses of their memory.
    sums: Vec<(Handle, Sum<T>)>,
    /// What sums that failed were for, and why.
    failed: Vec<(T, String)>,
}

impl<T> Natives<T> {
    pub(crate) fn new(library: Library, largest_tag: usize) -> Natives<T> {
        let (comms, making, sums, failed) = (FxHashMap::default(), Vec::new(), Vec::new(), Vec::new());
        Natives { library, largest_tag, comms, making, sums, failed }
    }

    /// Starts a sum. All members start those of a group in the same order. `processes` are theirs, in this order too.
    pub(crate) fn start(&mut self, sum: Sum<T>, processes: impl FnOnce() -> Vec<usize>) {
        if let Some(&comm) = self.comms.get(&sum.group) {
            return self.begin(comm, sum);
        }
        if let Some(making) = self.making.iter_mut().find(|making| making.group == sum.group) {
            return making.sums.push(sum);
        }
        let (group, library, processes) = (sum.group, self.library.clone(), processes());
        let tag = (group.0 ^ group.1) as usize % self.largest_tag;
        let (tell, made) = mpsc::channel();
        let make = move || _ = tell.send(library.communicator_of(&processes, tag)); // or nobody waits for it any more
        match thread::Builder::new().name("mpi group".to_owned()).spawn(make) {
            Ok(_) => self.making.push(Making { group, made, sums: vec![sum] }),
            Err(error) => self.failed.push((sum.what, format!("no thread for the communicator: {error}"))),
        }
    }

    fn begin(&mut self, comm: Handle, mut sum: Sum<T>) {
        let input = sum.input.as_ref().map(AsRef::as_ref);
        // SAFETY: `sums` holds both, whose bytes do not move with them, until the request is over; nothing writes the
        // input while it is held, and the claim's bytes are its own.
        match unsafe { self.library.sum(sum.summed, input, &mut sum.into, comm) } {
            Ok(request) => self.sums.push((request, sum)),
            Err(code) => self.fail(sum.what, code),
        }
    }

    /// Takes note of the code of a sum. That a process has ended is found, and told, from its messages.
    fn fail(&mut self, what: T, code: i32) {
        let words = self.library.failure(code);
        self.failed.extend(words.map(|words| (what, words)));
    }

    /// The sums that are over since the last poll: what they were for, with the sum or why there is none. Whether
    /// there were any.
    pub(crate) fn poll(&mut self, mut over: impl FnMut(T, Result<Claim, String>)) -> bool {
        let mut any = false;
        let mut at = 0;
        while let Some(making) = self.making.get(at) {
            let Ok(made) = making.made.try_recv() else {
                at += 1;
                continue;
            };
            let Making { group, sums, .. } = self.making.swap_remove(at);
            match made {
                Ok(comm) => {
                    self.comms.insert(group, comm);
                    sums.into_iter().for_each(|sum| self.begin(comm, sum));
                }
                Err(code) => sums.into_iter().for_each(|sum| self.fail(sum.what, code)),
            }
        }
        at = 0;
        while let Some((request, _)) = self.sums.get_mut(at) {
            let tested = self.library.test(request);
            if tested == Ok(false) {
                at += 1;
                continue;
            }
            any = true;
            let (_, Sum { what, into, .. }) = self.sums.swap_remove(at);
            match tested {
                Ok(_) => over(what, Ok(into)),
                Err(code) => self.fail(what, code),
            }
        }
        for (what, words) in self.failed.drain(..) {
            any = true;
            over(what, Err(words));
        }
        any
    }

    /// A world is over: gives back the communicators of its groups, unless a fault has left sums behind.
    pub(crate) fn leave(&mut self, world: u64) {
        if self.sums.iter().any(|(_, sum)| sum.group.0 == world) {
            return;
        }
        for (_, comm) in self.comms.extract_if(|(of, _), _| *of == world) {
            self.library.free(comm);
        }
    }

    /// Whether the library is done with everything.
    pub(crate) fn is_idle(&self) -> bool {
        self.sums.is_empty() && self.making.is_empty()
    }

    /// Leaves the memory of sums to the library, which may still write to it.
    pub(crate) fn forget(self) {
        std::mem::forget(self.sums);
    }
}
