//! An operation from outside: a leaky ReLU with forward, backward and SPMD rule, written against the public interface
//! alone.

use crate::common::{NoParams, alone, dot, input, on_mesh, on_tp, tape_of, tape_on, to_f64, values};
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, Mesh, Rank, SpmdError, Ty, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{Backward, Forward, Op, Weights};
use meshwork_tensor::{Result, Tensor, Var};
use meshwork_testkit::gradcheck::assert_gradient;
use std::sync::Arc;

/// `y = max(x, x / 4)`.
#[derive(Debug)]
struct LeakyRelu;

/// Makes the operation callable like a built-in one.
trait LeakyReluExt {
    fn leaky_relu(&self) -> Result<Var>;
}

impl LeakyReluExt for Var {
    fn leaky_relu(&self) -> Result<Var> {
        self.tape().apply(LeakyRelu, &[self])
    }
}

fn map(x: &Tensor, y: &Tensor, f: impl Fn(f64, f64) -> f64) -> Result<Tensor> {
    let (xs, ys) = (x.to_vec::<f64>()?, y.to_vec::<f64>()?);
    let values: Vec<f64> = xs.into_iter().zip(ys).map(|(x, y)| f(x, y)).collect();
    Tensor::from_slice(x.device(), &values, x.shape())
}

impl Op for LeakyRelu {
    fn name(&self) -> &'static str {
        "leaky_relu"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        cx.require(!inputs[0].shape().is_empty(), "x has at least one dim")?;
        let y = map(inputs[0], inputs[0], |x, _| x.max(x / 4.0))?;
        cx.save(&y)?;
        Ok(y)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        match cx.needs(0) {
            true => Ok(vec![Some(map(&grad, &cx.saved(0)?, |grad, y| if y > 0.0 { grad } else { grad / 4.0 })?)]),
            false => Ok(vec![None]),
        }
    }
}

#[test]
fn it_computes_and_its_gradient_flows_through_built_in_operations() {
    let (start, seed) = (values("x", 12), values("seed", 12));
    let run = |x: &[f64]| {
        let tape = tape_of(&alone());
        let x = input(&tape, x, &[3, 4], Types::NONE);
        let y = x.gelu().unwrap().leaky_relu().unwrap().add(&x).unwrap();
        (tape, x, y)
    };
    let (tape, x, y) = run(&start);
    let seed_tensor = Tensor::from_slice(tape.device(), &seed, [3, 4]).unwrap();
    tape.backward(&y, seed_tensor, Weights::Now, &mut NoParams).unwrap();
    let gradient = to_f64(&tape.take_grad(&x).unwrap());
    assert_gradient("leaky_relu", &start, &gradient, |x| dot(&to_f64(run(x).2.tensor()), &seed));
}

#[test]
fn it_has_a_type_on_every_mesh_and_refuses_a_partial_value() {
    for degree in [1, 2] {
        let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Tp, degree)]).unwrap(), 0).unwrap());
        let tape = tape_on(&rank, Meta::device());
        let x = |ty| input(&tape, &[0.0; 4], &[2, 2], on_tp(ty));
        assert_eq!(x(Ty::Shard(1)).leaky_relu().unwrap().types(), on_tp(Ty::Shard(1)));
        assert_eq!(
            x(Ty::Partial).leaky_relu().unwrap_err().to_string(),
            "leaky_relu: on axis tp, x is Partial, and leaky_relu of a sum is not the sum of leaky_relu; \
             all_reduce or reduce_scatter x over tp first"
        );
    }
}

#[test]
fn it_composes_with_collectives() {
    on_mesh("tp=2", |rank| {
        let tape = tape_of(&rank);
        let x = input(&tape, &[-1.0, 2.0, -3.0, 4.0], &[4], on_tp(Ty::Invariant));
        let y = x.split(Axis::Tp, 0).unwrap().leaky_relu().unwrap().all_gather_invariant(Axis::Tp, 0).unwrap();
        assert_eq!(to_f64(y.tensor()), [-0.25, 2.0, -0.75, 4.0]);
        let seed = Tensor::from_slice(tape.device(), &[1.0, 2.0, 3.0, 4.0], [4]).unwrap();
        tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
        assert_eq!(to_f64(&tape.take_grad(&x).unwrap()), [0.25, 2.0, 0.75, 4.0]);
    });
}

#[test]
fn its_shape_error_names_it() {
    let tape = tape_of(&alone());
    let error = input(&tape, &[1.0], &[], Types::NONE).leaky_relu().unwrap_err();
    assert_eq!(error.to_string(), "leaky_relu: x has at least one dim (shapes [[]])");
}
