//! The run of a side on one of its ranks, and all that it sees in a step.

use super::side::{Hook, Key, Side, Site};
use super::ulps::Values;
use meshwork_core::{Axis, Coords, DType, Group, Rank, bf16, f16};
use meshwork_engine::{At, TrainError, Trainer, Watch};
use meshwork_tensor::param::{LocalSlice, Piece};
use meshwork_tensor::tape::Seen;
use meshwork_tensor::{ParamId, Tensor};
use meshwork_train::RankDevice;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A value as one rank saw it in one micro-batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) rank: usize,
    pub(super) micro: usize,
    /// Global index of the micro-batch's first sample.
    pub(super) first_sample: u64,
    /// Its extents there; of rows that are sent to their experts each rank has its own number.
    pub(super) dims: Vec<usize>,
    pub(super) values: Values,
}

/// A rank's part of a parameter after a step.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) rank: usize,
    /// The reduced gradient, the weights, and the optimizer's states. A frozen parameter has only weights, and no
    /// elements in place of the gradient. Of vectors that ranks share out, a rank has several slices or none.
    pub(super) vectors: Vec<Vec<Piece>>,
    /// The optimizer's states of rows, columns and other sets of its elements, each whole.
    pub(super) sets: Vec<Vec<f32>>,
}

/// The tokens at the places of a rank, in runs, by its data-parallel rank, the micro-batch, and its place in context
/// parallelism.
pub(super) type TokenPlaces = HashMap<(usize, usize, usize), Vec<Range<usize>>>;

/// Numbers of a step that every rank knows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Numbers {
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
}

/// Where and by how many ulps a rank changed a value.
pub(super) type Change = (Vec<usize>, u32);

/// All values that the ranks of a side saw in a step.
#[derive(Debug, Default)]
pub(super) struct Stepped {
    pub(super) records: HashMap<Key, Vec<Record>>,
    /// Parts of the parameters, by name.
    pub(super) held: HashMap<String, Vec<Held>>,
    /// The tokens that ranks of context parallelism have.
    pub(super) tokens: TokenPlaces,
    /// `None` if the step failed after its last backward pass.
    pub(super) numbers: Option<Numbers>,
    /// Why the step failed.
    pub(super) failed: Option<String>,
    /// The injected fault.
    pub(super) change: Option<Change>,
}

impl Stepped {
    pub(super) fn add(&mut self, saw: Saw) {
        let Saw { records, tokens, held, numbers, failed, change } = saw;
        records.into_iter().for_each(|(key, record)| self.records.entry(key).or_default().push(record));
        self.tokens.extend(tokens);
        held.into_iter().for_each(|(name, held)| self.held.entry(name).or_default().push(held));
        self.numbers = self.numbers.or(numbers);
        self.failed = self.failed.take().or(failed);
        self.change = self.change.take().or(change);
    }
}

/// What one rank saw in a step of a side.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Saw {
    records: Vec<(Key, Record)>,
    tokens: TokenPlaces,
    held: Vec<(String, Held)>,
    numbers: Option<Numbers>,
    failed: Option<String>,
    change: Option<Change>,
}

impl Saw {
    /// The same with the fault that was injected.
    pub(super) fn with_change(self, change: Option<Change>) -> Self {
        Self { change, ..self }
    }
}

/// The run of a side on one of its ranks.
pub(super) struct Run<'a> {
    side: &'a Side<'a>,
    trainer: Trainer,
    recorder: Arc<Recorder>,
}

impl<'a> Run<'a> {
    /// Starts the run of a side on this rank; `None` where the side has fewer ranks. Collective over the world.
    pub(super) fn start(name: char, side: &'a Side<'a>, world: &Group) -> Result<Option<Self>, TrainError> {
        let Side { model, plan, start, hook, devices, communicator, .. } = side;
        let size = plan.mesh.world_size();
        let members: Vec<usize> = if world.rank() < size { (0..size).collect() } else { vec![world.rank()] };
        let of_side = world.split(&format!("side {name}"), &members)?;
        if world.rank() >= size {
            return Ok(None);
        }
        let RankDevice { device, world } = devices.rank(of_side.communicator().clone())?;
        let world = communicator.as_ref().map_or(world.clone(), |wrap| wrap(world));
        let rank = Arc::new(Rank::new(&plan.mesh, world)?);
        let mut trainer = Trainer::new(model.clone(), plan, rank.clone(), device)?;
        if let Some(start) = start {
            trainer.load_weights(|spec, slice| start.read(spec, slice))?;
        }
        let recorder = Arc::new(Recorder {
            rank: rank.world_rank(),
            coords: rank.coords(),
            place: (rank.mesh().data_rank(rank.coords()), rank.group_over(&Axis::CONTEXT).rank()),
            hook: hook.clone(),
            records: Mutex::default(),
            tokens: Mutex::default(),
        });
        trainer.watch(recorder.clone());
        Ok(Some(Self { side, trainer, recorder }))
    }

    /// Runs a step.
    pub(super) fn step(&mut self) -> Result<Saw, TrainError> {
        let Self { side, trainer, recorder } = self;
        let mut batch = side.data.batch(trainer.steps_done(), side.plan.global_batch_size, trainer.samples())?;
        if let Some(before_step) = &side.before_step {
            before_step(trainer, &mut batch)?;
        }
        let done = trainer.step(&batch);
        let records = std::mem::take(&mut *recorder.records.lock().unwrap_or_else(PoisonError::into_inner));
        let tokens = std::mem::take(&mut *recorder.tokens.lock().unwrap_or_else(PoisonError::into_inner));
        let saw = Saw { records, tokens, ..Saw::default() };
        match done {
            Ok(report) => {
                let numbers = Numbers { loss: report.loss, grad_norm: report.grad_norm };
                Ok(Saw { held: held(trainer)?, numbers: Some(numbers), ..saw })
            }
            // Every rank ends with this error, after it has seen all values that led to it.
            Err(error @ (TrainError::NotFinite { .. } | TrainError::Weight { .. })) => {
                Ok(Saw { failed: Some(error.to_string()), ..saw })
            }
            Err(error) => Err(error),
        }
    }
}

/// A rank's part of every parameter of its stages.
fn held(trainer: &Trainer) -> Result<Vec<(String, Held)>, TrainError> {
    let (rank, params) = (trainer.rank(), trainer.params());
    let declarations = params.declarations();
    let of = |id: ParamId| {
        let spec = declarations.spec(id);
        let (mut vectors, mut sets) = (Vec::new(), Vec::new());
        for held in trainer.held(id) {
            let mut values = trainer.values(&held)?;
            // A schedule whose update took the gradient has no values of it.
            let slices = if values.is_empty() { Vec::new() } else { held.slices };
            let piece = |slice: LocalSlice| {
                let values = values.drain(..slice.stored.count()).collect();
                Piece { rank: rank.world_rank(), dims: spec.dims, slice, values }
            };
            match held.vector {
                Some(_) => vectors.push(slices.into_iter().map(piece).collect()),
                None => sets.push(values),
            }
        }
        Ok((spec.name.clone(), Held { rank: rank.world_rank(), vectors, sets }))
    };
    declarations.ids().map(of).collect()
}

/// Copies every value that a rank computes, after the hook may have changed it.
struct Recorder {
    rank: usize,
    coords: Coords,
    /// Its data-parallel rank, and its place in context parallelism.
    place: (usize, usize),
    hook: Option<Arc<Hook>>,
    records: Mutex<Vec<(Key, Record)>>,
    tokens: Mutex<TokenPlaces>,
}

impl Watch for Recorder {
    fn see(&self, at: At, seen: &Seen<'_>) -> Result<Option<Tensor>, meshwork_tensor::Error> {
        let &Self { rank, coords, .. } = self;
        let site = Site { rank, coords, stage: at.stage, micro: at.micro };
        let replaced = if let Some(hook) = &self.hook { hook(site, seen)? } else { None };
        // A forward that runs again for its backward was recorded the first time.
        if at.recomputed && seen.operand.is_none() {
            return Ok(replaced);
        }
        let tensor = replaced.as_ref().unwrap_or(seen.tensor);
        let values = match tensor.dtype() {
            DType::F64 => Values::F64(tensor.to_vec()?),
            // Distances are in ulps of f32, so that a run in 16 bits can be compared with one in f32.
            DType::Bf16 => Values::F32(tensor.to_vec::<bf16>()?.into_iter().map(f32::from).collect()),
            DType::F16 => Values::F32(tensor.to_vec::<f16>()?.into_iter().map(f32::from).collect()),
            _ => Values::F32(tensor.to_vec()?),
        };
        let (micro, first_sample, dims) = (at.micro, seen.position.first_sample, tensor.shape().to_vec());
        let record = Record { rank, micro, first_sample, dims, values };
        if !seen.tokens.is_empty() {
            let key = (self.place.0, micro, self.place.1);
            self.tokens.lock().unwrap_or_else(PoisonError::into_inner).insert(key, seen.tokens.to_vec());
        }
        let key = (at.stage, seen.number, seen.part, seen.operand.map(Cow::Borrowed));
        self.records.lock().unwrap_or_else(PoisonError::into_inner).push((key, record));
        Ok(replaced)
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorder(rank {})", self.rank)
    }
}
