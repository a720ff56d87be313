//! Every operation gives its result on every rank, with several in flight on two groups and waits in any order.

use super::{check, choice, ranks};
use meshwork_core::{Block, Buffer, CommError, DType, Group, HostMemory, OpKind, Pending, Recycle, ReduceOp};
use shuttle::thread;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// An operation in flight and what its wait must return.
struct Started {
    op: Pending,
    expected: Vec<i32>,
}

impl Started {
    fn check(self) -> Result<(), CommError> {
        let result = self.op.wait()?;
        match &self.expected[..] {
            [] => assert_eq!(result.count(), 0), // a barrier's has no type of its own
            expected => assert_eq!(result.as_slice::<i32>()?, expected),
        }
        Ok(())
    }
}

/// What a member contributes: numbers that tell ranks, elements and operations apart.
fn values(member: usize, tag: i32, elements: std::ops::Range<usize>) -> Vec<i32> {
    elements.map(|i| tag + 10_000 * member as i32 + i as i32).collect()
}

/// The `kind` of operation over `group` with `count` elements; for a send, also the receive from the rank before.
fn start(kind: OpKind, group: &Group, count: usize, tag: i32) -> Result<Vec<Started>, CommError> {
    let (n, me) = (group.size(), group.rank());
    let mine = |elements| Buffer::from_vec(values(me, tag, elements));
    let blank = |count| Buffer::zeros(DType::I32, count);
    let sum = |elements: std::ops::Range<usize>| {
        let of_ranks = (0..n).map(|rank| values(rank, tag, elements.clone()));
        of_ranks.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).unwrap_or_default()
    };
    let all = |elements: std::ops::Range<usize>| (0..n).flat_map(|rank| values(rank, tag, elements.clone())).collect();
    let one = |op, expected| Ok(vec![Started { op, expected }]);
    match kind {
        OpKind::AllReduce => one(group.start_all_reduce(mine(0..count), ReduceOp::Sum)?, sum(0..count)),
        OpKind::ReduceScatter => {
            let op = group.start_reduce_scatter(mine(0..n * count), blank(count), ReduceOp::Sum)?;
            one(op, sum(me * count..(me + 1) * count))
        }
        OpKind::AllGather => one(group.start_all_gather(mine(0..count), blank(n * count))?, all(0..count)),
        OpKind::Broadcast => one(group.start_broadcast(mine(0..count), n - 1)?, values(n - 1, tag, 0..count)),
        OpKind::AllToAll => {
            // Rank r sends (r + peer) elements to a peer and gets as many.
            let counts: Vec<usize> = (0..n).map(|peer| (me + peer) * count).collect();
            let first = |rank: usize, peer: usize| (0..peer).map(|earlier| (rank + earlier) * count).sum::<usize>();
            let from = |peer: usize| values(peer, tag, first(peer, me)..first(peer, me) + (me + peer) * count);
            let total = counts.iter().sum();
            let op = group.start_all_to_all(mine(0..total), blank(total), &counts, &counts)?;
            one(op, (0..n).flat_map(from).collect())
        }
        OpKind::Send | OpKind::Recv if n == 1 => Ok(vec![]),
        OpKind::Send | OpKind::Recv => {
            let (next, before) = ((me + 1) % n, (me + n - 1) % n);
            let send = group.start_send(mine(0..count), next, 7)?;
            let receive = group.start_recv(blank(count), before, 7)?;
            // A message may trade its memory, so a sender gets back some buffer.
            drop(send);
            one(receive, values(before, tag, 0..count))
        }
        OpKind::Barrier => one(group.start_barrier()?, vec![]),
    }
}

/// Two operations over the world, of one claim and of several, around one over a part of it.
fn every_rank_gets(kind: OpKind) {
    check(2, move || {
        ranks(3, |world| {
            let part = world.split("part", if world.rank() < 2 { &[0, 1] } else { &[2] })?;
            let mut started = start(kind, world, 3, 100)?;
            started.extend(start(kind, &part, 5, 200)?);
            started.extend(start(kind, world, 130, 300)?);
            let turn = world.rank() % started.len();
            started.rotate_left(turn);
            started.into_iter().try_for_each(Started::check)
        });
    });
}

#[test]
fn all_reduce() {
    every_rank_gets(OpKind::AllReduce);
}

#[test]
fn reduce_scatter() {
    every_rank_gets(OpKind::ReduceScatter);
}

#[test]
fn all_gather() {
    every_rank_gets(OpKind::AllGather);
}

#[test]
fn broadcast() {
    every_rank_gets(OpKind::Broadcast);
}

#[test]
fn all_to_all() {
    every_rank_gets(OpKind::AllToAll);
}

#[test]
fn messages() {
    every_rank_gets(OpKind::Send);
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    check(2, || {
        let come = AtomicUsize::new(0);
        ranks(3, |world| {
            for round in 1..=2 {
                come.fetch_add(1, Ordering::Relaxed);
                world.barrier()?;
                assert!(come.load(Ordering::Relaxed) >= 3 * round);
            }
            Ok(())
        });
    });
}

const KINDS: [OpKind; 7] = [
    OpKind::AllReduce,
    OpKind::ReduceScatter,
    OpKind::AllGather,
    OpKind::Broadcast,
    OpKind::AllToAll,
    OpKind::Send,
    OpKind::Barrier,
];

/// Kinds, sizes, groups, orders of waits and dropped handles are drawn anew for each schedule.
#[test]
fn different_operations_in_flight_and_some_never_waited_for() {
    check(2, || {
        let drawn: Vec<u64> = (0..5).map(|_| choice()).collect();
        ranks(3, |world| {
            let part = world.split("part", if world.rank() == 1 { &[1] } else { &[0, 2] })?;
            let mut flying = Vec::new();
            for (i, &draw) in drawn.iter().enumerate() {
                let group = if draw & 1 == 0 { world } else { &part };
                let kind = KINDS[(draw >> 8) as usize % KINDS.len()];
                let count = if draw & 2 == 0 { 2 } else { 70 };
                let mut started = start(kind, group, count, 1000 * i as i32)?;
                if draw >> (16 + world.rank()) & 3 == 0 {
                    started.clear(); // its handle is dropped in flight
                }
                flying.extend(started);
            }
            if !flying.is_empty() {
                let turn = (drawn[0] >> 32) as usize % flying.len() * world.rank() % flying.len();
                flying.rotate_left(turn);
            }
            flying.into_iter().try_for_each(Started::check)
        });
    });
}

/// An operation of which one rank has its result is done for every rank, so a loop over `is_done` ends.
#[test]
fn polling_sees_the_end() {
    check(2, || {
        ranks(2, |world| {
            let started = start(OpKind::AllReduce, world, 130, 0)?;
            if world.rank() == 0 {
                while !started.iter().all(|started| started.op.is_done()) {
                    thread::yield_now();
                }
            }
            started.into_iter().try_for_each(Started::check)
        });
    });
}

/// Counts the returned blocks.
#[derive(Debug, Default)]
struct Arena(Mutex<usize>);

impl Arena {
    fn buffer(self: &Arc<Arena>, count: usize) -> Result<Buffer, CommError> {
        let memory = HostMemory::recycled(Block::zeroed(4 * count), self.clone());
        Ok(Buffer::from_memory(Arc::new(memory), DType::I32, count)?)
    }
}

impl Recycle for Arena {
    fn recycle(&self, _block: Block) {
        *self.0.lock().unwrap() += 1;
    }
}

#[test]
fn dropped_handles_leave_no_memory_behind() {
    check(2, || {
        let arena = Arc::new(Arena::default());
        ranks(2, |world| {
            let dropped = world.start_all_gather(arena.buffer(40)?, arena.buffer(80)?)?;
            let waited = world.start_all_reduce(arena.buffer(130)?, ReduceOp::Sum)?;
            drop(dropped);
            if world.rank() == 0 {
                waited.wait()?;
            } else {
                drop(waited);
            }
            Ok(())
        });
        assert_eq!(*arena.0.lock().unwrap(), 6);
    });
}
