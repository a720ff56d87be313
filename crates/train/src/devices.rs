//! The devices of a run, one for each rank.

#[cfg(any(feature = "cuda", feature = "emulator"))]
use crate::config::ReductionName;
use crate::config::{Config, Device as Where, Fault};
use meshwork_core::Communicator;
use meshwork_core::comm::record;
use meshwork_cpu::Cpu;
#[cfg(any(feature = "cuda", feature = "emulator"))]
use meshwork_cuda::device::Reduction;
use meshwork_tensor::{Device, Error, Precision};
use std::fmt;
use std::sync::Arc;

/// Ranks of the largest group whose members send each other messages over NCCL.
#[cfg(any(feature = "cuda", feature = "emulator"))]
pub(crate) use meshwork_cuda::device::MOST_LINKED;
/// No device to send them from.
#[cfg(not(any(feature = "cuda", feature = "emulator")))]
pub(crate) const MOST_LINKED: usize = 0;

/// Opens a device for each rank.
#[derive(Clone)]
pub struct Devices(DeviceKind);

#[derive(Clone)]
enum DeviceKind {
    Cpu(Precision),
    Own(Arc<Own>),
    /// And how elements are reduced between processes; `None` of ranks that are threads of one.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    Cuda(Arc<cuda::Open>, Option<Reduction>),
}

type Own = dyn Fn(Arc<dyn Communicator>) -> Result<RankDevice, Error> + Send + Sync;

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.0 {
            DeviceKind::Cpu(_) => "Devices(cpu)",
            DeviceKind::Own(_) => "Devices(own)",
            #[cfg(any(feature = "cuda", feature = "emulator"))]
            DeviceKind::Cuda(..) => "Devices(cuda)",
        })
    }
}

/// The device and the communicator of one rank.
#[derive(Clone, Debug)]
pub struct RankDevice {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The communicator of the world.
    pub world: Arc<dyn Communicator>,
}

impl Devices {
    /// The threads of this process.
    pub fn cpu(precision: Precision) -> Self {
        Self(DeviceKind::Cpu(precision))
    }

    /// The devices of a configuration.
    ///
    /// # Errors
    /// A device that is not there: no driver, no such GPU, no compiler for the emulator.
    pub fn open(config: &Config) -> Result<Self, Error> {
        #[cfg(any(feature = "cuda", feature = "emulator"))]
        if let Some(open) = cuda::open(config)? {
            let between = config.comm.launch.as_ref().map(|_| match config.comm.reduction {
                ReductionName::Tree => Reduction::Tree,
                ReductionName::Native => Reduction::Library,
            });
            return Ok(Self(DeviceKind::Cuda(open, between)));
        }
        Ok(Self::cpu(config.training.matmul_dtype.precision()))
    }

    /// Devices of your own: `open` makes the device of a rank, and wraps its communicator where the device needs that.
    pub fn own(open: impl Fn(Arc<dyn Communicator>) -> Result<RankDevice, Error> + Send + Sync + 'static) -> Self {
        Self(DeviceKind::Own(Arc::new(open)))
    }

    /// Devices that `open` makes, by the rank's number among those of its host.
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    pub fn cuda(open: impl Fn(usize) -> Result<Arc<meshwork_cuda::CudaDevice>, Error> + Send + Sync + 'static) -> Self {
        Self(DeviceKind::Cuda(Arc::new(open), None))
    }

    /// The device of one rank, with the communicator `world`. Collective, for devices of which a host has several: the
    /// ranks of a host share them out. Between GPUs of several processes the communicator is over NCCL, and `world`
    /// carries everything else.
    ///
    /// # Errors
    /// A device that refuses to open.
    pub fn rank(&self, world: Arc<dyn Communicator>) -> Result<RankDevice, Error> {
        match &self.0 {
            DeviceKind::Cpu(precision) => Ok(RankDevice { device: Arc::new(Cpu::new(*precision)), world }),
            DeviceKind::Own(open) => open(world),
            #[cfg(any(feature = "cuda", feature = "emulator"))]
            DeviceKind::Cuda(open, between) => {
                let device = open(cuda::rank_on_host(&world)?)?;
                let world = between.map_or(Ok(world.clone()), |how| device.nccl(world, how))?;
                Ok(RankDevice { device, world })
            }
        }
    }

    /// The device of rank 0, for work without communication.
    pub fn alone(&self) -> Result<Arc<dyn Device>, Error> {
        match &self.0 {
            DeviceKind::Cpu(precision) => Ok(Arc::new(Cpu::new(*precision))),
            DeviceKind::Own(open) => Ok(open(record::communicator("world", 0, vec![0])?)?.device),
            #[cfg(any(feature = "cuda", feature = "emulator"))]
            DeviceKind::Cuda(open, _) => Ok(open(0)?),
        }
    }
}

/// The fault of a configuration whose device is not there, or lacks a form that the configuration asks for.
pub(crate) fn missing(config: &Config) -> Option<Fault> {
    if let Where::Card(_) = config.device {
        let problem = "is a card to predict for, and none that computes";
        return Some(Fault::new("--device", config.device, problem, "use --steps 0, or --device cuda"));
    }
    let fault = |error| {
        let why = if let Error::Device { fault, .. } = error { fault.to_string() } else { error.to_string() };
        Fault::new("--device", config.device, why, "use cpu")
    };
    match (Devices::open(config), &config.cuda.tuning) {
        (Err(error), _) => Some(fault(error)),
        (Ok(_), None) => None,
        // Which rows of the table count, the device knows.
        (Ok(devices), Some(table)) => devices.alone().err().map(|error| {
            let Fault { problem, .. } = fault(error);
            let valid = "use a table that scripts/gpu-check.sh tune wrote on such a device";
            Fault::new("cuda.tuning", table, problem, valid)
        }),
    }
}

/// The fault of a configuration whose device lacks something that a step needs: an operation, an element type, an
/// update rule. One step of each stage runs on a device without contents; if it lacks nothing and the run has steps,
/// the kernels of the step are compiled.
pub(crate) fn lacking(config: &Config) -> Option<Fault> {
    #[cfg(any(feature = "cuda", feature = "emulator"))]
    return cuda::lacking(config);
    #[cfg(not(any(feature = "cuda", feature = "emulator")))]
    {
        _ = config;
        None
    }
}

#[cfg(any(feature = "cuda", feature = "emulator"))]
mod cuda {
    use super::Fault;
    use crate::config::{Config, Device};
    use meshwork_core::{Axis, Communicator, Group};
    #[cfg(feature = "cuda")]
    use meshwork_cuda::GpuError;
    use meshwork_cuda::device::Products;
    use meshwork_cuda::idle::Idle;
    use meshwork_cuda::{CudaDevice, Driver, Replaying, Tuning};
    use meshwork_engine::dry_run;
    use meshwork_tensor::Error;
    use std::collections::HashMap;
    use std::fs;
    use std::path::Path;
    use std::sync::{Arc, Mutex, PoisonError, Weak};

    /// Opens the device of a rank.
    pub(super) type Open = dyn Fn(usize) -> Result<Arc<CudaDevice>, Error> + Send + Sync;

    /// The drivers that ranks have open, by the number of the device. Ranks on one device share its driver, and so
    /// reach each other's memory.
    #[derive(Debug, Default)]
    struct Drivers(Mutex<HashMap<usize, Weak<dyn Driver>>>);

    impl Drivers {
        fn get(
            &self,
            number: usize,
            open: impl FnOnce() -> Result<Arc<dyn Driver>, Error>,
        ) -> Result<Arc<dyn Driver>, Error> {
            let mut drivers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(driver) = drivers.get(&number).and_then(Weak::upgrade) {
                return Ok(driver);
            }
            let driver = open()?;
            drivers.insert(number, Arc::downgrade(&driver));
            Ok(driver)
        }
    }

    /// The rank's number among the ranks of its host.
    pub(super) fn rank_on_host(world: &Arc<dyn Communicator>) -> Result<usize, Error> {
        // Since its start a host has one such number; containers on it have it too.
        let host = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let hosts = Group::from(world.clone()).all_gather_bytes(&host)?;
        Ok(hosts[..world.rank()].iter().filter(|other| **other == host).count())
    }

    /// The driver as it is, or a driver that queues repeated work as graphs.
    fn graphs(on: bool, driver: impl Driver + 'static) -> Arc<dyn Driver> {
        if on { Arc::new(Replaying::new(Arc::new(driver))) } else { Arc::new(driver) }
    }

    /// Memory of an emulated device: as much as the host has, which is checked elsewhere.
    #[cfg(feature = "emulator")]
    const EMULATED_MEMORY: u64 = 1 << 46;

    fn failed<E: std::error::Error + Send + Sync + 'static>(device: Device) -> impl Fn(E) -> Error {
        move |fault| Error::Device { op: "open", device: device.name().to_owned(), fault: fault.into() }
    }

    /// Canonical numerics have the CPU's order of sums; otherwise the library's products are faster.
    fn products(config: &Config) -> Products {
        if config.reduction_blocks().is_some() { Products::OfTheCpu } else { Products::OfTheLibrary }
    }

    /// Looks for the drivers and libraries that the devices of a configuration need. `None` for other devices.
    pub(super) fn open(config: &Config) -> Result<Option<Arc<Open>>, Error> {
        let (products, precision) = (products(config), config.training.matmul_dtype.precision());
        let (tuning, name) = (config.cuda.tuning.clone(), config.device);
        let device = move |driver: Arc<dyn Driver>| {
            let architecture = driver.properties().architecture.clone();
            let device = CudaDevice::with_precision(driver, products, precision)?;
            let Some(path) = &tuning else { return Ok(Arc::new(device)) };
            let table = Tuning::read(Path::new(path), &architecture).map_err(failed(name))?;
            Ok(Arc::new(device.with_tuning(table)?))
        };
        let (drivers, as_graphs, blocking) = (Drivers::default(), config.cuda.graphs, config.cuda.launch_blocking);
        Ok(Some(match config.device {
            #[cfg(feature = "cuda")]
            Device::Cuda(number) => {
                let failed = failed(config.device);
                let count = meshwork_cuda::gpu::check(number.unwrap_or(0), products).map_err(&failed)?;
                // Rank r of the host is on GPU r: every rank must be able to use its own.
                let ranks = if number.is_some() { 0 } else { config.parallelism.world_size().unwrap_or(1).min(count) };
                for number in 1..ranks {
                    meshwork_cuda::gpu::check(number, products).map_err(&failed)?;
                }
                if config.comm.launch.is_some() {
                    meshwork_cuda::gpu::nccl().map_err(&failed)?;
                    let each = config.comm.ranks_per_process;
                    if number.is_none() && each > count {
                        return Err(failed(GpuError::TooFew { count, ranks: each }));
                    }
                }
                Arc::new(move |rank| {
                    let number = number.unwrap_or(rank % count.max(1));
                    device(drivers.get(number, || {
                        let gpu = meshwork_cuda::Gpu::open(number, &meshwork_cuda::cache::folder(), products);
                        Ok(graphs(as_graphs, gpu.map_err(&failed)?.blocking(blocking)))
                    })?)
                })
            }
            #[cfg(feature = "emulator")]
            Device::CudaEmulated { seed, devices } => {
                let kernels = meshwork_cuda::emulator::Host::new(&meshwork_cuda::cache::folder());
                let kernels = Arc::new(kernels.map_err(failed(config.device))?);
                let order = if blocking { meshwork_cuda::Order::AsQueued } else { meshwork_cuda::Order::Seeded(seed) };
                let mut machine =
                    meshwork_cuda::Emulator::machine(kernels, EMULATED_MEMORY, order, devices, |_, _| true);
                if config.comm.launch.is_some() {
                    machine = machine.into_iter().map(meshwork_cuda::Emulator::among_processes).collect();
                }
                Arc::new(move |rank| {
                    let number = rank % devices;
                    device(drivers.get(number, || Ok(graphs(as_graphs, machine[number].clone())))?)
                })
            }
            _ => return Ok(None),
        }))
    }

    /// Compiles the kernels of a step on a GPU before the run, side by side. An error comes out again at the first use.
    fn prepare(device: Device, idle: &Idle) {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(number) = device {
            let folder = meshwork_cuda::cache::folder();
            _ = meshwork_cuda::gpu::prepare(number.unwrap_or(0), &folder, &idle.used());
        }
        #[cfg(not(feature = "cuda"))]
        let _ = (device, idle);
    }

    pub(super) fn lacking(config: &Config) -> Option<Fault> {
        if config.device == Device::Cpu {
            return None;
        }
        let plan = config.plan().ok()?;
        let (mesh, model) = (&plan.mesh, config.model());
        let first = |rank: &usize| mesh.data_rank(mesh.coords(*rank)) == 0 && mesh.coords(*rank).get(Axis::Tp) == 0;
        (0..mesh.world_size()).filter(first).find_map(|rank| {
            let (idle, precision) =
                (Arc::new(Idle::new(config.device.name())), config.training.matmul_dtype.precision());
            let device = CudaDevice::with_precision(idle.clone(), products(config), precision).ok()?;
            let Err(error) = dry_run::attempt(&model, &plan, rank, Arc::new(device)) else {
                if config.training.steps > 0 {
                    prepare(config.device, &idle);
                }
                return None;
            };
            let lack = error.lack()?;
            let valid =
                "use cpu, or settings that do without it: docs/cuda.md lists the operations that the device has";
            Some(Fault::new("--device", config.device, lack.to_string(), valid))
        })
    }
}
