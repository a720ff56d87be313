//! The payloads of a step, and configurations that compress one of them or none.

use super::computation::Traffic;
use meshwork::train::config::Config;
use meshwork::train::config::sections::Compress;

/// The schemes to try on each payload, besides the configured one.
const SCHEMES: [&str; 6] = ["bf16", "fp8:e4m3", "quant:8/block256", "quant:4/block256", "topk:0.1", "topk:0.01"];
/// Additional schemes to try on gradients; messages between stages have no factors to start from.
const FACTORS: [&str; 2] = ["powersgd:4", "powersgd:16"];
/// The scheme without compression.
pub(super) const NOTHING: &str = "none";

/// The data that ranks send each other, each with a key in `[compress]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    Activations,
    ActivationGradients,
    Gradients,
    Weights,
    Dispatch,
    DispatchGradients,
}

impl Payload {
    pub(super) const ALL: [Self; 6] = [
        Self::Activations,
        Self::ActivationGradients,
        Self::Gradients,
        Self::Weights,
        Self::Dispatch,
        Self::DispatchGradients,
    ];

    /// Its key in `[compress]`.
    pub(super) fn key(self) -> &'static str {
        match self {
            Self::Activations => "activations",
            Self::ActivationGradients => "activation_gradients",
            Self::Gradients => "gradients",
            Self::Weights => "weights",
            Self::Dispatch => "dispatch",
            Self::DispatchGradients => "dispatch_gradients",
        }
    }

    /// Its scheme in a configuration.
    pub(super) fn scheme(self, config: &Config) -> &str {
        let compress = &config.compress;
        match self {
            Self::Activations => &compress.activations,
            Self::ActivationGradients => &compress.activation_gradients,
            Self::Gradients => &compress.gradients,
            Self::Weights => &compress.weights,
            Self::Dispatch => &compress.dispatch,
            Self::DispatchGradients => &compress.dispatch_gradients,
        }
    }

    /// The unit of its bytes and seconds.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Activations | Self::ActivationGradients => "each message",
            Self::Gradients => "all sums",
            Self::Weights => "the gathers of one forward or backward of a micro-batch",
            Self::Dispatch => "the exchanges of one forward of a micro-batch",
            Self::DispatchGradients => "those of its backward",
        }
    }

    /// The schemes to try on it.
    pub(super) fn tried(self) -> Vec<&'static str> {
        let schemes = SCHEMES.into_iter().filter_map(|scheme| match self {
            // TopK would set the weights that it leaves out to zero.
            Self::Weights => Some(scheme).filter(|scheme| !scheme.starts_with("topk")),
            // Each token has its own scale.
            Self::Dispatch | Self::DispatchGradients => Some(scheme.trim_end_matches("/block256")),
            _ => Some(scheme),
        });
        schemes.chain(FACTORS.into_iter().filter(move |_| self == Self::Gradients)).collect()
    }

    /// Its bytes in `traffic`, and the seconds to compress and restore them.
    pub(super) fn cost(self, traffic: &Traffic) -> (f64, f64) {
        let cut = |at: usize| (traffic.messages[at], traffic.codec[at].iter().sum());
        match self {
            Self::Activations => cut(0),
            Self::ActivationGradients => cut(1),
            Self::Gradients => (traffic.sums.iter().sum(), traffic.sum_codec),
            Self::Weights => (traffic.weights, traffic.weights_codec),
            Self::Dispatch => (traffic.tokens[0], traffic.tokens_codec[0]),
            Self::DispatchGradients => (traffic.tokens[1], traffic.tokens_codec[1]),
        }
    }
}

/// The configuration with these schemes, without feedback, from the first step on.
fn with_schemes(config: &Config, scheme: impl Fn(Payload) -> String) -> Config {
    let mut config = config.clone();
    let [activations, activation_gradients, gradients, weights, dispatch, dispatch_gradients] =
        Payload::ALL.map(scheme);
    config.compress = Compress {
        activations,
        activation_gradients,
        gradients,
        weights,
        dispatch,
        dispatch_gradients,
        feedback: "none".to_owned(),
        share_indices: false,
        aqsgd: false,
        start_step: 1,
        ..config.compress
    };
    config
}

/// The configuration with `scheme` for one payload and no other compression.
pub(super) fn only(config: &Config, payload: Payload, scheme: &str) -> Config {
    with_schemes(config, |at| if at == payload { scheme } else { NOTHING }.to_owned())
}

/// The configuration without compression.
pub(super) fn exact(config: &Config) -> Config {
    with_schemes(config, |_| NOTHING.to_owned())
}
