//! Sums by the reductions of the library: `comm.reduction = "native"`.
//!
//! First the members of a sum tell each other what they do, by a barrier of our own (see [`Plan`](crate::plan::Plan)):
//! the library is called when all agree, and faults are found as in every other operation. The order of the sums of a
//! group is that in which its members came to them, whichever barrier is over first.
//!
//! A group has a communicator of the library, made at its first sum. That call blocks until all members have come, so a
//! thread of its own makes it. Nothing else blocks: sums are tested when the wire is polled. One that a lost process
//! leaves behind keeps its memory until the library is done with it, which may be never.

use std::collections::VecDeque;
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
    /// The number of the operation in the group.
    pub(crate) seq: u64,
    pub(crate) summed: Summed,
    /// If it scatters; otherwise `into` has it.
    pub(crate) input: Option<Bytes>,
    pub(crate) into: Claim,
    /// What it is for.
    pub(crate) what: T,
}

/// The sums of a group that have not begun.
struct Team<T> {
    /// Its communicator, once that is made.
    comm: Option<Handle>,
    making: Option<Receiver<Result<Handle, i32>>>,
    /// In the order in which every member begins them; one is there when its members have agreed.
    sums: VecDeque<(u64, Option<Sum<T>>)>,
}

/// The sums of a process, and the communicators of its groups.
pub(crate) struct Natives<T> {
    library: Library,
    largest_tag: usize,
    teams: FxHashMap<(u64, u64), Team<T>>,
    /// Sums under way. The library has the addresses of their memory.
    sums: Vec<(Handle, Sum<T>)>,
    /// What sums that failed were for, and why.
    failed: Vec<(T, String)>,
}

impl<T> Natives<T> {
    pub(crate) fn new(library: Library, largest_tag: usize) -> Natives<T> {
        Natives { library, largest_tag, teams: FxHashMap::default(), sums: Vec::new(), failed: Vec::new() }
    }

    /// This process has come to a sum of a group: those that are announced before it begin before it.
    pub(crate) fn announce(&mut self, group: (u64, u64), seq: u64) {
        let new = || Team { comm: None, making: None, sums: VecDeque::new() };
        self.teams.entry(group).or_insert_with(new).sums.push_back((seq, None));
    }

    /// Starts a sum that was announced, once all members have come to it. `processes` are theirs, in their order.
    pub(crate) fn start(&mut self, sum: Sum<T>, processes: impl FnOnce() -> Vec<usize>) {
        let group = sum.group;
        let Some(team) = self.teams.get_mut(&group) else { return }; // its world is over
        if team.comm.is_none() && team.making.is_none() {
            let (library, processes, (tell, made)) = (self.library.clone(), processes(), mpsc::channel());
            let tag = (group.0 ^ group.1) as usize % self.largest_tag;
            // Nobody may wait for it any more.
            let make = move || _ = tell.send(library.communicator_of(&processes, tag));
            if let Err(error) = thread::Builder::new().name("mpi group".to_owned()).spawn(make) {
                return self.failed.push((sum.what, format!("no thread for the communicator: {error}")));
            }
            team.making = Some(made);
        }
        if let Some((_, place)) = team.sums.iter_mut().find(|(seq, _)| *seq == sum.seq) {
            *place = Some(sum);
        }
        self.begin(group);
    }

    /// Begins the sums of a group that are next.
    fn begin(&mut self, group: (u64, u64)) {
        let Some(Team { comm: Some(comm), sums, .. }) = self.teams.get_mut(&group) else { return };
        let mut failed = Vec::new();
        while let Some((_, place)) = sums.front_mut()
            && let Some(mut sum) = place.take()
        {
            sums.pop_front();
            let input = sum.input.as_ref().map(AsRef::as_ref);
            // SAFETY: `sums` holds both, whose bytes do not move with them, until the request is over; nothing writes
            // the input while it is held, and the claim's bytes are its own.
            match unsafe { self.library.sum(sum.summed, input, &mut sum.into, *comm) } {
                Ok(request) => self.sums.push((request, sum)),
                Err(code) => failed.push((sum.what, code)),
            }
        }
        failed.into_iter().for_each(|(what, code)| self.fail(what, code));
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
        let made = |(group, team): (&(u64, u64), &mut Team<T>)| {
            let made = team.making.as_ref()?.try_recv().ok()?;
            (team.comm, team.making) = (made.ok(), None);
            let waiting = made.err().map(|code| (code, std::mem::take(&mut team.sums)));
            Some((*group, waiting))
        };
        let made: Vec<_> = self.teams.iter_mut().filter_map(made).collect();
        for (group, waiting) in made {
            self.begin(group);
            let (code, sums) = waiting.unwrap_or_default();
            sums.into_iter().filter_map(|(_, sum)| sum).for_each(|sum| self.fail(sum.what, code));
        }
        let mut at = 0;
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
        let is_left = self.sums.iter().any(|(_, sum)| sum.group.0 == world);
        for (_, team) in self.teams.extract_if(|(of, _), team| *of == world && team.making.is_none()) {
            team.comm.filter(|_| !is_left).into_iter().for_each(|comm| self.library.free(comm));
        }
    }

    /// Whether the library is done with everything.
    pub(crate) fn is_idle(&self) -> bool {
        self.sums.is_empty() && self.teams.values().all(|team| team.making.is_none())
    }

    /// Leaves the memory of sums to the library, which may still write to it.
    pub(crate) fn forget(self) {
        std::mem::forget(self.sums);
    }
}
