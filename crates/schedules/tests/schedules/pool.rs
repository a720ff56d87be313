//! Shared work: each item is done exactly once, a panic reaches the owner of the job, and a waiting thread lends its
//! core.

use super::check;
use meshwork_core::pool::{for_each, is_idle, yield_core};
use shuttle::sync::Barrier;
use shuttle::thread;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Doubles numbers in pieces of two.
fn double(x: &mut [usize]) {
    for_each(x.chunks_mut(2), |part| part.iter_mut().for_each(|x| *x *= 2));
}

#[test]
fn every_item_is_done_once() {
    let all_helped = Arc::new(AtomicUsize::new(0));
    let counter = all_helped.clone();
    check(3, move || {
        let mut x: Vec<usize> = (0..10).collect();
        double(&mut x);
        let threads = Mutex::new(HashSet::new());
        for_each(x.chunks_mut(2), |part| {
            threads.lock().unwrap().insert(thread::current().id());
            part.iter_mut().for_each(|x| *x *= 2);
        });
        assert_eq!(x, (0..10).map(|i| 4 * i).collect::<Vec<_>>());
        assert!(is_idle());
        counter.fetch_add(usize::from(threads.into_inner().unwrap().len() == 3), Ordering::Relaxed);
    });
    assert!(all_helped.load(Ordering::Relaxed) > 0, "in no schedule did every thread help");
}

#[test]
fn several_threads_share_at_once_and_items_share_again() {
    check(3, || {
        thread::scope(|scope| {
            for owner in 0..3 {
                scope.spawn(move || {
                    let mut x = [owner; 6];
                    for_each(x.chunks_mut(2), double);
                    assert_eq!(x, [2 * owner; 6]);
                });
            }
        });
        assert!(is_idle());
    });
}

/// Part of an item: counts that it is dropped, done or not.
struct Left<'a>(&'a AtomicUsize);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_panic_comes_out_and_the_pool_goes_on() {
    check(3, || {
        let (done, dropped) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = catch_unwind(AssertUnwindSafe(|| {
            let items: Vec<(usize, Left<'_>)> = (0..6).map(|i| (i, Left(&dropped))).collect();
            for_each(items, |(i, _left)| {
                if i % 3 == 1 {
                    resume_unwind(Box::new(i)); // the second may panic too, on another thread
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let panic = shared.expect_err("an item panicked");
        assert!(matches!(panic.downcast_ref::<usize>(), Some(1 | 4)));
        assert!(done.into_inner() <= 4);
        assert_eq!(dropped.into_inner(), 6);
        let mut x = [1; 6];
        double(&mut x);
        assert_eq!(x, [2; 6]);
        assert!(is_idle());
    });
}

/// Of two threads on two cores one waits, and a worker takes its core; then both compute again.
#[test]
fn a_waiting_thread_lends_its_core_and_takes_it_back() {
    check(2, || {
        let (lent, over) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut x = [1; 4];
                for_each(x.chunks_mut(2).enumerate(), |(i, part)| {
                    if i == 0 {
                        yield_core(|| lent.wait());
                    }
                    part.fill(2);
                });
                assert_eq!(x, [2; 4]);
                over.wait();
            });
            lent.wait();
            let mut x = [1; 8];
            double(&mut x);
            assert_eq!(x, [2; 8]);
            over.wait();
        });
        assert!(is_idle());
    });
}
