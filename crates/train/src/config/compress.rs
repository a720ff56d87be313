//! `[compress]`: schemes as text, and their checks.

use super::Config;
use super::fault::Fault;
use super::sections::Compress;
use super::settings::Settings;
use super::words::RoundingName;
use meshwork_compress::{CompressError, Feedback, Rounding, Scheme};

/// What crosses the cuts of a pipeline.
pub(super) const CUTS: [&str; 2] = ["compress.activations", "compress.activation_gradients"];
const SCHEMES: [&str; 3] = [CUTS[0], CUTS[1], GRADIENTS];
pub(super) const GRADIENTS: &str = "compress.gradients";

impl Compress {
    /// What is compressed, of texts that were checked.
    ///
    /// # Errors
    /// A text that names no scheme.
    pub fn plan(&self) -> Result<meshwork_engine::Compress, CompressError> {
        let rounding = match self.rounding {
            RoundingName::Nearest => Rounding::Nearest,
            RoundingName::Stochastic => Rounding::Stochastic,
        };
        let scheme = |text: &str| Ok::<_, CompressError>(text.parse::<Scheme>()?.rounding_at_least(rounding));
        Ok(meshwork_engine::Compress {
            activations: scheme(&self.activations)?,
            activation_gradients: scheme(&self.activation_gradients)?,
            gradients: scheme(&self.gradients)?,
            feedback: self.feedback.parse()?,
            start_step: self.start_step,
        })
    }

    /// The schemes, in the order of their keys.
    fn schemes(&self) -> [&str; SCHEMES.len()] {
        [&self.activations, &self.activation_gradients, &self.gradients]
    }
}

/// Appends what is wrong with `[compress]` to the faults of `settings`.
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
    let given = SCHEMES.into_iter().zip(compress.schemes()).filter(|(_, text)| *text != "none");
    let mut faults = Vec::new();
    let mut fail = |key: &str, text: &str, problem: &str, valid: &str| {
        faults.push(Fault::new(key, format!("{text:?}"), problem, valid));
    };
    for (key, text) in given.filter(|_| config.reduction_blocks().is_some() && settings.sound(&["training.numerics"])) {
        let problem = "has no meaning in canonical numerics, which promise the bits of one rank: it has nobody to send compressed values to";
        fail(key, text, problem, "use training.numerics = \"fast\", or none");
    }
    for (key, text) in SCHEMES.into_iter().zip(compress.schemes()).filter(|(_, text)| text.starts_with("powersgd")) {
        let problem = match key {
            GRADIENTS => "gradients are summed in buckets, which are no matrices",
            _ => "the factors of a message start from those of the one before, and samples have nothing in common",
        };
        fail(key, text, problem, "use quant, topk, randk, sign, bf16 or fp8");
    }
    if plan.feedback == Feedback::None {
        return settings.faults.append(&mut faults);
    }
    let mut fail = |problem: String, valid: &str| {
        faults.push(Fault::new(feedback, format!("{:?}", compress.feedback), problem, valid))
    };
    let (schedule, stage) = (&config.pipeline.schedule, config.parallelism.zero_stage);
    if !plan.is_some() {
        let valid = format!("set {}, or use none", SCHEMES.join(" or "));
        fail("brings back what compression loses, and nothing is compressed".to_owned(), &valid);
    } else if [&compress.activations, &compress.activation_gradients].iter().any(|text| **text != "none")
        && settings.sound(&["pipeline.schedule"])
        && config.pipeline.spec().is_ok_and(|schedule| schedule.overlaps_steps())
    {
        let problem = "would count what is lost twice: pipeline.schedule";
        let problem = format!("{problem} = {schedule:?} begins steps that it may have to repeat");
        fail(problem, "use another schedule, or none, or compress gradients alone");
    } else if compress.gradients != "none" && plan.feedback.keeps_estimate() && stage > 0 {
        let problem =
            format!("estimates a sum of gradients of which ranks keep slices: parallelism.zero_stage = {stage}");
        fail(problem, "use ef, or zero_stage = 0");
    }
    settings.faults.append(&mut faults);
}
