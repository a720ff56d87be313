//! Wrong operations and layers, each found with a message that says what to mend.

use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, SpmdError, Ty, Types};
use meshwork_tensor::{Init, Placement, Result, Role, Tensor, Var};
use meshwork_testkit::check::{CheckError, LayerInput, OpInput, check_layer, check_op};

type Rule = fn(&str, &[Operand<'_>]) -> std::result::Result<Types, SpmdError>;

/// An operation of one value whose forward and gradient are functions of its elements. `backward` is given the number
/// of ranks.
fn custom(
    x: &Var,
    rule: Rule,
    forward: fn(&Tensor) -> Result<Tensor>,
    backward: fn(&Tensor, f64) -> Result<Tensor>,
) -> Result<Var> {
    let ranks = x.tape().rank().mesh().degree(Axis::Tp) as f64;
    let (forward, backward) = (
        move |x: &[&Tensor]| forward(x[0]),
        move |_: &[Tensor], _: &Tensor, grad: &Tensor| Ok(vec![backward(grad, ranks)?]),
    );
    x.tape().custom("planted", &["x"], &[x], rule, forward, backward)
}

fn times(x: &Tensor, factor: f64) -> Result<Tensor> {
    let values: Vec<f64> = x.to_vec::<f64>()?.into_iter().map(|x| factor * x).collect();
    Tensor::from_slice(x.device(), &values, x.shape())
}

fn transposed(x: &Tensor) -> Result<Tensor> {
    let (rows, columns, values) = (x.shape()[0], x.shape()[1], x.to_vec::<f64>()?);
    let values: Vec<f64> = (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect();
    Tensor::from_slice(x.device(), &values, [columns, rows])
}

fn total(x: &Tensor) -> Result<Tensor> {
    Tensor::from_slice(x.device(), &[x.to_vec::<f64>()?.iter().sum::<f64>()], [1])
}

fn linear(op: &str, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
    rules::linear_map(op, operands[0])
}

#[track_caller]
fn message(inputs: &[OpInput], op: impl Fn(&[Var]) -> Result<Var> + Sync) -> String {
    check_op("planted", inputs, op).unwrap_err().to_string()
}

#[track_caller]
fn assert_says(error: &str, lines: &[&str]) {
    for line in lines {
        assert!(error.contains(line), "{line:?} is not in:\n{error}");
    }
}

fn matrix() -> [OpInput; 1] {
    [OpInput::value("x", &[3, 3])]
}

#[test]
fn a_right_operation_is_reported_with_what_it_accepts() {
    let report =
        check_op("double", &matrix(), |v| custom(&v[0], linear, |x| times(x, 2.0), |grad, _| times(grad, 2.0)));
    assert_eq!(
        report.unwrap().to_string(),
        "double: right on 1 to 4 ranks; types accepted: 6, refused: 0\n  Replicate\n  Invariant\n  Partial\n  Varying\n  \
         Shard(0)\n  Shard(1)"
    );
}

/// The sum of all elements, of a sharded value too, which is then only this rank's share.
#[test]
fn a_wrong_output_type_is_found_with_the_right_one() {
    let whole: Rule = |_, operands| {
        Ok(Types::new(
            &operands[0]
                .types
                .iter()
                .map(|(axis, ty)| (axis, ty.dim().map_or(ty, |_| Ty::Invariant)))
                .collect::<Vec<_>>(),
        ))
    };
    let spread = |v: &[Var]| {
        let (rows, columns) = (v[0].shape()[0], v[0].shape()[1]);
        let ones = move |grad: &Tensor| {
            Tensor::from_slice(grad.device(), &vec![grad.to_vec::<f64>()?[0]; rows * columns], [rows, columns])
        };
        let backward = move |_: &[Tensor], _: &Tensor, grad: &Tensor| Ok(vec![ones(grad)?]);
        v[0].tape().custom("planted", &["x"], &[&v[0]], whole, |x| total(x[0]), backward)
    };
    let error = message(&matrix(), spread);
    assert_says(
        &error,
        &[
            "planted is wrong in 2 of its cases:",
            "tp=2, x Shard(0): the output is Invariant, and the ranks hold different values, or values of different extents; the \
             ranks' values add up to the right one: a sum over the ranks is missing",
            "the same with x Shard(1)",
        ],
    );
}

#[test]
fn a_gradient_times_the_number_of_ranks_is_found() {
    let error = message(&matrix(), |v| custom(&v[0], linear, |x| times(x, 1.0), times));
    assert_says(
        &error,
        &[
            "planted is wrong in 6 of its cases:",
            "tp=2, x Shard(1): the gradient of x is Shard(1), and it is 2 times that of one rank, once per rank: something that is \
             the same on every rank is summed over them, or multiplied by their number",
        ],
    );
}

/// `copy` without the sum of its gradient over the ranks.
#[test]
fn a_forgotten_sum_of_a_gradient_is_found() {
    let used: Rule = |op, operands| {
        rules::per_axis(op, operands, |_, types| match types[0] {
            Ty::Invariant => Ok(Ty::Replicate),
            _ => Err(("x is no Invariant".to_owned(), "give it one".to_owned())),
        })
    };
    let error = message(&matrix(), |v| custom(&v[0], used, |x| times(x, 1.0), |grad, _| times(grad, 1.0)));
    assert_eq!(
        error,
        "planted is wrong in 1 of its cases:\n  tp=2, x Invariant: the gradient of x is Invariant, and the ranks hold different \
         values, or values of different extents; the ranks' values add up to the right one: a sum over the ranks is missing"
    );
}

#[test]
fn a_transposed_gradient_is_found_on_one_rank() {
    let error = message(&matrix(), |v| custom(&v[0], linear, |x| times(x, 1.0), |grad, _| transposed(grad)));
    assert_says(
        &error,
        &["tp=1, x Replicate: element 1 of the gradient of x is ", "this is wrong on one rank already: mend backward"],
    );
}

#[test]
fn a_transposed_output_is_found_with_the_dim_that_it_shards() {
    let error = message(&matrix(), |v| custom(&v[0], linear, transposed, |grad, _| transposed(grad)));
    assert_says(
        &error,
        &[
            "planted is wrong in 2 of its cases:",
            "tp=2, x Shard(0): the output is Shard(0), and its extents over all ranks are [12, 3] instead of [6, 6]; as Shard(1) it would \
             be right",
        ],
    );
}

#[test]
fn a_rule_that_depends_on_the_number_of_ranks_is_found() {
    let error = message(&matrix(), |v| match v[0].tape().rank().mesh().degree(Axis::Tp) {
        3 => v[0].exp(),
        _ => v[0].scale(1.0),
    });
    assert_says(
        &error,
        &["tp=3, x Partial: the types are accepted on tp=1 and refused here; a rule must not depend on"],
    );
}

#[test]
fn an_operation_that_accepts_nothing_is_not_passed() {
    let error = check_op("as_partial of a shard", &matrix(), |v| v[0].all_reduce(Axis::Tp)?.all_reduce(Axis::Tp));
    assert!(matches!(error, Err(CheckError::NothingAccepted { .. })), "{error:?}");
}

#[test]
fn a_layer_whose_parameter_is_used_twice_is_found() {
    let layer = |factor: fn(usize) -> f64| {
        check_layer(
            "row",
            &[LayerInput::value("x", &[3, 12], Ty::Shard(1))],
            |params, _| {
                let cut = Placement::replicated().shard(Axis::Tp, 1);
                params.declare("w", &[5, 12], cut, Role::Weight, Init::Zeros)
            },
            move |&w, tape, v| {
                let ranks = tape.rank().mesh().degree(Axis::Tp);
                v[0].linear(&tape.param(w)?, 1)?.all_reduce(Axis::Tp)?.scale(factor(ranks))
            },
        )
    };
    layer(|_| 1.0).unwrap();
    let error = layer(|ranks| ranks as f64).unwrap_err().to_string();
    assert_says(
        &error,
        &[
            "tp=3, x Shard(1): the output is Invariant, and it is 3 times that of one rank",
            "tp=3, x Shard(1): the gradient of w is Shard(1), and it is 3 times",
        ],
    );
}

#[test]
fn a_layer_whose_input_cannot_be_shared_out_is_refused() {
    let error = check_layer("any", &[LayerInput::value("x", &[8], Ty::Shard(0))], |_, _| Ok(()), |(), _, v| v[0].exp());
    assert_eq!(
        error.unwrap_err().to_string(),
        "any: dim 0 of x has extent 8, which 1 to 4 ranks cannot share evenly; make it a multiple of 12"
    );
}
