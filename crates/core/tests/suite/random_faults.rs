//! A thousand random programs with one rank that departs from them: every world ends, and every rank gets the reason.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use meshwork_core::CommError;
use meshwork_core::comm::thread::{Options, RankEnd, WorldError, run};
use meshwork_core::comm::{Fault, FaultKind};
use meshwork_testkit::Rng;
use meshwork_testkit::faults::{Departure, Injection, Program, ProgramError};

fn run_program(
    program: &Program,
    injection: Option<Injection>,
    timeout: Duration,
) -> Result<Vec<()>, WorldError<ProgramError>> {
    let noticed = AtomicBool::new(false);
    run(program.ranks, Options { timeout }, |world| program.run(&world, injection, &noticed))
}

/// The ranks that the fault blames.
fn blamed(fault: &Fault) -> Vec<usize> {
    match &fault.kind {
        FaultKind::Disagreement { first, second } => vec![first.0, second.0],
        FaultKind::Deadlock { cycle } => cycle.clone(),
        kind => vec![kind.culprit()],
    }
}

fn blames(error: &WorldError<ProgramError>, rank: usize) -> bool {
    error.fault.as_ref().is_some_and(|fault| blamed(fault).contains(&rank))
}

/// Checks one run that an injection made fail.
fn check(error: &WorldError<ProgramError>, injection: Injection) {
    let fault = error.fault.as_ref().expect("the other ranks were stopped by something");
    assert!(blamed(fault).contains(&injection.rank), "the fault is not about the rank: {fault}");
    match injection.departure {
        Departure::Panic => assert!(matches!(fault.kind, FaultKind::Panicked { .. })),
        Departure::Return | Departure::Fail => assert!(matches!(fault.kind, FaultKind::Gone { .. })),
        Departure::Stall => assert!(matches!(fault.kind, FaultKind::Timeout { .. })),
        // The rank may also wait for ranks that wait for it.
        _ => assert!(matches!(fault.kind, FaultKind::Disagreement { .. } | FaultKind::Deadlock { .. })),
    }
    for (rank, end) in error.ends.iter().enumerate().filter(|(rank, _)| *rank != injection.rank) {
        match end {
            Some(RankEnd::Error(ProgramError::Comm(CommError::Stopped { fault: told, site }))) => {
                assert_eq!(told, fault, "rank {rank} was told something else");
                assert_eq!(site.world_rank, rank);
            }
            other => panic!("rank {rank} ended with {other:?}"),
        }
    }
}

/// One seed: the program alone, then with the injection.
fn round(seed: u64) {
    let mut rng = Rng::new(seed);
    let program = Program::random(&mut rng);
    if seed.is_multiple_of(8) {
        let clean = run_program(&program, None, Duration::from_secs(60));
        assert!(clean.is_ok(), "without a fault: {}", clean.unwrap_err());
    }
    // Stalls cost their timeout each, so they are fewer.
    let departure = match seed % 16 {
        0 => Departure::Stall,
        _ => rng.pick(&Departure::ALL[..6]),
    };
    // On a busy machine another rank may make no progress for as long as the shortest timeout: a stall is tried again
    // with more.
    let mut timeouts = match departure {
        Departure::Stall => [100, 1000, 10_000].map(Duration::from_millis).to_vec(),
        _ => vec![Duration::from_secs(60)],
    };
    let injection = program.random_injection(&mut rng, departure);
    loop {
        match run_program(&program, Some(injection), timeouts.remove(0)) {
            Ok(_) => panic!("{injection:?} went unnoticed"),
            Err(error) if !timeouts.is_empty() && !blames(&error, injection.rank) => {}
            Err(error) => return check(&error, injection),
        }
    }
}

#[test]
fn a_thousand_random_faults_without_a_hang() {
    let (done, waiting) = mpsc::channel();
    // On a thread of its own: should a world hang, the test still ends and names the seed.
    let rounds = thread::spawn(move || {
        for seed in 0..1000 {
            round(seed);
            if done.send(seed).is_err() {
                return;
            }
        }
    });
    let mut next = 0;
    loop {
        match waiting.recv_timeout(Duration::from_secs(50)) {
            Ok(seed) => next = seed + 1,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("seed {next} hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    assert!(rounds.join().is_ok(), "seed {next} failed, see above");
    assert_eq!(next, 1000);
}
