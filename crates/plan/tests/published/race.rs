//! Configurations that take steps in turn: which one is the fastest, and which go on.

use meshwork_plan::race::Race;
use meshwork_plan::search::Keys;
use meshwork_plan::table::configured;
use std::time::{Duration, Instant};

/// A moment of the machine decides nothing, nor a step that takes longer or shorter than the others. What the steps do
/// not tell apart, the order does.
#[test]
fn the_fastest_in_the_median_of_rounds_wins() {
    let cases: [(&str, &[&[f64]], usize); 9] = [
        ("no steps", &[&[], &[]], 0),
        ("one alone", &[&[1.0]], 0),
        ("the second is faster", &[&[1.0, 1.0, 1.0], &[0.9, 0.91, 0.9]], 1),
        ("a lucky step of the slower", &[&[1.0, 1.0, 1.0, 1.0, 1.0], &[1.08, 0.8, 1.08, 1.08, 1.08]], 0),
        ("an unlucky step of the faster", &[&[1.05, 1.05, 1.05, 1.05], &[1.0, 3.0, 1.0, 1.0]], 1),
        ("a machine that slows down", &[&[1.0, 1.1, 1.2, 1.3, 1.4], &[0.94, 1.03, 1.13, 1.22, 1.32]], 1),
        ("slow moments, at some of the slower one's steps", &[&[1.0, 1.5, 1.0, 1.0], &[1.06, 1.58, 1.07, 1.5]], 0),
        ("a tie", &[&[1.0, 1.02, 0.97, 1.03], &[0.98, 1.03, 1.0, 0.99]], 0),
        ("one that is out was fast in its rounds", &[&[1.0, 1.0, 1.2, 1.2], &[1.05, 1.05, 1.26, 1.26], &[1.5]], 0),
    ];
    for (what, times, winner) in cases {
        let race = Race(times.iter().map(|times| times.to_vec()).collect());
        assert_eq!(race.winner(), winner, "{what}");
    }
}

/// The more rounds, the less a configuration may be behind.
#[test]
fn what_is_clearly_slower_goes_out() {
    let equal = |slower: f64, rounds: usize| Race(vec![vec![1.0; rounds], vec![slower; rounds]]).racing();
    for (slower, rounds, racing) in
        [(1.2, 1, 2), (1.4, 1, 1), (1.12, 3, 2), (1.2, 3, 1), (1.05, 16, 2), (1.1, 16, 1), (1.0, 20, 2)]
    {
        assert_eq!(equal(slower, rounds).len(), racing, "{slower} in {rounds} rounds");
    }
    // One slow step is no reason, nor are steps that differ more than the two configurations.
    let race = Race(vec![vec![1.0, 1.0, 1.0], vec![1.0, 9.0, 1.0], vec![0.8, 1.5, 1.2]]);
    assert_eq!(race.racing(), [0, 1, 2]);
    // Who is out stays out.
    assert_eq!(Race(vec![vec![1.0; 2], vec![1.5], vec![1.01; 2]]).racing(), [0, 2]);
}

/// Every configuration that is started takes its steps, also beside larger ones. Without time for a comparison the
/// first one is taken.
#[test]
fn configurations_of_other_sizes_take_steps_in_turn() {
    let config = |(axis, degree): (&str, i64)| {
        let own = [("model.num_layers", 2), ("model.hidden_size", 32), ("model.seq_len", 32), (axis, degree)];
        let batch = [("training.global_batch_size", 4), ("training.micro_batch_size", 1)];
        let keys = own.iter().chain(&batch).map(|&(key, value)| (key.to_owned(), value.into()));
        configured(&keys.collect::<Keys>()).unwrap()
    };
    let configs = [("parallelism.dp", 2), ("parallelism.tp", 2), ("parallelism.dp", 1)].map(config);
    let race = Race::run(&configs, Instant::now(), Duration::from_secs(60)).unwrap();
    let rounds = race.0.iter().map(Vec::len).max().unwrap();
    assert!(race.0.len() == 3 && rounds > 0 && race.0[race.winner()].len() == rounds, "{race:?}");
    assert!(race.0.iter().flatten().all(|&seconds| seconds > 0.0), "{race:?}");
    let late = Instant::now().checked_sub(Duration::from_secs(3600)).unwrap_or_else(Instant::now);
    let race = Race::run(&configs, late, Duration::ZERO).unwrap();
    assert_eq!((race.winner(), race.seconds(0), race.0.len()), (0, None, 1));
}
