//! Saves the state of a trainer.

use super::{CUTS, CheckpointError, RUN, UPDATES, dims_of, dtype_of, name_of, slice_of};
use meshwork_checkpoint::{Dtype, Held, SaveError, SavePlan, Saved, Tensor, TensorKind, Writer};
use meshwork_engine::{Plan, StateKind, StateSlice, StateView, Trainer, state_layout};
use meshwork_nn::Model;
use meshwork_tensor::Role;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The slices of the state of a run that each rank writes: a pure function of model and plan. [`SavePlan::bytes`] is
/// the memory that saving takes on a rank.
///
/// # Errors
/// A plan that does not fit the model.
pub fn save_plan(model: &Arc<dyn Model>, plan: &Plan) -> Result<SavePlan, CheckpointError> {
    save_plan_of(&state_layout(model, plan)?, plan.mesh.world_size())
}

/// The plan for the state that the ranks of a world hold.
pub(crate) fn save_plan_of(layout: &[StateSlice], world: usize) -> Result<SavePlan, CheckpointError> {
    let (mut tensors, mut places, mut held): (Vec<Tensor>, BTreeMap<String, usize>, Vec<Held>) = Default::default();
    for of in layout {
        let name = name_of(&of.key);
        let tensor = *places.entry(name.clone()).or_insert_with(|| {
            let kind = match (&of.key.state, of.kind) {
                (_, StateKind::Feedback | StateKind::PerReplica) => TensorKind::Feedback,
                (Some(_), _) => TensorKind::OptimizerState,
                (None, StateKind::Parameter(Role::Buffer)) => TensorKind::Buffer,
                (None, _) => TensorKind::Weight,
            };
            tensors.push(Tensor { name, kind, dtype: dtype_of(of.dtype), dims: dims_of(of.dims) });
            tensors.len() - 1
        });
        held.push(Held { tensor, slice: slice_of(&of.slice), ranks: vec![of.rank] });
    }
    Ok(SavePlan::new(world, tensors, &held)?)
}

/// Starts to save the state of a trainer, with the caller's own value `run`, and returns when it is
/// copied. The writer is made with the [`save_plan`] of the trainer's model and plan. Every rank calls this after the
/// same step.
///
/// Also returns the outcome of the save before, if that was still under way; it is waited for.
///
/// # Errors
/// While steps are under way; a writer for another model or plan.
pub fn save(
    writer: &mut Writer,
    trainer: &Trainer,
    run: Value,
) -> Result<Option<Result<Saved, SaveError>>, CheckpointError> {
    let (mut snapshot, before) = writer.snapshot();
    let wanted = writer.plan().clone();
    let rank = trainer.rank().world_rank();
    let (step, updates) = trainer.visit_state(
        |key| wanted.writes(rank, &name_of(key)),
        |StateView { key, dtype, slice, values, .. }| {
            let (name, extents) = (name_of(&key), dims_of(slice.stored));
            let mut put = |bytes: &[u8]| snapshot.put(&name, &slice_of(&slice), &extents, bytes);
            match dtype_of(dtype) {
                Dtype::U8 => put(&values.iter().map(|&code| code as u8).collect::<Vec<u8>>())?,
                _ => put(bytemuck::cast_slice(&little_endian(values.into())))?,
            }
            Ok::<_, CheckpointError>(())
        },
    )?;
    let cuts: Vec<usize> = trainer.plan().boundaries().iter().map(|cut| cut.layer).collect();
    writer.save(step, json!({ UPDATES: updates, RUN: run, CUTS: cuts }), snapshot);
    Ok(before)
}

/// Numbers whose bytes in memory are little-endian, from numbers, or the other way round. Costs nothing where memory is
/// little-endian.
pub(super) fn little_endian(mut values: Cow<'_, [f32]>) -> Cow<'_, [f32]> {
    if cfg!(target_endian = "big") {
        values.to_mut().iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
    }
    values
}
