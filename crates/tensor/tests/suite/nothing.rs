//! Operations without elements: a device's kernels and a communicator are called with extents of 0, as where no token
//! chose an expert.

use crate::common::{NoParams, tape_on};
use crate::devices::{Case, MESH, cases, types};
use meshwork_core::{DType, Mesh, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{Seed, Weights};
use meshwork_tensor::{Device, Error, Result, Tensor, Var};
use meshwork_testkit::opaque::{self, Opaque};
use std::sync::Arc;

/// The elements of the output of an operation, and of the gradient of each of its inputs, of which those like the first
/// one have no samples.
fn run(case: &Case, rank: &Arc<Rank>, device: Arc<dyn Device>) -> Result<Vec<Vec<f64>>> {
    let tape = tape_on(rank, Arc::clone(&device));
    let first = &case.inputs[0].0;
    let input = |(shape, ty): &(Vec<usize>, _)| {
        let mut shape = shape.clone();
        if shape.len() == first.len() && shape[0] == first[0] {
            shape[0] = 0;
        }
        Ok(tape.input(Tensor::from_slice(&device, &vec![1f32; shape.iter().product()], &shape[..])?, types(*ty)))
    };
    let inputs = case.inputs.iter().map(input).collect::<Result<Vec<Var>>>()?;
    let output = (case.run)(&tape, &inputs)?;
    let mut all = vec![crate::common::to_f64(output.tensor())];
    if case.name != "max_reduce" {
        let count = output.shape().count();
        let seed = match output.tensor().dtype() {
            DType::F64 => Tensor::from_slice(&device, &vec![1f64; count], output.shape()),
            _ => Tensor::from_slice(&device, &vec![1f32; count], output.shape()),
        };
        tape.backward(&output, Seed::typed(seed?, output.types().dual()), Weights::Now, &mut NoParams)?;
        all.extend(inputs.iter().filter_map(|input| Some(crate::common::to_f64(&tape.take_grad(input)?))));
    }
    Ok(all)
}

/// Cases that bring targets, ids, positions or groups of extents of their own, so that no samples do not fit them.
const OF_OTHER_EXTENTS: [&str; 14] = [
    "linear_pair",
    "grouped_linear and bias",
    "attention to documents",
    "grouped attention with positions",
    "attention to documents in both directions",
    "cross attention",
    "embedding",
    "vocab_parallel_embedding",
    "cross_entropy",
    "cross_entropy in place",
    "vocab_parallel_cross_entropy",
    "linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "preference_loss",
];

#[test]
fn an_operation_of_no_samples_gives_nothing_and_gradients_of_zero() {
    let mesh: Mesh = MESH.parse().unwrap();
    for case in cases() {
        let ended = World::threads(&mesh).run_mesh(&mesh, |rank| {
            let cpu = run(&case, &rank, Cpu::device())?;
            let world = opaque::communicator(Arc::clone(rank.world().communicator()));
            let rank = Arc::new(Rank::new(rank.mesh(), world)?);
            let hidden =
                if case.name == "map" { cpu.clone() } else { run(&case, &rank, Opaque::device(Cpu::device()))? };
            assert_eq!(hidden, cpu, "{}", case.name);
            // Of no samples, and the gradient of what all samples share.
            assert!(cpu.iter().flatten().all(|&value| value == 0.0), "{}: {cpu:?}", case.name);
            Ok::<_, Error>(())
        });
        match ended {
            Ok(_) => assert!(!OF_OTHER_EXTENTS.contains(&case.name), "{}", case.name),
            Err(error) if OF_OTHER_EXTENTS.contains(&case.name) => assert!(error.cause.contains("returned an error")),
            // Images have pixels and samples, and rows are not cut into other rows.
            Err(error) => {
                let refused =
                    ["x must be images [samples, height, width, channels]", "as many elements on this rank as before"];
                assert!(refused.iter().any(|says| error.cause.contains(says)), "{}: {}", case.name, error.cause);
            }
        }
    }
}
