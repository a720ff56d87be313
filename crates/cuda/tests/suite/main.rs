//! The seam and the device over the emulator. Without g++ the tests say so and pass; `.ci/run` asks for it first.

mod blocks;
mod collective_order;
mod collectives;
mod compression;
mod emulator;
mod experts;
mod halves;
mod nccl;
mod nccl_refusals;
mod offload;
mod ops;
mod overlap;
mod processes;
mod replay;
mod tensor_cores;
mod train;
mod tuning;
mod waits;

use meshwork_cuda::{Driver, Emulator, Order};
use meshwork_kernels::host::{Host, HostError};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The kernels for the host. `None`, and a line that says so, without g++ or on another CPU than x86-64.
fn kernels() -> Option<Arc<Host>> {
    static KERNELS: OnceLock<Option<Arc<Host>>> = OnceLock::new();
    let compile = || match Host::new(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches/meshwork/kernels")) {
        Err(error @ (HostError::NoCompiler | HostError::Processor(_))) => {
            eprintln!("left out: {error}");
            None
        }
        host => Some(Arc::new(host.unwrap_or_else(|error| panic!("{error}")))),
    };
    KERNELS.get_or_init(compile).clone()
}

/// An emulated device of 1 GiB.
fn emulator(order: Order) -> Option<Arc<Emulator>> {
    Some(Arc::new(Emulator::new(kernels()?, 1 << 30, order)))
}

/// Emulated devices of one machine, of 1 GiB each; `peers` says which pairs read each other's memory.
fn machine(order: Order, devices: usize, peers: fn(usize, usize) -> bool) -> Option<Vec<Arc<Emulator>>> {
    Some(Emulator::machine(kernels()?, 1 << 30, order, devices, peers).into_iter().map(Arc::new).collect())
}

/// Seeds in which a whole step is run; `.ci/nightly` sets more.
fn orders() -> u64 {
    std::env::var("MESHWORK_ORDERS").map_or(20, |orders| orders.parse().expect("MESHWORK_ORDERS is a number"))
}

/// What the tests of operations and of steps run on.
fn driver(order: Order) -> Option<Arc<dyn Driver>> {
    emulator(order).map(|driver| driver as Arc<dyn Driver>)
}

/// What the tests of several devices run on.
fn drivers(order: Order, devices: usize, peers: fn(usize, usize) -> bool) -> Option<Vec<Arc<dyn Driver>>> {
    Some(machine(order, devices, peers)?.into_iter().map(|driver| driver as Arc<dyn Driver>).collect())
}

/// Devices that cannot read each other's memory, as GPUs of different processes; one for each rank.
fn apart(order: Order, devices: usize) -> Option<Vec<Arc<dyn Driver>>> {
    drivers(order, devices, |_, _| false)
}
