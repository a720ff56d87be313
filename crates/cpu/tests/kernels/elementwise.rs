//! Each function against its definition in f64.

use super::oracle::{assert_close, check_gradient, dot, values, widen};
use meshwork_cpu::kernels::elementwise::*;
use meshwork_tensor::kernel::{Map, Zip};

type Definition = fn(f64) -> f64;

const MAPS: [(Map, Definition); 7] = [
    (Map::Scale(-2.5), |x| -2.5 * x),
    (Map::Exp, f64::exp),
    (Map::Tanh, f64::tanh),
    (Map::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
    (Map::Silu, |x| x / (1.0 + (-x).exp())),
    (Map::Gelu, |x| x / 2.0 * libm::erfc(-x / 2.0_f64.sqrt())),
    (Map::SoftCap(0.75), |x| 0.75 * (x / 0.75).tanh()),
];

#[test]
fn each_function_is_its_definition() {
    let mut x: Vec<f32> = values("x", 1003);
    x.extend([0.0, -0.0, 1e-6, -1e-3, 0.24, 0.26, 9.0, -30.0]);
    for (f, definition) in MAPS {
        let want: Vec<f64> = widen(&x).into_iter().map(definition).collect();
        let mut out = vec![9.0; x.len()];
        map(f, &x, &mut out);
        assert_close(&out, &want, 1e-6);
        let (x, mut out) = (widen(&x), vec![9.0; x.len()]);
        map(f, &x, &mut out);
        assert_close(&out, &want, 1e-15);
    }
}

#[test]
fn derivatives_are_those_of_the_functions() {
    let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 40), values("dy", 40));
    for (f, _) in MAPS {
        let mut dx = vec![9.0; 40];
        map_backward(f, &x, &dy, &mut dx);
        check_gradient(&x, &dx, |x| {
            let mut y = vec![0.0; 40];
            map(f, x, &mut y);
            dot(&y, &dy)
        });
        let single = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let mut dx32 = vec![9.0; 40];
        map_backward(f, &single(&x), &single(&dy), &mut dx32);
        assert_close(&dx32, &dx, 2e-6);
    }
}

#[test]
fn the_ends_of_the_range() {
    let x = [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY];
    let ends = |f: Map| {
        let (mut y, mut dx) = ([9.0; 4], [9.0; 4]);
        map(f, &x, &mut y);
        map_backward(f, &x, &[1.0; 4], &mut dx);
        [y, dx]
    };
    assert_eq!(ends(Map::Tanh), [[-1.0, -1.0, 1.0, 1.0], [0.0; 4]]);
    assert_eq!(ends(Map::Sigmoid), [[0.0, 0.0, 1.0, 1.0], [0.0; 4]]);
    assert_eq!(ends(Map::SoftCap(30.0)), [[-30.0, -30.0, 30.0, 30.0], [0.0; 4]]);
    for f in [Map::Silu, Map::Gelu] {
        assert_eq!(ends(f)[1], [0.0, 0.0, 1.0, 1.0]);
    }
    for (f, _) in MAPS {
        let mut y = [0.0];
        map(f, &[f32::NAN], &mut y);
        assert!(y[0].is_nan(), "{f:?}");
    }
}

#[test]
fn two_numbers_at_a_time_over_rows() {
    let (x, y): (Vec<f32>, Vec<f32>) = (values("x", 60), values("y", 12));
    let y: Vec<f32> = y.iter().enumerate().map(|(i, &y)| if i % 3 == 1 { 0.0 } else { y }).collect();
    type Function = fn(f32, f32) -> f32;
    let functions: [(Zip, Function); 8] = [
        (Zip::Add, |x, y| x + y),
        (Zip::Sub, |x, y| x - y),
        (Zip::Mul, |x, y| x * y),
        (Zip::Div, |x, y| x / y),
        (Zip::Keep, |x, y| if y != 0.0 { x } else { 0.0 }),
        (Zip::Drop, |x, y| if y != 0.0 { 0.0 } else { x }),
        (Zip::Second, |_, y| y),
        (Zip::Greater, |x, y| f32::from(u8::from(x > y))),
    ];
    for (f, definition) in functions {
        for [outer, extent, inner] in [[1, 5, 12], [1, 1, 12], [2, 5, 6], [12, 5, 1], [3, 5, 4]] {
            let (x, y) = (&x[..outer * extent * inner], &y[..outer * inner]);
            let mut out = vec![9.0; x.len()];
            zip(f, x, y, [extent, inner], &mut out);
            let want = |at: usize| definition(x[at], y[at / (extent * inner) * inner + at % inner]);
            assert!((0..x.len()).all(|at| out[at].to_bits() == want(at).to_bits()), "{f:?} {outer} {extent} {inner}");
        }
    }
}

/// Also of subnormal numbers, and at the ends.
#[test]
fn logarithms_and_roots() {
    let mut x: Vec<f32> = values::<f32>("x", 1003).iter().map(|x| x.abs()).collect();
    x.extend([1e-45, 3e-40, f32::MIN_POSITIVE, 1e-30, 0.999, 1.0, 1.001, 1e30, f32::MAX]);
    for (f, definition, slope) in
        [(Map::Log, f64::ln as Definition, (|x| 1.0 / x) as Definition), (Map::Sqrt, f64::sqrt, |x| 0.5 / x.sqrt())]
    {
        let mut out = vec![9.0; x.len()];
        map(f, &x, &mut out);
        let close = |got: f64, want: f64, within: f64| (got - want).abs() <= within * want.abs().max(1e-3);
        assert!(x.iter().zip(&out).all(|(&x, &y)| close(y.into(), definition(x.into()), 2e-7)), "{f:?}");
        let (x, mut wide) = (widen(&x), vec![9.0; x.len()]);
        map(f, &x, &mut wide);
        assert!(x.iter().zip(&wide).all(|(&x, &y)| close(y, definition(x), 1e-15)), "{f:?}");
        map_backward(f, &x, &vec![2.0; x.len()], &mut wide);
        assert!(x.iter().zip(&wide).all(|(&x, &y)| close(y, 2.0 * slope(x), 1e-15)), "{f:?}");
    }
    let ends = [0.0, -0.0, -1.0, f32::INFINITY, f32::NAN];
    let of = |f| {
        let mut y = [9.0; 5];
        map(f, &ends, &mut y);
        y.map(|y| if y.is_nan() { "NaN".to_owned() } else { y.to_string() })
    };
    assert_eq!(of(Map::Log), ["-inf", "-inf", "NaN", "inf", "NaN"]);
    assert_eq!(of(Map::Sqrt), ["0", "-0", "NaN", "inf", "NaN"]);
}
