//! What NCCL leaves undefined, and the emulation of it names.

use crate::apart as devices;
use crate::nccl::joined;
use meshwork_core::comm::OpKind;
use meshwork_core::{CommError, DType, Group, ReduceOp, World};
use meshwork_cuda::device::Reduction;
use meshwork_cuda::{CudaDevice, Order};
use meshwork_tensor::Device;

/// NCCL leaves the order of collectives of several groups undefined; the emulation names a different one.
#[test]
fn what_nccl_leaves_undefined_or_refuses_is_an_error() {
    let Some(drivers) = devices(Order::Seeded(3), 2) else { return };
    let run = |body: &(dyn Fn(&Group, &CudaDevice) -> Result<(), CommError> + Sync), same: bool| {
        let drivers = if same { vec![drivers[0].clone(); 2] } else { devices(Order::Seeded(3), 2).unwrap() };
        let ran = World::Threads(2).run(|world| {
            let (device, group) = joined(&world, &drivers, Reduction::Library)?;
            body(&group, &device)
        });
        ran.unwrap_err().to_string()
    };
    let shared = run(&|_, _| Ok(()), true);
    assert!(shared.contains("Duplicate GPU detected"), "{shared}");
    let crossed = run(
        &|group, device| {
            let other = group.split("other", &[0, 1])?;
            let start = |group: &Group| group.start_all_reduce(device.zeros(DType::F32, 8).unwrap(), ReduceOp::Sum);
            let both =
                if group.rank() == 0 { [start(group)?, start(&other)?] } else { [start(&other)?, start(group)?] };
            for sum in both {
                let sum = sum.wait()?;
                device.download(&sum).map(drop).map_err(|fault| CommError::Backend {
                    op: OpKind::AllReduce,
                    group: "world".to_owned(),
                    world_rank: group.rank(),
                    message: fault.to_string(),
                })?;
            }
            Ok(())
        },
        false,
    );
    assert!(crossed.contains("queued collectives in different orders"), "{crossed}");
}
