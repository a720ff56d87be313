//! The configuration: TOML sections, a few flags, and every fault of both in one report.
//!
//! ```text
//! keys (a table) ──▶ settings: given values, each of the right type and in range
//! Args (flags)   ──▶     │
//!                        ▼
//!                     resolve: presets, derived defaults ──▶ check: across keys ──▶ Config
//! ```
//! A fault never ends the search: it is noted, and checks that would read the value at fault are skipped.

mod batch;
mod check;
mod cli;
mod fault;
pub mod keys;
mod mesh;
mod partition;
mod plan;
mod preset;
mod reference;
mod resolve;
mod schedule;
pub mod sections;
mod settings;
mod size;

pub use cli::Args;
pub use fault::{ConfigError, Fault, choose_from};
pub use mesh::{AXES, parse_mesh};
pub use reference::{reference, usage};
pub(crate) use resolve::resolve;
pub use sections::{DecayName, Device, Dtype, OptimizerName, Parallelism};
pub(crate) use settings::Settings;

use serde::Serialize;

/// A configuration that can be run: all values known, in range and consistent.
///
/// ```
/// use meshwork_train::config::{Args, Config};
///
/// let config = Config::from_args(&Args::parse(["--mesh", "dp=2,pp=2", "--set", "model.preset=small"]))?;
/// assert_eq!(config.parallelism.world_size(), Some(4));
/// assert_eq!(config.model.hidden_size, 384);
/// assert_eq!((config.pipeline.num_microbatches, config.training.micro_batch_size), (4, 2));
///
/// let error = Config::from_toml("[model]\nnum_heads = 3\nheads = 4").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "model.heads = 4: unknown key; the nearest is model.num_heads\n\
///      model.hidden_size = 128: is not divisible by model.num_heads = 3; use a multiple of 3, such as 126 or 129"
/// );
/// # Ok::<(), meshwork_train::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)] // One field per section; the sections say what they are.
pub struct Config {
    pub model: sections::Model,
    pub parallelism: sections::Parallelism,
    pub pipeline: sections::Pipeline,
    pub training: sections::Training,
    pub optimizer: sections::Optimizer,
    pub lr_scheduler: sections::LrScheduler,
    pub data: sections::Data,
    pub validation: sections::Validation,
    pub memory: sections::Memory,
    pub checkpoint: sections::Checkpoint,
    pub metrics: sections::Metrics,
    pub comm: sections::Comm,
    pub numerics: sections::Numerics,
    /// Where the ranks compute.
    pub device: Device,
    /// What the user should know although nothing is wrong.
    #[serde(skip)]
    pub notices: Vec<String>,
}

impl Config {
    /// The configuration of a command line, without opening data or metrics: see [`load`](crate::load) for all.
    ///
    /// # Errors
    /// Every fault of the command line and of the file that it names.
    pub fn from_args(args: &Args) -> Result<Self, ConfigError> {
        finish(resolve(args, Settings::default()))
    }

    /// The leaves of canonical numerics; nothing in fast ones.
    #[must_use]
    pub fn leaves(&self) -> Option<usize> {
        (self.training.numerics == "canonical").then_some(self.numerics.leaves)
    }

    /// The configuration of a TOML document.
    ///
    /// # Errors
    /// Every fault of the document.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        let mut settings = Settings::default();
        settings.read_text("TOML", text);
        finish(resolve(&Args::default(), settings))
    }
}

fn finish((config, settings): (Config, Settings)) -> Result<Config, ConfigError> {
    match settings.faults {
        faults if faults.is_empty() => Ok(config),
        faults => Err(ConfigError { faults }),
    }
}
