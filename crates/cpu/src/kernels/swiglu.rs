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
