//! What is compressed when it travels between ranks, as plain data.

use crate::{Plan, PlanError, ZeroStage};
use meshwork_compress::{Choice, Feedback, Scheme, Sparse, Values};
use meshwork_pipeline::Direction;
use meshwork_tensor::tape::RowSchemes;

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
    /// Weights, where ranks gather them with ZeRO-3 (ZeRO++, arXiv:2306.10209): what a rank has of each parameter is
    /// one value, of one row. All ranks use what messages restore to; the rank that updates a weight keeps it exactly.
    pub weights: Scheme,
    /// Tokens that ranks exchange to reach their experts, and the results of these. Each token is one value.
    pub dispatch: Scheme,
    /// The gradients of both, likewise.
    pub dispatch_gradients: Scheme,
    /// Whether gradients of activations are sent at the indices of the activations, without indices of their own
    /// (Rudakov et al., arXiv:2401.07788): both are TopK of one fraction.
    pub share_indices: bool,
    /// AQ-SGD of activations in training (Wang et al., arXiv:2206.01299), with this number of samples: both sides of a
    /// cut keep the last activation of each, and the scheme compresses the difference from it. Batches need the numbers
    /// of their samples, in the field [`SAMPLE`](meshwork_nn::SAMPLE).
    pub aqsgd: Option<usize>,
    /// How what compression lost is brought back, wherever something is compressed.
    pub feedback: Feedback,
    /// The first step that compresses, from 1.
    pub start_step: u64,
}

/// What compresses weights.
const QUANTISED: &str = "use quant, bf16, fp8 or sign, as quant:8/block256";

/// Values as they are.
pub(crate) const NOTHING: Scheme = Scheme::Values(Values::F32);

impl Default for Compress {
    fn default() -> Self {
        Self {
            activations: NOTHING,
            activation_gradients: NOTHING,
            gradients: NOTHING,
            weights: NOTHING,
            dispatch: NOTHING,
            dispatch_gradients: NOTHING,
            share_indices: false,
            aqsgd: None,
            feedback: Feedback::None,
            start_step: 1,
        }
    }
}

impl Compress {
    /// The places that are compressed, with their schemes.
    pub fn places(&self) -> impl Iterator<Item = (Place, Scheme)> {
        let all = [
            (Place::Activations, self.activations),
            (Place::ActivationGradients, self.activation_gradients),
            (Place::Gradients, self.gradients),
            (Place::Weights, self.weights),
            (Place::Dispatch, self.dispatch),
            (Place::DispatchGradients, self.dispatch_gradients),
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

    /// The scheme of what crosses cuts in a direction, if it is compressed.
    pub(crate) fn at_cuts(&self, direction: Direction) -> Option<Scheme> {
        let scheme = match direction {
            Direction::Activation => self.activations,
            Direction::Gradient => self.activation_gradients,
        };
        (scheme != NOTHING).then_some(scheme)
    }

    /// The same, with all that a forward pass sends as it is.
    pub(crate) fn exact_in_forward(self) -> Self {
        let (activations, weights, dispatch) = (NOTHING, NOTHING, NOTHING);
        Self { activations, activation_gradients: NOTHING, weights, dispatch, ..self }
    }

    /// How rows are compressed that layers exchange.
    pub(crate) fn of_rows(&self) -> RowSchemes {
        let [forward, backward] =
            [self.dispatch, self.dispatch_gradients].map(|scheme| (scheme != NOTHING).then_some(scheme));
        RowSchemes { forward, backward }
    }

    /// The same in a step, from 0.
    pub(crate) fn rows_in(&self, step: u64) -> RowSchemes {
        if self.includes(step) { self.of_rows() } else { RowSchemes::default() }
    }

    /// Everything about it that does not go with the rest of a plan, whatever the model.
    pub fn unfit(&self, around: Around) -> Vec<Unfit> {
        let mut all = Vec::new();
        let mut refuse = |place: Place, problem: String, valid: &str| {
            all.push(Unfit { place, problem, valid: valid.to_owned() });
        };
        let at_cuts = [self.activations, self.activation_gradients];
        for (place, scheme) in self.places() {
            if around.canonical && place == Place::Gradients {
                let problem =
                    "canonical numerics promise the bits of one rank, which has nobody to send compressed values to";
                refuse(place, problem.to_owned(), "use fast numerics, or none");
            } else if around.canonical && place == Place::Weights {
                let problem = "canonical numerics promise the bits of one rank, which has all weights as they are";
                refuse(place, problem.to_owned(), "use fast numerics, or none");
            } else if around.canonical && place.of_experts() {
                let problem =
                    "canonical numerics promise the bits of one rank, which has all experts and sends no tokens";
                refuse(place, problem.to_owned(), "use fast numerics, or none");
            } else if around.canonical && !around.simulates {
                let problem = "canonical numerics promise the bits of one rank, which has nobody to send compressed values to: every mesh must \
                               simulate the same cuts";
                refuse(place, problem.to_owned(), "name them as virtual cuts, use fast numerics, or none");
            }
            if place == Place::Weights {
                match scheme {
                    Scheme::Sparse(_) => {
                        let problem = "a weight that is not sent would be zero, whatever it is";
                        refuse(place, problem.to_owned(), QUANTISED);
                    }
                    Scheme::PowerSgd(_) => {
                        let problem = "factors of few columns are far from a weight, and nothing brings back the rest";
                        refuse(place, problem.to_owned(), QUANTISED);
                    }
                    Scheme::Values(_) if around.zero < ZeroStage::Weights => {
                        let problem = "ranks gather no weights to use them below ZeRO stage 3: each keeps all of them";
                        refuse(place, problem.to_owned(), "use ZeRO stage 3, or none");
                    }
                    Scheme::Values(_) => {}
                }
            } else if place.of_experts()
                && matches!(scheme, Scheme::Sparse(Sparse { choice: Choice::Random { .. }, .. }))
            {
                let problem =
                    "it draws elements of all tokens of a message together, and each token is compressed by itself";
                refuse(place, problem.to_owned(), "use topk, or quant, bf16, fp8 or sign");
            } else if matches!(scheme, Scheme::PowerSgd(_)) && place != Place::Gradients {
                let problem =
                    "the factors of a message start from those of the one before, and samples have nothing in common";
                refuse(place, problem.to_owned(), "use quant, topk, randk, sign, bf16 or fp8");
            }
        }
        if self.share_indices {
            let chosen = at_cuts.map(|scheme| match scheme {
                Scheme::Sparse(Sparse { choice: choice @ Choice::Largest(_), keep, .. }) => Some((choice, keep)),
                _ => None,
            });
            if chosen[0].is_none() || chosen[0] != chosen[1] {
                let [activations, gradients] = at_cuts;
                let problem = format!(
                    "gradients of activations have the indices of activations, and these are {activations}, their gradients {gradients}"
                );
                let valid = "use topk of one fraction and the same parts for both, as topk:0.1 and topk:0.1+quant:8, or indices of their own";
                refuse(Place::ShareIndices, problem, valid);
            }
        }
        if let Some(samples) = self.aqsgd {
            let conflicts = [
                (self.activations == NOTHING, "activations are not compressed", "compress them, or turn aqsgd off"),
                (samples == 0, "it keeps activations of no samples", "say how many samples come again"),
                (self.share_indices, "differences have other indices than gradients can use", "do not share indices"),
                (
                    self.feedback != Feedback::None,
                    "it brings back what activations lose, and feedback would do so once more",
                    "use no feedback, or no aqsgd",
                ),
            ];
            let conflicts = conflicts.into_iter().filter(|(conflict, ..)| *conflict);
            conflicts.for_each(|(_, problem, valid)| refuse(Place::Aqsgd, problem.to_owned(), valid));
        }
        match self.feedback {
            Feedback::None => {}
            _ if !self.is_some() => {
                let problem = "brings back what compression loses, and nothing is compressed";
                refuse(Place::Feedback, problem.to_owned(), "compress something, or use none");
            }
            _ if self.places().all(|(place, _)| place == Place::Weights || place.of_experts()) => {
                let problem = "brings back what compression loses, and gathers of weights lose nothing for good: their owners keep them; nor do \
                               tokens of experts come again";
                refuse(Place::Feedback, problem.to_owned(), "use none, or compress activations or gradients too");
            }
            feedback => {
                if matches!(self.gradients, Scheme::PowerSgd(_)) && feedback.keeps_estimate() {
                    let problem =
                        "powersgd makes factors of the sum of all ranks, which none has an estimate of its own part of";
                    refuse(Place::Feedback, problem.to_owned(), "use ef");
                }
                if self.gradients != NOTHING && feedback.keeps_estimate() && around.zero > ZeroStage::Off {
                    let problem = "ranks that keep slices of a sum have no estimate of it";
                    refuse(Place::Feedback, problem.to_owned(), "use ef, or ZeRO stage 0");
                }
            }
        }
        all
    }

    /// Refuses what does not go with the rest of the plan, whatever the model.
    pub(crate) fn require_fit(&self, plan: &Plan) -> Result<(), PlanError> {
        let around = Around {
            canonical: plan.blocks().is_some(),
            simulates: !plan.virtual_cuts.is_empty(),
            zero: plan.zero.stage,
        };
        let Some(Unfit { place, problem, valid }) = self.unfit(around).into_iter().next() else { return Ok(()) };
        let scheme = match place {
            Place::Activations => self.activations.to_string(),
            Place::ActivationGradients => self.activation_gradients.to_string(),
            Place::Gradients => self.gradients.to_string(),
            Place::Weights => self.weights.to_string(),
            Place::Dispatch => self.dispatch.to_string(),
            Place::DispatchGradients => self.dispatch_gradients.to_string(),
            Place::Feedback => self.feedback.to_string(),
            Place::ShareIndices => self.share_indices.to_string(),
            Place::Aqsgd => self.activations.to_string(),
        };
        Err(PlanError::Compress { place: place.name(), scheme, problem: format!("{problem}; {valid}") })
    }
}

/// A setting of [`Compress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// [`Compress::activations`].
    Activations,
    /// [`Compress::activation_gradients`].
    ActivationGradients,
    /// [`Compress::gradients`].
    Gradients,
    /// [`Compress::weights`].
    Weights,
    /// [`Compress::dispatch`].
    Dispatch,
    /// [`Compress::dispatch_gradients`].
    DispatchGradients,
    /// [`Compress::feedback`].
    Feedback,
    /// [`Compress::share_indices`].
    ShareIndices,
    /// [`Compress::aqsgd`].
    Aqsgd,
}

impl Place {
    /// Whether it is about tokens of experts.
    fn of_experts(self) -> bool {
        matches!(self, Self::Dispatch | Self::DispatchGradients)
    }

    /// What it is about, in errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Activations => "activations",
            Self::ActivationGradients => "activation gradients",
            Self::Gradients => "gradients",
            Self::Weights => "weights",
            Self::Dispatch => "dispatch",
            Self::DispatchGradients => "dispatch gradients",
            Self::Feedback => "feedback",
            Self::ShareIndices => "share_indices",
            Self::Aqsgd => "aqsgd",
        }
    }
}

/// What of the rest of a plan decides whether compression fits.
#[derive(Clone, Copy, Debug)]
pub struct Around {
    /// Whether every mesh gives the bits of one rank.
    pub canonical: bool,
    /// Whether there are virtual cuts.
    pub simulates: bool,
    /// What data-parallel ranks share out.
    pub zero: ZeroStage,
}

/// A setting that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// The setting.
    pub place: Place,
    /// Why it does not fit.
    pub problem: String,
    /// What would be valid.
    pub valid: String,
}
