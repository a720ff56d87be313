//! The configuration: TOML sections, and a few flags.
//!
//! ```text
//! sections: each key declared once ──▶ the structs of Config, the table of keys, --help, docs/configuration.md
//!
//! TOML, flags (Args) ──▶ settings: given values, each of the right type and in range
//!                            ▼
//!                        resolve: presets, derived defaults ──▶ check: across keys ──▶ Config
//! ```
//! A fault does not end the search. It is recorded, and checks that would read the value at fault are skipped. All
//! configuration errors are reported together.

mod architecture;
mod arguments;
mod batch;
mod cards;
mod check;
mod cli;
mod compress;
mod conditions;
mod context;
mod device;
mod effects;
mod elsewhere;
mod experts;
mod fault;
pub mod keys;
mod lora;
mod mesh;
mod mixed;
mod partition;
mod permit;
mod plan;
mod preset;
mod pretrained;
mod reference;
mod resolve;
mod schedule;
pub mod sections;
mod setting;
mod settings;
mod size;
mod words;
mod zero;

pub use arguments::{help, parse_all};
pub use cards::{Architecture, CARDS, Card, card};
pub use cli::Args;
pub use device::Device;
pub(crate) use effects::{Change, changes, of_checkpoint};
pub use fault::{ConfigError, Fault, choose_from};
pub(crate) use lora::fault_of_base;
pub use mesh::{AXES, parse_mesh};
pub(crate) use permit::permits;
pub(crate) use pretrained::{is_free, same};
pub use reference::{reference, usage};
pub(crate) use resolve::resolve;
pub use sections::{Config, Parallelism};
pub(crate) use settings::Settings;
pub use words::{
    CommKind, ContextMethod, DecayName, Dtype, Elastic, EndOfText, EndOfTextWord, LoraExport, LossScaleWord,
    LossScaling, MatmulDtype, ModelKind, MoeRouter, Objective, OffloadWord, OptimizerName, Overlong, Quantization,
    RecomputeWord, Recomputed, ReductionName, RoundingName, SavedDtype, TextFormat, TokenType, ValidationCompression,
    VerifySteps, VerifyWord, WordOr,
};

impl Config {
    /// The configuration of a command line, without opening data or metrics; [`load`](crate::load) does both.
    ///
    /// # Errors
    /// Every fault of the command line and of the file that it names.
    pub fn from_args(args: &Args) -> Result<Self, ConfigError> {
        finish(resolve(args, Settings::default()))
    }

    /// Reduction blocks along a dim that a mesh may cut, in canonical numerics; `None` in fast ones.
    pub fn reduction_blocks(&self) -> Option<usize> {
        (self.training.numerics == "canonical").then_some(self.numerics.reduction_blocks)
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
