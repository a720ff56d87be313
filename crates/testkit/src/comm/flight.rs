//! Operations in flight: several at a time, waited for in any order or not at all; the same bits whatever the timing.

use super::{PATIENT, Worlds, cases, fails, passes, passes_in_time};
use crate::Rng;
use meshwork_core::comm::shared_moment;
use meshwork_core::{Buffer, Cause, CommError, Group, ReduceOp, ReductionOrder};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

cases![
    waits_in_any_order,
    dropped_handles_only_detach,
    messages_arrive_in_order_whatever_the_order_of_waits,
    delays_never_change_bits,
    many_small_operations,
    an_operation_may_be_waited_for_on_another_thread,
    a_fork_lives_apart_from_its_world,
    ranks_share_a_moment,
];

fn waits_in_any_order(worlds: &dyn Worlds) {
    for n in [2, 3, worlds.most().min(8)] {
        passes(worlds, n, |group| {
            let mut rng = Rng::new(group.rank() as u64); // each rank waits in an order of its own
            for _ in 0..20 {
                let start = |i: i32| {
                    let buffer = Buffer::from_vec(vec![i; 1 + 5000 * (i as usize % 3)]);
                    Ok((i, group.start_all_reduce(buffer, ReduceOp::Sum)?))
                };
                let mut started = (0..12).map(start).collect::<Result<Vec<_>, CommError>>()?;
                rng.shuffle(&mut started);
                for (i, op) in started {
                    assert!(op.wait()?.as_slice::<i32>()?.iter().all(|&x| x == i * n as i32));
                }
            }
            Ok(())
        });
    }
}

fn dropped_handles_only_detach(worlds: &dyn Worlds) {
    passes(worlds, 4, |group| {
        for i in 0..100 {
            let op = group.start_all_reduce(Buffer::from_vec(vec![1i32; 10_000]), ReduceOp::Sum)?;
            // Another rank each time drops its handle, while the others still need its elements.
            if i % 4 == group.rank() {
                drop(op);
            } else {
                assert!(op.wait()?.as_slice::<i32>()?.iter().all(|&x| x == 4));
            }
        }
        // A message whose sender is long done.
        match group.rank() {
            0 => drop(group.start_send(Buffer::from_vec(vec![7u8; 100]), 1, 1)?),
            1 => {
                thread::sleep(Duration::from_millis(5));
                let mut bytes = [0u8; 100];
                group.recv_slice(&mut bytes, 0, 1)?;
                assert_eq!(bytes, [7; 100]);
            }
            _ => {}
        }
        Ok(())
    });
}

fn messages_arrive_in_order_whatever_the_order_of_waits(worlds: &dyn Worlds) {
    passes(worlds, 2, |group| {
        if group.rank() == 0 {
            let send = |i: i32| group.start_send(Buffer::from_vec(vec![i]), 1, i as u64);
            let sends = (0..100).map(send).collect::<Result<Vec<_>, _>>()?;
            sends.into_iter().try_for_each(|op| op.wait().map(drop))?;
        } else {
            let recv = |i: i32| Ok((i, group.start_recv(Buffer::from_vec(vec![0i32]), 0, i as u64)?));
            let receives = (0..100).map(recv).collect::<Result<Vec<_>, CommError>>()?;
            for (i, op) in receives.into_iter().rev() {
                assert_eq!(op.wait()?.as_slice::<i32>()?, [i]);
            }
        }
        Ok(())
    });
}

/// A training-like mix of operations, with delays drawn from `seed`; gives the bits of all results.
fn mix(group: &Group, seed: u64) -> Result<Vec<u32>, CommError> {
    let mut delays = Rng::new(seed * 1000 + group.rank() as u64);
    let mut data = Rng::new(group.rank() as u64);
    let mut bits = Vec::new();
    for step in 0..6 {
        let count = [7, 1000, 150_000][step % 3];
        let values: Vec<f32> = (0..count).map(|_| data.signed() * 1e3).collect();
        thread::sleep(Duration::from_micros(delays.below(300) as u64));
        let sum = group.start_all_reduce(Buffer::from_slice(&values), ReduceOp::Sum)?;
        thread::sleep(Duration::from_micros(delays.below(300) as u64));
        let mut part = vec![0.0; count / group.size()];
        let whole = &values[..part.len() * group.size()];
        group.reduce_scatter_slice(whole, &mut part, ReduceOp::Sum)?;
        let sum = sum.wait()?;
        bits.extend(sum.as_slice::<f32>()?.iter().chain(&part).map(|x| x.to_bits()));
    }
    Ok(bits)
}

fn delays_never_change_bits(worlds: &dyn Worlds) {
    for n in [2, 3, worlds.most().min(5)] {
        let first = Mutex::new(BTreeMap::new());
        for seed in 0..8 {
            passes(worlds, n, |group| {
                let bits = mix(group, seed)?;
                let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                let first = first.entry(group.rank()).or_insert_with(|| bits.clone());
                let repeats = group.reduction_order() >= ReductionOrder::Repeatable;
                assert!(!repeats || *first == bits, "{n} ranks, seed {seed}");
                Ok(())
            });
        }
    }
}

/// More ranks than cores, thousands of dependent operations: only possible if waiting ranks leave the cores alone.
fn many_small_operations(worlds: &dyn Worlds) {
    let n = worlds.most();
    passes(worlds, n, |group| {
        for i in 0..1000 {
            let mut x = [i, group.rank() as i32];
            group.all_reduce_slice(&mut x, ReduceOp::Sum)?;
            assert_eq!(x, [n as i32 * i, (n * (n - 1) / 2) as i32]);
        }
        Ok(())
    });
}

fn an_operation_may_be_waited_for_on_another_thread(worlds: &dyn Worlds) {
    passes(worlds, 2, |group| {
        let op = group.start_all_reduce(Buffer::from_vec(vec![1i32; 5]), ReduceOp::Sum)?;
        let sum = thread::scope(|scope| scope.spawn(|| op.wait()).join());
        assert_eq!(sum.expect("no panic")?.as_slice::<i32>()?, [2; 5]);
        Ok(())
    });
}

fn sum(world: &Group) -> Result<i64, CommError> {
    let mut x = [world.rank() as i64];
    world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
    Ok(x[0])
}

/// The worlds beside a world go on when it has stopped, and do not time out.
fn a_fork_lives_apart_from_its_world(worlds: &dyn Worlds) {
    passes_in_time(worlds, 3, |world, timeout| {
        let [first, second] = [world.fork("first")?, world.fork("second")?];
        assert_eq!((first.name(), first.world_ranks(), second.name()), ("first", &[0, 1, 2][..], "second"));
        thread::scope(|scope| -> Result<(), Cause> {
            // Another thread of the rank meets the others while this one waits.
            let other = scope.spawn(|| {
                if first.rank() == 2 {
                    thread::sleep(5 * timeout);
                }
                sum(&first)
            });
            let stopped = if world.rank() == 0 { world.barrier() } else { sum(world).map(drop) };
            assert!(stopped.is_err(), "the world has stopped");
            assert_eq!(other.join().expect("no panic")?, 3);
            Ok(())
        })?;
        assert_eq!(sum(&second)?, 3);
        Ok(())
    });

    // A rank that ended is missed in a fork at once, whether the others were there before or come later.
    for delay in [0, 50] {
        let error = fails(worlds, 3, PATIENT, |world| {
            if world.rank() == 1 {
                thread::sleep(Duration::from_millis(50 - delay));
                return Err("injected".into());
            }
            thread::sleep(Duration::from_millis(delay));
            Ok(world.fork("beside")?.barrier()?)
        });
        for error in error.iter().flat_map(|error| [&error.ends[0], &error.ends[2]]) {
            let told = error.as_ref().map_or_else(String::new, ToString::to_string);
            assert!(told.contains("rank 1 has returned an error (injected) and takes no part"), "{told}");
        }
    }
}

/// Each rank finds a moment of rank 0 by its own clock: no further off than the search takes.
fn ranks_share_a_moment(worlds: &dyn Worlds) {
    for n in [1, 2, worlds.most().min(7)] {
        passes(worlds, n, |world| {
            let (begun, origin) = (Instant::now(), world.communicator().membership().origin());
            thread::sleep(Duration::from_millis(if world.rank() == 0 { 30 } else { 0 }));
            let moment = shared_moment(world.communicator().clone())?;
            // Since the origin, by the clock of rank 0 and of this rank.
            let since = (moment - origin).as_nanos() as i64;
            let mut first = [since];
            world.broadcast_slice(&mut first, 0)?;
            let (off, searched) = (first[0].abs_diff(since), begun.elapsed().as_nanos() as u64);
            assert!(off <= searched, "{off} ns off after {searched} of {n} ranks");
            Ok(())
        });
    }
}
