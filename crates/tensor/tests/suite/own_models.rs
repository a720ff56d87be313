//! Broadcasting, products of matrices, chosen elements and constants: values by index, gradients against differences,
//! and the wrong programs that they refuse.

use crate::common::check::check;
use crate::common::{NoParams, alone, ids, input, integers, on_mesh, on_tp, tape_of, to_f64, values};
use crate::everyday_ops::refused;
use Ty::{Invariant as I, Replicate as R, Shard as S};
use meshwork_core::{Axis, Rank, Ty, Types};
use meshwork_tensor::tape::Weights;
use meshwork_tensor::{Result, Tape, Tensor, Var};
use std::sync::Arc;

const TP: Axis = Axis::Tp;
const X: (&str, &[usize]) = ("x", &[3, 4, 5]);

#[test]
fn gradients_of_what_is_repeated() {
    for y in [&[3, 1, 5][..], &[3, 4, 1], &[1, 4, 1], &[3, 1, 1], &[4, 1], &[1, 1, 1], &[1]] {
        let inputs = [X, ("y", y)];
        check("add of ones", &inputs, |_, v| v[1].add(&v[0])?.tanh());
        check("sub of ones", &inputs, |_, v| v[0].sub(&v[1])?.tanh());
        check("sub from ones", &inputs, |_, v| v[1].sub(&v[0])?.tanh());
        check("mul by ones", &inputs, |_, v| v[0].mul(&v[1]));
        check("div by ones", &inputs, |_, v| v[0].div(&v[1].exp()?));
        check("expand_as", &inputs, |_, v| v[1].expand_as(&v[0])?.mul(&v[0]));
        check("select", &inputs, |_, v| v[0].greater(&v[1])?.select(&v[1], &v[0]));
    }
}

#[test]
fn gradients_of_products_of_matrices() {
    for lead in [&[][..], &[3], &[2, 3]] {
        let of = |dims: [usize; 2]| [lead, &dims].concat();
        let check = |name: &str, x, y, op: fn(&Var, &Var) -> Result<Var>| {
            check(name, &[("x", &of(x)), ("y", &of(y))], |_, v| op(&v[0], &v[1]));
        };
        check("matmul", [4, 5], [5, 6], Var::matmul);
        check("matmul_nt", [4, 5], [6, 5], Var::matmul_nt);
        check("matmul_tn", [5, 4], [5, 6], Var::matmul_tn);
    }
}

#[test]
fn gradients_of_elements_chosen_along_a_dim() {
    for dim in 0..3 {
        check("max", &[X], |_, v| v[0].max(dim));
        let index = |tape: &Tape| ids(tape, &[2, 0, 2, 1], &[4], Types::NONE);
        check("index_select", &[X], |tape, v| v[0].index_select(dim, &index(tape)));
    }
    for dim in 1..3 {
        check("take_along_dim", &[X], |_, v| v[0].take_along_dim(dim, &v[0].argmax(dim)?.unsqueeze(dim)?));
    }
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
    let chosen = v.index_select(2, &ids(&tape, &[3, 0, 3], &[3], Types::NONE)).unwrap();
    assert_eq!(got(chosen), (vec![2, 3, 3, 5], build([2, 3, 3, 5], &|i, j, k, l| at(i, j, [3, 0, 3][k], l))));
    let largest = |i, j, l| (0..4).map(|k| at(i, j, k, l)).fold(f64::NEG_INFINITY, f64::max);
    assert_eq!(got(v.max(2).unwrap()), (vec![2, 3, 5], build([2, 3, 5, 1], &|i, j, l, _| largest(i, j, l))));
    let ties = input(&tape, &[1.0, 7.0, 7.0, f64::NAN, 9.0, f64::NAN], &[2, 3], Types::NONE);
    assert_eq!(ties.argmax(1).unwrap().tensor().to_vec::<i32>().unwrap(), [1, 0]);
    let wide = v.mul(&v.narrow(2, 1..2).unwrap()).unwrap();
    assert_eq!(got(wide), (vec![2, 3, 4, 5], build([2, 3, 4, 5], &|i, j, k, l| at(i, j, k, l) * at(i, j, 1, l))));
    let wide = v.sub(&v.narrow(1, 2..3).unwrap().narrow(3, 1..2).unwrap()).unwrap();
    assert_eq!(got(wide), (vec![2, 3, 4, 5], build([2, 3, 4, 5], &|i, j, k, l| at(i, j, k, l) - at(i, 2, k, 1))));
    let product = v.matmul_nt(&v).unwrap();
    let dot = |i, j, k, n| (0..5).map(|l| at(i, j, k, l) * at(i, j, n, l)).sum::<f64>();
    let (shape, values) = got(product);
    let want = build([2, 3, 4, 4], &dot);
    assert!(shape == [2, 3, 4, 4] && values.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-12), "{values:?}");
}

/// No NaN of what is not selected comes through, nor through the gradients.
#[test]
fn what_is_not_selected_does_not_matter() {
    let tape = tape_of(&alone());
    let [a, b] = [[1.0, f64::NAN, f64::INFINITY], [f64::NAN, 5.0, 6.0]].map(|x| input(&tape, &x, &[3], Types::NONE));
    let mask = tape.constant(Tensor::from_slice(tape.device(), &[1.0_f64, 0.0, 0.0], [3]).unwrap(), Types::NONE);
    let y = mask.select(&a, &b).unwrap();
    assert_eq!(to_f64(y.tensor()), [1.0, 5.0, 6.0]);
    let seed = Tensor::from_slice(tape.device(), &[7.0_f64, 8.0, 9.0], [3]).unwrap();
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    assert_eq!([a, b].map(|x| to_f64(&tape.take_grad(&x).unwrap())), [[7.0, 0.0, 0.0], [0.0, 8.0, 9.0]]);
}

/// A vector that is the same on every rank, declared so either way, beside values of any type; a value is refused.
#[test]
fn a_constant_is_read_as_a_parameter_is() {
    let run = |rank: Arc<Rank>| {
        let tape = tape_of(&rank);
        let x = input(&tape, &integers("x", 24), &[2, 2, 6], on_tp(I));
        for declared in [I, R] {
            let row = Tensor::from_slice(tape.device(), &integers("row", 6), [6]).unwrap();
            let row = tape.constant(row, on_tp(declared));
            let row = row.add(&row.scale(2.0).unwrap()).unwrap();
            assert_eq!(x.mul(&row).unwrap().types(), on_tp(I));
            assert_eq!(x.split(TP, 1).unwrap().add(&row).unwrap().types(), on_tp(S(1)));
            assert_eq!(x.copy(TP).unwrap().div(&row).unwrap().types(), on_tp(R));
        }
        let shard = Tensor::from_slice(tape.device(), &integers("row", 6), [6]).unwrap();
        assert!(x.mul(&tape.constant(shard, on_tp(S(0)))).is_err());
        let computed = input(&tape, &integers("row", 6), &[6], on_tp(I));
        assert!(x.split(TP, 1).unwrap().mul(&computed).is_err());
        assert!(x.split(TP, 1).unwrap().mul(&computed.detach()).is_ok());
    };
    on_mesh("tp=2", run);
    on_mesh("tp=1", run);
}

#[test]
fn wrong_programs_are_refused() {
    refused(
        |_, x| x(S(2)).mul(&x(I).narrow(2, 0..1)?),
        "mul: on axis tp, x is Shard(2) and y is Invariant: the gradient of y would miss the other ranks' share; copy(I→R) y first",
    );
    refused(
        |_, x| x(S(2)).max(2),
        "max: on axis tp, dim 2 of x is sharded, and max needs the whole of it on one rank; all_gather x along dim 2 first",
    );
    refused(
        |_, x| x(S(2)).matmul_nt(&x(R)),
        "matmul_nt: on axis tp, x is Shard(2) and y is Replicate: a rank's matrices need elements of other ranks; cut the same leading dim \
         of both, dim 1 of x or dim 1 of y, or the dims that are summed over first",
    );
    refused(
        |_, x| x(I).matmul_nt(&x(S(1))),
        "matmul_nt: on axis tp, x is Invariant and y is Shard(1): the gradient of x would miss the other ranks' share; copy(I→R) x first",
    );
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let tape = tape_of(&alone());
    let x = |shape: &[usize]| input(&tape, &vec![0.0; shape.iter().product()], shape, Types::NONE);
    let v = x(&[2, 4, 6]);
    for (result, message) in [
        (
            x(&[2, 1, 6]).mul(&x(&[2, 4, 1])),
            "mul: the dims of y must be those of x, or its trailing ones, or have extent 1 (shapes [[2, 1, 6], [2, 4, 1]])",
        ),
        (
            v.matmul(&v),
            "matmul: x is [.., m, k] and y [.., k, n], with the same k and the same leading dims (shapes [[2, 4, 6], [2, 4, 6]])",
        ),
        (
            v.matmul_nt(&x(&[1, 4, 6])),
            "matmul_nt: x is [.., m, k] and y [.., n, k], with the same k and the same leading dims (shapes [[2, 4, 6], [1, 4, 6]])",
        ),
        (v.max(3), "max: x has no dim 3: its dims are 0..3 (shapes [[2, 4, 6]])"),
        (x(&[2, 0]).max(1), "max: dim 1 has no elements, and so no largest one (shapes [[2, 0]])"),
        (
            v.index_select(1, &ids(&tape, &[0], &[1, 1], Types::NONE)),
            "index_select: index is a vector (shapes [[2, 4, 6], [1, 1]])",
        ),
        (
            v.take_along_dim(1, &ids(&tape, &[0; 8], &[2, 4], Types::NONE)),
            "take_along_dim: index has the dims of x, but for dim 1 (shapes [[2, 4, 6], [2, 4]])",
        ),
        (
            v.index_select(1, &ids(&tape, &[3, 4], &[2], Types::NONE)),
            "index_select: index 4 at place 1: indices are from 0 to 3",
        ),
    ] {
        assert_eq!(result.unwrap_err().to_string(), message);
    }
}
