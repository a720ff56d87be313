//! Each element against its expression.

use super::oracle::values;
use meshwork_cpu::kernels::pointwise::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn each_element_is_its_expression(rows in 0..20_usize, n in 0..70_usize) {
        let len = rows * n;
        let (a, b, row): (Vec<f32>, Vec<f32>, Vec<f32>) = (values("a", len), values("b", len), values("row", n));
        let mut out = vec![9.0; len];
        add(&a, &b, &mut out);
        prop_assert!((0..len).all(|i| out[i] == a[i] + b[i]));
        add_assign(&mut out, &b);
        prop_assert!((0..len).all(|i| out[i] == a[i] + b[i] + b[i]));
        bias(&a, &row, &mut out);
        prop_assert!((0..len).all(|i| out[i] == a[i] + row[i % n]));
        bias_residual(&a, &row, &b, &mut out);
        prop_assert!((0..len).all(|i| out[i] == a[i] + row[i % n] + b[i]));
    }

    /// Rows are added in order to the old contents: any cut into calls, and any columns alone, give the same bits.
    #[test]
    fn bias_gradients_do_not_depend_on_the_split(rows in 1..40_usize, n in 1..70_usize, cut in 0.0..1.0) {
        let (dy, old): (Vec<f32>, Vec<f32>) = (values("dy", rows * n), values("old", n));
        let cut = (cut * rows as f64) as usize * n;
        let (mut whole, mut parts) = (old.clone(), old.clone());
        bias_backward(&dy, &mut whole);
        bias_backward(&dy[..cut], &mut parts);
        bias_backward(&dy[cut..], &mut parts);
        prop_assert_eq!(&whole, &parts);
        for j in 0..n {
            let column = dy.iter().skip(j).step_by(n).fold(old[j], |sum, &g| sum + g);
            prop_assert_eq!(whole[j], column);
        }
    }
}

#[test]
#[should_panic(expected = "7 elements are no rows of 3")]
fn ragged_rows_are_refused() {
    bias_backward(&[0.0_f32; 7], &mut [0.0; 3]);
}
