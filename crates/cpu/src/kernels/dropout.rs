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

#[cfg(test)]
mod tests {
    use super::super::oracle::{check_gradient, dot, values};
    use super::*;
    use meshwork_tensor::random::{key, uniform};
    use proptest::prelude::*;

    fn whole(global: &[u64]) -> (Vec<usize>, Vec<u64>) {
        (global.iter().map(|&n| n as usize).collect(), vec![0; global.len()])
    }

    fn apply<T: Float>(mask: Mask, shape: &[usize], offset: &[u64], global: &[u64], x: &[T]) -> Vec<T> {
        let mut y = vec![T::from(9.0); x.len()];
        dropout(mask, Region { shape, offset, global }, 0, x, &mut y);
        y
    }

    proptest! {
        /// Every region of a tensor gets the factors that the definition gives its global elements.
        #[test]
        fn regions_see_the_global_mask(
            dims in prop::collection::vec((1..7_u64, 0.0..1.0, 0.0..1.0), 0..5), p in 0.0..0.9_f32, cut in 0.0..1.0,
        ) {
            let global: Vec<u64> = dims.iter().map(|d| d.0).collect();
            let offset: Vec<u64> = dims.iter().map(|d| (d.1 * d.0 as f64) as u64).collect();
            let left = global.iter().zip(&offset).map(|(n, o)| n - o);
            let shape: Vec<usize> = left.zip(&dims).map(|(n, d)| (d.2 * (n + 1) as f64) as usize).collect();
            let mask = Mask { key: key(1, "mask"), p };
            let len = shape.iter().product();
            let x: Vec<f32> = values("x", len);
            let y = apply(mask, &shape, &offset, &global, &x);
            let (mut parts, region) = (vec![9.0; len], Region { shape: &shape, offset: &offset, global: &global });
            let cut = (cut * len as f64) as usize;
            dropout(mask, region, 0, &x[..cut], &mut parts[..cut]);
            dropout(mask, region, cut, &x[cut..], &mut parts[cut..]);
            prop_assert_eq!(&parts, &y);
            for local in 0..len {
                let mut rest = local;
                let coordinates: Vec<u64> = shape.iter().zip(&offset).rev().map(|(&n, o)| {
                    let c = (rest % n) as u64 + o;
                    rest /= n;
                    c
                }).collect();
                let index = coordinates.iter().rev().zip(&global).fold(0, |index, (c, n)| index * n + c);
                let kept = uniform(mask.key, index) >= p;
                let want = if kept { x[local] * (1.0 / (1.0 - f64::from(p))) as f32 } else { 0.0 };
                prop_assert_eq!(y[local], want);
            }
        }
    }

    #[test]
    fn the_mean_is_kept_and_p_0_is_the_identity() {
        let global = [1000, 1000];
        let (shape, offset) = whole(&global);
        let ones = vec![1.0_f32; 1_000_000];
        let mask = Mask { key: key(2, "mean"), p: 0.3 };
        let y = apply(mask, &shape, &offset, &global, &ones);
        let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / 1e6;
        assert!((dropped - 0.3).abs() < 5.0 * (0.21_f64 / 1e6).sqrt(), "{dropped}");
        let x: Vec<f32> = values("x", 1_000_000);
        assert_eq!(apply(Mask { p: 0.0, ..mask }, &shape, &offset, &global, &x), x);
    }

    #[test]
    fn the_backward_is_the_forward() {
        let (shape, offset, global) = ([3, 5], [1, 2], [4, 9]);
        let mask = Mask { key: key(3, "grad"), p: 0.4 };
        let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 15), values("dy", 15));
        let dx = apply(mask, &shape, &offset, &global, &dy);
        assert!(dx.contains(&0.0) && dx.iter().any(|g| *g != 0.0));
        check_gradient(&x, &dx, |x| dot(&apply(mask, &shape, &offset, &global, x), &dy));
    }

    /// Seven columns over four ranks, two each: the last holds one, and a zero.
    #[test]
    fn a_padded_shard_has_the_mask_of_its_elements() {
        let mask = Mask { key: key(4, "padded"), p: 0.5 };
        let whole = apply(mask, &[3, 7], &[0, 0], &[3, 7], &[1.0_f32; 21]);
        let last = apply(mask, &[3, 2], &[0, 6], &[3, 7], &[1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        assert_eq!(last, [whole[6], 0.0, whole[13], 0.0, whole[20], 0.0]);
    }
}
