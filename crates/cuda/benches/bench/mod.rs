//! What the benchmarks of a device share: their arguments, the device, numbers on it, and the time of a call.

mod asked;

pub use asked::Asked;
use meshwork_core::{Buffer, DType};
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

/// The device that was named; the first GPU, or, of what is small, the emulator where there is none.
pub fn driver(asked: &Asked) -> Result<Option<Arc<dyn Driver>>, Box<dyn AnyError>> {
    Ok(asked.drivers(Some(1))?.pop())
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
