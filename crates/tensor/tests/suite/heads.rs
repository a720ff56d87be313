//! Reshapes that say what they mean, at extents of 1: a decoder layer whose heads a user splits, repeats and merges,
//! with one head per rank, one sample, one token.

use crate::common::{NoParams, input, on_mesh, on_tp, tape_of, tape_on, to_f64, values};
use meshwork_core::{Axis, Mesh, Rank, Ty, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::Weights;
use meshwork_tensor::{Result, Tensor, Var};
use std::sync::Arc;

const TP: Axis = Axis::Tp;
const HEADS: usize = 4;
const HEAD: usize = 3;
const HIDDEN: usize = 5;

/// What a layer is tried on.
#[derive(Clone, Copy, Debug)]
struct Case {
    samples: usize,
    tokens: usize,
    sequence_parallel: bool,
    /// Heads of queries to a head of keys and values.
    group: usize,
}

/// This rank's part of a weight that is cut along `dim`.
fn weight(like: &Var, name: &str, dims: &[usize], dim: usize) -> Var {
    let (tape, rank) = (like.tape(), like.tape().rank());
    let whole = input(tape, &values(name, dims.iter().product()), dims, Types::all(rank.mesh(), Ty::Invariant));
    whole.split(TP, dim).unwrap()
}

/// Grouped-query attention by hand up to the product with the values' heads: each head of keys and values is repeated
/// for its group.
fn layer(x: &Var, Case { sequence_parallel, group, .. }: Case) -> Result<Var> {
    let normed = x.tanh()?;
    let tokens = if sequence_parallel { normed.all_gather(TP, 1)? } else { normed.copy(TP)? }; // [b, s, h]
    let heads = |name: &str, heads: usize| -> Result<Var> {
        let y = tokens.linear(&weight(x, name, &[heads * HEAD, HIDDEN], 0), 1)?; // [b, s, heads·d]
        y.unflatten(2, &[y.shape()[2] / HEAD, HEAD]) // [b, s, heads, d]
    };
    let q = heads("q", HEADS * group)?;
    let repeated = |name: &str| -> Result<Var> {
        let one = heads(name, HEADS)?.unsqueeze(3)?; // [b, s, heads, 1, d]
        let all = (1..group).try_fold(one.clone(), |all, _| all.concat(&one, 3))?; // [b, s, heads, group, d]
        all.flatten(2..4)?.flatten(2..4)?.unsqueeze(2) // [b, s, 1, heads·group·d]
    };
    let kv = repeated("k")?.concat(&repeated("v")?, 2)?;
    let mixed = q.grouped_attention(&kv, None, None, None)?.flatten(2..4)?; // [b, s, heads·d]
    let y = mixed.linear(&weight(x, "out", &[HIDDEN, HEADS * group * HEAD], 1), 1)?;
    x.add(&if sequence_parallel { y.reduce_scatter(TP, 1)? } else { y.all_reduce(TP)? })
}

/// Output and gradient of x, whole.
fn run(rank: &Arc<Rank>, case: Case) -> [Vec<f64>; 2] {
    let tape = tape_of(rank);
    let shape = [case.samples, case.tokens, HIDDEN];
    let count = shape.iter().product();
    let x = input(&tape, &values("x", count), &shape, Types::all(rank.mesh(), Ty::Invariant));
    let y = match case.sequence_parallel {
        true => layer(&x.split(TP, 1).unwrap(), case).unwrap().all_gather_invariant(TP, 1),
        false => layer(&x, case),
    }
    .unwrap();
    assert_eq!((&y.shape()[..], y.ty(TP)), (&shape[..], Ty::Invariant));
    let seed = Tensor::from_slice(tape.device(), &values("seed", count), shape).unwrap();
    tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
    [to_f64(y.tensor()), to_f64(&tape.take_grad(&x).unwrap())]
}

#[test]
fn a_decoder_layer_with_one_head_one_sample_or_one_token_per_rank_has_the_numbers_of_one_rank() {
    for case in [
        Case { samples: 1, tokens: 8, sequence_parallel: true, group: 1 }, // a micro-batch of 1
        Case { samples: 1, tokens: 4, sequence_parallel: true, group: 2 }, // one token on each of four ranks
        Case { samples: 1, tokens: 1, sequence_parallel: false, group: 1 }, // the first token of a decoder
        Case { samples: 2, tokens: 1, sequence_parallel: false, group: 2 },
        Case { samples: 2, tokens: 3, sequence_parallel: false, group: 2 },
    ] {
        let alone = on_mesh("tp=1", |rank| run(&rank, case)).remove(0);
        for mesh in ["tp=2", "tp=4"] {
            for found in on_mesh(mesh, |rank| run(&rank, case)) {
                for (got, wanted) in found.iter().flatten().zip(alone.iter().flatten()) {
                    assert!(
                        (got - wanted).abs() < 1e-12 * wanted.abs().max(1.0),
                        "{case:?} on {mesh}: {got} and {wanted}"
                    );
                }
            }
        }
    }
}

/// Shapes alone, as one of so many ranks of tp.
fn value(degree: usize, ty: Ty, shape: &[usize]) -> Var {
    let rank = Arc::new(Rank::recording(&Mesh::new([(TP, degree)]).unwrap(), 0).unwrap());
    input(&tape_on(&rank, Meta::device()), &vec![0.0; shape.iter().product()], shape, on_tp(ty))
}

#[test]
fn what_a_reshape_says_with_its_name() {
    use Ty::Shard as S;
    let is = |x: Result<Var>, shape: &[usize], ty: Ty| {
        let x = x.unwrap();
        assert_eq!((&x.shape()[..], x.ty(TP)), (shape, ty));
    };
    let x = |ty, shape: &[usize]| value(2, ty, shape);
    // A split into heads of which one is here, and an inserted dim: of the same extents.
    is(x(S(2), &[2, 8, 8]).unflatten(2, &[1, 8]), &[2, 8, 1, 8], S(2));
    is(x(S(2), &[2, 8, 8]).unsqueeze(2), &[2, 8, 1, 8], S(3));
    is(x(S(2), &[2, 8, 4, 8]).unsqueeze(2), &[2, 8, 1, 4, 8], S(3));
    is(x(S(2), &[2, 8, 1, 8]).flatten(2..4), &[2, 8, 8], S(2));
    is(x(S(3), &[2, 8, 1, 8]).flatten(2..4), &[2, 8, 8], S(2)); // before the features is one whole index
    is(x(S(3), &[2, 8, 1, 8]).squeeze(2), &[2, 8, 8], S(2));
    is(x(S(1), &[1, 1, 8]).unsqueeze(3), &[1, 1, 8, 1], S(1));
    is(x(Ty::Partial, &[2, 6]).unflatten(1, &[3, 2]), &[2, 3, 2], Ty::Partial);
    is(x(S(0), &[2, 3, 4]).flatten(1..3), &[2, 12], S(0));
    is(x(S(1), &[2, 3, 4]).flatten(1..2), &[2, 3, 4], S(1));
    // A micro-batch without samples.
    is(x(S(2), &[0, 8, 8]).unflatten(2, &[1, 8]), &[0, 8, 1, 8], S(2));
    for (wrong, message) in [
        (x(S(2), &[2, 8, 8]).reshape(&[2, 8, 1, 8]), "say which with unflatten, flatten, unsqueeze or squeeze"),
        (x(S(2), &[2, 8, 1, 8]).squeeze(2), "dim 2 of x is sharded: the other ranks have more of it"),
        (x(S(3), &[2, 8, 4, 8]).flatten(2..4), "a rank's elements would lie scattered over the new dims"),
        (x(S(1), &[2, 3]).unsqueeze(0), "unsqueeze: dim 0 counts samples and stays as it is (shapes [[2, 3], [1]])"),
        (x(S(1), &[2, 3]).flatten(0..2), "flatten: dim 0 counts samples and stays as it is (shapes [[2, 3], [6]])"),
        (x(S(1), &[2, 3]).unsqueeze(3), "unsqueeze: x has 2 dims, and 3..3 are not among them (shapes [[2, 3], [1]])"),
        (
            x(S(1), &[2, 3]).squeeze(1),
            "squeeze: dim 1 has extent 3, and is removed only at extent 1 (shapes [[2, 3], []])",
        ),
        (x(S(1), &[2, 3]).flatten(1..1), "flatten: 1..1 has no dims to merge (shapes [[2, 3], [1]])"),
        (x(S(1), &[2, 3]).unflatten(1, &[]), "unflatten: a dim is split into one or more (shapes [[2, 3], []])"),
        (
            x(S(1), &[2, 6]).unflatten(1, &[4, 2]),
            "unflatten: as many elements on this rank as before, in at most 6 dims (shapes [[2, 6], [2, 4, 2]])",
        ),
        (x(S(1), &[2, 3]).narrow(2, 0..0), "narrow: 0..0 is no part of dim 2, of extent 0 (shapes [[2, 3]])"),
    ] {
        let error = wrong.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    x(S(1), &[2, 3]).squeeze(usize::MAX).unwrap_err();
}
