//! A differential fuzzer of programs: random networks on random meshes have the numbers of one rank, and random
//! mistakes in them are refused, found by verify mode, or harmless. `docs/fuzzing.md` says what is generated and how to
//! run more of it.

mod case;
mod found;
mod generate;
mod hand;
mod interpret;
mod mutate;
mod program;
mod public;
mod run;
mod user;
mod verdict;

use case::case;
use meshwork_core::Axis;
use meshwork_testkit::Rng;
use program::{Lie, Op};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use verdict::{Fate, Score, Verdict};

/// Programs of an ordinary run.
const PROGRAMS: u64 = 150;
/// Mutants of each program.
const MUTANTS: usize = 12;

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// The seeds to run.
fn seeds() -> std::ops::Range<u64> {
    let first = setting("MESHWORK_FIRST").unwrap_or(0);
    first..first + setting("MESHWORK_PROGRAMS").unwrap_or(PROGRAMS)
}

/// The first case of a seed that rounding does not upset.
fn steady(seed: u64) -> case::Case {
    let is_steady = |case: &case::Case| match run::alone(case) {
        run::Ended::Numbers(alone) => run::is_steady(case, &alone),
        run::Ended::NotFinite(_) => false,
        _ => true, // and wrong
    };
    (0..).map(|attempt| case(seed, attempt)).find(is_steady).expect("most cases are")
}

/// Runs the program of a seed, and its mutants.
fn try_seed(seed: u64, mutants: usize) -> Result<Score, String> {
    let case = steady(seed);
    let alone = match verdict::fate(&case) {
        Fate::Right(alone) => alone,
        Fate::Wrong(why) => {
            // The numbers of a message, ranks and extents, may change with the case.
            let words = |why: &str| {
                why.split_whitespace().filter(|word| !word.contains(|c: char| c.is_numeric())).collect::<String>()
            };
            let alike =
                |case: &case::Case| matches!(verdict::fate(case), Fate::Wrong(other) if words(&other) == words(&why));
            return Err(format!("{}{why}\n", verdict::told(&verdict::shrink(&case, alike))));
        }
    };
    let canonical = usize::from(case.plan.blocks().is_some());
    let mut score = Score { programs: 1, canonical, ..Score::default() };
    if setting("MESHWORK_PROGRAMS") == Some(1) {
        println!("{}", verdict::told(&case));
    }
    for mutant in mutate::mutants(&mut Rng::new(!seed), &case, mutants, setting("MESHWORK_BY_KIND").is_some()) {
        let verdict = verdict::verdict(&case, &mutant, &alone)
            .map_err(|panic| format!("{}{mutant}: a rank panicked: {panic}", verdict::told(&case)))?;
        score.by_kind.entry(mutant.kind).or_default().add(&verdict);
        if let Verdict::Survived(difference) = verdict {
            score.survivors.push((seed, mutant.to_string(), difference));
        }
    }
    Ok(score)
}

/// The fuzzer finds what it is for: an operation that is wrong on several ranks, and only there, in an otherwise right
/// program.
#[test]
fn a_planted_error_is_found_and_the_program_is_shrunk_to_it() {
    let planted = Op::User(Lie::Degree);
    let plant = |seed: u64| {
        let mut case = steady(seed);
        let sites: Vec<_> = case.program.sites().collect();
        let of_user =
            |&(block, place): &(usize, usize)| case.program.blocks[block].code[place].op == Op::User(Lie::None);
        let (block, place) = sites.into_iter().find(of_user)?;
        let degrees = [Axis::Tp, Axis::Cp].map(|axis| case.plan.mesh.degree(axis));
        let trains = matches!(case.way, case::Way::Trainer { .. });
        if !trains || degrees == [1, 1] || matches!(verdict::fate(&case), Fate::Wrong(_)) {
            return None;
        }
        case.program.blocks[block].code[place].op = planted.clone();
        Some(case)
    };
    let case = (0..).find_map(plant).expect("some program has an operation of the user's own");
    let Fate::Wrong(why) = verdict::fate(&case) else { panic!("not found in\n{}", verdict::told(&case)) };
    assert!(why.contains("differs by a relative"), "{why}");
    let small =
        verdict::shrink(&case, |case| matches!(verdict::fate(case), Fate::Wrong(why) if why.contains("differs")));
    let live = |case: &case::Case| -> Vec<Op> {
        let instrs = case.program.blocks.iter().flat_map(|block| &block.code);
        instrs.map(|instr| instr.op.clone()).filter(|op| *op != Op::Same).collect()
    };
    assert!(live(&small).contains(&planted) && live(&small).len() < live(&case).len(), "{}", verdict::told(&small));
}

/// The check of an operation of the user's own, which counts as a find, accepts the right one and says what is wrong
/// with others.
#[test]
fn the_check_of_the_users_operation_tells_right_from_wrong() {
    assert_eq!(verdict::check_of_user(&Op::User(Lie::None)), Ok(()));
    for lie in mutate::LIES {
        let error = verdict::check_of_user(&Op::User(lie)).unwrap_err();
        assert!(error.contains("times that of one rank") || error.contains("differ"), "{lie:?}: {error}");
    }
    for collective in [Op::AllToAll(Axis::Tp, 1, 2), Op::AllReduce(Axis::Tp), Op::Slice(Axis::Tp, 1)] {
        let error = verdict::check_of_user(&Op::Unsent(Box::new(collective.clone()))).unwrap_err();
        assert!(error.contains("the output is") || error.contains("the gradient of x is"), "{collective:?}: {error}");
    }
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
    if end - seeds.start >= PROGRAMS {
        let matter = total.all() - total.harmless - total.another;
        assert!(matter >= 500, "a score of {matter} mutants says little");
    }
    for (kind, counts) in &score.by_kind {
        let few = counts.all() - counts.harmless - counts.another < 100;
        assert!(few || counts.share() >= 0.9, "{:.1}% of {}\n{score}", 100.0 * counts.share(), kind.name());
    }
    assert!(
        total.share() >= 0.99,
        "{:.2}% of the mutants that matter are refused or found\n{score}",
        100.0 * total.share()
    );
}
