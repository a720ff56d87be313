//! Bugs planted in the protocols are found.

use super::{check_over, ranks};
use meshwork_core::sync::model::{Bug, plant};
use meshwork_core::{Buffer, ReduceOp};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Schedules in which a bug must come up, some of them in one of a thousand. The first one ends the test.
const SCHEDULES: usize = 20_000;

/// Plants the bug and runs the checker until it stops; returns what it said.
fn found(bug: Bug, threads: usize, body: impl Fn() + Send + Sync + 'static) -> String {
    plant(bug); // on this thread, which runs this test alone
    let panic =
        catch_unwind(AssertUnwindSafe(|| check_over(SCHEDULES, threads, body))).expect_err("the checker finds it");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).expect("a message")
}

/// A sum over three ranks, in several claims. A result that comes too early is never freed: other ranks still write it.
fn sum() {
    let sums = ranks(3, |world| {
        let op = world.start_all_reduce(Buffer::from_vec(vec![1_i32; 200]), ReduceOp::Sum)?;
        let sum = ManuallyDrop::new(op.wait()?);
        Ok(sum.as_slice::<i32>()?.iter().all(|&x| x == 3))
    });
    assert_eq!(sums, [true; 3], "whether each rank has the sum");
}

#[test]
fn a_rank_that_sleeps_after_its_wake_up() {
    let said = found(Bug::RankSleepsLate, 2, sum);
    assert!(said.contains("deadlock"), "{said}");
}

#[test]
fn an_owner_that_sleeps_after_its_wake_up() {
    let said = found(Bug::OwnerSleepsLate, 3, || meshwork_core::pool::for_each(0..6, |_| ()));
    assert!(said.contains("deadlock"), "{said}");
}

#[test]
fn a_rank_that_returns_while_others_still_work_on_its_buffer() {
    let said = found(Bug::DoneWhenClaimed, 2, sum);
    assert!(said.contains("has the sum"), "{said}");
}
