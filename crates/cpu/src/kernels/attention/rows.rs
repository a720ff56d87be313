//! Operations on rows besides the products: softmax, for a vector of queries at a time. Loops that the compiler does
//! not vectorise use vector instructions.

use super::super::Float;
use super::{FORWARD_KEYS, aligned};
use meshwork_core::simd::wide;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Number of queries whose scores are processed together.
pub(super) const VECTOR: usize = 16;

/// A slice of elements with contiguous rows, and the distance between rows.
pub(super) type Rows<S> = (S, usize);

/// The scores of a vector of queries: a row for each key, `stride` apart, beginning with the first element of `scores`.
#[inline(always)]
fn rows<T>(scores: &mut [T], stride: usize) -> impl Iterator<Item = &mut [T; VECTOR]> {
    scores.as_chunks_mut().0.iter_mut().step_by(stride / VECTOR)
}

/// The vector of scores that begins here.
#[inline(always)]
fn lanes<T>(scores: &mut [T], at: usize) -> &mut [T; VECTOR] {
    scores[at..].first_chunk_mut().expect("a row of scores is at least a vector long")
}

/// The keys of a vector of queries, by the rows of their scores.
#[derive(Clone, Copy, Debug)]
pub(super) struct SeenRows {
    /// The row of the first query's own key; the others' follow. Queries behind the last key see all.
    pub(super) own: usize,
    /// Rows before the first that the first query sees; one more for each query after it. It may be negative.
    pub(super) hidden: i32,
    /// Rows before the first one in its block of [`FORWARD_KEYS`].
    pub(super) skipped: usize,
}

/// The products of queries and keys whose scores, they times `scale`, are capped: `cap/scale · tanh(s scale/cap)`.
pub(super) fn cap_scores<T: Float>(scale: T, cap: T, products: &mut [T]) {
    let (by, back) = (scale / cap, cap / scale);
    wide(
        #[inline(always)]
        || products.iter_mut().for_each(|s| *s = back * (*s * by).tanh()),
    );
}

/// The derivative of a capped product by the product that it was.
#[inline(always)]
pub(super) fn cap_slope<T: Float>(scale: T, cap: T, capped: T) -> T {
    let tanh = capped * (scale / cap);
    T::ONE - tanh * tanh
}

/// Turns the products of a vector of queries with the keys into `e^{(S - max) scale}`, or zero where the mask hides
/// them. Returns the log-sum-exps and one over the totals, which are added key by key in blocks of [`FORWARD_KEYS`].
pub(super) fn softmax<T: Float>(scale: T, scores: &mut [T], stride: usize, seen: SeenRows) -> [[T; VECTOR]; 2] {
    let SeenRows { own, hidden, skipped } = seen;
    wide(
        #[inline(always)]
        || {
            let seen = ((own + VECTOR) * stride).min(scores.len());
            let (scores, unseen) = scores.split_at_mut(seen);
            rows(unseen, stride).for_each(|scores| *scores = [T::ZERO; VECTOR]);
            let before = (own * stride).min(scores.len());
            for (row, scores) in rows(&mut scores[before..], stride).enumerate() {
                for (query, score) in scores.iter_mut().enumerate() {
                    *score = if (query as i32) < row as i32 { T::NEG_INFINITY } else { *score };
                }
            }
            let partly = (hidden + VECTOR as i32 - 1).max(0) as usize;
            for (row, scores) in rows(scores, stride).enumerate().take(partly) {
                for (query, score) in scores.iter_mut().enumerate() {
                    *score = if (row as i32) < hidden + query as i32 { T::NEG_INFINITY } else { *score };
                }
            }
            // Arrays are replaced as a whole, so that they are in registers; rows are found by their numbers, which
            // takes fewer instructions than an iterator.
            let count = scores.len().div_ceil(stride);
            let mut max = [T::NEG_INFINITY; VECTOR];
            for row in 0..count {
                let scores = lanes(scores, row * stride);
                max = std::array::from_fn(|l| scores[l].larger(max[l]));
            }
            let mut total = [T::ZERO; VECTOR];
            for block in aligned(skipped..skipped + count, FORWARD_KEYS) {
                let mut sum = [T::ZERO; VECTOR];
                for row in block {
                    let scores = lanes(scores, (row - skipped) * stride);
                    *scores = std::array::from_fn(|l| ((scores[l] - max[l]) * scale).exp());
                    sum = std::array::from_fn(|l| sum[l] + scores[l]);
                }
                for l in 0..VECTOR {
                    total[l] += sum[l];
                }
            }
            let mut results = [[T::ZERO; VECTOR]; 2];
            for l in 0..VECTOR {
                results[0][l] = max[l] * scale + total[l].ln();
                results[1][l] = T::ONE / total[l];
            }
            results
        },
    )
}

/// The same of one query, whose scores are a row: all but the first `hidden` are of keys that it sees. Returns the
/// log-sum-exp and one over the total.
pub(super) fn softmax_row<T: Float>(scale: T, scores: &mut [T], hidden: usize, skipped: usize) -> [T; 2] {
    wide(
        #[inline(always)]
        || {
            scores[..hidden].fill(T::NEG_INFINITY);
            let (lanes, rest) = scores.as_chunks::<VECTOR>();
            let mut max = [T::NEG_INFINITY; VECTOR];
            for scores in lanes {
                for l in 0..VECTOR {
                    max[l] = scores[l].larger(max[l]);
                }
            }
            let max = max.iter().chain(rest).fold(T::NEG_INFINITY, |max, score| score.larger(max));
            for score in &mut *scores {
                *score = ((*score - max) * scale).exp();
            }
            let mut total = T::ZERO;
            for block in aligned(skipped..skipped + scores.len(), FORWARD_KEYS) {
                let block = &scores[block.start - skipped..block.end - skipped];
                total += block.iter().fold(T::ZERO, |sum, &score| sum + score);
            }
            [max * scale + total.ln(), T::ONE / total]
        },
    )
}

/// The sums of the products of rows of this length, in the order of `reduce.rs`; the last elements, fewer than a
/// vector, one by one.
pub(super) fn dots<T: Float>(len: usize, [(x, x_row), (y, y_row)]: [Rows<&[T]>; 2], sums: &mut [T]) {
    wide!(for (i, sum) in sums.iter_mut().enumerate() {
        *sum = dot(&x[i * x_row..][..len], &y[i * y_row..][..len]);
    });
}

#[inline(always)]
fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<VECTOR>(), y.as_chunks::<VECTOR>());
    let mut lanes = [T::ZERO; VECTOR];
    for (x, y) in x.iter().zip(y) {
        for l in 0..VECTOR {
            lanes[l] += x[l] * y[l];
        }
    }
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            let other = lanes[l + width];
            lanes[l] += other;
        }
    }
    x_rest.iter().zip(y_rest).fold(lanes[0], |sum, (&x, &y)| sum + x * y)
}

/// [`dots`] in instructions: `$eight` has the sums of lanes l and l + 8 of two rows.
#[cfg(target_arch = "x86_64")]
macro_rules! dots {
    ($dots:ident, $feature:literal, $eight:ident) => {
        /// [`dots`] in instructions.
        #[target_feature(enable = $feature)]
        pub(super) fn $dots(len: usize, [(x, x_row), (y, y_row)]: [Rows<&[f32]>; 2], sums: &mut [f32]) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let (x, y) = (&x[i * x_row..][..len], &y[i * y_row..][..len]);
                let ((x, x_rest), (y, y_rest)) = (x.as_chunks(), y.as_chunks());
                let x = $eight(x, y);
                // Adds lanes l and l + 4, then l + 2 and l + 1.
                let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                let whole = _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
                *sum = x_rest.iter().zip(y_rest).fold(whole, |sum, (&x, &y)| sum + x * y);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
dots!(dots_avx512, "avx512f", eight_avx512);

#[cfg(target_arch = "x86_64")]
dots!(dots_avx2, "avx2", eight_avx2);

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn eight_avx512(x: &[[f32; VECTOR]], y: &[[f32; VECTOR]]) -> __m256 {
    let mut lanes = _mm512_setzero_ps();
    for (x, y) in x.iter().zip(y) {
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(load(x), load(y)));
    }
    let high = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b1110>(_mm512_castps_pd(lanes), _mm512_castps_pd(lanes)));
    _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_castps512_ps256(high))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn eight_avx2(x: &[[f32; VECTOR]], y: &[[f32; VECTOR]]) -> __m256 {
    let mut lanes = [_mm256_setzero_ps(); 2];
    for (x, y) in x.iter().zip(y) {
        let [low_x, high_x] = halves(x);
        let [low_y, high_y] = halves(y);
        lanes = [
            _mm256_add_ps(lanes[0], _mm256_mul_ps(low_x, low_y)),
            _mm256_add_ps(lanes[1], _mm256_mul_ps(high_x, high_y)),
        ];
    }
    _mm256_add_ps(lanes[0], lanes[1])
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn halves(x: &[f32; VECTOR]) -> [__m256; 2] {
    // SAFETY: each load is of half of the floats.
    unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[VECTOR / 2..].as_ptr())] }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; VECTOR]) -> __m512 {
    // SAFETY: a vector's worth of floats.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{reduce, values};

    /// Every variant is bitwise identical to `reduce.rs`, row by row.
    #[test]
    fn dots_follow_the_order_of_reduce() {
        for len in [1, 16, 40, 64, 256] {
            let (rows, x_row, y_row) = (3, len + 5, len);
            let (x, y) = (values("x", rows * x_row), values("y", rows * y_row));
            let want: Vec<f32> = (0..rows)
                .map(|i| {
                    let (x, y) = (&x[i * x_row..][..len], &y[i * y_row..][..len]);
                    let whole = len / VECTOR * VECTOR;
                    let [sum] = reduce::sums(&x[..whole], &y[..whole], &y[..whole], |x, y, _| [x * y]);
                    (whole..len).fold(sum, |sum, e| sum + x[e] * y[e])
                })
                .collect();
            let (operands, mut got) = ([(&x[..], x_row), (&y[..], y_row)], vec![0.0; rows]);
            dots(len, operands, &mut got);
            assert_eq!(got, want);
            #[cfg(target_arch = "x86_64")]
            for (runs, dots) in [
                (is_x86_feature_detected!("avx512f"), dots_avx512 as unsafe fn(usize, [Rows<&[f32]>; 2], &mut [f32])),
                (is_x86_feature_detected!("avx2"), dots_avx2),
            ] {
                got.fill(0.0);
                if runs {
                    // SAFETY: the CPU has the instructions.
                    unsafe { dots(len, operands, &mut got) };
                    assert_eq!(got, want);
                }
            }
        }
    }
}
