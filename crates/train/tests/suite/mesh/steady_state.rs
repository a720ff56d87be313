//! Memory comes from the system in the first two steps only: later steps use only memory of the arena.

use crate::mesh::cases::{ADAMW, Case, UNEVEN};
use crate::mesh::world::{train, try_on_mesh};
use meshwork_core::comm::thread::Options;
use meshwork_cpu::Cpu;
use meshwork_tensor::Device;
use meshwork_train::config::MatmulDtype;
use std::sync::Arc;

#[test]
fn later_steps_ask_the_system_for_no_memory() {
    let alone = Case { micros: 4, ..Case::alone(&UNEVEN) };
    for (case, dtype) in [
        (alone, MatmulDtype::F32),
        (alone, MatmulDtype::Bf16),
        (alone, MatmulDtype::Tf32),
        (Case { dp: 2, tp: 2, pp: 2, schedule: "1f1b", ..alone }, MatmulDtype::F32),
        (Case { dp: 2, tp: 4, sequence_parallel: true, ..alone }, MatmulDtype::F32),
    ] {
        let (mut config, data) = (case.config(ADAMW), case.model.data());
        config.training.matmul_dtype = dtype;
        let mesh = config.mesh().unwrap();
        let devices: Vec<Arc<Cpu>> = (0..mesh.world_size()).map(|_| Arc::new(Cpu::new(dtype.precision()))).collect();
        let asked = try_on_mesh(
            &config,
            Options::default(),
            |coords| devices[mesh.rank_at(coords)].clone() as Arc<dyn Device>,
            |mut trainer| {
                let step = |_| {
                    train(&mut trainer, &data, &config)?;
                    Ok(devices[trainer.rank().world_rank()].system_allocations())
                };
                (0..6).map(step).collect::<Result<Vec<u64>, _>>()
            },
        );
        for (rank, asked) in asked.unwrap_or_else(|error| panic!("{error}")).iter().enumerate() {
            assert!(asked[0] > 0, "{case}: the device of rank {rank} was not used");
            assert_eq!(
                asked[2..],
                [asked[1]; 4],
                "{case}: blocks that rank {rank} had asked for after each step: {asked:?}"
            );
        }
    }
}
