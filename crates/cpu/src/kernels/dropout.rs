//! Dropout whose mask does not depend on the mesh: element `i` of the *global* tensor, in row-major order, is kept
//! when `uniform(key, i) >= p` and is then scaled by `1 / (1 - p)`, whichever rank holds it.

use super::prelude::*;
use meshwork_tensor::kernel::DropoutMask;
use meshwork_tensor::random::{Key, fill_uniform};

/// The mask of one global tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mask {
    /// The random stream of the mask. Each step, layer and use has its own key.
    pub key: Key,
    /// Probability of dropping an element, in [0, 1).
    pub p: f32,
}

/// The place of a local tensor in its global tensor; one entry per dim in each field. Elements beyond the global
/// extents are zeros of a padded shard, so their factors do not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region<'a> {
    /// Local extents.
    pub shape: &'a [usize],
    /// First local index, globally.
    pub offset: &'a [u64],
    /// Global extents.
    pub global: &'a [u64],
}

impl From<&DropoutMask> for Mask {
    fn from(mask: &DropoutMask) -> Self {
        Self { key: mask.key, p: mask.p }
    }
}

impl<'a> From<&'a DropoutMask> for Region<'a> {
    fn from(mask: &'a DropoutMask) -> Self {
        let DropoutMask { ndim, local, offset, global, .. } = mask;
        Self { shape: &local[..*ndim], offset: &offset[..*ndim], global: &global[..*ndim] }
    }
}

/// `y = x · keep / (1 - p)` over the elements `first .. first + x.len()` of a region. Overwrites `y`. The backward is
/// the same call with `dy` and `dx`.
pub fn dropout<T: Float>(mask: Mask, region: Region<'_>, first: usize, x: &[T], y: &mut [T]) {
    scaled(region, first, x, y, |start, factors| mask.factors(start, factors));
}

/// `y = x · (1 + p (2u - 1))`, u uniform in [0, 1): likewise, with factors around 1.
pub fn jitter<T: Float>(mask: Mask, region: Region<'_>, first: usize, x: &[T], y: &mut [T]) {
    let (low, step) = (T::from(1.0 - mask.p), T::from(2.0 * mask.p));
    scaled(region, first, x, y, |start, factors| {
        fill_uniform(mask.key, start, factors);
        wide!(factors.iter_mut().for_each(|u| *u = low + step * *u));
    });
}

/// `y = x · factor`; `factors(start, out)` writes the factors of consecutive global elements.
fn scaled<T: Float>(region: Region<'_>, first: usize, mut x: &[T], mut y: &mut [T], factors: impl Fn(u64, &mut [T])) {
    assert_eq!(x.len(), y.len(), "elements of x against y");
    assert!(first + x.len() <= region.len(), "elements {first} .. {} of {region:?}", first + x.len());
    let (run, mut at) = (region.run_len(), first);
    while !x.is_empty() {
        let (x_run, y_run);
        let count = (run - at % run).min(x.len());
        (x_run, x) = x.split_at(count);
        (y_run, y) = y.split_at_mut(count);
        factors(region.global_index(at), y_run);
        wide!(for (y, &x) in y_run.iter_mut().zip(x_run) {
            *y *= x;
        });
        at += count;
    }
}

impl Mask {
    /// `out[i] = keep / (1 - p)` of global element `start + i`: the factor of dropout, 0 or `1 / (1 - p)`.
    pub fn factors<T: Float>(&self, start: u64, out: &mut [T]) {
        assert!((0.0..1.0).contains(&self.p), "dropout probability {} is not in [0, 1)", self.p);
        let p = T::from(self.p);
        let kept = T::from_f64(1.0 / (1.0 - self.p.to_f64()));
        fill_uniform(self.key, start, out);
        wide!(for u in out {
            *u = if *u < p { T::ZERO } else { kept };
        });
    }
}

impl Region<'_> {
    fn len(&self) -> usize {
        let Region { shape, offset, global } = self;
        assert!(shape.len() == offset.len() && shape.len() == global.len(), "dims of {self:?}");
        shape.iter().product()
    }

    /// Number of local elements that are also neighbours in the global tensor: the trailing complete dims, and one more
    /// dim.
    fn run_len(&self) -> usize {
        let whole = |d: &usize| self.shape[*d] as u64 == self.global[*d];
        let trailing = (0..self.shape.len()).rev().take_while(whole).count();
        let first = self.shape.len().saturating_sub(trailing + 1);
        self.shape[first..].iter().product()
    }

    /// The row-major global index of the local element `local`.
    fn global_index(&self, mut local: usize) -> u64 {
        let (mut index, mut stride) = (0, 1);
        for d in (0..self.shape.len()).rev() {
            index += ((local % self.shape[d]) as u64 + self.offset[d]) * stride;
            local /= self.shape[d];
            stride *= self.global[d];
        }
        index
    }
}
