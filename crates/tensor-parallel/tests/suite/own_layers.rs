//! Every parallel layer on 1 to 4 ranks against itself on one, with and without sequence parallelism: testkit's
//! `check_layer`.

use meshwork_core::{Axis, Mesh, Ty};
use meshwork_tensor::op::{GroupedHeads, Mask, MlpKind, Rotary};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{
    AttentionBias, ColumnLinear, LatentHeads, NormOver, ParallelAttention, ParallelCrossAttention,
    ParallelGroupedAttention, ParallelLatentAttention, ParallelMlp, Region, RowLinear, VocabParallelEmbedding,
};
use meshwork_testkit::check::{LayerInput, check_layer};

/// Extents that 1 to 4 ranks share.
const SEQ: usize = 12;
const HIDDEN: usize = 12;
const FFN: usize = 36;

fn init() -> Init {
    Init::Normal { std: 0.02 }
}

#[track_caller]
fn check<L>(
    name: &str,
    input: impl Fn(Region) -> LayerInput,
    declare: impl Fn(&mut Declarations, &Mesh) -> Result<L> + Sync,
    forward: impl Fn(&L, &Tape, &[Var], Region) -> Result<Var> + Sync,
) {
    for region in [Region::INVARIANT, Region::SEQUENCE_PARALLEL] {
        let checked = check_layer(&format!("{name}, {region:?}"), &[input(region)], &declare, |layer, tape, v| {
            forward(layer, tape, v, region)
        });
        checked.unwrap_or_else(|error| panic!("{error}"));
    }
}

fn hidden(region: Region) -> LayerInput {
    LayerInput::value("x", &[1, SEQ, HIDDEN], region.ty(Axis::Tp))
}

#[test]
fn linear_layers() {
    check(
        "column",
        hidden,
        |params, mesh| ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), true, init()),
        |layer, tape, v, region| layer.forward(tape, &region.enter(&v[0])?),
    );
    check(
        "row",
        |_| LayerInput::value("x", &[1, SEQ, FFN], Ty::Shard(2)),
        |params, mesh| RowLinear::new(params, mesh, "down", (&[FFN], 0), HIDDEN, true, init()),
        |layer, tape, v, region| layer.forward(tape, &v[0], region, None, 0.0),
    );
}

#[test]
fn blocks() {
    // Inner features that all ranks share evenly, and that leave the last ones with padding.
    for ffn in [FFN, FFN - 1] {
        check(
            "mlp",
            hidden,
            |params, mesh| ParallelMlp::new(params, mesh, "mlp", MlpKind::Gelu, [HIDDEN, ffn], true, [init(); 2]),
            |layer, tape, v, region| layer.forward(tape, &v[0], region, Some(&v[0]), 0.3),
        );
        check(
            "swiglu",
            hidden,
            |params, mesh| ParallelMlp::new(params, mesh, "mlp", MlpKind::SwiGlu, [HIDDEN, ffn], false, [init(); 2]),
            |layer, tape, v, region| layer.forward(tape, &v[0], region, Some(&v[0]), 0.0),
        );
    }
    check(
        "attention",
        hidden,
        |params, mesh| ParallelAttention::new(params, mesh, "attn", HIDDEN, 12, true, [init(); 2]),
        |layer, tape, v, region| layer.forward(tape, &v[0], region, Some(&v[0]), None, 0.3),
    );
    check(
        "attention in both directions",
        hidden,
        |params, mesh| ParallelAttention::new(params, mesh, "attn", HIDDEN, 12, true, [init(); 2]),
        |layer, tape, v, region| layer.forward(tape, &v[0], region, Some(&v[0]), Mask::BIDIRECTIONAL, 0.3),
    );
    for region in [Region::INVARIANT, Region::SEQUENCE_PARALLEL] {
        let inputs = [hidden(region), LayerInput::value("memory", &[1, 2 * SEQ, HIDDEN], region.ty(Axis::Tp))];
        let declare = |params: &mut Declarations, mesh: &Mesh| {
            ParallelCrossAttention::new(params, mesh, "cross", HIDDEN, 12, true, [init(); 2])
        };
        let forward = |layer: &ParallelCrossAttention, tape: &Tape, v: &[Var]| {
            layer.forward(tape, &v[0], &v[1], region, Some(&v[0]), None, 0.3)
        };
        check_layer(&format!("cross attention, {region:?}"), &inputs, declare, forward).unwrap();
    }
    // Groups of whole heads, and one group that all ranks share.
    for kv_heads in [12, 1] {
        let of = GroupedHeads { heads: 12, kv_heads, head_dim: 12, rotary: Some(Rotary::new(10.0)) };
        check(
            "grouped attention",
            hidden,
            |params, mesh| ParallelGroupedAttention::new(params, mesh, "attn", HIDDEN, of, true, [init(); 2]),
            |layer, tape, v, region| layer.forward(tape, &v[0], region, Some(&v[0]), None, 0.0),
        );
        for over in [NormOver::Head, NormOver::Heads] {
            let bias = AttentionBias { input: true, output: false };
            check(
                "grouped attention with norms",
                hidden,
                |params, mesh| {
                    let layer = ParallelGroupedAttention::new(params, mesh, "attn", HIDDEN, of, bias, [init(); 2])?;
                    Ok(layer.with_norms(params, over, 1e-5)?.with_scale(0.5))
                },
                |layer, tape, v, region| layer.forward(tape, &v[0], region, None, None, 0.0),
            );
        }
    }
}

/// Queries of a latent vector and of x itself, and values of fewer and of more features than queries.
#[test]
fn latent_attention() {
    for (query_rank, values) in [(None, 5), (Some(8), 14)] {
        let of = LatentHeads { heads: 12, query_rank, kv_rank: 6, plain: 6, turning: 4, values, norm_eps: 1e-3 };
        let turned = (Some(Rotary::new(10.0)), query_rank.map(|_| 0.3));
        check(
            "latent attention",
            hidden,
            |params, mesh| ParallelLatentAttention::new(params, mesh, "attn", HIDDEN, of, turned, [init(); 2]),
            |layer, tape, v, region| {
                let attend = |q: &Var, kv: &Var, rotary, dropout: Option<(f32, &str)>| {
                    q.grouped_attention(kv, rotary, None, dropout)
                };
                layer.forward_by(tape, &v[0], region, Some(&v[0]), attend, 0.3)
            },
        );
    }
}

/// A vocabulary that 4 ranks pad and 3 do not.
#[test]
fn the_table() {
    check(
        "embedding",
        |_| LayerInput::ids("ids", &[1, SEQ], Ty::Invariant, 21),
        |params, _| VocabParallelEmbedding::new(params, "wte", 21, HIDDEN, init()),
        |table, tape, v, region| table.embed(tape, &v[0], region),
    );
}

/// A collective that is forgotten is refused by the types, and the check says so.
#[test]
fn a_forgotten_copy_is_reported() {
    let checked = check_layer(
        "column",
        &[hidden(Region::INVARIANT)],
        |params, mesh| ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), true, init()),
        |layer, tape, v| layer.forward(tape, &v[0]),
    );
    let error = checked.unwrap_err().to_string();
    assert!(error.contains("tp=1, x Invariant: it fails: linear"), "{error}");
    assert!(error.contains("copy(I→R)"), "{error}");
}
