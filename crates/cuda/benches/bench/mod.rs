//! What the benchmarks of a device share: their arguments, the device, numbers on it, and the time of a call.

use meshwork_core::{Buffer, DType};
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Driver};
use meshwork_tensor::{Device, Error};
use std::error::Error as AnyError;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Batches whose median counts, how long one takes at least, and how long all may take.
const BATCHES: usize = 9;
const BATCH: Duration = Duration::from_millis(10);
const BUDGET: Duration = Duration::from_secs(4);

/// Groups of a grouped product.
pub const GROUPS: usize = 8;

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

    /// The device that was named; the first GPU, or, of what is small, the emulator where there is none.
    pub fn driver(&self) -> Result<Option<Arc<dyn Driver>>, Box<dyn AnyError>> {
        let name = self.device.as_deref();
        #[cfg(feature = "cuda")]
        if name.is_none_or(|name| name.starts_with("cuda") && name != "cuda-emulated") {
            let number = name.and_then(|name| name.strip_prefix("cuda:")).map_or(Ok(0), str::parse)?;
            match meshwork_cuda::Gpu::open(number, &meshwork_cuda::cache::folder(), Products::OfTheLibrary) {
                Ok(gpu) => return Ok(Some(Arc::new(gpu))),
                Err(error) if name.is_none() && self.small => eprintln!("{error}"),
                Err(error) => return Err(error.into()),
            }
        }
        #[cfg(feature = "emulator")]
        if name.is_none_or(|name| name == "cuda-emulated") {
            let host = meshwork_cuda::emulator::Host::new(&meshwork_cuda::cache::folder())?;
            return Ok(Some(Arc::new(meshwork_cuda::Emulator::new(
                host.into(),
                1 << 46,
                meshwork_cuda::Order::AsQueued,
            ))));
        }
        eprintln!("SKIPPED: {}: no such device without the features cuda and emulator", name.unwrap_or("cuda"));
        Ok(None)
    }
}

/// Median seconds of a call.
pub fn median(device: &CudaDevice, call: &mut dyn FnMut() -> Result<(), Error>, once: bool) -> Result<f64, Error> {
    let mut batch = |calls: usize| {
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        device.synchronize()?;
        Ok::<_, Error>(start.elapsed().as_secs_f64().max(1e-9))
    };
    let first = batch(1)?; // compiles its kernels
    if once {
        return Ok(first);
    }
    let calls = (BATCH.as_secs_f64() / batch(1)?).ceil().clamp(1.0, 1e4) as usize;
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.len() < BATCHES && (times.is_empty() || begun.elapsed() < BUDGET) {
        times.push(batch(calls)? / calls as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Numbers between -0.5 and 0.5, on the device.
pub fn numbers(device: &CudaDevice, count: usize, dtype: DType) -> Result<Buffer, Error> {
    const PATTERN: usize = 1 << 20;
    let number = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 12) & 0xffff) as f32 / 65_536.0 - 0.5;
    let pattern: Vec<f32> = (0..PATTERN.min(count)).map(number).collect();
    let pattern = device.upload(&Buffer::from_slice(&pattern))?;
    let pattern = if dtype == DType::F32 { pattern } else { device.pointwise()?.cast(&pattern, dtype)? };
    let mut all = device.alloc(dtype, count)?;
    for at in (0..count).step_by(PATTERN) {
        device.layout()?.copy_into(&pattern, 0..PATTERN.min(count - at), &mut all, at)?;
    }
    Ok(all)
}

/// The sizes of [`GROUPS`] groups that share `m` rows, in ascending order: the uneven load of experts.
pub fn uneven(m: usize) -> Vec<usize> {
    let ends = (0..=GROUPS).map(|group| m * group * (group + 3) / (GROUPS * (GROUPS + 3)));
    let ends: Vec<usize> = ends.collect();
    ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
}
