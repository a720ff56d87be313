//! Times of the communicator over processes: run by `benches/mpi.py`, which compares them with mpi4py over the same
//! library. Each line is an operation, bytes and the seconds of one call on rank 0.
//!
//!     mpirun -n 2 target/release/deps/collectives-... LIBRARY
//!
//! Without a library, in one process, it runs each operation once.

use std::path::Path;
use std::time::Instant;

use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp};
use meshwork_mpi::{Library, Options, Runtime};

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

fn main() {
    let library = std::env::args().nth(1).filter(|argument| argument.contains("libmpi"));
    let (runtime, sizes) = match &library {
        Some(file) => {
            let library = Library::open(Path::new(file)).unwrap_or_else(|error| panic!("{error}"));
            (Runtime::start(library, Options::default()), &[4 << 10, 256 << 10, 4 << 20, 64 << 20][..])
        }
        None => (Runtime::of_one_process(Options { ranks_per_process: 2, ..Options::default() }), &[4 << 10][..]),
    };
    let world = runtime.unwrap_or_else(|error| panic!("{error}")).world();
    let ended = world.run(|world| {
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
