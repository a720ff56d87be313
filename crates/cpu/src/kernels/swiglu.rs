//! SwiGLU (Shazeer, arXiv:2002.05202): `silu(gate) · up`, of pairs `(gate, up)` that are next to each other.
//!
//! `silu(x) = x σ(x)` with the logistic function `σ(x) = 1/(1 + e^(-x))`. In f32 the value of silu is within
//! `1.5e-7 max(1, |x|)` of the exact one and its derivative within 3e-7.

use super::elementwise::sigmoid;
use super::prelude::*;

/// `out[i] = silu(x[2i]) · x[2i + 1]`. Overwrites.
pub fn swiglu<T: Float>(x: &[T], out: Stored<'_, T>) {
    assert_eq!(x.len(), 2 * out.len(), "elements of x against pairs of out");
    let pairs = x.as_chunks::<2>().0;
    wide!({
        out.fill(
            #[inline(always)]
            |at, out| {
                for (out, &[gate, up]) in out.iter_mut().zip(&pairs[at..]) {
                    *out = silu(gate) * up;
                }
            },
        );
    });
}

/// Overwrites the pairs `x` with their gradients, given the gradient `dy` of [`swiglu`]'s result:
/// `dy · up · silu'(gate)` and `dy · silu(gate)`.
pub fn swiglu_backward<T: Float>(dy: &[T], x: &mut [T]) {
    assert_eq!(x.len(), 2 * dy.len(), "elements of x against pairs of dy");
    wide!(for (&dy, x) in dy.iter().zip(x.as_chunks_mut::<2>().0) {
        let [gate, up] = *x;
        let (sigma, rest) = sigmoid(gate);
        // σ (1 + x (1 - σ)): x (1 - σ) goes to zero or, where σ is zero, stays finite.
        *x = [dy * up * (sigma * (gate * rest + T::ONE)), dy * (gate * sigma)];
    });
}

#[inline(always)]
fn silu<T: Float>(x: T) -> T {
    x * sigmoid(x).0
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{check_gradient, dot, values};
    use super::super::round::round;
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    fn full<T: Float>(x: &[T]) -> Vec<T> {
        let mut out = vec![T::from(f32::NAN); x.len() / 2];
        swiglu(x, Stored::Full(&mut out));
        out
    }

    #[test]
    fn f32_errors_are_within_the_stated_bounds() {
        let (mut worst, mut worst_slope) = (0_f64, 0_f64);
        for x in (-2_000_000..=2_000_000).map(|i| i as f32 * 1e-5) {
            let wide = f64::from(x);
            let sigma = 1.0 / (1.0 + (-wide).exp());
            worst = worst.max((f64::from(silu(x)) - wide * sigma).abs() / wide.abs().max(1.0));
            let mut pair = [x, 1.0];
            swiglu_backward(&[1.0], &mut pair);
            let slope = sigma + wide * sigma * (1.0 - sigma);
            worst_slope = worst_slope.max((f64::from(pair[0]) - slope).abs());
        }
        assert!(worst <= 1.5e-7 && worst_slope <= 3e-7, "{worst} {worst_slope}");
    }

    #[test]
    fn far_tails_are_exact_and_nan_stays() {
        for x in [100.0_f32, 1e4, 1e20, 1e38] {
            assert_eq!(full(&[x, 1.0, -x, 1.0]), [x, 0.0]);
            let mut pairs = [x, 1.0, -x, 1.0];
            swiglu_backward(&[1.0, 1.0], &mut pairs);
            assert_eq!(pairs, [1.0, x, 0.0, 0.0]);
        }
        let mut pair = [f32::NAN, 1.0];
        assert!(full(&pair)[0].is_nan());
        swiglu_backward(&[1.0], &mut pair);
        assert!(pair[0].is_nan() && pair[1].is_nan());
    }

    #[test]
    fn rounded_results_are_the_full_ones_rounded() {
        for len in [0, 1, 70, 511, 512, 513, 1300] {
            let x: Vec<f32> = values("x", 2 * len);
            let (mut got, mut want) = (vec![bf16::ONE; len], vec![bf16::ZERO; len]);
            swiglu(&x, Stored::Bf16(&mut got));
            round(&full(&x), &mut want);
            assert!(got == want, "{len}");
        }
    }

    proptest! {
        #[test]
        fn gradients_match_finite_differences(len in 1..40_usize) {
            let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 2 * len), values("dy", len));
            let mut dx = x.clone();
            swiglu_backward(&dy, &mut dx);
            check_gradient(&x, &dx, |x| dot(&full(x), &dy));
        }

        /// Whole vectors and the remainder are bitwise identical to each element computed alone.
        #[test]
        fn every_path_gives_the_bits_of_one_element(len in 0..70_usize) {
            let (x, dy): (Vec<f32>, Vec<f32>) = (values("x", 2 * len), values("dy", len));
            let (y, mut dx) = (full(&x), x.clone());
            swiglu_backward(&dy, &mut dx);
            for i in 0..len {
                let mut pair = [x[2 * i], x[2 * i + 1]];
                prop_assert_eq!(y[i], silu(pair[0]) * pair[1]);
                swiglu_backward(&dy[i..=i], &mut pair);
                prop_assert_eq!(&dx[2 * i..2 * i + 2], &pair[..]);
            }
        }
    }
}
