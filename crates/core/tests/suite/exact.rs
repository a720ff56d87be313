//! Exact sums of squares.

use meshwork_core::exact::{LIMBS, add_square, add_squares, carry, value};
use proptest::prelude::*;

/// More numbers of one exponent than are added in one sum of 64 bits.
const TERMS: usize = 3 * (1 << 16) + 5;

fn digits(x: &[f32]) -> [f64; LIMBS] {
    let mut digits = [0; LIMBS];
    x.iter().for_each(|&x| add_square(&mut digits, x));
    carry(&mut digits)
}

#[test]
fn single_squares_are_exact_over_the_whole_range() {
    for x in [0.0, -0.0, 1.0, -1.5, 0.1, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), -f32::from_bits(0x7f_ffff)] {
        assert_eq!(value(&digits(&[x])), f64::from(x) * f64::from(x), "{x:e}");
    }
    assert!(value(&digits(&[1.0, f32::INFINITY])).is_nan() && value(&digits(&[f32::NAN])).is_nan());
}

/// More numbers of one exponent than fit into one sum of 64 bits, and those that are not finite.
#[test]
fn many_squares_of_one_exponent_do_not_overflow() {
    let most = f32::from_bits(0x3fff_ffff);
    let mut sum = [0; LIMBS];
    add_squares(&mut sum, &vec![most; TERMS]);
    let exact = TERMS as f64 * (f64::from(most) * f64::from(most));
    assert_eq!(value(&carry(&mut sum)), exact);
    for wrong in [f32::NAN, f32::NEG_INFINITY] {
        let mut sum = [0; LIMBS];
        add_squares(&mut sum, &[&vec![1.0; 1000][..], &[wrong]].concat());
        assert!(value(&carry(&mut sum)).is_nan());
    }
}

proptest! {
    /// In any order, over any parts, the same bits; and within rounding what f64 sums to.
    #[test]
    fn any_cut_and_order_gives_the_same_bits(bits in prop::collection::vec(any::<u32>(), 1..200), at in 0..200_usize) {
        let mut x: Vec<f32> = bits.into_iter().map(f32::from_bits).filter(|x| x.is_finite()).collect();
        let whole = value(&digits(&x));
        let near: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        prop_assert!((whole - near).abs() <= 1e-13 * near);
        let mut at_once = [0; LIMBS];
        let repeated: Vec<f32> = x.iter().copied().cycle().take(8 * x.len()).collect();
        add_squares(&mut at_once, &repeated);
        prop_assert_eq!(value(&carry(&mut at_once)), value(&digits(&repeated)));
        x.reverse();
        let (left, right) = x.split_at(at.min(x.len()));
        let parts: Vec<f64> = digits(left).iter().zip(digits(right)).map(|(left, right)| left + right).collect();
        prop_assert_eq!(value(&parts).to_bits(), whole.to_bits());
    }
}
