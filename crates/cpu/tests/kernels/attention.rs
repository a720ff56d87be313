//! Attention against its equations, and against itself: other heads, samples and positions change no bit. One oracle,
//! and the shapes, precisions and masks at which every path is compared with it.

use super::oracle::{assert_close, check_gradient, dot, rounded, rounding, values, widen};
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::attention::*;
use meshwork_cpu::kernels::dropout::Mask;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::tf32;
use meshwork_tensor::random::key;
use proptest::prelude::*;
use std::ops::Range;

mod decode;
mod documents;
mod grouped;
mod patterns;
mod slices;
mod windows;

/// Every (sample, head).
fn each_head(d: Dims) -> impl Iterator<Item = (usize, usize)> {
    (0..d.batch).flat_map(move |sample| (0..d.heads).map(move |head| (sample, head)))
}

fn elements(d: Dims) -> usize {
    d.batch * d.seq * d.heads * d.head_dim
}

fn dropout(p: f32) -> Dropout {
    Dropout { mask: Mask { key: key(5, "attention"), p }, first_sample: 3, first_head: 2, global_heads: 9 }
}

/// Masks with only dropout.
fn masks(dropout: Option<Dropout>) -> Masks<'static> {
    Masks { dropout, ..Masks::default() }
}

/// Output and lse. Every buffer starts as NaN, so that elements that are not overwritten are noticed.
fn run<T: Tiled>(d: Dims, qkv: &[T], dropout: Option<Dropout>) -> [Vec<T>; 2] {
    run_in(T::tiles(Precision::F32), d, qkv, dropout)
}

fn run_in<T: Tiled>(tiles: Tiles<T>, d: Dims, qkv: &[T], dropout: Option<Dropout>) -> [Vec<T>; 2] {
    let nan = T::from(f32::NAN);
    let (mut out, mut lse) = (vec![nan; elements(d)], vec![nan; d.batch * d.heads * d.seq]);
    forward(tiles, d, qkv, &mut out, &mut lse, masks(dropout));
    [out, lse]
}

fn run_backward<T: Tiled>(d: Dims, qkv: &[T], dout: &[T], dropout: Option<Dropout>) -> Vec<T> {
    run_backward_in(T::tiles(Precision::F32), d, qkv, dout, dropout)
}

fn run_backward_in<T: Tiled>(tiles: Tiles<T>, d: Dims, qkv: &[T], dout: &[T], dropout: Option<Dropout>) -> Vec<T> {
    let nan = T::from(f32::NAN);
    let [out, lse] = run_in(tiles, d, qkv, dropout);
    let saved = Saved { q: qkv, kv: qkv, out: &out, lse: &lse };
    let mut dqkv = vec![nan; qkv.len()];
    backward(tiles, d, saved, dout, &mut dqkv, masks(dropout));
    dqkv
}

/// The range of a head at position `i`, part and sample in `[batch, seq, parts, heads, head_dim]`.
fn part(d: Dims, parts: usize, [b, i, part, h]: [usize; 4]) -> Range<usize> {
    let start = (((b * d.seq + i) * parts + part) * d.heads + h) * d.head_dim;
    start..start + d.head_dim
}

/// The dropout factors of a query.
fn factors(d: Dims, dropout: Option<Dropout>, [b, i, h]: [usize; 3]) -> Vec<f64> {
    let mut factors = vec![1.0; d.seq];
    if let Some(drop) = dropout {
        let row = (drop.first_sample + b as u64) * drop.global_heads + drop.first_head + h as u64;
        drop.mask.factors((row * d.seq as u64 + i as u64) * d.seq as u64, &mut factors);
    }
    factors
}

/// One query at a time, from the equations.
fn naive(d: Dims, qkv: &[f64], dropout: Option<Dropout>) -> [Vec<f64>; 2] {
    naive_in(|x| x, d, qkv, dropout)
}

/// [`naive`], with rounded operands of products.
fn naive_in(round: fn(f64) -> f64, d: Dims, qkv: &[f64], dropout: Option<Dropout>) -> [Vec<f64>; 2] {
    naive_of(round, d, qkv, dropout, &one_document(d))
}

/// The positions in sequences of one document each.
fn one_document(d: Dims) -> Vec<i32> {
    (0..d.seq as i32).collect::<Vec<_>>().repeat(d.batch)
}

/// [`naive_in`], for tokens at these positions in their documents.
fn naive_of(round: fn(f64) -> f64, d: Dims, qkv: &[f64], dropout: Option<Dropout>, positions: &[i32]) -> [Vec<f64>; 2] {
    let qkv: Vec<f64> = qkv.iter().copied().map(round).collect();
    let at = |b: usize, i: usize, p: usize, h: usize| &qkv[part(d, 3, [b, i, p, h])];
    let (mut out, mut lse) = (vec![0.0; elements(d)], vec![0.0; d.batch * d.heads * d.seq]);
    for (b, h) in each_head(d) {
        for i in 0..d.seq {
            let first = i - positions[b * d.seq + i] as usize;
            let score = |j| dot(at(b, i, 0, h), at(b, j, 1, h)) / (d.head_dim as f64).sqrt();
            let max = (first..=i).map(score).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = (first..=i).map(|j| (score(j) - max).exp()).sum();
            lse[(b * d.heads + h) * d.seq + i] = max + total.ln();
            let o = &mut out[part(d, 1, [b, i, 0, h])];
            for (j, factor) in factors(d, dropout, [b, i, h]).iter().enumerate().take(i + 1).skip(first) {
                let p = round((score(j) - max).exp() * factor) / total;
                o.iter_mut().zip(at(b, j, 2, h)).for_each(|(o, v)| *o += p * v);
            }
        }
    }
    [out, lse]
}

/// The gradient one pair at a time, from the equations, with rounded operands of products.
fn naive_backward(round: fn(f64) -> f64, d: Dims, qkv: &[f64], dout: &[f64], dropout: Option<Dropout>) -> Vec<f64> {
    naive_backward_of(round, d, qkv, dout, dropout, &one_document(d))
}

/// [`naive_backward`], for tokens at these positions in their documents.
fn naive_backward_of(
    round: fn(f64) -> f64,
    d: Dims,
    qkv: &[f64],
    dout: &[f64],
    dropout: Option<Dropout>,
    positions: &[i32],
) -> Vec<f64> {
    let [out, lse] = naive_of(round, d, qkv, dropout, positions);
    let [qkv, g] = [qkv, dout].map(|x| x.iter().copied().map(round).collect::<Vec<f64>>());
    let scale = 1.0 / (d.head_dim as f64).sqrt();
    let mut dqkv = vec![0.0; qkv.len()];
    for (b, h) in each_head(d) {
        for i in 0..d.seq {
            let (row, lse) = (part(d, 1, [b, i, 0, h]), lse[(b * d.heads + h) * d.seq + i]);
            let factors = factors(d, dropout, [b, i, h]);
            let delta = dot(&dout[row.clone()], &out[row.clone()]);
            let first = i - positions[b * d.seq + i] as usize;
            for (j, factor) in factors.iter().enumerate().take(i + 1).skip(first) {
                let [q, k, v] = [(i, 0), (j, 1), (j, 2)].map(|(row, p)| part(d, 3, [b, row, p, h]));
                let p = (dot(&qkv[q.clone()], &qkv[k.clone()]) * scale - lse).exp();
                let dp = dot(&g[row.clone()], &qkv[v.clone()]) * factor;
                let (ds, p) = (round(p * (dp - delta) * scale), round(p * factor));
                for e in 0..d.head_dim {
                    dqkv[q.start + e] += ds * qkv[k.start + e];
                    dqkv[k.start + e] += ds * qkv[q.start + e];
                    dqkv[v.start + e] += p * g[row.start + e];
                }
            }
        }
    }
    dqkv
}

/// [`rounding`] of numbers in f64.
fn in_f64(precision: Precision) -> fn(f64) -> f64 {
    match precision {
        Precision::F32 => |x| x,
        Precision::Tf32 => |x| f64::from(tf32(x as f32)),
        Precision::Bf16 => |x| f64::from(rounded(x as f32)),
    }
}

/// `‖got - want‖ / ‖want‖`.
fn distance(got: &[f32], want: &[f64]) -> f64 {
    let difference: Vec<f64> = widen(got).iter().zip(want).map(|(got, want)| got - want).collect();
    (dot(&difference, &difference) / dot(want, want)).sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn forward_matches_the_equations(
        shape in (0..3_usize, 1..150_usize, 1..4_usize, 1..20_usize).prop_map(<[usize; 4]>::from), p in 0.0..0.8_f32,
    ) {
        let d = Dims::new(shape);
        let mut qkv: Vec<f32> = values("qkv", 3 * elements(d));
        qkv.iter_mut().for_each(|x| *x *= 2.0);
        for dropout in [None, Some(dropout(p))] {
            let ([out, lse], [want, want_lse]) = (run(d, &qkv, dropout), naive(d, &widen(&qkv), dropout));
            assert_close(&out, &want, 2e-5);
            assert_close(&lse, &want_lse, 2e-6);
        }
    }

    /// One head of one sample, a range of both, and a shorter sequence are bitwise identical to the whole.
    #[test]
    fn bits_do_not_depend_on_other_heads_samples_or_later_positions(
        shape in (1..4_usize, 1..150_usize, 1..5_usize, 1..20_usize).prop_map(<[usize; 4]>::from),
        cut in prop::array::uniform3(0.0..1.0),
        precision in prop::sample::select(&Precision::ALL[..]),
    ) {
        let d = Dims::new(shape);
        let tiles = f32::tiles(precision);
        let qkv: Vec<f32> = values("qkv", 3 * elements(d));
        let dout: Vec<f32> = values("dout", elements(d));
        let [b, h, seq] = [(cut[0], d.batch), (cut[1], d.heads), (cut[2], d.seq)].map(|(c, n)| (c * n as f64) as usize);
        let seq = seq + 1;
        let whole_drop = dropout(0.3);
        let part_drop = Dropout { first_sample: 3 + b as u64, first_head: 2 + h as u64, ..whole_drop };
        // Samples b.., heads h.., rows ..seq of a [batch, seq, parts, heads, head_dim] tensor.
        let part = |x: &[f32], parts: usize, seq: usize| -> Vec<f32> {
            let heads = x.chunks(d.head_dim).enumerate();
            let kept = heads.filter(|(at, _)| {
                let (head, row) = (at % d.heads, at / d.heads / parts);
                head >= h && row % d.seq < seq && row / d.seq >= b
            });
            kept.flat_map(|(_, x)| x).copied().collect()
        };
        let small = Dims { batch: d.batch - b, heads: d.heads - h, ..d };
        for (whole_drop, part_drop) in [(None, None), (Some(whole_drop), Some(part_drop))] {
            let [out, _] = run_in(tiles, d, &qkv, whole_drop);
            let [out_part, _] = run_in(tiles, small, &part(&qkv, 3, d.seq), part_drop);
            prop_assert_eq!(out_part, part(&out, 1, d.seq));
            let dqkv = run_backward_in(tiles, d, &qkv, &dout, whole_drop);
            let (qkv, dout) = (part(&qkv, 3, d.seq), part(&dout, 1, d.seq));
            let dqkv_part = run_backward_in(tiles, small, &qkv, &dout, part_drop);
            prop_assert_eq!(dqkv_part, part(&dqkv, 3, d.seq));
        }
        let short = Dims::new([small.batch, seq, small.heads, small.head_dim]);
        let [out, _] = run_in(tiles, d, &qkv, None);
        let [out_short, _] = run_in(tiles, short, &part(&qkv, 3, seq), None);
        prop_assert_eq!(out_short, part(&out, 1, seq));
    }
}

/// Finite differences on shapes within one block and across two, with and without dropout.
#[test]
fn gradients_match_finite_differences() {
    for shape in [[2, 5, 2, 3], [1, 1, 1, 4], [1, BLOCK + 3, 1, 2]] {
        let d = Dims::new(shape);
        let (qkv, dout): (Vec<f64>, Vec<f64>) = (values("qkv", 3 * elements(d)), values("dout", elements(d)));
        for dropout in [None, Some(dropout(0.4))] {
            let dqkv = run_backward(d, &qkv, &dout, dropout);
            check_gradient(&qkv, &dqkv, |qkv| dot(&run(d, qkv, dropout)[0], &dout));
        }
    }
}

/// f32 gradients against f64's, over several blocks.
#[test]
fn f32_gradients_are_accurate() {
    let d = Dims::new([2, 3 * BLOCK + 5, 2, 16]);
    let (qkv, dout): (Vec<f32>, Vec<f32>) = (values("qkv", 3 * elements(d)), values("dout", elements(d)));
    let dqkv = run_backward(d, &qkv, &dout, Some(dropout(0.1)));
    let want = run_backward(d, &widen(&qkv), &widen(&dout), Some(dropout(0.1)));
    assert_close(&dqkv, &want, 5e-6);
}

/// With very large scores, one key has all the weight and nothing overflows.
#[test]
fn large_scores_do_not_overflow() {
    let d = Dims::new([1, 3, 1, 1]);
    let qkv = [0.0_f32, 0.0, 1.0, 1e3, 1e3, 2.0, 1e3, -1e3, 4.0];
    let [out, lse] = run(d, &qkv, None);
    assert_eq!(out, [1.0, 2.0, 2.0]);
    assert_eq!(lse[1..], [1e6, 1e6]);
}

/// Extents at the edges of vectors, tiles and blocks.
const SHAPES: [[usize; 4]; 10] = [
    [1, 1, 1, 1],
    [1, 1, 2, 256],
    [2, 13, 1, 31],
    [1, 33, 2, 64],
    [1, 127, 1, 17],
    [1, 129, 2, 33],
    [1, 256, 1, 32],
    [1, 300, 1, 65],
    // Long enough that rows are copied first: backward of two heads, then both directions.
    [1, 260, 2, 128],
    [1, 2 * FORWARD_KEYS + 1, 1, 128],
];

/// Each kind of tiles against f64, forward and backward.
#[test]
fn every_kind_of_tiles_is_right_at_every_edge() {
    for d in SHAPES.map(Dims::new) {
        let (qkv, dout): (Vec<f32>, Vec<f32>) = (values("qkv", 3 * elements(d)), values("dout", elements(d)));
        for dropout in [None, Some(dropout(0.2))] {
            let [out, lse] = naive(d, &widen(&qkv), dropout);
            let dqkv = run_backward(d, &widen(&qkv), &widen(&dout), dropout);
            for tiles in Tiles::all(Precision::F32) {
                let [got, got_lse] = run_in(tiles, d, &qkv, dropout);
                assert_close(&got, &out, 5e-6);
                assert_close(&got_lse, &lse, 2e-6);
                assert_close(&run_backward_in(tiles, d, &qkv, &dout, dropout), &dqkv, 2e-5);
            }
        }
    }
}

/// Each kind of tiles against f64 with rounded operands, forward and backward. A few operands that are results of
/// products round the other way because of their error in f32: the bound of the norm admits that, but would reject
/// products in f32. Of TF32, which has three bits more than bf16, eight times as many do so, each by an eighth.
#[test]
fn low_precision_rounds_every_operand_and_nothing_else() {
    let cases = [(Precision::Bf16, 2e-4, 2.0), (Precision::Tf32, 7e-5, 1.5)];
    for (d, (precision, bound, apart)) in SHAPES.map(Dims::new).into_iter().flat_map(|d| cases.map(|case| (d, case))) {
        let round = in_f64(precision);
        let (qkv, dout): (Vec<f32>, Vec<f32>) = (values("qkv", 3 * elements(d)), values("dout", elements(d)));
        for dropout in [None, Some(dropout(0.2))] {
            let [out, lse] = naive_in(round, d, &widen(&qkv), dropout);
            let dqkv = naive_backward(round, d, &widen(&qkv), &widen(&dout), dropout);
            for tiles in Tiles::all(precision) {
                let [got, got_lse] = run_in(tiles, d, &qkv, dropout);
                assert_close(&got_lse, &lse, 2e-6);
                let errors = [distance(&got, &out), distance(&run_backward_in(tiles, d, &qkv, &dout, dropout), &dqkv)];
                assert!(errors.iter().all(|&error| error <= bound), "{precision:?}, {d:?}: {errors:?}");
            }
            let exact =
                [distance(&run(d, &qkv, dropout)[0], &out), distance(&run_backward(d, &qkv, &dout, dropout), &dqkv)];
            assert!(exact.iter().all(|&error| error > apart * bound), "{precision:?}, {d:?}: {exact:?} in f32");
        }
    }
}

/// AVX-512 and AVX2 give the same bits, as the products do. In bf16 and TF32, where products are exact, all kinds do:
/// pairs at a time, one by one and plain loops.
#[test]
fn tiles_agree_bit_for_bit() {
    for precision in Precision::ALL {
        let mut all = Tiles::all(precision);
        if precision == Precision::F32 {
            all.pop();
        }
        for d in SHAPES.map(Dims::new) {
            let (qkv, dout): (Vec<f32>, Vec<f32>) = (values("qkv", 3 * elements(d)), values("dout", elements(d)));
            for dropout in [None, Some(dropout(0.2))] {
                let results = all
                    .iter()
                    .map(|tiles| (run_in(*tiles, d, &qkv, dropout), run_backward_in(*tiles, d, &qkv, &dout, dropout)));
                let results: Vec<_> = results.collect();
                assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{precision:?}, {d:?}");
            }
        }
    }
}

/// The orders of sums that the module states, for the last row of one head: `O` over blocks of keys from its
/// probabilities, and the total, which sums the probabilities before they are rounded.
#[test]
fn sums_follow_the_stated_order() {
    for precision in Precision::ALL {
        let round = rounding(precision);
        let d = Dims::new([1, 2 * FORWARD_KEYS + 40, 1, 3]);
        let qkv: Vec<f32> = values("qkv", 3 * elements(d));
        let at = |i: usize, part: usize| qkv[(i * 3 + part) * d.head_dim..][..d.head_dim].iter().copied().map(round);
        let (last, scale) = (d.seq - 1, (1.0 / (d.head_dim as f64).sqrt()) as f32);
        let fused = Tiles::all(precision).len() > 1;
        let add = |a: f32, b: f32, sum: f32| if fused { a.mul_add(b, sum) } else { sum + a * b };
        let scores: Vec<f32> =
            (0..=last).map(|j| at(last, 0).zip(at(j, 1)).fold(0.0, |sum, (q, k)| add(q, k, sum))).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e: Vec<f32> = scores.iter().map(|s| Float::exp((s - max) * scale)).collect();
        let inverse =
            1.0 / e.chunks(FORWARD_KEYS).map(|e| e.iter().fold(0.0, |sum, e| sum + e)).fold(0.0, |a, b: f32| a + b);
        let values: Vec<Vec<f32>> = (0..=last).map(|j| at(j, 2).collect()).collect();
        let want: Vec<f32> = (0..d.head_dim)
            .map(|x| {
                let blocks = (0..=last).step_by(FORWARD_KEYS).map(|first| {
                    let keys = first..(first + FORWARD_KEYS).min(d.seq);
                    keys.fold(0.0, |sum, j| add(round(e[j]), values[j][x], sum))
                });
                blocks.reduce(|a, b| a + b).unwrap_or(f32::NAN) * inverse
            })
            .collect();
        let [out, _] = run_in(f32::tiles(precision), d, &qkv, None);
        assert_eq!(&out[last * d.head_dim..], &want, "{precision:?}");
    }
}
