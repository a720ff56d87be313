//! Collectives on the memory of devices, of one and of several, against those of the same ranks in host memory; and
//! faults.

use crate::drivers;
use half::{bf16, f16};
use meshwork_core::comm::FaultKind;
use meshwork_core::comm::thread::Options;
use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp, World};
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Driver, Order};
use meshwork_tensor::Device;
use meshwork_testkit::Sampled;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const DTYPES: [DType; 7] = [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32, DType::I64, DType::U8];

/// A device over a driver, with the CPU's products.
pub fn device(driver: Arc<dyn Driver>) -> Arc<CudaDevice> {
    Arc::new(CudaDevice::new(driver, Products::OfTheCpu).unwrap())
}

/// Numbers of many sizes and both signs, the same for the same `seed`; integers also near the ends.
pub fn values(dtype: DType, count: usize, seed: usize) -> Buffer {
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

/// One collective of every kind and both forms of an all-reduce, on buffers that `to` makes of host memory; in order,
/// what each gives.
pub fn all_kinds(
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

/// Ranks on one device, and in turn on two or three: peers, none, and some.
#[test]
fn every_collective_has_the_bits_of_host_memory() {
    let all: fn(usize, usize) -> bool = |_, _| true;
    for (n, seed, devices, peers) in [
        (1, 0, 1, all),
        (2, 1, 1, all),
        (3, 2, 1, all),
        (5, 3, 1, all),
        (2, 4, 2, all),
        (3, 5, 3, all),
        (5, 6, 3, all),
        (2, 7, 2, |_, _| false),
        (3, 8, 3, |_, _| false),
        (5, 9, 3, |one, other| one + other == 1),
    ] {
        let Some(drivers) = drivers(Order::Seeded(seed), devices, peers) else { return };
        let ran = World::Threads(n).run(|world| {
            let device = device(drivers[world.rank() % devices].clone());
            for (turn, dtype) in DTYPES.into_iter().enumerate() {
                for count in [0, 65, 1, 700].into_iter().sampled_in_turn(2, turn + n) {
                    let want = all_kinds(&world, dtype, count, &|host| host)?;
                    let got = all_kinds(&world, dtype, count, &|host| device.upload(&host).unwrap())?;
                    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                        let got = device.download(got).unwrap();
                        let same = got.as_bytes()? == want.as_bytes()?;
                        let which = format!("result {at} of rank {}", world.rank());
                        assert!(same, "{n} ranks, {devices} devices, {dtype}, {count} elements: {which}");
                    }
                }
            }
            Ok::<_, CommError>(())
        });
        ran.unwrap_or_else(|error| panic!("{n} ranks, {devices} devices: {error}"));
    }
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
    for (wrong, devices) in wrongs.into_iter().flat_map(|wrong| [(wrong, 1), (wrong, 2)]) {
        let Some(drivers) = drivers(Order::Seeded(1), devices, |_, _| true) else { return };
        let devices_of: Vec<_> = (0..3).map(|rank| device(drivers[rank % devices].clone())).collect();
        // Everything that is slow the first time is done, and memory of the device is in use before.
        let warmed = World::Threads(3).run(|world| {
            let buffer = devices_of[world.rank()].upload(&values(DType::F32, 90, world.rank())).unwrap();
            world.all_reduce(buffer, ReduceOp::Sum).map(drop)
        });
        warmed.unwrap_or_else(|error| panic!("{wrong:?}: {error}"));
        let (start, timeout) = (Instant::now(), Duration::from_secs(if let Wrong::Stalled = wrong { 1 } else { 600 }));
        // The rank that stalls sleeps until the others have ended.
        let ended = Mutex::new([false; 3]);
        let failed = World::Threads(3).run_with(Options { timeout }, |world| {
            let device = &devices_of[world.rank()];
            let buffer = |dtype, count| device.upload(&values(dtype, count, world.rank())).unwrap();
            let right = buffer(DType::F32, 12);
            let result = match wrong {
                _ if world.rank() != 1 => world.all_reduce(right, ReduceOp::Sum).map(drop),
                Wrong::Operation => world.broadcast(right, 0).map(drop),
                Wrong::Count => world.all_reduce(buffer(DType::F32, 13), ReduceOp::Sum).map(drop),
                Wrong::DType => world.all_reduce(buffer(DType::Bf16, 12), ReduceOp::Sum).map(drop),
                Wrong::Memory => world.all_reduce(values(DType::F32, 12, 1), ReduceOp::Sum).map(drop),
                Wrong::Left => Ok(()),
                Wrong::Panicked => panic!("on purpose"),
                Wrong::Stalled => {
                    while start.elapsed() < Duration::from_secs(50) && *ended.lock().unwrap() != [true, false, true] {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    Ok(())
                }
            };
            ended.lock().unwrap()[world.rank()] = true;
            result
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
