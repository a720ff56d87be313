//! The states of feedback at the cuts: which messages of a step a rank sends and receives, and what it keeps of each, by name and slice.
//!
//! A state has a place for each sample of the global batch, so that it does not depend on how the mesh cuts the batch. It is named after the
//! layer behind which the cut lies: where another number of stages has no cut, it is dropped, and a new cut starts from zeros.

use crate::codec::{Packed, expected, refuse, require};
use crate::{ModelPlan, Plan, StateKey, TrainError};
use meshwork_compress::feedback::Sender;
use meshwork_core::{Axis, Buffer, Coords, Mesh, Ty};
use meshwork_nn::{Activation, Batch};
use meshwork_pipeline::{Direction, Schedule, Tag};
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;

/// A message that one rank sends or receives in each step, of a value that is compressed.
#[derive(Clone, Debug)]
pub struct Crossing {
    /// Its name in a step.
    pub tag: Tag,
    /// Whether this rank sends it; else it receives it.
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
    let activations = model.activations(&Batch::blank(&model.model().fields(), micro_batch))?;
    let me = coords.get(Axis::Pp);
    let mut crossings = Vec::new();
    for stage in 0..activations.len() {
        for (direction, from) in [(Direction::Activation, stage), (Direction::Gradient, stage + 1)] {
            let tag = Tag { direction, stage: from, micro: 0 };
            let value = expected(&activations, tag);
            let Some(packed) = require(&plan.compress, tag, &value, mesh)? else { continue };
            let layer = model.stages()[stage].layers.end;
            // Stages without layers have several cuts behind one layer.
            let before = model.stages()[..stage].iter().filter(|part| part.layers.end == layer).count();
            let cut = if before == 0 { format!("cut.{layer}") } else { format!("cut.{layer}.{before}") };
            let name = match direction {
                Direction::Activation => format!("{cut}.activation"),
                Direction::Gradient => format!("{cut}.gradient"),
            };
            for micro in 0..micros {
                let holds = |stage| schedule.rank_of(stage, micro) == me;
                let (sends, other) = (holds(from), holds(2 * stage + 1 - from));
                if sends == other {
                    continue;
                }
                let first = (mesh.data_rank(coords) * micros + micro) * micro_batch;
                let Some((dims, slice)) = place(&value, plan.global_batch_size, first, mesh, coords) else {
                    if plan.compress.feedback.keeps().contains(&true) {
                        let problem = "ranks have values of their own (Varying), which feedback has no place for: use no feedback";
                        return Err(refuse(packed.scheme, tag, problem.to_owned()).into());
                    }
                    continue;
                };
                crossings.push(Crossing { tag: Tag { micro, ..tag }, sends, packed, name: name.clone(), dims, slice });
            }
        }
    }
    Ok(crossings)
}

/// The extents of a value over the whole batch, and the slice of them that a rank has of samples from `first` on; `None` where its types do
/// not say.
fn place(value: &Activation, batch: usize, first: usize, mesh: &Mesh, coords: Coords) -> Option<(Shape, LocalSlice)> {
    let (mut dims, mut ranges) = (value.shape, value.shape.iter().map(|&extent| 0..extent).collect::<Vec<_>>());
    for (axis, ty) in value.types.iter().filter(|(axis, _)| mesh.degree(*axis) > 1 && !axis.is_data()) {
        match ty {
            Ty::Shard(dim) if dim > 0 => {
                let (extent, rank) = (dims[dim], coords.get(axis));
                let start = ranges[dim].start + rank * ranges[dim].len();
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
