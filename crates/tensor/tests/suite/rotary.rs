//! Frequencies of rotary embeddings.

use meshwork_tensor::op::{Rotary, RotaryScaling};

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
