//! Sums of compressed gradients over data-parallel ranks, as [`meshwork_compress::sum()`] has them, on the memory of a
//! device and in two halves: the first communication starts as soon as a bucket's gradients are final, and backward
//! goes on.
//!
//! | scheme | start | finish |
//! |---|---|---|
//! | `topk`, `randk` | all gather the messages | they are added in the order of the ranks |
//! | `quant`, `sign`, `fp8`, `bf16` | each rank gets its shard from all | these are added in f32, compressed again and gathered |
//! | any, where ranks keep slices (ZeRO) | each rank gets its slice from all | these are added |
//!
//! [`FactorSum`](super::factor_sum::FactorSum) has the sums of PowerSGD.

use super::bucket_sum::{BucketSum, zeros};
use super::sum_plan::{SHARD_RESIDUAL, STATES, SUM_ESTIMATE, Shard, SumPlan};
use crate::prelude::*;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Compressor, Draws, Feedback, Fold, Shape, wire_bytes};
use meshwork_core::{FlatSlice, Pending};
use meshwork_data_parallel::{Sum, VectorError};

/// The sums of one bucket.
#[derive(Debug)]
pub struct LossySum {
    base: BucketSum,
    shards: Vec<Shard>,
    /// Bytes of a message of the whole bucket.
    bytes: usize,
    /// The whole bucket.
    whole: Shape,
    sum_estimate: Buffer,
    /// The residual of the second compression.
    shard: Sender<Buffer>,
    /// The gradients under way, whose memory the sum takes; none where ranks keep slices.
    gradients: Option<Buffer>,
    /// The type of the gradients, in which the sum is given. Messages are added in f32.
    dtype: DType,
}

impl LossySum {
    /// Sums of no gradients yet.
    ///
    /// # Errors
    /// No memory; a scheme that does not compress the bucket.
    pub fn new(plan: SumPlan, device: Arc<dyn Device>) -> Result<Self, VectorError> {
        let whole = Shape::vector(plan.elements)?;
        plan.scheme.check(whole)?;
        device.compression()?;
        let states = plan.states()?;
        let count = |name: &str| states.iter().find(|state| state.name == name).map_or(0, |state| state.window.len());
        let (shards, bytes) = (plan.shards()?, wire_bytes(&plan.scheme, whole)?);
        let base = BucketSum::new(plan, device, STATES.map(count))?;
        let zeros = |count| zeros(&*base.device, count);
        let shard = Sender { residual: zeros(count(SHARD_RESIDUAL))?, estimate: zeros(0)?, momentum: zeros(0)? };
        let sum_estimate = zeros(count(SUM_ESTIMATE))?;
        Ok(Self { base, shards, bytes, whole, sum_estimate, shard, gradients: None, dtype: DType::F32 })
    }

    /// The random numbers of a sum: of the messages of all ranks, and then of the shards of the sum.
    fn draws(&self) -> Draws {
        self.base.draws((self.base.plan.ranks + 1) * self.base.plan.elements)
    }

    /// The shards that have elements.
    fn filled(&self) -> impl Iterator<Item = (usize, &Shard)> {
        self.shards.iter().enumerate().filter(|(_, shard)| shard.bytes > 0)
    }

    /// This rank's messages of `target`, one after the other.
    fn pack(&self, target: &Buffer, draws: Draws) -> Result<Buffer, VectorError> {
        let (kernels, scheme) = (self.base.device.compression()?, &self.base.plan.scheme);
        if self.shards.is_empty() {
            let mut message = self.base.alloc(DType::U8, self.bytes)?;
            kernels.pack(scheme, self.whole, draws, target, &mut message)?;
            return Ok(message);
        }
        let mut messages = self.base.alloc(DType::U8, self.shards.iter().map(|shard| shard.bytes).sum())?;
        for (_, Shard { range, shape, at, bytes }) in self.filled() {
            let (part, draws) = (target.slice(range.clone())?, draws.skip(range.start));
            let mut message = messages.window(*at..at + bytes)?;
            kernels.pack(scheme, *shape, draws, &part, &mut message)?;
        }
        Ok(messages)
    }

    /// The elements that this rank's messages restore to.
    fn restore(&self, messages: &Buffer) -> Result<Buffer, VectorError> {
        let (kernels, scheme) = (self.base.device.compression()?, &self.base.plan.scheme);
        let mut sent = self.base.alloc(DType::F32, self.base.plan.elements)?;
        if self.shards.is_empty() {
            kernels.unpack(scheme, self.whole, messages, Fold::Replace, &mut sent)?;
        }
        for (_, Shard { range, shape, at, bytes }) in self.filled() {
            let (message, mut part) = (messages.slice(*at..at + bytes)?, sent.window(range.clone())?);
            kernels.unpack(scheme, *shape, &message, Fold::Replace, &mut part)?;
        }
        Ok(sent)
    }

    /// Adds the messages of all ranks to `out`, which is zero.
    fn add(&self, received: &Buffer, shape: Shape, bytes: usize, out: &mut Buffer) -> Result<(), VectorError> {
        let BucketSum { device, plan, .. } = &self.base;
        for rank in 0..if bytes > 0 { plan.ranks } else { 0 } {
            let message = received.slice(rank * bytes..(rank + 1) * bytes)?;
            device.compression()?.unpack(&plan.scheme, shape, &message, Fold::Add, out)?;
        }
        Ok(())
    }

    /// Adds up this rank's shard, compresses the sum again, and gathers all of them in `out`.
    fn gather_shards(&mut self, group: &Group, received: &Buffer, out: &mut Buffer) -> Result<(), VectorError> {
        let device = self.base.device.clone();
        let (kernels, scheme) = (device.compression()?, self.base.plan.scheme);
        let SumPlan { rank, ranks, elements, .. } = self.base.plan;
        let Shard { range, shape, bytes, .. } = self.shards[rank].clone();
        let longest = self.shards.iter().map(|shard| shard.bytes).max().unwrap_or(0);
        let mut own = self.base.alloc(DType::U8, longest)?;
        if bytes > 0 {
            let mut total = self.base.alloc(DType::F32, range.len())?;
            device.optim()?.zero(&mut total, 0..range.len())?;
            self.add(received, shape, bytes, &mut total)?;
            let (draws, feedback) =
                (self.draws().skip(ranks * elements + range.start), self.shard.residual.count() > 0);
            if feedback {
                total = kernels.outgoing(Feedback::Ef, &total, false, &mut self.shard)?;
            }
            kernels.pack(&scheme, shape, draws, &total, &mut own)?;
            if feedback {
                let mut sent = self.base.alloc(DType::F32, range.len())?;
                kernels.unpack(&scheme, shape, &own.slice(0..bytes)?, Fold::Replace, &mut sent)?;
                kernels.sent(Feedback::Ef, &total, &sent, &mut self.shard)?;
            }
        }
        let all = group.all_gather(own, self.base.alloc(DType::U8, ranks * longest)?)?;
        for (owner, Shard { range, shape, bytes, .. }) in self.filled() {
            let message = all.slice(owner * longest..owner * longest + bytes)?;
            let mut part = out.window(range.clone())?;
            kernels.unpack(&scheme, *shape, &message, Fold::Replace, &mut part)?;
        }
        Ok(())
    }

    /// The sum of this rank's slice.
    fn sum_slice(&self, received: &Buffer) -> Result<Buffer, VectorError> {
        let (device, plan) = (&self.base.device, &self.base.plan);
        let (slice, own) = (FlatSlice::new(plan.elements, plan.ranks, plan.rank), &self.shards[plan.rank]);
        let _gradients = device.meter().enter(Category::Gradients);
        let mut out = device.zeros(DType::F32, slice.count())?;
        self.add(received, own.shape, own.bytes, &mut out)?;
        if self.dtype != DType::F32 {
            out = device.pointwise()?.cast(&out, self.dtype)?;
        }
        let padding = plan.padding.iter().map(|padding| slice.part_of(padding.clone()));
        for part in padding.filter(|part| !part.is_empty()) {
            device.optim()?.zero(&mut out, part.start - own.range.start..part.end - own.range.start)?;
        }
        Ok(out)
    }
}

impl Sum for LossySum {
    fn begin(&mut self, number: u64) -> bool {
        self.base.begin(number)
    }

    fn start(&mut self, group: &Group, gradients: Buffer) -> Result<Pending, VectorError> {
        let first = self.base.start();
        let SumPlan { feedback, rank, ranks, elements, scatter, .. } = self.base.plan;
        self.dtype = gradients.dtype();
        let (draws, device) = (self.draws().skip(rank * elements), self.base.device.clone());
        let kernels = device.compression()?;
        let target = match feedback {
            Feedback::None => gradients.clone(),
            _ => kernels.outgoing(feedback, &gradients.slice(0..elements)?, first, &mut self.base.sender)?,
        };
        let messages = self.pack(&target, draws)?;
        if feedback != Feedback::None {
            kernels.sent(feedback, &target, &self.restore(&messages)?, &mut self.base.sender)?;
        }
        drop(target);
        self.gradients = (!scatter).then_some(gradients);
        Ok(match self.shards.get(rank) {
            None => group.start_all_gather(messages, self.base.alloc(DType::U8, ranks * self.bytes)?)?,
            Some(own) => {
                let room = self.base.alloc(DType::U8, ranks * own.bytes)?;
                let counts: Vec<usize> = self.shards.iter().map(|shard| shard.bytes).collect();
                group.start_all_to_all(messages, room, &counts, &vec![own.bytes; ranks])?
            }
        })
    }

    fn finish(&mut self, group: &Group, received: Buffer) -> Result<Buffer, VectorError> {
        if self.base.plan.scatter {
            return self.sum_slice(&received);
        }
        let gradients = self.gradients.take().ok_or("a sum was finished that was not started")?;
        let (device, elements) = (self.base.device.clone(), self.base.plan.elements);
        let mut out = self.base.wide(gradients)?;
        match self.shards.is_empty() {
            false => self.gather_shards(group, &received, &mut out.sum)?,
            true => {
                device.optim()?.zero(&mut out.sum, 0..elements)?;
                self.add(&received, self.whole, self.bytes, &mut out.sum)?;
            }
        }
        if self.base.plan.feedback.keeps_estimate() {
            device.pointwise()?.add_assign(&mut self.sum_estimate, 0, &out.sum)?;
            device.layout()?.copy_into(&self.sum_estimate, 0..elements, &mut out.sum, 0)?;
        }
        self.base.narrow(out)
    }

    fn states_mut(&mut self) -> Vec<(&'static str, &mut Buffer)> {
        let of_sender = STATES.into_iter().zip(self.base.sender.all_mut());
        let all = of_sender.chain([(SUM_ESTIMATE, &mut self.sum_estimate), (SHARD_RESIDUAL, &mut self.shard.residual)]);
        all.filter(|(_, state)| state.count() > 0).collect()
    }
}
