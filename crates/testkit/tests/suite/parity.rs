//! Values that should be the same but for rounding.

use meshwork_testkit::parity::assert_close;

#[test]
fn a_difference_within_rounding_passes() {
    assert_close("w", &[3.0f32, 4.0], &[3.0, 4.00004], 0.0);
    assert_close("key bias", &[1e-7f32], &[0.0], 1000.0);
}

#[test]
#[should_panic(expected = "w: ‖got − reference‖ = 1.000e-4 is above the bound 5.000e-5 (‖got‖ = 5.000")]
fn a_difference_above_the_bound_names_the_parameter_the_norms_and_the_bound() {
    assert_close("w", &[3.0, 4.0001], &[3.0, 4.0], 0.0);
}

#[test]
#[should_panic(expected = "w: ‖got − reference‖ = NaN")]
fn not_a_number_is_never_close() {
    assert_close("w", &[f32::NAN], &[1.0], 0.0);
}

#[test]
#[should_panic(expected = "w: number of elements")]
fn lengths_must_agree() {
    assert_close("w", &[1.0f32], &[1.0, 1.0], 0.0);
}
