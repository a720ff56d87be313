//! Feedback: the loss of compression, added to later values, as equations on slices.
//!
//! With x the value of a step, C the compressor and c the value that was sent:
//!
//! | feedback | compressed | sender's update | received |
//! |---|---|---|---|
//! | `none` | x | | c |
//! | `ef` (Seide et al. 2014; Karimireddy et al. 2019) | x + e | e ← x + e - c | c |
//! | `ef21` (Richtárik, Sokolov and Fatkhullin 2021) | x - g | g ← g + c | G ← G + c, G |
//! | `ef21m:η` (Fatkhullin, Tyurin and Richtárik 2023) | v ← (1-η) v + η x (at first x), v - g | g ← g + c | G ← G + c, G |
//!
//! e, g and v belong to the sender, G to the receivers. All start at zero.

use crate::{CompressError, Compressor, Result, Shape};
use std::fmt;
use std::ops::DerefMut;
use std::str::FromStr;

/// How the loss of compression is brought back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Feedback {
    /// No feedback.
    None,
    /// Error feedback: the error is added to the next value.
    Ef,
    /// EF21: sends the difference from an estimate that both sides keep.
    Ef21,
    /// EF21 on a moving average.
    Ef21Momentum {
        /// Weight of the new value, above 0 and at most 1.
        eta: f32,
    },
}

impl fmt::Display for Feedback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Feedback::None => f.write_str("none"),
            Feedback::Ef => f.write_str("ef"),
            Feedback::Ef21 => f.write_str("ef21"),
            Feedback::Ef21Momentum { eta } => write!(f, "ef21m:{eta}"),
        }
    }
}

impl FromStr for Feedback {
    type Err = CompressError;

    fn from_str(text: &str) -> Result<Feedback> {
        let eta = |text: &str| text.parse::<f32>().ok().filter(|eta| *eta > 0.0 && *eta <= 1.0);
        match text {
            "none" => Ok(Feedback::None),
            "ef" => Ok(Feedback::Ef),
            "ef21" => Ok(Feedback::Ef21),
            _ => text.strip_prefix("ef21m:").and_then(eta).map(|eta| Feedback::Ef21Momentum { eta }).ok_or_else(|| {
                let problem = "valid are none, ef, ef21 and ef21m:ETA with 0 < ETA <= 1".to_owned();
                CompressError::Feedback { feedback: format!("{text:?}"), scheme: "any scheme".to_owned(), problem }
            }),
        }
    }
}

/// The state of a sender, as vectors `T`. Vectors that a feedback does not use are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sender<T = Vec<f32>> {
    /// e of error feedback.
    pub residual: T,
    /// g of EF21.
    pub estimate: T,
    /// v of EF21-M.
    pub momentum: T,
}

impl<T> Sender<T> {
    /// The names of the states, in the order of [`all`](Self::all).
    pub const NAMES: [&'static str; 3] = ["residual", "estimate", "momentum"];

    /// The states that a feedback may use, in one order.
    pub fn all(&self) -> [&T; 3] {
        [&self.residual, &self.estimate, &self.momentum]
    }

    /// The same, for writing.
    pub fn all_mut(&mut self) -> [&mut T; 3] {
        [&mut self.residual, &mut self.estimate, &mut self.momentum]
    }
}

impl Feedback {
    /// The state of a sender of `len` elements, before its first value.
    pub fn sender(self, len: usize) -> Sender {
        let [residual, estimate, momentum] = self.keeps().map(|kept| vec![0.0; if kept { len } else { 0 }]);
        Sender { residual, estimate, momentum }
    }

    /// Whether it uses each state of a [`Sender`], in the order of `Sender::all`.
    pub fn keeps(self) -> [bool; 3] {
        [self == Feedback::Ef, self.keeps_estimate(), matches!(self, Feedback::Ef21Momentum { .. })]
    }

    /// Whether sender and receivers keep an estimate.
    pub fn keeps_estimate(self) -> bool {
        matches!(self, Feedback::Ef21 | Feedback::Ef21Momentum { .. })
    }

    /// Rejects feedback that would amplify errors instead of compensating for them.
    ///
    /// # Errors
    /// An unbiased scheme that is not known to contract.
    pub fn check(self, compressor: &(impl Compressor + ?Sized), shape: Shape) -> Result<()> {
        let guarantee = compressor.guarantee(shape);
        match self != Feedback::None && guarantee.unbiased && guarantee.contraction().is_none() {
            false => Ok(()),
            true => Err(CompressError::Feedback {
                feedback: self.to_string(),
                scheme: compressor.name(),
                problem: format!(
                    "of {shape} its error may be {:.3} of the value's square, and feedback would amplify it; use no feedback, a scheme that \
                     contracts (randk without /unbiased), more bits or smaller blocks",
                    guarantee.error
                ),
            }),
        }
    }

    /// Writes the value to compress in place of `x` to `out`. `first`: whether it is the first value of this sender.
    pub fn outgoing(self, x: &[f32], first: bool, state: &mut Sender<impl DerefMut<Target = [f32]>>, out: &mut [f32]) {
        let pairs = out.iter_mut().zip(x);
        match self {
            Feedback::None => out.copy_from_slice(x),
            Feedback::Ef => pairs.zip(state.residual.iter()).for_each(|((out, x), e)| *out = x + e),
            Feedback::Ef21 => pairs.zip(state.estimate.iter()).for_each(|((out, x), g)| *out = x - g),
            Feedback::Ef21Momentum { eta } => {
                for (((out, x), g), v) in pairs.zip(state.estimate.iter()).zip(state.momentum.iter_mut()) {
                    *v = if first { *x } else { (1.0 - eta) * *v + eta * x };
                    *out = *v - g;
                }
            }
        }
    }

    /// Updates the states by the value that was sent of `target`, which [`outgoing`](Self::outgoing) gave.
    pub fn sent(self, target: &[f32], sent: &[f32], state: &mut Sender<impl DerefMut<Target = [f32]>>) {
        for ((e, target), sent) in state.residual.iter_mut().zip(target).zip(sent) {
            *e = target - sent;
        }
        state.estimate.iter_mut().zip(sent).for_each(|(g, sent)| *g += sent);
    }

    /// Turns a received value into the value of the step. `estimate` is G, or empty.
    pub fn received(self, estimate: &mut [f32], value: &mut [f32]) {
        for (value, estimate) in value.iter_mut().zip(estimate) {
            *estimate += *value;
            *value = *estimate;
        }
    }
}

/// States of the replicas of a group, for a group of `ranks` replicas: their sum, on which training depends,
/// stays. Old replica i of n goes to new replica ⌊i · ranks / n⌋. Those that meet are added in order; the others start
/// at zero.
///
/// Use it for residuals, estimates and momenta of [`Reduction`](crate::Reduction): the states of kind
/// [`PerReplica`](crate::StateKind::PerReplica).
///
/// # Errors
/// Replicas of different lengths, or no replicas.
pub fn reshard(replicas: &[Vec<f32>], ranks: usize) -> Result<Vec<Vec<f32>>> {
    let len = replicas.first().map_or(0, Vec::len);
    crate::error::require_count("the list of replicas", replicas.len().min(1), 1)?;
    crate::error::require_count("the new number of replicas", ranks.min(1), 1)?;
    let mut new = vec![Vec::new(); ranks];
    for (i, old) in replicas.iter().enumerate() {
        crate::error::require_count("a replica's state", old.len(), len)?;
        let place: &mut Vec<f32> = &mut new[i * ranks / replicas.len()];
        match place.is_empty() {
            true => place.clone_from(old),
            false => place.iter_mut().zip(old).for_each(|(sum, old)| *sum += old),
        }
    }
    new.iter_mut().for_each(|replica| replica.resize(len, 0.0));
    Ok(new)
}
