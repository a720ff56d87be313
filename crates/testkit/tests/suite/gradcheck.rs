//! Gradients against finite differences.

use meshwork_testkit::gradcheck::assert_gradient;

#[test]
fn a_right_gradient_passes() {
    let x: Vec<f64> = (0..100).map(|i| f64::from(i) / 50.0 - 1.0).collect();
    let gradient: Vec<f64> = x.iter().map(|x| x.cos() * x.sin().exp()).collect();
    assert_gradient("exp(sin)", &x, &gradient, |x| x.iter().map(|x| x.sin().exp()).sum());
}

#[test]
#[should_panic(expected = "square: element 1 of the gradient is 4.00001, by finite differences 4")]
fn a_slightly_wrong_gradient_is_named() {
    assert_gradient("square", &[1.0, 2.0], &[2.0, 4.00001], |x| x.iter().map(|x| x * x).sum());
}

#[test]
#[should_panic(expected = "root: element 0 of the gradient is NaN")]
fn not_a_number_is_refused() {
    assert_gradient("root", &[1.0], &[f64::NAN], |x| x[0]);
}
