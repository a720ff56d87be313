//! PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727): sums of gradients over data-parallel ranks by all-reduces of thin factors, on
//! the memory of a device.
//!
//! ```text
//! start:   M = gradient + residual,  P = M Q      all-reduce P, while backward goes on
//! finish:  P̂ = orthogonal columns of P,  Q = Mᵀ P̂   all-reduce Q;  sum = P̂ Qᵀ,  residual = M − sum / ranks
//! ```
//!
//! A matrix is what a rank holds of a parameter, its dims taken together where factors are smallest. Parameters whose factors would be no
//! smaller, as all vectors, go with the P as they are. Q is kept from one sum to the next (warm start). Every rank gets the whole sum; with
//! ZeRO it keeps its slice.

use crate::lossy_sum::{Own, SumPlan, SumState, of_replica};
use crate::{Compress, PlanError, StateKey};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, PowerSgd, Scheme, Shape};
use meshwork_core::{Buffer, Coords, DType, FlatSlice, Group, Mesh, Pending, ReduceOp};
use meshwork_data_parallel::{Sum, VectorError};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::{Category, Device, Error, ParamSpec, Shape as Dims};
use std::ops::Range;
use std::sync::Arc;

const RESIDUAL: &str = "gradient_residual";
/// The name of the state of all Q, one after the other.
const FACTOR: &str = "gradient_factor";

/// A parameter in a bucket: its elements there, and what it is as a matrix, if its factors are smaller.
#[derive(Clone, Debug)]
pub struct Factored {
    pub range: Range<usize>,
    pub matrix: Option<Shape>,
}

impl Factored {
    /// Elements of P, or of the parameter where it goes as it is, and of Q.
    fn lengths(&self, of: PowerSgd) -> [usize; 2] {
        self.matrix.map_or([self.range.len(), 0], |shape| of.factors(shape))
    }
}

/// Where the dims of a parameter are divided into rows and columns: where they are fewest, of the whole parameter, so that every mesh divides
/// it there.
fn split(dims: &Dims) -> usize {
    let both = |at: &usize| dims[..*at].iter().product::<usize>() + dims[*at..].iter().product::<usize>();
    (1..dims.len()).min_by_key(both).unwrap_or(0)
}

/// What a rank holds of a parameter as a matrix; nothing if its factors would not be smaller.
pub fn factored(of: PowerSgd, spec: &ParamSpec, (mesh, coords): (&Mesh, Coords), range: Range<usize>) -> Factored {
    let (stored, at) = (spec.local(mesh, coords).stored, split(&spec.dims));
    let extents = [&stored[..at], &stored[at..]].map(|dims| dims.iter().product::<usize>());
    let matrix = Shape::matrix(extents[0], extents[1]).ok().filter(|&shape| {
        let thin = of.rank > 0 && of.rank <= shape.rows().min(shape.cols());
        at > 0 && thin && of.factors(shape).iter().sum::<usize>() < shape.len()
    });
    Factored { range, matrix }
}

/// Refuses factors that are smaller than no parameter.
///
/// # Errors
/// The largest rank that would be.
pub fn require_matrices(compress: &Compress, parameters: &[ParamSpec]) -> Result<(), PlanError> {
    let Scheme::PowerSgd(of) = compress.gradients else { return Ok(()) };
    // (rows + columns) · rank < rows · columns
    let most = |spec: &ParamSpec| {
        let (rows, columns) = spec.dims.split_at(split(&spec.dims));
        let [rows, columns] = [rows, columns].map(|dims| dims.iter().product::<usize>());
        (rows * columns).saturating_sub(1) / (rows + columns)
    };
    let most = parameters.iter().filter(|spec| !spec.group.frozen && spec.dims.len() > 1).map(most).max().unwrap_or(0);
    if of.rank <= most {
        return Ok(());
    }
    let problem = format!("its factors are smaller than no parameter; use a rank of 1 to {most}, or another scheme");
    Err(PlanError::Compress { place: "gradients", scheme: of.to_string(), problem })
}

/// The slices of Q that a rank keeps of the members of a bucket. Rows that an axis cuts give each of its ranks a Q of its own.
pub fn kept_factors<'a>(
    of: PowerSgd,
    plan: &SumPlan,
    replica: impl Fn(Own) -> [usize; 2],
    members: impl Iterator<Item = &'a ParamSpec>,
    (mesh, coords): (&Mesh, Coords),
) -> Vec<SumState> {
    let (mut all, mut start) = (Vec::new(), 0);
    for (spec, part) in members.zip(&plan.factored) {
        let [_, count] = part.lengths(of);
        if count == 0 {
            continue;
        }
        let (at, LocalSlice { stored, ranges }) = (split(&spec.dims), spec.local(mesh, coords));
        let mut place = replica(Own::EachSum);
        for &(axis, _) in spec.placement.shards().iter().filter(|(_, dim)| *dim < at) {
            place = [place[0] * mesh.degree(axis) + coords.get(axis), place[1] * mesh.degree(axis)];
        }
        let of_columns = |dims: &[usize]| Dims::new(&[&[of.rank], dims].concat());
        let columns = std::iter::once(0..of.rank).chain(ranges[at..].iter().cloned()).collect();
        let slice = LocalSlice { stored: of_columns(&stored[at..]), ranges: columns };
        let (dims, slice) = of_replica(of_columns(&spec.dims[at..]), slice, place);
        let key = StateKey { parameter: spec.name.clone(), state: Some(FACTOR.to_owned()) };
        all.push(SumState { key, dims, slice, state: FACTOR, range: start..start + count });
        start += count;
    }
    all
}

/// The sums of one bucket.
#[derive(Debug)]
pub struct FactorSum {
    of: PowerSgd,
    plan: SumPlan,
    device: Arc<dyn Device>,
    /// The number of the update, and the sums of it so far.
    number: u64,
    fills: usize,
    sender: Sender<Buffer>,
    q: Buffer,
    /// The gradients under way, and with feedback or 16 bits what is summed in their place.
    under_way: Option<(Buffer, Option<Buffer>)>,
}

impl FactorSum {
    /// Sums of no gradients yet.
    ///
    /// # Errors
    /// No memory, or a device that does not compress.
    pub fn new(of: PowerSgd, plan: SumPlan, device: Arc<dyn Device>) -> Result<Self, VectorError> {
        device.compression()?;
        let q = plan.factored.iter().map(|part| part.lengths(of)[1]).sum();
        let zeros = |count| {
            let _states = device.meter().enter(Category::Optimizer);
            device.zeros(DType::F32, count)
        };
        let residual = if plan.feedback == Feedback::None { 0 } else { plan.elements };
        let sender = Sender { residual: zeros(residual)?, estimate: zeros(0)?, momentum: zeros(0)? };
        let q = zeros(q)?;
        Ok(Self { of, plan, device, number: 0, fills: 0, sender, q, under_way: None })
    }

    fn alloc(&self, count: usize) -> Result<Buffer, Error> {
        let _buffers = self.device.meter().enter(Category::Buffers);
        self.device.alloc(DType::F32, count)
    }

    /// Each parameter with the ranges of its P, or of itself where it goes as it is, and of its Q.
    fn places(&self) -> Vec<(Factored, Range<usize>, Range<usize>)> {
        let mut ends = [0, 0];
        let place = |part: &Factored| {
            let starts = ends;
            ends.iter_mut().zip(part.lengths(self.of)).for_each(|(end, len)| *end += len);
            (part.clone(), starts[0]..ends[0], starts[1]..ends[1])
        };
        self.plan.factored.iter().map(place).collect()
    }

    /// Writes the products of factors to `out`, divided by `among`, and the rest from `whole` on.
    fn restore(
        &self,
        p: &Buffer,
        among: usize,
        out: &mut Buffer,
        whole: impl Fn(&Factored, &Range<usize>) -> Result<(Buffer, Range<usize>), VectorError>,
    ) -> Result<(), VectorError> {
        let device = &self.device;
        for (part, of_p, of_q) in self.places() {
            let Some(shape) = part.matrix else {
                let (from, range) = whole(&part, &of_p)?;
                device.layout()?.copy_into(&from, range, out, part.range.start)?;
                continue;
            };
            let factors = [p.slice(of_p)?, self.q.slice(of_q)?];
            let mut part = out.window(part.range)?;
            device.compression()?.join(self.of, shape, &factors, among, &mut part)?;
        }
        Ok(())
    }
}

impl Sum for FactorSum {
    fn begin(&mut self, number: u64) -> bool {
        (self.number, self.fills) = (number, 0);
        number >= self.plan.starts_at
    }

    fn start(&mut self, group: &Group, gradients: Buffer) -> Result<Pending, VectorError> {
        let device = self.device.clone();
        let kernels = device.compression()?;
        // All ranks draw the same.
        let draws = Draws::new(self.plan.seed, &self.plan.name, self.number).skip(self.fills * self.q.count());
        self.fills += 1;
        let whole = gradients.slice(0..self.plan.elements)?;
        let target = match self.plan.feedback {
            // Factors are f32, whatever gradients are.
            Feedback::None if whole.dtype() == DType::F32 => None,
            Feedback::None => Some(device.pointwise()?.cast(&whole, DType::F32)?),
            feedback => Some(kernels.outgoing(feedback, &whole, false, &mut self.sender)?),
        };
        let x = target.as_ref().unwrap_or(&whole);
        let places = self.places();
        let mut first = self.alloc(places.last().map_or(0, |(_, of_p, _)| of_p.end))?;
        for (part, of_p, of_q) in places {
            let Some(shape) = part.matrix else {
                device.layout()?.copy_into(x, part.range, &mut first, of_p.start)?;
                continue;
            };
            let (of, m, draws) = (self.of, x.slice(part.range)?, draws.skip(of_q.start));
            let (mut q, mut p) = (self.q.window(of_q)?, first.window(of_p)?);
            kernels.left_factor(of, shape, draws, &m, &mut q, &mut p)?;
        }
        drop(whole);
        self.under_way = Some((gradients, target));
        Ok(group.start_all_reduce(first, ReduceOp::Sum)?)
    }

    fn finish(&mut self, group: &Group, mut received: Buffer) -> Result<Buffer, VectorError> {
        let device = self.device.clone();
        let kernels = device.compression()?;
        let (room, target) = self.under_way.take().ok_or("a sum was finished that was not started")?;
        for (part, of_p, of_q) in self.places() {
            if let Some(shape) = part.matrix {
                let (of, m) = (self.of, target.as_ref().unwrap_or(&room).slice(part.range)?);
                let (mut q, mut p) = (self.q.window(of_q)?, received.window(of_p)?);
                kernels.right_factor(of, shape, &m, &mut p, &mut q)?;
            }
        }
        if self.q.count() > 0 {
            let q = std::mem::replace(&mut self.q, Buffer::empty());
            self.q = group.all_reduce(q, ReduceOp::Sum)?;
        }
        if let Some(target) = target.filter(|_| self.plan.feedback != Feedback::None) {
            let mut sent = self.alloc(self.plan.elements)?;
            let [_, ranks] = self.plan.place;
            self.restore(&received, ranks, &mut sent, |part, _| Ok((target.clone(), part.range.clone())))?;
            kernels.sent(self.plan.feedback, &target, &sent, &mut self.sender)?;
        }
        let dtype = room.dtype();
        let [mut out, rounded] = match dtype {
            DType::F32 => [room, Buffer::empty()],
            _ => [self.alloc(room.count())?, room],
        };
        self.restore(&received, 1, &mut out, |_, of_p| Ok((received.clone(), of_p.clone())))?;
        for padding in &self.plan.padding {
            device.optim()?.zero(&mut out, padding.clone())?;
        }
        if dtype != DType::F32 {
            let sum = device.pointwise()?.cast(&out, dtype)?;
            out = rounded;
            device.layout()?.copy_into(&sum, 0..sum.count(), &mut out, 0)?;
        }
        if !self.plan.scatter {
            return Ok(out);
        }
        let [rank, ranks] = self.plan.place;
        let slice = FlatSlice::new(self.plan.elements, ranks, rank);
        let _gradients = device.meter().enter(Category::Gradients);
        let mut own = device.zeros(dtype, slice.count())?;
        device.layout()?.copy_into(&out, slice.part_of(0..self.plan.elements), &mut own, 0)?;
        Ok(own)
    }

    fn states(&self) -> Vec<(&'static str, &Buffer)> {
        let all = [(RESIDUAL, &self.sender.residual), (FACTOR, &self.q)];
        all.into_iter().filter(|(_, state)| state.count() > 0).collect()
    }

    fn states_mut(&mut self) -> Vec<(&'static str, &mut Buffer)> {
        let all = [(RESIDUAL, &mut self.sender.residual), (FACTOR, &mut self.q)];
        all.into_iter().filter(|(_, state)| state.count() > 0).collect()
    }
}
