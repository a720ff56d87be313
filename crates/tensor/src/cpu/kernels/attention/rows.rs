//! Reductions of rows, a vector of lanes at a time and the lanes then folded, in the order of `reduce.rs`. With
//! instructions where the CPU has `avx512f`: of the loops that say the same the compiler makes scalars.

use super::super::Float;
use super::VECTOR;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A row in whole vectors.
pub(super) type Vectors<T> = [[T; VECTOR]];

/// Vectors whose lanes are added in `T`; blocks of as many are added in f64.
const BLOCK: usize = 1024 / VECTOR;

/// How this CPU reduces rows of `T`.
#[derive(Clone, Copy)]
pub(super) struct Reductions<T> {
    max: unsafe fn(&Vectors<T>) -> T,
    total: unsafe fn(&Vectors<T>) -> T,
    dot: unsafe fn(&Vectors<T>, &Vectors<T>) -> T,
}

impl<T: Float> Reductions<T> {
    /// In loops.
    pub(super) fn loops() -> Self {
        Reductions { max, total, dot }
    }

    /// The largest element, minus infinity for an empty row. A NaN may be missed.
    pub(super) fn max(&self, row: &Vectors<T>) -> T {
        // SAFETY: a table is only made of functions that this CPU runs.
        unsafe { (self.max)(row) }
    }

    /// The sum.
    pub(super) fn total(&self, row: &Vectors<T>) -> T {
        // SAFETY: as above.
        unsafe { (self.total)(row) }
    }

    /// The sum of the products of two rows of one length, at most 1024.
    pub(super) fn dot(&self, x: &[T], y: &[T]) -> T {
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks(), y.as_chunks());
        // SAFETY: as above.
        let whole = unsafe { (self.dot)(x, y) };
        x_rest.iter().zip(y_rest).fold(whole, |sum, (&x, &y)| sum + x * y)
    }
}

fn max<T: Float>(row: &Vectors<T>) -> T {
    let mut lanes = [T::NEG_INFINITY; VECTOR];
    for x in row {
        for l in 0..VECTOR {
            lanes[l] = x[l].larger(lanes[l]);
        }
    }
    fold(lanes, T::larger)
}

fn total<T: Float>(row: &Vectors<T>) -> T {
    let block = |row: &Vectors<T>| {
        let mut lanes = [T::ZERO; VECTOR];
        for x in row {
            for l in 0..VECTOR {
                lanes[l] += x[l];
            }
        }
        fold(lanes, |a, b| a + b)
    };
    T::from_f64(row.chunks(BLOCK).fold(0.0, |total, row| total + block(row).to_f64()))
}

fn dot<T: Float>(x: &Vectors<T>, y: &Vectors<T>) -> T {
    let mut lanes = [T::ZERO; VECTOR];
    for (x, y) in x.iter().zip(y) {
        for l in 0..VECTOR {
            lanes[l] += x[l] * y[l];
        }
    }
    fold(lanes, |a, b| a + b)
}

/// Lane `l` with `l + 8`, then with `l + 4`, `l + 2` and `l + 1`.
fn fold<T: Copy>(mut lanes: [T; VECTOR], f: impl Fn(T, T) -> T) -> T {
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] = f(lanes[l], lanes[l + width]);
        }
    }
    lanes[0]
}

#[cfg(target_arch = "x86_64")]
impl Reductions<f32> {
    /// In instructions.
    ///
    /// # Safety
    /// The CPU has `avx512f`.
    pub(super) unsafe fn avx512() -> Self {
        Reductions { max: max_avx512, total: total_avx512, dot: dot_avx512 }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn max_avx512(row: &Vectors<f32>) -> f32 {
    let mut lanes = _mm512_set1_ps(f32::NEG_INFINITY);
    for x in row {
        lanes = _mm512_max_ps(load(x), lanes);
    }
    _mm512_reduce_max_ps(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn total_avx512(row: &Vectors<f32>) -> f32 {
    let mut total = 0.0;
    for row in row.chunks(BLOCK) {
        let mut lanes = _mm512_setzero_ps();
        for x in row {
            lanes = _mm512_add_ps(lanes, load(x));
        }
        total += f64::from(sum_avx512(lanes));
    }
    total as f32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn dot_avx512(x: &Vectors<f32>, y: &Vectors<f32>) -> f32 {
    let mut lanes = _mm512_setzero_ps();
    for (x, y) in x.iter().zip(y) {
        lanes = _mm512_add_ps(lanes, _mm512_mul_ps(load(x), load(y)));
    }
    sum_avx512(lanes)
}

/// [`fold`] of a sum.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(lanes: __m512) -> f32 {
    let high = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b1110>(_mm512_castps_pd(lanes), _mm512_castps_pd(lanes)));
    let x = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_castps512_ps256(high));
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn load(x: &[f32; VECTOR]) -> __m512 {
    // SAFETY: a vector's worth of floats.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::cpu::kernels::oracle::values;
    use crate::cpu::kernels::reduce;

    /// Both kinds give the bits of `reduce.rs`, over one block and several.
    #[test]
    fn reductions_follow_the_order_of_reduce() {
        let mut kinds = vec![Reductions::loops()];
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has it.
            kinds.push(unsafe { Reductions::avx512() });
        }
        for kind in kinds {
            for len in [0, 16, 64, 1024, 1040, 5008] {
                let x: Vec<f32> = values("x", len);
                let row = x.as_chunks().0;
                assert_eq!(kind.max(row), reduce::max(&x));
                assert_eq!(kind.total(row), reduce::sum(&x, |x| x));
            }
            for len in [1, 16, 40, 64, 256] {
                let (x, y): (Vec<f32>, Vec<f32>) = (values("x", len), values("y", len));
                let whole = len / VECTOR * VECTOR;
                let [want] = reduce::sums(&x[..whole], &y[..whole], &y[..whole], |x, y, _| [x * y]);
                let want = (whole..len).fold(want, |sum, e| sum + x[e] * y[e]);
                assert_eq!(kind.dot(&x, &y), want);
            }
        }
    }
}
