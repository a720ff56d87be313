//! CPU kernels: pure functions on slices, the arithmetic of the `cpu` device.
//!
//! Slices are contiguous and row-major. Lengths are preconditions, asserted at the head of each function; the layer
//! above validates shapes and reports typed errors. Every kernel is generic over [`Float`]: `f32` is the fast type,
//! `f64` serves finite differences. Kernels are serial; the caller parallelises.
//!
//! **The bits of an output element depend only on the terms of its own sum and their order**, never on how many rows,
//! columns, heads or samples are computed with it, nor on the element's place among them. The tests in `tests/kernels`
//! compute parts alone and compare them with `==`. Sums along a row follow the order stated in [`reduce`]; sums over
//! rows (gradients of biases, gains, embeddings) run over the rows in order and *add* to the output, so that two calls
//! give the bits of one call on the concatenated rows. (The device calls them for blocks of 64 rows, each by itself,
//! and then adds up the blocks in order.) Loops run at the full vector width of the CPU (`meshwork_core::simd::wide`):
//! every function and closure between `wide` and the arithmetic is `#[inline(always)]`; otherwise the compiler may not
//! inline it and compiles it for the vector width of any x86-64.

/// `f(args.., closure)` with a closure that is always inlined.
macro_rules! inlined {
    ($f:expr, ($($arg:expr),*), $closure:expr) => {
        $f(
            $($arg,)*
            #[inline(always)]
            $closure,
        )
    };
}

mod float;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, unused_imports, unused_variables, unused_unsafe, unreachable_code)
)]
mod gemm;

pub mod attention;
pub mod channel_norm;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gelu;
pub mod indexing;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod permutation;
pub mod pointwise;
pub mod reduce;
pub mod reduction;
pub mod relu;
pub mod round;
pub mod routing;
pub mod swiglu;
mod traits;
mod update;
pub mod windows;
pub mod zeros;

/// Items that most kernels use.
mod prelude {
    pub(super) use super::round::Stored;
    pub(super) use super::{Float, reduce};
    pub(super) use meshwork_core::{pool, simd::wide};
    pub(super) use std::{cell::RefCell, ops::Range};
}

pub use float::Float;

/// Standard normal values, the same for the same name, for tests of what is private.
#[cfg(test)]
fn values(name: &str, len: usize) -> Vec<f32> {
    use meshwork_tensor::random::{fill_normal, key};
    let mut out = vec![0.0; len];
    fill_normal(key(0, name), 0, &mut out);
    out
}
