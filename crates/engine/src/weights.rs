//! The weights of one rank, in every version that is still read, with their gradients and optimizer states.
//!
//! More than 400 lines: versions, norms and updates of one store, which an asynchronous step and a rollback take
//! together.

use crate::gradients::Gradients;
use crate::layout::{Layout, NormShard};
use crate::prelude::*;
use crate::state_vector::Storage;
use crate::statistics::StatisticSums;
use crate::update::{Before, FlatUpdate, ParamUpdate, States, Updates};
use crate::zero::{Vector, ZeroGroups};
use meshwork_core::Pending;
use meshwork_core::exact::LIMBS;
use meshwork_optim::{LrSchedule, Update};
use meshwork_tensor::param::{StatisticId, host_floats};
use std::collections::VecDeque;
use std::sync::Weak;

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
    pub updates: u64,
    states: Rc<States>,
    pub updater: Updates,
    pub lr: LrSchedule,
    layout: Layout,
    zero: ZeroGroups,
    norm_shards: Vec<NormShard>,
    /// Weights and states before an update that may be rolled back.
    before: Option<(Arc<Params>, Rc<States>)>,
    /// Sums of the squared norms of the updates within an asynchronous run, by step.
    pub norms: BTreeMap<u64, NormSum>,
    /// Older versions that may be alive. The newest is not among them, because a weak reference would prevent writing
    /// to it.
    older: Vec<Weak<Params>>,
    /// The most versions that were alive at once.
    pub most_versions: usize,
    device: Arc<dyn Device>,
}

/// The parts of a new store.
pub struct NewStore {
    pub params: Params,
    pub states: States,
    pub gradients: Gradients,
    pub updater: Updates,
    pub lr: LrSchedule,
    pub layout: Layout,
    pub zero: ZeroGroups,
    pub norm_shards: Vec<NormShard>,
    /// Number of newest versions that forwards may read.
    pub kept: usize,
    pub device: Arc<dyn Device>,
}

/// The squared norms of some updates, added up.
#[derive(Debug)]
pub struct NormSum {
    pub updates: usize,
    pub sum: Buffer,
}

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    pub lr: f64,
    pub grad_scale: f32,
}

/// Slices of weights that may be gathered at once; a further one waits for the oldest, so that the peak of memory does
/// not depend on timing.
const IN_FLIGHT: usize = 2;

/// The fate of the version that an update starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Old {
    /// Nothing reads it any more.
    Replaced,
    /// Forwards, backwards or a rollback may need it.
    Kept,
}

impl WeightStore {
    /// A store of weights in their first version. Weights in f32 that go with those in 16 bits are zero until they are
    /// [set](Self::set_masters).
    pub fn new(new: NewStore) -> Self {
        let NewStore { params, states, gradients, updater, lr, layout, zero, norm_shards, kept, device } = new;
        Self {
            gradients,
            older: Vec::new(),
            most_versions: 1,
            versions: VecDeque::from([Arc::new(params)]),
            kept: kept.max(1),
            updates: 0,
            states: Rc::new(states),
            updater,
            lr,
            layout,
            zero,
            norm_shards,
            before: None,
            norms: BTreeMap::new(),
            device,
        }
    }

    pub fn params(&self) -> &Arc<Params> {
        self.versions.back().unwrap_or_else(|| unreachable!("there is always a newest version"))
    }

    /// Replaces the elements of a parameter that are kept here: `read` gives a range of them, as this rank holds the
    /// parameter and counted from its first element. `None` while something reads the weights.
    pub fn write<E: From<Error> + From<TrainError>>(
        &mut self,
        id: ParamId,
        mut read: impl FnMut(Range<usize>) -> Result<Vec<f32>, E>,
    ) -> Option<Result<(), E>> {
        _ = self.versions.back_mut().and_then(Arc::get_mut)?;
        if self.updater.mixed() {
            _ = Rc::get_mut(&mut self.states)?;
            let masters = self.layout.part(id, Vector::States);
            if let Err(error) = read(masters).and_then(|values| Ok(self.write_masters(id, &values)?)) {
                return Some(Err(error));
            }
        }
        let params = self.versions.back_mut().and_then(Arc::get_mut)?;
        let part = self.layout.part(id, Vector::Weights);
        Some(read(part).and_then(|values| Ok(params.write_part(id, &values)?)))
    }

    /// Sets the weights in f32 to the initial values of the parameters, as this rank holds them, if there are any.
    pub fn set_masters(&mut self, initial: impl Fn(ParamId) -> Vec<f32>) -> Result<()> {
        if self.updater.mixed() && self.device.has_values() {
            for id in self.params().declarations().clone().ids() {
                self.write_masters(id, &initial(id)[self.layout.part(id, Vector::States)])?;
            }
        }
        Ok(())
    }

    /// Replaces the weights in f32 of a parameter that are kept here; a frozen one has none.
    fn write_masters(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        let Some(state) = self.masters(self.layout.span(id).flat) else { return Ok(()) };
        let states = Rc::get_mut(&mut self.states).unwrap_or_else(|| unreachable!("nothing else holds the states"));
        let start = self.layout.place_in(id, Vector::States).start;
        states.elements.write(self.layout.span(id).flat, state, start, &Buffer::from_slice(values))
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

    /// A range of a vector of the state of a parameter, counted from the first element that is kept here, in host
    /// memory: without a copy where the device computes there. Bytes, and numbers of 16 bits, come as f32.
    pub fn read(&self, storage: Storage, range: Range<usize>) -> Result<Buffer> {
        let elements = |id: ParamId, state: usize| {
            let start = self.layout.place_in(id, Vector::States).start;
            self.states.elements.read(self.layout.span(id).flat, state, start + range.start..start + range.end)
        };
        let host = match storage {
            Storage::Weights(id) if self.params().is_packed(id) => Buffer::from_slice(&self.params().read(id)?[range]),
            Storage::Weights(id) => {
                let (flat, start) = (self.layout.span(id).flat, self.layout.place_in(id, Vector::Weights).start);
                let range = start + range.start..start + range.end;
                self.device.download(&self.params().flats()[flat].slice(range)?)?
            }
            Storage::Gradient(id) => {
                let start = self.layout.place_in(id, Vector::Gradients).start;
                let range = start + range.start..start + range.end;
                Buffer::from_vec(self.gradients.peek(self.layout.span(id).flat, range)?)
            }
            Storage::Masters(id) => {
                let state = self.masters(self.layout.span(id).flat);
                elements(id, state.unwrap_or_else(|| unreachable!("declared with mixed precision")))?
            }
            Storage::Elements(id, state) => elements(id, state)?,
            Storage::Sets(id, set) => self.device.download(&self.states.sets[id.index()][set].slice(range)?)?,
            _ => unreachable!("no vector of a parameter"),
        };
        match host.dtype() {
            DType::U8 => {
                let codes = host.as_slice::<u8>()?;
                Ok(Buffer::from_vec(codes.iter().map(|&code| f32::from(code)).collect()))
            }
            DType::Bf16 | DType::F16 => Ok(Buffer::from_vec(host_floats(&host)?)),
            _ => Ok(host),
        }
    }

    /// Replaces a range of a state of the update rule, counted in the same way. `None` while something reads the
    /// weights.
    pub fn write_state(
        &mut self,
        storage: Storage,
        dtype: DType,
        start: usize,
        values: Vec<f32>,
    ) -> Option<Result<()>> {
        let states = Rc::get_mut(&mut self.states)?;
        let values = match dtype {
            DType::U8 => Buffer::from_vec(values.into_iter().map(|code| code as u8).collect()),
            _ => Buffer::from_vec(values),
        };
        Some(match storage {
            Storage::Elements(id, state) => {
                let start = self.layout.place_in(id, Vector::States).start + start;
                states.elements.write(self.layout.span(id).flat, state, start, &values)
            }
            Storage::Sets(id, set) => {
                self.device.upload_into(&values, &mut states.sets[id.index()][set], start).map_err(Into::into)
            }
            _ => unreachable!("no state of the update rule"),
        })
    }

    /// The number of f64 numbers that the squared norm is summed up in: one, or the digits of an exact sum. In
    /// canonical numerics it is exact, so that it does not depend on the mesh.
    pub fn norm_slots(&self) -> usize {
        if self.exact_norm() { LIMBS } else { 1 }
    }

    fn exact_norm(&self) -> bool {
        self.layout.declarations.reduction_blocks().is_some()
    }

    /// Adds this rank's share of the squared norm of the reduced gradients to the f64 vector `sums` on the device, from
    /// element `at` on: each element of the model is counted by one rank.
    pub fn add_norms(&self, sums: &mut Buffer, at: usize) -> Result<()> {
        let optim = self.device.optim()?;
        let parked = self.gradients.are_parked();
        for shards in self.norm_shards.chunk_by(|one, next| !parked || one.flat == next.flat) {
            let mut vectors = Vec::with_capacity(shards.len());
            for NormShard { flat, range } in shards {
                if let Some(all) = self.gradients.bucket(*flat)? {
                    vectors.push(all.slice(range.clone())?);
                }
            }
            match self.exact_norm() {
                true => optim.exact_sum_of_squares(&vectors, sums, at)?,
                false => optim.sum_of_squares(&vectors, sums, at)?,
            }
        }
        Ok(())
    }

    /// Makes the next version from the reduced gradients. Nothing may read the old one.
    pub fn update(&mut self, scales: Scales, statistics: &StatisticSums) -> Result<()> {
        self.next_version(scales, statistics, Old::Replaced)
    }

    /// The same, until it is [committed](Self::commit) or [rolled back](Self::rollback): the old weights and states
    /// stay.
    pub fn update_tentatively(&mut self, scales: Scales, statistics: &StatisticSums) -> Result<()> {
        self.before = Some((self.params().clone(), self.states.clone()));
        self.next_version(scales, statistics, Old::Kept)
    }

    /// Drops the weights and states that a tentative update started from.
    pub fn commit(&mut self) {
        self.before = None;
    }

    /// Undoes a tentative update, bit by bit. Nothing may still hold the new weights.
    pub fn rollback(&mut self) {
        if let Some((params, states)) = self.before.take() {
            self.versions.clear();
            self.older.clear();
            self.versions.push_back(params);
            self.states = states;
            self.updates -= 1;
        }
    }

    /// In an asynchronous run: reduces the gradients since the last update, makes the next version of the weights from
    /// them, multiplied by `grad_scale`, and clears them. `step` is the step of the last micro-batch in the update.
    pub fn update_within(&mut self, step: u64, grad_scale: f32) -> Result<()> {
        self.gradients.finish()?;
        let mut norms = match self.norms.remove(&step) {
            Some(norms) => norms,
            None => NormSum { updates: 0, sum: self.device.zeros(DType::F64, self.norm_slots())? },
        };
        self.add_norms(&mut norms.sum, 0)?;
        norms.updates += 1;
        self.norms.insert(step, norms);
        self.next_version(Scales { lr: self.lr.lr(step), grad_scale }, &StatisticSums::new(), Old::Kept)?;
        self.gradients.begin(self.updates);
        Ok(())
    }

    /// Goes on as the store of another run after so many updates, whose weights and states are then written. False
    /// while something reads the weights.
    pub fn begin_anew(&mut self, updates: u64) -> bool {
        self.before = None;
        while self.versions.len() > 1 {
            self.versions.pop_front();
        }
        self.older.clear();
        self.updates = updates;
        let params = self.versions.back_mut().and_then(Arc::get_mut);
        params.map(|params| params.set_updates(updates)).is_some()
    }

    /// Makes a version of weights and states that nothing else reads: the newest, or a copy of it.
    fn copy_what_is_read(&mut self, old: Old) -> Result<()> {
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
            let _optimizer = self.device.meter().enter(Category::Optimizer);
            let layout = self.device.layout()?;
            let copy = |sets: &Vec<Buffer>| sets.iter().map(|set| layout.copy(set)).collect();
            let elements = self.states.elements.copy()?;
            let sets = self.states.sets.iter().map(copy).collect::<Result<_, Error>>()?;
            self.states = Rc::new(States { elements, sets });
        }
        Ok(())
    }

    fn next_version(&mut self, scales: Scales, statistics: &StatisticSums, old: Old) -> Result<()> {
        let device = self.device.clone();
        let _buffers = device.meter().enter(Category::Buffers);
        self.copy_what_is_read(old)?;
        let newest = self.versions.back_mut().and_then(Arc::get_mut);
        let (Some(params), Some(states)) = (newest, Rc::get_mut(&mut self.states)) else {
            unreachable!("copied where they were shared")
        };
        self.updates += 1;
        params.set_updates(self.updates);
        let (layout, gradients, updater) = (&self.layout, &self.gradients, &self.updater);
        let step = Step { layout, gradients, scales, updates: self.updates };
        let totals = updater.measure(|id| step.before(params, id), states)?;
        let mut gathering = Gathering { layout, zero: &self.zero, under_way: VecDeque::new() };
        let in_memory = states.elements.are_in_memory() && !gradients.are_parked();
        for round in &updater.rounds {
            let ids = layout.flats[round.clone()].iter().flatten();
            let matrices = updater.gather(ids, |id| step.before(params, id), states, &totals)?;
            // Where all of it is in memory anyway, flat buffers are updated together.
            let mut together: Vec<FlatUpdate> = Vec::new();
            for flat in round.clone() {
                let Some(mut updated) = step.flat(params, flat, &*device)? else { continue };
                if in_memory && step.updates_all(flat) {
                    together.push(updated);
                    continue;
                }
                updater.update(std::slice::from_mut(&mut updated), states, &totals, matrices.as_ref())?;
                gathering.put_back(params, updated)?;
            }
            updater.update(&mut together, states, &totals, matrices.as_ref())?;
            together.into_iter().try_for_each(|updated| gathering.put_back(params, updated))?;
        }
        states.elements.finish()?;
        gathering.finish(params)?;
        update_buffers(params, &*self.device, statistics)
    }
}

/// One update of the weights.
struct Step<'a> {
    layout: &'a Layout,
    gradients: &'a Gradients,
    scales: Scales,
    updates: u64,
}

impl Step<'_> {
    /// The gradients of the elements of a flat buffer that this rank updates.
    fn grads(&self, flat: usize) -> Result<Option<Buffer>> {
        let Some(grads) = self.gradients.bucket(flat)? else { return Ok(None) };
        let [own, kept] = [Vector::States, Vector::Gradients].map(|vector| self.layout.window(flat, vector));
        let start = own.start - kept.start;
        Ok(Some(grads.slice(start..grads.count().min(start + own.len()))?))
    }

    fn param(&self, id: ParamId) -> ParamUpdate {
        let (group, Scales { lr, grad_scale }) = (self.layout.declarations.spec(id).group, self.scales);
        let (lr, decay_factor) = (lr * group.learning_rate, group.weight_decay);
        let [elements, window] = [self.layout.part(id, Vector::States), self.layout.place_in(id, Vector::States)];
        let update = Update { step: self.updates, lr, grad_scale, decay_factor };
        ParamUpdate { id, elements, start: window.start, update }
    }

    /// The input of a rule that reads a whole parameter.
    fn before(&self, params: &Params, id: ParamId) -> Result<Before> {
        let flat = self.layout.span(id).flat;
        let [own, held] = [Vector::States, Vector::Weights].map(|vector| self.layout.window(flat, vector));
        let weights = params.flats()[flat].slice(own.start - held.start..held.len().min(own.end - held.start));
        let grads = self.grads(flat)?.unwrap_or_else(Buffer::empty);
        Ok(Before { param: self.param(id), flat, weights: weights?, grads })
    }

    /// Whether this rank updates all elements of a flat buffer that it holds.
    fn updates_all(&self, flat: usize) -> bool {
        self.layout.window(flat, Vector::States) == self.layout.window(flat, Vector::Weights)
    }

    /// Takes the updated part of a flat buffer from `params`; `None` for frozen parameters.
    fn flat(&self, params: &mut Params, flat: usize, device: &dyn Device) -> Result<Option<FlatUpdate>> {
        let Some(grads) = self.grads(flat)? else { return Ok(None) };
        // A slice of a buffer that is held whole is updated by itself: its ranks then gather it back into the buffer.
        let weights = match self.updates_all(flat) {
            true => std::mem::replace(&mut params.flats_mut()[flat], Buffer::empty()),
            false => {
                let [own, held] = [Vector::States, Vector::Weights].map(|vector| self.layout.window(flat, vector));
                device.layout()?.narrow(&params.flats()[flat], 1, held.len(), 1, own)?
            }
        };
        let updates = self.layout.flats[flat].iter().map(|&id| self.param(id)).collect();
        Ok(Some(FlatUpdate { flat, weights, grads, params: updates }))
    }
}

/// Updated slices of flat buffers that are held whole, on their way to all sharers.
struct Gathering<'a> {
    layout: &'a Layout,
    zero: &'a ZeroGroups,
    under_way: VecDeque<(usize, Pending)>,
}

impl Gathering<'_> {
    /// Puts updated weights back; a slice is gathered.
    fn put_back(&mut self, params: &mut Params, FlatUpdate { flat, weights, .. }: FlatUpdate) -> Result<()> {
        let [own, held] = [Vector::States, Vector::Weights].map(|vector| self.layout.window(flat, vector));
        let Some(sharers) = self.layout.sharers(self.zero, flat).filter(|_| own != held) else {
            params.flats_mut()[flat] = weights;
            return Ok(());
        };
        if self.under_way.len() >= IN_FLIGHT
            && let Some((flat, oldest)) = self.under_way.pop_front()
        {
            params.flats_mut()[flat] = oldest.wait()?;
        }
        let whole = std::mem::replace(&mut params.flats_mut()[flat], Buffer::empty());
        self.under_way.push_back((flat, sharers.start_all_gather(weights, whole)?));
        Ok(())
    }

    fn finish(self, params: &mut Params) -> Result<()> {
        for (flat, pending) in self.under_way {
            params.flats_mut()[flat] = pending.wait()?;
        }
        Ok(())
    }
}

/// Updates the buffers of statistics, all of which lie in one flat buffer, from the sums of a step.
fn update_buffers(params: &mut Params, device: &dyn Device, statistics: &StatisticSums) -> Result<()> {
    let declarations = params.declarations().clone();
    let buffers = |id: StatisticId| &declarations.statistics()[id.index()].buffers;
    let Some(&first) = statistics.iter().flat_map(|(id, _)| buffers(*id)).next() else { return Ok(()) };
    let flat = params.place(first).0;
    let mut all = device.download(&params.flats()[flat])?.as_slice::<f32>()?.to_vec();
    for (id, sums) in statistics {
        let mut values: Vec<Vec<f32>> = buffers(*id).iter().map(|&id| all[params.place(id).1].to_vec()).collect();
        declarations.statistics()[id.index()].rule.update(sums, &mut values);
        for (&id, values) in buffers(*id).iter().zip(values) {
            all[params.place(id).1].copy_from_slice(&values);
        }
    }
    Ok(device.upload_into(&Buffer::from_vec(all), &mut params.flats_mut()[flat], 0)?)
}
