//! All kinds of faults between ranks: the error of each rank, and that no rank waits for the timeout.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use meshwork_core::comm::thread::{Options, RankEnd, WorldError, run, world};
use meshwork_core::comm::{Activity, Fault, FaultKind};
use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp};

/// So long that a test which reaches it did not get its error at once.
const PATIENT: Options = Options { timeout: Duration::from_secs(600) };
const SHORT: Options = Options { timeout: Duration::from_millis(200) };

fn fails(n: usize, options: Options, body: impl Fn(Group) -> Result<(), CommError> + Sync) -> WorldError<CommError> {
    let start = Instant::now();
    let error = run(n, options, body).expect_err("this program cannot work");
    assert!(start.elapsed() < Duration::from_secs(60), "it was not told at once");
    error
}

/// First line of what a rank was told.
fn told<E: ToString>(error: &WorldError<E>, rank: usize) -> String {
    match &error.ends[rank] {
        Some(RankEnd::Error(error)) => error.to_string().lines().next().unwrap().to_owned(),
        Some(RankEnd::Panic(message)) => format!("panic: {message}"),
        None => "nothing".to_owned(),
    }
}

fn zeros(count: usize) -> Buffer {
    Buffer::zeros(DType::F32, count)
}

/// Runs `body` with this rank's number on two ranks, expects a disagreement, and gives its text without the place.
fn disagreement(body: impl Fn(&Group, usize) -> Result<(), CommError> + Sync) -> String {
    let error = fails(2, PATIENT, |world| body(&world, world.rank()));
    let texts = [0, 1].map(|rank| {
        let place = format!("world group of world rank {rank}, op #0: ");
        told(&error, rank).strip_prefix(&place).expect("both are told, each with its place").to_owned()
    });
    assert_eq!(texts[0], texts[1]);
    texts[0].clone()
}

#[test]
fn disagreement_about_the_operation_names_both() {
    let error = fails(6, PATIENT, |world| {
        let part: Vec<_> = if world.rank() < 4 { (0..4).collect() } else { vec![4, 5] };
        let tp = world.split("tp", &part)?;
        for _ in 0..if world.rank() < 4 { 0 } else { 213 } {
            tp.barrier()?;
        }
        match world.rank() {
            4 => tp.all_reduce(zeros(65536), ReduceOp::Sum).map(drop),
            5 => tp.all_gather(zeros(4096), zeros(8192)).map(drop),
            _ => world.barrier(),
        }
    });
    let disagree = "rank 4 is in all_reduce(f32, 65536), rank 5 in all_gather(f32, 8192)";
    for rank in [4, 5] {
        let expected = format!("tp group of world rank {rank}, op #213: {disagree}");
        assert_eq!(told(&error, rank), expected);
    }
    // The other ranks were not involved; their errors say where it happened.
    let other = told(&error, 0);
    // In the barrier, or on a busy machine still on its way there.
    let place = other.starts_with("world group of world rank 0, ");
    assert!(place && other.contains(" stopped because in the tp group"), "{other}");
    assert!(other.ends_with(disagree), "{other}");
    let summary = error.to_string();
    assert!(summary.starts_with("a world of 6 ranks failed: tp group of world rank"), "{summary}");
    assert!(summary.contains("\n  rank 4 "), "what each rank was doing: {summary}");
}

#[test]
fn disagreement_about_particulars() {
    let all_reduce = |world: &Group, buffer, op| world.all_reduce(buffer, op).map(drop);
    assert_eq!(
        disagreement(|world, rank| all_reduce(world, zeros(5 + rank), ReduceOp::Sum)),
        "rank 0 is in all_reduce(f32, 5), rank 1 in all_reduce(f32, 6)"
    );
    let dtypes = [DType::F32, DType::Bf16];
    assert_eq!(
        disagreement(|world, rank| all_reduce(world, Buffer::zeros(dtypes[rank], 5), ReduceOp::Sum)),
        "rank 0 is in all_reduce(f32, 5), rank 1 in all_reduce(bf16, 5)"
    );
    let ops = [ReduceOp::Sum, ReduceOp::Max];
    assert_eq!(
        disagreement(|world, rank| all_reduce(world, zeros(5), ops[rank])),
        "rank 0 is in all_reduce(f32, 5), rank 1 in all_reduce(f32, 5, max)"
    );
    let ops = [ReduceOp::Min, ReduceOp::Max];
    assert_eq!(
        disagreement(|world, rank| all_reduce(world, zeros(5), ops[rank])),
        "rank 0 is in all_reduce(f32, 5, min), rank 1 in all_reduce(f32, 5, max)"
    );
    assert_eq!(
        disagreement(|world, rank| world.broadcast(zeros(5), rank).map(drop)),
        "rank 0 is in broadcast(f32, 5, root 0), rank 1 in broadcast(f32, 5, root 1)"
    );
}

#[test]
fn disagreement_about_the_counts_of_an_all_to_all() {
    // Rank 0 sends 3 elements to rank 1, which expects 4.
    let text = disagreement(|world, rank| {
        let (sends, receives) = if rank == 0 { ([1, 3], [1, 2]) } else { ([2, 1], [4, 1]) };
        let (input, output) = (zeros(sends.iter().sum()), zeros(receives.iter().sum()));
        world.all_to_all(input, output, &sends, &receives).map(drop)
    });
    let expected = "rank 0 is in all_to_all(f32, 3, to 1), rank 1 in all_to_all(f32, 4, from 0)";
    assert_eq!(text, expected);
}

#[test]
fn disagreement_about_a_message() {
    let exchange = |world: &Group, rank, send: Buffer, recv: Buffer, signature: [u64; 2]| match rank {
        0 => world.send(send, 1, signature[0]).map(drop),
        _ => world.recv(recv, 0, signature[1]).map(drop),
    };
    assert_eq!(
        disagreement(|world, rank| exchange(world, rank, zeros(5), zeros(6), [9, 9])),
        "rank 0 is in send(f32, 5, to 1, signature 0x9), rank 1 in recv(f32, 6, from 0, signature 0x9)"
    );
    let bytes = || Buffer::zeros(DType::U8, 5);
    assert_eq!(
        disagreement(|world, rank| exchange(world, rank, zeros(5), bytes(), [9, 9])),
        "rank 0 is in send(f32, 5, to 1, signature 0x9), rank 1 in recv(u8, 5, from 0, signature 0x9)"
    );
    assert_eq!(
        disagreement(|world, rank| exchange(world, rank, zeros(5), zeros(5), [9, 0xab])),
        "rank 0 is in send(f32, 5, to 1, signature 0x9), rank 1 in recv(f32, 5, from 0, signature 0xab)"
    );
}

#[test]
fn disagreement_about_the_parts_of_a_group() {
    let error = fails(3, PATIENT, |world| {
        let parts: [&[usize]; 3] = [&[0, 1], &[0, 1], &[1, 2]];
        let tp = world.split("tp", parts[world.rank()])?;
        tp.barrier()?;
        world.barrier()
    });
    let fault = error.fault.as_ref().unwrap();
    assert!(matches!(fault.kind, FaultKind::SplitDisagreement { .. }), "{fault}");
    let text = fault.to_string();
    assert!(text.contains("splits into tp = [0, 1], rank 2 into tp = [1, 2]"), "{text}");
    assert_eq!(fault.kind.culprit(), 2);
}

#[test]
fn a_panic_stops_everybody_at_once() {
    let error = fails(3, PATIENT, |world| match world.rank() {
        1 => panic!("out of cheese"),
        _ => world.barrier(),
    });
    assert_eq!((error.rank, &*error.cause), (1, "rank 1 panicked: out of cheese"));
    assert_eq!(told(&error, 1), "panic: out of cheese");
    for rank in [0, 2] {
        assert_eq!(
            told(&error, rank),
            format!(
                "world group of world rank {rank}, op #0: barrier() stopped because rank 1 panicked: out of cheese"
            )
        );
    }
}

/// Fifteen ranks that stop for one reason share a line.
#[test]
fn ranks_that_report_the_same_share_a_line() {
    let coming = AtomicUsize::new(0);
    let error = fails(16, PATIENT, |world| {
        let tp = world
            .split("tp", if world.rank() < 8 { &[0, 1, 2, 3, 4, 5, 6, 7] } else { &[8, 9, 10, 11, 12, 13, 14, 15] })?;
        coming.fetch_add(usize::from(world.rank() != 7), Ordering::Relaxed);
        match world.rank() {
            7 => {
                while coming.load(Ordering::Relaxed) < 15 {
                    sleep(Duration::from_millis(10));
                }
                sleep(Duration::from_millis(300)); // they wait by then
                panic!("out of cheese")
            }
            rank if rank < 8 => tp.all_reduce(zeros(2), ReduceOp::Sum).map(drop),
            _ => world.barrier(),
        }
    });
    assert_eq!(
        error.to_string(),
        "a world of 16 ranks failed: rank 7 panicked: out of cheese
  ranks 0-6 wait in tp #0 all_reduce(f32, 2)
  rank 7 panicked (out of cheese), last in world #0 barrier() of Group::split(\"tp\")
  ranks 8-15 wait in world #1 barrier()
  ranks 0-6 stopped: tp group, op #0: all_reduce(f32, 2)
  ranks 8-15 stopped: world group, op #1: barrier()"
    );
    // The error of each single rank still has the cause.
    assert_eq!(
        told(&error, 0),
        "tp group of world rank 0, op #0: all_reduce(f32, 2) stopped because rank 7 panicked: out of cheese"
    );
}

#[test]
fn a_rank_that_returned_is_missed_at_once() {
    // It ends before the others arrive, or while they wait.
    for delays in [[0, 20], [20, 0]] {
        let error = fails(2, PATIENT, |world| {
            sleep(Duration::from_millis(delays[world.rank()]));
            match world.rank() {
                1 => Ok(()),
                _ => world.barrier(),
            }
        });
        let expected =
            "world group of world rank 0, op #0: barrier() stopped because rank 1 has returned and takes no part";
        assert_eq!(told(&error, 0), expected);
        assert_eq!(error.rank, 1);
        assert_eq!(told(&error, 1), "nothing");
    }
}

#[test]
fn a_rank_that_failed_is_the_cause_with_its_own_words() {
    for delays in [[0, 20], [20, 0]] {
        let error = run(2, PATIENT, |world| {
            sleep(Duration::from_millis(delays[world.rank()]));
            match world.rank() {
                1 => Err("the disk is full\nwith details".to_owned()),
                _ => world.recv(zeros(4), 1, 0).map(drop).map_err(|error| error.to_string()),
            }
        });
        let error = error.unwrap_err();
        assert_eq!(error.rank, 1);
        assert!(
            error
                .to_string()
                .starts_with("a world of 2 ranks failed: rank 1 returned an error: the disk is full\nwith details")
        );
        assert_eq!(
            told(&error, 0),
            "world group of world rank 0, op #0: recv(f32, 4, from 1, signature 0x0) \
             stopped because rank 1 has returned an error (the disk is full) and takes no part"
        );
    }
}

#[test]
fn returning_is_fine_when_nobody_needs_the_rank() {
    let results = run(3, PATIENT, |world| {
        let pair = world.split("pair", if world.rank() < 2 { &[0, 1] } else { &[2] })?;
        match world.rank() {
            0 => drop(world.start_send(zeros(10), 1, 0)?), // and is gone before rank 1 asks
            1 => {
                sleep(Duration::from_millis(10));
                world.recv(zeros(10), 0, 0)?;
            }
            _ => {}
        }
        Ok::<_, CommError>(pair.size())
    });
    assert_eq!(results.unwrap(), [2, 2, 1]);
}

#[test]
fn a_rank_that_drops_its_communicators_is_gone() {
    let mut comms = world(2, PATIENT);
    drop(comms.pop());
    let group = Group::from(comms.remove(0));
    let error = group.barrier().unwrap_err();
    assert!(error.to_string().contains("rank 1 has dropped its communicators and takes no part"), "{error}");
}

#[test]
fn two_ranks_that_receive_from_each_other_are_a_deadlock() {
    let error = fails(2, PATIENT, |world| world.recv(zeros(1), 1 - world.rank(), 0).map(drop));
    let fault = error.fault.as_ref().unwrap();
    let expected = "deadlock: rank 0 waits for rank 1, which waits for rank 0";
    assert_eq!(fault.kind.to_string(), expected);
    let doing = "rank 1 waits in world #0 recv(f32, 1, from 0, signature 0x0)";
    assert!(fault.to_string().contains(doing), "{fault}");
}

#[test]
fn a_cycle_over_several_groups_is_a_deadlock_though_others_compute() {
    let error = fails(4, PATIENT, |world| {
        let rank = world.rank();
        let tp = world.split("tp", if rank < 2 { &[0, 1] } else { &[2, 3] })?;
        let dp = world.split("dp", if rank % 2 == 0 { &[0, 2] } else { &[1, 3] })?;
        // 0 waits for 1 on tp, 1 for 3 on dp, 3 for 2 on tp, 2 for 0 on dp.
        if rank == 0 || rank == 3 { tp.barrier() } else { dp.barrier() }
    });
    let expected = "deadlock: rank 0 waits for rank 1, which waits for rank 3, \
                    which waits for rank 2, which waits for rank 0";
    assert_eq!(error.fault.unwrap().kind.to_string(), expected);

    // Two ranks of three: the third is busy, and need not be waited for.
    let error = fails(3, PATIENT, |world| match world.rank() {
        2 => {
            sleep(Duration::from_millis(100));
            world.barrier()
        }
        rank => world.recv(zeros(1), 1 - rank, 0).map(drop),
    });
    let fault = error.fault.unwrap();
    assert_eq!(fault.kind, FaultKind::Deadlock { cycle: vec![0, 1] });
    assert_eq!(fault.ranks[2].activity, Activity::Computing);
}

#[test]
fn the_timeout_names_the_rank_at_the_end_of_the_chain() {
    let error = fails(4, SHORT, |world| match world.rank() {
        // 0 waits for 1, 1 for 2, 2 for 3, which sleeps.
        3 => {
            sleep(Duration::from_millis(1200));
            world.send(zeros(1), 2, 0).map(drop)
        }
        rank => {
            world.recv(zeros(1), rank + 1, 0)?;
            if rank == 0 { Ok(()) } else { world.send(zeros(1), rank - 1, 0).map(drop) }
        }
    });
    let fault = error.fault.as_ref().unwrap();
    let FaultKind::Timeout { rank: 3, chain, .. } = &fault.kind else { panic!("{fault}") };
    assert_eq!(chain.last(), Some(&3));
    let text = fault.kind.to_string();
    assert!(text.starts_with("rank 3 made no progress for 200ms: rank "), "{text}");
    assert!(text.ends_with("rank 2, which waits for rank 3") || text.ends_with("rank 2 waits for rank 3"));
    assert_eq!(fault.ranks[3].to_string(), "rank 3 computes, no operation yet");
    assert!(fault.ranks[1].to_string().starts_with("rank 1 waits in world #0 recv"));
    let late = told(&error, 3);
    assert!(late.contains("op #0: send(f32, 1, to 2, signature 0x0) stopped because"), "{late}");
}

#[test]
fn heartbeats_keep_a_slow_rank_alive() {
    let results = run(2, SHORT, |world| {
        if world.rank() == 1 {
            for _ in 0..100 {
                sleep(Duration::from_millis(10)); // five timeouts altogether
                world.heartbeat();
            }
        }
        world.barrier()
    });
    assert!(results.is_ok());
}

#[test]
fn the_first_fault_is_told_to_every_rank_and_to_later_operations() {
    let faults = run(3, PATIENT, |world| {
        let first = match world.rank() {
            0 => world.broadcast(zeros(1), 0).map(drop),
            _ => world.barrier(),
        };
        let later = world.send(zeros(1), (world.rank() + 1) % 3, 0);
        let split = world.split("part", &[world.rank()]);
        let fault = |error| match error {
            CommError::Stopped { fault, .. } => Ok(fault),
            error => Err(error),
        };
        let faults = [first.unwrap_err(), later.unwrap_err(), split.unwrap_err()];
        faults.into_iter().map(fault).collect::<Result<Vec<Arc<Fault>>, _>>()
    });
    let faults: Vec<_> = faults.unwrap().concat();
    assert_eq!(faults.len(), 9);
    assert!(faults.iter().all(|fault| Arc::ptr_eq(fault, &faults[0])));
}
