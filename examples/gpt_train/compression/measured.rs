//! The time of compression, measured on this machine.

use meshwork::compress::{CompressError, Compressor, Draws, Fold, PowerSgd, Scheme, Shape, wire_bytes};
use meshwork::core::random;
use meshwork::core::{Buffer, DType};
use meshwork::tensor::{Device, Error};
use meshwork::train::profile::best;
use std::time::Duration;

/// Most elements that are compressed to measure a scheme; the time is scaled for more elements.
const MEASURED: usize = 1 << 20;
/// Number of runs, of which the fastest counts, and the time after which no further run starts.
const TRIES: usize = 5;
const ENOUGH: Duration = Duration::from_millis(20);

/// Seconds to compress and to restore a value: the best of several runs, on this machine.
pub(super) fn measured(device: &dyn Device, scheme: &Scheme, shape: Shape) -> Result<[f64; 2], Error> {
    if *scheme == Scheme::Values(meshwork::compress::Values::F32) || shape.is_empty() {
        return Ok([0.0; 2]);
    }
    // As many whole rows as the limit allows.
    let rows = (MEASURED / shape.cols().max(1)).clamp(1, shape.rows());
    let part = Shape::matrix(rows, shape.cols().min(MEASURED)).map_err(failed)?;
    let share = shape.len() as f64 / part.len() as f64;
    let mut values = vec![0.0_f32; part.len()];
    random::fill_uniform(random::key(0, "the time of compression"), 0, &mut values);
    values.iter_mut().for_each(|value| *value -= 0.5);
    let x = device.upload(&Buffer::from_slice(&values))?;
    let mut message = device.alloc(DType::U8, wire_bytes(scheme, part).map_err(failed)?)?;
    let mut out = device.alloc(DType::F32, part.len())?;
    let kernels = device.compression()?;
    let draws = Draws::new(0, "the time of compression", 0);
    let packed = best(TRIES, ENOUGH, || kernels.pack(scheme, part, draws, &x, &mut message))?;
    let restored = best(TRIES, ENOUGH, || kernels.unpack(scheme, part, &message, Fold::Replace, &mut out))?;
    Ok([packed * share, restored * share])
}

/// Seconds per element in which PowerSGD computes and multiplies the factors of matrices with these columns.
pub(super) fn factoring(device: &dyn Device, of: PowerSgd, cols: usize) -> Result<f64, Error> {
    let rows = (MEASURED / cols.max(1)).clamp(1, cols.max(1));
    let shape = Shape::matrix(rows, cols.max(1)).map_err(failed)?;
    of.check(shape).map_err(failed)?;
    let mut values = vec![0.0_f32; shape.len()];
    random::fill_uniform(random::key(0, "the time of compression"), 0, &mut values);
    let (m, [of_p, of_q]) = (device.upload(&Buffer::from_slice(&values))?, of.factors(shape));
    let (mut p, mut q) = (device.zeros(DType::F32, of_p)?, device.zeros(DType::F32, of_q)?);
    let (mut out, kernels) = (device.alloc(DType::F32, shape.len())?, device.compression()?);
    let draws = Draws::new(0, "the time of compression", 0);
    let seconds = best(TRIES, ENOUGH, || {
        kernels.left_factor(of, shape, draws, &m, [&mut p, &mut q])?;
        kernels.right_factor(of, shape, &m, [&mut p, &mut q])?;
        let factors = [p.clone(), q.clone()];
        kernels.join(of, shape, &factors, 2, &mut out)
    })?;
    Ok(seconds / shape.len() as f64)
}

/// The error of a scheme that cannot compress a value.
pub(super) fn failed(source: CompressError) -> Error {
    Error::Compress { op: "compression", source: Box::new(source) }
}
