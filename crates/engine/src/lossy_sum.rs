//! Sums of compressed gradients over data-parallel ranks, as [`meshwork_compress::sum()`] has them, on the memory of a
//! device and in two halves: the first communication starts as soon as a bucket's gradients are final, and backward
//! goes on.
//!
//! | scheme | first | then |
//! |---|---|---|
//! | `topk`, `randk` | all gather the messages | they are added in the order of the ranks |
//! | `quant`, `sign`, `fp8`, `bf16` | each rank gets its shard from all | these are added in f32, compressed again and gathered |
//! | any, where ranks keep slices (ZeRO) | each rank gets its slice from all | these are added |
//!
//! [`FactorSum`](crate::factor_sum::FactorSum) has the sums of PowerSGD.
//!
//! More than 400 lines: the two halves of one sum, and the state that it keeps between steps.

use crate::StateKey;
use crate::factor_sum::Factored;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{
    CompressError, Compressor, Draws, Feedback, Fold, Scheme, Shape, SumMethod, sum::shards, wire_bytes,
};
use meshwork_core::{Buffer, Coords, DType, FlatSlice, Group, Mesh, Pending};
use meshwork_data_parallel::{Sum, VectorError};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Category, Device, Error, ParamSpec, Shape as Dims};
use std::ops::Range;
use std::sync::Arc;

/// Which ranks have states of their own, whose sum counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// All whose gradients are added up.
    Each,
    /// Those that are not in one sum: of the stages that share a tied weight, or of the axes that are summed over
    /// afterwards. In a sum all have the same, or slices of it.
    EachSum,
}

/// What is kept between the sums of a bucket.
#[derive(Clone, Debug)]
pub struct State {
    pub name: &'static str,
    /// Which ranks have their own.
    pub own: Own,
    /// Its elements among those of the bucket.
    pub window: Range<usize>,
}

/// The sum of the gradients of one bucket, as data.
#[derive(Clone, Debug)]
pub struct SumPlan {
    pub scheme: Scheme,
    pub feedback: Feedback,
    /// What is drawn is drawn for this name.
    pub name: String,
    pub seed: u64,
    /// The number of the first update that compresses.
    pub starts_at: u64,
    /// Elements of the bucket.
    pub elements: usize,
    /// This rank's number in the group, and the ranks of the group.
    pub place: [usize; 2],
    /// Whether each rank keeps its slice alone.
    pub scatter: bool,
    /// Elements that are padding, zero in every gradient and in their sum.
    pub padding: Vec<Range<usize>>,
    /// The parameters as PowerSGD sums them.
    pub factored: Vec<Factored>,
}

/// A shard of the sum, as its owner gets it from the others.
#[derive(Clone, Debug)]
struct Shard {
    range: Range<usize>,
    shape: Shape,
    bytes: usize,
}

impl SumPlan {
    /// The parts in which messages go to their owners; none where all messages go to all.
    fn shards(&self) -> Result<Vec<Shard>, CompressError> {
        let ranks = self.place[1];
        let ranges = match self.scheme.sum() {
            _ if self.scatter => {
                (0..ranks).map(|rank| FlatSlice::new(self.elements, ranks, rank).part_of(0..self.elements)).collect()
            }
            SumMethod::ScatterGather(per) => shards(per, Shape::vector(self.elements)?, ranks),
            SumMethod::AllReduceBf16 => shards(meshwork_compress::Per::Tensor, Shape::vector(self.elements)?, ranks),
            _ => return Ok(Vec::new()),
        };
        let shard = |range: Range<usize>| {
            let shape = Shape::vector(range.len())?;
            let bytes = if range.is_empty() { 0 } else { wire_bytes(&self.scheme, shape)? };
            Ok(Shard { range, shape, bytes })
        };
        ranges.into_iter().map(shard).collect()
    }

    /// What is kept between sums.
    ///
    /// # Errors
    /// A scheme that does not compress the bucket.
    pub fn states(&self) -> Result<Vec<State>, CompressError> {
        let of_sender = STATES.into_iter().zip(self.feedback.keeps()).filter(|(_, kept)| *kept);
        let mut states: Vec<_> =
            of_sender.map(|(name, _)| State { name, own: Own::Each, window: 0..self.elements }).collect();
        if self.feedback.keeps_estimate() {
            states.push(State { name: SUM_ESTIMATE, own: Own::EachSum, window: 0..self.elements });
        }
        if self.feedback != Feedback::None
            && !self.scatter
            && let Some(shard) = self.shards()?.get(self.place[0]).filter(|shard| !shard.range.is_empty())
        {
            states.push(State { name: SHARD_RESIDUAL, own: Own::EachSum, window: shard.range.clone() });
        }
        Ok(states)
    }
}

/// A slice of what is kept of a parameter between sums.
#[derive(Clone, Debug)]
pub struct SumState {
    pub key: StateKey,
    pub dims: Dims,
    pub slice: LocalSlice,
    /// The state that it is a part of, and its elements there.
    pub state: &'static str,
    pub range: Range<usize>,
}

/// What a rank keeps of the members of a bucket, each with its range in it. A state has a dim before those of the
/// parameter, for the replicas whose sum counts; `replica` says which of how many this rank is.
///
/// # Errors
/// A scheme that does not compress the bucket.
pub fn kept<'a>(
    plan: &SumPlan,
    replica: impl Fn(Own) -> [usize; 2],
    members: impl Iterator<Item = (&'a ParamSpec, Range<usize>)> + Clone,
    (mesh, coords): (&Mesh, Coords),
) -> Result<Vec<SumState>, CompressError> {
    let mut all = Vec::new();
    for State { name: state, own, window } in plan.states()? {
        for (spec, range) in members.clone() {
            let start = window.start.clamp(range.start, range.end);
            let part = start - range.start..window.end.clamp(start, range.end) - range.start;
            for (slice, place) in spec.local(mesh, coords).boxes(part) {
                let range = range.start + place.start - window.start..range.start + place.end - window.start;
                let (dims, slice) = of_replica(spec.dims, slice, replica(own));
                let key = StateKey { parameter: spec.name.clone(), state: Some(state.to_owned()) };
                all.push(SumState { key, dims, slice, state, range });
            }
        }
    }
    Ok(all)
}

/// The slice of replica `me` of `replicas`.
pub fn of_replica(dims: Dims, slice: LocalSlice, [me, replicas]: [usize; 2]) -> (Dims, LocalSlice) {
    let before = |first: usize, dims: &[usize]| Dims::new(&[&[first], dims].concat());
    let ranges = std::iter::once(me..me + 1).chain(slice.ranges).collect();
    (before(replicas, &dims), LocalSlice { stored: before(1, &slice.stored), ranges })
}

/// The names of the states of a sender, which lie beside those of the optimizer.
const STATES: [&str; 3] = ["gradient_residual", "gradient_estimate", "gradient_momentum"];
const SUM_ESTIMATE: &str = "gradient_sum_estimate";
const SHARD_RESIDUAL: &str = "gradient_shard_residual";

/// The sums of one bucket.
#[derive(Debug)]
pub struct LossySum {
    plan: SumPlan,
    shards: Vec<Shard>,
    /// Bytes of a message of the whole bucket.
    bytes: usize,
    device: Arc<dyn Device>,
    /// The number of the update, and the sums of it so far.
    number: u64,
    fills: usize,
    sender: Sender<Buffer>,
    sum_estimate: Buffer,
    /// Of the second compression: its residual.
    shard: Sender<Buffer>,
    /// Memory for the sum: that of the gradients.
    room: Option<Buffer>,
    /// The type of the gradients, in which the sum is given. Messages are added up in f32.
    dtype: DType,
}

impl LossySum {
    /// Sums of no gradients yet.
    ///
    /// # Errors
    /// No memory; a scheme that does not compress the bucket.
    pub fn new(plan: SumPlan, device: Arc<dyn Device>) -> Result<Self, VectorError> {
        let shape = Shape::vector(plan.elements)?;
        plan.scheme.check(shape)?;
        device.compression()?;
        let states = plan.states()?;
        let zeros = |name: &str| {
            let held = states.iter().find(|state| state.name == name).map_or(0, |state| state.window.len());
            let _states = device.meter().enter(Category::Optimizer);
            device.zeros(DType::F32, held)
        };
        let [residual, estimate, momentum] = STATES.map(&zeros);
        let sender = Sender { residual: residual?, estimate: estimate?, momentum: momentum? };
        let shard = Sender { residual: zeros(SHARD_RESIDUAL)?, estimate: zeros("")?, momentum: zeros("")? };
        let (shards, bytes, sum_estimate) = (plan.shards()?, wire_bytes(&plan.scheme, shape)?, zeros(SUM_ESTIMATE)?);
        Ok(Self {
            plan,
            shards,
            bytes,
            number: 0,
            fills: 0,
            sender,
            sum_estimate,
            shard,
            room: None,
            dtype: DType::F32,
            device,
        })
    }

    fn draws(&self) -> Draws {
        // A sum draws for the messages of all ranks, and then for the shards of the sum.
        let before = self.fills.saturating_sub(1) * (self.plan.place[1] + 1) * self.plan.elements;
        Draws::new(self.plan.seed, &self.plan.name, self.number).skip(before)
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer, Error> {
        let _buffers = self.device.meter().enter(Category::Buffers);
        self.device.alloc(dtype, count)
    }

    /// Packs the shards of `target`, one message after the other.
    fn pack_shards(&self, target: &Buffer, draws: Draws) -> Result<Buffer, VectorError> {
        let (mut messages, mut at) = (self.alloc(DType::U8, self.shards.iter().map(|shard| shard.bytes).sum())?, 0);
        for Shard { range, shape, bytes } in self.shards.iter().filter(|shard| shard.bytes > 0) {
            let (part, draws) = (target.slice(range.clone())?, draws.skip(range.start));
            self.device.compression()?.pack(&self.plan.scheme, *shape, draws, &part, &mut messages, at)?;
            at += bytes;
        }
        Ok(messages)
    }

    /// What this rank's messages restore to, all of it.
    fn restore(&self, messages: &Buffer) -> Result<Buffer, VectorError> {
        let (mut sent, mut at) = (self.alloc(DType::F32, self.plan.elements)?, 0);
        let (kernels, whole) = (self.device.compression()?, Shape::vector(self.plan.elements)?);
        if self.shards.is_empty() {
            kernels.unpack(&self.plan.scheme, whole, messages, Fold::Replace, &mut sent, 0)?;
        }
        for Shard { range, shape, bytes } in self.shards.iter().filter(|shard| shard.bytes > 0) {
            let message = messages.slice(at..at + bytes)?;
            kernels.unpack(&self.plan.scheme, *shape, &message, Fold::Replace, &mut sent, range.start)?;
            at += bytes;
        }
        Ok(sent)
    }

    /// Adds the messages of all ranks to `out`, which is zero.
    fn add(&self, received: &Buffer, shape: Shape, bytes: usize, out: &mut Buffer) -> Result<(), VectorError> {
        for rank in 0..if bytes > 0 { self.plan.place[1] } else { 0 } {
            let message = received.slice(rank * bytes..(rank + 1) * bytes)?;
            self.device.compression()?.unpack(&self.plan.scheme, shape, &message, Fold::Add, out, 0)?;
        }
        Ok(())
    }

    /// Adds up this rank's shard, compresses the sum again, and gathers all of them in `out`.
    fn gather_shards(&mut self, group: &Group, received: &Buffer, out: &mut Buffer) -> Result<(), VectorError> {
        let device = self.device.clone();
        let kernels = device.compression()?;
        let [rank, ranks] = self.plan.place;
        let Shard { range, shape, bytes } = self.shards[rank].clone();
        let longest = self.shards.iter().map(|shard| shard.bytes).max().unwrap_or(0);
        let mut own = self.alloc(DType::U8, longest)?;
        if bytes > 0 {
            let mut total = self.alloc(DType::F32, range.len())?;
            self.device.optim()?.zero(&mut total, 0..range.len())?;
            self.add(received, shape, bytes, &mut total)?;
            let draws = self.draws().skip(ranks * self.plan.elements + range.start);
            if self.shard.residual.count() > 0 {
                total = kernels.outgoing(Feedback::Ef, &total, false, &mut self.shard)?;
            }
            kernels.pack(&self.plan.scheme, shape, draws, &total, &mut own, 0)?;
            if self.shard.residual.count() > 0 {
                let mut sent = self.alloc(DType::F32, range.len())?;
                kernels.unpack(&self.plan.scheme, shape, &own.slice(0..bytes)?, Fold::Replace, &mut sent, 0)?;
                kernels.sent(Feedback::Ef, &total, &sent, &mut self.shard)?;
            }
        }
        let all = group.all_gather(own, self.alloc(DType::U8, ranks * longest)?)?;
        for (owner, Shard { range, shape, bytes }) in
            self.shards.iter().enumerate().filter(|(_, shard)| shard.bytes > 0)
        {
            let message = all.slice(owner * longest..owner * longest + bytes)?;
            kernels.unpack(&self.plan.scheme, *shape, &message, Fold::Replace, out, range.start)?;
        }
        Ok(())
    }
}

impl Sum for LossySum {
    fn begin(&mut self, number: u64) -> bool {
        (self.number, self.fills) = (number, 0);
        number >= self.plan.starts_at
    }

    fn start(&mut self, group: &Group, gradients: Buffer) -> Result<Pending, VectorError> {
        let ([rank, ranks], elements) = (self.plan.place, self.plan.elements);
        let (feedback, first) = (self.plan.feedback, self.number == self.plan.starts_at);
        self.fills += 1;
        self.dtype = gradients.dtype();
        let draws = self.draws().skip(rank * elements);
        let device = self.device.clone();
        let target = match feedback {
            Feedback::None => gradients.clone(),
            _ => device.compression()?.outgoing(feedback, &gradients.slice(0..elements)?, first, &mut self.sender)?,
        };
        let messages = match self.shards.is_empty() {
            false => self.pack_shards(&target, draws)?,
            true => {
                let mut message = self.alloc(DType::U8, self.bytes)?;
                let whole = Shape::vector(elements)?;
                self.device.compression()?.pack(&self.plan.scheme, whole, draws, &target, &mut message, 0)?;
                message
            }
        };
        if feedback != Feedback::None {
            let sent = self.restore(&messages)?;
            device.compression()?.sent(feedback, &target, &sent, &mut self.sender)?;
        }
        drop(target);
        self.room = (!self.plan.scatter).then_some(gradients);
        Ok(match self.shards.get(rank) {
            None => group.start_all_gather(messages, self.alloc(DType::U8, ranks * self.bytes)?)?,
            Some(own) => {
                let room = self.alloc(DType::U8, ranks * own.bytes)?;
                let counts: Vec<usize> = self.shards.iter().map(|shard| shard.bytes).collect();
                group.start_all_to_all(messages, room, &counts, &vec![own.bytes; ranks])?
            }
        })
    }

    fn finish(&mut self, group: &Group, received: Buffer) -> Result<Buffer, VectorError> {
        let [rank, ranks] = self.plan.place;
        let device = self.device.clone();
        if self.plan.scatter {
            let (slice, Shard { range, shape, bytes }) =
                (FlatSlice::new(self.plan.elements, ranks, rank), self.shards[rank].clone());
            let _gradients = device.meter().enter(Category::Gradients);
            let mut out = device.zeros(DType::F32, slice.count())?;
            self.add(&received, shape, bytes, &mut out)?;
            if self.dtype != DType::F32 {
                out = device.pointwise()?.cast(&out, self.dtype)?;
            }
            for padding in &self.plan.padding {
                let part = slice.part_of(padding.clone());
                if !part.is_empty() {
                    device.optim()?.zero(&mut out, part.start - range.start..part.end - range.start)?;
                }
            }
            return Ok(out);
        }
        let room = self.room.take().ok_or("a sum was finished that was not started")?;
        // Gradients in 16 bits are added up in f32 too.
        let [mut out, rounded] = match self.dtype {
            DType::F32 => [room, Buffer::empty()],
            _ => [self.alloc(DType::F32, room.count())?, room],
        };
        match self.shards.is_empty() {
            false => self.gather_shards(group, &received, &mut out)?,
            true => {
                device.optim()?.zero(&mut out, 0..self.plan.elements)?;
                self.add(&received, Shape::vector(self.plan.elements)?, self.bytes, &mut out)?;
            }
        }
        if self.plan.feedback.keeps_estimate() {
            device.pointwise()?.add_assign(&mut self.sum_estimate, 0, &out)?;
            device.layout()?.copy_into(&self.sum_estimate, 0..self.plan.elements, &mut out, 0)?;
        }
        for padding in &self.plan.padding {
            device.optim()?.zero(&mut out, padding.clone())?;
        }
        if self.dtype == DType::F32 {
            return Ok(out);
        }
        let (sum, mut out) = (device.pointwise()?.cast(&out, self.dtype)?, rounded);
        device.layout()?.copy_into(&sum, 0..sum.count(), &mut out, 0)?;
        Ok(out)
    }

    fn states(&self) -> Vec<(&'static str, &Buffer)> {
        let of_sender = STATES.into_iter().zip(self.sender.all());
        let all = of_sender.chain([(SUM_ESTIMATE, &self.sum_estimate), (SHARD_RESIDUAL, &self.shard.residual)]);
        all.filter(|(_, state)| state.count() > 0).collect()
    }

    fn states_mut(&mut self) -> Vec<(&'static str, &mut Buffer)> {
        let of_sender = STATES.into_iter().zip(self.sender.all_mut());
        let all = of_sender.chain([(SUM_ESTIMATE, &mut self.sum_estimate), (SHARD_RESIDUAL, &mut self.shard.residual)]);
        all.filter(|(_, state)| state.count() > 0).collect()
    }
}
