//! Measured peaks of the machine, with which a profile is compared.

use meshwork_core::{Buffer, DType, pool};
use meshwork_tensor::kernel::Gemm;
use meshwork_tensor::{Device, Error};
use std::time::{Duration, Instant};

/// Measured peaks of the whole machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Ceilings {
    /// Floating point operations per second of a matrix product, if the device has any.
    pub flops: Option<f64>,
    /// Bytes per second read and written by a copy that is larger than all caches.
    pub bandwidth: f64,
    /// Threads that copied.
    pub threads: usize,
}

/// Rows, columns and sums of the product: large enough to be bound by arithmetic, small enough to be done in an instant.
const SIDE: usize = 768;
/// Bytes of source and of target, more than caches hold.
const COPY_BYTES: usize = 64 << 20;
/// Bytes that a thread copies at a time.
const COPY_PIECE: usize = 1 << 20;
/// Number of tries of each measurement (the best counts), and the time after which no further one starts.
const TRIES: usize = 8;
const ENOUGH: Duration = Duration::from_millis(100);

impl Ceilings {
    /// Measures, on a machine that does nothing else, in less than half a second: the best of several products of two
    /// square matrices by the device itself, in the precision of the run, and of several copies on all cores.
    pub fn measure(device: &dyn Device) -> Self {
        Self { flops: product(device).ok(), bandwidth: copy(), threads: pool::threads() }
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
    let spec = Gemm::linear(SIDE, SIDE, SIDE);
    let matrix = || device.zeros(DType::F32, SIDE * SIDE);
    let (a, b, mut c): (Buffer, Buffer, Buffer) = (matrix()?, matrix()?, matrix()?);
    let mut done = Ok(());
    let seconds = best(|| {
        if done.is_ok() {
            done = device.matmul().and_then(|matmul| matmul.gemm(spec, &a, &b, &mut c, 0));
        }
    });
    done.map(|()| spec.flops() as f64 / seconds)
}

fn copy() -> f64 {
    let (source, mut target) = (vec![1u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
    let seconds = best(|| {
        let pieces = source.chunks(COPY_PIECE).zip(target.chunks_mut(COPY_PIECE));
        pool::share(pieces, |(from, to)| to.copy_from_slice(from));
    });
    2.0 * COPY_BYTES as f64 / seconds
}

/// Seconds of the fastest of several runs.
fn best(mut work: impl FnMut()) -> f64 {
    work(); // touches its memory for the first time
    let began = Instant::now();
    let mut best = f64::INFINITY;
    for _ in 0..TRIES {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
        if began.elapsed() > ENOUGH {
            break;
        }
    }
    best
}
