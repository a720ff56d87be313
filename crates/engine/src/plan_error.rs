//! Errors of plans.

use crate::prelude::*;
use meshwork_core::tree;
use meshwork_pipeline::ShapeError;
use meshwork_tensor::Precision;

/// Why a plan is invalid, and what would be valid.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum PlanError {
    /// A rank of a different mesh.
    #[error("the plan is for the mesh {plan}, and this rank is one of {rank}: make the ranks from the plan's mesh")]
    Mesh { plan: String, rank: String },
    /// An axis over which a model cuts nothing: its ranks would do the same work, and count for nothing.
    #[error(
        "the mesh has {axis}={degree}, and the model cuts nothing over {axis}, so that its {degree} ranks would each do \
         all of the work: use {axis}=1, and dp, tp or pp for more ranks, or a model whose values {axis} cuts"
    )]
    UnusedAxis { axis: Axis, degree: usize },
    /// A batch that cannot be cut evenly.
    #[error(
        "a global batch of {batch} samples cannot be cut into dp={dp} times {micros} micro-batches: use a multiple of {}",
        (dp * micros).max(1)
    )]
    Batch { batch: usize, dp: usize, micros: usize },
    /// A partition that does not give every layer a stage.
    #[error("{layers} layers cannot be cut into stages of {partition:?}: {stages} numbers must add up to them")]
    Partition { layers: usize, partition: Vec<usize>, stages: usize },
    /// More stages than layers.
    #[error(
        "{layers} layers cannot fill {stages} stages: use a lower pp, a deeper model, or a partition that leaves stages empty"
    )]
    Stages { layers: usize, stages: usize },
    /// Storage in 16 bits that does not go with the rest of the plan.
    #[error("mixed precision in {dtype}: {problem}")]
    MixedPrecision { dtype: DType, problem: String },
    /// A device that computes in a different type than the plan.
    #[error(
        "the plan computes products in {plan:?}, and the device {device} in {precision:?}: open it with the plan's precision"
    )]
    Precision { plan: Precision, device: String, precision: Precision },
    /// A communicator that does not promise the order of its sums.
    #[error(
        "canonical numerics need sums in one fixed order, and the communicator of this rank promises none: use numerics \
         Fast, or the thread communicator"
    )]
    ReductionOrder,
    /// The samples of a dp rank, or of the ranks that share experts, are not a subtree of the sum over the batch.
    #[error(
        "canonical numerics sum {batch} samples in a balanced tree. With {degree} = {value} it is cut into {value} equal parts, which are \
         not subtrees: use {degree} of {}, or another global batch",
        tree::degrees(*.batch).iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
    )]
    Subtree { batch: usize, degree: &'static str, value: usize },
    /// Running statistics under a schedule that updates weights within a step.
    #[error(
        "schedule {schedule} updates weights within a step, so running statistics (batch norm) have no mini-batch to be taken \
         over: use group norm, or a synchronous schedule"
    )]
    Statistics { schedule: String },
    /// An update rule for matrices, on a model or a parameter that has none.
    #[error("the update rule {rule} is for matrices of hidden layers, and {problem}: {fix}")]
    Rule { rule: String, problem: String, fix: &'static str },
    /// Stages on several ranks that do not go with the rest of the plan.
    #[error("stages on {replicas:?} ranks {problem}")]
    Replicas { replicas: Vec<usize>, problem: String },
    /// A combination that has no meaning with an asynchronous schedule.
    #[error("{what} does not go with schedule {schedule}, which updates weights within a step: {fix}")]
    Asynchronous { what: &'static str, schedule: String, fix: &'static str },
    /// Groups that cannot share out anything.
    #[error("ZeRO in groups of {group} data-parallel ranks: {problem}")]
    ZeroGroup { group: usize, problem: String },
    /// Compression that does not go with the rest of the plan or with the model.
    #[error("compression of {place} by {scheme}: {problem}")]
    Compress { place: &'static str, scheme: String, problem: String },
    /// Virtual cuts that are none.
    #[error("virtual cuts behind {cuts:?}: use increasing numbers of layers from 0 to {layers}")]
    VirtualCuts { cuts: Vec<usize>, layers: usize },
    /// A scheme that cannot be read.
    #[error("{0}")]
    Scheme(String),
    /// A parameter that no stage reads in training.
    #[error("parameter {name} is declared and nothing reads it in training: freeze it, or leave it out")]
    Unread { name: String },
    /// A number of layers to recompute that no stage has.
    #[error(
        "recomputation of the first {layers} layers of each stage: the largest stage has {largest}; use a number from 1 to {largest}, or \
         Recompute::None"
    )]
    Recompute { layers: usize, largest: usize },
    /// A metric that the model does not declare.
    #[error("stage {stage} reports {name:?}, which the model does not declare; it declares {declared:?}")]
    Metric { stage: usize, name: &'static str, declared: Vec<&'static str> },
    /// A shape that the schedule does not take.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

meshwork_core::debug_as_display!(PlanError);
