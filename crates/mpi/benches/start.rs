//! How long many processes take to start, make their groups and exchange what they are, beside what
//! `scripts/scale_on_paper.py` says of the messages. Rank 0 writes one row of a table:
//!
//!     mpirun -n 64 target/release/deps/start-... LIBRARY RANKS_PER_PROCESS
//!
//! Without a library, in one process, it does the same once.

use std::path::Path;
use std::time::{Duration, Instant};

use meshwork_core::{Axis, CommError, Group, Mesh};
use meshwork_mpi::{Library, Options, Runtime};

/// A group for each axis and each two of them.
const GROUPS: [&[Axis]; 6] =
    [&[Axis::Tp], &[Axis::Dp], &[Axis::Pp], &[Axis::Tp, Axis::Dp], &[Axis::Tp, Axis::Pp], &[Axis::Dp, Axis::Pp]];

/// Seconds of a part of the start, on the rank that ends last.
fn timed(world: &Group, part: impl FnOnce() -> Result<(), CommError>) -> Result<f64, CommError> {
    world.barrier()?;
    let begun = Instant::now();
    part()?;
    world.barrier()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1).filter(|word| !word.starts_with('-'));
    let (library, each) = (words.next(), words.next().map_or(Ok(1), |word| word.parse())?);
    let options = Options { ranks_per_process: each, timeout: Duration::from_secs(600), ..Options::default() };
    let begun = Instant::now();
    let runtime = match &library {
        Some(path) => Runtime::start(Library::open(Path::new(path))?, options)?,
        None => Runtime::of_one_process(options)?,
    };
    let joined = begun.elapsed().as_secs_f64();
    let (ranks, processes) = (runtime.ranks(), runtime.processes());
    // tp=8 and pp=8, or less where there are fewer ranks.
    let tp = ranks.min(8);
    let pp = (1..=8.min(ranks / tp)).rev().find(|pp| (ranks / tp).is_multiple_of(*pp)).unwrap_or(1);
    let mesh: Mesh = format!("tp={tp},dp={},pp={pp}", ranks / tp / pp).parse()?;
    let rows = runtime.world().run(|world| {
        let rank = world.rank();
        let groups = timed(&world, || {
            GROUPS.iter().try_for_each(|axes| world.split("axes", &mesh.group(rank, axes)).map(drop))
        })?;
        let handshake = timed(&world, || {
            world.all_gather_bytes(&[0; 32])?;
            let mut facts = [rank as i64; 25];
            world.all_reduce_slice(&mut facts, meshwork_core::ReduceOp::Max)
        })?;
        let report = timed(&world, || {
            let (own, mut all) = ([rank as i64; 10], vec![0; 10 * ranks]);
            world.all_gather_slice(&own, &mut all)
        })?;
        Ok::<_, CommError>(format!("{groups:.3} s | {handshake:.3} s | {report:.3} s"))
    })?;
    if runtime.process() == 0 {
        println!("| {processes} x {each} | {joined:.2} s | {} |", rows[0]);
    }
    Ok(())
}
