//! Collectives over NCCL: the suite of every backend on memory of devices, the bits of ranks in threads with the tree,
//! and faults. Also on GPUs, and on the stand-in for NVIDIA's libraries.

use crate::apart as devices;
use crate::collectives::{DTYPES, all_kinds, device};
use meshwork_core::comm::thread::Options;
use meshwork_core::comm::{Call, Decorator, OpKind, Pending, PendingOp};
use meshwork_core::{Buffer, CommError, Communicator, Group, ReductionOrder, RunError, World};
use meshwork_cuda::device::{Products, Reduction};
use meshwork_cuda::{CudaDevice, Driver, Order, Replaying};
use meshwork_tensor::{Device, Error};
use meshwork_testkit::comm::{Body, Worlds, conformance_of};
use std::sync::Arc;
use std::time::Duration;

/// The device of a rank, and the world over NCCL.
pub fn joined(
    world: &Group,
    devices: &[Arc<dyn Driver>],
    how: Reduction,
) -> Result<(Arc<CudaDevice>, Group), CommError> {
    let device = device(devices[world.rank()].clone());
    let group = Group::from(device.nccl(world.communicator().clone(), how)?);
    Ok((device, group))
}

#[test]
fn the_tree_has_the_bits_of_threads() {
    for (n, seed) in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)] {
        let Some(devices) = devices(Order::Seeded(seed), n) else { return };
        let ran = World::Threads(n).run(|world| {
            let (device, group) = joined(&world, &devices, Reduction::Tree)?;
            assert_eq!(group.reduction_order(), ReductionOrder::BalancedTree);
            for (dtype, count) in DTYPES.into_iter().flat_map(|dtype| [0, 1, 65].map(|count| (dtype, count))) {
                let want = all_kinds(&world, dtype, count, &|host| host)?;
                let got = all_kinds(&group, dtype, count, &|host| device.upload(&host).unwrap())?;
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    let got = device.download(got).unwrap();
                    let same = got.as_bytes()? == want.as_bytes()?;
                    assert!(same, "result {at} of rank {} of {n}: {dtype}, {count} elements", world.rank());
                }
            }
            Ok::<_, CommError>(())
        });
        ran.unwrap_or_else(|error| panic!("{n} ranks: {error}"));
    }
}

/// A group whose operations on host memory are done on a device.
#[derive(Debug)]
pub struct OnDevice {
    pub inner: Arc<dyn Communicator>,
    pub device: Arc<CudaDevice>,
}

/// An operation whose result comes back to the host; a sent buffer does not.
struct Fetched {
    inner: Pending,
    device: Arc<CudaDevice>,
    sent: Option<Buffer>,
}

impl Decorator for OnDevice {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn pass(&self, call: Call) -> Result<Pending, CommError> {
        if call.input.is_none() && call.output.is_none() {
            return self.inner.start(call);
        }
        let sent = if call.op.kind() == OpKind::Send { call.input.clone() } else { None };
        let upload = |buffer: Option<Buffer>| buffer.map(|buffer| self.device.upload(&buffer).unwrap());
        let inner = self.inner.start(Call { input: upload(call.input), output: upload(call.output), ..call })?;
        Ok(Pending::new(Fetched { inner, device: self.device.clone(), sent }))
    }

    fn around(&self, part: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(OnDevice { inner: part, device: self.device.clone() })
    }
}

impl PendingOp for Fetched {
    fn wait(self: Box<Self>) -> Result<Buffer, CommError> {
        let done = self.inner.wait()?;
        match self.sent.map_or_else(|| self.device.download(&done), Ok) {
            Err(Error::Comm(fault)) => Err(*fault),
            done => Ok(done.unwrap()),
        }
    }

    fn is_done(&self) -> bool {
        self.inner.is_done()
    }
}

/// Worlds of threads that meet over NCCL, with repeated work as graphs or without.
struct OverNccl {
    how: Reduction,
    graphs: bool,
}

impl Worlds for OverNccl {
    fn most(&self) -> usize {
        4
    }

    fn programs(&self) -> u64 {
        20
    }

    fn short(&self) -> Duration {
        Duration::from_millis(500)
    }

    fn joined(&self) -> &str {
        "last in world #3 barrier()"
    }

    fn run(&self, ranks: usize, timeout: Duration, body: &Body<'_>) -> Option<Result<(), RunError>> {
        let devices = devices(Order::Seeded(ranks as u64), ranks)?;
        // Making a device takes longer than the shortest timeout allows.
        let devices = devices.into_iter().map(|device| {
            let driver: Arc<dyn Driver> = device;
            let driver = if self.graphs { Arc::new(Replaying::new(driver)) } else { driver };
            Arc::new(CudaDevice::new(driver, Products::OfTheCpu).unwrap())
        });
        let devices: Vec<_> = devices.collect();
        let ran = World::Threads(ranks).run_with(Options { timeout }, |world| {
            let device = devices[world.rank()].clone();
            let inner = device.nccl(world.communicator().clone(), self.how)?;
            // A rank that fails at once would stop others before they have joined.
            world.barrier()?;
            body(Group::from(Arc::new(OnDevice { inner, device }) as Arc<dyn Communicator>))
        });
        Some(ran.map(drop))
    }

    fn world(&self, _: usize, _: Duration) -> Option<World> {
        None
    }
}

#[test]
fn nccl_passes_the_suite_of_communicators() {
    conformance_of("results", &OverNccl { how: Reduction::Library, graphs: false });
    conformance_of("flight", &OverNccl { how: Reduction::Tree, graphs: true });
    conformance_of("faults", &OverNccl { how: Reduction::Library, graphs: false });
}
