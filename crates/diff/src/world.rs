//! One of the two runs. Its ranks are threads that execute a step on request and return all values that they saw in it.

use super::side::{Error, Hook, Key, Side, Site};
use super::ulps::Values;
use meshwork_core::comm::thread::Options;
use meshwork_core::{Axis, Coords, DType, Group, Rank, RunError, World, bf16, f16, pool};
use meshwork_engine::{At, StepReport, TrainError, Trainer, Watch};
use meshwork_tensor::param::{LocalSlice, Piece};
use meshwork_tensor::tape::Seen;
use meshwork_tensor::{ParamId, Shape, Tensor};
use meshwork_train::RankDevice;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};

/// A value as one rank saw it in one micro-batch.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) rank: usize,
    pub(super) coords: Coords,
    pub(super) micro: usize,
    /// Global index of the micro-batch's first sample.
    pub(super) first_sample: u64,
    /// Its extents there; of rows that are sent to their experts each rank has its own number.
    pub(super) shape: Shape,
    pub(super) values: Values,
}

/// A rank's part of a parameter after a step.
#[derive(Debug, Default)]
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

/// All values that the ranks of a run saw in a step.
#[derive(Debug, Default)]
pub(super) struct Stepped {
    pub(super) records: HashMap<Key, Vec<Record>>,
    /// Parts of the parameters, by name.
    pub(super) held: HashMap<String, Vec<Held>>,
    /// The tokens that ranks of context parallelism have.
    pub(super) tokens: TokenPlaces,
    /// Loss and gradient norm; `None` if the step failed after its last backward pass.
    pub(super) report: Option<Box<StepReport>>,
}

/// A message of a rank: the values of a step, or that the rank has ended.
enum Told {
    Step {
        rank: usize,
        records: Vec<(Key, Record)>,
        tokens: TokenPlaces,
        held: Vec<(String, Held)>,
        report: Option<Box<StepReport>>,
    },
    Gone {
        rank: usize,
    },
}

/// A run under way.
pub(super) struct Run<'scope> {
    name: char,
    go: Vec<Sender<()>>,
    told: Receiver<Told>,
    thread: ScopedJoinHandle<'scope, Result<Vec<()>, RunError>>,
}

impl<'scope> Run<'scope> {
    /// Starts the ranks of a side. They wait for the first step.
    pub(super) fn start<'env>(
        scope: &'scope Scope<'scope, 'env>,
        name: char,
        side: &'env Side<'env>,
    ) -> Result<Self, Error> {
        let size = side.plan.mesh.world_size();
        let (go, wait): (Vec<_>, Vec<_>) =
            (0..size).map(|_| channel()).map(|(go, wait)| (go, Mutex::new(wait))).unzip();
        let (tell, told) = channel();
        let options = Options { timeout: side.timeout };
        let thread = scope.spawn(move || {
            World::Threads(size).run_with(options, |world| {
                let wait = wait[world.rank()].lock().unwrap_or_else(PoisonError::into_inner);
                let teller = Teller { rank: world.rank(), to: tell.clone() };
                run_rank(side, world, &wait, &teller)
            })
        });
        Ok(Self { name, go, told, thread })
    }

    /// Runs a step on every rank. `None` if some rank failed before it had seen the whole step; [`end`](Self::end)
    /// returns the reason.
    pub(super) fn step(&mut self) -> Option<Stepped> {
        let mut stepped = Stepped::default();
        for go in &self.go {
            _ = go.send(()); // to a rank that is gone: it has said so
        }
        let mut missing: BTreeSet<usize> = (0..self.go.len()).collect();
        while !missing.is_empty() {
            let (rank, records, tokens, held, report) = match self.told.recv().ok()? {
                Told::Step { rank, records, tokens, held, report } => (rank, records, tokens, held, report),
                Told::Gone { rank } if missing.contains(&rank) => return None,
                // It ended after it had sent everything; the next step will not include it.
                Told::Gone { .. } => continue,
            };
            missing.remove(&rank);
            records.into_iter().for_each(|(key, record)| stepped.records.entry(key).or_default().push(record));
            stepped.tokens.extend(tokens);
            held.into_iter().for_each(|(name, held)| stepped.held.entry(name).or_default().push(held));
            stepped.report = stepped.report.or(report);
        }
        Some(stepped)
    }

    /// Ends the ranks, and returns the error of a run that failed.
    pub(super) fn end(self) -> Result<(), Error> {
        let Self { name, go, told, thread } = self;
        drop(go);
        drop(told);
        match thread.join() {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Error::Run { side: name, error: error.to_string() }),
            Err(_) => Err(Error::Run { side: name, error: "its ranks could not be started".to_owned() }),
        }
    }
}

/// Reports, at the latest when dropped, that its rank has ended, so that nothing waits for a rank that failed.
struct Teller {
    rank: usize,
    to: Sender<Told>,
}

impl Teller {
    fn tell(&self, told: Told) {
        _ = self.to.send(told); // nobody listens once a comparison has failed
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.tell(Told::Gone { rank: self.rank });
    }
}

/// Runs one rank: a step for each request.
fn run_rank(side: &Side<'_>, world: Group, wait: &Receiver<()>, teller: &Teller) -> Result<(), TrainError> {
    let Side { model, plan, start, data, hook, before_step, devices, communicator, .. } = side;
    let RankDevice { device, world } = devices.rank(world.communicator().clone())?;
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
    // The other run computes while this one waits.
    while pool::yield_core(|| wait.recv()).is_ok() {
        let mut batch = data.batch(trainer.steps_done(), plan.global_batch_size, trainer.samples())?;
        if let Some(before_step) = before_step {
            before_step(&mut trainer, &mut batch)?;
        }
        let done = trainer.step(&batch);
        let records = std::mem::take(&mut *recorder.records.lock().unwrap_or_else(PoisonError::into_inner));
        let tokens = std::mem::take(&mut *recorder.tokens.lock().unwrap_or_else(PoisonError::into_inner));
        let (held, report, failed) = match done {
            Ok(report) => (held(&trainer)?, Some(Box::new(report)), None),
            // Every rank ends with this error, after it has seen all values that led to it.
            Err(error @ (TrainError::NotFinite { .. } | TrainError::Weight { .. })) => (Vec::new(), None, Some(error)),
            Err(error) => return Err(error),
        };
        teller.tell(Told::Step { rank: teller.rank, records, tokens, held, report });
        if let Some(error) = failed {
            return Err(error);
        }
    }
    Ok(())
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
        let (micro, first_sample, shape) = (at.micro, seen.position.first_sample, tensor.shape());
        let record = Record { rank, coords, micro, first_sample, shape, values };
        if !seen.tokens.is_empty() {
            let key = (self.place.0, micro, self.place.1);
            self.tokens.lock().unwrap_or_else(PoisonError::into_inner).insert(key, seen.tokens.to_vec());
        }
        let key = (at.stage, seen.number, seen.part, seen.operand);
        self.records.lock().unwrap_or_else(PoisonError::into_inner).push((key, record));
        Ok(replaced)
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recorder(rank {})", self.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank may fail when the others need nothing more from it, and wait for the next request.
    #[test]
    fn a_rank_that_is_gone_is_not_waited_for() {
        std::thread::scope(|scope| {
            let (tell, told) = channel();
            let step = |rank| Told::Step {
                rank,
                records: Vec::new(),
                tokens: TokenPlaces::default(),
                held: Vec::new(),
                report: None,
            };
            let gone = |rank| Told::Gone { rank };
            let mut world =
                Run { name: 'A', go: vec![channel().0, channel().0], told, thread: scope.spawn(|| Ok(Vec::new())) };
            // Rank 1 ends after it has sent everything. Rank 0 must still be waited for.
            for told in [step(1), gone(1), step(0)] {
                tell.send(told).unwrap();
            }
            assert!(world.step().is_some());
            for told in [step(0), gone(1)] {
                tell.send(told).unwrap();
            }
            assert!(world.step().is_none(), "with a rank that may still tell something");
            world.end().unwrap();
        });
    }
}
