//! Frequencies of rotary embeddings.

use meshwork_tensor::op::{Divisors, LongRope, Rotary, RotaryScaling, Yarn};

/// Frequencies of Llama 3.1 8B as `transformers` computes them (`rope_type` llama3, theta 500000, heads of 128), to
/// f32.
#[test]
fn scaled_frequencies_are_the_published_ones() {
    let rotary = Rotary { theta: 500_000.0, scaling: Some(RotaryScaling::LLAMA_3_1), features: None };
    let plain = Rotary::new(500_000.0);
    let [long, short] = [2048.0, 8192.0];
    for pair in 0..64 {
        let (scaled, frequency) = (rotary.frequency(pair, 128), plain.frequency(pair, 128));
        let wave = std::f64::consts::TAU / frequency;
        // The published code, in its own terms.
        let smooth = (8192.0 / wave - 1.0) / (4.0 - 1.0);
        let want = match wave {
            wave if wave > short => frequency / 8.0,
            wave if wave < long => frequency,
            _ => (1.0 - smooth) * frequency / 8.0 + smooth * frequency,
        };
        assert!((scaled - want).abs() <= 1e-15 * want, "{pair}: {scaled} against {want}");
    }
    assert_eq!(rotary.frequency(0, 128), 1.0);
    assert_eq!(rotary.frequency(63, 128), plain.frequency(63, 128) / 8.0);
    let between = (0..64).filter(|&pair| {
        let ratio = rotary.frequency(pair, 128) / plain.frequency(pair, 128);
        ratio > 0.1251 && ratio < 0.9999
    });
    assert_eq!(between.count(), 6);
}

/// Frequencies and scales that `transformers` 5.23 computes in f32 for heads of 16 features and a base of 10000.
#[test]
fn each_kind_of_scaling_has_the_published_frequencies() {
    let rotary = |scaling| Rotary { scaling: Some(scaling), ..Rotary::new(10_000.0) };
    let yarn = Yarn {
        factor: 40.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        original_positions: 4096,
        mscale: None,
        mscale_all_dim: None,
        attention_factor: None,
    };
    let between =
        Yarn { original_positions: 1000, truncate: false, mscale: Some(0.707), mscale_all_dim: Some(1.0), ..yarn };
    let dynamic = RotaryScaling::Dynamic { factor: 2.0, original_positions: 4096, length: 0 };
    let divisors = |divisors: [f32; 8]| Divisors::new(&divisors).unwrap();
    let long = RotaryScaling::LongRope(LongRope {
        short: divisors([1.0, 1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 2.0]),
        long: divisors([1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]),
        original_positions: 1024,
        length: 0,
        attention_factor: 1.0954451150103321,
    });
    let plain = [1.0, 0.31622776, 0.1, 0.031622779, 0.01, 0.0031622779, 0.001, 0.00031622779];
    let short = [1.0, 0.31622776, 0.1, 0.031622779, 0.0066666667, 0.00158113895, 0.0005, 0.000158113895];
    let cases: [(RotaryScaling, usize, [f64; 8], f64); 6] = [
        (
            RotaryScaling::Yarn(yarn),
            0,
            [1.0, 0.31622776, 0.1, 0.023914725, 0.0051249997, 0.00084986218, 2.4999999e-05, 7.9056945e-06],
            1.3688879454113936,
        ),
        (
            RotaryScaling::Yarn(between),
            0,
            [1.0, 0.31622776, 0.080351032, 0.015166988, 0.001557342, 7.9056947e-05, 2.4999999e-05, 7.9056945e-06],
            0.9210423553163399,
        ),
        (
            dynamic,
            8192,
            [1.0, 0.27029613, 0.073059998, 0.019747833, 0.0053377626, 0.0014427766, 0.00038997692, 0.00010540926],
            1.0,
        ),
        (dynamic, 100, plain, 1.0),
        (
            long,
            2000,
            [1.0, 0.2108185, 0.05, 0.0079056947, 0.00125, 0.00019764237, 3.125e-05, 4.9410592e-06],
            1.0954451150103321,
        ),
        (long, 1024, short, 1.0954451150103321),
    ];
    for (scaling, length, frequencies, amplitude) in cases {
        let rotary = rotary(scaling).of_length(length);
        for (pair, want) in frequencies.into_iter().enumerate() {
            let got = rotary.frequency(pair, 16);
            assert!((got - want).abs() < 3e-7 * want, "{scaling:?} at {length}, pair {pair}: {got}, {want}");
        }
        assert!((rotary.amplitude() - amplitude).abs() < 1e-12, "{scaling:?}: {}", rotary.amplitude());
    }
    assert_eq!(between.score_factor(), (0.1 * 40.0_f64.ln() + 1.0).powi(2));
    assert_eq!(yarn.score_factor(), 1.0);
    assert_eq!(Divisors::new(&[1.0; 65]), None);
}

/// What turns is scaled, and what does not stays.
#[test]
fn a_table_scales_the_features_that_turn() {
    let yarn = Yarn {
        factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        original_positions: 64,
        mscale: None,
        mscale_all_dim: None,
        attention_factor: Some(3.0),
    };
    let scaling = Some(RotaryScaling::Yarn(yarn));
    let table: Vec<f64> = Rotary { theta: 100.0, scaling, features: Some(2) }.table(2, 4).collect();
    let (sin, cos) = 1.0_f64.sin_cos();
    assert_eq!(table, [3.0, 1.0, 0.0, 0.0, 3.0 * cos, 1.0, 3.0 * sin, 0.0]);
}
