//! Programs that once gave wrong numbers without a word, each refused with its reason, and beside it the corrected
//! program.

use crate::common::{NoParams, alone, input, on_mesh, tape_of, to_f64};
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, DType, Rank, SpmdError, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::param::Gradients;
use meshwork_tensor::tape::{Backward, Forward, Mode, Normaliser, Op, Position, Seed, Weights};
use meshwork_tensor::{Declarations, Error, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use std::sync::Arc;

/// A linear operation `y = x + w` whose gradients are what a test makes of the right ones.
struct Sum(fn(&mut Backward<'_>, Tensor) -> Result<Vec<Option<Tensor>>>);

impl std::fmt::Debug for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sum")
    }
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x", "w"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::elementwise(self.name(), operands)
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, w) = (inputs[0].to_vec::<f32>()?, inputs[1].to_vec::<f32>()?);
        let sums: Vec<f32> = x.into_iter().zip(w).map(|(x, w)| x + w).collect();
        Tensor::from_slice(inputs[0].device(), &sums, inputs[0].shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        (self.0)(cx, grad)
    }
}

fn declared(all: &mut Declarations, name: &str) -> ParamId {
    all.declare(name, &[2], Placement::replicated(), Role::Weight, Init::Ones).unwrap()
}

fn params(all: Declarations, rank: &Rank) -> Arc<Params> {
    let layout = [all.ids().collect()];
    Arc::new(Params::new(Arc::new(all), rank.mesh(), rank.coords(), &Cpu::device(), &layout, 0).unwrap())
}

/// A tape with a parameter `w [2]`.
fn with_param(rank: &Arc<Rank>) -> (Tape, ParamId) {
    let mut all = Declarations::new();
    let w = declared(&mut all, "w");
    let params = params(all, rank);
    (Tape::new(rank.clone(), params, Cpu::device(), Mode::Train, Position::default()), w)
}

fn floats(tape: &Tape, values: &[f32]) -> Tensor {
    Tensor::from_slice(tape.device(), values, [values.len()]).unwrap()
}

/// The gradients of w and x that a `Sum` with this backward gives, or its refusal.
fn gradients(
    backward: fn(&mut Backward<'_>, Tensor) -> Result<Vec<Option<Tensor>>>,
    weights: Weights,
) -> std::result::Result<[Vec<f64>; 2], String> {
    let (tape, w) = with_param(&alone());
    let x = tape.input(floats(&tape, &[1.0, 2.0]), Types::NONE);
    let y = tape.apply(Sum(backward), &[&x, &tape.param(w).unwrap()]).unwrap();
    let mut sink = Gradients::default();
    tape.backward(&y, floats(&tape, &[3.0, 4.0]), weights, &mut sink).map_err(|error| error.to_string())?;
    tape.weight_gradients(&mut sink).map_err(|error| error.to_string())?;
    Ok([to_f64(sink.get(w).unwrap()), to_f64(&tape.take_grad(&x).unwrap())])
}

#[test]
fn an_operation_gives_each_gradient_once_whatever_it_computes_beside() {
    let right = Ok([vec![3.0, 4.0], vec![3.0, 4.0]]);
    for weights in [Weights::Now, Weights::Deferred] {
        let as_asked =
            |cx: &mut Backward<'_>, grad: Tensor| Ok((0..2).map(|i| cx.needs(i).then(|| grad.clone())).collect());
        assert_eq!(gradients(as_asked, weights), right);
        // Deferred, it once gave the gradient of w twice.
        assert_eq!(gradients(|_, grad| Ok(vec![Some(grad.clone()), Some(grad)]), weights), right, "{weights:?}");
    }
}

#[test]
fn an_operation_that_forgets_a_gradient_is_refused() {
    let forgets_x = gradients(|_, grad| Ok(vec![None, Some(grad)]), Weights::Now).unwrap_err();
    assert_eq!(
        forgets_x,
        "sum: the gradient of x is missing; backward gives the gradient of each operand that needs one (Backward::needs), a zero \
         tensor if nothing flows"
    );
    let forgets_w = gradients(|_, grad| Ok(vec![Some(grad), None]), Weights::Now).unwrap_err();
    assert!(forgets_w.starts_with("sum: the gradient of w is missing"), "{forgets_w}");
    let deferred = gradients(|_, grad| Ok(vec![Some(grad), None]), Weights::Deferred).unwrap_err();
    assert!(deferred.starts_with("sum: the gradient of w is missing"), "{deferred}");
}

#[test]
fn an_operation_that_gives_too_few_or_too_many_gradients_is_refused() {
    assert_eq!(
        gradients(|_, grad| Ok(vec![Some(grad)]), Weights::Now).unwrap_err(),
        "sum: the gradient of w is one of 2, and backward gave 1; backward gives one gradient, or None, for each operand"
    );
    let many =
        gradients(|_, grad| Ok(vec![Some(grad.clone()), Some(grad.clone()), Some(grad)]), Weights::Now).unwrap_err();
    assert!(many.contains("backward gave 3"), "{many}");
}

#[test]
fn a_gradient_of_another_shape_or_dtype_is_refused() {
    let short = |_: &mut Backward<'_>, grad: Tensor| {
        let first = Tensor::from_slice(grad.device(), &grad.to_vec::<f32>()?[..1], [1])?;
        Ok(vec![Some(grad), Some(first)])
    };
    assert_eq!(
        gradients(short, Weights::Now).unwrap_err(),
        "sum: the gradient of w is f32 of [1]; the operand is f32 of [2], and its gradient must be f32 of that shape"
    );
    let wide = |_: &mut Backward<'_>, grad: Tensor| {
        let wide: Vec<f64> = grad.to_vec::<f32>()?.into_iter().map(f64::from).collect();
        Ok(vec![Some(Tensor::from_slice(grad.device(), &wide, grad.shape())?), Some(grad)])
    };
    assert_eq!(
        gradients(wide, Weights::Now).unwrap_err(),
        "sum: the gradient of x is f64 of [2]; the operand is f32 of [2], and its gradient must be f32 of that shape"
    );
}

#[test]
fn values_of_two_tapes_do_not_mix() {
    let (a, b) = (tape_of(&alone()), tape_of(&alone()));
    let [x, y] = [&a, &b].map(|tape| input(tape, &[1.0, 2.0], &[2], Types::NONE));
    let advice = "lies on another tape: its gradient would be lost or added to another value; bring its tensor over with \
                  Tape::input or Tape::constant";
    assert_eq!(x.add(&y).unwrap_err().to_string(), format!("add: y {advice}"));
    let seed = || Tensor::from_slice(a.device(), &[1.0, 1.0], [2]).unwrap();
    assert_eq!(
        a.backward(&y, seed(), Weights::Now, &mut NoParams).unwrap_err().to_string(),
        format!("backward: output {advice}")
    );
    let losses = y.mean_squared_error(&y).unwrap();
    let error =
        a.backward_from_loss(&losses, Normaliser::LocalTerms(2), Weights::Now, &mut NoParams).unwrap_err().to_string();
    assert_eq!(error, format!("backward_from_loss: loss {advice}"));

    // Corrected: the tensor of one is an input of the other.
    let y = a.input(y.tensor().clone(), Types::NONE);
    a.backward(&x.add(&y).unwrap(), seed(), Weights::Now, &mut NoParams).unwrap();
    assert!(b.take_grad(&x).is_none(), "the gradient of a value is on its own tape");
    assert_eq!(to_f64(&a.take_grad(&x).unwrap()), [1.0, 1.0]);
}

#[test]
fn a_parameter_of_other_declarations_is_refused() {
    let (tape, w) = with_param(&alone());
    let mut others = Declarations::new();
    let [_, second] = ["other", "second"].map(|name| declared(&mut others, name));
    let other = others.find("other").unwrap();
    assert_eq!(
        tape.param(other).unwrap_err().to_string(),
        "parameter #0 was declared in other declarations than those of these weights (here that is w): use the id that these \
         declarations gave"
    );
    assert!(tape.param(second).unwrap_err().to_string().contains("(here there are 1)"));
    assert_eq!(to_f64(tape.param(w).unwrap().tensor()), [1.0, 1.0]);
}

#[test]
fn two_dropouts_under_one_name_are_refused() {
    let tape = tape_of(&alone());
    let x = input(&tape, &[1.0; 8], &[8], Types::NONE);
    x.dropout(0.5, "mlp").unwrap();
    assert_eq!(
        x.dropout(0.5, "mlp").unwrap_err().to_string(),
        "two operations draw their randomness under the name \"mlp\": their masks would be the same; give each a name of its own"
    );
    x.dropout(0.5, "attn").unwrap();
    assert_eq!(tape.random_names(), ["attn", "mlp"]);
}

/// Each rank of dp holds samples with another number of terms. The mean over all of them divides by their number on all
/// ranks.
#[test]
fn a_mean_over_terms_counts_those_of_all_ranks() {
    const X: [f64; 4] = [1.0, -2.0, 3.0, 0.5];
    /// The gradient of this rank's samples, of which rank 0 has one and rank 1 three.
    fn run(rank: &Arc<Rank>, normaliser: fn(usize) -> Normaliser) -> Vec<f64> {
        let tape = tape_of(rank);
        let dp = rank.coords().get(Axis::Dp);
        let own = match rank.mesh().degree(Axis::Dp) {
            1 => &X[..],
            _ if dp == 0 => &X[..1],
            _ => &X[1..],
        };
        let types = Types::new(&[(Axis::Dp, Ty::Shard(0))]);
        let x = input(&tape, own, &[own.len()], types);
        let losses = x.mul(&x).unwrap();
        tape.backward_from_loss(&losses, normaliser(own.len()), Weights::Now, &mut NoParams).unwrap();
        to_f64(&tape.take_grad(&x).unwrap())
    }
    let local = |terms: usize| Normaliser::LocalTerms(terms as u64);
    let one = on_mesh("dp=1", |rank| run(&rank, local)).concat();
    assert_eq!(one, X.map(|x| 2.0 * x / 4.0));
    assert_eq!(on_mesh("dp=2", |rank| run(&rank, local)).concat(), one);
    // What a program once did unnoticed, and now must say: a plain factor, here another on each rank.
    assert_ne!(on_mesh("dp=2", |rank| run(&rank, |terms| Normaliser::Scale(1.0 / terms as f64))).concat(), one);

    let tape = tape_of(&alone());
    let losses = input(&tape, &[1.0], &[1], Types::NONE);
    let error = tape.backward_from_loss(&losses, Normaliser::LocalTerms(0), Weights::Now, &mut NoParams).unwrap_err();
    assert_eq!(error.to_string(), "backward: the loss has no terms to take a mean over: every target is masked");
}

#[test]
fn the_seed_of_a_replicate_output_says_its_type() {
    on_mesh("tp=2", |rank| {
        let on = |ty| Types::new(&[(Axis::Tp, ty)]);
        let run = |seed: fn(Tensor) -> Seed| {
            let tape = tape_of(&rank);
            let x = input(&tape, &[1.0, 2.0], &[2], on(Ty::Invariant));
            let y = x.copy(Axis::Tp).unwrap();
            let seed = seed(Tensor::from_slice(tape.device(), &[1.0, 10.0], [2]).unwrap());
            tape.backward(&y, seed, Weights::Now, &mut NoParams).map(|()| to_f64(&tape.take_grad(&x).unwrap()))
        };
        // It was once taken for a part of each rank, and the gradient multiplied by the degree.
        assert_eq!(
            run(Seed::from).unwrap_err().to_string(),
            "backward: on axis tp, the output is Replicate: its gradient is the sum of one part of each rank, and the seed does not \
             say which part it is; give each rank its part as Seed::typed(part, types) with Partial, or end in an Invariant value \
             (all_reduce, all_gather_invariant)"
        );
        assert_eq!(
            run(|seed| Seed::typed(seed, Types::new(&[(Axis::Tp, Ty::Invariant)]))).unwrap_err().to_string(),
            "backward: on axis tp, the output is Replicate, so its gradient is Partial, and the seed is Invariant; bring the seed to \
             Partial first"
        );
        let partial = |seed| Seed::typed(seed, Types::new(&[(Axis::Tp, Ty::Partial)]));
        assert_eq!(run(partial).unwrap(), [2.0, 20.0], "two parts");
    });
}

/// Gradients come with their types, so that a sum over ranks cannot be forgotten, nor taken twice.
#[test]
fn a_step_with_gradients_that_are_not_summed_is_refused() {
    let stepped = |reductions: usize| {
        on_mesh("dp=2", move |rank| -> std::result::Result<Vec<f32>, String> {
            let mut all = Declarations::new();
            let w = declared(&mut all, "w");
            let mut params = params(all, &rank);
            let mut gradients = Gradients::default();
            {
                let tape = Tape::new(rank.clone(), params.clone(), Cpu::device(), Mode::Train, Position::default());
                let cut = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0));
                let x = Tensor::from_slice(tape.device(), &[1.0f32, rank.world_rank() as f32], [1, 2]).unwrap();
                let y: Var = tape.constant(x, cut).mul(&tape.param(w).unwrap()).unwrap();
                let loss = y
                    .mean_squared_error(&tape.constant(Tensor::zeros(tape.device(), DType::F32, [1, 2]).unwrap(), cut));
                let whole = Normaliser::LocalTerms(1);
                tape.backward_from_loss(&loss.unwrap(), whole, Weights::Now, &mut gradients).unwrap();
                (0..reductions).for_each(|_| gradients.all_reduce(&tape).unwrap());
            }
            gradients.descend(&mut params, 1.0).map_err(|error: Error| error.to_string())?;
            Ok(params.read(w).unwrap())
        })
    };
    let refused =
        Err("the gradient of w is still Partial over dp: sum it over these axes first, as Gradients::all_reduce does"
            .to_owned());
    assert_eq!(stepped(0), [refused.clone(), refused]);
    assert_eq!(stepped(1), [Ok(vec![0.0, 0.5]), Ok(vec![0.0, 0.5])]);
    assert_eq!(stepped(2), stepped(1), "a sum is taken once");
}
