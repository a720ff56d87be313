//! Elementary functions in f32 against std in f64.

use meshwork_cpu::kernels::Float;

fn exp(x: f32) -> f32 {
    Float::exp(x)
}

fn tanh(x: f32) -> f32 {
    Float::tanh(x)
}

fn logistic(t: f32) -> (f32, f32) {
    Float::logistic_base_2(t)
}

/// The error of `exp(x)` in units of the last place of the exact result.
fn ulps(x: f32) -> f64 {
    let exact = f64::from(x).exp();
    let ulp = 2_f64.powi((exact.log2().floor() as i32).max(-126) - 23);
    (f64::from(exp(x)) - exact).abs() / ulp
}

/// Tests one value in 997; a run with one in 7 gave 1.012 ulp at worst.
#[test]
fn exp_is_as_close_as_stated() {
    let sampled = (0..=f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits);
    let in_range = sampled.flat_map(|x| [x, -x]).filter(|x| *x < 88.376 && *x > -87.68);
    let worst = in_range.map(ulps).fold(0.0, f64::max);
    assert!(worst <= 1.02, "{worst} ulp");
}

/// Tests one value in 499 of all that are not subnormal.
#[test]
fn tanh_is_as_close_as_stated() {
    let sampled = (f32::MIN_POSITIVE.to_bits()..=f32::INFINITY.to_bits()).step_by(499).map(f32::from_bits);
    let relative = |x: f32| (f64::from(tanh(x)) / f64::from(x).tanh() - 1.0).abs();
    let worst = sampled.flat_map(|x| [x, -x]).map(relative).fold(0.0, f64::max);
    assert!(worst <= 6e-7, "{worst}");
    assert_eq!(
        [0.0, -0.0, 20.0, f32::NEG_INFINITY].map(tanh).map(f32::to_bits),
        [0.0, -0.0, 1.0, -1.0].map(f32::to_bits)
    );
    assert!(tanh(f32::NAN).is_nan());
}

#[test]
fn exp_handles_the_ends_of_its_range() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    for x in [88.377, 89.0, 100.0, f32::MAX, f32::INFINITY] {
        assert_eq!(exp(x), f32::INFINITY, "{x}");
    }
    for x in [-87.69, -104.0, -1e4, f32::MIN, f32::NEG_INFINITY] {
        assert_eq!(exp(x), 0.0, "{x}");
    }
    assert!(exp(f32::NAN).is_nan());
}

/// Tests one value in 499 of all that are not negative.
#[test]
fn the_logistic_function_is_as_close_as_stated() {
    for t in (0..=f32::INFINITY.to_bits()).step_by(499).map(f32::from_bits).chain([f32::INFINITY]) {
        let (near, far) = logistic(t);
        let (want_near, want_far) = f64::from(t).logistic_base_2();
        let errors = [f64::from(near) - want_near, f64::from(far) - want_far].map(f64::abs);
        assert!(errors.iter().all(|error| *error <= 1.3e-7), "{t}: {errors:?}");
        assert!(t < 126.5 || (near, far) == (1.0, 0.0), "{t}: {near}, {far}");
    }
    assert!(logistic(f32::NAN).0.is_nan() && logistic(f32::NAN).1.is_nan());
}
