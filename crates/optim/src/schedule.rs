//! The learning rate as a function of the step.

use std::f64::consts::PI;

/// How the learning rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Decay {
    /// Not at all.
    #[default]
    None,
    /// Along a straight line.
    Linear,
    /// Along half a cosine wave.
    Cosine,
}

/// Linear warm-up, then decay.
///
/// Steps are counted from 1. With `w` warm-up steps and decay steps `d`, the factor on `base` is
///
/// - `step / w` for steps up to `w`: the first step already moves, step `w` has the full rate;
/// - `f + (1 - f)·shape(p)` up to step `d`, where `f = min_lr_factor` and `p = (step - 1 - w) / (d - w)`: step `w + 1`
///   has the full rate, and step `d` is one short of the floor, so that no step of a run is spent at a rate of 0;
/// - `f` after step `d`.
///
/// `d` counts from the start of training, warm-up included. With [`Decay::None`] the rate stays at `base`.
///
/// ```
/// use meshwork_optim::{Decay, LrSchedule};
///
/// let schedule =
///     LrSchedule { base: 1.0, warmup_steps: 2, decay: Decay::Linear, decay_steps: 6, min_lr_factor: 0.0 };
/// let rates: Vec<f64> = (1..=7).map(|step| schedule.lr(step)).collect();
/// assert_eq!(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    /// The full learning rate.
    pub base: f64,
    /// Number of steps of the warm-up; 0 = none.
    pub warmup_steps: u64,
    /// Shape of the decay.
    pub decay: Decay,
    /// The step after which the rate stays at its floor.
    pub decay_steps: u64,
    /// The floor, as a share of `base`.
    pub min_lr_factor: f64,
}

impl LrSchedule {
    /// The learning rate of `step`, counted from 1.
    #[must_use]
    pub fn lr(&self, step: u64) -> f64 {
        self.base * self.factor(step)
    }

    fn factor(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            // Step 0 does not exist; its rate is 0 rather than 0/0.
            return step as f64 / self.warmup_steps.max(1) as f64;
        }
        let floor = self.min_lr_factor;
        let past = (step - 1).saturating_sub(self.warmup_steps);
        let progress = past as f64 / self.decay_steps.saturating_sub(self.warmup_steps) as f64;
        let shape = match self.decay {
            Decay::None => return 1.0,
            _ if step > self.decay_steps => return floor,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        };
        floor + (1.0 - floor) * shape
    }
}
