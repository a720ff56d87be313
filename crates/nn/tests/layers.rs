//! Each layer against its equation, written out in f64; and what each declares.

use meshwork_core::{Axis, DType, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_nn::{
    Activation, Embedding, GroupedSelfAttention, Joined, LayerNorm, Linear, Mlp, Positions, RmsNorm, SelfAttention,
};
use meshwork_tensor::op::{GroupedHeads, MlpKind, Rotary};
use meshwork_tensor::random::{key, normal};
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Init, Params, Placement, Result, Role, Shape, Tape, Tensor, Var};
use meshwork_testkit::parity::assert_close;
use std::sync::Arc;

const BATCH: usize = 2;
const SEQ: usize = 5;
const HIDDEN: usize = 6;
const FFN: usize = 9;

/// A tape over the parameters that `declare` declares, all of them normal, and the layer.
fn build<L>(declare: impl Fn(&mut Declarations) -> Result<L>) -> (L, Tape, Declarations) {
    let rank = Rank::alone().unwrap();
    let mut declarations = Declarations::new();
    let layer = declare(&mut declarations).unwrap();
    let (device, layout) = (Cpu::device(), [declarations.ids().collect()]);
    let shared = Arc::new(declarations.clone());
    let mut params = Params::new(shared, rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
    for id in declarations.ids() {
        let place = params.place(id).1;
        let values = values(&declarations.spec(id).name, place.len());
        params.flats_mut()[0].as_mut_slice().unwrap()[place].copy_from_slice(&values);
    }
    let tape = Tape::new(Arc::new(rank), Arc::new(params), device, Mode::Train, Position::default());
    (layer, tape, declarations)
}

fn values(name: &str, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| normal(key(2, name), i)).collect()
}

/// The same values for the oracle.
fn wide(name: &str, count: usize) -> Vec<f64> {
    values(name, count).into_iter().map(f64::from).collect()
}

fn x(tape: &Tape) -> Var {
    let x = Tensor::from_slice(tape.device(), &values("x", BATCH * SEQ * HIDDEN), [BATCH, SEQ, HIDDEN]).unwrap();
    tape.input(x, Types::NONE)
}

#[track_caller]
fn assert_is(name: &str, got: &Var, shape: &[usize], want: &[f64]) {
    assert_eq!(&got.shape()[..], shape, "{name}: shape");
    let got: Vec<f64> = got.tensor().to_vec::<f32>().unwrap().into_iter().map(f64::from).collect();
    assert_close(name, &got, want, 0.0);
}

/// `x[rows, k] · w[n, k]ᵀ + b[n]`.
fn linear(x: &[f64], w: &[f64], b: &[f64]) -> Vec<f64> {
    let k = w.len() / b.len();
    let dot = |x: &[f64], n: usize| x.iter().zip(&w[n * k..]).map(|(x, w)| x * w).sum::<f64>() + b[n];
    x.chunks(k).flat_map(|x| (0..b.len()).map(move |n| dot(x, n))).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

#[test]
fn linear_is_a_product_and_a_bias() {
    let (layer, tape, _) = build(|params| Linear::new(params, "up", HIDDEN, FFN, true, 0.02));
    let want = linear(&wide("x", BATCH * SEQ * HIDDEN), &wide("up.weight", FFN * HIDDEN), &wide("up.bias", FFN));
    assert_is("linear", &layer.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, FFN], &want);

    let (layer, tape, declared) = build(|params| Linear::new(params, "up", HIDDEN, FFN, false, 0.02));
    let want = linear(&wide("x", BATCH * SEQ * HIDDEN), &wide("up.weight", FFN * HIDDEN), &[0.0; FFN]);
    assert_is("linear without bias", &layer.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, FFN], &want);
    assert!(declared.find("up.bias").is_none());
}

#[test]
fn layer_norm_has_mean_beta_and_deviation_gamma() {
    for bias in [true, false] {
        let (layer, tape, declared) = build(|params| LayerNorm::new(params, "ln", HIDDEN, bias));
        assert_eq!(declared.find("ln.bias").is_some(), bias);
        let gamma = wide("ln.weight", HIDDEN);
        let beta = if bias { wide("ln.bias", HIDDEN) } else { vec![0.0; HIDDEN] };
        let row = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / HIDDEN as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / HIDDEN as f64;
            let scale = 1.0 / (variance + LayerNorm::EPS).sqrt();
            x.iter().zip(gamma.iter().zip(&beta)).map(|(x, (g, b))| (x - mean) * scale * g + b).collect::<Vec<_>>()
        };
        let want: Vec<f64> = wide("x", BATCH * SEQ * HIDDEN).chunks(HIDDEN).flat_map(row).collect();
        assert_is("layer norm", &layer.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
    }
}

#[test]
fn rms_norm_has_mean_square_weight() {
    let (layer, tape, _) = build(|params| RmsNorm::new(params, "ln", HIDDEN, 1e-5));
    let weight = wide("ln.weight", HIDDEN);
    let row = |x: &[f64]| {
        let square = x.iter().map(|x| x * x).sum::<f64>() / HIDDEN as f64;
        x.iter().zip(&weight).map(|(x, w)| x / (square + 1e-5).sqrt() * w).collect::<Vec<_>>()
    };
    let want: Vec<f64> = wide("x", BATCH * SEQ * HIDDEN).chunks(HIDDEN).flat_map(row).collect();
    assert_is("rms norm", &layer.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
}

#[test]
fn swiglu_lets_through_what_its_gate_says() {
    for bias in [false, true] {
        let (layer, tape, declared) =
            build(|params| Mlp::new(params, "mlp", MlpKind::SwiGlu, [HIDDEN, FFN], bias, [0.02, 0.01]));
        let vector = |name: &str, count| if bias { wide(name, count) } else { vec![0.0; count] };
        assert_eq!(declared.specs().len(), if bias { 4 } else { 2 });
        let w = wide("mlp.gate_up.weight", FFN * 2 * HIDDEN);
        let pairs = linear(&wide("x", BATCH * SEQ * HIDDEN), &w, &vector("mlp.gate_up.bias", 2 * FFN));
        let inner: Vec<f64> = pairs.chunks(2).map(|pair| pair[0] / (1.0 + (-pair[0]).exp()) * pair[1]).collect();
        let want = linear(&inner, &wide("mlp.down.weight", HIDDEN * FFN), &vector("mlp.down.bias", HIDDEN));
        assert_is("swiglu", &layer.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
    }
}

#[test]
fn mlp_is_two_linears_around_a_gelu() {
    let (layer, tape, _) = build(|params| Mlp::new(params, "mlp", MlpKind::Gelu, [HIDDEN, FFN], true, [0.02, 0.01]));
    let up = linear(&wide("x", BATCH * SEQ * HIDDEN), &wide("mlp.up.weight", FFN * HIDDEN), &wide("mlp.up.bias", FFN));
    let inner: Vec<f64> = up.into_iter().map(gelu).collect();
    let want = linear(&inner, &wide("mlp.down.weight", HIDDEN * FFN), &wide("mlp.down.bias", HIDDEN));
    assert_is("mlp", &layer.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
}

#[test]
fn self_attention_mixes_earlier_tokens_by_softmax() {
    const HEADS: usize = 2;
    const D: usize = HIDDEN / HEADS;
    let (layer, tape, _) = build(|params| SelfAttention::new(params, "attn", HIDDEN, HEADS, true, 0.02, 0.01));
    let (w, b) = (wide("attn.qkv.weight", 3 * HIDDEN * HIDDEN), wide("attn.qkv.bias", 3 * HIDDEN));
    let qkv = linear(&wide("x", BATCH * SEQ * HIDDEN), &w, &b); // [b, s, 3, heads, d]
    let at = |sample: usize, token: usize, which: usize, head: usize| {
        &qkv[(((sample * SEQ + token) * 3 + which) * HEADS + head) * D..][..D]
    };
    let mut mixed = Vec::new(); // [b, s, heads, d]
    for (sample, query, head) in
        (0..BATCH).flat_map(|b| (0..SEQ).flat_map(move |s| (0..HEADS).map(move |head| (b, s, head))))
    {
        let score = |key: usize| -> f64 {
            let products = at(sample, query, 0, head).iter().zip(at(sample, key, 1, head)).map(|(q, k)| q * k);
            (products.sum::<f64>() / (D as f64).sqrt()).exp()
        };
        let total: f64 = (0..=query).map(score).sum();
        mixed.extend(
            (0..D).map(|e| (0..=query).map(|key| score(key) / total * at(sample, key, 2, head)[e]).sum::<f64>()),
        );
    }
    let want = linear(&mixed, &wide("attn.out.weight", HIDDEN * HIDDEN), &wide("attn.out.bias", HIDDEN));
    assert_is("attention", &layer.forward(&tape, &x(&tape), None, 0.0).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
}

/// Two heads of queries for each head of keys and values, rotated by the paper's matrices.
#[test]
fn grouped_self_attention_turns_and_shares() {
    const HEADS: usize = 4;
    const KV_HEADS: usize = 2;
    const D: usize = 4;
    let theta = 50.0;
    let of = GroupedHeads { heads: HEADS, kv_heads: KV_HEADS, head_dim: D, rotary: Some(Rotary::new(theta)) };
    let (layer, tape, _) = build(|params| GroupedSelfAttention::new(params, "attn", HIDDEN, of, false, 0.02, 0.01));
    let x_wide = wide("x", BATCH * SEQ * HIDDEN);
    let q = linear(&x_wide, &wide("attn.q.weight", HEADS * D * HIDDEN), &[0.0; HEADS * D]); // [b, s, heads, d]
    let kv = linear(&x_wide, &wide("attn.kv.weight", 2 * KV_HEADS * D * HIDDEN), &[0.0; 2 * KV_HEADS * D]); // [b, s, 2, heads, d]
    let turned = |token: usize, x: &[f64]| -> Vec<f64> {
        let angle = |e: usize| token as f64 * theta.powf(-2.0 * (e % (D / 2)) as f64 / D as f64);
        let other = |e: usize| if e < D / 2 { -x[e + D / 2] } else { x[e - D / 2] };
        (0..D).map(|e| x[e] * angle(e).cos() + other(e) * angle(e).sin()).collect()
    };
    let query = |sample: usize, token: usize, head: usize| {
        turned(token, &q[((sample * SEQ + token) * HEADS + head) * D..][..D])
    };
    let at = |sample: usize, token: usize, which: usize, head: usize| {
        &kv[(((sample * SEQ + token) * 2 + which) * KV_HEADS + head / 2) * D..][..D]
    };
    let mut mixed = Vec::new(); // [b, s, heads, d]
    for (b, s, head) in (0..BATCH).flat_map(|b| (0..SEQ).flat_map(move |s| (0..HEADS).map(move |head| (b, s, head)))) {
        let score = |key: usize| -> f64 {
            let k = turned(key, at(b, key, 0, head));
            let products = query(b, s, head).into_iter().zip(k).map(|(q, k)| q * k);
            (products.sum::<f64>() / (D as f64).sqrt()).exp()
        };
        let total: f64 = (0..=s).map(score).sum();
        mixed.extend((0..D).map(|e| (0..=s).map(|key| score(key) / total * at(b, key, 1, head)[e]).sum::<f64>()));
    }
    let want = linear(&mixed, &wide("attn.out.weight", HIDDEN * HEADS * D), &[0.0; HIDDEN]);
    assert_is("attention", &layer.forward(&tape, &x(&tape), None, 0.0).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
}

#[test]
fn tables_are_looked_up_and_give_logits() {
    const WORDS: usize = 4;
    let (table, tape, _) = build(|params| Embedding::new(params, "wte", WORDS, HIDDEN, 0.02));
    let rows = wide("wte.weight", WORDS * HIDDEN);
    let ids = [2, 0, 3, 3, 1];
    let want: Vec<f64> = ids.iter().flat_map(|&id| rows[id as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
    let tokens = tape.constant(Tensor::from_slice(tape.device(), &ids, [1, SEQ]).unwrap(), Types::NONE);
    assert_is("embedding", &table.forward(&tape, &tokens).unwrap(), &[1, SEQ, HIDDEN], &want);
    let want = linear(&wide("x", BATCH * SEQ * HIDDEN), &rows, &[0.0; WORDS]);
    assert_is("logits", &table.logits(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, WORDS], &want);

    let (positions, tape, _) = build(|params| Positions::new(params, "wpe", SEQ + 1, HIDDEN, 0.02));
    let rows = wide("wpe.weight", (SEQ + 1) * HIDDEN);
    let plus = |(i, x)| x + rows[i % (SEQ * HIDDEN)];
    let want: Vec<f64> = wide("x", BATCH * SEQ * HIDDEN).into_iter().enumerate().map(plus).collect();
    assert_is("positions", &positions.forward(&tape, &x(&tape)).unwrap(), &[BATCH, SEQ, HIDDEN], &want);
}

/// Checkpoints, weight decay and reproducibility depend on names, extents, roles and initial values.
#[test]
fn layers_declare_their_parameters_by_name_role_and_initial_values() {
    let (_, _, declared) = build(|params| {
        SelfAttention::new(params, "attn", HIDDEN, 2, true, 0.02, 0.01)?;
        Mlp::new(params, "mlp", MlpKind::Gelu, [HIDDEN, FFN], true, [0.02, 0.01])?;
        LayerNorm::new(params, "ln", HIDDEN, true)?;
        let of = GroupedHeads { heads: 4, kv_heads: 2, head_dim: 3, rotary: None };
        GroupedSelfAttention::new(params, "gqa", HIDDEN, of, false, 0.02, 0.01)?;
        Mlp::new(params, "gated", MlpKind::SwiGlu, [HIDDEN, FFN], false, [0.02, 0.01])?;
        RmsNorm::new(params, "rms", HIDDEN, 1e-5)?;
        Embedding::new(params, "wte", 4, HIDDEN, 0.02)?;
        Positions::new(params, "wpe", SEQ, HIDDEN, 0.03)
    });
    let normal = |std| Init::Normal { std };
    let expected: [(&str, &[usize], Role, Init); 18] = [
        ("attn.qkv.weight", &[3, 2, HIDDEN / 2, HIDDEN], Role::Weight, normal(0.02)),
        ("attn.qkv.bias", &[3, 2, HIDDEN / 2], Role::Bias, Init::Zeros),
        ("attn.out.weight", &[HIDDEN, 2, HIDDEN / 2], Role::Weight, normal(0.01)),
        ("attn.out.bias", &[HIDDEN], Role::Bias, Init::Zeros),
        ("mlp.up.weight", &[FFN, HIDDEN], Role::Weight, normal(0.02)),
        ("mlp.up.bias", &[FFN], Role::Bias, Init::Zeros),
        ("mlp.down.weight", &[HIDDEN, FFN], Role::Weight, normal(0.01)),
        ("mlp.down.bias", &[HIDDEN], Role::Bias, Init::Zeros),
        ("ln.weight", &[HIDDEN], Role::Norm, Init::Ones),
        ("ln.bias", &[HIDDEN], Role::Norm, Init::Zeros),
        ("gqa.q.weight", &[4, 3, HIDDEN], Role::Weight, normal(0.02)),
        ("gqa.kv.weight", &[2, 6, HIDDEN], Role::Weight, normal(0.02)),
        ("gqa.out.weight", &[HIDDEN, 4, 3], Role::Weight, normal(0.01)),
        ("gated.gate_up.weight", &[FFN, 2, HIDDEN], Role::Weight, normal(0.02)),
        ("gated.down.weight", &[HIDDEN, FFN], Role::Weight, normal(0.01)),
        ("rms.weight", &[HIDDEN], Role::Norm, Init::Ones),
        ("wte.weight", &[4, HIDDEN], Role::Weight, normal(0.02)),
        ("wpe.weight", &[SEQ, HIDDEN], Role::Weight, normal(0.03)),
    ];
    assert_eq!(declared.specs().len(), expected.len());
    for (spec, (name, dims, role, init)) in declared.specs().iter().zip(expected) {
        assert_eq!((spec.name.as_str(), spec.dims, spec.role, spec.init), (name, Shape::new(dims), role, init));
        assert_eq!(spec.placement, Placement::replicated(), "{name}");
    }
}

/// What is joined comes apart again, with its gradients; what would lie scattered, or is not alike, is refused.
#[test]
fn joined_activations_come_apart_again() {
    let (_, tape, _) = build(|_| Ok(()));
    let value = |name: &str, shape: &[usize]| {
        let tensor = Tensor::from_slice(tape.device(), &values(name, shape.iter().product()), shape).unwrap();
        tape.input(tensor, Types::NONE)
    };
    let (x, y) = (value("x", &[BATCH, SEQ, HIDDEN]), value("y", &[BATCH, FFN]));
    let of = |shape: Shape, types| Activation { dtype: DType::F32, shape, types };
    let both = Joined::new(vec![of(x.shape(), Types::NONE), of(y.shape(), Types::NONE)]).unwrap();
    let joined = both.join(&[&x, &y]).unwrap();
    assert_eq!(both.activation(), of(joined.shape(), Types::NONE));
    let parts = both.split(&joined).unwrap();
    for (part, whole) in parts.iter().zip([&x, &y]) {
        assert_eq!(
            (part.shape(), part.tensor().to_vec::<f32>().unwrap()),
            (whole.shape(), whole.tensor().to_vec().unwrap())
        );
    }
    let cut = Types::new(&[(Axis::Tp, Ty::Shard(1))]);
    let shapes = |a: &[usize], b: &[usize]| [a, b].map(Shape::new);
    for (parts, says) in [
        (Joined::new(Vec::new()), "there are none"),
        (
            Joined::new(shapes(&[2, 3], &[4, 3]).map(|shape| of(shape, Types::NONE)).to_vec()),
            "all have the same samples",
        ),
        (Joined::new(shapes(&[2, 3], &[2, 5]).map(|shape| of(shape, cut)).to_vec()), "they are Shard(1) on tp"),
    ] {
        let refused = parts.unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
    let swapped = both.join(&[&y, &x]).unwrap_err().to_string();
    assert!(swapped.contains("joined activations: they are"), "{swapped}");
}
