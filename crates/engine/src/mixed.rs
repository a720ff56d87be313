//! Mixed precision (Micikevicius et al., "Mixed Precision Training", ICLR 2018): weights, activations and gradients are
//! stored and sent in 16 bits, every operation computes in f32, and the optimizer keeps the weights in f32.
//!
//! Small gradients would become zeros in f16. So the loss is multiplied by a scale before backward, and gradients are
//! divided by it in the update. A dynamic scale is halved whenever a gradient overflows, and that step changes no
//! weight; after so many steps without one it is doubled. The norm of a step is summed over the world, so all ranks
//! skip the same steps.

use crate::prelude::*;
use meshwork_tensor::Widened;
use meshwork_tensor::tape::HalfType;

/// Mixed precision: the values that are stored in 16 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MixedPrecision {
    /// The type of weights, activations and their gradients.
    pub dtype: HalfType,
    /// Whether gradients of weights are added up over micro-batches and reduced over ranks in that type too; else in
    /// f32.
    pub reduce_in_half: bool,
    /// The factor of the loss before backward.
    pub loss_scale: LossScale,
}

/// The factor of the loss before backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// The same number in all steps: 1 for bf16, which has the range of f32.
    Fixed(f64),
    /// A power of two that follows the gradients.
    Dynamic {
        /// The scale of the first step.
        initial: f64,
        /// Steps without overflow after which it is doubled.
        growth_interval: u64,
    },
}

impl LossScale {
    /// The scale below which a dynamic scale is not halved: a loss that still overflows there does so for another
    /// reason.
    pub const LEAST: f64 = 1.0 / 65_536.0;
    /// The scale above which a dynamic scale is not doubled.
    pub const LARGEST: f64 = (1u64 << 32) as f64;
}

impl MixedPrecision {
    /// A device that computes on values in 16 bits, where anything is stored so.
    pub(crate) fn device(of: Option<Self>, device: Arc<dyn Device>) -> Arc<dyn Device> {
        if of.is_some() { Widened::device(device) } else { device }
    }

    /// The type in which gradients of weights are added up and reduced.
    pub(crate) fn reduced_in(of: Option<Self>) -> DType {
        of.filter(|of| of.reduce_in_half).map_or(DType::F32, |of| of.dtype.dtype())
    }
}

/// The loss scale of a run, step by step. Every rank has the same.
///
/// Some schedules begin a step before the last one is certain, and such a step takes the scale that it would have if
/// the last one did not overflow. So that all schedules have the same scales, a step that completes an interval doubles
/// not the scale of the next step but the scale of the step behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scaler {
    /// The scale of the step behind the last one that is certain.
    scale: f64,
    /// Steps without overflow since it was changed. A whole interval of them doubles the scale of the step behind that.
    clean: u64,
    /// The number of the last step that is certain.
    pub certain: u64,
    /// `None`: the scale never changes.
    growth_interval: Option<u64>,
}

impl Scaler {
    pub fn new(of: Option<MixedPrecision>) -> Self {
        match of.map(|of| of.loss_scale) {
            None => Self { scale: 1.0, clean: 0, certain: 0, growth_interval: None },
            Some(LossScale::Fixed(scale)) => Self { scale, clean: 0, certain: 0, growth_interval: None },
            Some(LossScale::Dynamic { initial, growth_interval }) => {
                Self { scale: initial, clean: 0, certain: 0, growth_interval: Some(growth_interval) }
            }
        }
    }

    /// The scale of the step after `before` steps.
    pub fn scale(&self, before: u64) -> f64 {
        if before > self.certain { self.next().0 } else { self.scale }
    }

    /// Scale and clean steps behind the next step, if that does not overflow, which is then the first of these.
    fn next(&self) -> (f64, u64) {
        match self.growth_interval {
            Some(interval) if self.clean >= interval => ((2.0 * self.scale).min(LossScale::LARGEST), 0),
            _ => (self.scale, self.clean),
        }
    }

    /// Takes note of the step of this number, from 1, which was computed with `scale`. Returns whether the step is
    /// skipped, because a gradient overflowed; `false` too where no smaller scale is left, so that the step is an
    /// error.
    pub fn skips(&mut self, step: u64, scale: f64, overflowed: bool) -> bool {
        self.certain = step;
        if self.growth_interval.is_none() {
            return false;
        }
        if overflowed {
            if scale <= LossScale::LEAST {
                return false;
            }
            (self.scale, self.clean) = (scale / 2.0, 0);
            return true;
        }
        let (scale, clean) = self.next();
        (self.scale, self.clean) = (scale, clean + 1);
        false
    }

    /// Scale and clean steps, for a checkpoint.
    pub fn state(&self) -> [f32; 2] {
        [self.scale as f32, self.clean as f32]
    }

    /// Continues from a checkpoint of this many steps.
    pub fn load(&mut self, steps: u64, [scale, clean]: [f32; 2]) {
        (self.scale, self.clean, self.certain) = (f64::from(scale), clean as u64, steps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaler(initial: f64, growth_interval: u64) -> Scaler {
        let loss_scale = LossScale::Dynamic { initial, growth_interval };
        Scaler::new(Some(MixedPrecision { dtype: HalfType::F16, reduce_in_half: false, loss_scale }))
    }

    #[test]
    fn a_scale_is_halved_by_overflow_and_doubled_after_clean_steps() {
        let mut scaler = scaler(1024.0, 2);
        // Of each step: whether it overflows, the scale of the next step, and of the step after it if the next one
        // does not overflow.
        let steps = [
            (true, 512.0, 512.0),
            (false, 512.0, 512.0),
            (true, 256.0, 256.0),
            (false, 256.0, 256.0),
            (false, 256.0, 512.0),
            (false, 512.0, 512.0),
            (false, 512.0, 1024.0),
            (true, 256.0, 256.0),
        ];
        for (step, (overflowed, next, behind)) in (1..).zip(steps) {
            assert_eq!(scaler.skips(step, scaler.scale(step - 1), overflowed), overflowed);
            assert_eq!((scaler.scale(step), scaler.scale(step + 1)), (next, behind), "after step {step}");
        }
        let mut resumed = self::scaler(1.0, 2);
        resumed.load(8, scaler.state());
        assert_eq!(resumed, scaler);
    }

    #[test]
    fn overflow_at_the_least_scale_is_not_skipped() {
        let mut scaler = scaler(LossScale::LEAST, 10);
        assert!(!scaler.skips(1, LossScale::LEAST, true));
        assert_eq!(scaler.scale(1), LossScale::LEAST);
    }
}
