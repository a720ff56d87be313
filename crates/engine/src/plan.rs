//! The plan of a run, as plain data: the mesh, the schedule, the batch, the numerics and the update rule.

use crate::offload::Offload;
use crate::prelude::*;
use crate::zero::Cuts;
use crate::{Compress, MixedPrecision, Verify, Zero};
use meshwork_nn::StageSpec;
use meshwork_optim::{AdamW, Decay, LrSchedule, Rule};
use meshwork_pipeline::{
    Generator, Shape, ShapeError, UnknownSchedule, Weights, default_micros, one_f_one_b_replicated,
};
use meshwork_tensor::Precision;
use meshwork_tensor::tape::{Encoding, Keep, SavedPolicy, Selective};

/// How a model is trained. The same on every rank.
///
/// ```
/// use meshwork_engine::{Numerics, Plan, ScheduleSpec};
/// use meshwork_optim::Sgd;
///
/// let plan = Plan {
///     mesh: "dp=2,pp=2".parse()?,
///     schedule: ScheduleSpec::named("zb_h1")?,
///     optimizer: Sgd { momentum: 0.9, weight_decay: 0.0 }.into(),
///     numerics: Numerics::Canonical { blocks: 8 },
///     ..Plan::default()
/// };
/// assert_eq!((plan.num_microbatches()?, plan.micro_batch_size()?), (2, 4)); // of 16 samples on dp=2
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    /// The mesh.
    pub mesh: Mesh,
    /// The order of forward and backward passes.
    pub schedule: ScheduleSpec,
    /// Layers of each stage; empty: as even as possible.
    pub partition: Vec<usize>,
    /// Samples of a step, over all ranks.
    pub global_batch_size: usize,
    /// Micro-batches of a step on each data-parallel rank. `None`: the smallest number that the schedule takes with a
    /// bubble under a quarter, else the largest it takes.
    pub num_microbatches: Option<usize>,
    /// The order of sums.
    pub numerics: Numerics,
    /// The type in which matrix products take their operands; the device's must be the same.
    pub precision: Precision,
    /// The values that are stored in 16 bits; `None`: all are f32.
    pub mixed: Option<MixedPrecision>,
    /// The activations that backward recomputes instead of keeping them.
    pub recompute: Recompute,
    /// The encodings of the tensors that forward keeps for backward, applied one after the other (Gist, Jain et al.
    /// 2018). A recomputed tensor is computed from exact inputs, and encoded as a kept one.
    pub saved: Vec<Encoding>,
    /// The update rule.
    pub optimizer: Rule,
    /// Learning rate of each step.
    pub lr: LrSchedule,
    /// Norm of the whole gradient above which it is scaled down; 0 = off.
    pub max_norm: f64,
    /// Seed of initial weights and of dropout.
    pub seed: u64,
    /// Whether an activation that is the same on every tp rank crosses stages once, in parts that are gathered on
    /// arrival (the scatter/gather of PTD-P, Narayanan et al. 2021, section 4.1).
    pub scatter_gather: bool,
    /// The vectors that data-parallel ranks share out instead of holding them whole.
    pub zero: Zero,
    /// The tensors that leave the memory of a rank while they are not needed.
    pub offload: Option<Offload>,
    /// Compression of values that ranks send.
    pub compress: Compress,
    /// Layers behind which one rank simulates a cut between ranks: values are compressed there as if they were sent,
    /// forward and backward, wherever the stages lie. With the cuts of a mesh, one rank has the numbers of that mesh.
    pub virtual_cuts: Vec<usize>,
    /// In which steps every claim about values is verified: a value typed `Invariant` is the same on all ranks,
    /// replicas of weights have not drifted apart.
    pub verify: Verify,
    /// Whether two data-parallel ranks may have the same samples.
    pub samples: Samples,
}

impl Default for Plan {
    /// One rank, 1F1B, 16 samples a step, AdamW at a rate of 3e-4, clipped to norm 1.
    fn default() -> Self {
        Self {
            mesh: Mesh::new([(Axis::Dp, 1), (Axis::Tp, 1), (Axis::Pp, 1)]).unwrap_or_default(),
            schedule: ScheduleSpec::default(),
            partition: Vec::new(),
            global_batch_size: 16,
            num_microbatches: None,
            numerics: Numerics::Fast,
            precision: Precision::F32,
            mixed: None,
            recompute: Recompute::None,
            saved: Vec::new(),
            optimizer: AdamW::default().into(),
            lr: LrSchedule { base: 3e-4, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
            max_norm: 1.0,
            seed: 1234,
            scatter_gather: true,
            zero: Zero::default(),
            offload: None,
            compress: Compress::default(),
            virtual_cuts: Vec::new(),
            verify: Verify::default(),
            samples: Samples::default(),
        }
    }
}

/// Whether two data-parallel ranks may have the same samples in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Samples {
    /// No: each has its own [part](crate::Trainer::samples) of the global batch. The first step of a trainer and those
    /// that are [verified](Plan::verify) refuse ranks whose samples are all the same, in whatever order. Ranks whose
    /// loss has no terms may be alike: their samples are padding.
    #[default]
    Distinct,
    /// Yes: data that repeats within a batch, such as a tiny corpus, equal samples on purpose, the constant input of a
    /// benchmark.
    MayRepeat,
}

/// The order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// One mesh gives the same bits on every run; two meshes differ by rounding.
    Fast,
    /// Every mesh, schedule and number of micro-batches gives the bits of one rank.
    Canonical {
        /// Reduction blocks along each dim that a mesh may cut: each rank must hold a power of two of them.
        blocks: usize,
    },
}

/// The activations that backward recomputes instead of keeping them. Recomputed activations are bitwise identical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Norms and activation functions, at the price of a few passes over memory (Korthikanti et al. 2022).
    Selective,
    /// The whole stage, from its input: GPipe's re-materialisation, at the price of a second forward.
    Stage,
    /// Every layer from its input, one at a time, at the price of a second forward. An embedding and a head are kept.
    Full,
    /// Of n layers of a stage, √n groups of neighbours, each from its input, at the price of a second forward (Chen et
    /// al. 2016).
    Sqrt,
    /// As [`Full`](Self::Full), the first layers of each stage, as many as this; the others are kept (Megatron-LM's
    /// `--recompute-method block`).
    Layers(usize),
}

impl Recompute {
    /// The policy of tensors that are saved for backward. Every form of recomputation includes norms and activation
    /// functions.
    pub(crate) fn policy(self) -> Rc<dyn SavedPolicy> {
        if self == Self::None { Rc::new(Keep) } else { Rc::new(Selective) }
    }
}

/// Which schedule runs the pipeline.
#[derive(Clone, Debug, PartialEq)]
pub enum ScheduleSpec {
    /// A schedule of the literature.
    Named {
        /// Its generator.
        generator: Generator,
        /// Stages on each pp rank, where the schedule leaves a choice; `None` for its default.
        virtual_stages: Option<usize>,
        /// Only for PipeDream: all stages use the version of the weights that the first stage had when the micro-batch
        /// entered.
        vertical_sync: bool,
    },
    /// 1F1B with this number of ranks for each stage. The replicas of a stage take micro-batches in turn. The numbers
    /// add up to pp.
    Replicated(Vec<usize>),
    /// A schedule of the user's own: a single synchronous step, with a fixed number of micro-batches.
    Own(Schedule),
}

impl Default for ScheduleSpec {
    fn default() -> Self {
        Generator::OneFOneB.into()
    }
}

impl From<Generator> for ScheduleSpec {
    fn from(generator: Generator) -> Self {
        Self::Named { generator, virtual_stages: None, vertical_sync: false }
    }
}

impl ScheduleSpec {
    /// A schedule of the literature by its name, such as `1f1b` or `zb_v`.
    ///
    /// # Errors
    /// An unknown name, with the known ones.
    pub fn named(name: &str) -> Result<Self, UnknownSchedule> {
        Ok(meshwork_pipeline::by_name(name)?.into())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Named { generator, .. } => generator.name(),
            Self::Replicated(_) => Generator::OneFOneB.name(),
            Self::Own(schedule) => &schedule.name,
        }
    }

    /// Stages over `pp` ranks.
    pub fn stages(&self, pp: usize) -> usize {
        match self {
            Self::Named { generator, virtual_stages, .. } => {
                pp.saturating_mul(virtual_stages.unwrap_or(generator.default_virtual_stages()))
            }
            Self::Replicated(replicas) => replicas.len(),
            Self::Own(schedule) => schedule.stages(),
        }
    }

    /// Whether a step begins before the update of the previous step is certain.
    pub fn overlaps_steps(&self) -> bool {
        matches!(self, Self::Named { generator, .. } if generator.overlaps_steps())
    }

    /// The schedule of one step over `pp` ranks.
    ///
    /// # Errors
    /// A shape that the schedule does not take.
    pub fn build(&self, pp: usize, micros: usize) -> Result<Schedule, ShapeError> {
        match self {
            Self::Named { .. } => self.build_steps(pp, micros, 1),
            Self::Replicated(replicas) => {
                Generator::OneFOneB.takes(Generator::OneFOneB.shape(pp, micros))?;
                Ok(one_f_one_b_replicated(replicas, micros))
            }
            Self::Own(schedule) => Ok(schedule.clone()),
        }
    }

    /// The schedule of several steps. An asynchronous schedule is not drained between them. `Replicated` and `Own`
    /// schedules always have one step.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn build_steps(&self, pp: usize, micros: usize, steps: usize) -> Result<Schedule, ShapeError> {
        let &Self::Named { generator, virtual_stages, vertical_sync } = self else { return self.build(pp, micros) };
        let virtual_stages = virtual_stages.unwrap_or(generator.default_virtual_stages());
        let schedule = generator.build_steps(Shape { pp, virtual_stages, micros }, steps)?;
        let weights = if vertical_sync { Weights::VerticalSync } else { schedule.weights };
        Ok(Schedule { weights, ..schedule })
    }

    /// The default number of micro-batches of a step with `samples` samples on each data-parallel rank.
    fn default_micros(&self, pp: usize, samples: usize) -> usize {
        match self {
            Self::Own(schedule) => schedule.micros,
            _ => {
                let (generator, virtual_stages) = match self {
                    Self::Named { generator, virtual_stages, .. } => {
                        (*generator, virtual_stages.unwrap_or(generator.default_virtual_stages()))
                    }
                    _ => (Generator::OneFOneB, 1),
                };
                let divides = |micros: usize| samples.is_multiple_of(micros);
                default_micros(generator, pp, virtual_stages, samples, divides).map_or(1, |choice| choice.micros)
            }
        }
    }
}

impl Plan {
    /// Micro-batches of a step on each data-parallel rank.
    ///
    /// # Errors
    /// A batch that cannot be cut evenly.
    pub fn num_microbatches(&self) -> Result<usize, PlanError> {
        let (batch, dp) = (self.global_batch_size, self.mesh.data_degree());
        let default = || self.schedule.default_micros(self.mesh.degree(Axis::Pp), batch / dp);
        let micros = self.num_microbatches.unwrap_or_else(default);
        match dp * micros {
            0 => Err(PlanError::Batch { batch, dp, micros }),
            parts if batch == 0 || !batch.is_multiple_of(parts) => Err(PlanError::Batch { batch, dp, micros }),
            _ => Ok(micros),
        }
    }

    /// Samples of a micro-batch.
    ///
    /// # Errors
    /// As [`num_microbatches`](Self::num_microbatches).
    pub fn micro_batch_size(&self) -> Result<usize, PlanError> {
        Ok(self.global_batch_size / (self.mesh.data_degree() * self.num_microbatches()?))
    }

    /// The schedule of one step.
    ///
    /// # Errors
    /// As [`num_microbatches`](Self::num_microbatches), a shape that the schedule does not take, and replicas of a
    /// stage that have no micro-batch or, in canonical numerics, no subtree of the samples.
    pub fn build_schedule(&self) -> Result<Schedule, PlanError> {
        let micros = self.num_microbatches()?;
        let schedule = self.schedule.build(self.mesh.degree(Axis::Pp), micros)?;
        let most = schedule.replicas.iter().copied().max().unwrap_or(1);
        let refuse = |problem: String| Err(PlanError::Replicas { replicas: schedule.replicas.clone(), problem });
        if most > micros {
            return refuse(format!(
                "take micro-batches in turn, and {most} replicas of a stage need one each of {micros}: use more micro-batches"
            ));
        }
        if most > 1 && self.blocks().is_some() {
            return refuse(
                "take micro-batches in turn: none holds a whole subtree of the samples, as canonical numerics needs; use numerics \
                 Fast, or dp for replicas of the whole pipeline"
                    .to_owned(),
            );
        }
        Ok(schedule)
    }

    /// The part of the model in each stage.
    ///
    /// # Errors
    /// A partition that does not fit the model or the schedule; a number of layers to recompute that no stage has.
    pub fn stages(&self, model: &dyn Model) -> Result<Vec<StageSpec>, PlanError> {
        let (layers, stages) = (model.num_layers(), self.schedule.stages(self.mesh.degree(Axis::Pp)));
        let counts = match &self.partition[..] {
            [] if layers < stages => return Err(PlanError::Stages { layers, stages }),
            // The first stages take the remaining layers, because the last one has the loss.
            [] => (0..stages).map(|stage| layers / stages + usize::from(stage < layers % stages)).collect(),
            counts => counts.to_vec(),
        };
        let sum = counts.iter().try_fold(0usize, |sum, &count| sum.checked_add(count));
        if counts.len() != stages || sum != Some(layers) {
            return Err(PlanError::Partition { layers, partition: counts, stages });
        }
        let largest = counts.iter().copied().max().unwrap_or(0);
        match self.recompute {
            Recompute::Layers(layers) if !(1..=largest).contains(&layers) => {
                Err(PlanError::Recompute { layers, largest })
            }
            _ => Ok(StageSpec::cut(&counts)),
        }
    }

    /// The part of each vector that a rank keeps.
    pub(crate) fn cuts(&self) -> Cuts {
        Cuts { stage: self.zero.stage, canonical: self.blocks().is_some() }
    }

    /// A difference between two orders of the same sums, relative to the size of what they sum, that counts as
    /// rounding: a hundred times what is seen. An operand between two numbers of its type goes to one or the other for
    /// an error in the last bit of f32.
    pub fn rounding(&self) -> f64 {
        match self.precision {
            Precision::Bf16 => 5e-2,
            _ if self.mixed.is_some() => 5e-2,
            // Eight times as many operands as in bf16 are rounded the other way, each by an eighth as much.
            Precision::Tf32 => 5e-2 / 8_f64.sqrt(),
            Precision::F32 => 1e-3,
        }
    }

    /// Reduction blocks along a dim that a mesh may cut, in canonical numerics; `None` in fast ones.
    pub fn blocks(&self) -> Option<usize> {
        match self.numerics {
            Numerics::Fast => None,
            Numerics::Canonical { blocks } => Some(blocks),
        }
    }
}
