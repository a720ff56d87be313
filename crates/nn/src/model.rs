//! The traits through which a trainer uses a model: [`Model`], and [`Stage`], one contiguous part of it.
//!
//! A model is data until it is cut. A trainer creates the stages of one rank, which declare their parameters, and runs
//! each of them once for every micro-batch:
//!
//! ```text
//!            ┌ stage 0 ┐ activation  ┌ stage 1 ┐ activation        ┌ last stage ┐
//! batch ────▶│ forward │ ──────────▶ │ forward │ ──────────▶  ...  │  forward   │ ─▶ loss of each sample
//!            └─────────┘             └─────────┘                   └────────────┘
//! ```
//!
//! Every stage may read the batch, and may leave auxiliary losses, metrics and statistics on its tape
//! ([`Tape::add_loss`], [`Tape::report`], [`Tape::note`]).

use crate::Batch;
pub use crate::batch::Field;
use meshwork_core::{DType, Mesh, Types};
use meshwork_tensor::{Declarations, Error, Result, Shape, Tape, Var};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// A model that can be trained: an ordered list of layers with a loss after the last.
pub trait Model: Debug + Send + Sync {
    /// Number of layers; a cut into stages may lie between any two. Parts at the ends of a model, such as an embedding
    /// or a head, are not counted: they belong to the first or the last stage, whatever layers these have.
    fn num_layers(&self) -> usize;

    /// The fields of a sample.
    fn fields(&self) -> Vec<Field>;

    /// Declares the parameters of one stage on `mesh`. It is called for every stage on every rank, so it must be cheap
    /// and return the same each time. It is called for a mesh of one rank too, with which a trainer compares the
    /// parameters and the operations of its own: what a model knows of degrees, it knows from `mesh`. A name is
    /// [declared](Declarations::declare) once in the model; layers of the same stage or of another that share the
    /// parameter [tie](Declarations::tie) it: one parameter, held by all of their stages.
    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>>;

    /// The activation that is sent over a cut before layer `at`, for a micro-batch like `batch`, which has the fields
    /// and number of samples of a micro-batch on one rank.
    fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation>;

    /// The number of terms in the summed loss of some samples: unmasked tokens, or samples. Training minimises the sum
    /// of all losses divided by the number of all terms.
    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        _ = batch;
        Ok(samples.len() as u64)
    }

    /// The model that continues sequences with the same parameters, where it is another one: a model that cuts
    /// sequences over ranks has single tokens there, which are the same on all of them.
    fn decoding(&self) -> Option<Arc<dyn Model>> {
        None
    }

    /// The field, one of [`fields`](Self::fields), that batches lack, because the frozen model computes it: numbers in
    /// f64 that [`Stage::reference`] gives in a pass without [adapters](meshwork_tensor::Tape::without_adapters),
    /// before each batch is trained or evaluated.
    fn reference(&self) -> Option<Field> {
        None
    }

    /// The metrics that its stages [report](Tape::report), and the names of their [auxiliary losses](Tape::add_loss).
    fn metrics(&self) -> Vec<Metric> {
        Vec::new()
    }
}

/// One contiguous part of a model, with the parameters that it declared.
pub trait Stage: Debug {
    /// The activation after this stage, with the types of [`Model::activation`]; after the last stage, the output of
    /// the model. `input` is the activation of the previous stage; `None` for the first. `batch` is this rank's
    /// micro-batch.
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var>;

    /// The loss of each sample, `[samples]` in f64, summed over its terms and never averaged, from the output of the
    /// last stage.
    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var>;

    /// The loss of each group of a sample's terms, `[samples, groups]` in f64. `groups` is a field of ids that says of
    /// which group each term is; a negative one is none. For models that compare parts of a sample with each other,
    /// such as the documents of a sequence.
    fn grouped_loss(&self, tape: &Tape, batch: &Batch, output: &Var, groups: &Field) -> Result<Var> {
        _ = (tape, batch);
        let problem = format!("the model has no loss by {}: write Stage::grouped_loss", groups.name);
        Err(Error::Shape { op: "grouped_loss", problem, shapes: vec![output.shape().to_vec()] })
    }

    /// The [reference](Model::reference) of each sample, in f64, from the output of the last stage of the frozen model.
    fn reference(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        _ = (tape, batch);
        let problem = "the model declares no reference, and is asked for it".to_owned();
        Err(Error::Shape { op: "reference", problem, shapes: vec![output.shape().to_vec()] })
    }

    /// The output of the last stage as predictions, whole on every rank.
    fn predict(&self, output: &Var) -> Result<Var> {
        Ok(output.clone())
    }
}

/// The part of a model that a stage has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSpec {
    /// Its layers; may be empty.
    pub layers: Range<usize>,
    /// Whether it is the first stage: it reads the batch, and has the embedding if there is one.
    pub first: bool,
    /// Whether it is the last stage: it has the head and the loss.
    pub last: bool,
}

impl StageSpec {
    /// The parts of a model cut into one stage per entry, which is its number of layers.
    ///
    /// ```
    /// use meshwork_nn::StageSpec;
    ///
    /// // All layers on the first stage; the last one is the head alone.
    /// let parts = StageSpec::cut(&[6, 0]);
    /// assert_eq!(parts[0], StageSpec { layers: 0..6, first: true, last: false });
    /// assert_eq!(parts[1], StageSpec { layers: 6..6, first: false, last: true });
    /// ```
    pub fn cut(layers: &[usize]) -> Vec<Self> {
        let mut start = 0;
        let part = |(stage, &count): (usize, &usize)| {
            let held = start..start + count;
            start = held.end;
            Self { layers: held, first: stage == 0, last: stage + 1 == layers.len() }
        };
        layers.iter().enumerate().map(part).collect()
    }
}

/// The tensor that is sent over a cut: the activation in forward, its gradient of the same shape in backward. Several
/// are sent [joined](crate::Joined).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// Element type.
    pub dtype: DType,
    /// Extents on one rank.
    pub shape: Shape,
    /// SPMD types; the gradient has their duals.
    pub types: Types,
}

/// A number that training reports beside the loss: the mean of one f64 for each sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// The divisor of the sum over the batch.
    pub per: Per,
}

/// The numbers over which a mean is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// All samples.
    Sample,
    /// All terms of the loss: samples or tokens that are masked do not count.
    Term,
}
