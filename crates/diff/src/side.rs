//! A side of a comparison: a model, a plan and data, and the hooks of a test.

use meshwork_core::{Axis, Communicator, Coords, RunError};
use meshwork_engine::{Plan, TrainError, Trainer, Verify};
use meshwork_models::huggingface;
use meshwork_nn::{Batch, BatchSource, Model};
use meshwork_tensor::Tensor;
use meshwork_tensor::tape::Seen;
use meshwork_train::config::Config;
use meshwork_train::{Devices, StartWeights};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// The rank that sees a value, and its place in the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The world rank.
    pub rank: usize,
    /// Its coordinates on the mesh.
    pub coords: Coords,
    /// The stage.
    pub stage: usize,
    /// The micro-batch, of this dp rank.
    pub micro: usize,
}

/// Sees every value of a side on every rank before it is recorded. A returned tensor, which must have the same dtype
/// and shape, replaces the value in the run, to inject a fault.
pub type Hook = dyn Fn(Site, &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> + Send + Sync;

/// Called on every rank of a side before each step, with the rank's trainer and its rows of the batch.
pub type BeforeStep = dyn Fn(&mut Trainer, &mut Batch) -> Result<(), TrainError> + Send + Sync;

/// Wraps the communicator of each rank of a side. The wrapper sees every operation of every group that is split off it.
pub type Wrap = dyn Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync;

/// One of the two runs.
#[derive(Clone)]
pub struct Side<'a> {
    /// The model to train.
    pub model: Arc<dyn Model>,
    /// The plan of its training.
    pub plan: Plan,
    /// The weights that it starts from; without some, values are drawn.
    pub start: Option<Arc<StartWeights>>,
    /// Its data.
    pub data: &'a dyn BatchSource,
    /// Text to print after its mesh, such as `, sequence parallel`.
    pub note: String,
    /// Time without progress after which a rank gives up on another.
    pub timeout: Duration,
    /// The hook that sees, and may change, every value.
    pub hook: Option<Arc<Hook>>,
    /// The callback before each step.
    pub before_step: Option<Arc<BeforeStep>>,
    /// Where its ranks compute.
    pub devices: Devices,
    /// The wrapper of the communicators.
    pub communicator: Option<Arc<Wrap>>,
}

impl<'a> Side<'a> {
    /// A run of a configuration. `training.steps` is read only for values derived from it.
    ///
    /// # Errors
    /// An invalid mesh or schedule, and a device that is not there.
    pub fn new(config: &Config, data: &'a dyn BatchSource) -> Result<Self, TrainError> {
        let note = if config.parallelism.sequence_parallel { ", sequence parallel" } else { "" };
        let (note, timeout) = (note.to_owned(), config.comm.timeout());
        let devices = Devices::open(config)?;
        let refuse = |error: huggingface::Error| TrainError::Parameter {
            name: "model.init_from".to_owned(),
            problem: error.to_string(),
        };
        let start = StartWeights::from_config(config).map_err(refuse)?.map(Arc::new);
        Ok(Self { note, timeout, devices, start, ..Self::from_model(config.model(), config.plan()?, data) })
    }

    /// A run of any model on the CPU. Its steps are not [verified](Verify): differences between ranks are in the
    /// report.
    pub fn from_model(model: Arc<dyn Model>, plan: Plan, data: &'a dyn BatchSource) -> Self {
        let plan = Plan { verify: Verify::Off, ..plan };
        let timeout = meshwork_core::comm::thread::Options::default().timeout;
        let devices = Devices::cpu(plan.precision);
        let (note, start) = (String::new(), None);
        Self { model, plan, start, data, note, timeout, hook: None, before_step: None, devices, communicator: None }
    }

    /// The same with a hook on every value.
    pub fn with_hook(
        self,
        hook: impl Fn(Site, &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> + Send + Sync + 'static,
    ) -> Self {
        Self { hook: Some(Arc::new(hook)), ..self }
    }

    /// The same with a callback before each step.
    pub fn with_before_step(
        self,
        act: impl Fn(&mut Trainer, &mut Batch) -> Result<(), TrainError> + Send + Sync + 'static,
    ) -> Self {
        Self { before_step: Some(Arc::new(act)), ..self }
    }

    /// The same with a wrapper around the communicator of each rank.
    pub fn with_communicator(
        self,
        wrap: impl Fn(Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync + 'static,
    ) -> Self {
        Self { communicator: Some(Arc::new(wrap)), ..self }
    }

    /// A description in words.
    pub(crate) fn describe(&self) -> Result<String, TrainError> {
        let (plan, mesh) = (&self.plan, &self.plan.mesh);
        let (micros, size) = (plan.num_microbatches()?, plan.micro_batch_size()?);
        let times = if micros == 1 { "micro-batch" } else { "micro-batches" };
        let [dp, tp, pp] = [mesh.data_degree(), mesh.degree(Axis::Tp), mesh.degree(Axis::Pp)];
        let seldom = [("cp", mesh.context_degree()), ("ep", mesh.expert_degree())];
        let seldom = seldom.map(|(axis, degree)| if degree > 1 { format!(",{axis}={degree}") } else { String::new() });
        let (note, schedule) = (&self.note, plan.schedule.name());
        Ok(format!("dp={dp},tp={tp},pp={pp}{}{note}, {schedule}, {micros} {times} of {size}", seldom.concat()))
    }
}

/// Why two runs were not compared.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum Error {
    /// They are different programs: another model, or values without a counterpart.
    #[error("the two runs cannot be compared: {0}")]
    Structure(String),
    /// A step ended without finite numbers, and nothing had differed.
    #[error("side {side}: {error}")]
    Step { side: char, error: String },
    /// A rank failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A run could not be set up.
    #[error(transparent)]
    Train(#[from] TrainError),
}

meshwork_core::debug_as_display!(Error);

/// A value of a side: its stage, its operation's number there, the part of the samples, and for a gradient the operand.
pub(crate) type Key = (usize, usize, usize, Option<Cow<'static, str>>);
