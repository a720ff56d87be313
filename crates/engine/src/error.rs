//! Errors of training.

use crate::offload::OffloadError;
use crate::prelude::*;
use meshwork_core::agreement::Disagreement;
use meshwork_core::{BufferError, CommError, MeshError, SpmdError};
use meshwork_data_parallel::ReduceError;
use meshwork_pipeline::{CheckError, RunError, ShapeError, UnknownSchedule};

/// A result of training. Its error is [`TrainError`] unless another one is named.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// The error of a training run on one rank.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum TrainError {
    /// A tensor operation, a collective among them.
    #[error(transparent)]
    Tensor(#[from] meshwork_tensor::Error),
    /// A communication.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// A reduction of gradients.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
    /// A wrongly distributed value.
    #[error(transparent)]
    Spmd(#[from] SpmdError),
    /// An invalid mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A schedule that cannot run.
    #[error(transparent)]
    Schedule(#[from] CheckError),
    /// A shape that the schedule does not take.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An unknown schedule.
    #[error(transparent)]
    UnknownSchedule(#[from] UnknownSchedule),
    /// A failed action of the pipeline.
    #[error("{0}")]
    Pipeline(Box<RunError<TrainError, TrainError>>),
    /// An evaluation whose loss has no terms: every token or sample is masked. A training step without terms is no
    /// error, it is skipped.
    #[error("step {step}: every token or sample of the batch is masked, so the loss has no mean")]
    NoTerms { step: u64 },
    /// A claim about values that does not hold: see [`verify`](crate::verify). The weights were not changed.
    #[error("step {step}: {claim}, and {broken}; {valid}")]
    Claim { step: u64, claim: String, broken: String, valid: String },
    /// A model that mixes the tokens of a sequence by an operation that does not cache the earlier tokens that it
    /// reads, so that a decoder would give other logits than a pass over the whole sequence. Every rank has this error.
    #[error(
        "decode: one pass over {tokens} tokens, and two of which the second has the last token alone, give logits that differ by a relative \
         {relative:.1e} (at most {most:.0e} is rounding): an operation of the model mixes the tokens of a sequence without the cache, or counts \
         positions from 0 in each pass; mix tokens by causal_attention or grouped_attention, which cache what they need, and count positions \
         from Tape::past, as Var::positions does"
    )]
    Split { tokens: usize, relative: f64, most: f64 },
    /// Something that has other extents or other numbers on this mesh than on one rank. Found when a
    /// [`Trainer`](crate::Trainer) or a [`Decoder`](crate::Decoder) is made, unless its plan has
    /// [`Verify::Off`](crate::Verify::Off).
    #[error(
        "{what} {here} on {mesh} and {alone} on one rank: {valid} (a model that is meant to depend on its mesh is run with Verify::Off)"
    )]
    OneRank { what: String, mesh: String, here: String, alone: String, valid: &'static str },
    /// Ranks that were given input that they should not have. Other samples on the ranks of one dp rank, and another
    /// number of steps, are found with the report of the step, after its update; the same samples on two dp ranks
    /// before it. Every rank has the same error.
    #[error("step {step}: {of}")]
    Disagreement { step: u64, of: Box<Disagreement> },
    /// Samples without numbers, where AQ-SGD keeps an activation of each.
    #[error(
        "AQ-SGD keeps an activation of each sample, and the batch has no field {field:?} with their numbers: add one, an i32 for each"
    )]
    Unnumbered { field: &'static str },
    /// A sample whose activation has no place.
    #[error("AQ-SGD keeps activations of {samples} samples, and the batch has sample {number}: say how many there are")]
    Sample { number: usize, samples: usize },
    /// The loss or the gradient norm is not finite. The weights were not changed; feedback of compression starts again
    /// from zeros.
    #[error("step {step}: the {what} is {value}; the weights are those before this step")]
    NotFinite { step: u64, what: &'static str, value: f64 },
    /// Weights that are not finite: an update made them so, or they were read so. Every rank that takes part has this
    /// error.
    #[error(
        "after step {step} {name} has elements that are not finite: go on from an earlier checkpoint, with a lower learning rate, or from \
         other weights"
    )]
    Weight { step: u64, name: String },
    /// The loss of an evaluation is not finite, though the weights are.
    #[error("after step {step} the loss of an evaluation is {value}, with weights that are finite")]
    Evaluation { step: u64, value: f64 },
    /// The loss or the gradient norm of a step is not finite, and an asynchronous schedule has updated weights since.
    #[error(
        "step {step}: the {what} is {value}, and weights have been updated with it: start again with a lower learning rate"
    )]
    Diverged { step: u64, what: &'static str, value: f64 },
    /// Weights were requested while steps that may still change them are under way.
    #[error("{steps} steps are under way: flush() completes them first")]
    Pending { steps: usize },
    /// A value that does not fit the parameter it was meant for.
    #[error("parameter {name}: {problem}")]
    Parameter { name: String, problem: String },
    /// A stage whose output differs from the activation that the model declares.
    #[error("{op}: the activation is {given}, and the model says {expected}")]
    Activation { op: String, given: String, expected: String },
    /// A stage was called out of turn.
    #[error("stage {stage}, micro-batch {micro}: {problem}")]
    Stage { stage: usize, micro: usize, problem: &'static str },
    /// An invalid plan.
    #[error("{0}")]
    Plan(Box<PlanError>),
    /// Memory outside of the device that cannot be read or written.
    #[error("{0}")]
    Offload(Box<OffloadError>),
    /// State that does not fit this trainer.
    #[error("state of {name}: {problem}")]
    State { name: String, problem: String },
}

meshwork_core::debug_as_display!(TrainError);

impl TrainError {
    /// The operation, element type or update rule that the device lacks, if its lack ended the step.
    #[must_use]
    pub fn lack(&self) -> Option<&meshwork_tensor::Error> {
        use meshwork_tensor::Error;
        self.tensor().filter(|error| {
            matches!(
                error,
                Error::DType { .. }
                    | Error::MissingKernel { .. }
                    | Error::MissingOperation { .. }
                    | Error::HostFunction { .. }
                    | Error::UpdateRule { .. }
            )
        })
    }

    /// Whether the memory of the device was full.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.tensor(), Some(meshwork_tensor::Error::OutOfMemory { .. }))
    }

    /// The error of tensors that ended the step, if it was one.
    fn tensor(&self) -> Option<&meshwork_tensor::Error> {
        match self {
            Self::Tensor(error) => Some(error),
            Self::Pipeline(error) => match &**error {
                RunError::Stage { source, .. } | RunError::Transport { source, .. } => source.tensor(),
                _ => None,
            },
            _ => None,
        }
    }
}

meshwork_core::from! {
    TrainError: Tensor(BufferError), Plan(PlanError), Offload(OffloadError), Comm(CommError),
    Pipeline(RunError<TrainError, TrainError>)
}
