//! Collectives on the memory of devices, against those of the same ranks in host memory; faults; and waits that are left out.

use crate::{driver, emulator};
use half::{bf16, f16};
use meshwork_core::comm::FaultKind;
use meshwork_core::comm::thread::{self, Options};
use meshwork_core::{Buffer, CommError, Communicator, DType, Group, Pending, ReduceOp};
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Driver, Emulator, Order};
use meshwork_tensor::{Device, Error};
use std::sync::Arc;
use std::time::{Duration, Instant};

const DTYPES: [DType; 7] = [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32, DType::I64, DType::U8];

fn device(driver: Arc<dyn Driver>) -> Arc<CudaDevice> {
    Arc::new(CudaDevice::new(driver, Products::OfTheCpu).unwrap())
}

/// Numbers of many sizes and both signs, the same for the same `seed`; integers also near the ends.
fn values(dtype: DType, count: usize, seed: usize) -> Buffer {
    let word = |i: usize| {
        ((i + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left((seed * 7 % 64) as u32) ^ seed as u64
    };
    let float = |i: usize| ((word(i) >> 40) as f32 / 8.0e6 - 1.0) * 2.0_f32.powi((word(i) % 13) as i32 - 6);
    let of = 0..count;
    match dtype {
        DType::F32 => Buffer::from_vec(of.map(float).collect::<Vec<f32>>()),
        DType::F64 => Buffer::from_vec(of.map(|i| f64::from(float(i)) / 3.0).collect::<Vec<f64>>()),
        DType::Bf16 => Buffer::from_vec(of.map(|i| bf16::from_f32(float(i))).collect::<Vec<bf16>>()),
        DType::F16 => Buffer::from_vec(of.map(|i| f16::from_f32(float(i))).collect::<Vec<f16>>()),
        DType::I32 => Buffer::from_vec(of.map(|i| word(i) as i32).collect::<Vec<i32>>()),
        DType::I64 => Buffer::from_vec(of.map(|i| word(i) as i64).collect::<Vec<i64>>()),
        _ => Buffer::from_vec(of.map(|i| word(i) as u8).collect::<Vec<u8>>()),
    }
}

/// One collective of every kind and both forms of an all-reduce, on buffers that `to` makes of host memory; in order, what each gives.
fn all_kinds(
    world: &Group,
    dtype: DType,
    count: usize,
    to: &dyn Fn(Buffer) -> Buffer,
) -> Result<Vec<Buffer>, CommError> {
    let (rank, n) = (world.rank(), world.size());
    let mine = |count: usize, salt: usize| to(values(dtype, count, 31 * rank + salt));
    let room = |count: usize| to(Buffer::zeros(dtype, count));
    let mut results = Vec::new();
    for op in ReduceOp::ALL {
        results.push(world.all_reduce(mine(count, 1), op)?);
        results.push(world.all_reduce_into(mine(count, 2), room(count), op)?);
        results.push(world.reduce_scatter(mine(n * count, 3), room(count), op)?);
    }
    results.push(world.all_gather(mine(count, 4), room(n * count))?);
    results.push(world.broadcast(mine(count, 5), n - 1)?);
    results.push(world.all_to_all(mine(n * count, 6), room(n * count), &vec![count; n], &vec![count; n])?);
    // Rank a sends b + 2a elements to rank b.
    let sends: Vec<usize> = (0..n).map(|to| to + 2 * rank).collect();
    let receives: Vec<usize> = (0..n).map(|from| rank + 2 * from).collect();
    let [sent, received] = [&sends, &receives].map(|counts| counts.iter().sum());
    results.push(world.all_to_all(mine(sent, 7), room(received), &sends, &receives)?);
    if n > 1 {
        // Around the ring, both messages in flight at once; a slice is sent.
        let sent = mine(count + 1, 8).slice(1..count + 1)?;
        let going = world.start_send(sent, (rank + 1) % n, 1)?;
        results.push(world.recv(room(count), (rank + n - 1) % n, 1)?);
        results.push(going.wait()?);
    }
    world.barrier()?;
    Ok(results)
}

#[test]
fn every_collective_has_the_bits_of_host_memory() {
    for (n, seed) in [(1, 0), (2, 1), (3, 2), (5, 3)] {
        for own in [false, true] {
            let Some(shared) = driver(Order::Seeded(seed)) else { return };
            let ran = thread::run(n, Options::default(), |world| {
                let own = if own { driver(Order::Seeded(seed + world.rank() as u64)) } else { None };
                let device = device(own.unwrap_or_else(|| shared.clone()));
                for dtype in DTYPES {
                    for count in [0, 1, 65, 700] {
                        let want = all_kinds(&world, dtype, count, &|host| host)?;
                        let got = all_kinds(&world, dtype, count, &|host| device.upload(&host).unwrap())?;
                        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                            let got = device.download(got).unwrap();
                            let same = got.as_bytes()? == want.as_bytes()?;
                            assert!(same, "{n} ranks, {dtype}, {count} elements: result {at} of rank {}", world.rank());
                        }
                    }
                }
                Ok::<_, CommError>(())
            });
            ran.unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

/// More sets of buffers than tables of addresses are kept: the oldest table is written anew, behind the reductions that read it.
#[test]
fn tables_of_addresses_are_bounded() {
    const SETS: usize = 2500;
    let Some(emulated) = emulator(Order::Seeded(9)) else { return };
    let held = thread::run(2, Options::default(), |world| {
        let device = device(emulated.clone());
        // All live at once, so that no two have one address.
        let buffers: Vec<Buffer> = (0..SETS)
            .map(|at| device.upload(&Buffer::from_vec(vec![(at * (world.rank() + 1)) as i32])).unwrap())
            .collect();
        world.barrier()?;
        let before = emulated.held();
        world.barrier()?;
        let sums = buffers.into_iter().map(|x| world.all_reduce(x, ReduceOp::Sum)).collect::<Result<Vec<_>, _>>()?;
        for (at, sum) in sums.iter().enumerate() {
            assert_eq!(device.download(sum).unwrap().as_slice::<i32>()?, [3 * at as i32]);
        }
        world.barrier()?;
        let held = emulated.held() - before;
        world.barrier()?; // the others still have their buffers
        Ok::<_, CommError>(held)
    });
    let held = held.unwrap_or_else(|error| panic!("{error}"));
    assert!(held.iter().all(|&bytes| bytes <= 2 * 1024 * 256), "{held:?} bytes of tables");
}

/// What goes wrong between ranks, by name.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Operation,
    Count,
    DType,
    Memory,
    Left,
    Panicked,
    Stalled,
}

#[test]
fn faults_are_named_on_every_rank_and_nothing_hangs() {
    let wrongs =
        [Wrong::Operation, Wrong::Count, Wrong::DType, Wrong::Memory, Wrong::Left, Wrong::Panicked, Wrong::Stalled];
    for wrong in wrongs {
        let Some(shared) = driver(Order::Seeded(1)) else { return };
        let (start, timeout) =
            (Instant::now(), Duration::from_millis(if let Wrong::Stalled = wrong { 300 } else { 600_000 }));
        let failed = thread::run(3, Options { timeout }, |world| {
            let device = device(shared.clone());
            let buffer = |dtype, count| device.upload(&values(dtype, count, world.rank())).unwrap();
            // One that works, so that memory of the device is in use before.
            world.all_reduce(buffer(DType::F32, 90), ReduceOp::Sum)?;
            let right = buffer(DType::F32, 12);
            match wrong {
                _ if world.rank() != 1 => world.all_reduce(right, ReduceOp::Sum).map(drop),
                Wrong::Operation => world.broadcast(right, 0).map(drop),
                Wrong::Count => world.all_reduce(buffer(DType::F32, 13), ReduceOp::Sum).map(drop),
                Wrong::DType => world.all_reduce(buffer(DType::Bf16, 12), ReduceOp::Sum).map(drop),
                Wrong::Memory => world.all_reduce(values(DType::F32, 12, 1), ReduceOp::Sum).map(drop),
                Wrong::Left => Ok(()),
                Wrong::Panicked => panic!("on purpose"),
                Wrong::Stalled => {
                    std::thread::sleep(Duration::from_secs(2));
                    Ok(())
                }
            }
        });
        let error = failed.unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(60), "{wrong:?}");
        assert!(error.ends[0].is_some() && error.ends[2].is_some(), "{wrong:?}: {error}");
        let kind = &error.fault.as_ref().unwrap().kind;
        let named = match (wrong, kind) {
            (Wrong::Operation | Wrong::Count | Wrong::DType, FaultKind::Disagreement { first, second }) => {
                first.0 == 1 || second.0 == 1
            }
            (Wrong::Memory, FaultKind::Device { message, .. }) => message.contains("others in host memory"),
            (Wrong::Left, FaultKind::Gone { rank, .. }) => *rank == 1,
            (Wrong::Panicked, FaultKind::Panicked { rank, .. }) => *rank == 1,
            (Wrong::Stalled, FaultKind::Timeout { rank, .. }) => *rank == 1,
            _ => false,
        };
        assert!(named, "{wrong:?}: {kind}");
    }
}

/// Two ranks of one device on this thread, so that the order of calls is the same in every run.
struct Pair {
    emulator: Arc<Emulator>,
    devices: [Arc<CudaDevice>; 2],
    world: [Arc<dyn Communicator>; 2],
}

impl Pair {
    fn new(order: Order) -> Option<Self> {
        let emulator = emulator(order)?;
        let devices = [(); 2].map(|()| device(emulator.clone()));
        let mut world = thread::world(2, Options::default()).into_iter();
        let world = [(); 2].map(|()| world.next().unwrap());
        Some(Self { emulator, devices, world })
    }

    /// x + 0 on each device, computed there, for x of all `value`s.
    fn computed(&self, value: f32, count: usize) -> [Buffer; 2] {
        [0, 1].map(|rank| {
            let device = &self.devices[rank];
            let x = device.upload(&Buffer::from_vec(vec![value + rank as f32; count])).unwrap();
            let mut sum = device.zeros(DType::F32, count).unwrap();
            device.pointwise().unwrap().add_assign(&mut sum, 0, &x).unwrap();
            sum
        })
    }

    fn start(&self, buffers: [Buffer; 2]) -> [Pending; 2] {
        let mut buffers = buffers.into_iter();
        [0, 1].map(|rank| {
            let group = Group::from(self.world[rank].clone());
            group.start_all_reduce(buffers.next().unwrap(), ReduceOp::Sum).unwrap()
        })
    }
}

const COUNT: usize = 300;

/// A sum of what is computed just before, with which each rank computes just after. The host waits for the rank `first` first.
fn summed(pair: &Pair, first: usize) -> Result<[Vec<f32>; 2], Error> {
    let [a, b] = pair.start(pair.computed(1.0, COUNT));
    let sums = [a.wait()?, b.wait()?];
    let mut results = sums.clone();
    for (rank, sum) in sums.iter().enumerate() {
        results[rank] = pair.devices[rank].zeros(DType::F32, COUNT)?;
        pair.devices[rank].pointwise()?.add_assign(&mut results[rank], 0, sum)?;
    }
    let mut values = [Vec::new(), Vec::new()];
    for rank in [first, 1 - first] {
        values[rank] = pair.devices[rank].download(&results[rank])?.as_slice::<f32>()?.to_vec();
    }
    Ok(values)
}

#[test]
fn each_wait_of_a_collective_that_is_left_out_is_found() {
    let Some(pair) = Pair::new(Order::Seeded(0)) else { return };
    // The waits of the operation follow those of the uploads, in every order the same ones.
    let buffers = pair.computed(1.0, COUNT);
    let before = pair.emulator.waits();
    let [a, b] = pair.start(buffers);
    let carried = pair.emulator.waits();
    let _results = [a.wait().unwrap(), b.wait().unwrap()];
    let after = pair.emulator.waits();
    assert_eq!([carried - before, after - carried], [4, 4], "each rank's stream waits for both, and both for each");
    let found = |nth: u64| {
        (0..40).any(|seed| {
            let pair = Pair::new(Order::Seeded(seed)).unwrap();
            pair.emulator.skip_wait(nth);
            summed(&pair, seed as usize % 2).map_or(true, |sums| sums.iter().flatten().any(|&sum| sum != 3.0))
        })
    };
    assert!(!found(u64::MAX), "without a fault");
    let missed: Vec<u64> = (before..after).filter(|&nth| !found(nth)).collect();
    assert_eq!(missed, [0_u64; 0], "of the waits {before}..{after}");
}

/// Rank 1 starts an operation, does not wait for it, and computes in the memory that it gave: rank 0's sum does not know.
#[test]
fn memory_of_an_operation_is_not_used_again_before_all_have_read_it() {
    let sum = |order: Order, skip: Option<u64>| {
        let pair = Pair::new(order)?;
        if let Some(nth) = skip {
            pair.emulator.skip_wait(nth);
        }
        let [a, b] = pair.start(pair.computed(1.0, COUNT));
        let before = pair.emulator.waits();
        drop(b);
        let kept = a.wait();
        drop(pair.computed(50.0, COUNT));
        let sums = kept.map(|sum| pair.devices[0].download(&sum).unwrap().as_slice::<f32>().unwrap().to_vec());
        let right = sums.is_ok_and(|sums| sums.iter().all(|&sum| sum == 3.0));
        Some((right, before))
    };
    let Some((_, first)) = sum(Order::Seeded(0), None) else { return };
    let runs = |skip| (0..40).filter(|&seed| sum(Order::Seeded(seed), skip).is_some_and(|(right, _)| right)).count();
    assert_eq!(runs(None), 40);
    // Rank 0 waits for both streams, then what rank 1 left does: `first + 2` and `first + 3`.
    let early = (first..first + 4).map(|nth| runs(Some(nth))).collect::<Vec<_>>();
    assert!(early[2..].iter().any(|&right| right < 40), "an early free is found: {early:?}");
}

/// The host queues computation, a sum over ranks and more computation without waiting for the device; and the device may do the sum before, amid and
/// after the computation that does not depend on it.
#[test]
fn collectives_overlap_computation_and_the_host_does_not_wait() {
    let place = |seed: u64| {
        let pair = Pair::new(Order::Seeded(seed))?;
        pair.emulator.note_launches();
        let waited = pair.emulator.host_waits();
        let pending = pair.start(pair.computed(1.0, COUNT));
        let queued = pair.emulator.queued();
        let mut other = pair.devices[0].zeros(DType::F32, COUNT).unwrap();
        let one = pair.devices[0].upload(&Buffer::from_vec(vec![1.0_f32; COUNT])).unwrap();
        for _ in 0..8 {
            pair.devices[0].pointwise().unwrap().add_assign(&mut other, 0, &one).unwrap();
        }
        let sums = pending.map(|pending| pending.wait().unwrap());
        assert_eq!(pair.emulator.host_waits(), waited, "the host waits in downloads alone");
        assert_eq!(pair.devices[0].download(&sums[0]).unwrap().as_slice::<f32>().unwrap(), [3.0; COUNT]);
        assert_eq!(pair.devices[0].download(&other).unwrap().as_slice::<f32>().unwrap(), [8.0; COUNT]);
        let launches = pair.emulator.launches();
        let first = launches.iter().position(|(_, kernel)| *kernel == "reduce_sum_f32")?;
        let computed = launches[first..].iter().filter(|(_, kernel)| *kernel == "add_assign").count();
        Some((queued, computed))
    };
    let Some(places) = (0..60).map(place).collect::<Option<Vec<_>>>() else { return };
    assert!(places.iter().any(|(queued, _)| *queued > 8), "it is queued while what it reads is queued: {places:?}");
    for (when, wanted) in [("before", 8..9), ("amid", 1..8), ("after", 0..1)] {
        assert!(places.iter().any(|(_, computed)| wanted.contains(computed)), "{when} the computation: {places:?}");
    }
}
