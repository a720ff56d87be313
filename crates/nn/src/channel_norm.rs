//! Norms over channels: batch norm (Ioffe and Szegedy, 2015) and group norm (Wu and He, 2018).

use crate::Averages;
use meshwork_tensor::tape::Mode;
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// Declares `{name}.weight` (ones) and `{name}.bias` (zeros), per channel.
fn affine(params: &mut Declarations, name: &str, channels: usize) -> Result<[ParamId; 2]> {
    let mut vector = |part: &str, init| {
        params.declare(format!("{name}.{part}"), &[channels], Placement::replicated(), Role::Norm, init)
    };
    Ok([vector("weight", Init::Ones)?, vector("bias", Init::Zeros)?])
}

/// `y = (x - mean) / √(var + eps) · weight + bias` per channel of `[n, h, w, channels]`.
///
/// In training, mean and variance are those of the tape's samples: of one micro-batch on one rank. In evaluation they are
/// the [moving averages](Averages) over whole mini-batches.
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm2d {
    affine: [ParamId; 2],
}

impl BatchNorm2d {
    /// Added to the variance.
    pub const EPS: f64 = 1e-5;

    /// Declares `{name}.weight` (ones) and `{name}.bias` (zeros).
    pub fn new(params: &mut Declarations, name: &str, channels: usize) -> Result<Self> {
        Ok(Self { affine: affine(params, name, channels)? })
    }

    /// `x [n, h, w, channels]`, the same. Training leaves the statistics of the samples in `averages`.
    pub fn forward(&self, tape: &Tape, x: &Var, averages: &mut Averages) -> Result<Var> {
        let [weight, bias] = self.affine;
        let (gamma, beta) = (tape.param(weight)?, tape.param(bias)?);
        match tape.mode() {
            Mode::Train => {
                let (y, moments) = x.batch_norm(&gamma, &beta, Self::EPS)?;
                let members = x.shape().iter().take(3).product();
                averages.note(weight, tape.first_sample(), members, moments);
                Ok(y)
            }
            Mode::Evaluate => {
                let moments = averages.moments(weight, gamma.tensor())?;
                x.batch_norm_with(&gamma, &beta, &moments, Self::EPS)
            }
        }
    }
}

/// The same equation, with mean and variance over each sample's pixels and a group of channels: in training as in
/// evaluation, and whatever the micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    affine: [ParamId; 2],
    groups: usize,
}

impl GroupNorm {
    /// Added to the variance.
    pub const EPS: f64 = 1e-5;

    /// Declares `{name}.weight` (ones) and `{name}.bias` (zeros). `groups` must divide `channels`.
    pub fn new(params: &mut Declarations, name: &str, channels: usize, groups: usize) -> Result<Self> {
        Ok(Self { affine: affine(params, name, channels)?, groups })
    }

    /// `x [n, h, w, channels]`, the same.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let [weight, bias] = self.affine;
        x.group_norm(self.groups, &tape.param(weight)?, &tape.param(bias)?, Self::EPS)
    }
}
