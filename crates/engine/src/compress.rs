//! What is compressed when it travels between ranks, as plain data.

use crate::{Plan, PlanError, ZeroStage};
use meshwork_compress::{Compressor, Feedback, Scheme, Values};

/// Lossy compression of what ranks send each other. By default nothing is compressed.
///
/// ```
/// use meshwork_engine::{Compress, Plan};
///
/// let plan = Plan {
///     mesh: "pp=4".parse()?,
///     compress: Compress { activations: "topk:0.1".parse()?, activation_gradients: "quant:8".parse()?, ..Compress::default() },
///     ..Plan::default()
/// };
/// assert!(plan.compress.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compress {
    /// Activations between stages. Rows are samples.
    pub activations: Scheme,
    /// Their gradients. Rows are samples.
    pub activation_gradients: Scheme,
    /// Gradients of weights, summed over data-parallel ranks. Each bucket is one value, of one row.
    pub gradients: Scheme,
    /// How what compression lost is brought back, wherever something is compressed.
    pub feedback: Feedback,
    /// The first step that compresses, from 1.
    pub start_step: u64,
}

/// Values as they are.
pub(crate) const NOTHING: Scheme = Scheme::Values(Values::F32);

impl Default for Compress {
    fn default() -> Self {
        Self {
            activations: NOTHING,
            activation_gradients: NOTHING,
            gradients: NOTHING,
            feedback: Feedback::None,
            start_step: 1,
        }
    }
}

impl Compress {
    /// The places that are compressed, with their schemes.
    pub fn places(&self) -> impl Iterator<Item = (&'static str, Scheme)> {
        let all = [
            ("activations", self.activations),
            ("activation gradients", self.activation_gradients),
            ("gradients", self.gradients),
        ];
        all.into_iter().filter(|(_, scheme)| *scheme != NOTHING)
    }

    /// Whether anything is compressed.
    pub fn is_some(&self) -> bool {
        self.places().next().is_some()
    }

    /// Whether a step, from 0, compresses.
    pub(crate) fn includes(&self, step: u64) -> bool {
        step + 1 >= self.start_step
    }

    /// Whether a step, from 0, is the first one that compresses.
    pub(crate) fn begins_at(&self, step: u64) -> bool {
        step + 1 == self.start_step.max(1)
    }

    /// Refuses what does not go with the rest of the plan, whatever the model.
    pub(crate) fn require_fit(&self, plan: &Plan) -> Result<(), PlanError> {
        let refuse = |place, scheme: String, problem: &str| {
            Err(PlanError::Compress { place, scheme, problem: problem.to_owned() })
        };
        let Some((place, scheme)) = self.places().next() else {
            return match self.feedback {
                Feedback::None => Ok(()),
                feedback => refuse(
                    "nothing",
                    feedback.to_string(),
                    "feedback brings back what compression loses: compress something, or use none",
                ),
            };
        };
        if plan.blocks().is_some() {
            let problem = "canonical numerics promise the bits of one rank, which has nobody to send compressed values to; use numerics Fast";
            return refuse(place, scheme.to_string(), problem);
        }
        if let Some((place, scheme)) = self.places().find(|(_, scheme)| matches!(scheme, Scheme::PowerSgd(_))) {
            let problem = match place {
                "gradients" => "gradients are summed in buckets, which are no matrices",
                _ => "the factors of a message start from those of the one before, and samples have nothing in common",
            };
            let problem = format!("{problem}; use quant, topk, randk, sign, bf16 or fp8");
            return refuse(place, scheme.name(), &problem);
        }
        if self.gradients != NOTHING && plan.zero.stage > ZeroStage::Off && self.feedback.keeps_estimate() {
            let problem = "ranks that keep slices of a sum have no estimate of it; use feedback ef, or ZeRO stage 0";
            return refuse("gradients", self.feedback.to_string(), problem);
        }
        let cuts = [self.activations, self.activation_gradients].iter().any(|scheme| *scheme != NOTHING);
        if cuts && self.feedback != Feedback::None && plan.schedule.overlaps_steps() {
            let problem = format!(
                "with feedback {}, and schedule {} begins steps that it may repeat: the states of feedback would count them twice; use \
                 another schedule, or no feedback",
                self.feedback,
                plan.schedule.name()
            );
            return Err(PlanError::Compress { place, scheme: scheme.name(), problem });
        }
        Ok(())
    }
}
