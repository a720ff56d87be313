//! The parts of [`Float`](super::Float) that depend on a type's width: conversions and products.

use super::gemm::Path;
use super::prelude::*;
use meshwork_core::{bf16, f16};
use meshwork_tensor::Precision;
use std::thread::LocalKey;

/// Conversions between a type that kernels compute in and floats of 16 bits. Only `f32` has them; others panic.
pub trait Narrow: bytemuck::Pod {
    /// [`round`](super::round::round) of each.
    fn round(_: &[Self], _: &mut [bf16]) {
        panic!("results in {} are not stored in bf16", std::any::type_name::<Self>());
    }

    /// [`to_f16`](super::round::to_f16) of each.
    fn to_f16(_: &[Self], _: &mut [f16]) {
        panic!("results in {} are not stored in f16", std::any::type_name::<Self>());
    }

    /// [`from_bf16`](super::round::from_bf16) of each.
    fn from_bf16(_: &[bf16], _: &mut [Self]) {
        panic!("operands in bf16 are not read in {}", std::any::type_name::<Self>());
    }

    /// [`from_f16`](super::round::from_f16) of each.
    fn from_f16(_: &[f16], _: &mut [Self]) {
        panic!("operands in f16 are not read in {}", std::any::type_name::<Self>());
    }
}

/// Memory of a thread for waiting sums: for the largest number of waiting sums so far, each as long as the longest.
pub(super) type Sums<T> = RefCell<Vec<Vec<T>>>;

/// A product of `matrixmultiply`: m, k, n, a factor of A, A and its strides, B likewise, a factor of C, C likewise.
pub(super) type Routine<T> =
    unsafe fn(usize, usize, usize, T, *const T, isize, isize, *const T, isize, isize, T, *mut T, isize, isize);

/// The parts of products that depend on the element type.
pub trait Product: Sized + Copy + Send + Sync + 'static {
    /// The product where [`path`](Self::path) has none.
    const ROUTINE: Routine<Self>;

    /// Whether operands may be stored in `bf16`: only for `f32`.
    const WIDENS: bool = false;

    /// This thread's room for sums.
    fn sums() -> &'static LocalKey<Sums<Self>>;

    /// Our own implementation for this CPU: only for `f32`.
    fn path(_: Precision) -> Option<Path> {
        None
    }

    /// Whether the precision rounds operands.
    fn rounds(_: Precision) -> bool {
        false
    }

    /// Whether it rounds them to `bf16`, so that they may be stored so.
    fn narrows(_: Precision) -> bool {
        false
    }

    /// An operand's element as the product reads it.
    fn in_precision(self, _: Precision) -> Self {
        self
    }
}
