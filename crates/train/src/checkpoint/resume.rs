//! Resumes a trainer from the newest checkpoint that is whole, on any mesh.
//!
//! Each rank reads the bytes of its slices. Pieces that no rank reads whole are verified by all ranks together.
//! Then they agree: if any of them found damage, all go on to the checkpoint before; if any of them could not read, all
//! end with its error.

use super::save::little_endian;
use super::{CheckpointError, RUN, UPDATES, dims_of, dtype_of, name_of, slice_of};
use crate::stop::is_asked;
use meshwork_checkpoint::{Checkpoint, Dtype, Index, ReadError, TensorKind, Unread, folder_name, share, steps};
use meshwork_core::{Group, ReduceOp};
use meshwork_engine::{Plan, StateKey, StateKind, StateSlice, StateSource, TrainError, Trainer, state_layout};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{ParamSpec, Shape};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The checkpoint that a run goes on from.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// Steps that are complete.
    pub step: u64,
    /// The value that the caller gave to [`save`](super::save()).
    pub run: Value,
    /// Bytes of tensors that this rank read.
    pub bytes_read: u64,
    /// Newer checkpoints that are damaged: what is wrong with each, as the first rank that found it says. The same on
    /// every rank.
    pub passed_over: Vec<String>,
    /// Feedback of compression that this run cannot use, because it has other extents: it starts from zeros.
    pub anew: Vec<String>,
    /// States of the optimizer that the checkpoint has and this run did not take: all start from zeros, and so does the
    /// count of updates.
    pub dropped: usize,
}

/// The parts of a checkpoint that a run may leave behind. By default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leeway {
    /// The states of the optimizer.
    pub states: States,
    /// Rows of a parameter in the checkpoint, and fewer of them here: it takes the first ones, as a table of positions
    /// for shorter samples.
    pub first_rows: Option<(u64, u64)>,
}

/// The treatment of the states of an optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum States {
    /// They must fit.
    #[default]
    Keep,
    /// They are dropped if one of them does not fit.
    KeepIfFit,
    /// They are dropped: states of another update rule mean something else, whatever their names.
    Drop,
}

/// Continues from the newest checkpoint in `dir` that is whole; `None` if there is none at all. `plan` is that of the
/// trainer. The checkpoint may be of any mesh, schedule and number of micro-batches. `accept` is shown its step and its
/// `run` before anything is loaded. It may refuse it, and says what may be left behind, the same on every rank. `stop`
/// ends it between two reads.
///
/// Collective: every rank of the trainer's mesh calls it.
///
/// # Errors
/// A state that does not fit, with everything that does not; a checkpoint that some rank cannot read now; checkpoints
/// that are all damaged. [`CheckpointError::Stopped`] on a rank that was asked to stop. The trainer cannot be used any
/// more.
pub fn resume<E: From<CheckpointError>>(
    trainer: &mut Trainer,
    plan: &Plan,
    dir: &Path,
    stop: &AtomicBool,
    accept: impl Fn(u64, &Value) -> Result<Leeway, E>,
) -> Result<Option<Resumed>, E> {
    let layout = state_layout(trainer.plan().model(), plan).map_err(CheckpointError::from)?;
    resume_into(trainer, &layout, dir, stop, accept)
}

/// [`resume`] with the layout of the state of all ranks.
pub(crate) fn resume_into<E: From<CheckpointError>>(
    trainer: &mut Trainer,
    layout: &[StateSlice],
    dir: &Path,
    stop: &AtomicBool,
    accept: impl Fn(u64, &Value) -> Result<Leeway, E>,
) -> Result<Option<Resumed>, E> {
    let steps = agreed_steps(trainer.rank().world(), dir)?;
    resume_from(trainer, layout, (dir, &steps), stop, accept)
}

/// [`resume_into`] from the first of some checkpoints that is whole.
pub(crate) fn resume_from<E: From<CheckpointError>>(
    trainer: &mut Trainer,
    layout: &[StateSlice],
    (dir, steps): (&Path, &[u64]),
    stop: &AtomicBool,
    accept: impl Fn(u64, &Value) -> Result<Leeway, E>,
) -> Result<Option<Resumed>, E> {
    let world = trainer.rank().world().clone();
    let mut passed_over = Vec::new();
    for &step in steps {
        let path = dir.join(folder_name(step));
        let opened = Checkpoint::open_step(dir, step);
        if let Some(damage) = agree(&world, &path, opened.as_ref().err())? {
            passed_over.push(damage);
            continue;
        }
        let checkpoint = opened.map_err(CheckpointError::from)?;
        // The index is the same for all ranks, and so is the answer.
        let leeway = accept(step, checkpoint.index().metadata.get(RUN).unwrap_or(&Value::Null))?;
        // If one rank alone refuses it, its reason is the error, and not the faults that the others find next.
        world.barrier().map_err(CheckpointError::from)?;
        let Fit { mut misfits, misfit_states, anew } = fit(checkpoint.index(), layout, leeway);
        let drops = match leeway.states {
            States::Drop => true,
            States::KeepIfFit => !misfit_states.is_empty(),
            States::Keep => {
                misfits.extend(misfit_states);
                false
            }
        };
        if !misfits.is_empty() {
            return Err(CheckpointError::Misfit { path: checkpoint.path().to_path_buf(), misfits }.into());
        }
        let stored = checkpoint.index().tensors.iter().filter(|of| of.tensor.kind == TensorKind::OptimizerState);
        let dropped = if drops { stored.count() } else { 0 };
        let loaded = load(trainer, layout, &checkpoint, drops, stop)?;
        match agree(&world, &path, loaded.as_ref().err())? {
            Some(damage) => passed_over.push(damage),
            None => {
                let run = checkpoint.index().metadata.get(RUN).cloned().unwrap_or_default();
                let bytes_read = checkpoint.bytes_read();
                return Ok(Some(Resumed { step, run, bytes_read, passed_over, anew, dropped }));
            }
        }
    }
    match passed_over.is_empty() {
        true => Ok(None),
        false => Err(CheckpointError::AllDamaged { dir: dir.to_path_buf(), damage: passed_over }.into()),
    }
}

/// The differences between the state of a checkpoint and the state that ranks hold.
#[derive(Debug, Default)]
struct Fit {
    /// Vectors that only one of them has, and parameters of other extents: the checkpoint cannot be used.
    misfits: Vec<String>,
    /// Such misfits of states of the optimizer, without which it can be used.
    misfit_states: Vec<String>,
    /// Feedback of other extents: of other samples, another batch, factors of another rank.
    anew: Vec<String>,
}

fn fit(index: &Index, layout: &[StateSlice], leeway: Leeway) -> Fit {
    let of_model = |of: &StateSlice| (name_of(&of.key), (of.dims, dtype_of(of.dtype), of.kind, of.key.state.is_some()));
    let wanted: BTreeMap<String, (Shape, Dtype, StateKind, bool)> = layout.iter().map(of_model).collect();
    let stored: BTreeMap<&str, _> = index.tensors.iter().map(|of| (&*of.tensor.name, &of.tensor)).collect();
    let mut fit = Fit::default();
    for (name, &(dims, held, kind, is_state)) in &wanted {
        let is_parameter = matches!(kind, StateKind::Parameter(_));
        let misfits = if is_state { &mut fit.misfit_states } else { &mut fit.misfits };
        let Some(tensor) = stored.get(&**name) else {
            if is_parameter {
                misfits.push(format!("{name}: the checkpoint has none, the model {dims:?}"));
            }
            continue; // Feedback that is missing starts from zeros.
        };
        // Shares are of any number of replicas.
        let counted = usize::from(kind == StateKind::PerReplica);
        let ours = dims_of(dims);
        let alike = tensor.dims.get(counted..) == ours.get(counted..);
        let rows = tensor.dims.first().copied().zip(ours.first().copied());
        let longer = rows.is_some() && rows == leeway.first_rows && tensor.dims.get(1..) == ours.get(1..);
        if (alike || is_parameter && longer) && tensor.dtype == held {
            continue;
        }
        let (found, dtype, held) = (&tensor.dims, tensor.dtype.name(), held.name());
        match is_parameter || alike {
            true => misfits.push(format!("{name}: the checkpoint has {dtype} {found:?}, the model {held} {dims:?}")),
            false => fit.anew.push(format!("{name}: the checkpoint has {found:?}, this run {dims:?}")),
        }
    }
    let extra =
        stored.iter().filter(|(name, tensor)| !wanted.contains_key(**name) && tensor.kind != TensorKind::Feedback);
    for (name, tensor) in extra {
        let told = format!("{name}: the checkpoint has {:?}, the model none", tensor.dims);
        match tensor.kind {
            TensorKind::OptimizerState => fit.misfit_states.push(told),
            _ => fit.misfits.push(told),
        }
    }
    fit
}

/// Verifies this rank's share of the pieces that no rank reads whole, and reads this rank's slices into the trainer.
/// The inner error is that of this rank's reads, on which all ranks have to agree.
fn load(
    trainer: &mut Trainer,
    layout: &[StateSlice],
    checkpoint: &Checkpoint,
    drops: bool,
    stop: &AtomicBool,
) -> Result<Result<(), Unread>, CheckpointError> {
    let stored = checkpoint.index().tensors.iter().map(|of| (&*of.tensor.name, &*of.tensor.dims));
    let stored: BTreeMap<&str, &[u64]> = stored.collect();
    let is_state = |of: &StateSlice| matches!(of.kind, StateKind::Parameter(_)) && of.key.state.is_some();
    let dropped: BTreeSet<&StateKey> = layout.iter().filter(|of| drops && is_state(of)).map(|of| &of.key).collect();
    let is_read = |of: &&StateSlice| {
        !dropped.contains(&of.key) && stored.get(&*name_of(&of.key)).is_some_and(|held| **held == *dims_of(of.dims))
    };
    // Shares are read as another number of replicas left them: they are verified with the pieces that nobody reads
    // whole.
    let slices = layout.iter().filter(|of| of.kind != StateKind::PerReplica).filter(is_read);
    let slices: Vec<_> = slices.map(|of| (name_of(&of.key), slice_of(&of.slice))).collect();
    let units = checkpoint.units_not_read_whole(slices.iter().map(|(name, slice)| (&**name, slice)));
    let (rank, ranks) = (trainer.rank().world_rank(), trainer.rank().mesh().world_size());
    for unit in share(checkpoint, &units, rank, ranks) {
        if is_asked(stop) {
            return Err(CheckpointError::Stopped);
        }
        match checkpoint.verify(&[unit]).map(|damage| damage.into_iter().next()) {
            Ok(None) => {}
            Ok(Some(damage)) => return Ok(Err(damage.into())),
            Err(error) => return Ok(Err(error.into())),
        }
    }
    let Some(updates) = checkpoint.index().metadata.get(UPDATES).and_then(Value::as_u64) else {
        return Err(CheckpointError::Foreign { path: checkpoint.path().to_path_buf(), key: UPDATES });
    };
    // A rule without states begins with its first update.
    let updates = if drops { 0 } else { updates };
    let source = Source { checkpoint, updates, dropped, unread: RefCell::default(), stop };
    let loaded = trainer.load_state(&source);
    if is_asked(stop) {
        return Err(CheckpointError::Stopped);
    }
    if let Some(unread) = source.unread.into_inner() { Ok(Err(unread)) } else { Ok(Ok(loaded?)) }
}

/// The state in a checkpoint, as the engine reads it.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    updates: u64,
    /// The states that are zeros.
    dropped: BTreeSet<&'a StateKey>,
    /// The damage that reading found; the engine's errors have no place for it.
    unread: RefCell<Option<Unread>>,
    stop: &'a AtomicBool,
}

impl StateSource for Source<'_> {
    fn step(&self) -> u64 {
        self.checkpoint.index().step
    }

    fn updates(&self) -> u64 {
        self.updates
    }

    fn dims(&self, key: &StateKey) -> Option<Vec<usize>> {
        let name = name_of(key);
        let found = self.checkpoint.index().tensors.iter().find(|of| of.tensor.name == name)?;
        Some(found.tensor.dims.iter().map(|&extent| extent as usize).collect())
    }

    fn read(&self, key: &StateKey, _: Shape, slice: &LocalSlice) -> Result<Vec<f32>, TrainError> {
        if is_asked(self.stop) {
            return Err(TrainError::State { name: key.to_string(), problem: "the run was asked to stop".to_owned() });
        }
        let (name, count) = (name_of(key), slice.stored.count());
        if self.dropped.contains(key) {
            return Ok(vec![0.0; count]);
        }
        let (mut values, mut codes) = (vec![0f32; count], vec![0u8; count]);
        let in_bytes =
            self.checkpoint.index().tensors.iter().any(|of| of.tensor.name == name && of.tensor.dtype == Dtype::U8);
        let bytes = if in_bytes { &mut codes } else { bytemuck::cast_slice_mut(&mut values) };
        match self.checkpoint.read_into(&name, &slice_of(slice), &dims_of(slice.stored), bytes) {
            Ok(()) if in_bytes => Ok(codes.into_iter().map(f32::from).collect()),
            Ok(()) => Ok(little_endian(values.into()).into_owned()),
            Err(error) => {
                let (name, problem) = (key.to_string(), error.to_string());
                if let ReadError::Unread(unread) = error {
                    self.unread.replace(Some(unread));
                }
                Err(TrainError::State { name, problem })
            }
        }
    }
}

/// The elements of a parameter that a rank holds.
pub(crate) fn read_weights(
    checkpoint: &Checkpoint,
    spec: &ParamSpec,
    slice: &LocalSlice,
) -> Result<Vec<f32>, ReadError> {
    let mut values = vec![0f32; slice.stored.count()];
    let key = StateKey { parameter: spec.name.clone(), state: None };
    let bytes = bytemuck::cast_slice_mut(&mut values);
    checkpoint.read_into(&name_of(&key), &slice_of(slice), &dims_of(slice.stored), bytes)?;
    Ok(little_endian(values.into()).into_owned())
}

/// The steps of the checkpoints in a folder, the newest first, as rank 0 sees them.
fn agreed_steps(world: &Group, dir: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut found = Vec::new();
    if world.rank() == 0 {
        let folder =
            |error: std::io::Error| CheckpointError::Folder { dir: dir.to_path_buf(), problem: error.to_string() };
        found = steps(dir).map_err(folder)?.into_iter().flat_map(u64::to_le_bytes).collect();
    }
    let found = world.broadcast_bytes(found, 0)?;
    Ok(found.as_chunks().0.iter().map(|&step| u64::from_le_bytes(step)).collect())
}

/// The damage that the first rank found that found any, if all ranks could read. Every rank gets the same.
///
/// # Errors
/// A rank that could not read: that some other rank found damage does not count then, because the same cause may be
/// behind both.
fn agree(world: &Group, path: &Path, mine: Option<&Unread>) -> Result<Option<String>, CheckpointError> {
    let (rank, ranks) = (world.rank() as i64, world.size() as i64);
    // The gravest first, of these the first rank's.
    let grave = match mine {
        None => 0,
        Some(Unread::Damage(_)) => 1,
        Some(Unread::Unreadable(_)) => 2,
    };
    let mut first = [grave * ranks + (ranks - 1 - rank)];
    world.all_reduce_slice(&mut first, ReduceOp::Max)?;
    let (grave, root) = (first[0] / ranks, (ranks - 1 - first[0] % ranks) as usize);
    if grave == 0 {
        return Ok(None);
    }
    let text = mine.map(|unread| unread.to_string().into_bytes()).unwrap_or_default();
    let problem = String::from_utf8_lossy(&world.broadcast_bytes(text, root)?).into_owned();
    match grave {
        1 => Ok(Some(problem)),
        _ => Err(CheckpointError::Unreadable { path: path.to_path_buf(), rank: root, problem }),
    }
}
