//! Saving and loading the state of a trainer, by global name and slice.

use super::Trainer;
use super::prelude::*;
use super::verify::of_floats;
use crate::state::{GRADIENT, StatePiece, StateSource, StateView, TrainState};
use crate::state_vector::{StateKey, StateKind, StateVector, Storage};
use crate::zero::{Replica, Vector};
use meshwork_core::hash::combine;
use meshwork_tensor::Shape;
use meshwork_tensor::param::{LocalSlice, Piece};

/// The problem of weights and states that are read.
const NOT_FINITE: &str = "it has elements that are not finite";

impl Trainer {
    /// Replaces the weights of a parameter. Takes the whole parameter, row-major over its global dims. This rank keeps
    /// only the slice that it holds, which is empty if the parameter is on other stages. Optimizer states stay as they
    /// are.
    ///
    /// Not collective, but every rank that holds a part of the parameter must be given the same values: the next step
    /// verifies it, whatever the plan says but [`Verify::Off`](crate::Verify::Off).
    pub fn load_parameter(&mut self, name: &str, whole: &[f32]) -> Result<()> {
        let refuse = |problem: String| TrainError::Parameter { name: name.to_owned(), problem };
        let Some(spec) = self.cut.parameters.iter().find(|spec| spec.name == name) else {
            return Err(refuse("the model has none of that name".to_owned()));
        };
        if whole.len() != spec.global_elements() {
            let (given, wanted) = (whole.len(), spec.global_elements());
            return Err(refuse(format!("{given} elements for its dims {:?}, which have {wanted}", spec.dims)));
        }
        self.require_complete()?;
        self.loads.note(name, of_floats(whole.to_vec())?);
        let weights = self.store.weights.get_mut();
        let Some(id) = weights.params().declarations().find(name) else { return Ok(()) };
        let local = spec.local(self.rank.mesh(), self.rank.coords());
        let piece = Piece::cut(self.rank.world_rank(), spec.dims, local, whole);
        let written = weights.write(id, |part| Ok::<_, TrainError>(piece.values[part].to_vec()));
        written.ok_or_else(|| refuse("its weights are being read".to_owned()))?
    }

    /// Replaces the weights of every parameter that this rank holds by those that `read` gives: the elements of the
    /// slice that lies here, as they are stored, padding zero. This is how a run starts from a model of elsewhere;
    /// optimizer states and counters stay as they are.
    ///
    /// Not collective, but every rank calls it, and those that hold the same elements must be given the same values:
    /// the next step verifies it, whatever the plan says but [`Verify::Off`](crate::Verify::Off).
    ///
    /// # Errors
    /// Weights that cannot be read, of another number, or not finite; while steps are under way.
    pub fn load_weights<E: std::fmt::Display>(
        &mut self,
        mut read: impl FnMut(&ParamSpec, &LocalSlice) -> Result<Vec<f32>, E>,
    ) -> Result<()> {
        self.require_complete()?;
        self.loads.note_weights();
        let (mesh, coords) = (self.rank.mesh(), self.rank.coords());
        let refuse = |name: &str, problem: String| TrainError::Parameter { name: name.to_owned(), problem };
        let weights = self.store.weights.get_mut();
        let declarations = weights.params().declarations().clone();
        for id in declarations.ids() {
            let spec = declarations.spec(id);
            let slice = spec.local(mesh, coords);
            let values = read(spec, &slice).map_err(|error| refuse(&spec.name, error.to_string()))?;
            let (given, wanted) = (values.len(), slice.stored.count());
            if given != wanted {
                return Err(refuse(&spec.name, format!("{given} elements for a slice of {wanted}")));
            }
            if !values.iter().all(|value| value.is_finite()) {
                return Err(refuse(&spec.name, NOT_FINITE.to_owned()));
            }
            let part = |part: Range<usize>| Ok::<_, TrainError>(values[part].to_vec());
            weights.write(id, part).ok_or_else(|| refuse(&spec.name, "the weights are being read".to_owned()))??;
        }
        Ok(())
    }

    /// This rank's part of the state of the run, by global name and slice: weights, buffers, optimizer states and
    /// counters. Any other mesh can continue from it: see [`load_state`](Self::load_state).
    ///
    /// # Errors
    /// While steps are under way: [`flush`](Self::flush) completes them.
    pub fn state(&self) -> Result<TrainState> {
        let mut pieces = Vec::new();
        let (step, updates) = self.visit_state(
            |_| true,
            |StateView { key, dims, slice, values, .. }| {
                let (rank, values) = (self.rank.world_rank(), values.to_vec());
                pieces.push(StatePiece { key, piece: Piece { rank, dims, slice, values } });
                Ok::<_, TrainError>(())
            },
        )?;
        Ok(TrainState { step, updates, pieces })
    }

    /// The same, vector by vector, for the keys that `wanted` picks, without a copy where the device computes in host
    /// memory. Returns the complete steps and the updates.
    ///
    /// # Errors
    /// The errors of [`state`](Self::state) and of `visit`. Only the ranks that hold weights or states that are not
    /// finite find them: [`require_finite`](Self::require_finite) tells all ranks of weights first.
    pub fn visit_state<E: From<TrainError>>(
        &self,
        wanted: impl Fn(&StateKey) -> bool,
        mut visit: impl FnMut(StateView<'_>) -> Result<(), E>,
    ) -> Result<(u64, u64), E> {
        self.require_complete()?;
        for vector in self.store.state.iter().filter(|vector| wanted(&vector.key)) {
            let StateVector { key, kind, dims, dtype, storage, slices } = vector;
            for (slice, range) in slices {
                let host = self.read_state(*storage, range.clone())?;
                let values: &[f32] = host.as_slice().map_err(|error| TrainError::from(Error::from(error)))?;
                if matches!(kind, StateKind::Parameter(_)) && !values.iter().all(|value| value.is_finite()) {
                    return Err(TrainError::Weight { step: self.steps_begun, name: key.to_string() }.into());
                }
                visit(StateView { key: key.clone(), dims: *dims, dtype: *dtype, slice: slice.clone(), values })?;
            }
        }
        Ok((self.steps_begun, self.store.weights.borrow().updates))
    }

    /// The gradients of the last step as far as this rank keeps them, under the names and slices of
    /// [`gradient_layout`](crate::gradient_layout): as [`visit_state`](Self::visit_state) for the state.
    ///
    /// # Errors
    /// While steps are under way.
    pub fn visit_gradients(&self, mut visit: impl FnMut(StateView<'_>)) -> Result<()> {
        self.require_complete()?;
        let layout = &self.cut.layout;
        for id in layout.trained().iter().flatten().copied() {
            let (spec, gradient) = (layout.declarations.spec(id), self.gradient(id)?);
            let (key, part) = (StateKey::new(&spec.name, GRADIENT), layout.part(id, Vector::Gradients));
            let first = part.start;
            for (slice, place) in layout.local(id).boxes(part) {
                let values = &gradient[place.start - first..place.end - first];
                visit(StateView { key: key.clone(), dims: spec.dims, dtype: DType::F32, slice, values });
            }
        }
        Ok(())
    }

    /// A range of a vector of the state, in host memory.
    fn read_state(&self, storage: Storage, range: Range<usize>) -> Result<Buffer> {
        let (weights, mut codec) = (self.store.weights.borrow(), self.pipeline.codec.borrow_mut());
        match storage {
            Storage::LossScale => Ok(Buffer::from_slice(&self.scaler.state())),
            Storage::Sums { bucket, name } => {
                weights.gradients.sum_state(bucket, name, |state| self.device.download(&state.slice(range)?))
            }
            Storage::Feedback { site, name } => Ok(self.device.download(codec.state(site, name).ok_or_else(gone)?)?),
            Storage::Samples { cut } => codec.histories.at(cut).ok_or_else(gone)?.kept.to_host(range),
            Storage::Seen { cut } => Ok(Buffer::from_slice(&codec.histories.at(cut).ok_or_else(gone)?.seen)),
            of_parameter => weights.read(of_parameter, range),
        }
    }

    /// Continues from the state of another run of the same model and update rule. That run may have had any mesh,
    /// schedule and number of micro-batches. This rank reads its slices; every rank must be given the same state, which
    /// the next step verifies, whatever the plan says but [`Verify::Off`](crate::Verify::Off).
    ///
    /// # Errors
    /// While steps are under way; state that is missing, does not fit or is not finite, after which this trainer cannot
    /// be used any more.
    pub fn load_state(&mut self, source: &dyn StateSource) -> Result<()> {
        self.require_complete()?;
        self.loads.note_state(combine(source.step(), source.updates()));
        let refused = || refuse_state("the weights", "they are being read".to_owned());
        if !self.store.weights.get_mut().begin_anew(source.updates()) {
            return Err(refused());
        }
        self.scaler.load(source.step(), self.scaler.state());
        for vector in self.store.state.clone().iter() {
            let StateVector { key, dims, dtype, storage, slices, .. } = vector;
            if let Storage::Weights(id) | Storage::Masters(id) = *storage {
                // Weights in 16 bits are made of those in f32, and a rank may keep more of them.
                let local = self.cut.layout.local(id);
                let read = |part| {
                    let boxes = local.boxes(part).into_iter();
                    let values = boxes.map(|(slice, _)| self.read_source(source, vector, &slice));
                    Ok::<_, TrainError>(values.collect::<Result<Vec<_>, _>>()?.concat())
                };
                self.store.weights.borrow_mut().write(id, read).ok_or_else(refused)??;
                continue;
            }
            for (slice, range) in slices {
                let values = self.read_source(source, vector, slice)?;
                let (weights, codec) = (self.store.weights.get_mut(), &mut self.pipeline.codec.borrow_mut());
                match *storage {
                    Storage::LossScale if source.dims(key).is_none_or(|held| held[..] != dims[..]) => {}
                    Storage::LossScale => self.scaler.load(source.step(), [values[0], values[1]]),
                    Storage::Sums { bucket, name } => {
                        let upload =
                            |state: &mut Buffer| self.device.upload_into(&Buffer::from_vec(values), state, range.start);
                        weights.gradients.sum_state(bucket, name, upload)?;
                    }
                    Storage::Feedback { site, name } => {
                        let state = codec.state(site, name).ok_or_else(gone)?;
                        self.device.upload_into(&Buffer::from_vec(values), state, 0)?;
                    }
                    Storage::Samples { cut } => {
                        codec.histories.at_mut(cut).ok_or_else(gone)?.kept.load(range.start, values)?;
                    }
                    Storage::Seen { cut } => codec.histories.at_mut(cut).ok_or_else(gone)?.seen = values,
                    _ => weights.write_state(*storage, *dtype, range.start, values).ok_or_else(refused)??,
                }
            }
        }
        self.steps_begun = source.step();
        Ok(())
    }

    /// The elements of a slice of a vector with which this rank goes on.
    fn read_source(&self, source: &dyn StateSource, vector: &StateVector, slice: &LocalSlice) -> Result<Vec<f32>> {
        let StateVector { key, kind, dims, .. } = vector;
        let held = source.dims(key);
        match kind {
            StateKind::Parameter(_) => {
                let values = source.read(key, *dims, slice)?;
                match values.iter().all(|value| value.is_finite()) {
                    true => Ok(values),
                    false => Err(refuse_state(key, NOT_FINITE.to_owned())),
                }
            }
            StateKind::PerReplica => of_replicas(source, vector, slice),
            // A vector that is missing, or of another batch, starts from zeros.
            StateKind::Feedback => match held {
                Some(held) if held[..] == dims[..] && self.has_samples(source, vector) => {
                    source.read(key, *dims, slice)
                }
                _ => Ok(vec![0.0; slice.stored.count()]),
            },
        }
    }

    /// Whether a source has the activations of the samples that a vector says were seen.
    fn has_samples(&self, source: &dyn StateSource, vector: &StateVector) -> bool {
        let Storage::Seen { cut } = vector.storage else { return true };
        let of_cut = |other: &&StateVector| other.storage == Storage::Samples { cut };
        let samples = self.store.state.iter().find(of_cut);
        samples.is_some_and(|samples| source.dims(&samples.key).is_some_and(|held| held[..] == samples.dims[..]))
    }
}

/// The error of a vector that this rank does not keep, though the table of the state has it.
fn gone() -> TrainError {
    refuse_state("a state of compression", "this rank keeps none".to_owned())
}

fn refuse_state(name: impl std::fmt::Display, problem: String) -> TrainError {
    TrainError::State { name: name.to_string(), problem }
}

/// The residuals of compressed gradients with which a rank goes on. Residuals of another number of replicas are added
/// up, as [`reshard`](meshwork_compress::reshard) does: their sum counts. A run may begin without any.
fn of_replicas(
    source: &dyn StateSource,
    StateVector { key, dims, .. }: &StateVector,
    slice: &LocalSlice,
) -> Result<Vec<f32>> {
    let mut values = vec![0.0; slice.stored.count()];
    // Factors of another rank, as all that is missing, begin anew.
    let Some(held) = source.dims(key).filter(|held| held[1..] == dims[1..]) else { return Ok(values) };
    let (before, replicas, me) = (held.first().copied().unwrap_or(0), dims[0], slice.ranges[0].start);
    let of = LocalSlice { stored: Shape::new(&slice.stored[1..]), ranges: slice.ranges[1..].to_vec() };
    for old in (0..before).filter(|old| old * replicas / before == me) {
        let (dims, slice) = Replica { index: old, of: before }.slice_of(Shape::new(&dims[1..]), of.clone());
        values.iter_mut().zip(source.read(key, dims, &slice)?).for_each(|(sum, share)| *sum += share);
    }
    Ok(values)
}
