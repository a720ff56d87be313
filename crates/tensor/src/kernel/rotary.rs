//! Rotary position embeddings (Su et al., arXiv:2104.09864): parameters and frequencies.

use std::f64::consts::TAU;

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

/// Frequencies scaled for sequences longer than the `original_positions` with which a model was first trained.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a few of them exist, and a copy needs no allocation")]
pub enum RotaryScaling {
    /// All frequencies divided by a factor: position interpolation (Chen et al., arXiv:2306.15595).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// As published with Llama 3.1. Frequencies with a short wavelength, compared with the original context, do not
    /// change; frequencies with a long wavelength are divided by `factor`; between them they are interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// A wavelength above the original context divided by this is long.
        low_frequency_factor: f64,
        /// A wavelength below the original context divided by this is short.
        high_frequency_factor: f64,
        /// Positions of the original context.
        original_positions: usize,
    },
    /// A larger base where a sequence is longer than the original context (dynamic NTK).
    Dynamic {
        /// How fast the base grows with the length.
        factor: f64,
        /// Positions of the original context.
        original_positions: usize,
        /// Tokens of a sequence; up to the original context nothing is scaled.
        length: usize,
    },
    /// YaRN.
    Yarn(Yarn),
    /// LongRoPE.
    LongRope(LongRope),
}

/// YaRN (Peng et al., arXiv:2309.00071, sections 3.2 to 3.4): pairs that turn more than `beta_fast` times in the
/// original context keep their frequencies, those that turn less than `beta_slow` times have them divided by `factor`,
/// and between them lies a ramp over the pairs. What turns is scaled too, which changes the temperature of the softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Turns in the original context of the pair at which the ramp begins.
    pub beta_fast: f64,
    /// Turns in the original context of the pair at which the ramp ends.
    pub beta_slow: f64,
    /// Whether the ramp begins and ends at whole pairs.
    pub truncate: bool,
    /// Positions of the original context.
    pub original_positions: usize,
    /// The weight of `log(factor)` in the scale of what turns, if `mscale_all_dim` is given too. `None`: 1.
    pub mscale: Option<f64>,
    /// The same in the scale of whole queries and keys, by which that of what turns is divided.
    pub mscale_all_dim: Option<f64>,
    /// The scale of what turns, if it does not follow from the others.
    pub attention_factor: Option<f64>,
}

/// LongRoPE (Ding et al., arXiv:2402.13753): each pair's frequency has a divisor of its own, one for sequences within
/// the original context and another for longer ones, and what turns is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongRope {
    /// The divisors in sequences within the original context.
    pub short: Divisors,
    /// The divisors in longer sequences.
    pub long: Divisors,
    /// Positions of the original context.
    pub original_positions: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// The scale of what turns.
    pub attention_factor: f64,
}

/// A divisor for each pair of features, of at most [`Divisors::MAX`] pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divisors {
    all: [f32; Self::MAX],
    pairs: usize,
}

impl Divisors {
    /// The pairs of heads of 128 features.
    pub const MAX: usize = 64;

    /// These divisors, one for each pair; `None` if they are too many.
    pub fn new(divisors: &[f32]) -> Option<Self> {
        let mut all = [1.0; Self::MAX];
        all.get_mut(..divisors.len())?.copy_from_slice(divisors);
        Some(Self { all, pairs: divisors.len() })
    }

    /// The divisors, one for each pair.
    pub fn all(&self) -> &[f32] {
        &self.all[..self.pairs]
    }
}

impl Default for Divisors {
    /// None.
    fn default() -> Self {
        Self { all: [1.0; Self::MAX], pairs: 0 }
    }
}

impl Rotary {
    /// Unscaled frequencies with this base.
    pub const fn new(theta: f64) -> Self {
        Self { theta, scaling: None, features: None }
    }

    /// The same for sequences of so many tokens: some kinds of scaling depend on it.
    #[must_use]
    pub fn of_length(self, length: usize) -> Self {
        let scaling = self.scaling.map(|scaling| match scaling {
            RotaryScaling::Dynamic { factor, original_positions, .. } => {
                RotaryScaling::Dynamic { factor, original_positions, length }
            }
            RotaryScaling::LongRope(of) => RotaryScaling::LongRope(LongRope { length, ..of }),
            other => other,
        });
        Self { scaling, ..self }
    }

    /// Radians per position for one of the `head_dim / 2` pairs of features.
    pub fn frequency(&self, pair: usize, head_dim: usize) -> f64 {
        let features = self.features.unwrap_or(head_dim);
        if 2 * pair >= features {
            return 0.0;
        }
        let of_base = |theta: f64| theta.powf(-2.0 * pair as f64 / features as f64);
        let frequency = of_base(self.theta);
        match self.scaling {
            None => frequency,
            Some(RotaryScaling::Linear { factor }) => frequency / factor,
            Some(RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_positions }) => {
                // Number of wavelengths in the original context.
                let waves = original_positions as f64 * frequency / TAU;
                let share = (waves - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
                mixed(frequency, factor, share)
            }
            Some(RotaryScaling::Dynamic { factor, original_positions, length }) => {
                let longer = length.max(original_positions) as f64 / original_positions as f64;
                let width = features as f64;
                of_base(self.theta * (factor * longer - (factor - 1.0)).powf(width / (width - 2.0)))
            }
            Some(RotaryScaling::Yarn(of)) => mixed(frequency, of.factor, 1.0 - of.ramp(pair, features, self.theta)),
            Some(RotaryScaling::LongRope(of)) => {
                frequency / of.divisors().all().get(pair).map_or(1.0, |&divisor| f64::from(divisor))
            }
        }
    }

    /// The scale of the features that turn.
    pub fn amplitude(&self) -> f64 {
        match self.scaling {
            Some(RotaryScaling::Yarn(of)) => of.amplitude(),
            Some(RotaryScaling::LongRope(of)) => of.attention_factor,
            _ => 1.0,
        }
    }

    /// The cosines of a head's `head_dim / 2` pairs at each of the first `positions` and then their sines, times the
    /// [amplitude](Self::amplitude) where they turn: `[positions, 2, head_dim / 2]`.
    pub fn table(&self, positions: usize, head_dim: usize) -> impl Iterator<Item = f64> {
        let turning = self.features.unwrap_or(head_dim) / 2;
        let amplitude = self.amplitude();
        let pairs: Vec<(f64, f64)> = (0..head_dim / 2)
            .map(|pair| (self.frequency(pair, head_dim), if pair < turning { amplitude } else { 1.0 }))
            .collect();
        (0..positions).flat_map(move |position| {
            let of = |turn: fn(f64) -> f64| {
                pairs
                    .iter()
                    .map(move |(frequency, scale)| scale * turn(position as f64 * frequency))
                    .collect::<Vec<_>>()
            };
            of(f64::cos).into_iter().chain(of(f64::sin))
        })
    }

    /// Numbers in which two rotary embeddings differ, by name.
    pub fn scalars(&self) -> Vec<(&'static str, f64)> {
        let features = self.features.map(|features| ("features", features as f64));
        let scaling = match self.scaling {
            None => vec![],
            Some(RotaryScaling::Linear { factor }) => vec![("factor", factor)],
            Some(RotaryScaling::Llama3 { factor, original_positions, .. }) => {
                vec![("factor", factor), ("positions", original_positions as f64)]
            }
            Some(RotaryScaling::Dynamic { factor, original_positions, length }) => {
                vec![("factor", factor), ("positions", original_positions as f64), ("length", length as f64)]
            }
            Some(RotaryScaling::Yarn(of)) => {
                vec![("factor", of.factor), ("positions", of.original_positions as f64), ("amplitude", of.amplitude())]
            }
            Some(RotaryScaling::LongRope(of)) => vec![
                ("positions", of.original_positions as f64),
                ("length", of.length as f64),
                ("amplitude", of.attention_factor),
            ],
        };
        std::iter::once(("theta", self.theta)).chain(features).chain(scaling).collect()
    }
}

/// A frequency of which this share, from 0 to 1, stays, and the rest is divided by `factor`.
fn mixed(frequency: f64, factor: f64, share: f64) -> f64 {
    if share <= 0.0 {
        frequency / factor
    } else if share >= 1.0 {
        frequency
    } else {
        (1.0 - share) * frequency / factor + share * frequency
    }
}

impl RotaryScaling {
    /// The scaling of Llama 3.1.
    pub const LLAMA_3_1: Self =
        Self::Llama3 { factor: 8.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8192 };
}

impl Yarn {
    /// How far a pair lies on the ramp: 0 before it, 1 behind it.
    fn ramp(&self, pair: usize, features: usize, theta: f64) -> f64 {
        let width = features as f64;
        // The pair that turns so many times in the original context.
        let of_turns = |turns: f64| width * (self.original_positions as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (first, last) = (of_turns(self.beta_fast), of_turns(self.beta_slow));
        let (first, last) = if self.truncate { (first.floor(), last.ceil()) } else { (first, last) };
        let (first, last) = (first.max(0.0), last.min(width - 1.0));
        // As published: a ramp of no length is a step.
        let last = if first == last { last + 0.001 } else { last };
        ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0)
    }

    fn scale(&self, weight: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * weight * self.factor.ln() + 1.0 }
    }

    /// The scale of the features that turn.
    pub fn amplitude(&self) -> f64 {
        self.attention_factor.unwrap_or(match (self.mscale, self.mscale_all_dim) {
            (Some(turning), Some(all)) => self.scale(turning) / self.scale(all),
            _ => self.scale(1.0),
        })
    }

    /// The factor of scores in multi-head latent attention: both queries and keys have the scale of whole heads.
    pub fn score_factor(&self) -> f64 {
        self.mscale_all_dim.map_or(1.0, |all| self.scale(all).powi(2))
    }
}

impl LongRope {
    /// The divisors for the length of its sequences.
    pub fn divisors(&self) -> &Divisors {
        if self.length > self.original_positions { &self.long } else { &self.short }
    }
}
