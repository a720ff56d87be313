//! `[compress]`: schemes as text, and their checks.

use super::Config;
use super::fault::Fault;
use super::sections::Compress;
use super::settings::Settings;
use super::words::RoundingName;
use meshwork_compress::{CompressError, Rounding, Scheme};

const SCHEMES: [&str; 2] = ["compress.activations", "compress.activation_gradients"];

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
            start_step: self.start_step,
            ..meshwork_engine::Compress::default()
        })
    }

    /// The schemes, in the order of their keys.
    fn schemes(&self) -> [&str; SCHEMES.len()] {
        [&self.activations, &self.activation_gradients]
    }
}

/// Appends what is wrong with `[compress]` to the faults of `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    for (key, text) in SCHEMES.into_iter().zip(config.compress.schemes()) {
        if let Err(CompressError::Scheme { text, problem }) = text.parse::<Scheme>() {
            settings.fault(key, format!("{text:?}"), problem, format!("use one of {}", Scheme::VALID));
        }
    }
    if !settings.sound(&SCHEMES) {
        return;
    }
    let Ok(plan) = config.compress.plan() else { return };
    let given = SCHEMES.into_iter().zip(config.compress.schemes()).find(|(_, text)| *text != "none");
    let Some((key, text)) = given.filter(|_| plan.is_some()) else { return };
    let mut fail =
        |problem: &str, valid: &str| settings.faults.push(Fault::new(key, format!("{text:?}"), problem, valid));
    if config.reduction_blocks().is_some() {
        fail(
            "has no meaning in canonical numerics, which promise the bits of one rank: it has nobody to send compressed values to",
            "use training.numerics = \"fast\", or none",
        );
    }
    let powersgd = SCHEMES.into_iter().zip(config.compress.schemes()).find(|(_, text)| text.starts_with("powersgd"));
    if let Some((key, text)) = powersgd {
        let problem = "the factors of a message start from those of the one before, and samples have nothing in common";
        settings.fault(key, format!("{text:?}"), problem, "use quant, topk, randk, sign, bf16 or fp8");
    }
}
