//! Initial values.

use crate::random;
use std::ops::Range;

/// Initial values, drawn for the whole parameter from a generator keyed by its name and the global element, then
/// sliced: any mesh starts from the same model, and no rank needs the whole parameter.
///
/// A number stands for normal values of that standard deviation.
///
/// ```
/// use meshwork_tensor::Init;
///
/// assert_eq!(Init::from(0.02), Init::Normal { std: 0.02 });
/// // For a linear layer of 300 features before a rectifier, and between activations that are linear near zero.
/// assert_eq!(Init::kaiming_uniform(300), Init::Uniform { bound: (6.0_f32 / 300.0).sqrt() });
/// assert_eq!(Init::xavier_normal([300, 100]), Init::Normal { std: (2.0_f32 / 400.0).sqrt() });
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// The same, drawn again where it lies more than two standard deviations from 0.
    TruncatedNormal {
        /// Standard deviation of the normal values that are drawn; of those that stay it is 0.88 of that.
        std: f32,
    },
    /// Uniform between -bound and bound.
    Uniform {
        /// The largest magnitude.
        bound: f32,
    },
    /// The same number everywhere.
    Constant {
        /// The number.
        value: f32,
    },
    /// All zero.
    Zeros,
    /// All one.
    Ones,
}

impl From<f32> for Init {
    fn from(std: f32) -> Self {
        Self::Normal { std }
    }
}

impl Init {
    /// Normal with variance 2/(inputs + outputs), which preserves the scale of values and of gradients where the
    /// activation is linear near zero (Glorot and Bengio, 2010): PyTorch's `xavier_normal_`.
    pub fn xavier_normal(inputs_outputs: [usize; 2]) -> Self {
        Self::Normal { std: (2.0 / inputs_outputs.iter().sum::<usize>() as f32).sqrt() }
    }

    /// The same variance of uniform values: PyTorch's `xavier_uniform_`.
    pub fn xavier_uniform(inputs_outputs: [usize; 2]) -> Self {
        Self::Uniform { bound: (6.0 / inputs_outputs.iter().sum::<usize>() as f32).sqrt() }
    }

    /// Normal with variance 2/inputs, which preserves the scale of values before a rectifier (He et al., 2015):
    /// PyTorch's `kaiming_normal_`. `inputs` are the terms of each sum: the input features of a linear layer, and of a
    /// convolution the window times its channels.
    pub fn kaiming_normal(inputs: usize) -> Self {
        Self::Normal { std: (2.0 / inputs as f32).sqrt() }
    }

    /// The same variance of uniform values: PyTorch's `kaiming_uniform_`. (`torch.nn.Linear` begins with uniform
    /// values of a sixth of this variance, whose bound is 1/√inputs.)
    pub fn kaiming_uniform(inputs: usize) -> Self {
        Self::Uniform { bound: (6.0 / inputs as f32).sqrt() }
    }

    /// Draws the elements from `start` on of the parameter of this name.
    pub(super) fn fill(self, seed: u64, name: &str, start: u64, values: &mut [f32]) {
        let key = random::key(seed, name);
        match self {
            Self::Zeros => values.fill(0.0),
            Self::Ones => values.fill(1.0),
            Self::Constant { value } => values.fill(value),
            Self::Normal { std } => {
                random::fill_normal(key, start, values);
                values.iter_mut().for_each(|value| *value *= std);
            }
            Self::TruncatedNormal { std } => {
                random::fill_normal(key, start, values);
                let mut left: Vec<Range<usize>> = outside(values, std::iter::once(0..values.len()));
                for again in 1.. {
                    if left.is_empty() {
                        break;
                    }
                    let key = random::key(seed, &format!("{name}, drawn again {again}"));
                    for range in &left {
                        random::fill_normal(key, start + range.start as u64, &mut values[range.clone()]);
                    }
                    left = outside(values, left.into_iter());
                }
                values.iter_mut().for_each(|value| *value *= std);
            }
            Self::Uniform { bound } => {
                random::fill_uniform(key, start, values);
                values.iter_mut().for_each(|value| *value = bound * (2.0 * *value - 1.0));
            }
        }
    }
}

/// The elements of these ranges, one each, that lie more than 2 from 0.
fn outside(values: &[f32], ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    ranges.flatten().filter(|&at| values[at].abs() > 2.0).map(|at| at..at + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean, variance and the largest magnitude of many values, as they are defined.
    #[test]
    fn values_have_the_moments_of_their_kind() {
        // The variance of a normal distribution between -2 and 2 is 1 - 4 φ(2)/(2 Φ(2) - 1).
        let truncated = 0.773_741_3;
        let kinds: [(Init, f64, f32); 7] = [
            (Init::Normal { std: 0.5 }, 0.25, 3.0),
            (Init::TruncatedNormal { std: 0.5 }, 0.25 * truncated, 1.0),
            (Init::Uniform { bound: 0.6 }, 0.12, 0.6),
            (Init::kaiming_uniform(50), 0.04, 0.35),
            (Init::kaiming_normal(50), 0.04, 1.2),
            (Init::xavier_uniform([30, 70]), 0.02, 0.25),
            (Init::xavier_normal([30, 70]), 0.02, 0.85),
        ];
        for (init, variance, most) in kinds {
            let mut values = vec![9.0; 100_000];
            init.fill(3, "w", 0, &mut values);
            let mean = |f: &dyn Fn(f64) -> f64| values.iter().map(|&x| f(x.into())).sum::<f64>() / values.len() as f64;
            let (mean, square) = (mean(&|x| x), mean(&|x| x * x));
            assert!(mean.abs() < 0.01 * variance.sqrt(), "{init:?}: mean {mean}");
            assert!((square / variance - 1.0).abs() < 0.015, "{init:?}: variance {square}");
            let largest = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            assert!(largest <= most && largest > 0.65 * most, "{init:?}: {largest}");
        }
        for (init, value) in [(Init::Constant { value: -3.5 }, -3.5), (Init::Ones, 1.0), (Init::Zeros, 0.0)] {
            let mut values = [9.0; 3];
            init.fill(3, "w", 0, &mut values);
            assert_eq!(values, [value; 3]);
        }
    }

    /// An element is a function of the name and its place, also where it is drawn again.
    #[test]
    fn a_part_has_the_values_of_the_whole() {
        for init in [Init::Normal { std: 1.0 }, Init::TruncatedNormal { std: 1.0 }, Init::Uniform { bound: 1.0 }] {
            let (mut whole, mut part) = (vec![0.0; 1000], vec![0.0; 700]);
            init.fill(1, "w", 5, &mut whole);
            init.fill(1, "w", 205, &mut part);
            assert_eq!(part[..], whole[200..900], "{init:?}");
        }
    }
}
