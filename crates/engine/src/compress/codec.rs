//! Values over the cuts of a pipeline: a sender makes a message of a value by its scheme, and the receiver restores it.
//!
//! A message is made of the whole value that a rank has. If all tp ranks have the same value, each of them makes the
//! same message and sends its part of the bytes, so that the loss does not depend on tp. Rows are samples.
//!
//! At a virtual cut a value becomes a message and is restored on the same rank: see [`Codec::cross`].

use super::crossing::{Crossing, Staged};
use super::history::Histories;
use super::packing::{CutValue, Packed, part, restored};
use super::settings::{Compress, NOTHING};
use crate::boundary::Boundary;
use crate::clock::Clock;
use crate::message::{Message, Site};
use crate::offload::disk::Disk;
use crate::pass::Purpose;
use crate::prelude::*;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, Scheme};
use meshwork_nn::Activation;
use meshwork_pipeline::Tag;

/// One rank's end of all cuts.
#[derive(Debug)]
pub struct Codec {
    compress: Compress,
    device: Arc<dyn Device>,
    clock: Clock,
    seed: u64,
    boundaries: Rc<[Boundary]>,
    /// This rank's number among those that have the same micro-batches in other samples.
    data_rank: usize,
    tp: [usize; 2],
    /// With feedback, the states of each message of a step: the states of its sender, or the estimate of its receiver.
    kept: BTreeMap<Site, Sender<Buffer>>,
    /// In a pass that may have to be repeated, the states before it that have changed.
    before: Option<BTreeMap<Site, Sender<Buffer>>>,
    /// The indices of activations whose gradients have not crossed yet, where gradients use them: by cut, step and
    /// micro-batch.
    indices: BTreeMap<(usize, u64, usize), Buffer>,
    /// With AQ-SGD, the activations of samples.
    pub histories: Histories,
}

impl Codec {
    /// The codec of a plan, in passes that do not train: without feedback.
    ///
    /// # Errors
    /// A device without kernels for compression.
    pub fn plain(
        compress: &Compress,
        seed: u64,
        boundaries: Rc<[Boundary]>,
        rank: &Rank,
        device: &Arc<dyn Device>,
        clock: Clock,
    ) -> Result<Self> {
        if compress.is_some() {
            device.compression()?;
        }
        let coords = rank.coords();
        Ok(Self {
            compress: *compress,
            device: device.clone(),
            clock,
            seed,
            boundaries,
            data_rank: rank.mesh().data_rank(coords),
            tp: [coords.get(Axis::Tp), rank.mesh().degree(Axis::Tp)],
            kept: BTreeMap::new(),
            before: None,
            indices: BTreeMap::new(),
            histories: Histories::default(),
        })
    }

    /// The codec of a plan, in training, with the states of feedback of every message that this rank sends or receives
    /// in a step. `disk`: where the activations of samples are, if not in memory. Collective over the world.
    ///
    /// # Errors
    /// A device without kernels for compression; no memory.
    pub fn training(
        staged: Staged<'_>,
        crossings: Vec<Crossing>,
        rank: &Rank,
        disk: Option<&Rc<Disk>>,
        device: &Arc<dyn Device>,
    ) -> Result<Self> {
        let Staged { plan, model, .. } = staged;
        let clock = Clock::beside(Purpose::Train, 0, plan.num_microbatches()?);
        let mut codec = Self::plain(&plan.compress, plan.seed, model.boundaries().into(), rank, device, clock)?;
        codec.histories = Histories::new(staged, &crossings, rank, disk, device)?;
        for crossing in crossings {
            let names: Vec<_> = crossing.states(plan).collect();
            let state = |name| codec.zeros(if names.contains(&name) { crossing.packed.shape.len() } else { 0 });
            let [residual, estimate, momentum] = Sender::<Buffer>::NAMES.map(state);
            let kept = Sender { residual: residual?, estimate: estimate?, momentum: momentum? };
            if !names.is_empty() {
                codec.kept.insert(crossing.site, kept);
            }
        }
        Ok(codec)
    }

    /// A state of the feedback of a value, by its name.
    pub fn state(&mut self, site: Site, name: &str) -> Option<&mut Buffer> {
        let states = Sender::<Buffer>::NAMES.into_iter().zip(self.kept.get_mut(&site)?.all_mut());
        states.into_iter().find(|(other, _)| *other == name).map(|(_, state)| state)
    }

    fn zeros(&self, count: usize) -> Result<Buffer> {
        let _states = self.device.meter().enter(Category::Optimizer);
        Ok(self.device.zeros(DType::F32, count)?)
    }

    /// Begins a step of the samples of one of the ranks of `data`.
    ///
    /// # Errors
    /// Samples without numbers, or with unknown ones, where their activations are kept.
    pub fn begin_step(&mut self, batch: &Batch, data: &Group) -> Result<()> {
        self.histories.begin(batch, data, &*self.device)
    }

    /// Begins a pass. A pass that may be repeated is repeated after [`clear`](Self::clear), and is final when the next
    /// pass begins.
    pub fn begin(&mut self, clock: Clock, may_repeat: bool) {
        self.clock = clock;
        self.before = may_repeat.then(BTreeMap::new);
    }

    /// Ends a step, all of whose activations have crossed.
    ///
    /// # Errors
    /// A failed rank or disk.
    pub fn end_step(&mut self) -> Result<()> {
        self.histories.end(&*self.device)
    }

    /// Forgets the micro-batches in flight, after a failure or to run them again: with the states that they began with.
    pub fn clear(&mut self) {
        self.indices.clear();
        self.histories.clear();
        for (site, before) in self.before.take().into_iter().flatten() {
            if let Some(kept) = self.kept.get_mut(&site) {
                *kept = before;
            }
        }
    }

    /// The states of a message, in a pass that trains, to be changed.
    fn kept_mut(&mut self, site: Site) -> Result<Option<&mut Sender<Buffer>>> {
        let site = Site { micro: self.clock.step_of(site.micro).1, ..site };
        let Some(kept) = self.kept.get_mut(&site).filter(|_| self.clock.purpose == Purpose::Train) else {
            return Ok(None);
        };
        if let Some(before) = &mut self.before
            && !before.contains_key(&site)
        {
            let _states = self.device.meter().enter(Category::Optimizer);
            let layout = self.device.layout()?;
            let [residual, estimate, momentum] = kept.all().map(|state| layout.copy(state));
            before.insert(site, Sender { residual: residual?, estimate: estimate?, momentum: momentum? });
        }
        Ok(Some(kept))
    }

    /// Sets the states of feedback to zero.
    pub fn forget(&mut self) -> Result<()> {
        self.histories.forget();
        let optim = self.device.optim()?;
        let states = self.kept.values_mut().flat_map(Sender::all_mut);
        states.filter(|state| state.count() > 0).try_for_each(|state| Ok(optim.zero(state, 0..state.count())?))
    }

    /// The value that a message between stages carries.
    pub fn site(&self, Tag { direction, stage, micro }: Tag) -> Site {
        let before = if direction == Direction::Activation { stage } else { stage.saturating_sub(1) };
        let cut = self.boundaries.iter().position(|boundary| boundary.stages == [before, before + 1]);
        Site { cut: cut.unwrap_or(0), direction, micro }
    }

    /// Whether values are compressed between two stages also where these lie on one rank.
    pub fn is_virtual_between(&self, stage: usize) -> bool {
        self.boundaries.iter().any(|boundary| boundary.is_virtual && boundary.stages == [stage, stage + 1])
    }

    /// How a value is compressed, if it is.
    pub fn packed(&self, site: Site, value: &Activation) -> Result<Option<Packed>> {
        let included = self.compress.includes(self.clock.step_of(site.micro).0);
        let scheme = self.compress.at_cuts(site.direction).filter(|_| included);
        // A sample that crosses for the first time crosses as it is.
        let fresh = self.history(site).and_then(|cut| self.histories.at(cut)).is_some_and(|history| history.fresh);
        let scheme = scheme.map(|scheme| if fresh { NOTHING } else { scheme });
        let at_cut = CutValue { boundary: &self.boundaries[site.cut], direction: site.direction, value };
        scheme.map(|scheme| at_cut.pack(&self.compress, scheme)).transpose()
    }

    /// The message of a value, in memory of `room` bytes.
    pub fn pack(&mut self, site: Site, of: &Packed, value: &Activation, buffer: Buffer, room: usize) -> Result<Buffer> {
        Ok(self.packed_and_last(site, of, value, buffer, room)?.0)
    }

    /// The message of a value, and with AQ-SGD the last activation m to which it is added.
    fn packed_and_last(
        &mut self,
        site: Site,
        of: &Packed,
        Activation { types, .. }: &Activation,
        value: Buffer,
        room: usize,
    ) -> Result<(Buffer, Option<Buffer>)> {
        let (step, micro) = self.clock.step_of(site.micro);
        // Ranks that have the same value draw the same.
        let differs = matches!(types.get(Axis::Tp), Some(Ty::Shard(_) | Ty::Varying));
        let [tp_rank, tp] = if differs { self.tp } else { [0, 1] };
        let (name, pass) = (self.boundaries[site.cut].value(site.direction), self.clock.purpose);
        let name = if matches!(pass, Purpose::Train) { name } else { format!("{name} in {pass:?}") };
        let before = ((self.data_rank * self.clock.micros + micro) * tp + tp_rank) * of.shape.len();
        let draws = Draws::new(self.seed, &name, step).skip(before);
        let indices = self.indices_of_gradient(site, of)?;
        let (device, feedback) = (self.device.clone(), self.compress.feedback);
        let kernels = device.compression()?;
        let _buffers = device.meter().enter(Category::Buffers);
        let mut message = device.alloc(DType::U8, room)?;
        let begins = self.compress.begins_at(step);
        if let Some(cut) = self.history(site) {
            // EF21 sends this difference too, with m as its estimate.
            let estimate = self.histories.read(cut, micro, &*device)?;
            let [residual, momentum] = [device.alloc(DType::F32, 0)?, device.alloc(DType::F32, 0)?];
            let mut sender = Sender { residual, estimate, momentum };
            let change = kernels.outgoing(Feedback::Ef21, &value, false, &mut sender)?;
            drop(value);
            kernels.pack(&of.scheme, of.shape, draws, &change, &mut message)?;
            self.histories.keep(cut, micro, of, part(&message, of.bytes)?);
            return Ok((message, Some(sender.estimate)));
        }
        let mut kept = self.kept_mut(site)?;
        let target = match &mut kept {
            Some(sender) => kernels.outgoing(feedback, &value, begins, sender)?,
            None => value.clone(),
        };
        drop(value);
        match (&of.chosen, &indices) {
            (Some(sparse), Some(indices)) => {
                let elements = kernels.take(sparse, of.shape, indices, &target)?;
                kernels.pack(&of.scheme, of.sent, draws, &elements, &mut message)?;
            }
            _ => kernels.pack(&of.scheme, of.shape, draws, &target, &mut message)?,
        }
        if let Some(sender) = kept {
            let sent = restored(&*device, of, &part(&message, of.bytes)?, indices.as_ref())?;
            kernels.sent(feedback, &target, &sent, sender)?;
        }
        self.keep_indices(site, of, &message)?;
        Ok((message, None))
    }

    /// The value of a message, in the type that it had.
    pub fn unpack(&mut self, site: Site, of: &Packed, message: &Buffer, dtype: DType) -> Result<Buffer> {
        let value = self.unpack_wide(site, of, message)?;
        self.stored(value, dtype)
    }

    /// A restored value, which is f32, in the type of the value.
    fn stored(&self, value: Buffer, dtype: DType) -> Result<Buffer> {
        Ok(if value.dtype() == dtype { value } else { self.device.pointwise()?.cast(&value, dtype)? })
    }

    fn unpack_wide(&mut self, site: Site, of: &Packed, message: &Buffer) -> Result<Buffer> {
        let (_, micro) = self.clock.step_of(site.micro);
        let message = part(message, of.bytes)?;
        let device = self.device.clone();
        if let Some(cut) = self.history(site) {
            let mut rows = self.histories.read(cut, micro, &*device)?;
            device.compression()?.unpack(&of.scheme, of.shape, &message, Fold::Add, &mut rows)?;
            self.histories.keep(cut, micro, of, message);
            return Ok(rows);
        }
        let indices = self.indices_of_gradient(site, of)?;
        self.keep_indices(site, of, &message)?;
        let kept = self.kept_mut(site)?.map(|kept| &mut kept.estimate);
        let Some(estimate) = kept.filter(|estimate| estimate.count() > 0) else {
            return restored(&*device, of, &message, indices.as_ref());
        };
        match indices {
            None => device.compression()?.unpack(&of.scheme, of.shape, &message, Fold::Add, estimate)?,
            Some(_) => {
                let change = restored(&*device, of, &message, indices.as_ref())?;
                device.pointwise()?.add_assign(estimate, 0, &change)?;
            }
        }
        Ok(device.layout()?.copy(estimate)?)
    }

    /// A value that stays on this rank, as the other side of a cut would receive it.
    pub fn cross(&mut self, site: Site, Message { tensor, types }: Message) -> Result<Message> {
        let value = Activation { dtype: tensor.dtype(), shape: tensor.shape(), types };
        let Some(packed) = self.packed(site, &value)? else { return Ok(Message { tensor, types }) };
        let (device, keeps) = (self.device.clone(), packed.chosen.and_then(|_| self.indices_of(site)));
        let (message, last) = self.packed_and_last(site, &packed, &value, tensor.into_buffer(), packed.bytes)?;
        let _buffers = device.meter().enter(Category::Buffers);
        let (_, micro) = self.clock.step_of(site.micro);
        let kept = self.kept.get(&Site { micro, ..site }).filter(|_| self.clock.purpose == Purpose::Train);
        let received = match (last, kept.map(|sender| &sender.estimate).filter(|estimate| estimate.count() > 0)) {
            (Some(mut last), _) => {
                device.compression()?.unpack(&packed.scheme, packed.shape, &message, Fold::Add, &mut last)?;
                last
            }
            // The sender's estimate is the receiver's: both add the same message.
            (None, Some(estimate)) => device.layout()?.copy(estimate)?,
            (None, None) => restored(&*device, &packed, &part(&message, packed.bytes)?, keeps.as_ref())?,
        };
        let received = self.stored(received, value.dtype)?;
        Ok(Message { tensor: Tensor::from_buffer(&device, received, value.shape)?, types })
    }

    /// The cut that a value crosses, if this rank keeps the activations of samples there.
    fn history(&self, Site { cut, direction, micro }: Site) -> Option<usize> {
        let trains = self.clock.purpose == Purpose::Train && direction == Direction::Activation;
        let included = trains && self.compress.includes(self.clock.step_of(micro).0);
        (included && self.histories.at(cut).is_some()).then_some(cut)
    }

    /// The key of a micro-batch at a cut.
    fn key(&self, site: Site) -> (usize, u64, usize) {
        let (step, micro) = self.clock.step_of(site.micro);
        (site.cut, step, micro)
    }

    fn indices_of(&self, site: Site) -> Option<Buffer> {
        self.indices.get(&self.key(site)).cloned()
    }

    /// Takes away the indices of the activation whose gradient crosses now, where the gradient uses them.
    fn indices_of_gradient(&mut self, site: Site, of: &Packed) -> Result<Option<Buffer>> {
        if of.chosen.is_none() {
            return Ok(None);
        }
        let (key, problem) = (self.key(site), "no activation with its indices crossed the cut");
        let missing = || TrainError::Stage { stage: self.boundaries[site.cut].stages[0], micro: site.micro, problem };
        self.indices.remove(&key).ok_or_else(missing).map(Some)
    }

    /// Keeps the indices of an activation, where its gradient uses them.
    fn keep_indices(&mut self, site: Site, of: &Packed, message: &Buffer) -> Result<()> {
        let Scheme::Sparse(sparse) = of.scheme else { return Ok(()) };
        let shares = self.compress.share_indices && self.clock.purpose == Purpose::Train;
        if shares && site.direction == Direction::Activation {
            let _activations = self.device.meter().enter(Category::Activations);
            let indices = message.slice(sparse.index_bytes(of.shape)).map_err(meshwork_tensor::Error::from)?;
            self.indices.insert(self.key(site), self.device.layout()?.copy(&indices)?);
        }
        Ok(())
    }
}
