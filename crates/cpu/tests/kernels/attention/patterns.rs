//! Attention that is not causal, over keys of another number, and with shifted scores, against the equations.

use super::grouped::Case;
use super::*;

/// What a call sees and adds.
#[derive(Clone, Debug, Default)]
struct Shown {
    /// Tokens from a query to the last that it sees, and to the first.
    ahead: usize,
    window: Option<usize>,
    lengths: Option<Vec<usize>>,
    cap: Option<f64>,
    slopes: Option<Vec<f32>>,
    biased: bool,
    dropout: Option<Dropout>,
}

impl Shown {
    fn masks(&self) -> Masks<'_> {
        Masks {
            dropout: self.dropout,
            window: self.window,
            ahead: self.ahead,
            lengths: self.lengths.as_deref(),
            cap: self.cap,
            slopes: self.slopes.as_deref(),
            ..Masks::default()
        }
    }

    fn sees(&self, sample: usize, i: usize, j: usize) -> bool {
        let (last, behind) = (i + self.ahead, self.lengths.as_ref().is_some_and(|lengths| j >= lengths[sample]));
        j <= last && !behind && self.window.is_none_or(|window| last < j + window)
    }
}

/// Output, lse and the gradients of q, kv and bias, one pair at a time. Keys and values have heads of their own.
fn naive(d: Dims, shown: &Shown, [q, kv, dout, bias]: [&[f64]; 4]) -> [Vec<f64>; 5] {
    let (seq, keys, heads, e) = (d.seq, d.keys.count, d.heads, d.head_dim);
    let (of_keys, scale) = (Dims { seq: keys, ..d }, 1.0 / (e as f64).sqrt());
    let (mut out, mut lses) = (vec![0.0; q.len()], vec![f64::NEG_INFINITY; d.batch * heads * seq]);
    let (mut dq, mut dkv, mut dbias) = (vec![0.0; q.len()], vec![0.0; kv.len()], vec![0.0; heads * seq * keys]);
    for (b, h) in each_head(d) {
        for i in 0..seq {
            let row = part(d, 1, [b, i, 0, h]);
            let key = |j| part(of_keys, 2, [b, j, 0, h]);
            let value = |j| part(of_keys, 2, [b, j, 1, h]);
            let seen: Vec<usize> = (0..keys).filter(|&j| shown.sees(b, i, j)).collect();
            let Some(drop) = shown.dropout.map_or(Some(vec![1.0; keys]), |drop| {
                let mut factors = vec![1.0; keys];
                let head = (drop.first_sample + b as u64) * drop.global_heads + drop.first_head + h as u64;
                let sequence = d.keys.sequence as u64;
                drop.mask.factors((head * sequence + i as u64) * sequence, &mut factors);
                Some(factors)
            }) else {
                continue;
            };
            // The score, and its slope by the product times the scale.
            let score = |j: usize| {
                let plain = dot(&q[row.clone()], &kv[key(j)]) * scale;
                let capped = shown.cap.map_or((plain, 1.0), |cap| {
                    let tanh = (plain / cap).tanh();
                    (cap * tanh, 1.0 - tanh * tanh)
                });
                let fall = shown.slopes.as_ref().map_or(0.0, |slopes| f64::from(slopes[h]) * i.abs_diff(j) as f64);
                let biased = if shown.biased { bias[(h * seq + i) * keys + j] } else { 0.0 };
                (capped.0 - fall + biased, capped.1)
            };
            if seen.is_empty() {
                continue;
            }
            let max = seen.iter().map(|&j| score(j).0).fold(f64::NEG_INFINITY, f64::max);
            let lse = max + seen.iter().map(|&j| (score(j).0 - max).exp()).sum::<f64>().ln();
            lses[(b * heads + h) * seq + i] = lse;
            for &j in &seen {
                let p = (score(j).0 - lse).exp() * drop[j];
                for x in 0..e {
                    out[row.start + x] += p * kv[value(j).start + x];
                }
            }
            let delta = dot(&dout[row.clone()], &out[row.clone()]);
            for &j in &seen {
                let (s, slope) = score(j);
                let p = (s - lse).exp();
                let ds = p * (dot(&dout[row.clone()], &kv[value(j)]) * drop[j] - delta);
                dbias[(h * seq + i) * keys + j] += ds;
                for x in 0..e {
                    dq[row.start + x] += ds * slope * scale * kv[key(j).start + x];
                    dkv[key(j).start + x] += ds * slope * scale * q[row.start + x];
                    dkv[value(j).start + x] += p * drop[j] * dout[row.start + x];
                }
            }
        }
    }
    [out, lses, dq, dkv, dbias]
}

/// The same by the kernels. Every buffer starts as NaN, so that elements that are not overwritten are noticed.
fn run<T: Tiled>(tiles: Tiles<T>, d: Dims, shown: &Shown, [q, kv, dout, bias]: [&[T]; 4]) -> [Vec<T>; 5] {
    let (groups, masks, nan) = (Groups::alone(d), shown.masks(), T::from(f32::NAN));
    let nans = |len: usize| vec![nan; len];
    let given = shown.biased.then_some(bias);
    let (mut out, mut lse) = (nans(q.len()), nans(d.batch * d.heads * d.seq));
    grouped_forward(tiles, d, groups, None, [q, kv], &mut out, &mut lse, masks, given);
    let (mut dq, mut dkv, mut dbias) = (nans(q.len()), nans(kv.len()), nans(bias.len()));
    let saved = Saved { q, kv, out: &out, lse: &lse };
    grouped_backward(tiles, d, groups, None, saved, dout, [&mut dq, &mut dkv], masks, given);
    let zeros = vec![T::ZERO; bias.len()];
    let given = given.unwrap_or(&zeros);
    pair_bias_grad(Precision::F32, d, groups, saved, dout, masks, given, (d.batch, false, &mut dbias));
    [out, lse, dq, dkv, dbias]
}

/// Queries of this shape, `[batch, seq, heads, head_dim]`, over `keys` keys.
fn over(shape: [usize; 4], keys: usize) -> Dims {
    let sequence = shape[1].max(keys);
    Dims { keys: Keys { count: keys, first_query: 0, first: 0, sequence }, ..Dims::new(shape) }
}

fn operands<T: Float>(d: Dims) -> [Vec<T>; 4] {
    let of_keys = Dims { seq: d.keys.count, ..d };
    let counts = [elements(d), 2 * elements(of_keys), elements(d), d.heads * d.seq * d.keys.count];
    let names = ["q", "kv", "dout", "bias"];
    std::array::from_fn(|i| values(names[i], counts[i]))
}

/// Shapes at edges of vectors, tiles and blocks; one and two queries too, which have rows of scores of their own.
#[test]
fn every_pattern_follows_the_equations() {
    for (shape, keys) in [
        ([1, 1, 1, 1], 1),
        ([2, 1, 2, 8], 5),
        ([3, 2, 1, 20], 300),
        ([2, 13, 2, 31], 13),
        ([2, 33, 1, 16], 7),
        ([1, 129, 2, 17], 129),
        ([2, 140, 1, 8], 2 * FORWARD_KEYS + 1),
    ] {
        let d = over(shape, keys);
        let full = Shown { ahead: keys, ..Shown::default() };
        let slopes: Vec<f32> = (1..=d.heads).map(|head| 0.25 / head as f32).collect();
        let lengths: Vec<usize> = (0..d.batch).map(|sample| keys * (2 - sample.min(2)) / 2 + sample % 2).collect();
        let cases = [
            full.clone(),
            Shown { ahead: 4, window: Some(9), ..full.clone() },
            Shown { ahead: 130, window: Some(261), dropout: Some(dropout(0.2)), ..full.clone() },
            Shown { lengths: Some(lengths.clone()), dropout: Some(dropout(0.3)), ..full.clone() },
            Shown { lengths: Some(lengths.clone()), ahead: 0, window: Some(6), ..full.clone() },
            Shown { slopes: Some(slopes.clone()), ..full.clone() },
            Shown { slopes: Some(slopes), ahead: 0, window: Some(40), cap: Some(2.0), ..full.clone() },
            Shown { biased: true, lengths: Some(lengths), cap: Some(3.0), dropout: Some(dropout(0.1)), ..full.clone() },
            Shown { biased: true, ahead: 0, ..full },
        ];
        let ops: [Vec<f32>; 4] = operands(d);
        let wide = ops.each_ref().map(|x| widen(x));
        for shown in cases {
            let want = naive(d, &shown, wide.each_ref().map(|x| &x[..]));
            for tiles in Tiles::all(Precision::F32) {
                let got = run(tiles, d, &shown, ops.each_ref().map(|x| &x[..]));
                let bounds = [5e-6, 5e-6, 2e-5, 5e-5, 2e-5];
                for (what, bound) in bounds.into_iter().enumerate() {
                    let finite = |x: f64| if x == f64::NEG_INFINITY { -1e30 } else { x };
                    let got: Vec<f64> = widen(&got[what]).into_iter().map(finite).collect();
                    let want: Vec<f64> = want[what].iter().copied().map(finite).collect();
                    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                        let off = (got - want).abs();
                        assert!(
                            off <= bound * want.abs().max(1.0),
                            "{d:?}, {shown:?}: result {what}, {i}: {got}, {want}"
                        );
                    }
                }
            }
        }
    }
}

/// Keys that a length hides change no bit: those of a call without them. Some of the queries have the bits of all.
#[test]
fn bits_do_not_depend_on_hidden_keys_or_other_queries() {
    for precision in Precision::ALL {
        let (seq, keys, shown) = (150, 290, 170);
        let (d, tiles) = (over([2, seq, 2, 12], keys), f32::tiles(precision));
        let [q, kv, dout, bias] = operands::<f32>(d);
        let of = |lengths: Option<Vec<usize>>, ahead| Shown { ahead, lengths, ..Shown::default() };
        let [out, _, dq, dkv, _] = run(tiles, d, &of(Some(vec![shown; 2]), keys), [&q, &kv, &dout, &bias]);
        let row = 2 * 2 * 12;
        let cut = |x: &[f32]| x.chunks(keys * row).flat_map(|x| x[..shown * row].to_vec()).collect::<Vec<_>>();
        let few = over([2, seq, 2, 12], shown);
        let [want, _, want_dq, want_dkv, _] =
            run(tiles, few, &of(None, shown), [&q, &cut(&kv), &dout, &bias[..2 * seq * shown]]);
        assert_eq!([&out, &dq, &cut(&dkv)], [&want, &want_dq, &want_dkv]);
        // The last 40 queries of one sample.
        let at = (seq - 40) * 2 * 12;
        let one = over([1, 40, 2, 12], keys);
        let kv = &kv[..keys * row];
        let [part, _, part_dq, ..] = run(
            tiles,
            one,
            &of(Some(vec![shown]), keys),
            [&q[at..][..960], kv, &dout[at..][..960], &bias[..2 * 40 * keys]],
        );
        assert_eq!([&part[..], &part_dq], [&out[at..][..960], &dq[at..][..960]]);
    }
}

/// The samples of a gradient of a bias are summed in the tree, so that ranks may have whole subtrees of them.
#[test]
fn the_gradient_of_a_bias_is_a_tree_of_samples() {
    let (d, tiles) = (over([4, 9, 2, 8], 7), f32::tiles(Precision::F32));
    let [q, kv, dout, bias] = operands::<f32>(d);
    let shown = Shown { ahead: 7, biased: true, ..Shown::default() };
    let [.., whole] = run(tiles, d, &shown, [&q, &kv, &dout, &bias]);
    let half = |at: usize| {
        let of = |x: &[f32]| x[at * x.len() / 2..(at + 1) * x.len() / 2].to_vec();
        let two = over([2, 9, 2, 8], 7);
        let [.., dbias] = run(tiles, two, &shown, [&of(&q), &of(&kv), &of(&dout), &bias]);
        dbias
    };
    let sum: Vec<f32> = half(0).iter().zip(half(1)).map(|(a, b)| a + b).collect();
    assert_eq!(whole, sum);
}

/// Groups of heads share keys and values in both directions too, after a rotation.
#[test]
fn groups_see_both_directions() {
    let case = Case::new([2, 37, 2, 2], 6, [1, 0], true);
    let [q, kv, _] = case.operands::<f64>();
    let masks = Masks { ahead: 37, ..Masks::default() };
    let [out, _] = case.run_with(f64::tiles(Precision::F32), &q, &kv, masks);
    // The last query sees all keys in causal attention as well, and the first one only itself.
    let [causal, _] = case.run_with(f64::tiles(Precision::F32), &q, &kv, Masks::default());
    let row = case.dims.heads * 6;
    assert_close(&out[36 * row..37 * row], &causal[36 * row..37 * row], 1e-12);
    assert!(out[..row].iter().zip(&causal[..row]).all(|(a, b)| (a - b).abs() > 1e-6));
}
