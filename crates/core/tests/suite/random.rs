//! Streams of uniform numbers.

use meshwork_core::random::{Key, fill_uniform, key, uniform};
use proptest::prelude::*;

/// Runs are repeatable across versions only while these bits stay. The keys and words were also computed by a
/// separate Python implementation of this module's text.
#[test]
fn streams_are_stable() {
    let k = key(42, "wte");
    assert_eq!(k, Key::from_words([618_401_186, 3_467_950_444]));
    let words = [12_854_457.0, 7_325_705.0, 11_662_485.0, 7_595_009.0];
    assert_eq!([0, 1, 2, 3].map(|i| uniform(k, i)), words.map(|word| word / 16_777_216.0));
}

#[test]
fn every_seed_name_and_fold_is_another_stream() {
    let mut keys = vec![key(0, ""), key(0, "a"), key(0, "b"), key(1, "a"), key(1, "ab"), key(256, "a")];
    keys.extend((0..100).map(|step| key(0, &format!("a@{step}"))));
    keys.extend((0..100).map(|step| key(0, &format!("b@{step}"))));
    let distinct: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
    // The whole index counts, not only its low 32 bits, because tensors and masks can be that long.
    let far = [32, 34, 40, 63].map(|bit| uniform(keys[0], 1 << bit).to_bits());
    assert!((0..4).all(|i| far[i] != uniform(keys[0], 0).to_bits() && !far[..i].contains(&far[i])));
}

proptest! {
    #[test]
    fn fill_equals_the_elements(
        seed: u64,
        start in prop_oneof![0..200_u64, (u32::MAX as u64 * 4 - 99)..(u32::MAX as u64 * 4 + 99)],
        len in 0..150_usize,
    ) {
        let k = key(seed, "fill");
        let mut u = vec![9_f32; len];
        fill_uniform(k, start, &mut u);
        for (i, u) in u.iter().enumerate() {
            prop_assert_eq!(u.to_bits(), uniform(k, start + i as u64).to_bits());
        }
    }
}

/// Tails of 2^20 draws, each within five standard errors.
#[test]
fn the_uniform_stream_is_flat() {
    let n = 1 << 20;
    let within = |got: f64, want: f64, variance: f64| {
        let bound = 5.0 * (variance / n as f64).sqrt();
        assert!((got - want).abs() < bound, "{got} against {want} ± {bound}");
    };
    let mut u = vec![0_f64; n];
    fill_uniform(key(3, "moments"), 5, &mut u);
    assert!(u.iter().all(|v| (0.0..1.0).contains(v)));
    for bin in 0..16 {
        let edge = f64::from(bin) / 16.0;
        let count = u.iter().filter(|&&v| v >= edge && v < edge + 1.0 / 16.0).count();
        within(count as f64 / n as f64, 1.0 / 16.0, 1.0 / 16.0);
    }
}
