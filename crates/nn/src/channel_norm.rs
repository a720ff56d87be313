//! Norms over channels: batch norm (Ioffe and Szegedy, 2015) and group norm (Wu and He, 2018).

use crate::norm::Affine;
use meshwork_tensor::op::Moments;
use meshwork_tensor::param::{StatisticId, StatisticRule};
use meshwork_tensor::tape::Mode;
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y = (x - mean) / √(var + eps) · weight + bias` per channel of `[n, h, w, channels]`, the bias optional.
///
/// In training, mean and variance are taken over the tape's samples: of one micro-batch on one rank. In evaluation they
/// are moving averages over whole mini-batches, kept in two buffers that are updated once a step (GPipe, section 2).
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm2d {
    affine: Affine,
    running: [ParamId; 2],
    statistic: StatisticId,
}

impl BatchNorm2d {
    /// Added to the variance.
    pub const EPS: f64 = 1e-5;
    /// Share of a new mini-batch in the moving averages.
    pub const MOMENTUM: f64 = 0.1;

    /// Declares `{name}.weight` (ones), with a bias `{name}.bias` (zeros), and the buffers `{name}.running_mean`
    /// (zeros) and `{name}.running_var` (ones).
    pub fn new(params: &mut Declarations, name: &str, channels: usize, bias: bool) -> Result<Self> {
        let mut buffer = |part: &str, init| {
            params.declare(format!("{name}.{part}"), &[channels], Placement::replicated(), Role::Buffer, init)
        };
        let running = [buffer("running_mean", Init::Zeros)?, buffer("running_var", Init::Ones)?];
        let affine = Affine::new(params, name, channels, bias)?;
        let statistic = params.declare_statistic(running.to_vec(), Moving { momentum: Self::MOMENTUM });
        Ok(Self { affine, running, statistic })
    }

    /// `x [n, h, w, channels]` → the same shape. In training, the statistics of the samples are noted on the tape.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let (weight, bias) = self.affine.read(tape)?;
        match tape.mode() {
            Mode::Train => {
                let (y, moments) = x.batch_norm(&weight, bias.as_ref(), Self::EPS)?;
                let members: usize = x.shape().iter().take(3).product();
                tape.note(self.statistic, members as f64, &[&moments.mean, &moments.variance]);
                Ok(y)
            }
            Mode::Evaluate => {
                let [mean, variance] = [tape.param(self.running[0])?, tape.param(self.running[1])?];
                let moments = Moments { mean: mean.into_tensor(), variance: variance.into_tensor() };
                x.batch_norm_with(&weight, bias.as_ref(), &moments, Self::EPS)
            }
        }
    }
}

/// Moving averages of mean and variance. The terms of a note are the number of elements of a mean, and per channel the
/// sum of its elements and the sum of their squares.
#[derive(Debug)]
struct Moving {
    momentum: f64,
}

impl StatisticRule for Moving {
    fn terms(&self, members: f64, values: &[f32]) -> Vec<f64> {
        let (means, variances) = values.split_at(values.len() / 2);
        let means = means.iter().map(|&mean| f64::from(mean));
        let squares =
            means.clone().zip(variances).map(|(mean, &variance)| members * (f64::from(variance) + mean * mean));
        std::iter::once(members).chain(means.clone().map(|mean| members * mean)).chain(squares).collect()
    }

    /// Uses the unbiased variance of the mini-batch, as an estimate of the variance of all data.
    fn update(&self, sums: &[f64], buffers: &mut [Vec<f32>]) {
        let (Some((&n, sums)), [means, variances]) = (sums.split_first(), buffers) else { return };
        let (sums, squares) = sums.split_at(sums.len() / 2);
        for ((mean, variance), (sum, square)) in means.iter_mut().zip(variances).zip(sums.iter().zip(squares)) {
            let new = sum / n;
            let spread = (square / n - new * new).max(0.0) * (n / (n - 1.0).max(1.0));
            *mean += (self.momentum * (new - f64::from(*mean))) as f32;
            *variance += (self.momentum * (spread - f64::from(*variance))) as f32;
        }
    }
}

/// The same equation, with mean and variance over each sample's pixels and a group of channels. It is the same in
/// training and evaluation and does not depend on the micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    affine: Affine,
    groups: usize,
}

impl GroupNorm {
    /// Added to the variance.
    pub const EPS: f64 = 1e-5;

    /// Declares `{name}.weight` (ones) and, with a bias, `{name}.bias` (zeros). `groups` must divide `channels`.
    pub fn new(params: &mut Declarations, name: &str, channels: usize, groups: usize, bias: bool) -> Result<Self> {
        Ok(Self { affine: Affine::new(params, name, channels, bias)?, groups })
    }

    /// `x [n, h, w, channels]` → the same shape.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let (weight, bias) = self.affine.read(tape)?;
        x.group_norm(self.groups, &weight, bias.as_ref(), Self::EPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Micro-batches of different sizes give the statistics of the mini-batch.
    #[test]
    fn micro_batches_come_together_as_the_mini_batch() {
        let x = [1.0f32, 4.0, -2.0, 8.0, 0.5, 3.0, 7.0];
        let rule = Moving { momentum: 0.25 };
        let terms = |x: &[f32]| {
            let n = x.len() as f32;
            let mean = x.iter().sum::<f32>() / n;
            let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / n;
            rule.terms(f64::from(n), &[mean, variance])
        };
        let sums: Vec<f64> = terms(&x[3..]).iter().zip(terms(&x[..3])).map(|(a, b)| a + b).collect();
        let mut buffers = [vec![0.0], vec![1.0]];
        rule.update(&sums, &mut buffers);
        let n = x.len() as f64;
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / (n - 1.0);
        assert!((f64::from(buffers[0][0]) - 0.25 * mean).abs() < 1e-6, "{buffers:?}");
        assert!((f64::from(buffers[1][0]) - (0.75 + 0.25 * variance)).abs() < 1e-5, "{buffers:?}");
    }
}
