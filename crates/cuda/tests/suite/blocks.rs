//! What the allocator asks of the driver.

use crate::kernels;
use meshwork_core::DType;
use meshwork_cuda::device::Products;
use meshwork_cuda::{CudaDevice, Emulator, Order};
use meshwork_tensor::Device;
use std::sync::Arc;

/// A layer of experts has as many rows as the router gives it, other ones in each step. A device that kept blocks as
/// they were asked for found none of the right size, and at the limit gave all of them back, one wait of the host each.
#[test]
fn experts_whose_sizes_change_each_step_take_no_new_memory() {
    let Some(kernels) = kernels() else { return };
    let driver = Arc::new(Emulator::new(kernels, 112 << 20, Order::AsQueued).granule(2 << 20));
    let device = CudaDevice::new(driver.clone(), Products::OfTheCpu).unwrap();
    let weights = device.alloc(DType::U8, 32 << 20).unwrap();
    let calls = || ["alloc", "free_all"].map(|name| driver.calls().get(name).copied().unwrap_or(0));
    let (mut steps, mut before) = (Vec::new(), calls());
    for step in 0..40_usize {
        let mut saved = Vec::new();
        for layer in 0..4 {
            let rows = 1024 + (step * 797 + layer * 389 + step * step * layer * 31) % 1024;
            saved.extend([1024, 2048, 1024].map(|width| device.alloc(DType::U8, rows * width).unwrap()));
        }
        while let Some(activations) = saved.pop() {
            drop(device.alloc(DType::U8, activations.bytes()).unwrap()); // their gradient
        }
        let now = calls();
        steps.push([now[0] - before[0], now[1] - before[1]]);
        before = now;
    }
    let all = [0, 1].map(|call| steps.iter().map(|step| step[call]).sum::<u64>());
    println!("in {} steps: {} allocations of the driver, and {} calls that free", steps.len(), all[0], all[1]);
    assert!(steps[3..].iter().all(|step| *step == [0, 0]), "allocations and frees of each step: {steps:?}");
    drop(weights);
}
