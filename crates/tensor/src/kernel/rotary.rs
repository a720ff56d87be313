//! Rotary position embeddings (Su et al., arXiv:2104.09864), as numbers.

/// The rotation of a head's features by the position of their token: pair i, features i and i + head_dim / 2, rotates
/// by `theta^(-2i / head_dim)` radians per position. (The layout of published Llama weights in the Hugging Face
/// format.)
///
/// ```
/// use meshwork_tensor::op::Rotary;
///
/// let rotary = Rotary::new(10_000.0);
/// assert_eq!(rotary.frequency(0, 64), 1.0);
/// assert!((rotary.frequency(16, 64) - 0.01).abs() < 1e-12);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// The base of the frequencies.
    pub theta: f64,
    /// How they are scaled for longer contexts, if they are.
    pub scaling: Option<RotaryScaling>,
}

/// Frequencies scaled as published with Llama 3.1. Those whose wavelength is short compared with the original context
/// do not change, those whose wavelength is long are divided by `factor`, and those in between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// A wavelength above the original context divided by this is long.
    pub low_frequency_factor: f64,
    /// A wavelength below the original context divided by this is short.
    pub high_frequency_factor: f64,
    /// Positions of the context that the model was first trained with.
    pub original_positions: usize,
}

impl Rotary {
    /// Frequencies of this base, not scaled.
    pub fn new(theta: f64) -> Self {
        Self { theta, scaling: None }
    }

    /// Radians per position of a pair of features, of `head_dim / 2` pairs.
    pub fn frequency(&self, pair: usize, head_dim: usize) -> f64 {
        let frequency = self.theta.powf(-2.0 * pair as f64 / head_dim as f64);
        self.scaling.map_or(frequency, |scaling| scaling.of(frequency))
    }
}

impl RotaryScaling {
    /// The scaling of Llama 3.1.
    pub const LLAMA_3_1: Self =
        Self { factor: 8.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8192 };

    fn of(&self, frequency: f64) -> f64 {
        // Waves of this frequency in the original context.
        let waves = self.original_positions as f64 * frequency / std::f64::consts::TAU;
        let (low, high) = (self.low_frequency_factor, self.high_frequency_factor);
        if waves < low {
            frequency / self.factor
        } else if waves > high {
            frequency
        } else {
            let share = (waves - low) / (high - low);
            (1.0 - share) * frequency / self.factor + share * frequency
        }
    }
}
