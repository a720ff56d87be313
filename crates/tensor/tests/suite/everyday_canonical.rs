//! Everyday operations in canonical numerics: losses and gradients of any cut have the bits of one rank, or are
//! refused.

use crate::common::{on_mesh, values};
use meshwork_core::{Axis, DType, Rank, Ty, Types, rules, tree};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{GradShard, GradSink, Mode, Normaliser, Position, Weights};
use meshwork_tensor::{Declarations, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::sync::Arc;

const TP: Axis = Axis::Tp;
const SAMPLES: usize = 8;
const SHAPE: [usize; 3] = [SAMPLES, 4, 6];

/// Shares of gradients in the order of arrival: per parameter and copy, its samples and values.
#[derive(Default)]
struct Shares(BTreeMap<(usize, usize), Vec<OfSamples>>);

/// The first of the samples, and their sum.
type OfSamples = (u64, Vec<f32>);

impl GradSink for Shares {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let values = grad.to_vec::<f32>()?;
        let each = values.len() / share.copies.len();
        for (copy, values) in share.copies.clone().zip(values.chunks(each)) {
            self.0.entry((share.id.index(), copy)).or_default().push((share.samples.start, values.to_vec()));
        }
        Ok(())
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}

/// Types of the data, `on` tp.
fn data(on: Ty) -> Types {
    Types::new(&[(Axis::Ep, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0)), (TP, on), (Axis::Cp, Ty::Invariant)])
}

fn floats(name: &str) -> Vec<f32> {
    values(name, SHAPE.iter().product()).iter().map(|&value| value as f32).collect()
}

/// Losses, gradients of x, and shares of the gradients of the parameters, of this rank's samples.
type Found = (Vec<u64>, Vec<u32>, Shares);

type Program = fn(&Var, [&Var; 2], &Var) -> Result<Var>;

fn run(rank: &Arc<Rank>, program: Program) -> Result<Found> {
    let mut all = Declarations::canonical(4);
    let mut vector = |name: &str| {
        all.declare(name, &[SHAPE[2]], Placement::replicated(), Role::Norm, Init::Normal { std: 1.0 }).unwrap()
    };
    let ids = [vector("gain"), vector("shift")];
    let (device, layout) = (Cpu::device(), [ids.to_vec()]);
    let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 1)?;
    let held = SAMPLES / rank.mesh().degree(Axis::Dp);
    let first = rank.coords().get(Axis::Dp) * held;
    let position = Position { first_sample: first as u64, ..Position::default() };
    let tape = Tape::new(rank.clone(), Arc::new(params), device, Mode::Train, position);
    let [x, t] = ["x", "t"].map(|name| {
        let each = SHAPE[1] * SHAPE[2];
        let of_rank = &floats(name)[first * each..(first + held) * each];
        tape.input(Tensor::from_slice(tape.device(), of_rank, [held, SHAPE[1], SHAPE[2]]).unwrap(), data(Ty::Invariant))
    });
    let [gain, shift] = [tape.param(ids[0])?, tape.param(ids[1])?];
    let loss = program(&x, [&gain, &shift], &t)?;
    let mut shares = Shares::default();
    tape.backward_from_loss(&loss, Normaliser::Scale(0.3), Weights::Now, &mut shares)?;
    let losses = loss.tensor().to_vec::<f64>()?.into_iter().map(f64::to_bits).collect();
    let gradient = tape.take_grad(&x).unwrap().to_vec::<f32>()?.into_iter().map(f32::to_bits).collect();
    Ok((losses, gradient, shares))
}

/// The gradients of parameters over all samples, added up in the tree of samples and then of copies.
fn summed(ranks: &[&Shares]) -> BTreeMap<usize, Vec<u32>> {
    let mut found: BTreeMap<(usize, usize), BTreeMap<u64, &Vec<f32>>> = BTreeMap::new();
    for shares in ranks {
        for (key, shares) in &shares.0 {
            for (first, values) in shares {
                let same = found.entry(*key).or_default().insert(*first, values);
                assert!(same.is_none_or(|same| same == values), "ranks that hold the same samples agree");
            }
        }
    }
    let tree = |parts: Vec<Vec<f32>>| -> Vec<f32> {
        let column = |at: usize| parts.iter().map(|part| part[at]).collect::<Vec<f32>>();
        (0..parts[0].len()).map(|at| tree::sum(&column(at), |a, b| a + b).unwrap()).collect()
    };
    let mut copies: BTreeMap<usize, Vec<Vec<f32>>> = BTreeMap::new();
    for ((id, _), samples) in found {
        copies.entry(id).or_default().push(tree(samples.into_values().cloned().collect()));
    }
    copies.into_iter().map(|(id, copies)| (id, tree(copies).into_iter().map(f32::to_bits).collect())).collect()
}

#[test]
fn every_cut_has_the_bits_of_one_rank() {
    let programs: [(&str, Program); 9] = [
        ("a loss of whole samples", |x, [gain, shift], t| {
            x.mul(gain)?.sub(shift)?.silu()?.soft_cap(3.0)?.softmax()?.mean_squared_error(t)
        }),
        ("a loss of cut features", |x, [gain, shift], t| {
            let y = x.div(&x.exp()?.add(gain)?)?.sub(shift)?.tanh()?;
            y.split(TP, 2)?.mean_squared_error(&t.split(TP, 2)?)?.all_reduce(TP)
        }),
        ("a cut sequence", |x, [gain, shift], t| {
            let y = x.split(TP, 1)?.mul(gain)?.sub(shift)?.sigmoid()?;
            y.mean_squared_error(&t.split(TP, 1)?)?.all_reduce(TP)
        }),
        ("matrices whose sums are cut", |x, _, t| {
            let y = x.split(TP, 2)?.matmul_nt(&t.split(TP, 2)?)?.all_reduce(TP)?;
            y.mean_squared_error(&t.narrow(2, 0..4)?)
        }),
        ("matrices whose rows are cut", |x, _, t| {
            let scores = x.split(TP, 1)?.matmul_nt(&t.copy(TP)?)?.softmax()?; // a cut sequence
            scores.matmul(&x.copy(TP)?)?.mean_squared_error(&t.split(TP, 1)?)?.all_reduce(TP)
        }),
        ("matrices whose columns are cut", |x, _, t| {
            let y = x.copy(TP)?.matmul_tn(&t.split(TP, 2)?)?; // [b, 6, cut]
            let other = t.copy(TP)?.matmul_tn(&x.split(TP, 2)?)?;
            y.mean_squared_error(&other)?.all_reduce(TP)
        }),
        ("repeated over cut dims", |x, [gain, _], t| {
            let mean = t.mean(1)?.unsqueeze(1)?.copy(TP)?; // [b, 1, h]
            let y = x.split(TP, 1)?.mul(&mean)?.add(&t.mean(1)?.unsqueeze(1)?.copy(TP)?)?;
            let features = t.mean(2)?.unsqueeze(2)?.copy(TP)?; // [b, s, 1]
            let z = x.mul(gain)?.split(TP, 2)?.sub(&features)?;
            let first = y.mean_squared_error(&t.split(TP, 1)?)?.all_reduce(TP)?;
            first.add(&z.mean_squared_error(&t.split(TP, 2)?)?.all_reduce(TP)?)
        }),
        ("chosen elements", |x, [gain, shift], t| {
            let order = Tensor::from_slice(x.tape().device(), &[5, 1, 1, 0, 2, 3], [6])?;
            let order = x.tape().constant(order, Types::all(x.tape().rank().mesh(), Ty::Invariant));
            let y = x.exp()?.log()?.mul(gain)?.index_select(2, &order)?;
            let y = y.greater(&shift.detach())?.select(&y, &t.mul(t)?.add(shift)?.exp()?.sqrt()?)?.split(TP, 1)?;
            y.max(2)?.mean_squared_error(&t.narrow(2, 0..1)?.sum(2)?.split(TP, 1)?)?.all_reduce(TP)
        }),
        ("sums over cut dims", |x, [gain, shift], t| {
            let means = x.mul(gain)?.split(TP, 1)?.mean(1)?.all_reduce(TP)?.sub(shift)?;
            let sums = t.split(TP, 2)?.sum_per_sample()?.scale(4.0)?.all_reduce(TP)?;
            means
                .mean_squared_error(&t.narrow(1, 0..1)?.mean(1)?)?
                .add(&sums.mean_squared_error(&means.mean_per_sample()?)?)
        }),
    ];
    for (name, program) in programs {
        let one = on_mesh("dp=1,tp=1", |rank| run(&rank, program).unwrap()).remove(0);
        let whole = summed(&[&one.2]);
        for mesh in ["dp=2,tp=1", "dp=1,tp=2", "dp=2,tp=2", "dp=1,tp=4", "dp=4,tp=2"] {
            if mesh.contains("tp=4") && !["a cut sequence", "matrices whose rows are cut"].contains(&name) {
                continue; // six features
            }
            let ranks = on_mesh(mesh, |rank| (rank.coords().get(Axis::Dp), run(&rank, program).unwrap()));
            let dp = ranks.iter().map(|(at, _)| at + 1).max().unwrap();
            for (at, (losses, gradient, _)) in &ranks {
                let part = |all: usize| at * all / dp..(at + 1) * all / dp;
                assert_eq!(*losses, one.0[part(one.0.len())], "{name}: losses on {mesh}");
                assert!(*gradient == one.1[part(one.1.len())], "{name}: gradients of x on {mesh}");
            }
            let shares: Vec<&Shares> = ranks.iter().map(|(_, (_, _, shares))| shares).collect();
            assert!(summed(&shares) == whole, "{name}: gradients of parameters on {mesh}");
        }
    }
}

#[test]
fn what_has_no_canonical_numerics_is_refused() {
    let programs: [(Program, &str); 12] = [
        (
            |x, _, _| x.sum(0),
            "sum has no canonical numerics: the order of a sum over samples depends on how the batch is cut; use a \
             sum per sample: the seed of backward divides by the number of samples",
        ),
        (
            |x, _, _| x.split(TP, 1)?.sum(1)?.scale(0.3),
            "scale has no canonical numerics: each rank would round its share of a Partial value; use it after all_reduce or reduce_scatter",
        ),
        (
            |x, _, _| x.split(TP, 1)?.sum(1)?.mul(&x.mean(1)?.copy(TP)?),
            "mul has no canonical numerics: each rank would round its share of a Partial value; use it after all_reduce or reduce_scatter",
        ),
        (
            |x, _, _| {
                let x = x.split(TP, 1)?.sum(1)?;
                x.sub(&x)
            },
            "sub has no canonical numerics: each rank would round its share of a Partial value; use it after all_reduce or reduce_scatter",
        ),
        (
            |x, _, _| x.copy(TP)?.silu(),
            "silu has no canonical numerics: the gradient of a Replicate value is Partial, and each rank would round \
             its share; use it before copy or all_gather",
        ),
        (
            |x, _, _| x.copy(TP)?.map("square", |x| x * x, |x, _| 2.0 * x),
            "square has no canonical numerics: the gradient of a Replicate value is Partial, and each rank would \
             round its share; use it before copy or all_gather",
        ),
        (
            |x, _, _| x.copy(TP)?.gelu(),
            "gelu has no canonical numerics: the gradient of a Replicate value is Partial, and each rank would round its share; \
             use it before copy or all_gather",
        ),
        (
            |x, _, _| {
                let x = x.split(TP, 1)?.sum(1)?;
                x.add(&x)
            },
            "add has no canonical numerics: each rank would round its share of a Partial value; use it after all_reduce or \
             reduce_scatter",
        ),
        (
            |x, _, t| x.split(TP, 2)?.mul(&t.narrow(1, 0..1)?.mean(2)?.unsqueeze(2)?.copy(TP)?),
            "mul has no canonical numerics: the gradient of a Replicate value is Partial, and each rank would round its share; \
             use it before copy or all_gather",
        ),
        (
            |x, _, t| {
                let x = x.copy(TP)?;
                let tape = x.tape();
                let held = SHAPE[2] / tape.rank().mesh().degree(TP);
                let types = Types::new(&[
                    (Axis::Ep, Ty::Replicate),
                    (Axis::Dp, Ty::Replicate),
                    (TP, Ty::Shard(0)),
                    (Axis::Cp, Ty::Invariant),
                ]);
                let w = tape.constant(Tensor::zeros(tape.device(), DType::F32, [held, SHAPE[2]])?, types);
                let both = x.linear(&w, 1)?.mul(&x.linear(&w, 1)?)?;
                both.mean_squared_error(&t.split(TP, 2)?)?.all_reduce(TP)
            },
            "linear has no canonical numerics: it reads a Replicate value that another operation reads too, and each rank would \
             add up its shares of both gradients before the ranks' are; use a copy or all_gather for each of them",
        ),
        (
            |x, [gain, _], _| x.sub(&gain.scale(-1.0)?.mul(gain)?),
            "scale has no canonical numerics: its result is Replicate, and each rank would round its share of the gradient before the \
             shares are added up; use it on an Invariant or Shard value: before copy or all_gather, or on samples in place of a \
             parameter",
        ),
        (
            |x, [gain, _], _| {
                let first = |op: &str, operands: &[rules::Operand<'_>]| rules::elementwise(op, operands);
                let y = x.tape().custom(
                    "scaled",
                    &["x", "gain"],
                    &[x, gain],
                    first,
                    |inputs| Ok(inputs[0].clone()),
                    |inputs, _, grad| Ok(vec![grad.clone(), inputs[1].clone()]),
                )?;
                y.mean_squared_error(x)
            },
            "backward: scaled gave a gradient of gain summed over all samples, and in canonical numerics their order must not depend \
             on the mesh: give it by write_grad or sum_blocks",
        ),
    ];
    for (program, message) in programs {
        for mesh in ["dp=1,tp=1", "dp=2,tp=2"] {
            let errors = on_mesh(mesh, |rank| run(&rank, program).map(|_| ()).unwrap_err().to_string());
            assert!(errors.iter().all(|error| error == message), "{errors:?}\n{message}");
        }
    }
}

/// The ranks would not hold whole subtrees of the blocks.
#[test]
fn a_degree_that_does_not_fit_is_refused() {
    let program: Program = |x, _, t| x.split(TP, 2)?.mean_squared_error(&t.split(TP, 2)?)?.all_reduce(TP);
    for error in on_mesh("dp=1,tp=3", |rank| run(&rank, program).map(|_| ()).unwrap_err().to_string()) {
        assert_eq!(
            error,
            "mean_squared_error: dim 2 of extent 2 cannot be cut over tp=3: 4 reduction blocks fit degrees [1, 2, 4]"
        );
    }
}
