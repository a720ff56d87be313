//! The suite of communicators over ranks that are processes, and processes that end without a word.

#![cfg(unix)]

use meshwork_core::comm::FaultKind;
use meshwork_core::{CommError, World};
use meshwork_testkit::comm::processes::{Exit, run};
use meshwork_testkit::comm::{Worlds, conformance};
use std::process::{Command, id};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_secs(2);

fn assert_passed(exits: &[Exit], which: impl Fn(usize) -> bool) {
    for (rank, exit) in exits.iter().enumerate().filter(|(rank, _)| which(*rank)) {
        assert_eq!(exit.code, Some(0), "rank {rank}: {}", exit.errors);
    }
}

#[test]
fn processes_are_a_backend() {
    let exits = run(4, "processes_are_a_backend", conformance);
    exits.iter().for_each(|exits| assert_passed(exits, |_| true));
}

/// Sends a process a signal.
fn signal(name: &str, process: u32) {
    _ = Command::new("kill").args([format!("-{name}"), process.to_string()]).status();
}

#[test]
fn a_process_that_is_killed_is_named_to_the_others() {
    let exits = run(3, "a_process_that_is_killed_is_named_to_the_others", |worlds: &dyn Worlds| {
        let Some(world @ World::Joined(_)) = worlds.world(3, LONG) else { panic!("every process has a rank") };
        let ended = world.run(|world| {
            if world.rank() == 1 {
                signal("KILL", id());
            }
            world.barrier()
        });
        let error = ended.unwrap_err();
        assert!(error.rank == 1 && error.cause.contains("rank 1 is lost (its process ended)"), "{error}");
        assert_eq!(error.ends[1].as_ref().unwrap().to_string(), "is lost (its process ended)");
    });
    let Some(exits) = exits else { return };
    assert_passed(&exits, |rank| rank != 1);
    assert_eq!(exits[1].code, None, "it was killed");
}

/// No rank waits for it, and the others end well: the run has failed all the same.
#[test]
fn a_process_that_is_killed_unnoticed_fails_the_run() {
    let exits = run(2, "a_process_that_is_killed_unnoticed_fails_the_run", |worlds: &dyn Worlds| {
        let world = worlds.world(2, LONG).unwrap();
        let ended = world.run(|world| {
            if world.rank() == 1 {
                signal("KILL", id());
            }
            Ok::<_, CommError>(())
        });
        let error = ended.unwrap_err();
        assert_eq!((error.rank, &*error.cause), (1, "rank 1 is lost (its process ended)"), "{error}");
    });
    exits.iter().for_each(|exits| assert_passed(exits, |rank| rank != 1));
}

#[test]
fn a_process_that_is_stopped_is_late() {
    let exits = run(3, "a_process_that_is_stopped_is_late", |worlds: &dyn Worlds| {
        // All processes have started before time counts.
        worlds.world(3, LONG).unwrap().run(|world| world.barrier()).unwrap();
        let (world, stopped) = (worlds.world(3, SHORT).unwrap(), AtomicU32::new(0));
        let ended = world.run(|world| {
            let mut processes = [0; 3];
            world.all_gather_slice(&[id() as i64], &mut processes)?;
            stopped.store(processes[1] as u32, Ordering::Relaxed);
            if world.rank() == 1 {
                signal("STOP", id());
                sleep(LONG); // the system stops the threads of a process one after another: this one may be the last
            }
            world.barrier()
        });
        signal("KILL", stopped.into_inner());
        let error = ended.unwrap_err();
        let late = |kind: &FaultKind| matches!(kind, FaultKind::Timeout { rank: 1, .. });
        assert!(error.fault.as_ref().is_some_and(|fault| late(&fault.kind)), "{error}");
        assert!(error.ends.iter().all(Option::is_some), "{error}");
    });
    exits.iter().for_each(|exits| assert_passed(exits, |rank| rank != 1));
}

/// A rank that ends with an error of its own ends the others, and so do all of their processes.
#[test]
fn every_process_ends_with_the_first_error() {
    let exits = run(3, "every_process_ends_with_the_first_error", |worlds: &dyn Worlds| {
        let world = worlds.world(3, LONG).unwrap();
        let ended = world.run(|world| match world.rank() {
            2 => Err("the disk is full".to_owned()),
            _ => world.barrier().map_err(|error: CommError| error.to_string()),
        });
        eprintln!("{}", ended.unwrap_err());
    });
    let Some(exits) = exits else { return };
    assert_passed(&exits, |_| true);
    let cause = "a world of 3 ranks failed: rank 2 returned an error: the disk is full";
    for exit in &exits {
        assert!(exit.errors.contains(cause) && exit.errors == exits[0].errors, "{}", exit.errors);
    }
}
