//! The calls of a program, by which faults are named, and ranks that are in different ones.

use std::time::Duration;

use meshwork_core::comm::Caller;
use meshwork_core::comm::thread::{Options, WorldError, run, run_mesh};
use meshwork_core::{Axis, CommError, CommLog, Group, Mesh, Rank, ReduceOp};

/// So long that a test which reaches it did not get its error at once.
const PATIENT: Options = Options { timeout: Duration::from_secs(600) };

fn fails(n: usize, body: impl Fn(Group) -> Result<(), CommError> + Sync) -> WorldError<CommError> {
    run(n, PATIENT, body).expect_err("this program cannot work")
}

/// The first line of the whole, and that every rank which did not return early was told the same cause.
#[track_caller]
fn headline(error: &WorldError<CommError>, cause: &str) -> String {
    for end in error.ends.iter().flatten() {
        let end = end.to_string();
        assert!(end.lines().next().unwrap().ends_with(cause), "{end}");
    }
    error.to_string().lines().next().unwrap().to_owned()
}

fn count(world: &Group) -> Result<(), CommError> {
    world.all_reduce_slice(&mut [1i64], ReduceOp::Sum)
}

/// The first collective of an evaluation is that of a step: ranks that differ met there and went on.
#[test]
fn ranks_that_communicate_alike_in_different_calls_are_refused() {
    let error = fails(3, |world| {
        let _entered = world.log().enter(if world.rank() == 1 { "Trainer::evaluate" } else { "Trainer::step" });
        count(&world)
    });
    let disagree =
        "rank 0 is in all_reduce(i64, 1) of Trainer::step, rank 1 in all_reduce(i64, 1) of Trainer::evaluate";
    let disagree = match error.to_string().contains(disagree) {
        true => disagree.to_owned(),
        false => {
            disagree.replace("rank 0 is in all_reduce(i64, 1) of Trainer::step, rank 1 in", "rank 1 is in")
                + ", rank 2 in all_reduce(i64, 1) of Trainer::step"
        }
    };
    let cause = format!("{disagree}; every rank makes the same calls, in the same order");
    assert!(headline(&error, &cause).contains("world group of world rank"), "{error}");
}

#[test]
fn a_rank_outside_of_every_call_is_refused_too() {
    let error = fails(2, |world| {
        let _entered = (world.rank() == 0).then(|| world.log().enter("Trainer::step"));
        count(&world)
    });
    let cause = "rank 0 is in all_reduce(i64, 1) of Trainer::step, rank 1 in all_reduce(i64, 1); every rank makes the same calls, in \
                 the same order";
    headline(&error, cause);
}

#[test]
fn a_call_that_a_rank_never_makes_is_named() {
    let error = fails(2, |world| {
        let _entered = world.log().enter("Trainer::evaluate");
        if world.rank() == 0 { count(&world) } else { Ok(()) }
    });
    assert_eq!(
        headline(&error, "has returned and takes no part in Trainer::evaluate, which every rank calls"),
        "a world of 2 ranks failed: world group of world rank 0, op #0: rank 1 has returned and takes no part in \
         Trainer::evaluate, which every rank calls"
    );
    // It waits, or has come so far that it is about to.
    let line = error.to_string().lines().find(|line| line.starts_with("  rank 0 ")).unwrap_or_default().to_owned();
    assert!(line.ends_with(" in world #0 all_reduce(i64, 1) of Trainer::evaluate"), "{error}");
}

#[test]
fn a_deadlock_of_different_calls_names_them() {
    let mesh: Mesh = "dp=2,tp=1".parse().unwrap();
    let error = run_mesh(&mesh, |rank| {
        let (name, group) = match rank.world_rank() {
            0 => ("Trainer::evaluate", rank.world()),
            _ => ("Trainer::step", rank.group(Axis::Dp)),
        };
        // Of two ranks, both are the same group: another one makes the cycle.
        let apart = rank.subgroup("apart", &[0, 1])?;
        let _entered = rank.enter(name);
        if rank.world_rank() == 0 { count(group) } else { count(&apart) }
    });
    let error: WorldError<CommError> = error.unwrap_err();
    let cause = "deadlock: rank 0 waits for rank 1, which waits for rank 0; rank 0 is in Trainer::evaluate, rank 1 is in \
                 Trainer::step; every rank makes the same calls, in the same order";
    headline(&error, cause);
}

/// Steps overlap: a rank sends what another one takes in its next call.
#[test]
fn messages_join_different_calls() {
    let ends = run(2, PATIENT, |world| {
        let _entered = world.log().enter(if world.rank() == 0 { "Trainer::step" } else { "Trainer::flush" });
        let mut x = [2.5f32];
        if world.rank() == 0 {
            world.send_slice(&x, 1, 0)?
        } else {
            world.recv_slice(&mut x, 0, 0)?
        }
        Ok::<_, CommError>(x[0])
    });
    assert_eq!(ends.unwrap(), [2.5, 2.5]);
}

#[test]
fn the_innermost_call_counts_and_is_left_when_its_guard_drops() {
    let log = CommLog::default();
    let name = || log.caller().map(|caller| caller.to_string());
    let step = log.enter("Trainer::step");
    let about = Caller { about: Some("half".into()), ..Caller::from("Rank::subgroup") };
    let inner = log.enter(about);
    assert_eq!(name().as_deref(), Some("Rank::subgroup(\"half\")"));
    drop(inner);
    assert_eq!(name().as_deref(), Some("Trainer::step"));
    drop(step);
    assert_eq!(name(), None);
    assert_eq!(
        [log.name_next("Trainer"), log.name_next("Ddp"), log.name_next("Trainer")],
        ["Trainer", "Ddp", "Trainer 2"]
    );
}

/// Runs a program in which ranks 0 and 1 make a subgroup, and the others do `other`.
fn subgroup_of_some(other: impl Fn(&Rank) -> Result<(), CommError> + Sync) -> WorldError<CommError> {
    let mesh: Mesh = "dp=4".parse().unwrap();
    let ended = run_mesh(&mesh, |rank| match rank.world_rank() {
        0 | 1 => rank.subgroup("half", &[0, 1]).map(drop),
        _ => other(&rank),
    });
    ended.expect_err("ranks 2 and 3 make no subgroup")
}

#[test]
fn a_subgroup_that_some_ranks_do_not_make_is_named_at_once() {
    let returned = subgroup_of_some(|_| Ok(()));
    let cause = "has returned and takes no part in Rank::subgroup(\"half\"), which every rank calls";
    assert!(headline(&returned, cause).contains("world group of world rank"), "{returned}");

    let reduces = subgroup_of_some(|rank| count(rank.world()));
    let line = headline(&reduces, "; every rank makes the same calls, in the same order");
    assert!(
        line.contains("barrier() of Rank::subgroup(\"half\")") && line.contains("in all_reduce(i64, 1);"),
        "{line}"
    );

    let waits = subgroup_of_some(|rank| rank.world().recv_slice(&mut [0f32], 0, 7));
    let line = headline(&waits, "; every rank makes the same calls, in the same order");
    assert!(
        line.contains("deadlock: rank 0 waits for rank") && line.contains("rank 0 is in Rank::subgroup(\"half\")"),
        "{line}"
    );

    // A later subgroup of all would have met the first one of some.
    let another = subgroup_of_some(|rank| rank.subgroup("all", &[0, 1, 2, 3]).map(drop));
    let line = headline(&another, "every rank of a group splits it, and all members of a part name the same list");
    assert!(line.contains("splits into half = [0, 1], rank") && line.contains("into all = [0, 1, 2, 3]; "), "{line}");
}

/// Every rank names the part that it is in, also by another name.
#[test]
fn parts_of_a_subgroup_may_have_names_of_their_own() {
    let mesh: Mesh = "dp=4".parse().unwrap();
    let sizes = run_mesh(&mesh, |rank| {
        let part = match rank.world_rank() {
            0 | 1 => rank.subgroup("half", &[0, 1])?,
            alone => rank.subgroup("alone", &[alone])?,
        };
        Ok::<_, CommError>((part.size(), rank.log().drain().len()))
    });
    assert_eq!(sizes.unwrap(), [(2, 0), (2, 0), (1, 0), (1, 0)]);
}

/// `fn main() -> Result<(), Box<dyn Error>>` prints `Debug`.
#[test]
fn debug_of_an_error_is_its_text() {
    let error = fails(2, |world| if world.rank() == 0 { count(&world) } else { Ok(()) });
    assert_eq!(format!("{error:?}"), error.to_string());
    assert!(format!("{:?}", Box::<dyn std::error::Error>::from(error)).starts_with("a world of 2 ranks failed: "));
    let error = "dp=0".parse::<Mesh>().unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}

#[test]
fn a_world_without_ranks_is_an_error() {
    let error = run(0, PATIENT, |_| Ok::<_, CommError>(())).unwrap_err();
    assert_eq!(error.to_string(), "a world of 0 ranks failed: a world has at least one rank");
}
