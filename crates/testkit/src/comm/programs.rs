//! Random programs with one rank that departs from them: every world ends, and every rank gets the reason.

use super::{PATIENT, Worlds, cases, in_time, passes, told};
use crate::Rng;
use crate::faults::{Departure, Injection, Program, ProgramError};
use meshwork_core::comm::{Fault, FaultKind, record};
use meshwork_core::{Cause, CommError, CommLog, Group, RunError};

cases![random_faults_without_a_hang, records_are_those_of_a_backend];

/// The ranks that the fault blames.
fn blamed(fault: &Fault) -> Vec<usize> {
    match &fault.kind {
        FaultKind::Disagreement { first, second } => vec![first.0, second.0],
        FaultKind::Deadlock { cycle } => cycle.clone(),
        kind => vec![kind.culprit()],
    }
}

fn blames(error: &RunError, rank: usize) -> bool {
    error.fault.as_ref().is_some_and(|fault| blamed(fault).contains(&rank))
}

/// Checks one run that an injection made fail.
fn check(error: &RunError, injection: Injection) {
    let fault = error.fault.as_ref().expect("the other ranks were stopped by something");
    assert!(blamed(fault).contains(&injection.rank), "the fault is not about the rank: {fault}");
    match injection.departure {
        Departure::Panic => assert!(matches!(fault.kind, FaultKind::Panicked { .. })),
        Departure::Return | Departure::Fail => assert!(matches!(fault.kind, FaultKind::Gone { .. })),
        Departure::Stall(_) => assert!(matches!(fault.kind, FaultKind::Timeout { .. })),
        // The rank may also wait for ranks that wait for it.
        _ => assert!(matches!(fault.kind, FaultKind::Disagreement { .. } | FaultKind::Deadlock { .. })),
    }
    let kind = fault.kind.to_string();
    for rank in (0..error.ends.len()).filter(|rank| *rank != injection.rank) {
        // A rank of another process is known by its text.
        match error.error_of(rank) {
            Some(ProgramError::Comm(CommError::Stopped { fault: told, site })) => {
                assert_eq!(told, fault, "rank {rank} was told something else");
                assert_eq!(site.world_rank, rank);
            }
            Some(other) => panic!("rank {rank} ended with {other}"),
            None => assert!(told(error, rank).contains(&kind), "rank {rank}: {error}"),
        }
    }
}

/// One seed: the program alone, then with the injection.
fn round(worlds: &dyn Worlds, seed: u64) {
    let mut rng = Rng::new(seed);
    let program = Program::random(&mut rng, worlds.most().min(8));
    let run = |injection, timeout| worlds.run(program.ranks, timeout, &|world| Ok(program.run(&world, injection)?));
    if seed.is_multiple_of(8)
        && let Some(Err(error)) = run(None, PATIENT)
    {
        panic!("seed {seed}, without a fault: {error}");
    }
    let departure = rng.pick(&Departure::AT_ONCE);
    let injection = program.random_injection(&mut rng, departure);
    // Stalls cost their timeout each, so they are fewer.
    let end = if seed.is_multiple_of(16) {
        let stall = |timeout| Injection { departure: Departure::Stall(3 * timeout), ..injection };
        let blamed = |end: &Result<(), RunError>| end.as_ref().is_err_and(|error| blames(error, injection.rank));
        in_time(worlds, |timeout| run(Some(stall(timeout)), timeout), blamed)
            .map(|(timeout, end)| (stall(timeout), end))
    } else {
        run(Some(injection), PATIENT).map(|end| (injection, end))
    };
    match end {
        None => {}
        Some((injection, Ok(()))) => panic!("seed {seed}: {injection:?} went unnoticed"),
        Some((injection, Err(error))) => check(&error, injection),
    }
}

fn random_faults_without_a_hang(worlds: &dyn Worlds) {
    for seed in 0..worlds.programs() {
        println!("seed {seed}");
        round(worlds, seed);
    }
}

/// A program that is only recorded has the log of a real run.
fn records_are_those_of_a_backend(worlds: &dyn Worlds) {
    for seed in 0..worlds.programs() / 10 {
        let program = Program::random(&mut Rng::new(seed), worlds.most().min(8));
        passes(worlds, program.ranks, |world| {
            program.run(world, None)?;
            let alone = record::communicator(world.name(), world.rank(), world.world_ranks().to_vec())?;
            let recorded = Group::new(alone, CommLog::default());
            program.run(&recorded, None)?;
            let [real, recorded] = [world, &recorded].map(|group| group.log().drain());
            assert!(!real.is_empty(), "the program communicates");
            let same = real == recorded;
            if same { Ok(()) } else { Err(Cause::from(format!("seed {seed}: {real:?}, recorded {recorded:?}"))) }
        });
    }
}
