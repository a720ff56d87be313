//! Times of the communicator over processes: run by `benches/mpi.py`, which compares them with mpi4py over the same
//! library. Each line is an operation, bytes and the seconds of one call on rank 0.
//!
//!     mpirun -n 2 target/release/deps/collectives-... LIBRARY [RANKS_PER_PROCESS]
//!     mpirun -n 2 target/release/deps/collectives-... LIBRARY native
//!     mpirun -n 2 target/release/deps/collectives-... LIBRARY overlap
//!
//! `native` has the library add up. `overlap` times a computation and an all-reduce of each rank, alone and both at
//! once, and the computation while the other ranks have not come to the all-reduce. Without a library, in one process,
//! it runs each operation once.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp};
use meshwork_mpi::{Library, Options, Reduction, Runtime};

/// The elements of input and output, for n ranks and a message of c elements.
type Counts = fn(usize, usize) -> [usize; 2];
type Call = fn(&Group, &mut [Option<Buffer>; 2]) -> Result<(), CommError>;

const OPERATIONS: [(&str, Counts, Call); 5] = [
    (
        "all_reduce",
        |_, c| [0, c],
        |group, [_, x]| {
            *x = x.take().map(|x| group.all_reduce(x, ReduceOp::Sum)).transpose()?;
            Ok(())
        },
    ),
    (
        "all_gather",
        |n, c| [c / n, c / n * n],
        |group, [x, y]| {
            let (Some(input), Some(output)) = (&*x, y.take()) else { return Ok(()) };
            *y = Some(group.all_gather(input.clone(), output)?);
            Ok(())
        },
    ),
    (
        "reduce_scatter",
        |n, c| [c / n * n, c / n],
        |group, [x, y]| {
            let (Some(input), Some(output)) = (&*x, y.take()) else { return Ok(()) };
            *y = Some(group.reduce_scatter(input.clone(), output, ReduceOp::Sum)?);
            Ok(())
        },
    ),
    (
        "all_to_all",
        |n, c| [c / n * n, c / n * n],
        |group, [x, y]| {
            let (Some(input), Some(output)) = (&*x, y.take()) else { return Ok(()) };
            let counts = vec![input.count() / group.size(); group.size()];
            *y = Some(group.all_to_all(input.clone(), output, &counts, &counts)?);
            Ok(())
        },
    ),
    (
        "send_recv",
        |_, c| [c, c],
        |group, [x, y]| {
            // There and back.
            let (Some(input), Some(output)) = (&*x, y.take()) else { return Ok(()) };
            let other = group.size() - 1 - group.rank();
            *y = Some(match group.rank() {
                0 if other > 0 => {
                    group.send(input.clone(), other, 0)?;
                    group.recv(output, other, 0)?
                }
                _ if other == 0 && group.rank() > 0 => {
                    let output = group.recv(output, other, 0)?;
                    group.send(input.clone(), other, 0)?;
                    output
                }
                _ => output,
            });
            Ok(())
        },
    ),
];

/// A computation of some 20 ms in the cache of a core.
fn compute() {
    let mut values = [1.0f32; 4096];
    for _ in 0..30_000 {
        black_box(&mut values).iter_mut().for_each(|value| *value = *value * 0.999 + 0.001);
    }
}

/// The median of some seconds of this rank.
fn median(mut seconds: impl FnMut() -> Result<f64, CommError>) -> Result<f64, CommError> {
    let mut all = (0..15).map(|_| seconds()).collect::<Result<Vec<f64>, CommError>>()?;
    all.sort_by(f64::total_cmp);
    Ok(all[all.len() / 2])
}

/// Computation and communication of all ranks, alone and both at once.
fn overlap(world: &Group) -> Result<(), CommError> {
    let timed = |computes: bool, bytes: usize, late: bool| {
        median(|| {
            let buffer = Buffer::zeros(DType::F32, bytes / 4);
            world.barrier()?;
            if late && world.rank() > 0 {
                std::thread::sleep(Duration::from_millis(60)); // longer than the computation takes
            }
            let begun = Instant::now();
            let pending = world.start_all_reduce(buffer, ReduceOp::Sum)?;
            if computes && !(late && world.rank() > 0) {
                compute();
            }
            let computed = begun.elapsed();
            pending.wait()?;
            Ok(if late { computed } else { begun.elapsed() }.as_secs_f64())
        })
    };
    let alone = median(|| {
        world.barrier()?;
        let begun = Instant::now();
        compute();
        Ok(begun.elapsed().as_secs_f64())
    })?;
    let mut lines = vec![("compute", 0, alone)];
    for bytes in [256 << 10, 4 << 20, 64 << 20] {
        let rows = [("communicate", timed(false, bytes, false)?), ("both", timed(true, bytes, false)?)];
        lines.extend(rows.map(|(name, seconds)| (name, bytes, seconds)));
    }
    lines.push(("pending", 4 << 20, timed(true, 4 << 20, true)?));
    if world.rank() == 0 {
        lines.iter().for_each(|(name, bytes, seconds)| println!("{name} {bytes} {seconds:.9}"));
    }
    Ok(())
}

fn main() {
    let library = std::env::args().nth(1).filter(|argument| argument.contains("libmpi"));
    let mode = std::env::args().nth(2).unwrap_or_default();
    let (runtime, sizes) = match &library {
        Some(file) => {
            let library = Library::open(Path::new(file)).unwrap_or_else(|error| panic!("{error}"));
            let reduction = if mode == "native" { Reduction::Native } else { Reduction::Tree };
            let options = Options { ranks_per_process: mode.parse().unwrap_or(1), reduction, ..Options::default() };
            (Runtime::start(library, options), &[4 << 10, 256 << 10, 4 << 20, 64 << 20][..])
        }
        None => (Runtime::of_one_process(Options { ranks_per_process: 2, ..Options::default() }), &[4 << 10][..]),
    };
    let world = runtime.unwrap_or_else(|error| panic!("{error}")).world();
    let ended = world.run(|world| {
        if mode == "overlap" {
            return overlap(&world);
        }
        for &bytes in sizes {
            for (name, counts, call) in OPERATIONS {
                let buffer = |count: usize| (count > 0).then(|| Buffer::zeros(DType::F32, count));
                let mut buffers = counts(world.size(), bytes / 4).map(buffer);
                let calls = if library.is_none() { 1 } else { ((32 << 20) / bytes).clamp(3, 200) };
                for _ in 0..calls.div_ceil(4) {
                    call(&world, &mut buffers)?;
                }
                world.barrier()?;
                let begun = Instant::now();
                for _ in 0..calls {
                    call(&world, &mut buffers)?;
                }
                let seconds = begun.elapsed().as_secs_f64() / calls as f64;
                if world.rank() == 0 {
                    println!("{name} {bytes} {seconds:.9}");
                }
            }
        }
        Ok::<_, CommError>(())
    });
    ended.unwrap_or_else(|error| panic!("{error}"));
}
