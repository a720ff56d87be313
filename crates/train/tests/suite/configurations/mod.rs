//! Random configurations over every key: each is refused only where a rule of `rules.rs` says so, and else trains as
//! one rank does.
//!
//! `draw.rs` draws a value, or none, for every key of the table of keys; most configurations are valid, some just
//! not. `rules.rs` states the constraints once more, from their meaning and not from the code that checks them. A
//! configuration that is refused without a rule, or accepted against one, that panics or hangs, or whose numbers are
//! not those of one rank, is a failure; the failure prints its seed and its flags.
//!
//! `MESHWORK_CONFIGURATIONS` is the number of configurations, `MESHWORK_FIRST` the seed of the first; one failure runs
//! again with its seed and a number of 1.

mod draw;
mod meshes;
mod pairs;
mod rules;
mod steps;

use draw::Case;
use meshwork_train::config::{Args, Fault, keys};
use meshwork_train::load;
use meshwork_train::plan::report;
use std::env;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Configurations in an ordinary run of the tests.
const COUNT: u64 = 40;
/// A configuration that takes longer hangs: all of them together take less than this.
const PATIENCE: Duration = Duration::from_secs(100);

/// How a configuration ended.
#[derive(Debug, PartialEq)]
enum End {
    Trained,
    Refused,
}

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{variable} = {value}")))
}

/// Runs a configuration.
fn run(case: &Case) -> Result<End, String> {
    let rules = rules::broken(case);
    let faults = match load(&Args::parse(case.flags())) {
        Ok((config, data)) if rules.is_empty() => return steps::run(case, &config, data).map(|()| End::Trained),
        // Without steps the report refuses what no step can be.
        Ok((config, _)) if config.training.steps == 0 && report(&config).is_err() => return Ok(End::Refused),
        Ok(_) => return Err(format!("accepted, although {}", rules.join(", and "))),
        Err(error) => error.faults,
    };
    let lines = || faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n  ");
    match rules.is_empty() {
        true => Err(format!("refused, although it breaks no rule:\n  {}", lines())),
        false => Ok(End::Refused),
    }
}

#[test]
fn random_configurations_train_as_one_rank_does_or_are_refused_for_a_reason() {
    let (first, count) = (number("MESHWORK_FIRST", 1), number("MESHWORK_CONFIGURATIONS", COUNT));
    // On a thread of its own: should a configuration hang, the test still ends and names it.
    let (done, ends) = mpsc::channel();
    let runs = thread::spawn(move || {
        for seed in first..first + count {
            let case = Case::draw(seed);
            if done.send((seed, run(&case).map_err(|why| format!("{why}\n  {case}")))).is_err() {
                return;
            }
        }
    });
    let (mut trained, mut refused, mut failures) = (0, 0, Vec::new());
    for seed in first..first + count {
        match ends.recv_timeout(PATIENCE) {
            Ok((_, Ok(End::Trained))) => trained += 1,
            Ok((_, Ok(End::Refused))) => refused += 1,
            Ok((seed, Err(why))) => failures.push(format!("seed {seed}: {why}")),
            Err(RecvTimeoutError::Timeout) => failures.push(format!("seed {seed}: hangs\n  {}", Case::draw(seed))),
            Err(RecvTimeoutError::Disconnected) => {
                failures.push(format!("seed {seed}: panics\n  {}", Case::draw(seed)))
            }
        }
        if failures.len() >= 5 || failures.last().is_some_and(|why| why.contains(": hangs") || why.contains(": panics"))
        {
            break;
        }
    }
    println!("{trained} configurations trained, {refused} were refused, from seed {first} on");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    drop(ends);
    assert!(runs.join().is_ok());
    assert!(count < COUNT || trained > count / 4 && refused > count / 20, "{trained} trained, {refused} refused");
}

/// A new key without values panics in `draw`; one whose values never come up fails here.
#[test]
fn every_key_is_in_play() {
    let mut missing: Vec<String> = keys::all().map(|(section, key)| format!("{section}.{}", key.name)).collect();
    for seed in 0..20_000 {
        let case = Case::draw(seed);
        missing.retain(|name| case.get(name).is_none());
        if missing.is_empty() {
            return;
        }
    }
    panic!("never given: {}", missing.join(", "));
}
