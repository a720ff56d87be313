//! What every scheme promises, on random values and shapes.

use crate::common::{SCHEMES, bits, compress, draws, lossy, restore, scheme, square};
use meshwork_compress::{Compressor, Fold, Shape, wire_bytes};
use proptest::prelude::*;

/// A scheme, a shape it takes, and values of many magnitudes.
fn cases() -> impl Strategy<Value = (&'static str, Shape, Vec<f32>)> {
    let sizes = prop_oneof![4 => (2..12_usize, 2..200_usize), 1 => (1..3_usize, 0..3_usize), 1 => (2..3_usize, 500..1100_usize)];
    (0..SCHEMES.len(), sizes, any::<u64>()).prop_map(|(scheme, (rows, cols), seed)| {
        let shape = Shape::matrix(rows, cols).unwrap();
        let mut rng = meshwork_testkit::Rng::new(seed);
        // Of many magnitudes, with ties and zeros. From a seed, because drawing each by itself takes far longer.
        let mut value = |_| rng.pick(&[1.0, 1.0, 1e4, 1e-3, 0.0]) * if rng.below(4) == 0 { -0.5 } else { rng.signed() };
        (SCHEMES[scheme], shape, (0..shape.len()).map(&mut value).collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn messages_have_the_stated_size_error_and_bits((text, shape, x) in cases()) {
        let scheme = scheme(text);
        prop_assume!(scheme.check(shape).is_ok());
        let message = compress(&scheme, &x, shape, draws(1));
        prop_assert_eq!(message.as_bytes().len(), wire_bytes(&scheme, shape).unwrap(), "{} {}", text, shape);
        prop_assert_eq!(&message, &compress(&scheme, &x, shape, draws(1)), "{} {}", text, shape);
        let restored = restore(&scheme, &message, shape);

        let mut sum = vec![0.5; x.len()];
        message.restore(&scheme, shape, Fold::Add, &mut sum).unwrap();
        let wanted: Vec<f32> = restored.iter().map(|x| 0.5 + x).collect();
        prop_assert_eq!(bits(&sum), bits(&wanted), "{} {}", text, shape);

        // What is drawn keeps its bound on average only; stochastic rounding errs by a step at most, twice the nearest
        // one.
        let slack = if text.contains("stochastic") { 4.0 } else { 1.0 };
        if !text.contains("randk") {
            let error = square(x.iter().zip(&restored).map(|(x, y)| x - y));
            let bound = slack * scheme.guarantee(shape).error;
            prop_assert!(error <= (bound + 1e-6) * square(x.iter().copied()), "{} {}: {} above {}", text, shape, error, bound);
        }
        let again = ["none", "bf16", "fp8", "sign", "int8", "nf4"].contains(&text.split([':', '/']).next().unwrap());
        if again || text.starts_with("topk") && !text.contains("quant") {
            prop_assert_eq!(bits(&lossy(&scheme, &restored, shape, draws(1))), bits(&restored), "{} {} again", text, shape);
        }
    }

    /// A NaN or infinity never disappears, whatever else there is; drawn elements excepted, and what they do not send
    /// stays in residuals.
    #[test]
    fn what_is_not_finite_stays_visible((text, shape, mut x) in cases(), at: prop::sample::Index, bad in 0..3_usize) {
        let scheme = scheme(text);
        prop_assume!(scheme.check(shape).is_ok() && !x.is_empty() && !text.contains("randk"));
        let at = at.index(x.len());
        x[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][bad];
        let restored = lossy(&scheme, &x, shape, draws(1));
        prop_assert!(!restored[at].is_finite(), "{} {}: {} became {}", text, shape, x[at], restored[at]);
    }
}

/// Each unbiased scheme, over 20,000 draws: the mean of each element within five standard errors, or within rounding.
#[test]
fn unbiased_means_that_the_mean_is_the_value() {
    let shape = Shape::matrix(2, 6).unwrap();
    let x = [0.1, -0.7, 0.33, 0.9, 0.0, 0.25, -1.0, 0.6, 0.45, -0.2, 0.05, 0.8];
    for text in
        ["quant:1/stochastic", "quant:3/row/stochastic", "randk:0.25/unbiased", "randk:5/unbiased+quant:2/stochastic"]
    {
        let scheme = scheme(text);
        assert!(scheme.guarantee(shape).unbiased, "{text}");
        let n = 20_000;
        let (mut sum, mut squares, mut error) = ([0.0; 12], [0.0; 12], 0.0);
        for step in 0..n {
            let y = lossy(&scheme, &x, shape, draws(step));
            for (i, y) in y.iter().enumerate() {
                sum[i] += f64::from(*y);
                squares[i] += f64::from(*y).powi(2);
            }
            error += square(x.iter().zip(&y).map(|(x, y)| x - y));
        }
        let n = n as f64;
        for i in 0..12 {
            let (mean, variance) = (sum[i] / n, squares[i] / n - (sum[i] / n).powi(2));
            let off = (mean - f64::from(x[i])).abs();
            assert!(
                off <= 5.0 * (variance.max(0.0) / n).sqrt() + 1e-6,
                "{text}: element {i} has mean {mean}, not {}",
                x[i]
            );
        }
        let bound = scheme.guarantee(shape).error * square(x);
        assert!(error / n <= bound * 1.02, "{text}: mean error {} above {bound}", error / n);
    }
    for text in ["quant:3", "randk:0.25", "topk:0.5", "sign", "bf16", "randk:0.25/unbiased+quant:4"] {
        assert!(!scheme(text).guarantee(shape).unbiased, "{text}");
    }
    // What `randk` keeps on average: a quarter.
    let scheme = scheme("randk:0.25");
    let error: f64 =
        (0..4000).map(|step| square(x.iter().zip(lossy(&scheme, &x, shape, draws(step))).map(|(x, y)| x - y))).sum();
    let ratio = error / 4000.0 / square(x);
    assert!((ratio - scheme.guarantee(shape).error).abs() < 0.02, "{ratio}");
}
