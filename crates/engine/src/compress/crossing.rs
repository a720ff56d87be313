//! The messages that a rank sends and receives over cuts in a step, and the states that it keeps of each for feedback,
//! by name and slice.
//!
//! A state has a place for each sample of the global batch, so that it does not depend on how the mesh cuts the batch.
//! It is named after the layer behind which the cut lies: where another number of stages has no cut, it is dropped, and
//! a new cut starts from zeros.

use super::matrices::require_matrices;
use super::packing::{CutValue, Packed};
use crate::StateKey;
use crate::message::Site;
use crate::prelude::*;
use meshwork_compress::feedback::Sender;
use meshwork_core::Coords;
use meshwork_nn::Activation;
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;

/// A compressed message that one rank sends or receives in each step.
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
    /// The slice of it that this rank holds.
    pub slice: LocalSlice,
}

impl Crossing {
    /// The key of one of its states.
    pub fn key(&self, state: &str) -> StateKey {
        StateKey { parameter: self.name.clone(), state: Some(state.to_owned()) }
    }

    /// The states that this rank keeps: all of the feedback's as sender, its estimate as receiver.
    pub fn states(&self, plan: &Plan) -> impl Iterator<Item = &'static str> {
        let feedback = plan.compress.feedback;
        let kept = if self.sends { feedback.keeps() } else { [false, feedback.keeps_estimate(), false] };
        Sender::<Buffer>::NAMES.into_iter().zip(kept).filter_map(|(name, kept)| kept.then_some(name))
    }
}

/// A model that a plan cuts into stages.
#[derive(Clone, Copy, Debug)]
pub struct Staged<'a> {
    pub plan: &'a Plan,
    pub model: &'a ModelPlan,
    /// Which rank runs which stage when.
    pub schedule: &'a Schedule,
}

/// The compressed messages of a step of the rank at `coords`.
///
/// # Errors
/// A value that cannot be compressed as the plan says.
pub fn crossings(staged: Staged<'_>, coords: Coords) -> Result<Vec<Crossing>> {
    let Staged { plan, model, schedule } = staged;
    let (mesh, canonical) = (&plan.mesh, plan.blocks().is_some());
    let (micros, micro_batch) = (plan.num_microbatches()?, plan.micro_batch_size()?);
    let blank = Batch::blank(&model.model().fields(), micro_batch);
    let me = coords.get(Axis::Pp);
    let mut crossings = Vec::new();
    for (cut, boundary) in model.boundaries().iter().enumerate() {
        let [before, behind] = boundary.stages;
        let activation = model.activation_at(boundary, &blank)?;
        for direction in [Direction::Activation, Direction::Gradient] {
            let (value, from, to) = match direction {
                Direction::Activation => (activation, before, behind),
                Direction::Gradient => (Activation { types: activation.types.dual(), ..activation }, behind, before),
            };
            let at_cut = CutValue { boundary, direction, value: &value };
            let Some(packed) = at_cut.require(&plan.compress, mesh, canonical)? else { continue };
            if canonical && !boundary.is_virtual && schedule.ranks_of(before) != schedule.ranks_of(behind) {
                return Err(uncanonical(plan, at_cut, packed).into());
            }
            for micro in 0..micros {
                let [sends, receives] = [from, to].map(|stage| schedule.rank_of(stage, micro) == me);
                if sends == receives && !(sends && boundary.is_virtual) {
                    continue;
                }
                let site = Site { cut, direction, micro };
                let first = (mesh.data_rank(coords) * micros + micro) * micro_batch;
                let Some((dims, slice)) = batch_slice(&value, first, plan, coords) else {
                    let aqsgd = plan.compress.aqsgd.is_some() && direction == Direction::Activation;
                    if aqsgd || plan.compress.feedback.keeps().contains(&true) {
                        let problem = "ranks have values of their own (Varying), which a state has no place for: use no feedback, and no aqsgd";
                        return Err(at_cut.refuse(packed.scheme, problem.to_owned()).into());
                    }
                    continue;
                };
                crossings.push(Crossing { site, sends, packed, name: boundary.value(direction), dims, slice });
            }
        }
    }
    Ok(crossings)
}

/// Refuses compression that does not go with a plan or with the values that the model sends, as a
/// [`Trainer`](crate::Trainer) does.
///
/// # Errors
/// The settings that do not go together, and valid ones.
pub fn require_compression(model: &Arc<dyn Model>, plan: &Plan) -> Result<()> {
    plan.compress.require_fit(plan)?;
    let (schedule, model) = (plan.build_schedule()?, ModelPlan::new(model.clone(), plan)?);
    require_matrices(&plan.compress, &model.parameters()?)?;
    let staged = Staged { plan, model: &model, schedule: &schedule };
    // Ranks of one stage have values of the same types.
    let mut ranks = (0..plan.mesh.degree(Axis::Pp)).map(|pp_rank| plan.mesh.coords(0).with(Axis::Pp, pp_rank));
    ranks.try_for_each(|coords| crossings(staged, coords).map(drop))
}

/// The error of a cut between ranks that other meshes do not have, in canonical numerics.
fn uncanonical(plan: &Plan, at_cut: CutValue<'_>, packed: Packed) -> PlanError {
    let mut cuts = plan.virtual_cuts.clone();
    cuts.push(at_cut.boundary.layer);
    cuts.sort_unstable();
    let problem = format!(
        "canonical numerics promise the bits of one rank, which has nobody to send compressed values to: let every mesh simulate this cut, \
         with virtual_cuts = {cuts:?}, or use numerics Fast"
    );
    at_cut.refuse(packed.scheme, problem)
}

/// The extents of a value over the whole batch, and the slice of them that a rank has of samples from `first` on;
/// `None` where its types do not say.
fn batch_slice(value: &Activation, first: usize, plan: &Plan, coords: Coords) -> Option<(Shape, LocalSlice)> {
    let (mesh, mut dims) = (&plan.mesh, value.shape);
    let mut ranges: Vec<_> = value.shape.iter().map(|&extent| 0..extent).collect();
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
    Some((dims.with(0, plan.global_batch_size), LocalSlice { stored: value.shape, ranges }))
}
