//! Sums along a row against their order, spelled out.

use super::oracle::values;
use meshwork_cpu::kernels::reduce::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn integer_sums_are_exact(x in prop::collection::vec(-1000..1000_i32, 0..5000)) {
        let row: Vec<f32> = x.iter().map(|&v| v as f32).collect();
        prop_assert_eq!(sum(&row, |v| v), x.iter().sum::<i32>() as f32);
        prop_assert_eq!(sums(&row, &row, &row, |a, b, c| [a - b, b + c]), [0.0, 2.0 * sum(&row, |v| v)]);
        let largest = x.iter().max().map_or(f32::NEG_INFINITY, |&v| v as f32);
        prop_assert_eq!(max(&row), largest);
    }
}

/// The documented order, spelled out with its own numbers.
#[test]
fn the_order_is_the_documented_one() {
    for rest in 0..100 {
        let x: Vec<f32> = values("order", 1024 + rest);
        let block = |x: &[f32]| {
            let lane = |l: usize| x.iter().skip(l).step_by(16).fold(0.0, |a, b| a + b);
            let by_8 = |l: usize| lane(l) + lane(l + 8);
            let by_4 = |l: usize| by_8(l) + by_8(l + 4);
            let by_2 = |l: usize| by_4(l) + by_4(l + 2);
            f64::from(by_2(0) + by_2(1))
        };
        assert_eq!(sum(&x, |v| v), (block(&x[..1024]) + block(&x[1024..])) as f32, "{rest}");
    }
}

/// 2^20 equal terms: a plain f32 sum would be off by 1e-3 or more.
#[test]
fn long_sums_stay_accurate() {
    let x = vec![0.1_f32; 1 << 20];
    let exact = f64::from(0.1_f32) * x.len() as f64;
    let relative = (f64::from(sum(&x, |v| v)) - exact).abs() / exact;
    assert!(relative <= 68.0 * 2_f64.powi(-24), "{relative}");
}
