//! The gradient of every local operation against central differences in f64, through the tape.
//!
//! More than 400 lines: one test for each operation.

use crate::common::check::{check, check_on};
use crate::common::{NoParams, alone, ids, input, on_tp, tape_of, to_f64, values};
use meshwork_core::{Axis, Mesh, Rank, Ty, Types};
use meshwork_tensor::op::{
    Divisors, Documents, LongRope, Mask, MlpKind, Moments, Order, Pattern, Rotary, RotaryScaling,
};
use meshwork_tensor::tape::Weights;
use meshwork_tensor::{Result, Tape, Tensor, Var};
use std::sync::Arc;

#[test]
fn linear_over_one_dim() {
    check("linear", &[("x", &[2, 3, 5]), ("w", &[4, 5])], |_, v| v[0].linear(&v[1], 1));
}

#[test]
fn linear_to_structural_dims_and_back() {
    check("qkv", &[("x", &[2, 3, 5]), ("w", &[3, 2, 4, 5])], |_, v| v[0].linear(&v[1], 1));
    check("projection", &[("x", &[2, 3, 2, 4]), ("w", &[5, 2, 4])], |_, v| v[0].linear(&v[1], 2));
}

#[test]
fn sums() {
    check("bias", &[("x", &[3, 4]), ("b", &[4])], |_, v| v[0].bias(&v[1]));
    check("structural bias", &[("x", &[2, 3, 2, 4]), ("b", &[2, 4])], |_, v| v[0].bias(&v[1]));
    check("add", &[("x", &[3, 4]), ("y", &[3, 4])], |_, v| v[0].add(&v[1]));
    check("bias_residual", &[("x", &[2, 3, 4]), ("b", &[4]), ("r", &[2, 3, 4])], |_, v| {
        v[0].bias_residual(&v[1], &v[2])
    });
}

/// A norm adds its share in its own pass if nothing else holds the gradient of the other use, as after a product.
/// Otherwise the tape adds it, as after a sum, whose two gradients are one tensor. The bits are those of a sum of both
/// shares.
#[test]
fn a_norm_adds_its_share_to_what_other_uses_have_left() {
    type Norm = fn(&Var, &[Var]) -> Result<Var>;
    type Program = fn(&[Var], &Var) -> Result<Var>;
    let norms: [(Norm, usize); 2] = [(|x, v| x.layer_norm(&v[1], &v[2], 1e-5), 3), (|x, v| x.rms_norm(&v[1], 1e-5), 2)];
    let programs: [Program; 2] = [|v, normed| normed.linear(&v[3], 1)?.add(&v[0]), |v, normed| normed.add(&v[0])];
    for (i, ((norm, read), program)) in norms.into_iter().flat_map(|norm| programs.map(|p| (norm, p))).enumerate() {
        let run = |apart: bool| {
            let tape = tape_of(&alone());
            let float = |name: &str, shape: &[usize]| {
                let data: Vec<f32> = values(name, shape.iter().product()).iter().map(|&value| value as f32).collect();
                tape.input(Tensor::from_slice(tape.device(), &data, shape).unwrap(), Types::NONE)
            };
            let v = [("x", &[70, 6][..]), ("gamma", &[6]), ("beta", &[6]), ("w", &[6, 6])];
            let v = v.map(|(name, shape)| float(name, shape));
            let x = if apart { tape.input(v[0].tensor().clone(), Types::NONE) } else { v[0].clone() };
            let y = program(&v, &norm(&x, &v).unwrap()).unwrap();
            let seed = float("seed", &[70, 6]).into_tensor();
            tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap();
            let mut grads: Vec<Tensor> = v[..read].iter().filter_map(|input| tape.take_grad(input)).collect();
            if apart {
                grads[0] = grads[0].clone().accumulate(&tape.take_grad(&x).unwrap()).unwrap();
            }
            grads.iter().map(to_f64).collect::<Vec<_>>()
        };
        assert_eq!(run(false), run(true), "program {i}");
    }
}

#[test]
fn a_value_used_more_than_once_gets_the_sum_of_its_gradients() {
    check("x + x", &[("x", &[3, 4])], |_, v| v[0].add(&v[0]));
    check("gelu(x) + x, twice", &[("x", &[3, 4])], |_, v| {
        let y = v[0].gelu()?.add(&v[0])?;
        y.gelu()?.add(&y)
    });
}

#[test]
fn gelu() {
    check("gelu", &[("x", &[5, 7])], |_, v| v[0].gelu());
}

#[test]
fn linear_with_what_follows_it() {
    let inputs: [(_, &[usize]); 3] = [("x", &[2, 3, 5]), ("w", &[2, 4, 5]), ("b", &[2, 4])];
    check("linear_bias", &inputs, |_, v| v[0].linear_bias(&v[1], &v[2], 1));
    check("linear_bias_gelu", &inputs, |_, v| v[0].linear_gelu(&v[1], &v[2], 1));
    check("linear_gelu", &inputs[..2], |_, v| v[0].linear_gelu(&v[1], None, 1));
    let inputs: [(_, &[usize]); 3] = [("x", &[2, 3, 2, 4]), ("w", &[5, 2, 4]), ("b", &[5])];
    check("linear_bias over two dims", &inputs, |_, v| v[0].linear_bias(&v[1], &v[2], 2));
    check("linear_bias_gelu over two dims", &inputs, |_, v| v[0].linear_gelu(&v[1], &v[2], 2));
}

/// A second product beside the first, with the bits of the separate operations; and x read by others, whose gradients
/// lie there already.
#[test]
fn linear_plus() {
    let inputs: [(_, &[usize]); 5] =
        [("x", &[2, 3, 5]), ("w", &[4, 5]), ("u", &[2, 3, 2]), ("v", &[4, 2]), ("b", &[4])];
    check("linear_plus", &inputs[..4], |_, v| v[0].linear_plus(&v[1], None, 1, [&v[2], &v[3]]));
    check("linear_bias_plus", &inputs, |_, v| {
        let together = v[0].linear_plus(&v[1], Some(&v[4]), 1, [&v[2], &v[3]])?;
        let apart = v[0].linear_bias(&v[1], &v[4], 1)?.add(&v[2].linear(&v[3], 1)?)?;
        assert_eq!(together.tensor().to_vec::<f64>()?, apart.tensor().to_vec::<f64>()?);
        Ok(together)
    });
    check("an adapter", &[inputs[0], inputs[1], ("a", &[2, 5]), inputs[3]], |_, v| {
        let inner = v[0].linear(&v[2], 1)?.scale(0.5)?;
        v[0].linear_plus(&v[1], None, 1, [&inner, &v[3]])?.gelu()
    });
}

/// Both products, one of them, and with other uses of x.
#[test]
fn linear_pairs() {
    let inputs: [(_, &[usize]); 4] = [("x", &[2, 3, 5]), ("w", &[4, 5]), ("v", &[2, 2, 5]), ("b", &[2, 2])];
    let flat = |y: &Var| y.linear(&y.tape().constant(some(y.tape(), &[3, 2, 2]), Types::NONE), 2);
    let other = |y: &Var| y.linear(&y.tape().constant(some(y.tape(), &[3, 4]), Types::NONE), 1);
    check("both", &inputs, |_, v| {
        let [y, z] = v[0].linear_pair([(&v[1], None), (&v[2], Some(&v[3]))], 1)?;
        other(&y.gelu()?)?.add(&flat(&z.gelu()?)?)
    });
    check("the first", &inputs[..2], |tape, v| {
        let unused = tape.constant(some(tape, &[2, 5]), Types::NONE);
        let [y, _] = v[0].linear_pair([(&v[1], None), (&unused, None)], 1)?;
        y.gelu()
    });
    check("the second", &[inputs[0], inputs[2], inputs[3]], |tape, v| {
        let unused = tape.constant(some(tape, &[2, 5]), Types::NONE);
        let [_, z] = v[0].linear_pair([(&unused, None), (&v[1], Some(&v[2]))], 1)?;
        z.gelu()
    });
    check("x itself", &inputs[..3], |_, v| {
        let [y, z] = v[0].linear_pair([(&v[1], None), (&v[2], None)], 1)?;
        let x = v[0].linear(&v[0].tape().constant(some(v[0].tape(), &[3, 5]), Types::NONE), 1)?;
        other(&y)?.add(&flat(&z)?)?.add(&x)
    });
}

fn some(tape: &Tape, shape: &[usize]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| 0.3 - 0.1 * (i % 7) as f64).collect();
    Tensor::from_slice(tape.device(), &values, shape).unwrap()
}

/// Forward and every gradient, in f32, of a shape that is shared by threads and of one that is not.
#[test]
fn one_pass_has_the_bits_of_the_operations_apart() {
    type Program = fn(&[Var]) -> Result<Var>;
    let pairs: [[Program; 2]; 3] = [
        [|v| v[0].linear_bias(&v[1], &v[2], 2), |v| v[0].linear(&v[1], 2)?.bias(&v[2])],
        [|v| v[0].linear_gelu(&v[1], &v[2], 2), |v| v[0].linear(&v[1], 2)?.bias(&v[2])?.gelu()],
        [|v| v[0].linear_gelu(&v[1], None, 2), |v| v[0].linear(&v[1], 2)?.gelu()],
    ];
    for shapes in [[&[3, 5, 2, 4][..], &[3, 7, 2, 4], &[3, 7]], [&[2, 129, 3, 100], &[131, 3, 100], &[131]]] {
        for programs in pairs {
            let [fused, apart] = programs.map(|program| {
                let tape = tape_of(&alone());
                let single = |name: &str, shape: &[usize]| {
                    let values: Vec<f32> = values(name, shape.iter().product()).iter().map(|&x| x as f32).collect();
                    Tensor::from_slice(tape.device(), &values, shape).unwrap()
                };
                let vars = [("x", shapes[0]), ("w", shapes[1]), ("b", shapes[2])]
                    .map(|(name, shape)| tape.input(single(name, shape), Types::NONE));
                let y = program(&vars).unwrap();
                tape.backward(&y, single("seed", &y.shape()), Weights::Now, &mut NoParams).unwrap();
                let grads: Vec<_> = vars.iter().filter_map(|var| Some(to_f64(&tape.take_grad(var)?))).collect();
                (y.shape(), to_f64(y.tensor()), grads)
            });
            assert!(fused == apart, "{shapes:?}");
        }
    }
}

#[test]
fn layer_norm() {
    let inputs: [(_, &[usize]); 3] = [("x", &[2, 3, 6]), ("gamma", &[6]), ("beta", &[6])];
    check("layer_norm", &inputs, |_, v| v[0].layer_norm(&v[1], &v[2], 1e-5));
    check("layer_norm without beta", &inputs[..2], |_, v| v[0].layer_norm(&v[1], None, 1e-5));
    check("layer_norm with a large eps", &inputs, |_, v| v[0].layer_norm(&v[1], &v[2], 0.5));
}

#[test]
fn rms_norm() {
    let inputs: [(_, &[usize]); 2] = [("x", &[2, 3, 6]), ("weight", &[6])];
    check("rms_norm", &inputs, |_, v| v[0].rms_norm(&v[1], 1e-5));
    check("rms_norm with a large eps", &inputs, |_, v| v[0].rms_norm(&v[1], 0.5));
}

#[test]
fn swiglu() {
    check("swiglu", &[("x", &[2, 3, 5, 2])], |_, v| v[0].swiglu());
    let inputs: [(_, &[usize]); 2] = [("x", &[2, 3, 5]), ("w", &[4, 2, 5])];
    check("linear_swiglu", &inputs, |_, v| v[0].linear_swiglu(&v[1], 1));
    let inputs: [(_, &[usize]); 2] = [("x", &[2, 3, 2, 4]), ("w", &[3, 2, 2, 4])];
    check("linear_swiglu over two dims", &inputs, |_, v| v[0].linear_swiglu(&v[1], 2));
}

#[test]
fn causal_attention() {
    check("attention", &[("qkv", &[2, 5, 3, 2, 4])], |_, v| v[0].causal_attention(None, None));
    // Longer than one block of queries.
    check("long attention", &[("qkv", &[1, 70, 3, 1, 1])], |_, v| v[0].causal_attention(None, None));
    for window in [1, 3, 5] {
        let mask = Mask { window: Some(window), ..Mask::default() };
        check("a window", &[("qkv", &[2, 5, 3, 2, 4])], |_, v| v[0].causal_attention(mask, None));
        let inputs: [(_, &[usize]); 2] = [("q", &[1, 8, 4, 2]), ("kv", &[1, 8, 2, 4])];
        check("a window of runs", &inputs, |_, v| {
            v[0].grouped_attention_in(&Order::zigzag(2), &v[1], Some(Rotary::new(10.0)), mask, None)
        });
    }
}

/// Caps near the scores, of which some are almost at them.
#[test]
fn capped_scores() {
    let mask = Mask { cap: Some(0.3), window: Some(4), ..Mask::default() };
    check("capped", &[("qkv", &[2, 5, 3, 2, 4])], |_, v| v[0].causal_attention(mask, Some((0.4, "h.0.attn"))));
    let inputs: [(_, &[usize]); 2] = [("q", &[1, 70, 3, 4]), ("kv", &[1, 70, 2, 4])];
    let turned = Rotary { features: Some(2), ..Rotary::new(30.0) };
    check("one long group", &inputs, |_, v| v[0].grouped_attention(&v[1], Some(turned), mask, None));
    let tape = tape_of(&alone());
    let qkv = input(&tape, &values("qkv", 240), &[2, 5, 3, 2, 4], Types::NONE);
    let of = |cap| to_f64(qkv.causal_attention(Mask { cap, ..Mask::default() }, None).unwrap().tensor());
    assert_ne!(of(Some(0.3)), of(None));
    let far = of(Some(1e6)).into_iter().zip(of(None)).map(|(far, none)| (far - none).abs()).fold(0.0, f64::max);
    assert!(far < 1e-9, "a cap far above all scores changes them by {far:e}");
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let mask = Mask { cap: Some(cap), ..Mask::default() };
        let refused = qkv.causal_attention(mask, None).unwrap_err().to_string();
        assert!(refused.contains(&format!("a cap of {cap} is none")), "{refused}");
    }
}

#[test]
fn exact_gelu_and_geglu() {
    check("exact gelu", &[("x", &[6, 8])], |_, v| v[0].exact_gelu());
    check("geglu", &[("x", &[6, 4, 2])], |_, v| MlpKind::GeGlu.apply(&v[0]));
}

#[test]
fn a_window_of_no_tokens_is_refused() {
    let tape = tape_of(&alone());
    let qkv = input(&tape, &values("qkv", 240), &[2, 5, 3, 2, 4], Types::NONE);
    let refused = qkv.causal_attention(Mask { window: Some(0), ..Mask::default() }, None).unwrap_err().to_string();
    assert!(refused.contains("a sliding window of 0 tokens: a query sees at least itself"), "{refused}");
}

#[test]
fn causal_attention_with_dropout() {
    let p = Some((0.4, "h.0.attn"));
    check("attention with dropout", &[("qkv", &[2, 5, 3, 2, 4])], |_, v| v[0].causal_attention(None, p));
    let tape = tape_of(&alone());
    let qkv = input(&tape, &values("qkv", 240), &[2, 5, 3, 2, 4], Types::NONE);
    let (with, without) = (qkv.causal_attention(None, p).unwrap(), qkv.causal_attention(None, None).unwrap());
    assert_ne!(to_f64(with.tensor()), to_f64(without.tensor()), "something was dropped");
}

#[test]
fn grouped_attention() {
    let scaling = RotaryScaling::Llama3 {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_positions: 8,
    };
    let rotary = Rotary { theta: 30.0, scaling: Some(scaling), features: None };
    // What turns is scaled, and of two features alone.
    let divisors = Divisors::new(&[2.0]).unwrap();
    let (original_positions, length, attention_factor) = (8, 8, 1.5);
    let scaling = LongRope { short: divisors, long: divisors, original_positions, length, attention_factor };
    let scaled = Rotary { scaling: Some(RotaryScaling::LongRope(scaling)), features: Some(2), ..rotary };
    for (rotary, dropout) in
        [(None, None), (Some(rotary), None), (Some(rotary), Some((0.4, "h.0.attn"))), (Some(scaled), None)]
    {
        let inputs: [(_, &[usize]); 2] = [("q", &[2, 5, 4, 6]), ("kv", &[2, 5, 2, 12])];
        check("two groups", &inputs, |_, v| v[0].grouped_attention(&v[1], rotary, None, dropout));
        let inputs: [(_, &[usize]); 2] = [("q", &[1, 70, 3, 2]), ("kv", &[1, 70, 2, 2])];
        check("one long group", &inputs, |_, v| v[0].grouped_attention(&v[1], rotary, None, dropout));
    }
}

#[test]
fn attention_in_both_directions_over_other_keys_and_with_shifted_scores() {
    let lengths = |tape: &Tape, keys: &[i32]| ids(tape, keys, &[keys.len()], Types::NONE);
    for mask in [
        Mask::BIDIRECTIONAL,
        Mask { window: Some(2), ..Mask::BIDIRECTIONAL },
        Mask { slopes: Some(&[0.5, 0.25]), cap: Some(2.0), ..Mask::BIDIRECTIONAL },
        Mask { slopes: Some(&[0.5, 0.25]), window: Some(4), ..Mask::default() },
    ] {
        check("self_attention", &[("qkv", &[2, 5, 3, 2, 4])], |_, v| v[0].self_attention(mask, None));
    }
    check("padded sequences", &[("qkv", &[2, 5, 3, 2, 4])], |tape, v| {
        let lengths = lengths(tape, &[3, 0]);
        v[0].self_attention(Mask { lengths: Some(&lengths), ..Mask::BIDIRECTIONAL }, None)
    });
    let inputs: [(_, &[usize]); 2] = [("q", &[2, 5, 4, 6]), ("kv", &[2, 3, 2, 12])];
    check("cross attention", &inputs, |tape, v| {
        let lengths = lengths(tape, &[2, 3]);
        v[0].grouped_attention(&v[1], None, Mask { lengths: Some(&lengths), ..Mask::CROSS }, Some((0.4, "cross")))
    });
    for pattern in [Pattern::Causal, Pattern::Bidirectional] {
        let inputs: [(_, &[usize]); 3] = [("q", &[2, 5, 4, 6]), ("kv", &[2, 5, 2, 12]), ("bias", &[4, 5, 5])];
        check("a bias of pairs", &inputs, |tape, v| {
            let lengths = lengths(tape, &[4, 5]);
            let mask = Mask { pattern, lengths: Some(&lengths), bias: Some(&v[2]), cap: Some(2.0), ..Mask::default() };
            v[0].grouped_attention(&v[1], None, mask, Some((0.3, "biased")))
        });
    }
}

/// What a mask may not say, and what it does not go with.
#[test]
fn masks_that_do_not_fit_are_refused() {
    let tape = tape_of(&alone());
    let value = |name: &str, shape: &[usize]| input(&tape, &values(name, shape.iter().product()), shape, Types::NONE);
    let (qkv, q, kv) = (value("qkv", &[2, 5, 3, 2, 4]), value("q", &[2, 5, 2, 4]), value("kv", &[2, 5, 2, 8]));
    let (short, bias) = (value("short", &[2, 3, 2, 8]), value("bias", &[2, 5, 5]));
    let of = |lengths: &[i32]| ids(&tape, lengths, &[lengths.len()], Types::NONE);
    let (few, long) = (of(&[1]), of(&[6, 2]));
    let positions = ids(&tape, &[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], &[2, 5], Types::NONE);
    let documents = Documents { positions, apart: true };
    let biased = Mask { bias: Some(&bias), ..Mask::default() };
    let rotary = Some(Rotary::new(10.0));
    let attend = |kv: &Var, rotary, mask: Mask<'_>| q.grouped_attention(kv, rotary, mask, None);
    for (refused, message) in [
        (qkv.causal_attention(Mask::BIDIRECTIONAL, None), "a Bidirectional mask: use self_attention"),
        (
            qkv.self_attention(Mask::CROSS, None),
            "keys of another sequence and a bias of pairs are for grouped_attention",
        ),
        (qkv.self_attention(biased, None), "keys of another sequence and a bias of pairs are for grouped_attention"),
        (attend(&short, None, Mask::BIDIRECTIONAL), "kv has the tokens that q has over all ranks"),
        (
            attend(&short, rotary, Mask::CROSS),
            "a rotary embedding in cross attention: tokens of two sequences have no distance",
        ),
        (attend(&short, None, Mask { window: Some(2), ..Mask::CROSS }), "a sliding window in cross attention"),
        (attend(&short, None, Mask { slopes: Some(&[0.5, 0.25]), ..Mask::CROSS }), "slopes in cross attention"),
        (attend(&kv, None, Mask { documents: Some(&documents), ..Mask::CROSS }), "documents in cross attention"),
        (attend(&kv, None, Mask { slopes: Some(&[0.5]), ..Mask::default() }), "1 slopes of 2 heads"),
        (attend(&kv, rotary, biased), "a bias of pairs is for queries and keys that do not turn"),
        (attend(&short, None, Mask { bias: Some(&bias), ..Mask::CROSS }), "bias is [heads, queries, keys], [2, 5, 3]"),
        (attend(&kv, None, Mask { lengths: Some(&few), ..Mask::default() }), "1 lengths: every sequence has one"),
        (
            attend(&kv, None, Mask { lengths: Some(&long), ..Mask::default() }),
            "sample 0 has 6 keys, and a sequence has from none to 5",
        ),
    ] {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(message), "{refused}: not {message}");
    }
}

/// Scores depend on the distance of positions: shifting a whole sequence does not change its results.
#[test]
fn rotary_positions_are_relative() {
    let (seq, moved) = (6, 3);
    let (q, kv) = (values("q", seq * 4), values("kv", seq * 8));
    let out = |skip: usize| {
        let tape = tape_of(&alone());
        let ahead = |x: &[f64], width: usize| [&vec![0.0; skip * width][..], x].concat();
        let q = input(&tape, &ahead(&q, 4), &[1, skip + seq, 1, 4], Types::NONE);
        let kv = input(&tape, &ahead(&kv, 8), &[1, skip + seq, 2, 4], Types::NONE);
        to_f64(q.grouped_attention(&kv, Some(Rotary::new(10.0)), None, None).unwrap().tensor())[skip * 4..].to_vec()
    };
    // Keys of zeros have the score 0, and values of zeros only thin the others out: by a factor that is the same for
    // all features.
    for (got, want) in out(moved).chunks(4).zip(out(0).chunks(4)) {
        let factor = got[0] / want[0];
        assert!(factor > 0.0 && factor < 1.0);
        got.iter().zip(want).for_each(|(got, want)| assert!((got - factor * want).abs() < 1e-12));
    }
}

#[test]
fn dropout() {
    check("dropout", &[("x", &[6, 8])], |_, v| v[0].dropout(0.5, "embedding"));
    let tape = tape_of(&alone());
    let x = input(&tape, &values("x", 48), &[6, 8], Types::NONE);
    let y = to_f64(x.dropout(0.5, "embedding").unwrap().tensor());
    assert!(y.contains(&0.0) && y.iter().any(|y| *y != 0.0), "some are dropped and some are kept");
    assert!(y.iter().zip(values("x", 48)).all(|(y, x)| *y == 0.0 || *y == 2.0 * x));
}

#[test]
fn relu() {
    check("relu", &[("x", &[5, 7])], |_, v| v[0].relu());
}

#[test]
fn convolutions() {
    let x: (_, &[usize]) = ("x", &[2, 5, 4, 3]);
    for (kernel, stride, padding) in [([3, 3], 1, 1), ([3, 2], 2, 1), ([1, 1], 1, 0), ([1, 1], 2, 0), ([5, 4], 1, 0)] {
        let w: [usize; 4] = [4, kernel[0], kernel[1], 3];
        let name = format!("conv2d {kernel:?} / {stride} + {padding}");
        check(&name, &[x, ("w", &w)], |_, v| v[0].conv2d(&v[1], None, stride, padding));
        check(&name, &[x, ("w", &w), ("b", &[4])], |_, v| v[0].conv2d(&v[1], Some(&v[2]), stride, padding));
    }
}

#[test]
fn pools() {
    let x: (_, &[usize]) = ("x", &[2, 5, 4, 3]);
    for (kernel, stride, padding) in [([2, 2], 2, 0), ([3, 3], 2, 1), ([2, 3], 1, 1)] {
        check("max_pool", &[x], |_, v| v[0].max_pool(kernel, stride, padding));
        check("average_pool", &[x], |_, v| v[0].average_pool(kernel, stride, padding));
    }
    check("global_average_pool", &[x], |_, v| v[0].global_average_pool());
}

#[test]
fn norms_over_channels() {
    let inputs: [(_, &[usize]); 3] = [("x", &[3, 2, 3, 4]), ("gamma", &[4]), ("beta", &[4])];
    check("batch_norm", &inputs, |_, v| Ok(v[0].batch_norm(&v[1], &v[2], 1e-5)?.0));
    check("batch_norm without beta", &inputs[..2], |_, v| Ok(v[0].batch_norm(&v[1], None, 1e-5)?.0));
    for groups in [1, 2, 4] {
        check("group_norm", &inputs, |_, v| v[0].group_norm(groups, &v[1], &v[2], 1e-5));
        check("group_norm without beta", &inputs[..2], |_, v| v[0].group_norm(groups, &v[1], None, 1e-5));
    }
    for (name, inputs) in [("batch_norm_with", &inputs[..]), ("batch_norm_with without beta", &inputs[..2])] {
        check(name, inputs, |tape, v| {
            let vector = |values: [f64; 4]| Tensor::from_slice(tape.device(), &values, [4]);
            let moments = Moments { mean: vector([0.5, -1.0, 0.0, 2.0])?, variance: vector([0.3, 1.0, 2.0, 0.7])? };
            v[0].batch_norm_with(&v[1], v.get(2), &moments, 1e-5)
        });
    }
    // More rows than are summed in one part, and more than one part.
    let inputs: [(_, &[usize]); 3] = [("x", &[2, 9, 8, 2]), ("gamma", &[2]), ("beta", &[2])];
    check("batch_norm of many rows", &inputs, |_, v| Ok(v[0].batch_norm(&v[1], &v[2], 1e-5)?.0));
    check("group_norm of many rows", &inputs, |_, v| v[0].group_norm(2, &v[1], &v[2], 1e-5));
}

/// Ids repeat, so that rows of the table collect several gradients, and some rows get none.
const IDS: [i32; 6] = [3, 0, 3, 5, 0, 3];

#[test]
fn embedding() {
    check("embedding", &[("table", &[6, 4])], |tape, v| {
        ids(tape, &IDS, &[2, 3], Types::NONE).embedding(&v[0]) //
    });
}

#[test]
fn positions() {
    // The table holds more positions than the sequence has.
    check("positions", &[("x", &[2, 3, 4]), ("table", &[5, 4])], |_, v| v[0].positions(&v[1]));
}

/// One row is masked.
const TARGETS: [i32; 6] = [1, 0, -1, 4, 2, 2];

#[test]
fn cross_entropy() {
    check("cross_entropy", &[("logits", &[2, 3, 5])], |tape, v| {
        v[0].cross_entropy(&ids(tape, &TARGETS, &[2, 3], Types::NONE))
    });
}

/// Logits that something else reads as well: the loss must not write its gradient over them.
#[test]
fn cross_entropy_of_logits_that_are_used_twice() {
    check("cross_entropy", &[("x", &[2, 3, 5])], |tape, v| {
        let logits = v[0].gelu()?;
        let targets = ids(tape, &TARGETS, &[2, 3], Types::NONE);
        let (once, again) = (logits.cross_entropy(&targets)?, logits.gelu()?.cross_entropy(&targets)?);
        once.add(&again)
    });
}

/// Chunks that end with the sample and chunks that do not, and one that has all of it.
#[test]
fn linear_cross_entropy() {
    for chunk in [1, 2, 7] {
        check("linear_cross_entropy", &[("x", &[2, 3, 4]), ("weight", &[5, 4])], |tape, v| {
            v[0].linear_cross_entropy(&v[1], &ids(tape, &TARGETS, &[2, 3], Types::NONE), chunk)
        });
    }
}

#[test]
fn vocab_parallel_operations_on_one_rank() {
    let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Tp, 1)]).unwrap(), 0).unwrap());
    check_on(&rank, "vocab_parallel_embedding", &[("table", &[6, 4], Ty::Shard(0))], |tape, v| {
        ids(tape, &IDS, &[2, 3], on_tp(Ty::Invariant)).vocab_parallel_embedding(&v[0], Axis::Tp, 6)
    });
    check_on(&rank, "vocab_parallel_cross_entropy", &[("logits", &[2, 3, 7], Ty::Shard(2))], |tape, v| {
        let targets = ids(tape, &TARGETS, &[2, 3], on_tp(Ty::Invariant));
        v[0].padded(Axis::Tp, 5)?.vocab_parallel_cross_entropy(&targets, Axis::Tp, 5) // two columns of padding
    });
    let (op, shapes): (_, &[(&str, &[usize], Ty)]) =
        ("vocab_parallel_linear_cross_entropy", &[("x", &[2, 3, 4], Ty::Replicate), ("weight", &[7, 4], Ty::Shard(0))]);
    check_on(&rank, op, shapes, |tape, v| {
        let targets = ids(tape, &TARGETS, &[2, 3], on_tp(Ty::Invariant));
        v[0].vocab_parallel_linear_cross_entropy(&v[1].padded(Axis::Tp, 5)?, &targets, Axis::Tp, 5, 2)
    });
}
