//! Reasons to refuse a plan when a trainer or decoder is made of it.

use crate::prelude::*;
use crate::{LossScale, MixedPrecision};
use meshwork_compress::Feedback;
use meshwork_core::{ReductionOrder, tree};
use meshwork_tensor::tape::HalfType;

/// Refuses a rank or a device that does not fit the plan.
pub(crate) fn require_fit(plan: &Plan, rank: &Rank, device: &dyn Device) -> Result<(), PlanError> {
    let same = |axis| plan.mesh.degree(axis) == rank.mesh().degree(axis);
    if !Axis::ALL.into_iter().all(same) {
        return Err(PlanError::Mesh { plan: plan.mesh.to_string(), rank: rank.mesh().to_string() });
    }
    if plan.blocks().is_some() && rank.world().communicator().reduction_order() < ReductionOrder::BalancedTree {
        return Err(PlanError::ReductionOrder);
    }
    // The samples of each rank, and of the ranks that share experts: their gradients are summed over the
    // rest of dp.
    let batch = plan.global_batch_size;
    for (degree, value) in [("dp", plan.mesh.data_degree()), ("dp / ep", plan.mesh.degree(Axis::Dp))] {
        if plan.blocks().is_some() && !tree::fits(batch, value) {
            return Err(PlanError::Subtree { batch, degree, value });
        }
    }
    plan.zero.require_groups(&plan.mesh)?;
    plan.compress.require_fit(plan)?;
    if let Some(mixed) = plan.mixed {
        require_mixed_fit(mixed, plan)?;
    }
    let precision = device.precision();
    if precision != plan.precision {
        return Err(PlanError::Precision { plan: plan.precision, device: device.name().to_owned(), precision });
    }
    Ok(())
}

/// Refuses settings that have no meaning where weights change within a step.
pub(crate) fn require_synchronous(plan: &Plan, schedule: &Schedule, model: &ModelPlan) -> Result<()> {
    if schedule.weights.is_synchronous() {
        return Ok(());
    }
    let name = || schedule.name.clone();
    let refuse = |what, fix| Err(PlanError::Asynchronous { what, schedule: name(), fix }.into());
    if plan.mixed.is_some_and(|mixed| matches!(mixed.loss_scale, LossScale::Dynamic { .. })) {
        return refuse(
            "a dynamic loss scale",
            "use a fixed one, or bf16: no rank knows in time that a gradient overflowed",
        );
    }
    if plan.blocks().is_some() {
        return refuse("canonical numerics", "use numerics Fast: no other mesh makes the same updates");
    }
    if plan.max_norm > 0.0 {
        return refuse("clipping", "use max_norm 0: no rank knows the norm of a whole gradient");
    }
    if model.model().reference().is_some() {
        return refuse("a reference", "use a synchronous schedule: a pass of the frozen model needs an empty pipeline");
    }
    if !model.tied_weights(schedule)?.is_empty() {
        return refuse("a tied weight", "untie it: its stages update it at different times");
    }
    for pp_rank in 0..schedule.ranks {
        if !model.local_model(schedule, pp_rank)?.declarations.statistics().is_empty() {
            return Err(PlanError::Statistics { schedule: name() }.into());
        }
    }
    Ok(())
}

/// Refuses storage in 16 bits that does not go with the rest of a plan.
fn require_mixed_fit(mixed: MixedPrecision, plan: &Plan) -> Result<(), PlanError> {
    let refuse = |problem: String| Err(PlanError::MixedPrecision { dtype: mixed.dtype.dtype(), problem });
    if plan.blocks().is_some() && mixed.reduce_in_half {
        return refuse(
            "canonical numerics add up gradients exactly, and in 16 bits each rank would round its share: reduce in f32, or use numerics Fast"
                .to_owned(),
        );
    }
    if plan.compress.feedback != Feedback::None && matches!(mixed.loss_scale, LossScale::Dynamic { .. }) {
        let feedback = plan.compress.feedback;
        return refuse(format!(
            "feedback {feedback:?} adds what a step lost, in that step's loss scale, to gradients in another: use a fixed loss scale, bf16, or no \
             feedback"
        ));
    }
    match mixed.loss_scale {
        LossScale::Fixed(scale) if !(scale.is_finite() && scale > 0.0) => {
            refuse(format!("a loss scale of {scale}: use a number above 0, best a power of two"))
        }
        LossScale::Fixed(scale) if scale == 1.0 && mixed.dtype == HalfType::F16 => refuse(
            "without a loss scale, gradients below 6e-8 would be zeros: use LossScale::Dynamic, or a fixed scale such as 1024"
                .to_owned(),
        ),
        LossScale::Dynamic { initial, growth_interval } => {
            if !(LossScale::LEAST..=LossScale::LARGEST).contains(&initial) || initial.log2().fract() != 0.0 {
                return refuse(format!("a first loss scale of {initial}: use a power of two from 2^-16 to 2^32"));
            }
            if growth_interval == 0 {
                return refuse("a growth interval of 0 steps: use 1 or more".to_owned());
            }
            Ok(())
        }
        LossScale::Fixed(_) => Ok(()),
    }
}
