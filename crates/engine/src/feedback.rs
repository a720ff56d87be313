//! The states of feedback at the cuts: which messages of a step a rank sends and receives, and what it keeps of each,
//! by name and slice.
//!
//! A state has a place for each sample of the global batch, so that it does not depend on how the mesh cuts the batch.
//! It is named after the layer behind which the cut lies: where another number of stages has no cut, it is dropped, and
//! a new cut starts from zeros.

use crate::boundary::Boundary;
use crate::factor_sum::require_matrices;
use crate::message::Site;
use crate::packing::{Packed, refuse, require};
use crate::{ModelPlan, Plan, PlanError, StateKey, TrainError};
use meshwork_compress::feedback::Sender;
use meshwork_core::{Axis, Buffer, Coords, Mesh, Ty};
use meshwork_nn::{Activation, Batch, Model};
use meshwork_pipeline::{Direction, Schedule};
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;
use std::sync::Arc;

/// A message that one rank sends or receives in each step, of a value that is compressed.
#[derive(Clone, Debug)]
pub struct Crossing {
    /// Its place in a step.
    pub site: Site,
    /// Whether this rank sends it; else it receives it. At a virtual cut it does both.
    pub sends: bool,
    /// How it is compressed.
    pub packed: Packed,
    /// The name of the value.
    pub name: String,
    /// Extents of the value over the whole batch.
    pub dims: Shape,
    /// What this rank holds of it.
    pub slice: LocalSlice,
}

impl Crossing {
    /// The key of one of its states.
    pub fn key(&self, state: &str) -> StateKey {
        StateKey { parameter: self.name.clone(), state: Some(state.to_owned()) }
    }

    /// The states that this rank keeps: of a sender those that the feedback names, of a receiver the estimate.
    pub fn states(&self, plan: &Plan) -> impl Iterator<Item = &'static str> {
        let feedback = plan.compress.feedback;
        let kept = if self.sends { feedback.keeps() } else { [false, feedback.keeps_estimate(), false] };
        Sender::<Buffer>::NAMES.into_iter().zip(kept).filter_map(|(name, kept)| kept.then_some(name))
    }
}

/// The compressed messages of a step of the rank at `coords`.
///
/// # Errors
/// A value that cannot be compressed as the plan says.
pub fn crossings(
    plan: &Plan,
    model: &ModelPlan,
    schedule: &Schedule,
    mesh: &Mesh,
    coords: Coords,
) -> Result<Vec<Crossing>, TrainError> {
    let micros = plan.num_microbatches()?;
    let micro_batch = plan.micro_batch_size()?;
    let blank = Batch::blank(&model.model().fields(), micro_batch);
    let (me, canonical) = (coords.get(Axis::Pp), plan.blocks().is_some());
    let mut crossings = Vec::new();
    for (cut, boundary) in model.boundaries().iter().enumerate() {
        let [before, behind] = boundary.stages;
        let activation = model.activation_at(boundary, &blank)?;
        for direction in [Direction::Activation, Direction::Gradient] {
            let (value, from, to) = match direction {
                Direction::Activation => (activation, before, behind),
                Direction::Gradient => (Activation { types: activation.types.dual(), ..activation }, behind, before),
            };
            let Some(packed) = require(&plan.compress, boundary, direction, &value, (mesh, canonical))? else {
                continue;
            };
            if canonical && !boundary.is_virtual && schedule.ranks_of(before) != schedule.ranks_of(behind) {
                return Err(uncanonical(plan, boundary, packed, direction).into());
            }
            for micro in 0..micros {
                let [sends, receives] = [from, to].map(|stage| schedule.rank_of(stage, micro) == me);
                if sends == receives && !(sends && boundary.is_virtual) {
                    continue;
                }
                let site = Site { cut, direction, micro };
                let first = (mesh.data_rank(coords) * micros + micro) * micro_batch;
                let Some((dims, slice)) = place(&value, plan.global_batch_size, first, mesh, coords) else {
                    let aqsgd = plan.compress.aqsgd.is_some() && direction == Direction::Activation;
                    if aqsgd || plan.compress.feedback.keeps().contains(&true) {
                        let problem = "ranks have values of their own (Varying), which a state has no place for: use no feedback, and no aqsgd";
                        return Err(refuse(packed.scheme, boundary, direction, problem.to_owned()).into());
                    }
                    continue;
                };
                crossings.push(Crossing { site, sends, packed, name: boundary.value(direction), dims, slice });
            }
        }
    }
    Ok(crossings)
}

/// Refuses compression that does not go with a plan or with what the model sends, as a [`Trainer`](crate::Trainer)
/// does.
///
/// # Errors
/// What does not go together, and what would be valid.
pub fn require_compression(model: &Arc<dyn Model>, plan: &Plan) -> Result<(), TrainError> {
    plan.compress.require_fit(plan)?;
    let (schedule, model) = (plan.build_schedule()?, ModelPlan::new(model.clone(), plan)?);
    require_matrices(&plan.compress, &model.parameters()?)?;
    // Ranks of one stage have values of the same types.
    let mut ranks = (0..plan.mesh.degree(Axis::Pp)).map(|pp_rank| plan.mesh.coords(0).with(Axis::Pp, pp_rank));
    ranks.try_for_each(|coords| crossings(plan, &model, &schedule, &plan.mesh, coords).map(drop))
}

/// The error of a cut between ranks that other meshes do not have, in canonical numerics.
fn uncanonical(plan: &Plan, boundary: &Boundary, packed: Packed, direction: Direction) -> PlanError {
    let mut cuts = plan.virtual_cuts.clone();
    cuts.push(boundary.layer);
    cuts.sort_unstable();
    let problem = format!(
        "canonical numerics promise the bits of one rank, which has nobody to send compressed values to: let every mesh simulate this cut, \
         with virtual_cuts = {cuts:?}, or use numerics Fast"
    );
    refuse(packed.scheme, boundary, direction, problem)
}

/// The extents of a value over the whole batch, and the slice of them that a rank has of samples from `first` on;
/// `None` where its types do not say.
fn place(value: &Activation, batch: usize, first: usize, mesh: &Mesh, coords: Coords) -> Option<(Shape, LocalSlice)> {
    let (mut dims, mut ranges) = (value.shape, value.shape.iter().map(|&extent| 0..extent).collect::<Vec<_>>());
    for (axis, ty) in value.types.iter().filter(|(axis, _)| mesh.degree(*axis) > 1 && !axis.is_data()) {
        match ty {
            Ty::Shard(dim) if dim > 0 => {
                let (extent, rank) = (dims[dim], coords.get(axis));
                // The fastest axis, whose turn is first, makes the innermost cut.
                let start = ranges[dim].start + rank * extent;
                ranges[dim] = start..start + value.shape[dim];
                dims = dims.with(dim, extent * mesh.degree(axis));
            }
            Ty::Replicate | Ty::Invariant => {}
            Ty::Shard(_) | Ty::Varying | Ty::Partial => return None,
        }
    }
    ranges[0] = first..first + value.shape[0];
    Some((dims.with(0, batch), LocalSlice { stored: value.shape, ranges }))
}
