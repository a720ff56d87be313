//! Every parallel layer against the un-sharded one of `meshwork-nn` with the same parameters: output, gradient of every
//! input, gradient of every parameter, on 1, 2 and 4 ranks, with and without sequence parallelism.
//!
//! More than 400 lines: one short case for each layer and region.

use crate::common::{Input, Outcome, Program, integer, real};
use meshwork_core::{Axis, Mesh, Ty};
use meshwork_nn::{Embedding, GroupedSelfAttention, LayerNorm, Linear, Mlp, RmsNorm, SelfAttention};
use meshwork_tensor::op::{GroupedHeads, MlpKind, Rotary};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Declarations, Init, Var};
use meshwork_tensor_parallel::{
    ColumnLinear, ParallelAttention, ParallelGroupedAttention, ParallelMlp, Region, RowLinear, VocabParallelEmbedding,
};
use meshwork_testkit::parity::{assert_close, norm_of_all};

const BATCH: usize = 2;
const SEQ: usize = 8;
const HIDDEN: usize = 16;
const FFN: usize = 24;
const HEADS: usize = 4;
const DEGREES: [usize; 3] = [1, 2, 4];
const REGIONS: [Region; 2] = [Region::INVARIANT, Region::SEQUENCE_PARALLEL];

/// `[batch, seq, hidden]` with its layout between blocks.
fn hidden(name: &str, region: Region) -> Input {
    Input::new(name, &[BATCH, SEQ, HIDDEN], region.ty(Axis::Tp), real)
}

#[track_caller]
fn assert_same(what: &str, got: &Outcome, reference: &Outcome) {
    let gradients = reference.inputs.iter().chain(reference.params.values());
    let all = norm_of_all(gradients.map(|gradient| &gradient[..]));
    assert_close(&format!("{what}: output"), &got.output, &reference.output, 0.0);
    assert_eq!(got.inputs.len(), reference.inputs.len(), "{what}: inputs");
    for (i, (got, reference)) in got.inputs.iter().zip(&reference.inputs).enumerate() {
        assert_close(&format!("{what}: gradient of input {i}"), got, reference, all);
    }
    let names = |outcome: &Outcome| outcome.params.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(got), names(reference), "{what}: parameters");
    for (name, reference) in &reference.params {
        assert_close(&format!("{what}: gradient of {name}"), &got.params[name], reference, all);
    }
}

fn init() -> Init {
    Init::Normal { std: 0.02 }
}

fn gelu(x: &Var) -> meshwork_tensor::Result<Var> {
    x.gelu()
}

#[test]
fn column_linear_equals_linear_exactly_on_integers() {
    let x = |ty| [Input::new("x", &[BATCH, SEQ, HIDDEN], ty, integer)];
    let plain = Program::new(
        integer,
        |params, _| Linear::new(params, "up", HIDDEN, FFN, true, 0.02),
        |layer, tape, v| layer.forward(tape, &v[0]),
    );
    let reference = plain.alone(&x(Ty::Invariant));
    for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
        let parallel = Program::new(
            integer,
            |params, mesh| ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), true, init()),
            |layer, tape, v| layer.forward(tape, &region.enter(&v[0])?),
        );
        assert_eq!(parallel.over_axis(degree, &x(region.ty(Axis::Tp))), reference, "tp={degree}, {region:?}");
    }
}

#[test]
fn row_linear_equals_linear_and_a_residual_exactly_on_integers() {
    let inputs = |x: Ty, residual: Ty| {
        let x = Input::new("x", &[BATCH, SEQ, FFN], x, integer);
        [x, Input::new("residual", &[BATCH, SEQ, HIDDEN], residual, integer)]
    };
    let plain = Program::new(
        integer,
        |params, _| Linear::new(params, "down", FFN, HIDDEN, true, 0.02),
        |layer, tape, v| layer.forward(tape, &v[0])?.add(&v[1]),
    );
    let reference = plain.alone(&inputs(Ty::Invariant, Ty::Invariant));
    for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
        let parallel = Program::new(
            integer,
            |params, mesh| RowLinear::new(params, mesh, "down", (&[FFN], 0), HIDDEN, true, init()),
            |layer, tape, v| layer.forward(tape, &v[0], region, Some(&v[1]), 0.0),
        );
        let outcome = parallel.over_axis(degree, &inputs(Ty::Shard(2), region.ty(Axis::Tp)));
        assert_eq!(outcome, reference, "tp={degree}, {region:?}");
    }
}

#[test]
fn column_linear_with_gelu_equals_linear_and_gelu() {
    let plain = Program::new(
        real,
        |params, _| Linear::new(params, "up", HIDDEN, FFN, true, 0.02),
        |layer, tape, v| gelu(&layer.forward(tape, &v[0])?),
    );
    let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
    for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
        let parallel = Program::new(
            real,
            |params, mesh| ColumnLinear::new(params, mesh, "up", HIDDEN, (&[FFN], 0), true, init()),
            |layer, tape, v| layer.forward_gelu(tape, &region.enter(&v[0])?),
        );
        let outcome = parallel.over_axis(degree, &[hidden("x", region)]);
        assert_same(&format!("tp={degree}, {region:?}"), &outcome, &reference);
    }
}

/// The norm is part of the program: its replicated parameters have Partial gradients where the sequence is cut.
#[test]
fn parallel_mlp_equals_mlp() {
    for dropout in [0.0, 0.3] {
        let plain = Program::new(
            real,
            |params, _| {
                Ok((
                    LayerNorm::new(params, "ln", HIDDEN, true)?,
                    Mlp::new(params, "mlp", MlpKind::Gelu, [HIDDEN, FFN], true, [0.02, 0.02])?,
                ))
            },
            |(norm, mlp), tape, v| {
                let y = mlp.forward(tape, &norm.forward(tape, &v[0])?)?;
                y.dropout(dropout, "mlp.down")?.add(&v[0])
            },
        );
        let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            let parallel = Program::new(
                real,
                |params, mesh| {
                    let norm = LayerNorm::new(params, "ln", HIDDEN, true)?;
                    Ok((norm, ParallelMlp::new(params, mesh, "mlp", MlpKind::Gelu, [HIDDEN, FFN], true, [init(); 2])?))
                },
                |(norm, mlp), tape, v| mlp.forward(tape, &norm.forward(tape, &v[0])?, region, Some(&v[0]), dropout),
            );
            let outcome = parallel.over_axis(degree, &[hidden("x", region)]);
            assert_same(&format!("tp={degree}, {region:?}, dropout {dropout}"), &outcome, &reference);
        }
    }
}

#[test]
fn parallel_attention_equals_self_attention() {
    for dropout in [0.0, 0.3] {
        let plain = Program::new(
            real,
            |params, _| {
                let norm = LayerNorm::new(params, "ln", HIDDEN, true)?;
                Ok((norm, SelfAttention::new(params, "attn", HIDDEN, HEADS, true, 0.02, 0.02)?))
            },
            |(norm, attention), tape, v| {
                let y = attention.forward(tape, &norm.forward(tape, &v[0])?, None, dropout)?;
                y.dropout(dropout, "attn.out")?.add(&v[0])
            },
        );
        let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            let parallel = Program::new(
                real,
                |params, mesh| {
                    let norm = LayerNorm::new(params, "ln", HIDDEN, true)?;
                    Ok((norm, ParallelAttention::new(params, mesh, "attn", HIDDEN, HEADS, true, [init(); 2])?))
                },
                |(norm, attention), tape, v| {
                    attention.forward(tape, &norm.forward(tape, &v[0])?, region, Some(&v[0]), None, dropout)
                },
            );
            let outcome = parallel.over_axis(degree, &[hidden("x", region)]);
            assert_same(&format!("tp={degree}, {region:?}, dropout {dropout}"), &outcome, &reference);
        }
    }
}

/// Heads of keys and values for each of queries, one for two, and one for all: fewer than ranks.
const KV_HEADS: [usize; 3] = [4, 2, 1];

fn groups(kv_heads: usize) -> GroupedHeads {
    GroupedHeads { heads: HEADS, kv_heads, head_dim: HIDDEN / HEADS, rotary: Some(Rotary::new(100.0)) }
}

#[test]
fn parallel_grouped_attention_equals_grouped_self_attention() {
    for (kv_heads, bias, dropout) in KV_HEADS.into_iter().flat_map(|kv| [(kv, false, 0.0), (kv, true, 0.3)]) {
        let plain = Program::new(
            real,
            |params, _| {
                let norm = RmsNorm::new(params, "ln", HIDDEN, 1e-5)?;
                let attention = GroupedSelfAttention::new(params, "attn", HIDDEN, groups(kv_heads), bias, 0.02, 0.02)?;
                Ok((norm, attention))
            },
            |(norm, attention), tape, v| {
                let y = attention.forward(tape, &norm.forward(tape, &v[0])?, None, dropout)?;
                y.dropout(dropout, "attn.out")?.add(&v[0])
            },
        );
        let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            let parallel = Program::new(
                real,
                |params, mesh| {
                    let norm = RmsNorm::new(params, "ln", HIDDEN, 1e-5)?;
                    let (of, init) = (groups(kv_heads), [init(); 2]);
                    Ok((norm, ParallelGroupedAttention::new(params, mesh, "attn", HIDDEN, of, bias, init)?))
                },
                |(norm, attention), tape, v| {
                    attention.forward(tape, &norm.operand(tape, &v[0])?, region, Some(&v[0]), None, dropout)
                },
            );
            let outcome = parallel.over_axis(degree, &[hidden("x", region)]);
            let what = format!("{kv_heads} kv heads, tp={degree}, {region:?}, bias {bias}, dropout {dropout}");
            assert_same(&what, &outcome, &reference);
        }
    }
}

/// Where cp cuts the sequence, keys and values of all tokens are gathered.
#[test]
fn grouped_attention_over_cp_equals_grouped_self_attention() {
    for (kv_heads, dropout) in [(4, 0.0), (2, 0.3), (1, 0.0)] {
        let plain = Program::new(
            real,
            |params, _| GroupedSelfAttention::new(params, "attn", HIDDEN, groups(kv_heads), true, 0.02, 0.02),
            |attention, tape, v| {
                let y = attention.forward(tape, &v[0], None, dropout)?;
                y.dropout(dropout, "attn.out")?.add(&v[0])
            },
        );
        let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
        let region = Region::over(Axis::Cp);
        let mut parallel = Program::new(
            real,
            |params, mesh| {
                ParallelGroupedAttention::new(params, mesh, "attn", HIDDEN, groups(kv_heads), true, [init(); 2])
            },
            |attention, tape, v| attention.forward(tape, &v[0], region, Some(&v[0]), None, dropout),
        );
        parallel.axis = Axis::Cp;
        for degree in DEGREES {
            let x = Input::new("x", &[BATCH, SEQ, HIDDEN], region.ty(Axis::Cp), real);
            let outcome = parallel.over_axis(degree, &[x]);
            assert_same(&format!("cp={degree}, {kv_heads} kv heads, dropout {dropout}"), &outcome, &reference);
        }
    }
}

#[test]
fn parallel_swiglu_equals_swiglu() {
    for (bias, dropout) in [(false, 0.0), (true, 0.3)] {
        let plain = Program::new(
            real,
            |params, _| {
                let norm = RmsNorm::new(params, "ln", HIDDEN, 1e-5)?;
                Ok((norm, Mlp::new(params, "mlp", MlpKind::SwiGlu, [HIDDEN, FFN], bias, [0.02, 0.02])?))
            },
            |(norm, mlp), tape, v| {
                let y = mlp.forward(tape, &norm.forward(tape, &v[0])?)?;
                y.dropout(dropout, "mlp.down")?.add(&v[0])
            },
        );
        let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            let parallel = Program::new(
                real,
                |params, mesh| {
                    let norm = RmsNorm::new(params, "ln", HIDDEN, 1e-5)?;
                    Ok((
                        norm,
                        ParallelMlp::new(params, mesh, "mlp", MlpKind::SwiGlu, [HIDDEN, FFN], bias, [init(); 2])?,
                    ))
                },
                |(norm, mlp), tape, v| mlp.forward(tape, &norm.operand(tape, &v[0])?, region, Some(&v[0]), dropout),
            );
            let outcome = parallel.over_axis(degree, &[hidden("x", region)]);
            assert_same(&format!("tp={degree}, {region:?}, bias {bias}, dropout {dropout}"), &outcome, &reference);
        }
    }
}

/// No bias, no residual, or neither, in every layer that may have them.
#[test]
fn biases_and_residuals_are_optional_in_every_layer() {
    for (bias, residual) in [(false, false), (false, true), (true, false)] {
        let plain = Program::new(
            real,
            |params, _| {
                Ok((
                    LayerNorm::new(params, "ln", HIDDEN, bias)?,
                    SelfAttention::new(params, "attn", HIDDEN, HEADS, bias, 0.02, 0.02)?,
                    Mlp::new(params, "mlp", MlpKind::Gelu, [HIDDEN, FFN], bias, [0.02, 0.02])?,
                ))
            },
            |(norm, attention, mlp), tape, v| {
                let rest = |x: &Var, y: Var| if residual { y.add(x) } else { Ok(y) };
                let x = rest(&v[0], attention.forward(tape, &norm.forward(tape, &v[0])?, None, 0.0)?)?;
                rest(&x, mlp.forward(tape, &norm.forward(tape, &x)?)?)
            },
        );
        let reference = plain.alone(&[hidden("x", Region::INVARIANT)]);
        assert_eq!(reference.params.len(), if bias { 10 } else { 5 });
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            let parallel = Program::new(
                real,
                |params, mesh| {
                    Ok((
                        LayerNorm::new(params, "ln", HIDDEN, bias)?,
                        ParallelAttention::new(params, mesh, "attn", HIDDEN, HEADS, bias, [init(); 2])?,
                        ParallelMlp::new(params, mesh, "mlp", MlpKind::Gelu, [HIDDEN, FFN], bias, [init(); 2])?,
                    ))
                },
                |(norm, attention, mlp), tape, v| {
                    let rest = |x| if residual { Some(x) } else { None };
                    let x = attention.forward(tape, &norm.operand(tape, &v[0])?, region, rest(&v[0]), None, 0.0)?;
                    mlp.forward(tape, &norm.operand(tape, &x)?, region, rest(&x), 0.0)
                },
            );
            let outcome = parallel.over_axis(degree, &[hidden("x", region)]);
            let what = format!("tp={degree}, {region:?}, bias {bias}, residual {residual}");
            assert_same(&what, &outcome, &reference);
        }
    }
}

/// Stored as they are, in more rows than there are words, of which the last of 4 ranks holds none, and all words on the
/// first rank.
const VOCABULARIES: [usize; 3] = [64, 70, 5];

/// Of all ranks.
fn words(vocab: usize) -> Vec<i32> {
    (0..BATCH * SEQ).map(|i| (i * 29 % vocab) as i32).collect()
}

/// The last target is the last word; one is masked.
fn targets(vocab: usize) -> Vec<i32> {
    let mut targets: Vec<i32> = (0..BATCH * SEQ).map(|i| (i * 27 % vocab) as i32).collect();
    targets[3] = -1;
    targets[BATCH * SEQ - 1] = vocab as i32 - 1;
    targets
}

fn tokens(vocab: usize) -> [Input; 2] {
    [words(vocab), targets(vocab)].map(|ids| Input::ids(&ids, &[BATCH, SEQ]))
}

/// Token table, norm, tied logits, loss.
fn tied_model(vocab: usize) -> Outcome {
    let plain = Program::new(
        real,
        |params, _| {
            Ok((Embedding::new(params, "wte", vocab, HIDDEN, 0.02)?, LayerNorm::new(params, "ln", HIDDEN, true)?))
        },
        |(table, norm), tape, v| {
            let x = norm.forward(tape, &table.forward(tape, &v[0])?)?;
            table.logits(tape, &x)?.cross_entropy(&v[1])
        },
    );
    plain.alone(&tokens(vocab))
}

/// `chunk`: tokens whose logits exist at a time; 0 for all.
fn parallel_tied_model(vocab: usize, degree: usize, region: Region, padding: f32, chunk: usize) -> Outcome {
    let mut parallel = Program::new(
        real,
        |params, _| {
            let table = VocabParallelEmbedding::new(params, "wte", vocab, HIDDEN, init())?;
            Ok((table, LayerNorm::new(params, "ln", HIDDEN, true)?))
        },
        move |(table, norm), tape, v| {
            let x = norm.forward(tape, &table.embed(tape, &v[0], region)?)?;
            match chunk {
                0 => table.loss(&table.logits(tape, &x, region)?, &v[1]),
                chunk => table.chunked_loss(tape, &x, &v[1], region, chunk),
            }
        },
    );
    parallel.padding = padding;
    parallel.over_axis(degree, &tokens(vocab))
}

#[test]
fn vocab_parallel_embedding_logits_and_loss_equal_the_plain_ones() {
    for vocab in VOCABULARIES {
        let reference = tied_model(vocab);
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            for chunk in [0, 1, 3, 100] {
                let outcome = parallel_tied_model(vocab, degree, region, 0.0, chunk);
                assert_same(
                    &format!("{vocab} words, tp={degree}, {region:?}, chunks of {chunk}"),
                    &outcome,
                    &reference,
                );
            }
        }
    }
}

#[test]
fn what_padded_rows_hold_changes_neither_the_loss_nor_any_gradient() {
    for (vocab, degree) in [(61, 1), (70, 1), (70, 2), (70, 4), (5, 4)] {
        for region in REGIONS {
            for chunk in [0, 3] {
                let zero = parallel_tied_model(vocab, degree, region, 0.0, chunk);
                let large = parallel_tied_model(vocab, degree, region, 1e6, chunk);
                assert_eq!(large, zero, "{vocab} words, tp={degree}, {region:?}, chunks of {chunk}");
            }
        }
    }
}

/// Rows of logits begin at multiples of 16 bytes on every rank of any degree, in 16 bits too. In canonical numerics the
/// rows are those of the blocks, which are the order of the sums.
#[test]
fn a_token_table_is_stored_in_rows_of_whole_vectors_on_every_rank() {
    let degrees = || 1..=20;
    let slices = |mut params: Declarations, vocab: usize, degree: usize| {
        VocabParallelEmbedding::new(&mut params, "wte", vocab, HIDDEN, init()).unwrap();
        let (spec, mesh) = (&params.specs()[0], Mesh::new([(Axis::Tp, degree)]).unwrap());
        let slices: Vec<LocalSlice> = (0..degree).map(|rank| spec.local(&mesh, mesh.coords(rank))).collect();
        let rows = slices[0].stored[0];
        let mut words = 0;
        for slice in &slices {
            assert_eq!(slice.stored[..], [rows, HIDDEN], "{vocab} words over {degree} ranks");
            assert_eq!(slice.ranges[0].start, words, "{vocab} words over {degree} ranks");
            words = slice.ranges[0].end;
        }
        assert_eq!(words, vocab, "{degree} ranks have each word once");
        rows
    };
    for vocab in [1, 5, 61, 64, 65, 257, 32_000, 50_257, 50_304, 128_256, 151_643] {
        for degree in degrees() {
            let rows = slices(Declarations::new(), vocab, degree);
            assert!(rows.is_multiple_of(8), "{vocab} words over {degree} ranks: {rows} rows");
            assert!(rows * degree - vocab < 64 + 8 * degree, "{vocab} words over {degree} ranks: {rows} rows");
        }
        assert_eq!(slices(Declarations::new(), vocab, 1), vocab.next_multiple_of(64));
        for degree in [1, 2, 4, 8] {
            let rows = slices(Declarations::canonical(8), vocab, degree);
            assert_eq!(rows * degree, vocab.next_multiple_of(8), "{vocab} words over {degree} ranks");
        }
    }
}

#[test]
fn a_vocab_parallel_lookup_is_exact() {
    for vocab in VOCABULARIES {
        let plain = Program::new(
            integer,
            |params, _| Embedding::new(params, "wte", vocab, HIDDEN, 0.02),
            |table, tape, v| table.forward(tape, &v[0]),
        );
        let reference = plain.alone(&tokens(vocab)[..1]);
        for (degree, region) in DEGREES.iter().flat_map(|&degree| REGIONS.map(|region| (degree, region))) {
            let parallel = Program::new(
                integer,
                |params, _| VocabParallelEmbedding::new(params, "wte", vocab, HIDDEN, init()),
                |table, tape, v| table.embed(tape, &v[0], region),
            );
            let outcome = parallel.over_axis(degree, &tokens(vocab)[..1]);
            assert_eq!(outcome, reference, "{vocab} words, tp={degree}, {region:?}");
        }
    }
}

#[test]
fn features_that_tp_does_not_divide_are_refused_by_name() {
    let mesh = Mesh::new([(Axis::Tp, 5)]).unwrap();
    let mut params = Declarations::new();
    let heads = ParallelAttention::new(&mut params, &mesh, "h.0.attn", HIDDEN, HEADS, true, [init(); 2]).unwrap_err();
    assert_eq!(
        heads.to_string(),
        "h.0.attn.qkv: dim 1 of extent 4 cannot be cut over tp=5: the degree must divide it: 1, 2, 4"
    );
    let mut canonical = Declarations::canonical(8);
    let mlp = ParallelMlp::new(&mut canonical, &mesh, "h.0.mlp", MlpKind::Gelu, [HIDDEN, FFN], true, [init(); 2])
        .unwrap_err();
    assert_eq!(
        mlp.to_string(),
        "h.0.mlp.up: dim 0 of extent 24 cannot be cut over tp=5: the degree must divide it: 1, 2, 3, 4, 6, 8, 12, 24"
    );
    // Three ranks hold two heads each, of groups of three.
    let mesh = Mesh::new([(Axis::Tp, 3)]).unwrap();
    let of = GroupedHeads { heads: 6, kv_heads: 2, head_dim: 3, rotary: None };
    let groups = ParallelGroupedAttention::new(&mut params, &mesh, "h.1.attn", 18, of, false, [init(); 2]).unwrap_err();
    assert_eq!(
        groups.to_string(),
        "h.1.attn: dim 0 of extent 6 cannot be cut over tp=3: each rank must hold whole groups of 3 heads, or an equal part of one"
    );
}
