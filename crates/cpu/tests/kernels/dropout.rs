//! Regions of a global mask, and gradients.

use super::oracle::{check_gradient, dot, values};
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::dropout::*;
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
