//! Canonical numerics of layers whose sums tp cuts: the bits of one rank on 2 and 4 ranks, with and without sequence
//! parallelism.

use crate::common::{Input, Outcome, Program, real};
use meshwork_core::{Axis, DType, Mesh, Rank, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::{GroupedHeads, MlpKind, Rotary};
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Init, Params, Placement, Role, Tape, Tensor};
use meshwork_tensor_parallel::{ParallelGroupedAttention, ParallelMlp, Region};
use std::sync::Arc;

const HIDDEN: usize = 24;
const BLOCKS: usize = 8;

fn assert_bits(what: &str, run: impl Fn(usize, Region) -> Outcome) {
    let same = |got: &[f32], want: &[f32]| {
        got.len() == want.len() && got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits())
    };
    let want = run(1, Region::INVARIANT);
    for degree in [1, 2, 4] {
        for region in [Region::INVARIANT, Region::SEQUENCE_PARALLEL] {
            let got = run(degree, region);
            assert!(same(&got.output, &want.output), "{what}, tp={degree}, {region:?}: output");
            for (got, want) in got.inputs.iter().zip(&want.inputs) {
                assert!(same(got, want), "{what}, tp={degree}, {region:?}: gradient of the input");
            }
            for (name, want) in &want.params {
                assert!(same(&got.params[name], want), "{what}, tp={degree}, {region:?}: gradient of {name}");
            }
        }
    }
}

fn init() -> [Init; 2] {
    [Init::Normal { std: 0.02 }; 2]
}

fn inputs(region: Region) -> [Input; 1] {
    [Input::new("x", &[2, 12, HIDDEN], region.ty(Axis::Tp), real)]
}

/// Eight heads in groups of 1, 2, 4 and 8: up to four ranks share the keys and values of one group.
#[test]
fn grouped_attention_has_the_bits_of_one_rank() {
    for kv_heads in [8, 4, 2, 1] {
        let of = GroupedHeads { heads: 8, kv_heads, head_dim: 8, rotary: Some(Rotary::new(30.0)) };
        assert_bits(&format!("{kv_heads} kv heads"), |degree, region| {
            let mut program = Program::new(
                real,
                |params, mesh| ParallelGroupedAttention::new(params, mesh, "attn", HIDDEN, of, false, init()),
                |attention, tape, v| attention.forward(tape, &v[0], region, Some(&v[0]), None, 0.0),
            );
            program.blocks = Some(BLOCKS);
            program.over_axis(degree, &inputs(region))
        });
    }
}

#[test]
fn mlp_without_biases_has_the_bits_of_one_rank() {
    assert_bits("mlp", |degree, region| {
        let mut program = Program::new(
            real,
            |params, mesh| ParallelMlp::new(params, mesh, "mlp", MlpKind::Gelu, [HIDDEN, 40], false, init()),
            |mlp, tape, v| mlp.forward(tape, &v[0], region, Some(&v[0]), 0.0),
        );
        program.blocks = Some(BLOCKS);
        program.over_axis(degree, &inputs(region))
    });
}

#[test]
fn swiglu_has_the_bits_of_one_rank() {
    assert_bits("swiglu", |degree, region| {
        let mut program = Program::new(
            real,
            |params, mesh| ParallelMlp::new(params, mesh, "mlp", MlpKind::SwiGlu, [HIDDEN, 40], false, init()),
            |mlp, tape, v| mlp.forward(tape, &v[0], region, Some(&v[0]), 0.0),
        );
        program.blocks = Some(BLOCKS);
        program.over_axis(degree, &inputs(region))
    });
}

/// Two ranks with three of six heads each: halves of a group, and no subtrees of it.
#[test]
fn parts_of_a_group_that_are_no_subtrees_are_refused() {
    let of = GroupedHeads { heads: 6, kv_heads: 1, head_dim: 4, rotary: None };
    let forward = |mut params: Declarations| {
        let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Tp, 2)]).unwrap(), 0).unwrap());
        let layer = ParallelGroupedAttention::new(&mut params, rank.mesh(), "attn", HIDDEN, of, false, init()).unwrap();
        let (device, layout) = (Meta::device(), [params.ids().collect()]);
        let params = Params::new(Arc::new(params), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
        let types = Types::all(tape.rank().mesh(), Region::INVARIANT.ty(Axis::Tp));
        let x = tape.input(Tensor::zeros(tape.device(), DType::F32, [2, 4, HIDDEN]).unwrap(), types);
        layer.forward(&tape, &x, Region::INVARIANT, None, None, 0.0).map(|_| ())
    };
    forward(Declarations::new()).unwrap();
    assert_eq!(
        forward(Declarations::canonical(BLOCKS)).unwrap_err().to_string(),
        "grouped_attention: dim 2 of extent 6 cannot be cut over tp=2: in canonical numerics the ranks that share a group of 6 \
         heads, here 2, must be a power of two, and hold a power of two of them each"
    );
}

/// Behind `copy` a value's gradient comes in one share per rank. Parameters that tp does not cut, read there, once gave
/// other bits on two ranks than on one, because each rank rounded its share.
#[test]
fn an_operation_that_would_round_shares_of_a_gradient_is_refused() {
    let apply = |name: &str, behind_copy: bool, degree: usize| {
        let mut all = Declarations::canonical(BLOCKS);
        let mut declare = |name: &str, dims: &[usize]| {
            all.declare(name, dims, Placement::replicated(), Role::Weight, Init::Ones).unwrap()
        };
        let (square, pairs) = (declare("square", &[HIDDEN, HIDDEN]), declare("pairs", &[HIDDEN, 2, HIDDEN]));
        let (table, gain) = (declare("table", &[4, HIDDEN]), declare("gain", &[HIDDEN]));
        let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Tp, degree)]).unwrap(), 0).unwrap());
        let (device, layout) = (Meta::device(), [all.ids().collect()]);
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
        let types = Types::all(tape.rank().mesh(), Region::INVARIANT.ty(Axis::Tp));
        let x = tape.input(Tensor::zeros(tape.device(), DType::F32, [2, 4, HIDDEN]).unwrap(), types);
        let x = if behind_copy { x.copy(Axis::Tp).unwrap() } else { x };
        let param = |id| tape.param(id).unwrap();
        match name {
            "linear" => x.linear(&param(square), 1),
            "linear_gelu" => x.linear_gelu(&param(square), None, 1),
            "linear_swiglu" => x.linear_swiglu(&param(pairs), 1),
            "positions" => x.positions(&param(table)),
            "layer_norm" => x.layer_norm(&param(gain), None, 1e-5),
            "rms_norm" => x.rms_norm(&param(gain), 1e-5),
            _ => x.transpose(1, 2), // only moves elements
        }
    };
    for degree in [1, 2] {
        for name in ["linear", "linear_gelu", "linear_swiglu", "positions", "layer_norm", "rms_norm"] {
            apply(name, false, degree).unwrap();
            let error = apply(name, true, degree).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name} has no canonical numerics: ")), "{error}");
            assert!(error.contains("before copy or all_gather"), "{error}");
        }
        apply("transpose", true, degree).unwrap();
    }
}
