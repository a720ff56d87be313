//! Adapters of parallel layers against the equation `y + s · B A x` on one rank, exactly on integers: output, gradient
//! of the input, gradients of A and B, with and without sequence parallelism, in fast and canonical numerics.

use crate::common::{Input, Outcome, Program, integer};
use meshwork_core::{Axis, Mesh, Ty};
use meshwork_nn::Linear;
use meshwork_tensor::param::{AdapterSpec, Adapters};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};
use meshwork_tensor_parallel::{ColumnLinear, Region, RowLinear};
use std::collections::BTreeMap;
use std::sync::Arc;

const BATCH: usize = 2;
const SEQ: usize = 8;
const HIDDEN: usize = 8;
const FFN: usize = 24;
const RANK: usize = 3;
const SCALE: f64 = 2.0;
const ZEROS: Init = Init::Zeros;

/// Adapters of these matrices of the weight `up.weight`.
fn adapters(matrices: &[Option<usize>]) -> Arc<Adapters> {
    let name =
        |part: &str, matrix: &Option<usize>| format!("{part}{}", matrix.map_or(String::new(), |at| at.to_string()));
    let of = |matrix| AdapterSpec { a: name("a", matrix), b: name("b", matrix), matrix: *matrix };
    let of = BTreeMap::from([("up.weight".to_owned(), matrices.iter().map(of).collect())]);
    Arc::new(Adapters { rank: RANK, scale: SCALE, of, ..Adapters::default() })
}

/// A and B of the equation.
fn pair(params: &mut Declarations, at: &str, out: usize, input: usize) -> Result<[ParamId; 2]> {
    let mut declare = |name: String, dims| params.declare(name, dims, Placement::replicated(), Role::Weight, ZEROS);
    Ok([declare(format!("a{at}"), &[RANK, input])?, declare(format!("b{at}"), &[out, RANK])?])
}

/// The weight `up.weight`, whole and frozen.
fn frozen(params: &mut Declarations, input: &[usize], out: &[usize]) -> Result<Linear> {
    params.freezing(true, |params| Linear::structural(params, "up", input, out, false, 0.02))
}

fn product(tape: &Tape, [a, b]: &[ParamId; 2], x: &Var) -> Result<Var> {
    x.linear(&tape.param(*a)?, 1)?.linear(&tape.param(*b)?, 1)?.scale(SCALE)
}

/// On 1, 2 and 4 ranks in both regions and both numerics.
fn check<L: Sync>(
    reference: &Outcome,
    input: &[usize],
    x: impl Fn(Region) -> Ty,
    declare: impl Fn(&mut Declarations, &Mesh) -> Result<L> + Sync,
    forward: impl Fn(&L, &Tape, &Var, Region) -> Result<Var> + Sync,
) {
    for region in [Region::INVARIANT, Region::SEQUENCE_PARALLEL] {
        for (blocks, degree) in [None, Some(8)].into_iter().flat_map(|blocks| [1, 2, 4].map(|degree| (blocks, degree)))
        {
            let program = Program::new(integer, &declare, |layer: &L, tape: &Tape, v: &[Var]| {
                forward(layer, tape, &v[0], region)
            });
            let program = Program { blocks, ..program };
            let inputs = [Input::new("x", input, x(region), integer)];
            let got = program.over_axis(degree, &inputs);
            assert_eq!(&got, reference, "tp={degree}, {region:?}, {blocks:?} reduction blocks");
        }
    }
}

#[test]
fn a_column_parallel_weight_has_one_adapter() {
    let input = [BATCH, SEQ, HIDDEN];
    let plain = Program::new(
        integer,
        |params: &mut Declarations, _: &Mesh| Ok((frozen(params, &[HIDDEN], &[FFN])?, pair(params, "", FFN, HIDDEN)?)),
        |(up, adapter), tape, v| up.forward(tape, &v[0])?.add(&product(tape, adapter, &v[0])?),
    );
    let plain = plain.alone(&[Input::new("x", &input, Ty::Invariant, integer)]);
    check(
        &plain,
        &input,
        |region| region.ty(Axis::Tp),
        |params, mesh| {
            params.adapting(&adapters(&[None]), |params| {
                ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), false, ZEROS)
            })
        },
        |up, tape, x, region| up.adapted(tape, up.forward(tape, &region.enter(x)?)?, x, region),
    );
}

/// Keys and values, of which the values alone have an adapter; gate and up, each with its own.
#[test]
fn matrices_of_a_fused_weight_have_their_own_adapters() {
    let input = [BATCH, SEQ, HIDDEN];
    for (out, stacked, matrices) in [(&[2, FFN][..], true, &[Some(1)][..]), (&[FFN, 2], false, &[Some(0), Some(1)])] {
        let column = |params: &mut Declarations, mesh: &Mesh| match stacked {
            true => ColumnLinear::new(params, mesh, "up", HIDDEN, (out, 1), false, ZEROS),
            false => ColumnLinear::pairs(params, mesh, "up", HIDDEN, FFN, false, ZEROS),
        };
        let dim = if stacked { 2 } else { 3 };
        let plain = Program::new(
            integer,
            |params: &mut Declarations, _: &Mesh| {
                let up = frozen(params, &[HIDDEN], out)?;
                let pairs = matrices.iter().flatten().map(|at| pair(params, &at.to_string(), FFN, HIDDEN));
                Ok((up, pairs.collect::<Result<Vec<_>>>()?))
            },
            |(up, pairs), tape, v| {
                let y = up.forward(tape, &v[0])?;
                let part = |at: usize| y.narrow(dim, at..at + 1);
                let adapted = |at: usize, adapter| part(at)?.add(&product(tape, adapter, &v[0])?.unsqueeze(dim)?);
                match &pairs[..] {
                    [values] => part(0)?.concat(&adapted(1, values)?, dim),
                    [gate, up, ..] => adapted(0, gate)?.concat(&adapted(1, up)?, dim),
                    [] => Ok(y),
                }
            },
        );
        let plain = plain.alone(&[Input::new("x", &input, Ty::Invariant, integer)]);
        check(
            &plain,
            &input,
            |region| region.ty(Axis::Tp),
            |params, mesh| params.adapting(&adapters(matrices), |params| column(params, mesh)),
            |up, tape, x, region| up.adapted(tape, up.forward(tape, &region.enter(x)?)?, x, region),
        );
    }
}

#[test]
fn a_row_parallel_weight_has_one_adapter() {
    let input = [BATCH, SEQ, FFN];
    let plain = Program::new(
        integer,
        |params: &mut Declarations, _: &Mesh| Ok((frozen(params, &[FFN], &[HIDDEN])?, pair(params, "", HIDDEN, FFN)?)),
        |(down, adapter), tape, v| down.forward(tape, &v[0])?.add(&product(tape, adapter, &v[0])?),
    );
    let plain = plain.alone(&[Input::new("x", &input, Ty::Invariant, integer)]);
    check(
        &plain,
        &input,
        |_| Ty::Shard(2),
        |params, mesh| {
            params.adapting(&adapters(&[None]), |params| {
                RowLinear::new(params, mesh, "up", (&[FFN], 0), HIDDEN, false, ZEROS)
            })
        },
        |down, tape, x, region| down.forward(tape, x, region, None, 0.0),
    );
}

/// Megatron-Bridge #5900 and #5634: an adapter in another parallel state than the weight beside it.
#[test]
fn a_result_of_another_type_is_not_added() {
    let program = Program::new(
        integer,
        |params: &mut Declarations, mesh: &Mesh| {
            let up =
                |params: &mut Declarations| ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), false, ZEROS);
            Ok((params.freezing(true, up)?, pair(params, "", FFN, HIDDEN)?))
        },
        |(up, adapter), tape, v| {
            let (y, whole) = (up.forward(tape, &v[0].copy(Axis::Tp)?)?, product(tape, adapter, &v[0])?);
            let error = y.add(&whole).unwrap_err().to_string();
            assert!(error.contains("Shard(2)") && error.contains("Invariant"), "{error}");
            Ok(whole)
        },
    );
    program.over_axis(1, &[Input::new("x", &[BATCH, SEQ, HIDDEN], Ty::Invariant, integer)]);
}

/// The reference of a preference loss: the frozen model, without a copy of it.
#[test]
fn a_tape_without_adapters_computes_the_frozen_layer() {
    let program = Program::new(
        integer,
        |params: &mut Declarations, mesh: &Mesh| {
            params.adapting(&adapters(&[None]), |params| {
                ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), false, ZEROS)
            })
        },
        |up, tape, v| {
            let plain = up.forward(tape, &v[0].copy(Axis::Tp)?)?;
            let adapted = || up.adapted(tape, plain.clone(), &v[0], Region::INVARIANT);
            let (without, with) = (tape.without_adapters(adapted)?, adapted()?);
            assert_eq!(without.tensor().to_vec::<f32>()?, plain.tensor().to_vec::<f32>()?);
            assert_ne!(with.tensor().to_vec::<f32>()?, plain.tensor().to_vec::<f32>()?);
            Ok(with)
        },
    );
    program.over_axis(2, &[Input::new("x", &[BATCH, SEQ, HIDDEN], Ty::Invariant, integer)]);
}
