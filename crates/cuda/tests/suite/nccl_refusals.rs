//! What NCCL leaves undefined, and the emulation of it names, or does otherwise than our tree.

use crate::apart as devices;
use crate::nccl::joined;
use half::bf16;
use meshwork_core::comm::OpKind;
use meshwork_core::{Buffer, CommError, DType, Group, ReduceOp, World};
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

/// The rows of docs/cuda.md: NCCL begins a sum at another rank for each part, and rounds 16 bits at each rank, where
/// 256 and 1 are 256; the tree adds up in f32.
#[test]
fn sums_of_nccl_round_at_each_rank_and_its_maxima_ignore_nan() {
    let Some(drivers) = devices(Order::Seeded(1), 3) else { return };
    for (how, sums, keeps) in [(Reduction::Library, [256.0, 258.0, 256.0], false), (Reduction::Tree, [258.0; 3], true)]
    {
        let ran = World::Threads(3).run(|world| {
            let (device, group) = joined(&world, &drivers, how)?;
            let reduce = |values: Buffer, by| {
                let reduced = group.all_reduce(device.upload(&values).unwrap(), by)?;
                Ok::<_, CommError>(device.download(&reduced).unwrap())
            };
            let sum = reduce(Buffer::from_slice(&[bf16::from_f32([256.0, 1.0, 1.0][group.rank()]); 3]), ReduceOp::Sum)?;
            assert_eq!(sum.as_slice::<bf16>()?, sums.map(bf16::from_f32));
            for (by, wanted) in [(ReduceOp::Max, 2.0), (ReduceOp::Min, 0.0)] {
                let one = reduce(Buffer::from_slice(&[[0.0_f32, f32::NAN, 2.0][group.rank()]]), by)?;
                let [one] = one.as_slice::<f32>()?[..] else { panic!("{one:?}") };
                assert!(if keeps { one.is_nan() } else { one == wanted }, "{how:?} {by:?}: {one}");
            }
            Ok::<_, CommError>(())
        });
        ran.unwrap_or_else(|error| panic!("{how:?}: {error}"));
    }
}
