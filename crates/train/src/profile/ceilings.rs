//! Measured peaks of the machine, with which a profile is compared.

use meshwork_core::{Buffer, DType, pool};
use meshwork_tensor::kernel::Gemm;
use meshwork_tensor::{Device, Error};
use std::convert::Infallible;
use std::time::{Duration, Instant};

/// Measured peaks of the whole machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ceilings {
    /// Floating point operations per second of a matrix product, if the device has any.
    pub flops: Option<f64>,
    /// Bytes per second read and written by a copy that is larger than all caches.
    pub bandwidth: f64,
    /// Threads that copied; `None`: the device, within memory of its own.
    pub threads: Option<usize>,
}

/// The side of the square matrices of the first product. It doubles until the product is large enough.
const FIRST_SIDE: usize = 96;
/// The smallest side at which a product on a CPU is bound by arithmetic, and the largest side that is tried.
const SIDE: usize = 768;
const MOST_SIDE: usize = 6144;
/// Seconds of a product of at least [`SIDE`] that hide the launch of its kernel.
const LONG: f64 = 2e-3;
/// Seconds after which a product of any side is large enough: an emulated device is that slow.
const SLOW: f64 = 0.1;
/// Bytes of source and of target, more than caches hold.
const COPY_BYTES: usize = 64 << 20;
/// Bytes of source and of target in the memory of a device: a GPU has 60 MB of cache.
const DEVICE_COPY_BYTES: usize = 256 << 20;
/// Bytes that a thread copies at a time.
const COPY_PIECE: usize = 1 << 20;
/// Number of tries of each measurement (the best counts), and the time after which no further one starts.
const TRIES: usize = 8;
const ENOUGH: Duration = Duration::from_millis(100);

impl Ceilings {
    /// Measures, on a machine that does nothing else, in less than half a second: the best of several products of two
    /// square matrices by the device itself, in the precision of the run, and of several copies, on all cores or in the
    /// device's own memory.
    pub fn measure(device: &dyn Device) -> Self {
        let (bandwidth, threads) = match device_copy(device) {
            Some(bandwidth) => (bandwidth, None),
            None => (copy(), Some(pool::threads())),
        };
        Self { flops: product(device).ok(), bandwidth, threads }
    }

    /// The least number of seconds that the machine needs for `flops` of matrix work, or for `bytes` if there is none.
    pub fn least_seconds(&self, flops: u64, bytes: u64) -> Option<f64> {
        match flops {
            0 => Some(bytes as f64 / self.bandwidth),
            flops => Some(flops as f64 / self.flops?),
        }
    }
}

fn product(device: &dyn Device) -> Result<f64, Error> {
    let mut side = FIRST_SIDE;
    loop {
        let spec = Gemm::linear(side, side, side);
        // Values that no hardware has a short way for, as it may have for zeros.
        let values: Vec<f32> = (0..side * side).map(|at| (at % 251) as f32 / 251.0 - 0.5).collect();
        let [a, b] = [device.upload(&Buffer::from_slice(&values))?, device.upload(&Buffer::from_slice(&values))?];
        let mut c = device.alloc(DType::F32, side * side)?;
        let seconds = best(TRIES, ENOUGH, || {
            device.matmul()?.gemm(spec, &a, &b, &mut c, 0)?;
            device.synchronize()
        })?;
        if seconds > LONG && side >= SIDE || seconds > SLOW || side >= MOST_SIDE {
            return Ok(spec.flops() as f64 / seconds);
        }
        side *= 2;
    }
}

/// Bytes per second of copies within a device whose memory the host cannot read; `None` for another one, or if it
/// cannot copy so much.
fn device_copy(device: &dyn Device) -> Option<f64> {
    let count = DEVICE_COPY_BYTES / DType::F32.size();
    let source = device.zeros(DType::F32, 1).ok()?;
    if source.as_bytes().is_ok() {
        return None;
    }
    let (source, mut target) = (device.zeros(DType::F32, count).ok()?, device.zeros(DType::F32, count).ok()?);
    let seconds = best(TRIES, ENOUGH, || {
        device.layout()?.copy_into(&source, 0..count, &mut target, 0)?;
        device.synchronize()
    });
    seconds.ok().map(|seconds| 2.0 * DEVICE_COPY_BYTES as f64 / seconds)
}

fn copy() -> f64 {
    let (source, mut target) = (vec![1u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
    let Ok(seconds) = best(TRIES, ENOUGH, || {
        let pieces = source.chunks(COPY_PIECE).zip(target.chunks_mut(COPY_PIECE));
        pool::for_each(pieces, |(from, to)| to.copy_from_slice(from));
        Ok::<_, Infallible>(())
    });
    2.0 * COPY_BYTES as f64 / seconds
}

/// Seconds of the fastest of `tries` runs of `work`, none of which starts later than `enough` after the first. A run
/// before them warms up.
///
/// # Errors
/// The first error of `work`.
pub fn best<E>(tries: usize, enough: Duration, mut work: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    work()?; // touches its memory for the first time
    let began = Instant::now();
    let mut best = f64::INFINITY;
    for _ in 0..tries {
        let start = Instant::now();
        work()?;
        best = best.min(start.elapsed().as_secs_f64());
        if began.elapsed() > enough {
            break;
        }
    }
    Ok(best)
}
