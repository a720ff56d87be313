//! Two runs held against each other, value by value: what one rank computes and what a mesh does, or any two meshes, schedules
//! and numbers of micro-batches.
//!
//! ```text
//! Side A ─ ranks (world) ─┐ a step's records   global values (global), in the order
//!                         ├───────────────────▶ in which they come into being (compare) ──▶ Report
//! Side B ─ ranks (world) ─┘ and parameters
//! ```
//! Both runs are worlds of threads in this process that do a step in turn. An observer on every tape copies each output and each
//! gradient of an input; after the step come the reduced gradients, weights and optimizer states. A value is put together
//! from all ranks by its SPMD types, cut into samples, and compared with its like: operations have the same number on any
//! mesh. A step is dropped when it has been compared.
//!
//! In `canonical` numerics nothing may differ, and the first value that does is the fault. In `fast` numerics two meshes
//! round differently; then the report is how far, by kind of operation, and which value is the first beyond rounding.
//!
//! ```
//! use meshwork_train::diff::{Side, compare};
//! use meshwork_train::{config::Args, load};
//!
//! let small = ["--set", "model.hidden_size=32", "--set", "model.seq_len=16", "--set", "model.num_layers=1"];
//! let (a, data) = load(&Args::parse(["--mesh", "dp=1"].iter().chain(&small)))?;
//! let (b, _) = load(&Args::parse(["--mesh", "dp=2,tp=2"].iter().chain(&small)))?;
//! let report = compare([&Side::new(&a, &data), &Side::new(&b, &data)], 2)?;
//! assert!(report.unexplained.is_none(), "{report}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod compare;
mod divergence;
mod fault;
mod global;
mod options;
mod program;
mod report;
mod ulps;
mod world;

pub use divergence::{Between, Broken, Divergence, Place, Vector};
pub use options::{Comparison, Options, usage};
pub use report::{Report, Row};
pub use ulps::Spread;

use crate::config::{Config, Dtype};
use crate::data::{Batch, Data};
use crate::engine::TrainError;
use crate::step::Trainer;
use compare::{Pair, SIDES};
use fault::Break;
use meshwork_core::{Communicator, Coords};
use meshwork_tensor::Tensor;
use meshwork_tensor::tape::Seen;
use program::Program;
use std::sync::Arc;
use world::World;

/// Which rank sees a value, where in the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The world rank.
    pub rank: usize,
    /// Where it lies on the mesh.
    pub coords: Coords,
    /// The stage.
    pub stage: usize,
    /// The micro-batch, of this dp rank.
    pub micro: usize,
}

/// Sees every value of a side on every rank before it is recorded. What it gives back, of the same dtype and shape, takes the
/// value's place in the run: a fault, injected.
pub type Hook = dyn Fn(Site, &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> + Send + Sync;

/// Called on every rank of a side before each step, with the rank's trainer and its rows of the batch.
pub type BeforeStep = dyn Fn(&mut Trainer, &mut Batch) -> Result<(), TrainError> + Send + Sync;

/// Puts another communicator around that of each rank of a side: it sees every operation of every group that is split off it.
pub type Wrap = dyn Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync;

/// One of the two runs.
#[derive(Clone)]
pub struct Side<'a> {
    /// Its configuration. `training.steps` is not read but for what derives from it.
    pub config: &'a Config,
    /// Its data.
    pub data: &'a Data,
    /// What sees, and may change, every value.
    pub hook: Option<Arc<Hook>>,
    /// What is done before each step.
    pub before_step: Option<Arc<BeforeStep>>,
    /// What is put around the communicators.
    pub communicator: Option<Arc<Wrap>>,
}

impl<'a> Side<'a> {
    /// A run as it is.
    pub fn new(config: &'a Config, data: &'a Data) -> Self {
        Self { config, data, hook: None, before_step: None, communicator: None }
    }

    /// The same with a hook on every value.
    pub fn with_hook(
        self,
        hook: impl Fn(Site, &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> + Send + Sync + 'static,
    ) -> Self {
        Self { hook: Some(Arc::new(hook)), ..self }
    }

    /// The same with something done before each step.
    pub fn with_before_step(
        self,
        act: impl Fn(&mut Trainer, &mut Batch) -> Result<(), TrainError> + Send + Sync + 'static,
    ) -> Self {
        Self { before_step: Some(Arc::new(act)), ..self }
    }

    /// The same with another communicator around that of each rank.
    pub fn with_communicator(
        self,
        wrap: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync + 'static,
    ) -> Self {
        Self { communicator: Some(Arc::new(wrap)), ..self }
    }

    /// What it is, in words.
    fn describe(&self) -> String {
        let Config { parallelism: mesh, pipeline, training, .. } = self.config;
        let sequence = if mesh.sequence_parallel { ", sequence parallel" } else { "" };
        let (micros, size) = (pipeline.num_microbatches, training.micro_batch_size);
        let times = if micros == 1 { "micro-batch" } else { "micro-batches" };
        format!(
            "dp={},tp={},pp={}{sequence}, {}, {micros} {times} of {size}",
            mesh.dp, mesh.tp, mesh.pp, pipeline.schedule
        )
    }
}

/// Why two runs were not compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// They are not the same program: another model, or values that have no like.
    #[error("the two runs cannot be compared: {0}")]
    Structure(String),
    /// A run failed.
    #[error("side {side}: {error}")]
    Run {
        /// `A` or `B`.
        side: char,
        /// Why.
        error: String,
    },
    /// A run could not be set up.
    #[error(transparent)]
    Train(#[from] TrainError),
}

/// A value of a side: its stage, its operation's number there, and for a gradient the operand.
type Key = (usize, usize, Option<&'static str>);

/// Does so many steps on both sides, and compares each. In canonical numerics the first step with a divergence is the last.
///
/// # Errors
/// Two sides that do not have the same operations and parameters, and a run that fails. A run that fails with a loss or norm that
/// is not finite is compared that far, and the report says so.
pub fn compare(sides: [&Side<'_>; 2], steps: u64) -> Result<Report, Error> {
    let programs = [Program::new(sides[0].config)?, Program::new(sides[1].config)?];
    compare_programs(sides, [&programs[0], &programs[1]], steps)
}

fn compare_programs(sides: [&Side<'_>; 2], programs: [&Program; 2], steps: u64) -> Result<Report, Error> {
    let pair = Pair::new(programs)?;
    let canonical = sides.iter().all(|side| side.config.training.numerics == "canonical");
    let bf16 = sides.iter().any(|side| side.config.training.dtype == Dtype::Bf16);
    let rounding = if bf16 { ROUNDING_BF16 } else { ROUNDING };
    let mut report = Report::new(sides.map(Side::describe), canonical, rounding);
    std::thread::scope(|scope| {
        let mut worlds = [World::start(scope, SIDES[0], sides[0])?, World::start(scope, SIDES[1], sides[1])?];
        let mut compared = Ok(());
        for step in 1..=steps {
            let [a, b] = &mut worlds;
            let (Some(a), Some(b)) = (a.step(), b.step()) else { break };
            let over = a.report.is_none() || b.report.is_none();
            compared = pair.step(step, [a, b], &mut report);
            report.steps = step;
            if over || compared.is_err() || canonical && !report.identical() {
                break;
            }
        }
        for ended in worlds.map(World::end) {
            match ended {
                // What led to it has been compared.
                Err(error) if !report.identical() && compared.is_ok() => {
                    report.failed.get_or_insert(error.to_string());
                }
                ended => ended?,
            }
        }
        compared
    })?;
    Ok(report)
}

/// A difference beyond this share of a value's largest element is not taken for rounding: a hundred times what meshes differ by.
const ROUNDING: f64 = 1e-3;

/// The same with products in bf16, whose factors are rounded to 8 bits.
const ROUNDING_BF16: f64 = 5e-2;
