//! Saving and loading the state of a trainer, by global name and slice.

use super::Trainer;
use super::verify::of_floats;
use crate::TrainError;
use crate::compress::sum_plan::{Replica, SumState};
use crate::state::{StatePiece, StateSource, StateView, TrainState};
use crate::state_vector::{StateKey, StateVector, loss_scale, vectors};
use meshwork_core::hash::combine;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::param::{LocalSlice, Piece};
use meshwork_tensor::{Error, ParamSpec, Shape};
use std::ops::Range;

/// What is wrong with weights and states that are read.
const NOT_FINITE: &str = "it has elements that are not finite";

impl Trainer {
    /// Replaces the weights of a parameter. Takes the whole parameter, row-major over its global dims. This rank keeps
    /// only the slice that it holds, which is empty if the parameter is on other stages. Optimizer states stay as they
    /// are.
    ///
    /// Not collective, but every rank that holds a part of the parameter must be given the same values: the next step
    /// verifies it, whatever the plan says but [`Verify::Off`](crate::Verify::Off).
    pub fn load_parameter(&mut self, name: &str, whole: &[f32]) -> Result<(), TrainError> {
        let refuse = |problem: String| TrainError::Parameter { name: name.to_owned(), problem };
        let Some(spec) = self.parameters.iter().find(|spec| spec.name == name) else {
            return Err(refuse("the model has none of that name".to_owned()));
        };
        if whole.len() != spec.global_elements() {
            let (given, wanted) = (whole.len(), spec.global_elements());
            return Err(refuse(format!("{given} elements for its dims {:?}, which have {wanted}", spec.dims)));
        }
        self.require_complete()?;
        self.loads.note(name, of_floats(whole.to_vec())?);
        let weights = self.weights.get_mut();
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
    ) -> Result<(), TrainError> {
        self.require_complete()?;
        self.loads.note_weights();
        let (mesh, coords) = (self.rank.mesh(), self.rank.coords());
        let refuse = |name: &str, problem: String| TrainError::Parameter { name: name.to_owned(), problem };
        let weights = self.weights.get_mut();
        let declarations = weights.params().declarations().clone();
        for id in declarations.ids() {
            let spec = declarations.spec(id);
            let values =
                read(spec, &spec.local(mesh, coords)).map_err(|error| refuse(&spec.name, error.to_string()))?;
            if !values.iter().all(|value| value.is_finite()) {
                return Err(refuse(&spec.name, NOT_FINITE.to_owned()));
            }
            let wrong = || refuse(&spec.name, format!("{} elements for a slice of another number", values.len()));
            let part = |part: Range<usize>| values.get(part).map(<[f32]>::to_vec).ok_or_else(wrong);
            weights.write(id, part).ok_or_else(|| refuse(&spec.name, "the weights are being read".to_owned()))??;
        }
        Ok(())
    }

    /// This rank's part of the state of the run, by global name and slice: weights, buffers, optimizer states and
    /// counters. Any other mesh can continue from it: see [`load_state`](Self::load_state).
    ///
    /// # Errors
    /// While steps are under way: [`flush`](Self::flush) completes them.
    pub fn state(&self) -> Result<TrainState, TrainError> {
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

    /// The same, vector by vector, of those that `wanted` picks, without a copy where the device computes in host
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
        let weights = self.weights.borrow();
        let declarations = weights.params().declarations().clone();
        for id in declarations.ids() {
            let spec = declarations.spec(id);
            let local = spec.local(self.rank.mesh(), self.rank.coords());
            for StateVector { key, dims, dtype, place } in vectors(spec, weights.rule(), self.plan.is_mixed()) {
                if wanted(&key) {
                    let buffer = weights.vector(id, place)?;
                    let all: &[f32] = buffer.as_slice().map_err(|error| TrainError::from(Error::from(error)))?;
                    if !all.iter().all(|value| value.is_finite()) {
                        return Err(TrainError::Weight { step: self.steps_begun, name: key.to_string() }.into());
                    }
                    let Some(vector) = place.vector() else {
                        visit(StateView { key, dims, dtype, slice: LocalSlice::whole(dims), values: all })?;
                        continue;
                    };
                    let part = weights.part(id, vector);
                    for (slice, place) in local.boxes(part.clone()) {
                        let values = &all[place.start - part.start..place.end - part.start];
                        visit(StateView { key: key.clone(), dims, dtype, slice, values })?;
                    }
                }
            }
        }
        if self.plan.is_mixed() {
            let (key, dims) = loss_scale();
            if wanted(&key) {
                let values = &self.scaler.state();
                visit(StateView { key, dims, dtype: DType::F32, slice: LocalSlice::whole(dims), values })?;
            }
        }
        for kept in weights.gradients.kept() {
            let (SumState { key, dims, slice, .. }, host) = kept?;
            if wanted(key) {
                let values = host.as_slice().map_err(|error| TrainError::from(Error::from(error)))?;
                visit(StateView { key: key.clone(), dims: *dims, dtype: DType::F32, slice: slice.clone(), values })?;
            }
        }
        for (crossing, name, state) in self.codec.borrow().states() {
            let (key, dims, slice) = (crossing.key(name), crossing.dims, crossing.slice.clone());
            if wanted(&key) {
                let host = self.device.download(state).map_err(TrainError::from)?;
                let values = host.as_slice().map_err(|error| TrainError::from(Error::from(error)))?;
                visit(StateView { key, dims, dtype: DType::F32, slice, values })?;
            }
        }
        for history in self.codec.borrow().histories().iter() {
            let [(samples, dims), (of_seen, all)] = history.states();
            for slice in history.slices().filter(|_| wanted(&samples)) {
                let host = history.values(&slice)?;
                let values = host.as_slice().map_err(|error| TrainError::from(Error::from(error)))?;
                visit(StateView { key: samples.clone(), dims, dtype: DType::F32, slice, values })?;
            }
            if wanted(&of_seen) {
                let values = history.seen();
                visit(StateView { key: of_seen, dims: all, dtype: DType::F32, slice: LocalSlice::whole(all), values })?;
            }
        }
        Ok((self.steps_begun, weights.updates()))
    }

    /// Continues from the state of another run of the same model and update rule. That run may have had any mesh,
    /// schedule and number of micro-batches. This rank reads its slices; every rank must be given the same state, which
    /// the next step verifies, whatever the plan says but [`Verify::Off`](crate::Verify::Off).
    ///
    /// # Errors
    /// While steps are under way; state that is missing, does not fit or is not finite, after which this trainer cannot
    /// be used any more.
    pub fn load_state(&mut self, source: &dyn StateSource) -> Result<(), TrainError> {
        self.require_complete()?;
        self.loads.note_state(combine(source.step(), source.updates()));
        let weights = self.weights.get_mut();
        let declarations = weights.params().declarations().clone();
        let (mesh, coords) = (self.rank.mesh(), self.rank.coords());
        weights.load(source.updates(), |id, StateVector { key, dims, place, .. }, part| {
            let read = |slice: &LocalSlice| match source.read(key, *dims, slice) {
                Ok(values) if !values.iter().all(|value| value.is_finite()) => {
                    Err(TrainError::State { name: key.to_string(), problem: NOT_FINITE.to_owned() })
                }
                read => read,
            };
            if place.vector().is_none() {
                return read(&LocalSlice::whole(*dims));
            }
            let boxes = declarations.spec(id).local(mesh, coords).boxes(part);
            let values: Vec<Vec<f32>> = boxes.iter().map(|(slice, _)| read(slice)).collect::<Result<_, _>>()?;
            Ok(values.concat())
        })?;
        let (key, dims) = loss_scale();
        let mut scale = self.scaler.state();
        if self.plan.is_mixed() && source.dims(&key).is_some() {
            scale = *source.read(&key, dims, &LocalSlice::whole(dims))?.first_chunk().unwrap_or(&scale);
        }
        self.scaler.load(source.step(), scale);
        weights.gradients.load_kept(|kept| read_kept(source, kept))?;
        let device = &self.device;
        for (crossing, name, state) in self.codec.borrow_mut().states_mut() {
            let key = crossing.key(name);
            // What is missing, or of another batch, starts from zeros.
            let values = match source.dims(&key) {
                Some(held) if held[..] == crossing.dims[..] => source.read(&key, crossing.dims, &crossing.slice)?,
                _ => vec![0.0; state.count()],
            };
            device.upload_into(&Buffer::from_vec(values), state, 0)?;
        }
        for history in self.codec.borrow_mut().histories_mut().iter_mut() {
            let [(key, dims), (of_seen, all)] = history.states();
            let mut seen = vec![0.0; all.count()];
            // Of another number of samples: other data, or none at all.
            if source.dims(&key).is_some_and(|held| held[..] == dims[..]) && source.dims(&of_seen).is_some() {
                let slices: Vec<LocalSlice> = history.slices().collect();
                slices.iter().try_for_each(|slice| history.load(slice, source.read(&key, dims, slice)?))?;
                seen = source.read(&of_seen, all, &LocalSlice::whole(all))?;
            }
            history.set_seen(seen);
        }
        self.steps_begun = source.step();
        Ok(())
    }
}

/// What a rank goes on with of compressed gradients. The shares of another number of replicas are
/// added up, as [`reshard`](meshwork_compress::reshard) does: their sum counts. A run may begin without any.
fn read_kept(source: &dyn StateSource, SumState { key, dims, slice, .. }: &SumState) -> Result<Vec<f32>, TrainError> {
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
