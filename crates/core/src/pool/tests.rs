use super::*;
use std::collections::HashSet;
use std::sync::Barrier;

#[test]
fn every_item_is_done_once_whoever_shares_and_however_often() {
    let pool = Pool::start(4);
    thread::scope(|scope| {
        for owner in 0..6_usize {
            scope.spawn(move || {
                for round in 0..300 {
                    let mut done = vec![0; 2 + (owner + round) % 40];
                    pool.for_each(done.iter_mut().enumerate(), |(i, done)| {
                        *done += i + 1;
                        // Inside an item: serial, on this very thread.
                        let me = thread::current().id();
                        pool.for_each(0..3, |_| assert_eq!(thread::current().id(), me));
                    });
                    assert!(done.iter().enumerate().all(|(i, done)| *done == i + 1), "{done:?}");
                }
            });
        }
    });
    assert_eq!(pool.busy().load(Ordering::Relaxed), 0);
    assert!(pool.lock().jobs.is_empty());
}

/// Three items that wait for each other are only over if three threads are in them at once.
#[test]
fn free_cores_help() {
    let (pool, meet) = (Pool::start(3), Barrier::new(3));
    let threads = Mutex::new(HashSet::new());
    pool.for_each(0..3, |_| {
        meet.wait();
        threads.lock().unwrap().insert(thread::current().id());
    });
    assert_eq!(threads.into_inner().unwrap().len(), 3);
}

/// Two ranks on two cores: no worker may help while both compute; one must, once the other waits.
#[test]
fn a_waiting_rank_lends_its_core() {
    let pool = Pool::start(2);
    let (lent, helped) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _core = Core::enter(pool);
            pool.yield_core(|| {
                lent.wait();
                helped.wait();
            });
        });
        scope.spawn(|| {
            let _core = Core::enter(pool);
            lent.wait();
            let meet = Barrier::new(2);
            pool.for_each(0..2, |_| {
                meet.wait();
            });
            helped.wait();
        });
    });
    assert_eq!(pool.busy().load(Ordering::Relaxed), 0);
}

/// Two processes of one rank each, on the same two cores.
#[test]
fn a_rank_that_waits_lends_its_core_to_another_process() {
    static BUSY: AtomicUsize = AtomicUsize::new(0);
    let here = Pool::start(2);
    assert!(here.shared.set(&BUSY).is_ok());
    BUSY.fetch_add(1, Ordering::Relaxed); // the rank of the other process, which computes
    let owner = thread::current().id();
    for _ in 0..200 {
        here.for_each(0..2, |_| assert_eq!(thread::current().id(), owner));
    }
    BUSY.fetch_sub(1, Ordering::Relaxed); // and waits
    let meet = Barrier::new(2);
    here.for_each(0..2, |_| {
        meet.wait();
    });
    assert_eq!((BUSY.load(Ordering::Relaxed), here.own.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn nobody_helps_where_no_core_is_free() {
    let pool = Pool::start(2);
    pool.busy().fetch_add(1, Ordering::Relaxed); // another rank, that never waits
    for _ in 0..200 {
        let me = thread::current().id();
        pool.for_each(0..50, |_| assert_eq!(thread::current().id(), me));
    }
}

#[test]
fn a_panic_comes_out_where_the_work_was_shared_and_the_pool_goes_on() {
    let pool = Pool::start(3);
    for round in 0..60 {
        let meet = Barrier::new(3);
        // All three threads are inside; the owner or a helper panics, whichever gets the item.
        let shared = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(0..3, |item| {
                meet.wait();
                assert!(item != round % 3, "item {item}");
            });
        }));
        let panic = shared.expect_err("an item panicked");
        assert_eq!(panic.downcast_ref::<String>(), Some(&format!("item {}", round % 3)));
        assert!(!IN_ITEM.with(Cell::get));
        let sum = AtomicUsize::new(0);
        pool.for_each(0..100, |item| {
            sum.fetch_add(item, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }
    assert_eq!(pool.busy().load(Ordering::Relaxed), 0);
}
