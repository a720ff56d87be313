//! All kinds of faults between ranks: the error of each rank, and that no rank waits for the timeout.

use super::{PATIENT, Worlds, cases, fails, in_time, passes, passes_in_time, told};
use meshwork_core::comm::{Activity, Fault, FaultKind};
use meshwork_core::{Buffer, Cause, CommError, DType, Group, ReduceOp, RunError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

cases![
    disagreement_about_the_operation_names_both,
    disagreement_about_particulars,
    disagreement_about_the_parts_of_a_group,
    a_panic_stops_everybody_at_once,
    a_rank_that_returned_is_missed_at_once,
    a_rank_that_failed_is_the_cause_with_its_own_words,
    every_rank_gets_the_same_failure,
    returning_is_fine_when_nobody_needs_the_rank,
    two_ranks_that_receive_from_each_other_are_a_deadlock,
    a_cycle_over_several_groups_is_a_deadlock_though_others_compute,
    the_timeout_names_the_rank_at_the_end_of_the_chain,
    heartbeats_keep_a_slow_rank_alive,
    the_first_fault_is_told_to_every_rank_and_to_later_operations,
    a_process_that_cannot_prepare_ends_the_world,
];

fn zeros(count: usize) -> Buffer {
    Buffer::zeros(DType::F32, count)
}

/// The fault that stopped the ranks.
fn fault(error: &RunError) -> &Fault {
    error.fault.as_ref().unwrap_or_else(|| panic!("no rank was stopped: {error}"))
}

fn disagreement_about_the_operation_names_both(worlds: &dyn Worlds) {
    let error = fails(worlds, 4, PATIENT, |world| {
        let tp = world.split("tp", if world.rank() < 2 { &[0, 1] } else { &[2, 3] })?;
        for _ in 0..if world.rank() < 2 { 0 } else { 213 } {
            tp.barrier()?;
        }
        match world.rank() {
            2 => tp.all_reduce(zeros(65536), ReduceOp::Sum).map(drop)?,
            3 => tp.all_gather(zeros(4096), zeros(8192)).map(drop)?,
            _ => world.barrier()?,
        }
        Ok(())
    });
    let Some(error) = error else { return };
    let disagree = "rank 2 is in all_reduce(f32, 65536), rank 3 in all_gather(f32, 8192)";
    for rank in [2, 3] {
        assert_eq!(told(&error, rank), format!("tp group of world rank {rank}, op #213: {disagree}"));
    }
    // The other ranks were not involved; their errors say where it happened.
    let other = told(&error, 0);
    // In the barrier, or on a busy machine still on its way there.
    let place = other.starts_with("world group of world rank 0, ");
    assert!(place && other.contains(" stopped because in the tp group"), "{other}");
    assert!(other.ends_with(disagree), "{other}");
    let summary = error.to_string();
    assert!(summary.starts_with("a world of 4 ranks failed: tp group of world rank"), "{summary}");
    assert!(summary.contains("\n  rank 2 "), "what each rank was doing: {summary}");
}

fn disagreement_about_particulars(worlds: &dyn Worlds) {
    // Runs `body` with this rank's number on two ranks: both are told `expected`, each with its place.
    let check = |expected: &str, body: &(dyn Fn(&Group, usize) -> Result<(), CommError> + Sync)| {
        let error = fails(worlds, 2, PATIENT, |world| Ok(body(world, world.rank())?));
        for (error, rank) in error.iter().flat_map(|error| [(error, 0), (error, 1)]) {
            assert_eq!(told(error, rank), format!("world group of world rank {rank}, op #0: {expected}"));
        }
    };
    let all_reduce = |world: &Group, buffer, op| world.all_reduce(buffer, op).map(drop);
    check("rank 0 is in all_reduce(f32, 5), rank 1 in all_reduce(f32, 6)", &|world, rank| {
        all_reduce(world, zeros(5 + rank), ReduceOp::Sum)
    });
    check("rank 0 is in all_reduce(f32, 5), rank 1 in all_reduce(bf16, 5)", &|world, rank| {
        all_reduce(world, Buffer::zeros([DType::F32, DType::Bf16][rank], 5), ReduceOp::Sum)
    });
    check("rank 0 is in all_reduce(f32, 5), rank 1 in all_reduce(f32, 5, max)", &|world, rank| {
        all_reduce(world, zeros(5), [ReduceOp::Sum, ReduceOp::Max][rank])
    });
    check("rank 0 is in all_reduce(f32, 5, min), rank 1 in all_reduce(f32, 5, max)", &|world, rank| {
        all_reduce(world, zeros(5), [ReduceOp::Min, ReduceOp::Max][rank])
    });
    check("rank 0 is in broadcast(f32, 5, root 0), rank 1 in broadcast(f32, 5, root 1)", &|world, rank| {
        world.broadcast(zeros(5), rank).map(drop)
    });
    // Rank 0 sends 3 elements to rank 1, which expects 4.
    check("rank 0 is in all_to_all(f32, 3, to 1), rank 1 in all_to_all(f32, 4, from 0)", &|world, rank| {
        let (sends, receives) = if rank == 0 { ([1, 3], [1, 2]) } else { ([2, 1], [4, 1]) };
        let (input, output) = (zeros(sends.iter().sum()), zeros(receives.iter().sum()));
        world.all_to_all(input, output, &sends, &receives).map(drop)
    });
    let message = |world: &Group, rank, recv: Buffer, signature: [u64; 2]| match rank {
        0 => world.send(zeros(5), 1, signature[0]).map(drop),
        _ => world.recv(recv, 0, signature[1]).map(drop),
    };
    let sent = "rank 0 is in send(f32, 5, to 1, signature 0x9)";
    check(&format!("{sent}, rank 1 in recv(f32, 6, from 0, signature 0x9)"), &|world, rank| {
        message(world, rank, zeros(6), [9, 9])
    });
    check(&format!("{sent}, rank 1 in recv(u8, 5, from 0, signature 0x9)"), &|world, rank| {
        message(world, rank, Buffer::zeros(DType::U8, 5), [9, 9])
    });
    check(&format!("{sent}, rank 1 in recv(f32, 5, from 0, signature 0xab)"), &|world, rank| {
        message(world, rank, zeros(5), [9, 0xab])
    });
}

fn disagreement_about_the_parts_of_a_group(worlds: &dyn Worlds) {
    let error = fails(worlds, 3, PATIENT, |world| {
        let parts: [&[usize]; 3] = [&[0, 1], &[0, 1], &[1, 2]];
        let tp = world.split("tp", parts[world.rank()])?;
        tp.barrier()?;
        Ok(world.barrier()?)
    });
    let Some(error) = error else { return };
    let fault = fault(&error);
    assert!(matches!(fault.kind, FaultKind::SplitDisagreement { .. }), "{fault}");
    let text = fault.to_string();
    assert!(text.contains("splits into tp = [0, 1], rank 2 into tp = [1, 2]"), "{text}");
    assert_eq!(fault.kind.culprit(), 2);
}

fn a_panic_stops_everybody_at_once(worlds: &dyn Worlds) {
    let error = fails(worlds, 3, PATIENT, |world| match world.rank() {
        1 => panic!("out of cheese"),
        _ => Ok(world.barrier()?),
    });
    let Some(error) = error else { return };
    assert_eq!((error.rank, &*error.cause), (1, "rank 1 panicked: out of cheese"));
    assert_eq!(told(&error, 1), "panicked: out of cheese");
    for rank in [0, 2] {
        let place = format!("world group of world rank {rank}, op #0: barrier()");
        assert_eq!(told(&error, rank), format!("{place} stopped because rank 1 panicked: out of cheese"));
    }
}

fn a_rank_that_returned_is_missed_at_once(worlds: &dyn Worlds) {
    // It ends before the others arrive, or while they wait.
    for delays in [[0, 20], [20, 0]] {
        let error = fails(worlds, 2, PATIENT, |world| {
            sleep(Duration::from_millis(delays[world.rank()]));
            if world.rank() == 0 {
                world.barrier()?;
            }
            Ok(())
        });
        let Some(error) = error else { return };
        let expected =
            "world group of world rank 0, op #0: barrier() stopped because rank 1 has returned and takes no part";
        assert_eq!((told(&error, 0), told(&error, 1), error.rank), (expected.to_owned(), "nothing".to_owned(), 1));
    }
}

fn a_rank_that_failed_is_the_cause_with_its_own_words(worlds: &dyn Worlds) {
    for delays in [[0, 20], [20, 0]] {
        let error = fails(worlds, 2, PATIENT, |world| {
            sleep(Duration::from_millis(delays[world.rank()]));
            match world.rank() {
                1 => Err("the disk is full\nwith details".into()),
                _ => Ok(world.recv(zeros(4), 1, 0).map(drop)?),
            }
        });
        let Some(error) = error else { return };
        assert_eq!(error.rank, 1);
        let start = "a world of 2 ranks failed: rank 1 returned an error: the disk is full\nwith details";
        assert!(error.to_string().starts_with(start), "{error}");
        assert_eq!(
            told(&error, 0),
            "world group of world rank 0, op #0: recv(f32, 4, from 1, signature 0x0) \
             stopped because rank 1 has returned an error (the disk is full) and takes no part"
        );
    }
}

/// Also a rank that ended well, because it needed nobody.
fn every_rank_gets_the_same_failure(worlds: &dyn Worlds) {
    let error = fails(worlds, 4, PATIENT, |world| {
        world.barrier()?; // processes come one after the other
        match world.rank() {
            0 => Ok(()),
            1 => Err("the disk is full".into()),
            2 => {
                sleep(Duration::from_millis(50));
                panic!("out of cheese")
            }
            _ => Ok(world.recv(zeros(4), 2, 0).map(drop)?),
        }
    });
    let Some(error) = error else { return };
    assert_eq!((error.rank, &*error.cause), (1, "rank 1 returned an error: the disk is full"));
    let ends = ["nothing", "the disk is full", "panicked: out of cheese"];
    assert_eq!([0, 1, 2].map(|rank| told(&error, rank)), ends);
    let kind = &fault(&error).kind;
    assert_eq!(*kind, FaultKind::Panicked { rank: 2, message: "out of cheese".to_owned() });
}

fn returning_is_fine_when_nobody_needs_the_rank(worlds: &dyn Worlds) {
    passes(worlds, 3, |world| {
        let pair = world.split("pair", if world.rank() < 2 { &[0, 1] } else { &[2] })?;
        match world.rank() {
            0 => drop(world.start_send(zeros(10), 1, 0)?), // and is gone before rank 1 asks
            1 => {
                sleep(Duration::from_millis(10));
                world.recv(zeros(10), 0, 0)?;
            }
            _ => {}
        }
        assert_eq!(pair.size(), [2, 2, 1][world.rank()]);
        Ok(())
    });
}

fn two_ranks_that_receive_from_each_other_are_a_deadlock(worlds: &dyn Worlds) {
    let error = fails(worlds, 2, PATIENT, |world| Ok(world.recv(zeros(1), 1 - world.rank(), 0).map(drop)?));
    let Some(error) = error else { return };
    let fault = fault(&error);
    assert_eq!(fault.kind.to_string(), "deadlock: rank 0 waits for rank 1, which waits for rank 0");
    let doing = "rank 1 waits in world #0 recv(f32, 1, from 0, signature 0x0)";
    assert!(fault.to_string().contains(doing), "{fault}");
}

fn a_cycle_over_several_groups_is_a_deadlock_though_others_compute(worlds: &dyn Worlds) {
    let error = fails(worlds, 4, PATIENT, |world| {
        let rank = world.rank();
        let tp = world.split("tp", if rank < 2 { &[0, 1] } else { &[2, 3] })?;
        let dp = world.split("dp", if rank % 2 == 0 { &[0, 2] } else { &[1, 3] })?;
        // 0 waits for 1 on tp, 1 for 3 on dp, 3 for 2 on tp, 2 for 0 on dp.
        Ok(if rank == 0 || rank == 3 { tp } else { dp }.barrier()?)
    });
    if let Some(error) = error {
        let expected = "deadlock: rank 0 waits for rank 1, which waits for rank 3, \
                        which waits for rank 2, which waits for rank 0";
        assert_eq!(fault(&error).kind.to_string(), expected);
    }
    // Two ranks of three: the third is busy for longer than others take to find it, and need not be waited for. They
    // hear of it first: a rank that has not woken up since the world began still waits in what that began with.
    let run = |busy| {
        fails(worlds, 3, PATIENT, |world| match world.rank() {
            2 => {
                for rank in 0..2 {
                    drop(world.start_send(zeros(1), rank, 1)?);
                }
                sleep(busy);
                Ok(world.barrier()?)
            }
            rank => {
                world.recv(zeros(1), 2, 1)?;
                Ok(world.recv(zeros(1), 1 - rank, 0).map(drop)?)
            }
        })
    };
    let computes = |error: &RunError| fault(error).ranks[2].activity == Activity::Computing;
    let Some((_, error)) = in_time(worlds, run, computes) else { return };
    assert_eq!(fault(&error).kind, FaultKind::Deadlock { cycle: vec![0, 1] });
    assert!(computes(&error), "{error}");
}

fn the_timeout_names_the_rank_at_the_end_of_the_chain(worlds: &dyn Worlds) {
    let chain = |world: &Group, timeout: Duration| match world.rank() {
        // 0 waits for 1, 1 for 2, 2 for 3, which sleeps.
        3 => {
            sleep(6 * timeout);
            Ok(world.send(zeros(1), 2, 0).map(drop)?)
        }
        rank => {
            world.recv(zeros(1), rank + 1, 0)?;
            if rank > 0 {
                world.send(zeros(1), rank - 1, 0)?;
            }
            Ok(())
        }
    };
    let third = |error: &RunError| {
        error.fault.as_ref().is_some_and(|fault| matches!(fault.kind, FaultKind::Timeout { rank: 3, .. }))
    };
    let run = |timeout| fails(worlds, 4, timeout, |world| chain(world, timeout));
    let Some((timeout, error)) = in_time(worlds, run, third) else { return };
    let fault = fault(&error);
    let FaultKind::Timeout { rank: 3, chain, .. } = &fault.kind else { panic!("{fault}") };
    assert_eq!(chain.last(), Some(&3));
    let text = fault.kind.to_string();
    assert!(text.starts_with(&format!("rank 3 made no progress for {timeout:?}: rank ")), "{text}");
    assert!(text.ends_with("rank 2, which waits for rank 3") || text.ends_with("rank 2 waits for rank 3"));
    assert_eq!(fault.ranks[3].to_string(), format!("rank 3 computes, {}", worlds.joined()));
    assert!(fault.ranks[1].to_string().starts_with("rank 1 waits in world #0 recv"));
    // Others wait for its end as long as the timeout.
    let late = [" op #0: send(f32, 1, to 2, signature 0x0) stopped because", "has not ended, and computes"];
    assert!(late.iter().any(|late| told(&error, 3).contains(late)), "{error}");
}

fn heartbeats_keep_a_slow_rank_alive(worlds: &dyn Worlds) {
    passes_in_time(worlds, 2, |world, timeout| {
        if world.rank() == 1 {
            for _ in 0..100 {
                sleep(timeout / 20); // five timeouts altogether
                world.heartbeat();
            }
        }
        Ok(world.barrier()?)
    });
}

fn the_first_fault_is_told_to_every_rank_and_to_later_operations(worlds: &dyn Worlds) {
    let faults: Mutex<Vec<Arc<Fault>>> = Mutex::default();
    let ended = worlds.run(3, PATIENT, &|world| {
        let first = if world.rank() == 0 { world.broadcast(zeros(1), 0).map(drop) } else { world.barrier() };
        let later = world.send(zeros(1), (world.rank() + 1) % 3, 0).map(drop);
        let split = world.split("part", &[world.rank()]).map(drop);
        for told in [first, later, split] {
            let Err(CommError::Stopped { fault, .. }) = told else { panic!("{told:?}") };
            faults.lock().unwrap_or_else(PoisonError::into_inner).push(fault);
        }
        Ok(())
    });
    let faults = faults.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(ended.is_none_or(|ended| ended.is_ok()));
    assert!(faults.len().is_multiple_of(3) && faults.iter().all(|fault| **fault == *faults[0]), "{faults:?}");
}

/// A process that fails before its rank runs ends the world as the rank does. A rank is not late while it prepares.
fn a_process_that_cannot_prepare_ends_the_world(worlds: &dyn Worlds) {
    if let Some(world) = worlds.world(3, PATIENT) {
        let ended = world
            .prepare(|| if world.leads() { Err(Cause::from("no such device")) } else { Ok(()) })
            .and_then(|()| world.run(|world| world.barrier()));
        assert_eq!(ended.map_err(|error| error.cause).unwrap_err(), "rank 0 returned an error: no such device");
    }
    let prepared = |timeout: Duration| {
        let world = worlds.world(2, timeout)?;
        let prepared = world.prepare(|| {
            sleep(if world.leads() { 5 * timeout } else { timeout / 9 });
            Ok::<_, CommError>(())
        });
        Some(prepared.and_then(|()| world.run(|world| world.barrier())))
    };
    assert!(in_time(worlds, prepared, Result::is_ok).is_none_or(|(_, end)| end.is_ok()));
}
