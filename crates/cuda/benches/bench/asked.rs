//! The arguments of a benchmark of devices, and the devices that they name.

use meshwork_cuda::Driver;
use std::error::Error as AnyError;
use std::sync::Arc;

/// What a benchmark was asked for.
pub struct Asked {
    /// Everything once, on a few rows.
    pub small: bool,
    device: Option<String>,
    rest: Vec<String>,
}

impl Asked {
    /// The arguments of this process. Without `--bench`, which cargo gives, everything is small.
    pub fn of_process() -> Self {
        let mut asked = Self { small: false, device: None, rest: std::env::args().skip(1).collect() };
        asked.small = !asked.flag("--bench") | asked.flag("--small");
        asked.device = asked.value("--device");
        asked
    }

    fn flag(&mut self, name: &str) -> bool {
        self.rest.iter().position(|arg| arg == name).map(|at| self.rest.remove(at)).is_some()
    }

    /// What follows a flag.
    pub fn value(&mut self, flag: &str) -> Option<String> {
        let at = self.rest.iter().position(|arg| arg == flag).filter(|at| at + 1 < self.rest.len())?;
        self.rest.drain(at..at + 2).nth(1)
    }

    /// Whether a name has every word that was given.
    pub fn wants(&self, name: &str) -> bool {
        self.rest.iter().filter(|arg| !arg.starts_with('-')).all(|word| name.contains(word.as_str()))
    }

    /// Opens `count` devices, each with memory of its own. GPUs count from the one that was named, or from the first;
    /// without `count` it opens all of them. It opens emulated devices, two without `count`, if they were named, or if
    /// the sizes are small and there is no GPU. A build without both gets none, and a line that says why.
    pub fn drivers(&self, count: Option<usize>) -> Result<Vec<Arc<dyn Driver>>, Box<dyn AnyError>> {
        let name = self.device.as_deref();
        #[cfg(feature = "cuda")]
        if name.is_none_or(|name| name.starts_with("cuda") && name != "cuda-emulated") {
            let first: usize = name.and_then(|name| name.strip_prefix("cuda:")).map_or(Ok(0), str::parse)?;
            let kernels = meshwork_cuda::cache::folder();
            let open =
                |number| meshwork_cuda::Gpu::open(number, &kernels, meshwork_cuda::device::Products::OfTheLibrary);
            let last = count.map_or_else(meshwork_cuda::gpu::count, |count| Ok(first + count));
            let opened = last.and_then(|last| (first..last).map(|number| open(number).map(shared)).collect());
            match opened {
                Ok(gpus) => return Ok(gpus),
                Err(error) if name.is_none() && self.small => eprintln!("{error}"),
                Err(error) => return Err(error.into()),
            }
        }
        #[cfg(feature = "emulator")]
        if name.is_none_or(|name| name == "cuda-emulated") {
            let host = meshwork_cuda::emulator::Host::new(&meshwork_cuda::cache::folder())?;
            let (order, count) = (meshwork_cuda::Order::AsQueued, count.unwrap_or(2));
            let machine = meshwork_cuda::Emulator::machine(host.into(), 1 << 46, order, count, |_, _| false);
            return Ok(machine.into_iter().map(shared).collect());
        }
        eprintln!("SKIPPED: {}: no such device without the features cuda and emulator", name.unwrap_or("cuda"));
        Ok(Vec::new())
    }
}

#[cfg(any(feature = "cuda", feature = "emulator"))]
fn shared(driver: impl Driver) -> Arc<dyn Driver> {
    Arc::new(driver)
}
