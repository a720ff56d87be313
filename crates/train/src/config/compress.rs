//! `[compress]`: schemes as text, and their checks.

use super::Config;
use super::sections::Compress;
use super::settings::Settings;
use meshwork_compress::{Choice, CompressError, Feedback, Rounding, Scheme, Shape, Sparse};
use meshwork_engine::{Around, PlanError, Setting, TrainError, Unfit, require_compression};

/// Keys of the messages between stages.
pub(super) const CUTS: [&str; 2] = ["compress.activations", "compress.activation_gradients"];
const SCHEMES: [&str; 6] = [CUTS[0], CUTS[1], GRADIENTS, WEIGHTS, DISPATCH[0], DISPATCH[1]];
pub(super) const GRADIENTS: &str = "compress.gradients";
pub(super) const WEIGHTS: &str = "compress.weights";
/// Keys of the tokens that go to experts and back.
pub(super) const DISPATCH: [&str; 2] = ["compress.dispatch", "compress.dispatch_gradients"];
const CUTS_OF_ONE: &str = "compress.virtual_cuts";

impl Compress {
    /// The schemes of the section, whose texts were checked.
    ///
    /// # Errors
    /// A text that names no scheme.
    pub fn plan(&self) -> Result<meshwork_engine::Compress, CompressError> {
        let rounding = Rounding::from(self.rounding);
        let scheme = |text: &str| Ok::<_, CompressError>(text.parse::<Scheme>()?.rounding_at_least(rounding));
        Ok(meshwork_engine::Compress {
            activations: scheme(&self.activations)?,
            activation_gradients: scheme(&self.activation_gradients)?,
            gradients: scheme(&self.gradients)?,
            weights: scheme(&self.weights)?,
            dispatch: scheme(&self.dispatch)?,
            dispatch_gradients: scheme(&self.dispatch_gradients)?,
            share_indices: self.share_indices,
            // Before the data are known, as if there were one.
            aqsgd: self.aqsgd.then_some(self.aqsgd_samples.max(1)),
            feedback: self.feedback.parse()?,
            start_step: self.start_step,
        })
    }

    /// The key of a setting, and its value as it is written.
    fn at(&self, setting: Setting) -> (&'static str, String) {
        match setting {
            Setting::Activations => (CUTS[0], format!("{:?}", self.activations)),
            Setting::ActivationGradients => (CUTS[1], format!("{:?}", self.activation_gradients)),
            Setting::Gradients => (GRADIENTS, format!("{:?}", self.gradients)),
            Setting::Weights => (WEIGHTS, format!("{:?}", self.weights)),
            Setting::Dispatch => (DISPATCH[0], format!("{:?}", self.dispatch)),
            Setting::DispatchGradients => (DISPATCH[1], format!("{:?}", self.dispatch_gradients)),
            Setting::Feedback => ("compress.feedback", format!("{:?}", self.feedback)),
            Setting::ShareIndices => ("compress.share_indices", self.share_indices.to_string()),
            Setting::Aqsgd => ("compress.aqsgd", self.aqsgd.to_string()),
        }
    }

    /// The schemes, in the order of their keys.
    fn schemes(&self) -> [&str; SCHEMES.len()] {
        let [dispatch, back] = [&self.dispatch, &self.dispatch_gradients];
        [&self.activations, &self.activation_gradients, &self.gradients, &self.weights, dispatch, back]
    }
}

/// Adds the faults of `[compress]` to `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let (compress, feedback) = (&config.compress, "compress.feedback");
    for (key, text) in SCHEMES.into_iter().zip(compress.schemes()) {
        if let Err(CompressError::Scheme { text, problem }) = text.parse::<Scheme>() {
            settings.fault(key, format!("{text:?}"), problem, format!("use one of {}", Scheme::VALID));
        }
    }
    if let Err(CompressError::Feedback { problem, .. }) = compress.feedback.parse::<Feedback>() {
        settings.fault(feedback, format!("{:?}", compress.feedback), "there is no such feedback", problem);
    }
    let Ok(plan) = compress.plan() else { return };
    let layers = config.model.num_layers;
    let around = Around {
        canonical: config.reduction_blocks().is_some() && settings.sound(&["training.numerics"]),
        simulates: !compress.virtual_cuts.is_empty(),
        zero: config.parallelism.zero().stage,
    };
    for Unfit { setting, problem, valid } in plan.unfit(around) {
        let (key, value) = compress.at(setting);
        settings.fault(key, value, problem, valid);
    }
    let hidden = config.model.hidden_size;
    let of_experts = [(Setting::Dispatch, plan.dispatch), (Setting::DispatchGradients, plan.dispatch_gradients)];
    let sound = settings.sound(&["model.hidden_size"]) && config.moe.num_experts > 0;
    for (setting, scheme) in of_experts.into_iter().filter(|_| sound) {
        // Random choices and factors are refused above.
        let of_tokens = matches!(scheme, Scheme::Values(_) | Scheme::Sparse(Sparse { choice: Choice::Largest(_), .. }));
        let each = scheme.of_each_row(hidden);
        if of_tokens && Shape::matrix(1, hidden).is_ok_and(|token| !each.takes_rows_apart(token)) {
            let (key, value) = compress.at(setting);
            let problem = format!("does not compress each token of {hidden} features by itself");
            settings.fault(key, value, problem, "use blocks that divide the features, one value for each token, and no random rounding of topk's values");
        }
    }
    let cuts = &compress.virtual_cuts;
    if settings.sound(&["model.num_layers", CUTS_OF_ONE])
        && (!cuts.is_sorted_by(|a, b| a < b) || cuts.iter().any(|&cut| cut > layers))
    {
        let valid = format!("use increasing numbers of layers from 0 to {layers}");
        settings.fault(CUTS_OF_ONE, format!("{cuts:?}"), "are no cuts of the model", valid);
    }
}

/// Appends the faults of schemes that do not fit the messages of the model, if the configuration is sound otherwise.
pub(crate) fn check_values(config: &Config, settings: &mut Settings) {
    let compress = &config.compress;
    if !settings.faults.is_empty() || !compress.plan().is_ok_and(|plan| plan.is_some()) {
        return;
    }
    let Ok(plan) = config.plan() else { return };
    if let Err(TrainError::Plan(error)) = require_compression(&config.model(), &plan)
        && let PlanError::Compress { place, problem, .. } = &*error
    {
        let key = [Setting::Activations, Setting::ActivationGradients, Setting::Weights]
            .into_iter()
            .find(|of| of.name() == *place);
        let (key, value) = compress.at(key.unwrap_or(Setting::Gradients));
        let (problem, valid) = problem.rsplit_once("; ").unwrap_or((problem, "use another scheme"));
        settings.fault(key, value, problem, valid);
    }
}
