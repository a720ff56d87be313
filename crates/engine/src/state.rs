//! The state of a training run by global name, slice and shape: what a checkpoint holds, and what moves a run to
//! another mesh.

use crate::compress::crossing::{Crossing, Staged, crossings};
use crate::compress::history::{History, saved_slices};
use crate::compress::sum_plan::SumState;
use crate::layout::{Layout, kept_of_gradients};
use crate::state_vector::{StateKey, StateVector, loss_scale, vectors};
use crate::zero::Cuts;
use crate::{ModelPlan, Plan, TrainError};
use meshwork_core::{Axis, DType, Rank};
use meshwork_nn::Model;
use meshwork_pipeline::Direction;
use meshwork_tensor::param::{LocalSlice, Piece, assemble};
use meshwork_tensor::{Role, Shape};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

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

/// What a vector of the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// A parameter of this role, or a state of the optimizer that goes with it.
    Parameter(Role),
    /// What follows from earlier steps and is of no parameter: what compression lost, for feedback; the loss scale. A
    /// run may begin without it.
    Feedback,
    /// Error feedback of gradients: each data-parallel replica holds a residual of its own, and dim 0 counts the
    /// replicas. Training depends on the sum of the residuals alone, so a run resumes with another number of replicas.
    Shares,
}

/// A slice of one vector of the state, and a rank that holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSlice {
    /// The name of the vector.
    pub key: StateKey,
    /// What it is.
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

/// What every rank holds of the state of a run: a pure function of model and plan, so that all ranks know it of each
/// other.
///
/// # Errors
/// A plan that does not fit the model.
pub fn state_layout(model: &Arc<dyn Model>, plan: &Plan) -> Result<Vec<StateSlice>, TrainError> {
    let (schedule, model) = (plan.build_schedule()?, ModelPlan::new(model.clone(), plan)?);
    let (mesh, tied, cuts) = (&plan.mesh, model.tied_weights(&schedule)?, Cuts::of(plan));
    let mut state = Vec::new();
    for pp_rank in 0..mesh.degree(Axis::Pp) {
        let local = model.local_model(&schedule, pp_rank)?;
        let ranks: Vec<usize> =
            (0..mesh.world_size()).filter(|&rank| mesh.coords(rank).get(Axis::Pp) == pp_rank).collect();
        // The same on all of them, but for the slices.
        let recording = Rank::recording(mesh, ranks[0])?;
        let layout = Layout::new(plan, &model, &local, &schedule, &tied, &recording)?;
        for rank in ranks {
            let sums: Vec<_> = (0..layout.flats.len())
                .map(|flat| layout.sum_plan(plan, &local.declarations, rank, (flat, 1)))
                .collect();
            for (_, SumState { key, dims, slice, .. }) in
                kept_of_gradients(&layout, &sums, &local.declarations, mesh, rank)?
            {
                state.push(StateSlice { key, kind: StateKind::Shares, dims, dtype: DType::F32, slice, rank });
            }
            for id in local.declarations.ids() {
                let (spec, (flat, range)) = (local.declarations.spec(id), layout.place(id));
                let (held, slice) = (spec.local(mesh, mesh.coords(rank)), layout.slice(mesh, rank, flat));
                for StateVector { key, dims, dtype, place } in vectors(spec, &plan.optimizer, plan.mixed.is_some()) {
                    let of = |slice| StateSlice {
                        key: key.clone(),
                        kind: StateKind::Parameter(spec.role),
                        dims,
                        dtype,
                        slice,
                        rank,
                    };
                    let Some(vector) = place.vector() else {
                        state.push(of(LocalSlice::whole(dims)));
                        continue;
                    };
                    let window = cuts.window(vector, slice);
                    let start = window.start.clamp(range.start, range.end);
                    let part = start - range.start..window.end.clamp(start, range.end) - range.start;
                    state.extend(held.boxes(part).into_iter().map(|(slice, _)| of(slice)));
                }
            }
        }
    }
    let staged = Staged { plan, model: &model, schedule: &schedule };
    for rank in 0..mesh.world_size() {
        if plan.mixed.is_some() {
            let (key, dims) = loss_scale();
            state.push(StateSlice {
                key,
                kind: StateKind::Feedback,
                dims,
                dtype: DType::F32,
                slice: LocalSlice::whole(dims),
                rank,
            });
        }
        let mut histories = BTreeSet::new();
        for crossing in crossings(staged, mesh.coords(rank))? {
            let kind = StateKind::Feedback;
            if let Some(samples) = plan.compress.aqsgd
                && crossing.site.direction == Direction::Activation
                && histories.insert(crossing.site.cut)
            {
                let (all, dims) = (Shape::new(&[samples]), crossing.dims.with(0, samples));
                let of = |name, dims, slice| StateSlice {
                    key: crossing.key(name),
                    kind,
                    dims,
                    dtype: DType::F32,
                    slice,
                    rank,
                };
                state.extend(saved_slices(&crossing.slice, samples).map(|slice| of(History::SAMPLES, dims, slice)));
                state.push(of(History::SEEN, all, LocalSlice::whole(all)));
            }
            let Crossing { dims, ref slice, .. } = crossing;
            state.extend(crossing.states(plan).map(|name| StateSlice {
                key: crossing.key(name),
                kind,
                dims,
                dtype: DType::F32,
                slice: slice.clone(),
                rank,
            }));
        }
    }
    Ok(state)
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
    fn read(&self, key: &StateKey, dims: Shape, slice: &LocalSlice) -> Result<Vec<f32>, TrainError>;
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
    pub fn merge(ranks: &[TrainState]) -> Result<Self, TrainError> {
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

    fn read(&self, key: &StateKey, dims: Shape, slice: &LocalSlice) -> Result<Vec<f32>, TrainError> {
        let refuse = |problem: String| Err(TrainError::State { name: key.to_string(), problem });
        match self.vectors.get(key) {
            None => refuse("the state has none of that name".to_owned()),
            Some((held, _)) if *held != dims => refuse(format!("the state has {held:?}, the model {dims:?}")),
            Some((_, whole)) => Ok(Piece::cut(0, dims, slice.clone(), whole).values),
        }
    }
}
