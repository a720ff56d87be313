//! The settings of compression, as plain data.

use crate::prelude::*;
use meshwork_compress::{Feedback, Scheme, Values};
use meshwork_tensor::tape::RowSchemes;

/// Lossy compression of the values that ranks send each other. By default nothing is compressed.
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
    /// Weights, where ranks gather them with ZeRO-3 (ZeRO++, arXiv:2306.10209). A rank's slice of each parameter is one
    /// value, of one row. All ranks use the restored weights; the rank that updates a weight keeps it exactly.
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
    /// How the loss of compression is brought back, wherever something is compressed.
    pub feedback: Feedback,
    /// The first step that compresses, from 1.
    pub start_step: u64,
}

/// The scheme that leaves values as they are.
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
    /// The compressed values, with their schemes.
    pub fn schemes(&self) -> impl Iterator<Item = (Setting, Scheme)> {
        let all = [
            (Setting::Activations, self.activations),
            (Setting::ActivationGradients, self.activation_gradients),
            (Setting::Gradients, self.gradients),
            (Setting::Weights, self.weights),
            (Setting::Dispatch, self.dispatch),
            (Setting::DispatchGradients, self.dispatch_gradients),
        ];
        all.into_iter().filter(|(_, scheme)| *scheme != NOTHING)
    }

    /// Whether anything is compressed.
    pub fn is_some(&self) -> bool {
        self.schemes().next().is_some()
    }

    /// Whether a step, from 0, compresses.
    pub(crate) fn includes(&self, step: u64) -> bool {
        step + 1 >= self.start_step
    }

    /// Whether a step, from 0, is the first one that compresses.
    pub(crate) fn begins_at(&self, step: u64) -> bool {
        step + 1 == self.start_step.max(1)
    }

    /// The scheme of values that cross cuts in a direction, if they are compressed.
    pub(crate) fn at_cuts(&self, direction: Direction) -> Option<Scheme> {
        let scheme = match direction {
            Direction::Activation => self.activations,
            Direction::Gradient => self.activation_gradients,
        };
        (scheme != NOTHING).then_some(scheme)
    }

    /// The same settings, except that a forward pass sends everything uncompressed.
    pub(crate) fn exact_in_forward(self) -> Self {
        let (activations, weights, dispatch) = (NOTHING, NOTHING, NOTHING);
        Self { activations, activation_gradients: NOTHING, weights, dispatch, ..self }
    }

    /// The compression of the rows that layers exchange.
    pub(crate) fn row_schemes(&self) -> RowSchemes {
        let [forward, backward] =
            [self.dispatch, self.dispatch_gradients].map(|scheme| (scheme != NOTHING).then_some(scheme));
        RowSchemes { forward, backward }
    }

    /// The [`row_schemes`](Self::row_schemes) of a step, from 0.
    pub(crate) fn rows_in(&self, step: u64) -> RowSchemes {
        if self.includes(step) { self.row_schemes() } else { RowSchemes::default() }
    }
}

meshwork_core::named! {
    /// A setting of [`Compress`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[expect(missing_docs, reason = "see the field of the same name")]
    pub enum Setting {
        Activations = "activations",
        ActivationGradients = "activation gradients",
        Gradients = "gradients",
        Weights = "weights",
        Dispatch = "dispatch",
        DispatchGradients = "dispatch gradients",
        Feedback = "feedback",
        ShareIndices = "share_indices",
        Aqsgd = "aqsgd",
    }
    name: "Its name in errors."
}

impl Setting {
    /// Whether it is about the tokens of experts.
    pub(crate) fn is_of_experts(self) -> bool {
        matches!(self, Self::Dispatch | Self::DispatchGradients)
    }
}
