//! Collectives of the thread backend, by size and number of ranks.
//!
//! `cargo bench -p meshwork-core --bench collectives -- [--json] [OPERATION...] [RANKS...] [BYTES...]`, where a number
//! from 1024 on is one of bytes. A time is that of one rank, from the end of a barrier to the end of the operation. The
//! output is the median over the repeats, for the rank where it is largest. The bytes are those of the full, uncut
//! buffer of each rank (what a reduce-scatter takes, what an all-gather gives), and a `send_recv` is a round trip. All
//! memory is touched before. Without `--bench` (as under `cargo test`), everything runs once on small buffers. With
//! `--json`, each line is one measurement.

use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp, World};
use std::time::{Duration, Instant};

/// Runs one operation on a rank's two buffers and returns them. Each is as large as the operation's full buffer or, if
/// [`Case::part`] says so, as one rank's part of it.
type Step = fn(&Group, [Buffer; 2]) -> Result<[Buffer; 2], CommError>;

struct Case {
    name: &'static str,
    dtype: DType,
    /// Which of the two buffers hold one rank's part.
    part: [bool; 2],
    step: Step,
}

const SUM: ReduceOp = ReduceOp::Sum;

const CASES: [Case; 8] = [
    Case {
        name: "all_reduce",
        dtype: DType::F32,
        part: [false, true],
        step: |g, [x, y]| Ok([g.all_reduce(x, SUM)?, y]),
    },
    Case {
        name: "all_reduce_bf16",
        dtype: DType::Bf16,
        part: [false, true],
        step: |g, [x, y]| Ok([g.all_reduce(x, SUM)?, y]),
    },
    Case {
        name: "reduce_scatter",
        dtype: DType::F32,
        part: [false, true],
        step: |g, [x, y]| Ok([x.clone(), g.reduce_scatter(x, y, SUM)?]),
    },
    Case {
        name: "all_gather",
        dtype: DType::F32,
        part: [true, false],
        step: |g, [x, y]| Ok([x.clone(), g.all_gather(x, y)?]),
    },
    Case {
        name: "all_to_all",
        dtype: DType::F32,
        part: [false, false],
        step: |g, [x, y]| {
            let counts = vec![x.count() / g.size(); g.size()];
            Ok([x.clone(), g.all_to_all(x, y, &counts, &counts)?])
        },
    },
    Case { name: "broadcast", dtype: DType::F32, part: [false, true], step: |g, [x, y]| Ok([g.broadcast(x, 0)?, y]) },
    // The sender keeps its buffer, or gives it up.
    Case {
        name: "send_recv",
        dtype: DType::F32,
        part: [false, false],
        step: |g, [x, y]| {
            let shared = x.clone();
            let [_, y] = there_and_back(g, [x, y])?;
            Ok([shared, y])
        },
    },
    Case { name: "send_recv_moved", dtype: DType::F32, part: [false, false], step: there_and_back },
];

fn there_and_back(group: &Group, [x, y]: [Buffer; 2]) -> Result<[Buffer; 2], CommError> {
    match group.rank() {
        0 => Ok([group.send(x, 1, 0)?, group.recv(y, 1, 0)?]),
        1 => {
            let y = group.recv(y, 0, 0)?;
            Ok([group.send(x, 0, 0)?, y])
        }
        _ => Ok([x, y]),
    }
}

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let flag = |name: &str| args.iter().any(|arg| arg == name);
    let (full, json) = (flag("--bench"), flag("--json"));
    let (numbers, names): (Vec<_>, Vec<_>) =
        args.iter().filter(|arg| !arg.starts_with('-')).partition(|arg| arg.parse::<usize>().is_ok());
    let numbers: Vec<usize> = numbers.into_iter().filter_map(|arg| arg.parse().ok()).collect();
    let (sizes, worlds): (Vec<_>, Vec<_>) = numbers.into_iter().partition(|&number| number >= 1024);
    fn wanted<T: PartialEq>(list: &[T], value: T) -> bool {
        list.is_empty() || list.contains(&value)
    }
    if !json {
        println!("{:>16} {:>10} {:>6} {:>14} {:>8}", "operation", "bytes", "ranks", "median", "GB/s");
    }
    for bytes in [4 << 10, 256 << 10, 4 << 20, 64 << 20].into_iter().filter(|&bytes| wanted(&sizes, bytes)) {
        let bytes = if full { bytes } else { bytes >> 5 };
        for ranks in [2, 4, 8].into_iter().filter(|&ranks| wanted(&worlds, ranks)) {
            for case in CASES.iter().filter(|case| wanted(&names, &case.name.to_owned())) {
                if case.name.starts_with("send") && ranks > 2 {
                    continue;
                }
                let median = median(case, ranks, bytes, if full { 1.2 } else { 0.0 });
                let (us, speed) = (median.as_secs_f64() * 1e6, bytes as f64 / median.as_secs_f64() * 1e-9);
                match json {
                    true => println!(
                        "{{\"kind\": \"collective\", \"backend\": \"thread\", \"op\": \"{}\", \"bytes\": {bytes}, \
                         \"ranks\": {ranks}, \"us\": {us:.1}, \"alg_gbps\": {speed:.3}}}",
                        case.name
                    ),
                    false => println!("{:>16} {bytes:>10} {ranks:>6} {median:>14.1?} {speed:>8.3}", case.name),
                }
            }
        }
    }
}

/// Median time of one operation, over `seconds` of repeats: 5 to 300 of them, or one if there is no time.
fn median(case: &Case, ranks: usize, bytes: usize, seconds: f64) -> Duration {
    let body = |world: Group| {
        let fresh = |part: bool| {
            let mut buffer = Buffer::zeros(case.dtype, bytes / case.dtype.size() / if part { ranks } else { 1 });
            buffer.as_bytes_mut()?.fill(1); // touches the memory
            Ok::<_, CommError>(buffer)
        };
        let mut buffers = [fresh(case.part[0])?, fresh(case.part[1])?];
        let mut once = || {
            world.barrier()?;
            let given = std::mem::replace(&mut buffers, [Buffer::empty(), Buffer::empty()]);
            let start = Instant::now();
            buffers = (case.step)(&world, given)?;
            Ok::<_, CommError>(start.elapsed())
        };
        let mut warm = [0.0];
        for _ in 0..3 {
            warm = [once()?.as_secs_f64()];
        }
        world.all_reduce_slice(&mut warm, ReduceOp::Max)?;
        let repeats = if seconds > 0.0 { (seconds / warm[0]).clamp(5.0, 300.0) as usize } else { 1 };
        let mut times = (0..repeats).map(|_| once()).collect::<Result<Vec<_>, _>>()?;
        times.sort();
        world.log().drain();
        Ok::<_, CommError>(times[repeats / 2])
    };
    let medians = World::Threads(ranks).run(body).unwrap_or_else(|error| panic!("{error}"));
    medians.into_iter().max().unwrap_or_default()
}
