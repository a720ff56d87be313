//! Products, sums, activations, losses and reshapes: values and gradients, on one rank and on two, and the wrong
//! programs that they refuse.

use crate::common::check::check;
use crate::common::{NoParams, alone, input, integers, on_mesh, on_tp, tape_of, tape_on, to_f64, values};
use Ty::{Invariant as I, Partial as P, Shard as S, Varying as V};
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, DType, Mesh, Rank, Ty, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{Normaliser, Weights};
use meshwork_tensor::{Result, Tape, Tensor, Var};
use std::sync::Arc;

const TP: Axis = Axis::Tp;
const X: (&str, &[usize]) = ("x", &[3, 4, 5]);

#[test]
fn gradients_of_functions_of_one_value() {
    check("scale", &[X], |_, v| v[0].scale(-1.7));
    check("exp", &[X], |_, v| v[0].exp());
    check("tanh", &[X], |_, v| v[0].tanh());
    check("sigmoid", &[X], |_, v| v[0].sigmoid());
    check("silu", &[X], |_, v| v[0].silu());
    check("soft_cap", &[X], |_, v| v[0].soft_cap(1.5));
    check("log", &[X], |_, v| v[0].exp()?.log());
    check("sqrt", &[X], |_, v| v[0].exp()?.sqrt());
    check("softmax", &[X], |_, v| v[0].softmax());
    check("square", &[X], |_, v| v[0].map("square", |x| x * x, |x, _| 2.0 * x));
    check("exp, by its value", &[X], |_, v| v[0].map("exp", f64::exp, |_, y| y));
}

#[test]
fn gradients_of_functions_of_two_values() {
    // 65 rows: more than are summed in one part.
    for x in [X, ("x", &[13, 5, 5])] {
        for y in [x.1, &x.1[1..], &x.1[2..]] {
            let inputs = [x, ("y", y)];
            check("mul", &inputs, |_, v| v[0].mul(&v[1]));
            check("mul, the smaller one first", &inputs, |_, v| v[1].mul(&v[0]));
            check("sub", &inputs, |_, v| v[0].sub(&v[1]));
            check("add", &inputs, |_, v| v[0].add(&v[1]));
            check("add, the smaller one first", &inputs, |_, v| v[1].add(&v[0]));
            check("div", &inputs, |_, v| v[0].div(&v[1].exp()?));
        }
    }
    check("the square of one value", &[X], |_, v| v[0].mul(&v[0]));
}

#[test]
fn gradients_of_sums_and_losses() {
    for dim in 0..3 {
        check("sum", &[X], |_, v| v[0].sum(dim));
        check("mean", &[X], |_, v| v[0].mean(dim));
    }
    check("sum_per_sample", &[X], |_, v| v[0].sum_per_sample());
    check("mean_per_sample", &[X], |_, v| v[0].mean_per_sample());
    check("mean_squared_error", &[X, ("targets", X.1)], |_, v| v[0].mean_squared_error(&v[1]));
    check("mean_squared_error of one number each", &[("x", &[6]), ("t", &[6])], |_, v| v[0].mean_squared_error(&v[1]));
}

#[test]
fn gradients_of_reshapes() {
    check("reshape", &[X], |_, v| v[0].reshape(&[3, 20])?.reshape(&[3, 2, 5, 2])?.tanh());
    for (a, b) in [(1, 2), (1, 3), (3, 2), (2, 2)] {
        check("transpose", &[("x", &[2, 3, 4, 5])], |_, v| v[0].transpose(a, b)?.tanh());
    }
    check("transpose of one sample", &[("x", &[1, 3, 4, 5])], |_, v| v[0].transpose(1, 3)?.tanh());
    for (dim, y) in [(1, &[3, 2, 5]), (2, &[3, 4, 7])] {
        check("concat", &[X, ("y", y)], |_, v| v[0].concat(&v[1], dim)?.tanh());
    }
    for dim in [1, 2] {
        check("narrow", &[X], |_, v| v[0].narrow(dim, 1..3));
        check("widen", &[X], |_, v| v[0].widen(dim, 7)?.tanh());
        let y: [&[usize]; 2] = [&[3, 3, 4, 5], &[3, 4, 3, 5]];
        check("repeat", &[X, ("y", y[dim - 1])], |_, v| v[0].repeat(dim, 3, TP)?.mul(&v[1]));
    }
}

#[test]
fn gradients_of_a_whole_operation_in_one_call() {
    let each = |x: &Tensor, y: &Tensor, f: fn(f64, f64) -> f64| {
        let (xs, ys) = (x.to_vec::<f64>()?, y.to_vec::<f64>()?);
        Tensor::from_slice(x.device(), &xs.iter().zip(&ys).map(|(&x, &y)| f(x, y)).collect::<Vec<_>>(), x.shape())
    };
    check("length", &[X, ("y", X.1)], |tape, v| {
        tape.custom(
            "length",
            &["x", "y"],
            &[&v[0], &v[1]],
            rules::elementwise,
            move |inputs| each(inputs[0], inputs[1], f64::hypot),
            move |inputs, length, grad| {
                let slope =
                    |x: &Tensor| each(grad, &each(x, length, |x, length| x / length)?, |grad, slope| grad * slope);
                Ok(vec![slope(&inputs[0])?, slope(&inputs[1])?])
            },
        )
    });
}

/// Naive, by index.
#[test]
fn values_by_index() {
    let tape = tape_of(&alone());
    let x = values("x", 120);
    let v = input(&tape, &x, &[2, 3, 4, 5], Types::NONE);
    let at = |i: usize, j: usize, k: usize, l: usize| x[((i * 3 + j) * 4 + k) * 5 + l];
    let got = |var: Var| (var.shape().to_vec(), to_f64(var.tensor()));
    let build = |[a, b, c, d]: [usize; 4], f: &dyn Fn(usize, usize, usize, usize) -> f64| -> Vec<f64> {
        let index = |n: usize| [n / (b * c * d), n / (c * d) % b, n / d % c, n % d];
        (0..a * b * c * d).map(index).map(|[i, j, k, l]| f(i, j, k, l)).collect()
    };
    assert_eq!(got(v.transpose(1, 3).unwrap()), (vec![2, 5, 4, 3], build([2, 5, 4, 3], &|i, j, k, l| at(i, l, k, j))));
    assert_eq!(got(v.transpose(1, 2).unwrap()), (vec![2, 4, 3, 5], build([2, 4, 3, 5], &|i, j, k, l| at(i, k, j, l))));
    assert_eq!(
        got(v.narrow(2, 1..3).unwrap()),
        (vec![2, 3, 2, 5], build([2, 3, 2, 5], &|i, j, k, l| at(i, j, k + 1, l)))
    );
    assert_eq!(got(v.reshape(&[2, 12, 5]).unwrap()), (vec![2, 12, 5], x.clone()));
    let or_zero = |i, j, k, l| if k < 4 { at(i, j, k, l) } else { 0.0 };
    assert_eq!(got(v.widen(2, 6).unwrap()), (vec![2, 3, 6, 5], build([2, 3, 6, 5], &or_zero)));
    assert_eq!(got(v.widen(2, 4).unwrap()), (vec![2, 3, 4, 5], x.clone()));
    let repeated = v.flatten(2..4).unwrap().repeat(2, 2, TP).unwrap();
    assert_eq!(got(repeated), (vec![2, 3, 2, 20], build([2, 3, 2, 20], &|i, j, _, l| at(i, j, l / 5, l % 5))));
    let parts = [v.narrow(2, 0..1).unwrap(), v.narrow(2, 1..4).unwrap()];
    assert_eq!(got(parts[0].concat(&parts[1], 2).unwrap()), (vec![2, 3, 4, 5], x.clone()));
    let sum = build([2, 3, 5, 1], &|i, j, l, _| (0..4).map(|k| at(i, j, k, l)).fold(0.0, |sum, x| sum + x));
    assert_eq!(got(v.sum(2).unwrap()), (vec![2, 3, 5], sum.clone()));
    assert_eq!(got(v.mean(2).unwrap()), (vec![2, 3, 5], sum.iter().map(|sum| sum * 0.25).collect()));
    assert_eq!(v.mean_per_sample().unwrap().shape()[..], [2]);
    let t = input(&tape, &values("t", 120), &[2, 3, 4, 5], Types::NONE);
    let errors: Vec<f64> = x.iter().zip(values("t", 120)).map(|(x, t)| (x - t) * (x - t)).collect();
    let loss: Vec<f64> =
        errors.chunks(60).map(|sample| 1.0 / 60.0 * sample.iter().fold(0.0, |sum, x| sum + x)).collect();
    assert_eq!(got(v.mean_squared_error(&t).unwrap()), (vec![2], loss));
}

/// With a batch large enough to be cut into pieces for several threads, each half alone has the same bits, forward and
/// backward.
#[test]
fn bits_do_not_depend_on_how_much_is_computed_at_once() {
    const EACH: [usize; 2] = [37, 41];
    type Program = fn(&[Var; 3]) -> Result<Var>;
    let programs: [(&str, Program); 6] = [
        ("softmax of a product with a row", |[x, _, row]| x.mul(row)?.softmax()),
        ("a quotient of activations", |[x, y, _]| x.tanh()?.div(&y.sigmoid()?)?.silu()),
        ("a mean over the last dim", |[x, ..]| x.mean(2)),
        ("a sum over the middle dim", |[x, y, _]| x.sub(y)?.sum(1)),
        ("a squared error", |[x, y, _]| x.mean_squared_error(y)),
        ("a function of the host, transposed", |[x, ..]| {
            x.map("cube", |x| x * x * x, |x, _| 3.0 * x * x)?.transpose(1, 2)
        }),
    ];
    let single = |name: &str, from: usize, count: usize| -> Vec<f32> {
        values(name, from + count)[from..].iter().map(|&value| value as f32).collect()
    };
    for (name, program) in programs {
        let run = |samples: std::ops::Range<usize>| {
            let tape = tape_of(&alone());
            let each = EACH[0] * EACH[1];
            let shape = [samples.len(), EACH[0], EACH[1]];
            let of = |name: &str| {
                let values = single(name, samples.start * each, samples.len() * each);
                tape.input(Tensor::from_slice(tape.device(), &values, shape).unwrap(), Types::NONE)
            };
            let row = Tensor::from_slice(tape.device(), &single("row", 0, EACH[1]), [EACH[1]]).unwrap();
            let inputs = [of("x"), of("y"), tape.constant(row, Types::NONE)];
            let z = program(&inputs).unwrap();
            let count = z.shape().count() / samples.len();
            let seed = single("seed", samples.start * count, samples.len() * count);
            let seed = match z.tensor().dtype() {
                DType::F64 => {
                    Tensor::from_slice(tape.device(), &seed.into_iter().map(f64::from).collect::<Vec<_>>(), z.shape())
                }
                _ => Tensor::from_slice(tape.device(), &seed, z.shape()),
            };
            tape.backward(&z, seed.unwrap(), Weights::Now, &mut NoParams).unwrap();
            [to_f64(z.tensor()), to_f64(&tape.take_grad(&inputs[0]).unwrap())]
        };
        let ([low, high], whole) = ([run(0..31), run(31..60)], run(0..60));
        for (i, whole) in whole.iter().enumerate() {
            assert!([&low[i][..], &high[i]].concat() == *whole, "{name}: {}", ["forward", "backward"][i]);
        }
    }
}

/// A program on one rank and on two of tp, in integers: forward and the gradient of x, assembled, are equal.
#[track_caller]
fn same_on_two_ranks(name: &str, program: impl Fn(&Tape, &Var) -> Result<Var> + Sync) {
    const SHAPE: [usize; 3] = [2, 4, 6];
    let run = |rank: Arc<Rank>| {
        let tape = tape_of(&rank);
        let x = input(&tape, &integers("x", 48), &SHAPE, on_tp(I));
        let y = program(&tape, &x).unwrap();
        let seed = Tensor::from_slice(tape.device(), &integers("seed", y.shape().count()), y.shape()).unwrap();
        tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
        (y.types(), to_f64(y.tensor()), to_f64(&tape.take_grad(&x).unwrap()))
    };
    let one = on_mesh("tp=1", run).remove(0);
    assert_eq!(one.0, on_tp(I), "{name} ends as it began");
    for two in on_mesh("tp=2", run) {
        assert!(two == one, "{name}: {two:?} against {one:?}");
    }
}

#[test]
fn programs_in_parts_have_the_numbers_of_one_rank() {
    same_on_two_ranks("a product of shards", |_, x| {
        let x = x.split(TP, 1)?;
        x.mul(&x)?.all_gather_invariant(TP, 1)
    });
    same_on_two_ranks("a product of a shard and a row", |_, x| {
        let row = x.copy(TP)?.narrow(1, 0..1)?.sum(1)?.sum(0)?;
        x.split(TP, 1)?.mul(&row)?.all_gather_invariant(TP, 1)
    });
    same_on_two_ranks("a product of a Partial and a Replicate value", |_, x| {
        x.split(TP, 1)?.sum(1)?.mul(&x.copy(TP)?.narrow(1, 2..3)?.sum(1)?)?.all_reduce(TP)
    });
    same_on_two_ranks("a sum over a sharded dim", |_, x| x.split(TP, 2)?.sum(2)?.all_reduce(TP));
    same_on_two_ranks("a mean over a sharded dim", |_, x| x.split(TP, 1)?.mean(1)?.all_reduce(TP));
    same_on_two_ranks("a sum before a sharded dim", |_, x| x.split(TP, 2)?.sum(1)?.all_gather_invariant(TP, 1));
    same_on_two_ranks("a difference of Partial values", |_, x| {
        let x = x.split(TP, 2)?;
        x.sum(2)?.scale(3.0)?.sub(&x.mul(&x)?.sum(2)?)?.all_reduce(TP)
    });
    same_on_two_ranks("a shard behind another", |_, x| {
        let x = x.split(TP, 1)?;
        x.concat(&x.mul(&x)?, 2)?.all_gather_invariant(TP, 1)
    });
    same_on_two_ranks("a shard transposed", |_, x| x.split(TP, 1)?.transpose(1, 2)?.all_gather_invariant(TP, 2));
    same_on_two_ranks("a shard cut into two dims", |_, x| {
        let x = x.split(TP, 1)?;
        x.unflatten(1, &[x.shape()[1] / 2, 2])?.all_gather_invariant(TP, 1)
    });
}

/// A loss whose elements are cut is the sum of the ranks' losses; means are over all of them.
#[test]
fn a_squared_error_of_cut_elements() {
    let run = |rank: Arc<Rank>| {
        let tape = tape_of(&rank);
        let (x, t) = (integers("x", 24), integers("t", 24));
        let (x, t) = (input(&tape, &x, &[3, 2, 4], on_tp(I)), input(&tape, &t, &[3, 2, 4], on_tp(I)));
        let loss = x.split(TP, 2).unwrap().mean_squared_error(&t.split(TP, 2).unwrap()).unwrap();
        assert_eq!(loss.types(), on_tp(P));
        let loss = loss.all_reduce(TP).unwrap();
        tape.backward_from_loss(&loss, Normaliser::Scale(1.0), Weights::Now, &mut NoParams).unwrap();
        (to_f64(loss.tensor()), [x, t].map(|input| to_f64(&tape.take_grad(&input).unwrap())))
    };
    let one = on_mesh("tp=1", run).remove(0);
    assert!(on_mesh("tp=2", run).into_iter().all(|two| two == one));
}

/// Refused as one of two ranks and on one alone, in these words.
#[track_caller]
pub fn refused(wrong: impl Fn(&Tape, &dyn Fn(Ty) -> Var) -> Result<Var>, message: &str) {
    for degree in [1, 2] {
        let rank = Arc::new(Rank::recording(&Mesh::new([(TP, degree)]).unwrap(), 0).unwrap());
        let tape = tape_on(&rank, Meta::device());
        let x = |ty| {
            let extents: Vec<usize> =
                [2, 4, 6].iter().enumerate().map(|(d, &n)| if ty == S(d) { n / degree } else { n }).collect();
            input(&tape, &vec![0.0; extents.iter().product()], &extents, on_tp(ty))
        };
        let error = wrong(&tape, &x).err().unwrap_or_else(|| panic!("accepted at degree {degree}"));
        assert_eq!(error.to_string(), message, "at degree {degree}");
    }
}

#[test]
fn wrong_programs_are_refused() {
    refused(
        |_, x| x(P).tanh(),
        "tanh: on axis tp, x is Partial, and tanh of a sum is not the sum of tanh; all_reduce or reduce_scatter x over tp first",
    );
    refused(
        |_, x| x(P).mul(&x(P)),
        "mul: on axis tp, x and y are both Partial, and a product of sums is not the sum of products; \
         all_reduce_replicate one of them first, as y",
    );
    refused(
        |_, x| x(P).sub(&x(I)),
        "sub: on axis tp, x is Partial and y is Invariant: y would be counted once per rank; \
         all_reduce or reduce_scatter x over tp first",
    );
    refused(
        |_, x| x(I).mul(&x(I).copy(TP)?),
        "mul: on axis tp, x is Invariant and y is Replicate: the gradient of x would miss the other ranks' share; copy(I→R) x first",
    );
    refused(
        |_, x| x(S(1)).div(&x(P)),
        "div: on axis tp, y is Partial, and div of a sum is not the sum of div; all_reduce or reduce_scatter y over tp first",
    );
    refused(
        |_, x| x(S(2)).softmax(),
        "softmax: on axis tp, dim 2 of x is sharded, and softmax needs the whole of it on one rank; all_gather x along dim 2 first",
    );
    refused(
        |_, x| x(S(2)).sum(2)?.mean_squared_error(&x(I).sum(2)?),
        "mean_squared_error: on axis tp, x is Partial, and mean_squared_error of a sum is not the sum of \
         mean_squared_error; all_reduce or reduce_scatter x over tp first",
    );
    refused(
        |_, x| x(S(1)).mean_squared_error(&x(I).narrow(1, 0..x(S(1)).shape()[1])?),
        "mean_squared_error: on axis tp, x is Shard(1) and targets is Invariant: the gradient of targets would miss the other \
         ranks' share; split(I→S) targets along dim 1 first",
    );
    refused(
        |_, x| x(I).repeat(1, 2, TP),
        "repeat: on axis tp, x is Invariant, and each rank repeats all of it; copy or all_gather x first, so that it is Replicate",
    );
    refused(
        |_, x| x(S(1)).widen(1, 9),
        "widen: on axis tp, dim 1 of x is sharded, and widen needs the whole of it on one rank; all_gather x along dim 1 first",
    );
    refused(
        |_, x| x(S(1)).narrow(1, 0..1),
        "narrow: on axis tp, dim 1 of x is sharded, and narrow needs the whole of it on one rank; all_gather x along dim 1 first",
    );
    refused(
        |_, x| x(S(1)).concat(&x(S(1)), 1),
        "concat: on axis tp, dim 1 of x is sharded, and concat needs the whole of it on one rank; all_gather x along dim 1 first",
    );
    refused(
        |_, x| x(P).map("square", |x| x * x, |x, _| 2.0 * x),
        "square: on axis tp, x is Partial, and square of a sum is not the sum of square; all_reduce or reduce_scatter x over tp first",
    );
    let rule = |op: &str, operands: &[Operand<'_>]| rules::elementwise(op, operands);
    refused(
        |tape, x| tape.custom("f", &["x", "y"], &[&x(V), &x(I)], rule, |x| Ok(x[0].clone()), |_, _, _| Ok(vec![])),
        "f: on axis tp, x is Varying and y is Invariant: the gradient of y would miss the other ranks' share; copy(I→R) y first",
    );
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let tape = tape_of(&alone());
    let x = |shape: &[usize]| input(&tape, &vec![0.0; shape.iter().product()], shape, Types::NONE);
    let v = x(&[2, 4, 6]);
    for (result, message) in [
        (
            v.mul(&x(&[4])),
            "mul: the dims of y must be those of x, or its trailing ones, or have extent 1 (shapes [[2, 4, 6], [4]])",
        ),
        (
            x(&[5]).sub(&v),
            "sub: the dims of y must be those of x, or its trailing ones, or have extent 1 (shapes [[5], [2, 4, 6]])",
        ),
        (
            x(&[1, 1, 1, 1, 1, 2]).linear(&x(&[2, 2, 2]), 1),
            "linear: the result has at most 6 dims (shapes [[1, 1, 1, 1, 1, 2], [2, 2, 2]])",
        ),
        (v.soft_cap(0.0), "soft_cap: a cap of 0 is none: use a finite number above zero (shapes [[2, 4, 6]])"),
        (v.sum(3), "sum: x has no dim 3: its dims are 0..3 (shapes [[2, 4, 6]])"),
        (x(&[]).softmax(), "softmax: x has at least one dim (shapes [[]])"),
        (
            v.mean_squared_error(&x(&[2, 4])),
            "mean_squared_error: targets have the shape of x, [samples, ..] (shapes [[2, 4, 6], [2, 4]])",
        ),
        (
            v.reshape(&[2, 23]),
            "reshape: as many elements on this rank as before, in at most 6 dims (shapes [[2, 4, 6], [2, 23]])",
        ),
        (v.reshape(&[8, 6]), "reshape: dim 0 counts samples and stays as it is (shapes [[2, 4, 6], [8, 6]])"),
        (
            v.transpose(0, 1),
            "transpose: dims 0 and 1 must be among 1..3; dim 0 counts samples and stays in front (shapes [[2, 4, 6]])",
        ),
        (v.narrow(1, 2..5), "narrow: 2..5 is no part of dim 1, of extent 4 (shapes [[2, 4, 6]])"),
        (
            v.concat(&x(&[2, 4, 5]), 1),
            "concat: both must have dim 1, and be alike in all other dims (shapes [[2, 4, 6], [2, 4, 5]])",
        ),
        (v.concat(&v, 0), "concat: dim 0 counts samples and stays as it is (shapes [[2, 4, 6], [2, 4, 6]])"),
        (v.narrow(0, 0..1), "narrow: dim 0 counts samples and stays as it is (shapes [[2, 4, 6]])"),
        (v.widen(1, 3), "widen: dim 1 is none of 1..3, or longer than 3 (shapes [[2, 4, 6], [3]])"),
        (v.repeat(0, 2, TP), "repeat: dim 0 counts samples and stays as it is (shapes [[2, 4, 6]])"),
        (v.repeat(4, 2, TP), "repeat: a new dim lies in front of one of 3 dims, or behind them (shapes [[2, 4, 6]])"),
    ] {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
    let through = |backward: fn(&Tensor) -> Vec<Tensor>| {
        let rule = |op: &str, x: &[Operand<'_>]| rules::linear_map(op, x[0]);
        let tape = tape_of(&alone());
        let x = input(&tape, &[1.0, 2.0], &[2], Types::NONE);
        let y =
            tape.custom("f", &["x"], &[&x], rule, |x| Ok(x[0].clone()), move |_, _, grad| Ok(backward(grad))).unwrap();
        let seed = y.tensor().clone();
        tape.backward(&y, seed, Weights::Now, &mut NoParams).map(|()| to_f64(&tape.take_grad(&x).unwrap()))
    };
    assert_eq!(through(|grad| vec![grad.clone()]).unwrap(), [1.0, 2.0]);
    assert_eq!(
        through(|_| vec![]).unwrap_err().to_string(),
        "f: its gradient must give 1 tensors with the shapes of its inputs, [[2]]"
    );
}
