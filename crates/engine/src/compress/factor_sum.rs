//! PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727): sums of gradients over data-parallel ranks by
//! all-reduces of thin factors, on the memory of a device.
//!
//! ```text
//! start:   M = gradient + residual,  P = M Q      all-reduce P, while backward goes on
//! finish:  P̂ = orthogonal columns of P,  Q = Mᵀ P̂   all-reduce Q;  sum = P̂ Qᵀ,  residual = M − sum / ranks
//! ```
//!
//! [`matrices`](super::matrices) says what M is. Parameters without matrices are summed as they are, together with P. Q
//! is kept from one sum to the next (warm start). Every rank gets the whole sum; with ZeRO it keeps its slice.

use super::bucket_sum::{BucketSum, zeros};
use super::matrices::{FactoredParameter, MatrixRanges};
use super::sum_plan::{FACTOR, STATES, SumPlan};
use crate::prelude::*;
use meshwork_compress::{Feedback, PowerSgd};
use meshwork_core::{FlatSlice, Pending};
use meshwork_data_parallel::{Sum, VectorError};

/// The sums of one bucket.
#[derive(Debug)]
pub struct FactorSum {
    of: PowerSgd,
    base: BucketSum,
    q: Buffer,
    /// The gradients under way.
    under_way: Option<UnderWay>,
}

/// Gradients whose sum has started.
#[derive(Debug)]
struct UnderWay {
    gradients: Buffer,
    /// With feedback or 16 bits: M, which takes their place.
    target: Option<Buffer>,
}

/// A parameter, and the ranges of its P, or of itself where it is summed as it is, and of its Q.
struct Placed<'a> {
    parameter: &'a FactoredParameter,
    p: Range<usize>,
    q: Range<usize>,
}

/// Where the factors of parameters are, in order.
fn placed(parameters: &[FactoredParameter], of: PowerSgd) -> Vec<Placed<'_>> {
    let mut ends = [0, 0];
    let place = |parameter: &'_ FactoredParameter| {
        let starts = ends;
        ends.iter_mut().zip(parameter.lengths(of)).for_each(|(end, len)| *end += len);
        (starts[0]..ends[0], starts[1]..ends[1])
    };
    let places: Vec<_> = parameters.iter().map(place).collect();
    parameters.iter().zip(places).map(|(parameter, (p, q))| Placed { parameter, p, q }).collect()
}

impl FactorSum {
    /// Sums of no gradients yet.
    ///
    /// # Errors
    /// No memory, or a device that does not compress.
    pub fn new(of: PowerSgd, plan: SumPlan, device: Arc<dyn Device>) -> Result<Self, VectorError> {
        device.compression()?;
        let residual = if plan.feedback == Feedback::None { 0 } else { plan.elements };
        let base = BucketSum::new(plan, device, [residual, 0, 0])?;
        let q = zeros(&*base.device, base.plan.factored.iter().map(|parameter| parameter.lengths(of)[1]).sum())?;
        Ok(Self { of, base, q, under_way: None })
    }

    fn alloc(&self, count: usize) -> Result<Buffer, Error> {
        self.base.alloc(DType::F32, count)
    }

    /// Writes the products of factors to `out`, divided by `among`, and parameters that are summed as they are from
    /// `whole`, at the place that `part` gives.
    fn restore(
        &self,
        p: &Buffer,
        among: usize,
        out: &mut Buffer,
        whole: &Buffer,
        part: impl Fn(&Placed<'_>) -> Range<usize>,
    ) -> Result<(), VectorError> {
        let device = &self.base.device;
        for placed in placed(&self.base.plan.factored, self.of) {
            let FactoredParameter { range, matrices } = placed.parameter;
            let Some(matrices) = matrices else {
                device.layout()?.copy_into(whole, part(&placed), out, range.start)?;
                continue;
            };
            let in_place = matrices.interleaved == 1;
            let mut restored = if in_place { Buffer::empty() } else { self.alloc(range.len())? };
            for MatrixRanges { elements, p: of_p, q: of_q } in matrices.each(self.of, placed.p.start, placed.q.start) {
                let factors = [p.slice(of_p)?, self.q.slice(of_q)?];
                let mut matrix = match in_place {
                    true => out.window(range.start + elements.start..range.start + elements.end)?,
                    false => restored.window(elements)?,
                };
                device.compression()?.join(self.of, matrices.shape, &factors, among, &mut matrix)?;
            }
            if !in_place {
                let restored = matrices.regrouped(&**device, restored, true)?;
                device.layout()?.copy_into(&restored, 0..restored.count(), out, range.start)?;
            }
        }
        Ok(())
    }
}

impl Sum for FactorSum {
    fn begin(&mut self, number: u64) -> bool {
        self.base.begin(number)
    }

    fn start(&mut self, group: &Group, gradients: Buffer) -> Result<Pending, VectorError> {
        self.base.start();
        let device = self.base.device.clone();
        let kernels = device.compression()?;
        // All ranks draw the same.
        let draws = self.base.draws(self.q.count());
        let whole = gradients.slice(0..self.base.plan.elements)?;
        let target = match self.base.plan.feedback {
            // Factors are f32, whatever gradients are.
            Feedback::None if whole.dtype() == DType::F32 => None,
            Feedback::None => Some(device.pointwise()?.cast(&whole, DType::F32)?),
            feedback => Some(kernels.outgoing(feedback, &whole, false, &mut self.base.sender)?),
        };
        let x = target.as_ref().unwrap_or(&whole);
        let placed = placed(&self.base.plan.factored, self.of);
        let mut first = self.alloc(placed.last().map_or(0, |last| last.p.end))?;
        for Placed { parameter, p, q } in placed {
            let FactoredParameter { range, matrices } = parameter;
            let Some(matrices) = matrices else {
                device.layout()?.copy_into(x, range.clone(), &mut first, p.start)?;
                continue;
            };
            let all = matrices.regrouped(&*device, x.slice(range.clone())?, false)?;
            for MatrixRanges { elements, p, q } in matrices.each(self.of, p.start, q.start) {
                let (m, draws) = (all.slice(elements)?, draws.skip(q.start));
                let (mut q, mut p) = (self.q.window(q)?, first.window(p)?);
                kernels.left_factor(self.of, matrices.shape, draws, &m, [&mut p, &mut q])?;
            }
        }
        drop(whole);
        self.under_way = Some(UnderWay { gradients, target });
        Ok(group.start_all_reduce(first, ReduceOp::Sum)?)
    }

    fn finish(&mut self, group: &Group, mut received: Buffer) -> Result<Buffer, VectorError> {
        let device = self.base.device.clone();
        let kernels = device.compression()?;
        let UnderWay { gradients, target } = self.under_way.take().ok_or("a sum was finished that was not started")?;
        for Placed { parameter, p, q } in placed(&self.base.plan.factored, self.of) {
            let Some(matrices) = parameter.matrices else { continue };
            let m = target.as_ref().unwrap_or(&gradients).slice(parameter.range.clone())?;
            let all = matrices.regrouped(&*device, m, false)?;
            for MatrixRanges { elements, p, q } in matrices.each(self.of, p.start, q.start) {
                let m = all.slice(elements)?;
                let (mut q, mut p) = (self.q.window(q)?, received.window(p)?);
                kernels.right_factor(self.of, matrices.shape, &m, [&mut p, &mut q])?;
            }
        }
        if self.q.count() > 0 {
            let q = std::mem::replace(&mut self.q, Buffer::empty());
            self.q = group.all_reduce(q, ReduceOp::Sum)?;
        }
        let SumPlan { feedback, rank, ranks, elements, scatter, .. } = self.base.plan;
        if let Some(target) = target.filter(|_| feedback != Feedback::None) {
            let mut sent = self.alloc(elements)?;
            self.restore(&received, ranks, &mut sent, &target, |placed| placed.parameter.range.clone())?;
            kernels.sent(feedback, &target, &sent, &mut self.base.sender)?;
        }
        let mut out = self.base.wide(gradients)?;
        self.restore(&received, 1, &mut out.sum, &received, |placed| placed.p.clone())?;
        let sum = self.base.narrow(out)?;
        if !scatter {
            return Ok(sum);
        }
        let slice = FlatSlice::new(elements, ranks, rank);
        let _gradients = device.meter().enter(Category::Gradients);
        let mut own = device.zeros(sum.dtype(), slice.count())?;
        device.layout()?.copy_into(&sum, slice.part_of(0..elements), &mut own, 0)?;
        Ok(own)
    }

    fn states_mut(&mut self) -> Vec<(&'static str, &mut Buffer)> {
        let all = [(STATES[0], &mut self.base.sender.residual), (FACTOR, &mut self.q)];
        all.into_iter().filter(|(_, state)| state.count() > 0).collect()
    }
}
