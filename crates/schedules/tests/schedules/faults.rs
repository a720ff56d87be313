//! One rank departs from the program: every rank ends, and all of them are told the same.

use super::{NEVER_LATE, check, choice};
use meshwork_core::comm::thread::{Options, world};
use meshwork_core::comm::{Activity, Fault, FaultKind};
use meshwork_core::{Buffer, CommError, DType, Group, Pending, ReduceOp, RunError, World};
use meshwork_testkit::Rng;
use meshwork_testkit::faults::{Departure, Program, ProgramError};
use shuttle::thread;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The fault of a failed run, after checking that every rank that was stopped was told this one.
fn the_fault(error: &RunError) -> &Fault {
    let fault = error.fault.as_ref().expect("a rank was stopped");
    for rank in 0..error.ends.len() {
        let of_program = error.error_of(rank).and_then(|error| match error {
            ProgramError::Comm(error) => Some(error),
            ProgramError::Injected => None,
        });
        if let Some(CommError::Stopped { fault: told, site }) = of_program.or(error.error_of(rank)) {
            assert_eq!(told, fault, "rank {rank} was told something else");
            assert_eq!(site.world_rank, rank);
        }
    }
    fault
}

fn sum(group: &Group, count: usize) -> Result<Pending, CommError> {
    group.start_all_reduce(Buffer::zeros(DType::I64, count), ReduceOp::Sum)
}

/// The departures that need no clock; a panic is a test of its own.
const DEPARTURES: [Departure; 5] =
    [Departure::Return, Departure::Fail, Departure::WrongOp, Departure::WrongDType, Departure::WrongCount];

#[test]
fn random_programs_with_a_departure_end_with_its_fault() {
    check(2, || {
        let mut rng = Rng::new(choice());
        let program = Program::small(&mut rng);
        let departure = rng.pick(&DEPARTURES);
        let injection = program.random_injection(&mut rng, departure);
        let ended = World::Threads(program.ranks).run_with(NEVER_LATE, |world| program.run(&world, Some(injection)));
        let error = ended.expect_err("the departure was noticed");
        let fault = the_fault(&error);
        let blamed = match &fault.kind {
            FaultKind::Disagreement { first, second } => vec![first.0, second.0],
            FaultKind::Deadlock { cycle } => cycle.clone(),
            kind => vec![kind.culprit()],
        };
        assert!(blamed.contains(&injection.rank), "{injection:?}: {fault}");
    });
}

#[test]
fn random_programs_without_a_departure_end_well() {
    check(2, || {
        let program = Program::small(&mut Rng::new(choice()));
        let ended = World::Threads(program.ranks).run_with(NEVER_LATE, |world| program.run(&world, None));
        assert!(ended.is_ok(), "{}", ended.unwrap_err());
    });
}

#[test]
fn a_panic_with_operations_in_flight_stops_every_rank() {
    check(2, || {
        let ended = World::Threads(3).run_with(NEVER_LATE, |world| {
            let pair = world.split("pair", if world.rank() < 2 { &[0, 1] } else { &[2] })?;
            let flying = [sum(&world, 130)?, sum(&pair, 2)?];
            if world.rank() == 1 {
                drop((flying, pair, world));
                resume_unwind(Box::new("injected".to_owned()));
            }
            flying.into_iter().try_for_each(|op| op.wait().map(drop))?;
            world.barrier()
        });
        let error = ended.expect_err("a rank panicked");
        assert_eq!(error.rank, 1);
        let fault = the_fault(&error);
        assert_eq!(fault.kind, FaultKind::Panicked { rank: 1, message: "injected".to_owned() });
    });
}

/// Ranks on threads of the caller: one drops its communicator while its operations are in flight.
#[test]
fn a_rank_that_drops_its_communicator_has_left() {
    check(2, || {
        let threads = world(3, NEVER_LATE).into_iter().enumerate().map(|(rank, comm)| {
            thread::spawn(move || {
                let group = Group::from(comm);
                let op = sum(&group, 130)?;
                if rank == 2 {
                    drop(op);
                    return Ok(());
                }
                op.wait()?;
                group.barrier()
            })
        });
        let ends: Vec<Result<(), CommError>> =
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().expect("no panic")).collect();
        assert!(ends[2].is_ok());
        for end in &ends[..2] {
            let Err(CommError::Stopped { fault, .. }) = end else { panic!("{end:?}") };
            assert_eq!(fault.kind, FaultKind::Gone { rank: 2, how: Activity::Left });
        }
    });
}

#[test]
fn a_cycle_of_waits_is_a_deadlock() {
    check(2, || {
        let ended = World::Threads(3).run_with(NEVER_LATE, |world| {
            let before = (world.rank() + 2) % 3;
            world.start_recv(Buffer::zeros(DType::I64, 4), before, 0)?.wait()?;
            world.start_send(Buffer::zeros(DType::I64, 4), (world.rank() + 1) % 3, 0)?.wait().map(drop)
        });
        let error = ended.expect_err("they wait for each other");
        let fault = the_fault(&error);
        assert_eq!(fault.kind, FaultKind::Deadlock { cycle: vec![0, 2, 1] });
        assert!(error.ends.iter().all(Option::is_some));
    });
}

/// Waits that end at any time: a rank that stalls is reported as late, or before it another one that was not run for
/// as long.
#[test]
fn a_rank_that_stalls_is_late() {
    check(2, || {
        let noticed = AtomicBool::new(false);
        let ended = World::Threads(3).run_with(Options { timeout: Duration::from_millis(20) }, |world| {
            let result = sum(&world, 130)?.wait().and_then(|_| {
                while world.rank() == 2 && !noticed.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                world.barrier()
            });
            noticed.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        });
        let error = ended.expect_err("a rank stalled");
        assert!(matches!(the_fault(&error).kind, FaultKind::Timeout { .. }), "{error}");
    });
}

/// The same without a rank that stalls: it ends well, or with a rank that was late.
#[test]
fn a_world_whose_waits_time_out_ends() {
    check(2, || {
        let ended = World::Threads(3).run_with(Options { timeout: Duration::from_millis(20) }, |world| {
            world.heartbeat();
            let op = sum(&world, 130)?;
            world.barrier()?;
            op.wait().map(drop)
        });
        if let Err(error) = ended {
            assert!(matches!(the_fault(&error).kind, FaultKind::Timeout { .. }), "{error}");
        }
    });
}
