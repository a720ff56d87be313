//! Collectives of GPUs over NCCL, as ranks of one process: the time of each at several sizes, by NCCL's own reductions
//! and by our tree.
//!
//! ```text
//! cargo bench -p meshwork-cuda --features cuda --bench nccl [-- --device cuda-emulated] [--ranks N] [--small] [WORD..]
//! ```
//! A JSON line for each operation, way and size. `bytes` is the size that nccl-tests counts, that of the whole vector:
//! of the sum, of what is gathered or scattered, of what a rank sends. `gb_per_s`, its algorithm bandwidth, is that
//! size over the time; `scripts/gpu-check.sh nccl` adds the bus bandwidth. Without `--bench`, and with `--small`, every
//! operation runs once on a few elements: then times mean nothing. On the emulator they never mean anything.

#[path = "bench/asked.rs"]
mod asked;

use asked::Asked;
use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp, World};
use meshwork_cuda::device::{Products, Reduction};
use meshwork_cuda::{CudaDevice, Driver};
use meshwork_tensor::{Device, Error};
use std::error::Error as AnyError;
use std::sync::Arc;
use std::time::Instant;

/// Batches whose median counts, and how many seconds one takes at least.
const BATCHES: usize = 5;
const BATCH_S: f64 = 0.02;

/// Bytes of the vectors.
const SIZES: [usize; 4] = [32 << 10, 1 << 20, 32 << 20, 512 << 20];
const SMALL: [usize; 1] = [4 << 10];

/// An operation: what part of the vector is its input and its output on a rank, of n ranks, and its call, which gives
/// the output back.
struct Operation {
    name: &'static str,
    input: fn(usize, usize) -> usize,
    output: fn(usize, usize) -> usize,
    call: fn(&Group, &Buffer, Buffer) -> Result<Buffer, CommError>,
}

const OPERATIONS: [Operation; 6] = [
    Operation {
        name: "all_reduce",
        input: whole,
        output: whole,
        call: |group, from, to| group.all_reduce_into(from.clone(), to, ReduceOp::Sum),
    },
    Operation {
        name: "reduce_scatter",
        input: whole,
        output: part,
        call: |group, from, to| group.reduce_scatter(from.clone(), to, ReduceOp::Sum),
    },
    Operation {
        name: "all_gather",
        input: part,
        output: whole,
        call: |group, from, to| group.all_gather(from.clone(), to),
    },
    Operation {
        name: "broadcast",
        input: none, // in place
        output: whole,
        call: |group, _, to| group.broadcast(to, 0),
    },
    Operation {
        name: "all_to_all",
        input: whole,
        output: whole,
        call: |group, from, to| {
            let each = vec![from.count() / group.size(); group.size()];
            group.all_to_all(from.clone(), to, &each, &each)
        },
    },
    // Around the ring, each rank to the next.
    Operation {
        name: "send_recv",
        input: whole,
        output: whole,
        call: |group, from, to| {
            let (rank, n) = (group.rank(), group.size());
            let going = group.start_send(from.clone(), (rank + 1) % n, 0)?;
            let to = group.recv(to, (rank + n - 1) % n, 0)?;
            going.wait().map(|_| to)
        },
    },
];

fn whole(count: usize, _: usize) -> usize {
    count
}

fn part(count: usize, ranks: usize) -> usize {
    count / ranks
}

fn none(_: usize, _: usize) -> usize {
    0
}

fn main() -> Result<(), Box<dyn AnyError>> {
    let mut asked = Asked::of_process();
    let ranks = asked.value("--ranks").map(|ranks| ranks.parse()).transpose()?;
    let drivers = asked.drivers(ranks)?;
    match drivers.len() {
        0 => return Ok(()),
        1 => return Err("collectives need two GPUs, and there is one".into()),
        _ => {}
    }
    World::Threads(drivers.len()).run(|world| rank(&world, drivers[world.rank()].clone(), &asked))?;
    Ok(())
}

/// What one rank does.
fn rank(world: &Group, driver: Arc<dyn Driver>, asked: &Asked) -> Result<(), Error> {
    let device = CudaDevice::new(driver, Products::OfTheLibrary)?;
    for (way, reduction) in [("library", Reduction::Library), ("tree", Reduction::Tree)] {
        let group = Group::from(device.nccl(world.communicator().clone(), reduction)?);
        for operation in OPERATIONS.iter().filter(|operation| asked.wants(operation.name)) {
            // The two ways differ in reductions alone.
            if way == "tree" && !operation.name.contains("reduce") {
                continue;
            }
            for &bytes in if asked.small { &SMALL[..] } else { &SIZES } {
                let n = world.size();
                let count = (bytes / DType::F32.size()).next_multiple_of(n);
                let (input, mut output) = (
                    device.zeros(DType::F32, (operation.input)(count, n))?,
                    Some(device.zeros(DType::F32, (operation.output)(count, n))?),
                );
                let mut call = || {
                    let to = output.take().unwrap_or_else(Buffer::empty);
                    output = Some((operation.call)(&group, &input, to)?);
                    Ok(())
                };
                let seconds = median(world, &device, &mut call, asked.small)?;
                if world.rank() == 0 {
                    let (bytes, name) = (count * DType::F32.size(), operation.name);
                    let rate = bytes as f64 / seconds / 1e9;
                    println!(
                        r#"{{"operation":"{name}","way":"{way}","ranks":{n},"bytes":{bytes},"ms":{:.4},"gb_per_s":{rate:.3}}}"#,
                        1e3 * seconds
                    );
                }
            }
        }
    }
    Ok(())
}

/// Median seconds of a call, on the slowest rank.
fn median(
    world: &Group,
    device: &CudaDevice,
    call: &mut dyn FnMut() -> Result<(), Error>,
    once: bool,
) -> Result<f64, Error> {
    // The same on all ranks, so that all make the same number of calls.
    let mut batch = |calls: usize| {
        world.barrier()?;
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        device.synchronize()?;
        let mut seconds = [start.elapsed().as_secs_f64().max(1e-9)];
        world.all_reduce_slice(&mut seconds, ReduceOp::Max)?;
        Ok::<_, Error>(seconds[0])
    };
    let first = batch(1)?; // connects the ranks
    if once {
        return Ok(first);
    }
    let calls = (BATCH_S / batch(1)?).ceil().clamp(1.0, 1e3) as usize;
    let mut times = (0..BATCHES).map(|_| Ok(batch(calls)? / calls as f64)).collect::<Result<Vec<_>, Error>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
