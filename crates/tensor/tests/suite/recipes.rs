//! Values that the policy [`Selective`] recomputes in backward: no bit changes, and their memory is free until then.

use crate::common::{NoParams, alone, on_mesh, on_tp, tape_with, to_f64, values};
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, Rank, SpmdError, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{Backward, Forward, Keep, Op, SavedPolicy, Selective, Weights};
use meshwork_tensor::{Result, Tape, Tensor, Var};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

const ROWS: usize = 5;
const WIDTH: usize = 32;

/// The identity, with a recipe that counts how often it is used.
#[derive(Debug)]
struct Through {
    made: Rc<Cell<usize>>,
}

impl Op for Through {
    fn name(&self) -> &'static str {
        "through"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::linear_map(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let made = self.made.clone();
        cx.save_input(0)?;
        cx.recipe(move |saved| {
            made.set(made.get() + 1);
            saved[0].restore()
        });
        Ok(inputs[0].clone())
    }

    fn backward(&self, _cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grad)])
    }
}

fn through(x: &Var, made: &Rc<Cell<usize>>) -> Var {
    x.tape().apply(Through { made: made.clone() }, &[x]).unwrap()
}

fn f32_input(tape: &Tape, name: &str, shape: &[usize], ty: Ty) -> Var {
    let data: Vec<f32> = values(name, shape.iter().product()).iter().map(|&value| value as f32).collect();
    tape.input(Tensor::from_slice(tape.device(), &data, shape).unwrap(), on_tp(ty))
}

/// From x [ROWS, WIDTH] and two vectors, all `Invariant`, to something `Replicate` of that shape through operations
/// with recipes.
type Made = fn(&[Var; 3]) -> Result<Var>;

const CASES: [(&str, Made); 9] = [
    ("a norm", |[x, gamma, beta]| x.layer_norm(gamma, beta, 1e-5)?.copy(Axis::Tp)),
    ("a root mean square norm", |[x, gamma, _]| x.rms_norm(gamma, 1e-5)?.copy(Axis::Tp)),
    ("gelu", |[x, ..]| x.copy(Axis::Tp)?.gelu()),
    ("tanh", |[x, ..]| x.copy(Axis::Tp)?.tanh()),
    ("gelu before a product", |[x, ..]| x.gelu()?.copy(Axis::Tp)),
    ("a layer", |[x, _, bias]| x.linear_gelu(&square(x), bias, 1)?.copy(Axis::Tp)),
    ("a layer without a bias", |[x, ..]| x.linear_gelu(&square(x), None, 1)?.copy(Axis::Tp)),
    ("a gated layer", |[x, ..]| x.linear_swiglu(&pairs(x), 1)?.copy(Axis::Tp)),
    ("a recipe that needs another", |[x, gamma, beta]| x.gelu()?.layer_norm(gamma, beta, 1e-5)?.copy(Axis::Tp)),
];

fn square(x: &Var) -> Var {
    f32_input(x.tape(), "square", &[WIDTH, WIDTH], Ty::Invariant)
}

fn pairs(x: &Var) -> Var {
    f32_input(x.tape(), "pairs", &[WIDTH, 2, WIDTH], Ty::Invariant)
}

/// Makes a value and multiplies it with a weight `[n, WIDTH]`: (bytes alive before backward, result and gradients).
fn product(rank: &Arc<Rank>, policy: Rc<dyn SavedPolicy>, made: Made) -> (u64, Vec<Vec<f64>>) {
    let tape = tape_with(rank, Cpu::device(), policy);
    let vector = |name| f32_input(&tape, name, &[WIDTH], Ty::Invariant);
    let inputs = [f32_input(&tape, "x", &[ROWS, WIDTH], Ty::Invariant), vector("gamma"), vector("beta")];
    let weight = f32_input(&tape, "weight", &[3, WIDTH], Ty::Shard(0));
    let y = made(&inputs).unwrap().linear(&weight, 1).unwrap();
    let live = tape.device().meter().live_bytes();
    let seed: Vec<f32> = values("seed", y.tensor().count()).iter().map(|&value| value as f32).collect();
    let seed = Tensor::from_slice(tape.device(), &seed, y.shape()).unwrap();
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    let grads = inputs.iter().chain([&weight]).filter_map(|input| tape.take_grad(input)).map(|grad| to_f64(&grad));
    (live, [to_f64(y.tensor())].into_iter().chain(grads).collect())
}

#[test]
fn what_has_a_recipe_is_not_kept_and_no_bit_changes() {
    let bytes = (ROWS * WIDTH * size_of::<f32>()) as u64;
    on_mesh("tp=2", |rank| {
        for (name, made) in CASES {
            let (live, results) = product(&rank, Rc::new(Selective), made);
            let (live_kept, kept) = product(&rank, Rc::new(Keep), made);
            assert_eq!(results, kept, "{name}");
            let values = if name == "a recipe that needs another" { 2 } else { 1 };
            assert_eq!(live_kept - live, values * bytes, "{name}");
        }
    });
}

#[test]
fn a_recipe_is_used_when_somebody_asks_and_only_then() {
    let tape = tape_with(&alone(), Cpu::device(), Rc::new(Selective));
    let made = Rc::new(Cell::new(0));
    let x = tape.input(Tensor::from_slice(tape.device(), &[1f32, 2.0], [1, 2]).unwrap(), Types::NONE);
    let w = tape.input(Tensor::from_slice(tape.device(), &[3f32, 4.0], [1, 2]).unwrap(), Types::NONE);
    let value = through(&x, &made);
    // Once for each product, which needs it for the gradient of the weight; never for the sum.
    let y = value.linear(&w, 1).unwrap().add(&value.linear(&w, 1).unwrap()).unwrap();
    value.add(&value).unwrap();
    assert_eq!(made.get(), 0);
    let seed = Tensor::from_slice(tape.device(), &[1f32], [1, 1]).unwrap();
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    assert_eq!(made.get(), 2);
    assert_eq!(to_f64(&tape.take_grad(&w).unwrap()), [2.0, 4.0]);
}
