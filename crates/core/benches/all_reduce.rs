//! All-reduce latency on the thread backend, next to what memory alone costs.
//!
//! Run with `cargo bench -p meshwork-core`. The peer is one thread that copies every rank's buffer once, which reads
//! and writes as many bytes as an all-reduce in place must. Without `--bench` (as under `cargo test`), everything runs
//! once on small buffers.

use std::time::{Duration, Instant};

use meshwork_core::comm::thread::{Options, run};
use meshwork_core::{Buffer, CommError, DType, ReduceOp};

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    println!("{:>6} {:>10} {:>7} {:>14} {:>14}", "ranks", "bytes", "dtype", "all_reduce", "copy, 1 thread");
    for dtype in [DType::F32, DType::Bf16] {
        for (bytes, times) in [(4 << 10, 20_000), (1 << 20, 200), (64 << 20, 6)] {
            let (bytes, times) = if full { (bytes, times) } else { (bytes.min(64 << 10), 1) };
            for ranks in [2, 8] {
                let reduce = all_reduce(ranks, dtype, bytes / dtype.size(), times);
                let copy = copy(ranks, bytes, times);
                println!("{ranks:>6} {bytes:>10} {dtype:>7} {reduce:>14.1?} {copy:>14.1?}");
            }
        }
    }
}

/// Time of one all-reduce, over `times` that follow each other.
fn all_reduce(ranks: usize, dtype: DType, count: usize, times: u32) -> Duration {
    let body = |world: meshwork_core::Group| {
        let mut buffer = Buffer::zeros(dtype, count);
        buffer = world.all_reduce(buffer, ReduceOp::Sum)?; // touches the memory
        world.barrier()?;
        let start = Instant::now();
        for _ in 0..times {
            buffer = world.all_reduce(buffer, ReduceOp::Sum)?;
        }
        world.log().drain();
        Ok::<_, CommError>(start.elapsed() / times)
    };
    let elapsed = run(ranks, Options::default(), body).unwrap_or_else(|error| panic!("{error}"));
    elapsed.into_iter().max().unwrap_or_default()
}

/// Time in which one thread copies one buffer per rank.
fn copy(ranks: usize, bytes: usize, times: u32) -> Duration {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    let start = Instant::now();
    for _ in 0..times as usize * ranks {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    }
    start.elapsed() / times
}
