//! The driver of GPUs: the tests of operations and of whole steps on the first GPU, and all of them once more on a
//! stand-in for NVIDIA's libraries.
//!
//! Without a GPU the former say `SKIPPED` and why, and pass; the stand-in needs g++.

#[path = "../suite/collectives.rs"]
mod collectives;
mod driver;
#[path = "../suite/experts.rs"]
mod experts;
mod joins;
#[path = "../suite/nccl.rs"]
mod nccl;
#[path = "../suite/ops.rs"]
mod ops;
#[path = "../suite/replay.rs"]
mod replay;
mod stand_in;
#[path = "../suite/train.rs"]
mod train;

use meshwork_cuda::device::Products;
use meshwork_cuda::{Driver, Gpu, Order};
use std::path::PathBuf;
use std::sync::Arc;

/// Seeds in which a whole step is run: a GPU has an order of its own.
fn orders() -> u64 {
    1
}

/// Where compiled kernels are kept.
fn kernels() -> PathBuf {
    std::env::var_os("STAND_IN_CACHE").map_or(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cubins"), PathBuf::from)
}

/// The first GPU. `None`, and a line that says why, if there is none.
fn gpu() -> Option<Gpu> {
    gpu_in_turn(0)
}

/// GPU `number`, counted round those that there are.
fn gpu_in_turn(number: usize) -> Option<Gpu> {
    let count = meshwork_cuda::gpu::count().unwrap_or(0).max(1);
    match Gpu::open(number % count, &kernels(), Products::OfTheLibrary) {
        // scripts/gpu-check.sh runs a test that failed once more so, to hear whose the fault is.
        Ok(gpu) => Some(gpu.blocking(std::env::var_os("MESHWORK_LAUNCH_BLOCKING").is_some())),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

/// What the tests of operations and of steps run on.
fn driver(_: Order) -> Option<Arc<dyn Driver>> {
    Some(Arc::new(gpu()?))
}

/// What the tests of several devices run on: the GPUs that there are, in turn, whether they are peers or not.
fn drivers(_: Order, devices: usize, _: fn(usize, usize) -> bool) -> Option<Vec<Arc<dyn Driver>>> {
    (0..devices).map(|number| Some(Arc::new(gpu_in_turn(number)?) as Arc<dyn Driver>)).collect()
}

/// A GPU for each rank, as over NCCL. `None`, and a line that says why, if there are fewer.
fn apart(_: Order, devices: usize) -> Option<Vec<Arc<dyn Driver>>> {
    let count = meshwork_cuda::gpu::count().unwrap_or(0);
    if count < devices {
        eprintln!("SKIPPED: {devices} ranks over NCCL need as many GPUs, and there are {count}");
        return None;
    }
    drivers(Order::Seeded(0), devices, |_, _| true)
}
