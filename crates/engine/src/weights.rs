//! The weights of one rank, in every version that is still read, with their gradients and optimizer states.
//!
//! More than 400 lines: versions, norms and updates of one store, which an asynchronous step and a rollback take
//! together.

use crate::TrainError;
use crate::gradients::Gradients;
use crate::layout::NormShard;
use crate::offload::disk::Disk;
use crate::state_vector::{Place, StateVector, vectors};
use crate::statistics::StatisticSums;
use crate::update::{OfFlat, Part, States, Updates, Window};
use crate::zero::{Cuts, Shared, Vector};
use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, DType, Pending};
use meshwork_optim::{LrSchedule, Rule, Update};
use meshwork_tensor::param::{StatisticId, host_floats};
use meshwork_tensor::{Category, Device, Error, ParamId, Params};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// Weights, gradients and optimizer of one rank.
///
/// A version of the weights lives as long as something holds it: a tape, from the forward that reads it to its
/// backward; or this store, while later forwards may read it or an update may still be rolled back. If nothing else
/// holds the newest version, it is updated in place; otherwise a copy of it is updated.
pub struct WeightStore {
    /// The gradients, to which backward passes add their shares.
    pub gradients: Gradients,
    /// The newest last.
    versions: VecDeque<Arc<Params>>,
    /// Number of versions that forwards may read.
    kept: usize,
    /// Number of the newest version.
    updates: u64,
    states: Rc<States>,
    rule: Rule,
    updater: Updates,
    lr: LrSchedule,
    /// What is kept of each vector.
    cuts: Cuts,
    /// Per flat buffer.
    shared: Vec<Shared>,
    /// The parts that this rank counts in the gradient norm.
    norm_shards: Vec<NormShard>,
    /// In canonical numerics the squared norm is an exact sum, whose digits do not depend on the mesh.
    exact_norm: bool,
    /// Weights and states before an update that may be rolled back.
    before: Option<Before>,
    /// Sums of the squared norms of the updates within an asynchronous run, by step, with their number.
    norms: BTreeMap<u64, (usize, Buffer)>,
    /// Older versions that may be alive. The newest is not among them, because a weak reference would prevent writing
    /// to it.
    older: Vec<Weak<Params>>,
    most_versions: usize,
    device: Arc<dyn Device>,
}

/// Slices of weights that may be gathered at once; a further one waits for the oldest, so that the peak of memory does
/// not depend on timing.
const IN_FLIGHT: usize = 2;

/// Weights and states before an update.
struct Before {
    params: Arc<Params>,
    states: Rc<States>,
}

/// What happens to the version that an update starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Old {
    /// Nothing reads it any more.
    Replaced,
    /// Forwards, backwards or a rollback may need it.
    Kept,
}

impl WeightStore {
    /// Starts from `params`; weights in f32 that go with them, if they are stored in 16 bits, are zero until they are
    /// [set](Self::set_masters). Forwards may read the `kept` newest versions. States of the optimizer are on `disk`,
    /// if there is one.
    pub fn new(
        params: Params,
        gradients: Gradients,
        (rule, updater, lr): (Rule, Updates, LrSchedule),
        (cuts, shared): (Cuts, Vec<Shared>),
        norm_shards: Vec<NormShard>,
        kept: usize,
        (device, disk): (Arc<dyn Device>, Option<&Rc<Disk>>),
    ) -> Result<Self, TrainError> {
        // Flat buffers behind the buckets hold frozen parameters, which have no state.
        let of_buckets = shared[..gradients.buckets()].iter().map(|shared| {
            let window = cuts.window(Vector::States, shared.slice);
            let part = |&id: &ParamId| (id, own_part(&window, params.place(id).1));
            Window { members: shared.members.iter().map(part).collect(), elements: window.len() }
        });
        let states = updater.states(&of_buckets.collect::<Vec<_>>(), disk)?;
        let exact_norm = params.declarations().reduction_blocks().is_some();
        let params = Arc::new(params);
        Ok(Self {
            gradients,
            older: Vec::new(),
            most_versions: 1,
            versions: VecDeque::from([params]),
            kept: kept.max(1),
            updates: 0,
            states: Rc::new(states),
            rule,
            updater,
            lr,
            cuts,
            shared,
            norm_shards,
            exact_norm,
            before: None,
            norms: BTreeMap::new(),
            device,
        })
    }

    /// The newest weights.
    pub fn params(&self) -> &Arc<Params> {
        self.versions.back().unwrap_or_else(|| unreachable!("there is always a newest version"))
    }

    /// Replaces the elements of a parameter that are kept here: `read` gives those of a range of it, as this rank holds
    /// it and counted from the first one. `None` while something reads the weights.
    pub fn write<E: From<Error> + From<TrainError>>(
        &mut self,
        id: ParamId,
        mut read: impl FnMut(Range<usize>) -> Result<Vec<f32>, E>,
    ) -> Option<Result<(), E>> {
        _ = self.versions.back_mut().and_then(Arc::get_mut)?;
        if self.updater.mixed() {
            let masters = self.part(id, Vector::States);
            _ = Rc::get_mut(&mut self.states)?;
            if let Err(error) = read(masters).and_then(|values| Ok(self.write_masters(id, &values)?)) {
                return Some(Err(error));
            }
        }
        let params = self.versions.back_mut().and_then(Arc::get_mut)?;
        let part = params.part(id, &params.window(params.place(id).0));
        Some(read(part).and_then(|values| Ok(params.write_part(id, &values)?)))
    }

    /// Sets the weights in f32 to the initial values of the parameters, as this rank holds them, if there are any.
    pub fn set_masters(&mut self, initial: impl Fn(ParamId) -> Vec<f32>) -> Result<(), TrainError> {
        if self.updater.mixed() && self.device.has_values() {
            for id in self.params().declarations().clone().ids() {
                self.write_masters(id, &initial(id)[self.part(id, Vector::States)])?;
            }
        }
        Ok(())
    }

    /// Replaces the weights in f32 of a parameter that are kept here; a frozen one has none.
    fn write_masters(&mut self, id: ParamId, values: &[f32]) -> Result<(), TrainError> {
        let (flat, range) = self.params().place(id);
        let first = own_part(&self.window(id, Vector::States), range).start;
        let Some(at) = self.masters(flat) else { return Ok(()) };
        let states = Rc::get_mut(&mut self.states).unwrap_or_else(|| unreachable!("nothing else holds the states"));
        states.elements.write(flat, at, first, &Buffer::from_slice(values))
    }

    /// The number of the state of a flat buffer that has its weights in f32.
    fn masters(&self, flat: usize) -> Option<usize> {
        self.states.elements.states(flat).checked_sub(1).filter(|_| self.updater.mixed())
    }

    /// The version after `updates` updates; `None` if forwards may no longer read it.
    pub fn version(&self, updates: u64) -> Option<&Arc<Params>> {
        let behind = usize::try_from(self.updates.checked_sub(updates)?).ok()?;
        self.versions.get(self.versions.len().checked_sub(behind + 1)?)
    }

    /// Updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The most versions that were alive at once.
    pub fn most_versions(&self) -> usize {
        self.most_versions
    }

    /// The learning rate of a step.
    pub fn lr(&self, step: u64) -> f64 {
        self.lr.lr(step)
    }

    /// The elements of a parameter's flat buffer that this rank keeps of a vector.
    fn window(&self, id: ParamId, vector: Vector) -> Range<usize> {
        let flat = self.params().place(id).0;
        match vector {
            Vector::Weights => self.params().window(flat),
            _ => self.cuts.window(vector, self.shared[flat].slice),
        }
    }

    /// The elements of a parameter, as this rank holds it and counted from its first one, that it keeps of a vector.
    pub fn part(&self, id: ParamId, vector: Vector) -> Range<usize> {
        self.params().part(id, &self.window(id, vector))
    }

    /// Whether ranks share out a vector of a parameter.
    pub fn is_cut(&self, id: ParamId, vector: Vector) -> bool {
        self.cuts.cuts(vector) && self.shared[self.params().place(id).0].is_cut()
    }

    /// The gradient of a parameter as it was reduced last, as far as it is kept; nothing for a frozen one.
    pub fn gradient(&self, id: ParamId) -> Result<Vec<f32>, TrainError> {
        let (flat, range) = self.params().place(id);
        self.gradients.peek(flat, own_part(&self.window(id, Vector::Gradients), range))
    }

    /// The update rule's states of the elements of a parameter, as far as they are kept, in order; empty for a frozen
    /// one.
    pub fn states(&self, id: ParamId) -> Result<Vec<Vec<f32>>, TrainError> {
        let flat = self.params().place(id).0;
        let states = 0..self.masters(flat).unwrap_or_else(|| self.states.elements.states(flat));
        states
            .map(|state| Ok(self.vector(id, Place::Elements(state))?.as_slice().map_err(Error::from)?.to_vec()))
            .collect()
    }

    /// Its states of sets, each whole.
    pub fn sets(&self, id: ParamId) -> Result<Vec<Vec<f32>>, TrainError> {
        let sets = self.states.sets[id.index()].iter();
        sets.map(|set| Ok(self.device.download(set)?.as_slice::<f32>().map_err(Error::from)?.to_vec())).collect()
    }

    /// A vector of the state of a parameter, as far as it is kept, in host memory: without a copy where the device
    /// computes there.
    pub fn vector(&self, id: ParamId, place: Place) -> Result<Buffer, TrainError> {
        let params = self.params();
        let (flat, range) = params.place(id);
        match place {
            Place::Weights => numbers(params.download(id, &params.flats()[flat], &params.window(flat))?),
            Place::Masters | Place::Elements(_) => {
                let at = match place {
                    Place::Elements(at) => at,
                    _ => self.masters(flat).unwrap_or_else(|| unreachable!("declared with mixed precision")),
                };
                let window = self.window(id, Vector::States);
                numbers(self.states.elements.read(flat, at, own_part(&window, range))?)
            }
            Place::Sets(at) => Ok(self.device.download(&self.states.sets[id.index()][at])?),
        }
    }

    /// The update rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Whether the update rule reads whole parameters, of this rank or of others.
    pub fn reads_whole(&self) -> bool {
        self.updater.reads_whole()
    }

    /// The number of f64 numbers that the squared norm is summed up in: one, or the digits of an exact sum.
    pub fn norm_slots(&self) -> usize {
        if self.exact_norm { LIMBS } else { 1 }
    }

    /// Adds this rank's share of the squared norm of the reduced gradients to the f64 vector `sums` on the device, from
    /// element `at` on: each element of the model is counted by one rank.
    pub fn add_norms(&self, sums: &mut Buffer, at: usize) -> Result<(), TrainError> {
        let optim = self.device.optim()?;
        let parked = self.gradients.are_parked();
        for shards in self.norm_shards.chunk_by(|one, next| !parked || one.flat == next.flat) {
            let mut vectors = Vec::with_capacity(shards.len());
            for NormShard { flat, range } in shards {
                if let Some(all) = self.gradients.bucket(*flat)? {
                    vectors.push(all.slice(range.clone()).map_err(Error::from)?);
                }
            }
            match self.exact_norm {
                true => optim.exact_sum_of_squares(&vectors, sums, at)?,
                false => optim.sum_of_squares(&vectors, sums, at)?,
            }
        }
        Ok(())
    }

    /// Makes the next version from the reduced gradients, which are multiplied by `grad_scale`. Nothing may read the
    /// old one.
    pub fn update(&mut self, lr: f64, grad_scale: f32, statistics: &StatisticSums) -> Result<(), TrainError> {
        self.next_version(lr, grad_scale, statistics, Old::Replaced)
    }

    /// The same, until it is [committed](Self::commit) or [rolled back](Self::rollback): the old weights and states
    /// stay.
    pub fn update_tentatively(
        &mut self,
        lr: f64,
        grad_scale: f32,
        statistics: &StatisticSums,
    ) -> Result<(), TrainError> {
        self.before = Some(Before { params: self.params().clone(), states: self.states.clone() });
        self.next_version(lr, grad_scale, statistics, Old::Kept)
    }

    /// Drops the weights and states that a tentative update started from.
    pub fn commit(&mut self) {
        self.before = None;
    }

    /// Undoes a tentative update, bit by bit. Nothing may still hold the new weights.
    pub fn rollback(&mut self) {
        if let Some(Before { params, states }) = self.before.take() {
            self.versions.clear();
            self.older.clear();
            self.versions.push_back(params);
            self.states = states;
            self.updates -= 1;
        }
    }

    /// In an asynchronous run: reduces the gradients since the last update, makes the next version of the weights from
    /// them, multiplied by `grad_scale`, and clears them. `step` is the step of the last micro-batch in the update.
    pub fn update_within(&mut self, step: u64, grad_scale: f32) -> Result<(), TrainError> {
        self.gradients.finish()?;
        let (updates, mut sums) = match self.norms.remove(&step) {
            Some(norms) => norms,
            None => (0, self.device.zeros(DType::F64, self.norm_slots())?),
        };
        self.add_norms(&mut sums, 0)?;
        self.norms.insert(step, (updates + 1, sums));
        self.next_version(self.lr(step), grad_scale, &StatisticSums::new(), Old::Kept)?;
        self.gradients.begin(self.updates);
        Ok(())
    }

    /// The number of updates that a step made in an asynchronous run, and the sums of their squared norms.
    pub fn take_norms(&mut self, step: u64) -> Option<(usize, Buffer)> {
        self.norms.remove(&step)
    }

    /// Replaces this rank's part of the state of a run: `read` gives the elements of a vector of a parameter that are
    /// kept here.
    pub fn load(
        &mut self,
        updates: u64,
        mut read: impl FnMut(ParamId, &StateVector, Range<usize>) -> Result<Vec<f32>, TrainError>,
    ) -> Result<(), TrainError> {
        let ids: Vec<ParamId> = self.params().declarations().ids().collect();
        let windows: Vec<_> = ids.iter().map(|&id| self.window(id, Vector::States)).collect();
        // Older versions belong to a different run.
        self.before = None;
        while self.versions.len() > 1 {
            self.versions.pop_front();
        }
        self.older.clear();
        let refused =
            || TrainError::State { name: "the weights".to_owned(), problem: "they are being read".to_owned() };
        let (declarations, mixed) = (self.params().declarations().clone(), self.updater.mixed());
        for (id, window) in ids.into_iter().zip(windows) {
            let (flat, part) = (self.params().place(id).0, self.params().part(id, &window));
            for vector in vectors(declarations.spec(id), &self.rule, mixed) {
                if let Place::Weights | Place::Masters = vector.place {
                    self.write(id, |part| read(id, &vector, part)).ok_or_else(refused)??;
                    continue;
                }
                let first = own_part(&window, self.params().place(id).1).start;
                let states = Rc::get_mut(&mut self.states).ok_or_else(refused)?;
                match vector.place {
                    Place::Weights | Place::Masters => {}
                    Place::Elements(at) => {
                        let values = read(id, &vector, part.clone())?;
                        let values = match vector.dtype {
                            DType::U8 => Buffer::from_vec(values.into_iter().map(|code| code as u8).collect()),
                            _ => Buffer::from_vec(values),
                        };
                        states.elements.write(flat, at, first, &values)?;
                    }
                    Place::Sets(at) => {
                        let values = Buffer::from_vec(read(id, &vector, 0..vector.dims.count())?);
                        self.device.upload_into(&values, &mut states.sets[id.index()][at], 0)?;
                    }
                }
            }
        }
        self.updates = updates;
        let params = self.versions.back_mut().and_then(Arc::get_mut).ok_or_else(refused)?;
        params.set_updates(updates);
        Ok(())
    }

    fn next_version(
        &mut self,
        lr: f64,
        grad_scale: f32,
        statistics: &StatisticSums,
        old: Old,
    ) -> Result<(), TrainError> {
        let device = self.device.clone();
        let _buffers = device.meter().enter(Category::Buffers);
        let newest = self.versions.back_mut().unwrap_or_else(|| unreachable!("there is always a newest version"));
        if Arc::get_mut(newest).is_none() || self.kept > 1 {
            if old == Old::Replaced {
                let problem = "weights are still being read at the end of the step";
                return Err(TrainError::Stage { stage: 0, micro: 0, problem });
            }
            // Versions that no forward will read are freed first, so that their memory is reused; the newest is copied
            // before it is freed.
            while self.versions.len() > 1 && self.versions.len() >= self.kept {
                self.versions.pop_front();
            }
            let copy = Arc::new(self.params().copy()?);
            self.older.push(Arc::downgrade(self.params()));
            self.versions.push_back(copy);
            self.older.retain(|version| version.strong_count() > 0);
            self.most_versions = self.most_versions.max(self.older.len() + 1);
            while self.versions.len() > self.kept {
                self.versions.pop_front();
            }
        }
        if Rc::get_mut(&mut self.states).is_none() {
            let _optimizer = device.meter().enter(Category::Optimizer);
            let copy = |sets: &Vec<Buffer>| sets.iter().map(|set| copied(&*self.device, set)).collect();
            let elements = self.states.elements.copy()?;
            let sets = self.states.sets.iter().map(copy).collect::<Result<_, TrainError>>()?;
            self.states = Rc::new(States { elements, sets });
        }
        let newest = self.versions.back_mut().and_then(Arc::get_mut);
        let (Some(params), Some(states)) = (newest, Rc::get_mut(&mut self.states)) else {
            unreachable!("copied where they were shared")
        };
        self.updates += 1;
        params.set_updates(self.updates);
        let (declarations, layout) = (params.declarations().clone(), self.device.layout()?);
        let (shared, cuts, gradients, step) = (&self.shared, self.cuts, &self.gradients, self.updates);
        let own = |flat: usize| cuts.window(Vector::States, shared[flat].slice);
        // The gradients of the elements that this rank updates.
        let own_grads = |flat: usize| -> Result<Option<Buffer>, TrainError> {
            let (Some(grads), own) = (gradients.bucket(flat)?, own(flat)) else { return Ok(None) };
            let start = own.start - cuts.window(Vector::Gradients, shared[flat].slice).start;
            Ok(Some(grads.slice(start..grads.count().min(start + own.len())).map_err(Error::from)?))
        };
        let part = |params: &Params, id: ParamId| {
            let (flat, range) = params.place(id);
            let (group, own) = (declarations.spec(id).group, own(flat));
            let (lr, decay_factor) = (lr * group.learning_rate, group.weight_decay);
            let elements = params.part(id, &own);
            Part {
                id,
                elements,
                at: own_part(&own, range).start,
                update: Update { step, lr, grad_scale, decay_factor },
            }
        };
        // What a rule reads of a parameter before it is updated.
        let before = |params: &Params, id: ParamId| {
            let flat = params.place(id).0;
            let (own, held) = (own(flat), params.window(flat));
            let weights = params.flats()[flat].slice(own.start - held.start..held.len().min(own.end - held.start));
            let grads = own_grads(flat)?.unwrap_or_else(Buffer::empty);
            Ok((part(params, id), flat, weights.map_err(Error::from)?, grads))
        };
        let totals = self.updater.measure(|id| before(params, id), states)?;
        let mut gathered: VecDeque<(usize, Pending)> = VecDeque::new();
        let in_memory = states.elements.are_in_memory() && !gradients.are_parked();
        for round in self.updater.rounds() {
            let ids = shared[round.clone()].iter().flat_map(|shared| shared.members.iter().copied());
            let matrices = self.updater.gather(ids, |id| before(params, id), states, &totals)?;
            // Where all of it is in memory anyway, flat buffers are updated together.
            let mut together: Vec<OfFlat> = Vec::new();
            for flat in round.clone() {
                let (Shared { members, sharers, .. }, Some(grads)) = (&shared[flat], own_grads(flat)?) else {
                    continue;
                };
                let (own, held) = (own(flat), params.window(flat));
                let parts: Vec<Part> = members.iter().map(|&id| part(params, id)).collect();
                // A slice of what is held whole is updated by itself: its ranks then gather it to where it comes from.
                let weights = match own == held {
                    true => std::mem::replace(&mut params.flats_mut()[flat], Buffer::empty()),
                    false => layout.narrow(&params.flats()[flat], 1, held.len(), 1, own.clone())?,
                };
                let mut of_flat = OfFlat { flat, weights, grads, parts };
                if own == held && in_memory {
                    together.push(of_flat);
                    continue;
                }
                self.updater.update(std::slice::from_mut(&mut of_flat), states, &totals, matrices.as_ref())?;
                let weights = of_flat.weights;
                match sharers.as_ref().filter(|_| own != held) {
                    Some(group) => {
                        if gathered.len() >= IN_FLIGHT
                            && let Some((flat, oldest)) = gathered.pop_front()
                        {
                            params.flats_mut()[flat] = oldest.wait()?;
                        }
                        let whole = std::mem::replace(&mut params.flats_mut()[flat], Buffer::empty());
                        gathered.push_back((flat, group.start_all_gather(weights, whole)?));
                    }
                    None => params.flats_mut()[flat] = weights,
                }
            }
            self.updater.update(&mut together, states, &totals, matrices.as_ref())?;
            together.into_iter().for_each(|of_flat| params.flats_mut()[of_flat.flat] = of_flat.weights);
        }
        states.elements.finish()?;
        for (flat, pending) in gathered {
            params.flats_mut()[flat] = pending.wait()?;
        }
        update_buffers(params, &*self.device, statistics)
    }
}

/// The elements of `range` that lie in `own`, counted from its start.
fn own_part(own: &Range<usize>, range: Range<usize>) -> Range<usize> {
    let start = range.start.max(own.start);
    start - own.start..range.end.min(own.end).max(start) - own.start
}

/// Updates the buffers of statistics, all of which lie in one flat buffer, from the sums of a step.
fn update_buffers(params: &mut Params, device: &dyn Device, statistics: &StatisticSums) -> Result<(), TrainError> {
    let declarations = params.declarations().clone();
    let buffers = |id: StatisticId| &declarations.statistics()[id.index()].buffers;
    let Some(&first) = statistics.iter().flat_map(|(id, _)| buffers(*id)).next() else { return Ok(()) };
    let flat = params.place(first).0;
    let mut all = device.download(&params.flats()[flat])?.as_slice::<f32>().map_err(Error::from)?.to_vec();
    for (id, sums) in statistics {
        let mut values: Vec<Vec<f32>> = buffers(*id).iter().map(|&id| all[params.place(id).1].to_vec()).collect();
        declarations.statistics()[id.index()].rule.update(sums, &mut values);
        for (&id, values) in buffers(*id).iter().zip(values) {
            all[params.place(id).1].copy_from_slice(&values);
        }
    }
    Ok(device.upload_into(&Buffer::from_vec(all), &mut params.flats_mut()[flat], 0)?)
}

/// Bytes, and numbers of 16 bits, as f32; others as they are.
fn numbers(host: Buffer) -> Result<Buffer, TrainError> {
    match host.dtype() {
        DType::U8 => {
            let codes = host.as_slice::<u8>().map_err(Error::from)?;
            Ok(Buffer::from_vec(codes.iter().map(|&code| f32::from(code)).collect()))
        }
        DType::Bf16 | DType::F16 => Ok(Buffer::from_vec(host_floats(&host)?)),
        _ => Ok(host),
    }
}

fn copied(device: &dyn Device, buffer: &Buffer) -> Result<Buffer, TrainError> {
    Ok(device.layout()?.copy(buffer)?)
}
