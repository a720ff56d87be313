//! Gradients of programs against central differences in f64, through the tape.

use super::{NoParams, alone, dot, input, on_tp, tape_of, to_f64, values};
use meshwork_core::{Axis, Rank, Ty, Types};
use meshwork_tensor::tape::Weights;
use meshwork_tensor::{Result, Tape, Tensor, Var};
use meshwork_testkit::gradcheck::assert_gradient;
use std::sync::Arc;

/// One input of a program: a name for errors, its shape, and its type if the mesh has tp.
pub type Input<'a> = (&'a str, &'a [usize], Ty);

/// Checks `program`'s gradient with respect to each input. The objective is `⟨output, seed⟩` for a random seed, so that
/// every element of the output has a different weight.
pub fn check_on(rank: &Arc<Rank>, name: &str, inputs: &[Input<'_>], program: impl Fn(&Tape, &[Var]) -> Result<Var>) {
    check_program(rank, name, inputs, &program);
}

/// Not generic: it would be compiled once for each program.
fn check_program(rank: &Arc<Rank>, name: &str, inputs: &[Input<'_>], program: &dyn Fn(&Tape, &[Var]) -> Result<Var>) {
    let start: Vec<Vec<f64>> = inputs.iter().map(|(name, shape, _)| values(name, shape.iter().product())).collect();
    let run = |inputs_now: &[Vec<f64>]| {
        let tape = tape_of(rank);
        let types = |ty: Ty| if rank.mesh().has(Axis::Tp) { on_tp(ty) } else { Types::NONE };
        let vars: Vec<Var> = inputs
            .iter()
            .zip(inputs_now)
            .map(|((_, shape, ty), values)| input(&tape, values, shape, types(*ty)))
            .collect();
        let output = program(&tape, &vars).unwrap();
        (tape, vars, output)
    };

    let (tape, vars, output) = run(&start);
    let seed = values("seed", output.tensor().count());
    let seed_tensor = Tensor::from_slice(tape.device(), &seed, output.shape()).unwrap();
    tape.backward(&output, seed_tensor, Weights::Now, &mut NoParams).unwrap();
    for (i, (input_name, shape, _)) in inputs.iter().enumerate() {
        let gradient = tape.take_grad(&vars[i]).unwrap_or_else(|| panic!("{name}: no gradient for {input_name}"));
        assert_eq!(&gradient.shape()[..], *shape, "{name}: shape of the gradient of {input_name}");
        assert_gradient(&format!("{name}, {input_name}"), &start[i], &to_f64(&gradient), |moved| {
            let mut inputs_now = start.clone();
            inputs_now[i] = moved.to_vec();
            dot(&to_f64(run(&inputs_now).2.tensor()), &seed)
        });
    }
}

/// The same on one rank of a mesh without axes.
pub fn check(name: &str, inputs: &[(&str, &[usize])], program: impl Fn(&Tape, &[Var]) -> Result<Var>) {
    let inputs: Vec<Input<'_>> = inputs.iter().map(|&(name, shape)| (name, shape, Ty::Invariant)).collect();
    check_on(&alone(), name, &inputs, program);
}
