//! Faults between threads: their report, and a rank of the caller's own threads. All kinds of faults are cases of
//! `conformance`.

use meshwork_core::comm::thread::{Options, world};
use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp, World};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

/// So long that a test which reaches it did not get its error at once.
const PATIENT: Options = Options { timeout: Duration::from_secs(600) };

/// Fifteen ranks that stop for one reason share a line.
#[test]
fn ranks_that_report_the_same_share_a_line() {
    let coming = AtomicUsize::new(0);
    let error = World::Threads(16).run_with(PATIENT, |world| {
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
            rank if rank < 8 => tp.all_reduce(Buffer::zeros(DType::F32, 2), ReduceOp::Sum).map(drop),
            _ => world.barrier(),
        }
    });
    let error = error.unwrap_err();
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
    let told = error.error_of::<CommError>(0).unwrap().to_string();
    let place = "tp group of world rank 0, op #0: all_reduce(f32, 2) stopped because";
    assert!(told.starts_with(&format!("{place} rank 7 panicked: out of cheese\n")), "{told}");
}

#[test]
fn a_rank_that_drops_its_communicators_is_gone() {
    let mut comms = world(2, PATIENT);
    drop(comms.pop());
    let group = Group::from(comms.remove(0));
    let error = group.barrier().unwrap_err();
    assert!(error.to_string().contains("rank 1 has dropped its communicators and takes no part"), "{error}");
}
