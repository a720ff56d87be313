//! A differential fuzzer of programs: random networks on random meshes have the numbers of one rank, and random mistakes in them are
//! refused, found by verify mode, or harmless. `docs/fuzzing.md` says what is generated and how to run more of it.

mod case;
mod generate;
mod interpret;
mod mutate;
mod program;
mod run;
mod verdict;

use case::case;
use meshwork_testkit::Rng;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use verdict::{Counts, Fate, Score, Verdict};

/// Programs of an ordinary run.
const PROGRAMS: u64 = 300;
/// Mutants of each program.
const MUTANTS: usize = 5;

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// The seeds to run: one, or as many as were asked for.
fn seeds() -> std::ops::Range<u64> {
    match setting("MESHWORK_FUZZ_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..setting("MESHWORK_FUZZ_PROGRAMS").unwrap_or(PROGRAMS),
    }
}

/// Runs the program of a seed, and its mutants.
fn try_seed(seed: u64, mutants: usize) -> Result<Score, String> {
    let case = case(seed);
    let alone = match verdict::fate(&case) {
        Fate::Right(alone) => alone,
        Fate::Wrong(why) => {
            // The numbers of a message, ranks and extents, may change with the case.
            let words = |why: &str| why.split_whitespace().filter(|word| !word.contains(|c: char| c.is_numeric())).collect::<String>();
            let alike = |case: &case::Case| matches!(verdict::fate(case), Fate::Wrong(other) if words(&other) == words(&why));
            return Err(format!("{}{why}\n", verdict::told(&verdict::shrink(&case, alike))));
        }
    };
    let canonical = usize::from(case.plan.blocks().is_some());
    let mut score = Score { programs: 1, canonical, ..Score::default() };
    if setting("MESHWORK_FUZZ_SEED").is_some() {
        println!("{}", verdict::told(&case));
    }
    for mutant in mutate::mutants(&mut Rng::new(!seed), &case, mutants) {
        let verdict = verdict::verdict(&case, &mutant, &alone)
            .map_err(|panic| format!("{}{mutant}: a rank panicked: {panic}", verdict::told(&case)))?;
        score.by_kind.entry(mutant.kind).or_insert_with(Counts::default).add(&verdict);
        if let Verdict::Survived(difference) = verdict {
            score.survivors.push((seed, mutant.to_string(), difference));
        }
    }
    Ok(score)
}

/// Random programs on random meshes have the numbers of one rank, and mistakes in them do not go unnoticed.
#[test]
fn random_programs_have_the_numbers_of_one_rank_and_their_mutants_are_noticed() {
    let seeds = seeds();
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let done = Mutex::new((Score::default(), Vec::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        break;
                    }
                    let result = try_seed(seed, MUTANTS);
                    let mut done = done.lock().unwrap();
                    match result {
                        Ok(score) => done.0 = std::mem::take(&mut done.0).join(score),
                        Err(text) => done.1.push(text),
                    }
                }
            });
        }
    });
    let (mut score, failures) = done.into_inner().unwrap();
    score.survivors.sort();
    println!("{score}");
    assert!(failures.is_empty(), "{} programs failed:\n{}", failures.len(), failures.join("\n\n"));
    let total = score.total();
    assert!(total.share() >= 0.99, "{:.2}% of the mutants that matter are refused or found\n{score}", 100.0 * total.share());
}
