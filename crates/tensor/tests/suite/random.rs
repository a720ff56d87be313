//! Streams of normal numbers, and the logarithm that they are made with.

use meshwork_core::random::key;
use meshwork_tensor::random::{fill_normal, ln, normal};
use proptest::prelude::*;

/// One value in 997 of all positive ones that are not subnormal.
#[test]
fn ln_is_as_close_as_stated() {
    let sampled = (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits);
    let error = |x: f32| {
        let exact = f64::from(x).ln();
        let ulp = 2_f64.powi((exact.abs().log2().floor() as i32).max(-126) - 23);
        (f64::from(ln(x)) - exact).abs() / ulp
    };
    let worst = sampled.filter(|x| *x != 1.0).map(error).fold(0.0, f64::max);
    assert!(worst <= 1.0, "{worst} ulp");
    assert_eq!(ln(1.0), 0.0);
    assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    assert!(ln(f32::NAN).is_nan());
}

/// Runs are repeatable across versions only while these bits stay. The keys and words were also computed by a
/// separate Python implementation of this module's text.
#[test]
fn streams_are_stable() {
    let k = key(42, "wte");
    assert_eq!([0, 1, 2, 3].map(|i| normal(k, i)), [-0.672_773_3, 0.282_910_43, -0.815_423_2, 0.249_747_93]);
}

proptest! {
    #[test]
    fn fill_equals_the_elements(
        seed: u64,
        start in prop_oneof![0..200_u64, (u32::MAX as u64 * 4 - 99)..(u32::MAX as u64 * 4 + 99)],
        len in 0..150_usize,
    ) {
        let k = key(seed, "fill");
        let (mut z, mut wide) = (vec![9_f32; len], vec![9_f64; len]);
        fill_normal(k, start, &mut z);
        fill_normal(k, start, &mut wide);
        for i in 0..len {
            prop_assert_eq!(z[i].to_bits(), normal(k, start + i as u64).to_bits());
            prop_assert_eq!(wide[i], f64::from(z[i]));
        }
    }
}

/// Moments and tails of 2^20 draws, each within five standard errors.
#[test]
fn the_streams_have_the_right_moments_and_tails() {
    let n = 1 << 20;
    let mut z = vec![0_f64; n];
    fill_normal(key(3, "moments"), 5, &mut z);
    let mean_of = |f: &dyn Fn(f64) -> f64| z.iter().map(|&v| f(v)).sum::<f64>() / n as f64;
    let within = |got: f64, want: f64, variance: f64| {
        let bound = 5.0 * (variance / n as f64).sqrt();
        assert!((got - want).abs() < bound, "{got} against {want} ± {bound}");
    };
    within(mean_of(&|v| v), 0.0, 1.0);
    within(mean_of(&|v| v * v), 1.0, 2.0);
    within(mean_of(&|v| v.powi(3)), 0.0, 15.0);
    within(mean_of(&|v| v.powi(4)), 3.0, 96.0);
    for (limit, p) in [(1.0, 0.317_310_5), (2.0, 0.045_500_26), (3.0, 0.002_699_796), (4.0, 6.334_25e-5)] {
        within(mean_of(&|v| f64::from(v.abs() > limit)), p, p);
    }
    for lag in [1, 2, 3, 4] {
        let product: f64 = z.iter().zip(&z[lag..]).map(|(a, b)| a * b).sum();
        within(product / n as f64, 0.0, 1.0);
    }
}
