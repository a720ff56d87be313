//! Sums over a dim, softmax and squared errors.

use super::oracle::{assert_close, check_gradient, dot, values, widen};
use meshwork_cpu::kernels::reduction::*;
use proptest::prelude::*;

proptest! {
    /// The documented order, element by element: other elements do not change a sum.
    #[test]
    fn sums_run_in_order(outer in 0..5_usize, extent in 0..20_usize, inner in 1..20_usize, from in 0.0..1.0) {
        let x: Vec<f32> = values("x", outer * extent * inner);
        let from = (from * extent as f64) as usize;
        let mut out = vec![9.0; outer * inner];
        sum(&x, extent, inner, from..extent, 0.25, &mut out);
        for (at, &out) in out.iter().enumerate() {
            let (o, i) = (at / inner, at % inner);
            let terms = (from..extent).map(|e| f64::from(x[(o * extent + e) * inner + i]));
            prop_assert_eq!(out, (terms.fold(0.0, |sum, x| sum + x) * 0.25) as f32);
        }
    }

    #[test]
    fn what_is_spread_is_the_same_everywhere(outer in 0..5_usize, extent in 0..9_usize, inner in 1..9_usize) {
        let dy: Vec<f32> = values("dy", outer * inner);
        let mut dx = vec![9.0; outer * extent * inner];
        spread(&dy, extent, inner, 0.1, &mut dx);
        let want = |at: usize| dy[at / (extent * inner) * inner + at % inner] * 0.1_f32;
        prop_assert!((0..dx.len()).all(|at| dx[at] == want(at)));
    }
}

#[test]
fn softmax_is_its_definition_and_huge_numbers_do_not_overflow() {
    let x: Vec<f32> = values::<f32>("x", 5 * 37).iter().map(|x| 3.0 * x).collect();
    let want: Vec<f64> = widen(&x)
        .chunks(37)
        .flat_map(|row| {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x.exp() / sum).collect::<Vec<_>>()
        })
        .collect();
    let mut y = vec![9.0; x.len()];
    softmax(&x, 37, &mut y);
    assert_close(&y, &want, 1e-6);
    let mut y = [9.0_f32; 4];
    softmax(&[1e30, 1e30, -1e30, f32::NEG_INFINITY], 4, &mut y);
    assert_eq!(y, [0.5, 0.5, 0.0, 0.0]);
}

#[test]
fn the_gradient_of_softmax() {
    let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 24), values("dy", 24));
    let forward = |x: &[f64]| {
        let mut y = vec![0.0; 24];
        softmax(x, 8, &mut y);
        y
    };
    let mut dx = vec![9.0; 24];
    softmax_backward(&forward(&x), &dy, 8, &mut dx);
    check_gradient(&x, &dx, |x| dot(&forward(x), &dy));
}

#[test]
fn squared_errors_of_integers_are_exact() {
    assert_eq!(squared_error(1.0, &[3.0_f32, -2.0], &[1.0, 1.0]), 14.0);
    let mut dx = [9.0; 2];
    squared_error_backward(&[3.0_f32, -2.0], &[1.0, 1.0], 0.5, &mut dx);
    assert_eq!(dx, [1.0, -1.5]);
}
