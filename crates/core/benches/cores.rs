//! Repeated measurements of the distance between two cores. On CPUs with several last-level caches, and on hosts that
//! move virtual cores, speeds change while nothing else does.
//!
//! `cargo bench -p meshwork-core --bench cores [-- SECONDS]`, on an idle machine, or the hand-off alone while
//! something else runs (`-- SECONDS hand-off`). Twice a second it prints a line with
//!
//! - `hand-off`: ns from a store by one thread to the load that sees it by another, the best of many batches;
//! - `own`: GB/s at which both threads together pass over the data that each wrote itself the last time;
//! - `other's`: the same over the data that the other thread wrote.
//!
//! On a Zen 4: two cores with one last cache hand off in 25 to 35 ns, and the rates differ little. With a last cache
//! each it takes 150 to 180 ns, and `other's` falls to 90 to 105 GB/s.
//!
//! Without `--bench` (as under `cargo test`), it prints one line of few repeats.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Round trips in a batch.
const TURNS: usize = 50;

/// Number of floats that a thread passes over: half a megabyte, which stays in its second-level cache.
const FLOATS: usize = 1 << 17;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let full = args.iter().any(|arg| arg == "--bench");
    let seconds = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or(5.0);
    let rates = !args.iter().any(|arg| arg == "hand-off");
    let repeats = if full { 40 } else { 2 };
    let begun = Instant::now();
    loop {
        print!("{:7.1} s  hand-off {:4.0} ns", begun.elapsed().as_secs_f64(), hand_off(repeats));
        match rates {
            true => println!("  own {:5.1} GB/s  other's {:5.1} GB/s", pass(repeats, 0), pass(repeats, 1)),
            false => println!(),
        }
        if !full || begun.elapsed().as_secs_f64() > seconds {
            return;
        }
        thread::sleep(Duration::from_millis(500));
    }
}

/// Nanoseconds one way, in the best of `batches` batches.
fn hand_off(batches: usize) -> f64 {
    let turn = AtomicUsize::new(0);
    let wait = |until: usize| {
        while turn.load(Ordering::Acquire) != until {
            spin_loop();
        }
    };
    let best = thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..batches * TURNS {
                wait(2 * i + 1);
                turn.store(2 * i + 2, Ordering::Release);
            }
        });
        let batch = |batch: usize| {
            let start = Instant::now();
            for i in batch * TURNS..(batch + 1) * TURNS {
                turn.store(2 * i + 1, Ordering::Release);
                wait(2 * i + 2);
            }
            start.elapsed()
        };
        (0..batches).map(batch).min()
    });
    best.unwrap_or_default().as_nanos() as f64 / (2 * TURNS) as f64
}

/// GB/s read and written by two threads that change half of the numbers each: the same half every time, or alternating
/// halves (a `change` of 1).
fn pass(repeats: usize, change: usize) -> f64 {
    let halves = [Mutex::new(vec![1.0_f32; FLOATS]), Mutex::new(vec![1.0_f32; FLOATS])];
    let (came, times) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // Both spin, as threads that sleep may find themselves on one core.
    let meet = |before: usize| {
        came.fetch_add(1, Ordering::AcqRel);
        while came.load(Ordering::Acquire) < before + 2 {
            spin_loop();
        }
    };
    let work = |me: usize| {
        for repeat in 0..2 * repeats {
            let mut half = halves[(me + repeat * change) % 2].lock().unwrap_or_else(PoisonError::into_inner);
            meet(4 * repeat);
            let start = Instant::now();
            half.iter_mut().for_each(|x| *x = 2.0 - *x);
            times.lock().unwrap_or_else(PoisonError::into_inner).push(start.elapsed());
            drop(half);
            meet(4 * repeat + 2);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| work(1));
        work(0);
    });
    let mut times = times.into_inner().unwrap_or_else(PoisonError::into_inner);
    times.sort();
    let bytes = 2 * 2 * FLOATS * size_of::<f32>();
    bytes as f64 / times[times.len() / 2].as_nanos().max(1) as f64
}
