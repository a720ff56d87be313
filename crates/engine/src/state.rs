//! The state of a training run by global name, slice and shape: a checkpoint holds it, and another mesh continues from
//! it.

use crate::Vector;
use crate::compress::crossing::{Crossing, Staged, crossings};
use crate::compress::history::{History, saved_slices};
use crate::compress::sum_plan::{SumPlan, SumState};
use crate::layout::Layout;
use crate::prelude::*;
use crate::state_vector::{StateKey, StateKind, StateVector, Storage};
use meshwork_optim::{Kept, State};
use meshwork_tensor::Shape;
use meshwork_tensor::param::{LocalSlice, Piece, assemble};
use std::collections::BTreeSet;
use std::fmt;

/// One rank's part of one vector.
#[derive(Clone, Debug, PartialEq)]
pub struct StatePiece {
    /// The name of the vector.
    pub key: StateKey,
    /// This rank's part of it.
    pub piece: Piece,
}

/// One rank's part of one vector, as it lies in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct StateView<'a> {
    /// The name of the vector.
    pub key: StateKey,
    /// Extents of the whole vector.
    pub dims: Shape,
    /// The type in which its elements are stored.
    pub dtype: DType,
    /// The part that this rank holds, and how it is stored.
    pub slice: LocalSlice,
    /// Its elements as they are stored, padding included; bytes as numbers.
    pub values: &'a [f32],
}

/// One rank's part of the state of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainState {
    /// Steps that are complete.
    pub step: u64,
    /// Updates of the weights so far: the number of steps, except with asynchronous schedules.
    pub updates: u64,
    /// Weights, buffers and optimizer states.
    pub pieces: Vec<StatePiece>,
}

/// A slice of one vector of the state, and a rank that holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSlice {
    /// The name of the vector.
    pub key: StateKey,
    /// The parameter, or the other owner, of the vector.
    pub kind: StateKind,
    /// Extents of the whole vector.
    pub dims: Shape,
    /// The type in which its elements are stored.
    pub dtype: DType,
    /// The slice.
    pub slice: LocalSlice,
    /// The world rank that holds it.
    pub rank: usize,
}

/// The part of a run's state that every rank holds: a pure function of model and plan, so that all ranks know it of
/// each other.
///
/// # Errors
/// A plan that does not fit the model.
pub fn state_layout(model: &Arc<dyn Model>, plan: &Plan) -> Result<Vec<StateSlice>> {
    let (schedule, model) = (plan.build_schedule()?, ModelPlan::new(model.clone(), plan)?);
    let mut all = Vec::new();
    let mut add = |rank: usize, vectors: Vec<StateVector>| {
        for StateVector { key, kind, dims, dtype, slices, .. } in vectors {
            let of = |(slice, _)| StateSlice { key: key.clone(), kind, dims, dtype, slice, rank };
            all.extend(slices.into_iter().map(of));
        }
    };
    for_each_layout(&model, plan, &schedule, |layout| {
        let sums: Vec<_> = (0..layout.flats.len()).map(|flat| layout.sum_plan(plan, flat, 1)).collect();
        add(layout.world_rank, of_parameters(plan, layout, &sums)?);
        Ok(())
    })?;
    let staged = Staged { plan, model: &model, schedule: &schedule };
    for rank in 0..plan.mesh.world_size() {
        add(rank, beside_parameters(plan, &crossings(staged, plan.mesh.coords(rank))?));
    }
    Ok(all)
}

/// The part of the gradients that every rank keeps after a step, under [`GRADIENT`]: as [`state_layout`] for the state.
///
/// # Errors
/// A plan that does not fit the model.
pub fn gradient_layout(model: &Arc<dyn Model>, plan: &Plan) -> Result<Vec<StateSlice>> {
    let (schedule, model) = (plan.build_schedule()?, ModelPlan::new(model.clone(), plan)?);
    let mut all = Vec::new();
    for_each_layout(&model, plan, &schedule, |layout| {
        for id in layout.trained().iter().flatten().copied() {
            let (spec, local, rank) = (layout.declarations.spec(id), layout.local(id), layout.world_rank);
            let (key, kind) = (StateKey::new(&spec.name, GRADIENT), StateKind::Parameter(spec.role));
            let of =
                |(slice, _)| StateSlice { key: key.clone(), kind, dims: spec.dims, dtype: DType::F32, slice, rank };
            all.extend(local.boxes(layout.part(id, Vector::Gradients)).into_iter().map(of));
        }
        Ok(())
    })?;
    Ok(all)
}

/// The name of the gradient among the vectors that go with a parameter.
pub const GRADIENT: &str = "gradient";

/// Calls `visit` with the layout of every rank, by stage.
fn for_each_layout(
    model: &ModelPlan,
    plan: &Plan,
    schedule: &Schedule,
    mut visit: impl FnMut(&Layout) -> Result<()>,
) -> Result<()> {
    let (mesh, tied) = (&plan.mesh, model.tied_weights(schedule)?);
    for pp_rank in 0..mesh.degree(Axis::Pp) {
        let local = model.local_model(schedule, pp_rank)?;
        let mut ranks = (0..mesh.world_size()).filter(|&rank| mesh.coords(rank).get(Axis::Pp) == pp_rank).peekable();
        // The same on all of them, but for the slices.
        let Some(&first) = ranks.peek() else { continue };
        let layout = Layout::new(plan, model, &local, schedule, &tied, first)?;
        ranks.try_for_each(|rank| visit(&layout.on(rank)))?;
    }
    Ok(())
}

/// The vectors that go with the parameters of a rank: states of the sums of compressed gradients, weights, and states
/// of the update rule.
pub(crate) fn of_parameters(plan: &Plan, layout: &Layout, sums: &[Option<SumPlan>]) -> Result<Vec<StateVector>> {
    let mut all = Vec::new();
    for (bucket, sum) in sums.iter().enumerate() {
        for SumState { key, dims, slice, state: name, range } in
            sum.as_ref().map_or(Ok(Vec::new()), |sum| layout.sum_states(bucket, sum))?
        {
            let (storage, slices) = (Storage::Sums { bucket, name }, vec![(slice, range)]);
            all.push(StateVector { key, kind: StateKind::PerReplica, dims, dtype: DType::F32, storage, slices });
        }
    }
    for id in layout.declarations.ids() {
        let spec = layout.declarations.spec(id);
        let kind = StateKind::Parameter(spec.role);
        let mut add = |state: Option<&str>, dims, dtype, storage: Storage| {
            let key = StateKey { parameter: spec.name.clone(), state: state.map(str::to_owned) };
            let slices = match storage.vector() {
                None => vec![(LocalSlice::whole(dims), 0..dims.count())],
                Some(vector) => layout.slices(id, vector),
            };
            all.push(StateVector { key, kind, dims, dtype, storage, slices });
        };
        let masters = plan.mixed.is_some() && !spec.group.frozen;
        add(None, spec.dims, DType::F32, if masters { Storage::Masters(id) } else { Storage::Weights(id) });
        let (shape, mut elements, mut sets) = (spec.shape(), 0, 0);
        let states = if spec.group.frozen { Vec::new() } else { plan.optimizer.states(&shape) };
        for State { name, kept } in states {
            let (dims, dtype, number) = match kept {
                Kept::Elements => (spec.dims, DType::F32, &mut elements),
                Kept::Codes => (spec.dims, DType::U8, &mut elements),
                Kept::Sets(over) => (Shape::new(&over.extents(&shape)), DType::F32, &mut sets),
            };
            let at = *number;
            *number += 1;
            let of_sets = matches!(kept, Kept::Sets(_));
            add(Some(name), dims, dtype, if of_sets { Storage::Sets(id, at) } else { Storage::Elements(id, at) });
        }
    }
    Ok(all)
}

/// The vectors of a rank that go with no parameter: the loss scale, and the states of values that cross cuts.
pub(crate) fn beside_parameters(plan: &Plan, crossings: &[Crossing]) -> Vec<StateVector> {
    let kind = StateKind::Feedback;
    let mut all = Vec::new();
    if plan.mixed.is_some() {
        all.push(StateVector::whole(
            StateKey::new("loss_scale", "dynamic"),
            kind,
            Shape::new(&[2]),
            Storage::LossScale,
        ));
    }
    let mut histories = BTreeSet::new();
    for crossing in crossings {
        let Crossing { site, dims, ref slice, .. } = *crossing;
        if let Some(samples) = plan.compress.aqsgd
            && site.direction == Direction::Activation
            && histories.insert(site.cut)
        {
            let slices = saved_slices(slice, samples).map(|slice| (slice.clone(), slice.ranges[0].clone())).collect();
            let (key, storage) = (crossing.key(History::SAMPLES), Storage::Samples { cut: site.cut });
            let dims = dims.with(0, samples);
            all.push(StateVector { key, kind, dims, dtype: DType::F32, storage, slices });
            let (key, storage) = (crossing.key(History::SEEN), Storage::Seen { cut: site.cut });
            all.push(StateVector::whole(key, kind, Shape::new(&[samples]), storage));
        }
        for name in crossing.states(plan) {
            let (key, storage) = (crossing.key(name), Storage::Feedback { site, name });
            let slices = vec![(slice.clone(), 0..slice.stored.count())];
            all.push(StateVector { key, kind, dims, dtype: DType::F32, storage, slices });
        }
    }
    all
}

/// A source of state: a run on another mesh, a checkpoint.
pub trait StateSource {
    /// Steps that are complete.
    fn step(&self) -> u64;

    /// Updates of the weights so far.
    fn updates(&self) -> u64;

    /// The extents of a vector, if there is one of that name.
    fn dims(&self, key: &StateKey) -> Option<Vec<usize>>;

    /// The elements of a slice of a vector whose whole extents are `dims`, as the slice is stored, padding zero.
    ///
    /// # Errors
    /// State that is missing or has other extents.
    fn read(&self, key: &StateKey, dims: Shape, slice: &LocalSlice) -> Result<Vec<f32>>;
}

/// The whole state of a run in host memory, assembled from all of its ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct WholeState {
    step: u64,
    updates: u64,
    vectors: BTreeMap<StateKey, (Shape, Vec<f32>)>,
}

impl WholeState {
    /// Assembles the parts of all ranks.
    ///
    /// # Errors
    /// Elements that no rank holds, ranks that hold different values of one element or give a vector other dims, or
    /// ranks at different steps.
    pub fn merge(ranks: &[TrainState]) -> Result<Self> {
        let refuse =
            |name: &dyn fmt::Display, problem: String| Err(TrainError::State { name: name.to_string(), problem });
        let Some(first) = ranks.first() else { return refuse(&"a run", "no rank gave any".to_owned()) };
        if let Some(other) = ranks.iter().find(|other| (other.step, other.updates) != (first.step, first.updates)) {
            return refuse(&"a run", format!("one rank is at step {}, another at {}", first.step, other.step));
        }
        let mut held: BTreeMap<StateKey, Vec<&Piece>> = BTreeMap::new();
        for StatePiece { key, piece } in ranks.iter().flat_map(|rank| &rank.pieces) {
            held.entry(key.clone()).or_default().push(piece);
        }
        let mut vectors = BTreeMap::new();
        for (key, pieces) in held {
            let (dims, rank) = (pieces[0].dims, pieces[0].rank);
            if let Some(other) = pieces.iter().find(|piece| piece.dims != dims) {
                let (found, at) = (other.dims, other.rank);
                return refuse(&key, format!("it has the dims {dims:?} on rank {rank} and {found:?} on rank {at}"));
            }
            let (whole, conflict) = assemble(dims, pieces);
            if let Some(conflict) = conflict {
                let ([a, b], [x, y]) = (conflict.ranks, conflict.values);
                return refuse(&key, format!("element {} is {x} on rank {a} and {y} on rank {b}", conflict.element));
            }
            let missing = whole.iter().position(Option::is_none);
            if let Some(element) = missing {
                return refuse(&key, format!("no rank holds element {element} of {dims:?}"));
            }
            vectors.insert(key, (dims, whole.into_iter().flatten().collect()));
        }
        Ok(Self { step: first.step, updates: first.updates, vectors })
    }

    /// A whole vector, row-major.
    pub fn vector(&self, key: &StateKey) -> Option<&[f32]> {
        self.vectors.get(key).map(|(_, values)| &values[..])
    }

    /// The names of all vectors.
    pub fn keys(&self) -> impl Iterator<Item = &StateKey> {
        self.vectors.keys()
    }
}

impl StateSource for WholeState {
    fn step(&self) -> u64 {
        self.step
    }

    fn updates(&self) -> u64 {
        self.updates
    }

    fn dims(&self, key: &StateKey) -> Option<Vec<usize>> {
        self.vectors.get(key).map(|(dims, _)| dims.to_vec())
    }

    fn read(&self, key: &StateKey, dims: Shape, slice: &LocalSlice) -> Result<Vec<f32>> {
        let refuse = |problem: String| Err(TrainError::State { name: key.to_string(), problem });
        match self.vectors.get(key) {
            None => refuse("the state has none of that name".to_owned()),
            Some((held, _)) if *held != dims => refuse(format!("the state has {held:?}, the model {dims:?}")),
            Some((_, whole)) => Ok(Piece::cut(0, dims, slice.clone(), whole).values),
        }
    }
}
