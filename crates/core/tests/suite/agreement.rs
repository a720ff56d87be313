//! What ranks compare because none sees it alone: which fact does not hold, on which ranks, with which values.

use meshwork_core::agreement::{Agreement, Disagreement, Fact, Must, first};
use meshwork_core::comm::record;
use meshwork_core::{Axis, Group, Mesh, Rank, World};
use meshwork_testkit::run_world;

/// What every rank finds in a world whose ranks claim these facts; `None` if all hold.
fn found(ranks: usize, facts: impl Fn(usize) -> Vec<Fact> + Sync) -> Option<Disagreement> {
    let mut all = run_world(ranks, |world| {
        let mut agreement = Agreement::default();
        facts(world.rank()).into_iter().for_each(|fact| agreement.push(fact));
        let found = agreement.find(&world).unwrap().map(|(_, found)| found);
        assert!(world.log().drain().is_empty(), "a comparison is no part of the program's communication");
        found
    });
    let own = all.remove(0);
    assert!(all.iter().all(|other| *other == own), "every rank has the same: {own:?}, {all:?}");
    own
}

fn text(ranks: usize, facts: impl Fn(usize) -> Vec<Fact> + Sync) -> String {
    found(ranks, facts).map_or("all hold".to_owned(), |found| found.to_string())
}

fn rate(value: f64) -> Fact {
    Fact::value("the learning rate", &value, "give every rank the same")
}

fn weights(hash: u64) -> Fact {
    Fact::hash("the weights should be the same", Must::Agree, hash, "load the same")
}

fn samples(hash: u64) -> Fact {
    Fact::hash("the samples should differ", Must::Differ, hash, "give each rank its own")
}

fn part(hash: u64) -> Fact {
    Fact::hash("the value is Partial", Must::Vary, hash, "type it Invariant")
}

#[test]
fn facts_that_hold_are_found_to() {
    let all = |rank: usize| vec![rate(0.5), weights(7), samples(1 + rank as u64), part(rank as u64 / 2), rate(0.25)];
    for ranks in [1, 2, 3, 5] {
        assert_eq!(text(ranks, all), "all hold", "{ranks} ranks");
        assert_eq!(text(ranks, |_| Vec::new()), "all hold", "{ranks} ranks");
    }
    // Where other ranks are imagined, nothing is found.
    let group = Group::from(record::communicator("tp", 1, vec![4, 5, 6]).unwrap());
    let mut agreement = Agreement::default();
    all(1).into_iter().chain([part(3)]).for_each(|fact| agreement.push(fact));
    agreement.compare(&group).unwrap();
}

#[test]
fn the_first_fact_that_does_not_hold_is_named_with_values_and_ranks() {
    let told = text(3, |rank| vec![weights(1), rate([0.5, 0.1, 0.5][rank]), weights(rank as u64)]);
    let wrong = "the learning rate should be the same on all ranks, and ranks 0, 2 have 0.5, rank 1 has 0.1; give every rank the same";
    assert_eq!(told, wrong);
    let ranks = |hashes: [u64; 4]| {
        let found = found(4, |rank| vec![weights(hashes[rank])]).unwrap();
        (found.found, found.ranks)
    };
    assert_eq!(ranks([1, 1, 9, 1]), ("the bits of rank 2 differ from those of the others".to_owned(), vec![2]));
    assert_eq!(ranks([1, 1, 9, 9]), ("ranks 0-3 have different bits".to_owned(), vec![0, 1, 2, 3]), "no majority");
    let many = text(6, |rank| vec![rate(rank as f64)]);
    assert!(many.contains("rank 3 has 3.0, and others have 2 more values;"), "{many}");
}

#[test]
fn of_a_long_value_the_part_is_shown_that_differs() {
    let schedule = |last: &str| (0..400).map(|at| format!("F{at}")).chain([last.to_owned()]).collect::<Vec<_>>();
    let told = text(2, |rank| vec![Fact::value("the schedule", &schedule(["end", "other"][rank]), "use one")]);
    assert!(told.contains("rank 0 has ..") && told.contains(r#""F399", "end"]"#), "{told}");
    assert!(told.contains(r#""F399", "other"]"#) && told.len() < 400, "{told}");
    // Longer than what ranks exchange.
    let told = text(2, |rank| vec![Fact::value("the text", &format!("{}{rank}", "é".repeat(5000)), "use one")]);
    assert_eq!(told, "the text should be the same on all ranks, and ranks 0, 1 have different bits; use one");
}

#[test]
fn values_that_must_differ_are_refused_where_two_are_the_same() {
    let told = |hashes: [u64; 4]| text(4, |rank| vec![samples(hashes[rank])]);
    assert_eq!(told([1, 2, 3, 4]), "all hold");
    assert_eq!(told([0, 2, 0, 4]), "all hold", "nothing is claimed on two ranks");
    assert_eq!(
        told([1, 2, 3, 2]),
        "the samples should differ on all ranks, and those of ranks 1, 3 are the same; give each rank its own"
    );
    assert!(told([5; 4]).contains("those of ranks 0-3 are the same"));
}

#[test]
fn values_that_must_vary_are_refused_where_all_are_the_same() {
    let told = |hashes: [u64; 3]| text(3, |rank| vec![part(hashes[rank])]);
    assert_eq!(told([1, 1, 2]), "all hold");
    assert_eq!(told([0; 3]), "all hold", "zeros are no part of a sum");
    assert!(told([4; 3]).contains("the value is Partial on all ranks, and it has the same bits on all of them"));
}

/// A rank with a fact more used to leave the others waiting, or to stop them with two counts of elements.
#[test]
fn ranks_that_compare_different_facts_are_told_which() {
    let more = |rank: usize| if rank == 1 { vec![rate(0.5), weights(1)] } else { vec![rate(0.5)] };
    let valid = "run the same program on every rank of the group: the same declarations, operations and calls";
    assert_eq!(
        text(3, more),
        format!(
            "every rank should claim the same facts in the same order on all ranks, and as number 2 ranks 0, 2 claim \"nothing\", rank 1 \
             claims \"the weights should be the same\"; {valid}"
        )
    );
    let swapped = |rank: usize| if rank == 1 { vec![weights(1), rate(0.5)] } else { vec![rate(0.5), weights(1)] };
    assert!(text(2, swapped).contains("as number 1 rank 0 claims \"the learning rate should be the same\", rank 1"));
    // What differs before the lists do is the cause.
    let counted = |rank: usize| {
        let count = [3usize, 4][rank];
        let of = |at: usize| Fact::value(format_args!("parameter {at}"), &8, "declare the same");
        [Fact::value("the number of parameters", &count, "declare the same")]
            .into_iter()
            .chain((0..count).map(of))
            .collect()
    };
    assert!(
        text(2, counted)
            .contains("the number of parameters should be the same on all ranks, and rank 0 has 3, rank 1 has 4")
    );
    assert!(text(2, |rank| if rank == 0 { vec![] } else { vec![rate(0.1)] }).contains("rank 0 claims \"nothing\""));
}

#[test]
fn what_one_group_finds_is_told_to_all_ranks() {
    let mesh: Mesh = "dp=2,tp=2".parse().unwrap();
    let told = World::threads(&mesh)
        .run_mesh(&mesh, |rank| {
            let mut agreement = Agreement::default();
            // Ranks 2 and 3 differ, over tp.
            agreement.push(weights([1, 1, 1, 9][rank.world_rank()]));
            let own = agreement.find(rank.group(Axis::Tp))?;
            assert_eq!(own.is_some(), rank.world_rank() >= 2);
            first(rank.world(), own)
        })
        .unwrap();
    let one = Disagreement {
        claim: "the weights should be the same".to_owned(),
        over: "over tp".to_owned(),
        found: "ranks 2, 3 have different bits".to_owned(),
        ranks: vec![2, 3],
        valid: "load the same".to_owned(),
    };
    assert!(told.iter().all(|told| told.as_ref() == Some(&one)), "{told:?}");
    assert!(
        World::threads(&mesh).run_mesh(&mesh, |rank| first(rank.world(), None)).unwrap().iter().all(Option::is_none)
    );
    // Of several the one that was compared first.
    let both = World::threads(&mesh).run_mesh(&mesh, |rank| {
        let at = 1 - rank.coords().get(Axis::Dp);
        first(rank.world(), Some((at, Disagreement { claim: format!("claim {}", rank.world_rank()), ..one.clone() })))
    });
    assert!(both.unwrap().iter().flatten().all(|told| told.claim == "claim 2"));
}

/// Meshes that cut the world alike used to be accepted: ranks then had other types for the same values.
#[test]
fn ranks_of_one_world_join_one_mesh() {
    let join = |meshes: [&str; 4]| {
        run_world(4, |world| {
            let mesh: Mesh = meshes[world.rank()].parse().unwrap();
            Rank::new(&mesh, world.communicator().clone()).map(drop).map_err(|error| error.to_string())
        })
    };
    assert!(join(["dp=2,tp=2"; 4]).iter().all(Result::is_ok));
    for other in ["dp=4", "dp=2,pp=2", "tp=4"] {
        let shown = |text: &str| text.parse::<Mesh>().unwrap().to_string();
        let wrong = format!(
            "the mesh should be the same on all ranks, and ranks 0, 1, 3 have {}, rank 2 has {}; let every rank of the world join one mesh",
            shown("dp=2,tp=2"),
            shown(other)
        );
        for told in join(["dp=2,tp=2", "dp=2,tp=2", other, "dp=2,tp=2"]) {
            assert_eq!(told.unwrap_err(), wrong);
        }
    }
}

/// The lines that each of `n` ranks gets; rank r has `facts(r)` and is at `place(r)`.
fn differences(
    n: usize,
    facts: impl Fn(usize) -> Vec<(&'static str, String)> + Sync,
    place: impl Fn(usize) -> &'static str + Sync,
) -> Vec<String> {
    let all = World::Threads(n).run(|world| {
        let mut agreement = Agreement::default();
        for (name, value) in facts(world.rank()) {
            agreement.push(Fact::value(name, &format_args!("{value}"), ""));
        }
        agreement.differences(&world, place(world.rank()))
    });
    let all = all.unwrap();
    assert!(all.iter().all(|lines| *lines == all[0]), "the same on every rank: {all:?}");
    all[0].clone()
}

#[test]
fn every_difference_is_named_with_rank_and_place() {
    let hosts = |rank: usize| ["on host a", "on host b"][rank / 2];
    let lr = |rank: usize| if rank == 3 { "1e-3" } else { "3e-4" };
    let dir = |rank: usize| format!("/scratch/{}", ["x", "y"][rank / 2]);
    let facts =
        |rank| vec![("version", "1".to_owned()), ("optimizer.lr", lr(rank).to_owned()), ("checkpoint.dir", dir(rank))];
    assert_eq!(
        differences(4, facts, hosts),
        [
            "rank 3 on host b: optimizer.lr 1e-3, others 3e-4",
            "checkpoint.dir: /scratch/x on ranks 0, 1 on host a, /scratch/y on ranks 2, 3 on host b",
        ]
    );
    let two = |rank: usize| vec![("seed", u32::from(rank == 0 || rank == 3).to_string()), ("steps", "5".into())];
    assert_eq!(
        differences(5, two, |rank| hosts(rank.min(3))),
        ["rank 0 on host a and rank 3 on host b: seed 1, others 0"]
    );
    assert!(differences(4, |_| vec![("seed", "1".into())], hosts).is_empty());
    assert!(differences(1, |_| vec![("seed", "1".into())], hosts).is_empty());
}

/// Two versions of the program have different keys: the error names the versions and the first key that differs.
#[test]
fn ranks_that_compare_other_facts_are_told_apart() {
    let facts = |rank: usize| match rank {
        0 => vec![("version", "2".to_owned()), ("new", "1".to_owned()), ("seed", "1".to_owned())],
        _ => vec![("version", "1".to_owned()), ("seed", "1".to_owned())],
    };
    let lines = differences(3, facts, |_| "on host a");
    assert_eq!(lines[0], "rank 0 on host a: version 2, others 1");
    assert!(lines[1].contains("rank 0 claims \"new should be the same\""), "{lines:?}");
    assert_eq!(lines.len(), 2);
}

/// Values are cut, and not all differences are exchanged.
#[test]
fn many_and_long_differences_are_cut() {
    const NAMES: [&str; 25] = ["key"; 25];
    let facts = |rank: usize| NAMES.map(|name| (name, format!("{rank}").repeat(5000))).to_vec();
    let lines = differences(2, facts, |_| "");
    assert_eq!((lines.len(), &*lines[20]), (21, "and 5 more"));
    assert!(lines.iter().all(|line| line.len() < 400), "{lines:?}");
}
