//! Rotary position embeddings (Su et al., arXiv:2104.09864): parameters and frequencies.

/// Rotates a head's features by the position of the token: pair i, features i and i + head_dim / 2, rotates by
/// `theta^(-2i / head_dim)` radians per position. (The layout of published Llama weights in the Hugging Face format.)
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
    /// Scaling of the frequencies for longer contexts, if any.
    pub scaling: Option<RotaryScaling>,
    /// The features of a head that turn, an even number, where the others do not: the first half of them begins the
    /// first half of the head, the second half begins its second half. `None`: all.
    pub features: Option<usize>,
}

/// Frequencies scaled as published with Llama 3.1. Frequencies with a short wavelength, compared with the original
/// context, do not change; frequencies with a long wavelength are divided by `factor`; between them they are
/// interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// A wavelength above the original context divided by this is long.
    pub low_frequency_factor: f64,
    /// A wavelength below the original context divided by this is short.
    pub high_frequency_factor: f64,
    /// Positions of the context with which the model was first trained.
    pub original_positions: usize,
}

impl Rotary {
    /// Unscaled frequencies with this base.
    pub const fn new(theta: f64) -> Self {
        Self { theta, scaling: None, features: None }
    }

    /// Radians per position for one of the `head_dim / 2` pairs of features.
    pub fn frequency(&self, pair: usize, head_dim: usize) -> f64 {
        let features = self.features.unwrap_or(head_dim);
        if 2 * pair >= features {
            return 0.0;
        }
        let frequency = self.theta.powf(-2.0 * pair as f64 / features as f64);
        self.scaling.map_or(frequency, |scaling| scaling.scaled(frequency))
    }
}

impl RotaryScaling {
    /// The scaling of Llama 3.1.
    pub const LLAMA_3_1: Self =
        Self { factor: 8.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8192 };

    /// All frequencies divided by `factor` (position interpolation, Chen et al., arXiv:2306.15595): every wavelength is
    /// long.
    pub const fn linear(factor: f64) -> Self {
        let all = f64::INFINITY;
        Self { factor, low_frequency_factor: all, high_frequency_factor: all, original_positions: 0 }
    }

    fn scaled(&self, frequency: f64) -> f64 {
        // Number of wavelengths in the original context.
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
