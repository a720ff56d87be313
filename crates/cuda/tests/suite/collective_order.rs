//! Collectives in any order of streams, on one device and between devices: waits that are left out, memory that is used
//! again, overlap.

use crate::collectives::device;
use crate::{emulator, machine};
use meshwork_core::comm::FaultKind;
use meshwork_core::comm::thread::{self, Options};
use meshwork_core::{Buffer, CommError, Communicator, DType, Group, Pending, ReduceOp, World};
use meshwork_cuda::{CudaDevice, Emulator, Order};
use meshwork_tensor::{Device, Error};
use std::sync::Arc;

/// More sets of buffers than tables of addresses are kept: the oldest table is written anew, behind the reductions that
/// read it.
#[test]
fn tables_of_addresses_are_bounded() {
    const SETS: usize = 2500;
    let Some(emulated) = emulator(Order::Seeded(9)) else { return };
    let held = World::Threads(2).run(|world| {
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

/// Devices that no work of each other reaches end the operation on every rank.
#[test]
fn devices_of_two_machines_are_refused() {
    let Some(_) = emulator(Order::AsQueued) else { return };
    let failed = World::Threads(2).run(|world| {
        let device = device(emulator(Order::Seeded(world.rank() as u64)).unwrap());
        let x = device.upload(&Buffer::from_vec(vec![1.0_f32; 9])).unwrap();
        world.all_reduce(x, ReduceOp::Sum).map(drop)
    });
    let error = failed.unwrap_err();
    assert!(error.ends.iter().all(Option::is_some), "{error}");
    let Some(FaultKind::Device { message, .. }) = error.fault.as_ref().map(|fault| &fault.kind) else {
        panic!("{error}");
    };
    assert!(message.contains("they are devices of different machines or drivers"), "{message}");
}

/// Where two ranks are.
#[derive(Clone, Copy, Debug)]
enum Where {
    OneDevice,
    Peers,
    /// On two devices, whose memory copies alone reach.
    Apart,
}

const EVERYWHERE: [Where; 3] = [Where::OneDevice, Where::Peers, Where::Apart];

/// Two ranks on this thread, so that the order of calls is the same in every run.
struct Pair {
    /// A device of the machine.
    emulator: Arc<Emulator>,
    devices: [Arc<CudaDevice>; 2],
    world: [Arc<dyn Communicator>; 2],
}

impl Pair {
    fn new(place: Where, order: Order) -> Option<Self> {
        let emulators = match place {
            Where::OneDevice => machine(order, 1, |_, _| true)?,
            Where::Peers => machine(order, 2, |_, _| true)?,
            Where::Apart => machine(order, 2, |_, _| false)?,
        };
        let devices = [0, 1].map(|rank| device(emulators[rank % emulators.len()].clone()));
        let emulator = emulators[0].clone();
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

/// A sum of what is computed just before, with which each rank computes just after. The host waits for the rank `first`
/// first.
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
    EVERYWHERE.into_iter().for_each(each_wait_is_found);
}

fn each_wait_is_found(place: Where) {
    let Some(pair) = Pair::new(place, Order::Seeded(0)) else { return };
    // The waits of the operation follow those of the uploads, in every order the same ones.
    let buffers = pair.computed(1.0, COUNT);
    let before = pair.emulator.waits();
    let [a, b] = pair.start(buffers);
    let carried = pair.emulator.waits();
    let _results = [a.wait().unwrap(), b.wait().unwrap()];
    let after = pair.emulator.waits();
    // Rank 0's stream waits for both ranks, rank 1's stream for it, and it for rank 1's; each rank for one event.
    assert_eq!([carried - before, after - carried], [4, 2]);
    let found = |nth: u64| {
        (0..40).any(|seed| {
            let pair = Pair::new(place, Order::Seeded(seed)).unwrap();
            pair.emulator.skip_wait(nth);
            summed(&pair, seed as usize % 2).map_or(true, |sums| sums.iter().flatten().any(|&sum| sum != 3.0))
        })
    };
    assert!(!found(u64::MAX), "{place:?}: without a fault");
    let missed: Vec<u64> = (before..after).filter(|&nth| !found(nth)).collect();
    assert_eq!(missed, [0_u64; 0], "{place:?}: of the waits {before}..{after}");
}

/// One stream joins the ranks and one event tells them of it: the waits grow with the ranks, not with their pairs.
#[test]
fn waits_of_a_collective_grow_with_its_ranks() {
    for (n, devices) in [(2, 1), (4, 1), (8, 1), (8, 8)] {
        let Some(machine) = machine(Order::Seeded(3), devices, |_, _| true) else { return };
        let devices: Vec<_> = (0..n).map(|rank| device(machine[rank % machine.len()].clone())).collect();
        let groups: Vec<_> = thread::world(n, Options::default()).into_iter().map(Group::from).collect();
        let sum = || -> Vec<Buffer> {
            let ranks = || groups.iter().zip(&devices);
            let x = ranks().map(|(_, device)| device.upload(&Buffer::from_vec(vec![1.0_f32; 1 << 13])).unwrap());
            let x: Vec<_> = x.collect();
            let before = machine[0].calls();
            let pending = ranks().zip(x).map(|((group, _), x)| group.start_all_reduce(x, ReduceOp::Sum).unwrap());
            let pending: Vec<Pending> = pending.collect();
            let sums = pending.into_iter().map(|pending| pending.wait().unwrap()).collect();
            let after = machine[0].calls();
            let [waits, records] = ["wait", "record"].map(|call| after[call] - before[call]);
            println!("{n} ranks on {} devices: {waits} waits, {records} events", machine.len());
            assert_eq!([waits, records], [4 * n as u64 - 2, 2 * n as u64 + 1]);
            sums
        };
        for (sum, device) in sum().iter().zip(&devices) {
            assert_eq!(device.download(sum).unwrap().as_slice::<f32>().unwrap(), [n as f32; 1 << 13]);
        }
    }
}

/// Rank 1 starts an operation, does not wait for it, and computes in the memory that it gave: rank 0's sum does not
/// know.
#[test]
fn memory_of_an_operation_is_not_used_again_before_all_have_read_it() {
    EVERYWHERE.into_iter().for_each(memory_is_not_used_again);
}

fn memory_is_not_used_again(place: Where) {
    let sum = |order: Order, skip: Option<u64>| {
        let pair = Pair::new(place, order)?;
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

/// The host queues computation, a sum over ranks and more computation without waiting for the device; and the device
/// may do the sum before, amid and after the computation that does not depend on it.
#[test]
fn collectives_overlap_computation_and_the_host_does_not_wait() {
    EVERYWHERE.into_iter().for_each(overlap);
}

fn overlap(of: Where) {
    let place = |seed: u64| {
        let pair = Pair::new(of, Order::Seeded(seed))?;
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
    assert!(places.iter().any(|(queued, _)| *queued > 8), "{of:?}: it is queued while what it reads is: {places:?}");
    for (when, wanted) in [("before", 8..9), ("amid", 1..8), ("after", 0..1)] {
        assert!(
            places.iter().any(|(_, computed)| wanted.contains(computed)),
            "{of:?}: {when} the computation: {places:?}"
        );
    }
}
