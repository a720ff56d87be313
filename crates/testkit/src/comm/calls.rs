//! The calls of a program, by which faults are named, and ranks that are in different ones.

use super::{PATIENT, Worlds, cases, fails, passes};
use meshwork_core::{Axis, CommError, Group, Mesh, Rank, ReduceOp, RunError};

cases![
    ranks_that_communicate_alike_in_different_calls_are_refused,
    a_call_that_a_rank_never_makes_is_named,
    a_deadlock_of_different_calls_names_them,
    messages_join_different_calls,
    a_subgroup_that_some_ranks_do_not_make_is_named_at_once,
    parts_of_a_subgroup_may_have_names_of_their_own,
];

const SAME: &str = "; every rank makes the same calls, in the same order";

/// The first line of the whole, and that every rank which did not return early was told the same cause.
fn headline(error: &RunError, cause: &str) -> String {
    for end in error.ends.iter().flatten() {
        let end = end.to_string();
        assert!(end.lines().next().is_some_and(|line| line.ends_with(cause)), "{end}");
    }
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn count(world: &Group) -> Result<(), CommError> {
    world.all_reduce_slice(&mut [1i64], ReduceOp::Sum)
}

/// An evaluation begins with the same collective as a step: ranks that differ met there and went on.
fn ranks_that_communicate_alike_in_different_calls_are_refused(worlds: &dyn Worlds) {
    let error = fails(worlds, 3, PATIENT, |world| {
        let _entered = world.log().enter(if world.rank() == 1 { "Trainer::evaluate" } else { "Trainer::step" });
        Ok(count(world)?)
    });
    if let Some(error) = error {
        // Of the ranks in the same call the one that came first is named.
        let [step, evaluate] = ["step", "evaluate"].map(|call| format!("all_reduce(i64, 1) of Trainer::{call}"));
        let causes = [
            format!("rank 0 is in {step}, rank 1 in {evaluate}{SAME}"),
            format!("rank 1 is in {evaluate}, rank 2 in {step}{SAME}"),
        ];
        let text = error.to_string();
        let cause = causes.iter().find(|cause| text.contains(&**cause)).unwrap_or_else(|| panic!("{text}"));
        assert!(headline(&error, cause).contains("world group of world rank"), "{error}");
    }
    // A rank that is in no call.
    let error = fails(worlds, 2, PATIENT, |world| {
        let _entered = (world.rank() == 0).then(|| world.log().enter("Trainer::step"));
        Ok(count(world)?)
    });
    let cause = format!("rank 0 is in all_reduce(i64, 1) of Trainer::step, rank 1 in all_reduce(i64, 1){SAME}");
    error.iter().for_each(|error| _ = headline(error, &cause));
}

fn a_call_that_a_rank_never_makes_is_named(worlds: &dyn Worlds) {
    let error = fails(worlds, 2, PATIENT, |world| {
        let _entered = world.log().enter("Trainer::evaluate");
        if world.rank() == 0 {
            count(world)?;
        }
        Ok(())
    });
    let Some(error) = error else { return };
    let cause = "has returned and takes no part in Trainer::evaluate, which every rank calls";
    let place = "a world of 2 ranks failed: world group of world rank 0, op #0: rank 1";
    assert_eq!(headline(&error, cause), format!("{place} {cause}"));
    // It waits, or has come so far that it is about to.
    let line = error.to_string().lines().find(|line| line.starts_with("  rank 0 ")).unwrap_or_default().to_owned();
    assert!(line.ends_with(" in world #0 all_reduce(i64, 1) of Trainer::evaluate"), "{error}");
}

/// This rank of a mesh over the whole world.
fn join(mesh: &str, world: &Group) -> Result<Rank, CommError> {
    let mesh: Mesh = mesh.parse().unwrap_or_else(|error| panic!("{error}"));
    Rank::new(&mesh, world.communicator().clone())
}

fn a_deadlock_of_different_calls_names_them(worlds: &dyn Worlds) {
    let error = fails(worlds, 2, PATIENT, |world| {
        let rank = join("dp=2,tp=1", world)?;
        let (name, group) = match rank.world_rank() {
            0 => ("Trainer::evaluate", rank.world()),
            _ => ("Trainer::step", rank.group(Axis::Dp)),
        };
        // Of two ranks, both are the same group: another one makes the cycle.
        let apart = rank.subgroup("apart", &[0, 1])?;
        let _entered = rank.enter(name);
        Ok(count(if rank.world_rank() == 0 { group } else { &apart })?)
    });
    let cause = format!(
        "deadlock: rank 0 waits for rank 1, which waits for rank 0; rank 0 is in Trainer::evaluate, rank 1 is in \
         Trainer::step{SAME}"
    );
    error.iter().for_each(|error| _ = headline(error, &cause));
}

/// Steps overlap: a rank sends what another one takes in its next call.
fn messages_join_different_calls(worlds: &dyn Worlds) {
    passes(worlds, 2, |world| {
        let _entered = world.log().enter(if world.rank() == 0 { "Trainer::step" } else { "Trainer::flush" });
        let mut x = [2.5f32];
        if world.rank() == 0 {
            world.send_slice(&x, 1, 0)?;
        } else {
            world.recv_slice(&mut x, 0, 0)?;
        }
        assert_eq!(x, [2.5]);
        Ok(())
    });
}

fn a_subgroup_that_some_ranks_do_not_make_is_named_at_once(worlds: &dyn Worlds) {
    // Ranks 0 and 1 make a subgroup, and the others do something else.
    let check = |other: &(dyn Fn(&Rank) -> Result<(), CommError> + Sync), cause: &str, parts: &[&str]| {
        let error = fails(worlds, 4, PATIENT, |world| {
            let rank = join("dp=4", world)?;
            let done = if rank.world_rank() < 2 { rank.subgroup("half", &[0, 1]).map(drop) } else { other(&rank) };
            Ok(done?)
        });
        if let Some(error) = error {
            let line = headline(&error, cause);
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        }
    };
    let returned = "has returned and takes no part in Rank::subgroup(\"half\"), which every rank calls";
    check(&|_| Ok(()), returned, &["world group of world rank"]);
    let half = "barrier() of Rank::subgroup(\"half\")";
    check(&|rank| count(rank.world()), SAME, &[half, "in all_reduce(i64, 1);"]);
    let waits = "deadlock: rank 0 waits for rank";
    check(&|rank| rank.world().recv_slice(&mut [0f32], 0, 7), SAME, &[waits, "rank 0 is in Rank::subgroup(\"half\")"]);
    // A later subgroup of all would have met the first one of some.
    let lists = "every rank of a group splits it, and all members of a part name the same list";
    let parts = ["splits into half = [0, 1], rank", "into all = [0, 1, 2, 3]; "];
    check(&|rank| rank.subgroup("all", &[0, 1, 2, 3]).map(drop), lists, &parts);
}

/// Every rank names the part that it is in, also by another name.
fn parts_of_a_subgroup_may_have_names_of_their_own(worlds: &dyn Worlds) {
    passes(worlds, 4, |world| {
        let rank = join("dp=4", world)?;
        let part = match rank.world_rank() {
            0 | 1 => rank.subgroup("half", &[0, 1])?,
            alone => rank.subgroup("alone", &[alone])?,
        };
        assert_eq!((part.size(), rank.log().drain().len()), ([2, 2, 1, 1][rank.world_rank()], 0));
        Ok(())
    });
}
