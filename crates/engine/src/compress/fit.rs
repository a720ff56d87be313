//! Which settings of compression go with each other and with the rest of a plan, whatever the model.

use super::settings::{Compress, NOTHING, Setting};
use crate::ZeroStage;
use crate::prelude::*;
use meshwork_compress::{Choice, Feedback, Scheme, Sparse};

/// The parts of a plan that decide whether compression fits.
#[derive(Clone, Copy, Debug)]
pub struct Around {
    /// Whether every mesh gives the bits of one rank.
    pub canonical: bool,
    /// Whether there are virtual cuts.
    pub simulates: bool,
    /// The state that data-parallel ranks share out.
    pub zero: ZeroStage,
}

/// A setting that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// The setting.
    pub setting: Setting,
    /// Why it does not fit.
    pub problem: String,
    /// A valid setting.
    pub valid: String,
}

fn unfit(setting: Setting, problem: impl Into<String>, valid: &str) -> Unfit {
    Unfit { setting, problem: problem.into(), valid: valid.to_owned() }
}

impl Compress {
    /// Every setting that does not go with the others or with the rest of a plan, whatever the model.
    pub fn unfit(&self, around: Around) -> Vec<Unfit> {
        let of_schemes = self.schemes().flat_map(|(setting, scheme)| {
            in_canonical_numerics(setting, around).into_iter().chain(of_scheme(setting, scheme, around))
        });
        of_schemes.chain(self.unfit_indices()).chain(self.unfit_aqsgd()).chain(self.unfit_feedback(around)).collect()
    }

    /// Refuses settings that do not go with the rest of the plan, whatever the model.
    pub(crate) fn require_fit(&self, plan: &Plan) -> Result<(), PlanError> {
        let around = Around {
            canonical: plan.blocks().is_some(),
            simulates: !plan.virtual_cuts.is_empty(),
            zero: plan.zero.stage,
        };
        let Some(Unfit { setting, problem, valid }) = self.unfit(around).into_iter().next() else { return Ok(()) };
        let scheme = match setting {
            Setting::Activations | Setting::Aqsgd => self.activations.to_string(),
            Setting::ActivationGradients => self.activation_gradients.to_string(),
            Setting::Gradients => self.gradients.to_string(),
            Setting::Weights => self.weights.to_string(),
            Setting::Dispatch => self.dispatch.to_string(),
            Setting::DispatchGradients => self.dispatch_gradients.to_string(),
            Setting::Feedback => self.feedback.to_string(),
            Setting::ShareIndices => self.share_indices.to_string(),
        };
        Err(PlanError::Compress { place: setting.name(), scheme, problem: format!("{problem}; {valid}") })
    }

    fn unfit_indices(&self) -> Option<Unfit> {
        let chosen = |scheme| match scheme {
            Scheme::Sparse(Sparse { choice: choice @ Choice::Largest(_), keep, .. }) => Some((choice, keep)),
            _ => None,
        };
        let [activations, gradients] = [self.activations, self.activation_gradients].map(chosen);
        if !self.share_indices || (activations.is_some() && activations == gradients) {
            return None;
        }
        let problem = format!(
            "gradients of activations have the indices of activations, and these are {}, their gradients {}",
            self.activations, self.activation_gradients
        );
        let valid = "use topk of one fraction and the same parts for both, as topk:0.1 and topk:0.1+quant:8, or indices of their own";
        Some(unfit(Setting::ShareIndices, problem, valid))
    }

    fn unfit_aqsgd(&self) -> impl Iterator<Item = Unfit> {
        let conflicts = [
            (self.activations == NOTHING, "activations are not compressed", "compress them, or turn aqsgd off"),
            (self.aqsgd == Some(0), "it keeps activations of no samples", "say how many samples come again"),
            (self.share_indices, "differences have other indices than gradients can use", "do not share indices"),
            (
                self.feedback != Feedback::None,
                "it brings back what activations lose, and feedback would do so once more",
                "use no feedback, or no aqsgd",
            ),
        ];
        let on = self.aqsgd.is_some();
        let conflicts = conflicts.into_iter().filter(move |(conflict, ..)| on && *conflict);
        conflicts.map(|(_, problem, valid)| unfit(Setting::Aqsgd, problem, valid))
    }

    fn unfit_feedback(&self, around: Around) -> Vec<Unfit> {
        let refuse = |problem, valid| unfit(Setting::Feedback, problem, valid);
        if self.feedback == Feedback::None {
            return Vec::new();
        }
        if !self.is_some() {
            let problem = "brings back what compression loses, and nothing is compressed";
            return vec![refuse(problem, "compress something, or use none")];
        }
        if self.schemes().all(|(setting, _)| setting == Setting::Weights || setting.is_of_experts()) {
            let problem = "brings back what compression loses, and gathers of weights lose nothing for good: their owners keep them; nor do \
                           tokens of experts come again";
            return vec![refuse(problem, "use none, or compress activations or gradients too")];
        }
        let (estimates, mut all) = (self.feedback.keeps_estimate(), Vec::new());
        if matches!(self.gradients, Scheme::PowerSgd(_)) && estimates {
            let problem =
                "powersgd makes factors of the sum of all ranks, which none has an estimate of its own part of";
            all.push(refuse(problem, "use ef"));
        }
        if self.gradients != NOTHING && estimates && around.zero > ZeroStage::Off {
            all.push(refuse("ranks that keep slices of a sum have no estimate of it", "use ef, or ZeRO stage 0"));
        }
        all
    }
}

/// Canonical numerics promise the bits of one rank, which sends nothing.
fn in_canonical_numerics(setting: Setting, around: Around) -> Option<Unfit> {
    let fast = "use fast numerics, or none";
    let (problem, valid) = match setting {
        _ if !around.canonical => return None,
        Setting::Gradients => {
            ("canonical numerics promise the bits of one rank, which has nobody to send compressed values to", fast)
        }
        Setting::Weights => {
            ("canonical numerics promise the bits of one rank, which has all weights as they are", fast)
        }
        setting if setting.is_of_experts() => {
            ("canonical numerics promise the bits of one rank, which has all experts and sends no tokens", fast)
        }
        _ if around.simulates => return None,
        _ => (
            "canonical numerics promise the bits of one rank, which has nobody to send compressed values to: every mesh must \
             simulate the same cuts",
            "name them as virtual cuts, use fast numerics, or none",
        ),
    };
    Some(unfit(setting, problem, valid))
}

/// Schemes that would lose the meaning of a value.
fn of_scheme(setting: Setting, scheme: Scheme, around: Around) -> Option<Unfit> {
    let quantised = "use quant, bf16, fp8 or sign, as quant:8/block256";
    let drawn = |sparse: Sparse| matches!(sparse.choice, Choice::Random { .. });
    let (problem, valid) = match (setting, scheme) {
        (Setting::Weights, Scheme::Sparse(_)) => ("a weight that is not sent would be zero, whatever it is", quantised),
        (Setting::Weights, Scheme::PowerSgd(_)) => {
            ("factors of few columns are far from a weight, and nothing brings back the rest", quantised)
        }
        (Setting::Weights, Scheme::Values(_)) if around.zero < ZeroStage::Weights => (
            "ranks gather no weights to use them below ZeRO stage 3: each keeps all of them",
            "use ZeRO stage 3, or none",
        ),
        (setting, Scheme::Sparse(sparse)) if setting.is_of_experts() && drawn(sparse) => (
            "it draws elements of all tokens of a message together, and each token is compressed by itself",
            "use topk, or quant, bf16, fp8 or sign",
        ),
        (setting, Scheme::PowerSgd(_)) if setting != Setting::Gradients => (
            "the factors of a message start from those of the one before, and samples have nothing in common",
            "use quant, topk, randk, sign, bf16 or fp8",
        ),
        _ => return None,
    };
    Some(unfit(setting, problem, valid))
}
