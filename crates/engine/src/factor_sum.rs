//! PowerSGD (Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727): sums of gradients over data-parallel ranks by
//! all-reduces of thin factors, on the memory of a device.
//!
//! ```text
//! start:   M = gradient + residual,  P = M Q      all-reduce P, while backward goes on
//! finish:  P̂ = orthogonal columns of P,  Q = Mᵀ P̂   all-reduce Q;  sum = P̂ Qᵀ,  residual = M − sum / ranks
//! ```
//!
//! A matrix is what a rank holds of one of the matrices of a parameter. Parameters whose factors would be no smaller,
//! as all vectors, go with the P as they are. Q is kept from one sum to the next (warm start). Every rank gets the
//! whole sum; with ZeRO it keeps its slice.

use crate::lossy_sum::{Own, SumPlan, SumState, of_replica};
use crate::{Compress, PlanError, StateKey};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, PowerSgd, Scheme, Shape};
use meshwork_core::{Buffer, Coords, DType, FlatSlice, Group, Mesh, Pending, ReduceOp};
use meshwork_data_parallel::{Sum, VectorError};
use meshwork_tensor::param::{LocalSlice, Matrices};
use meshwork_tensor::{Category, Device, Error, ParamSpec, Role, Shape as Dims};
use std::ops::Range;
use std::sync::Arc;

const RESIDUAL: &str = "gradient_residual";
/// The name of the state of all Q, one after the other.
const FACTOR: &str = "gradient_factor";

/// A parameter in a bucket: its elements there, and what it is as matrices, if their factors are smaller.
#[derive(Clone, Debug)]
pub struct Factored {
    pub range: Range<usize>,
    pub matrices: Option<Parts>,
}

/// The matrices of a parameter that lie here, all of one shape.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    count: usize,
    shape: Shape,
    /// How many of them take turns, row by row.
    interleaved: usize,
}

impl Factored {
    /// Elements of P, or of the parameter where it goes as it is, and of Q.
    fn lengths(&self, of: PowerSgd) -> [usize; 2] {
        self.matrices.map_or([self.range.len(), 0], |parts| of.factors(parts.shape).map(|each| parts.count * each))
    }
}

impl Parts {
    /// Each matrix with the ranges of its elements, of its P and of its Q in their buffers.
    fn each(
        self,
        of: PowerSgd,
        of_p: &Range<usize>,
        of_q: &Range<usize>,
    ) -> impl Iterator<Item = [Range<usize>; 3]> + use<> {
        let ([p, q], [at_p, at_q], each) = (of.factors(self.shape), [of_p.start, of_q.start], self.shape.len());
        let place = move |at: usize, start: usize, each: usize| start + at * each..start + (at + 1) * each;
        (0..self.count).map(move |at| [place(at, 0, each), place(at, at_p, p), place(at, at_q, q)])
    }

    /// The elements of a parameter, matrix by matrix, or back in their turns.
    fn turned(self, device: &dyn Device, x: Buffer, back: bool) -> Result<Buffer, Error> {
        if self.interleaved == 1 {
            return Ok(x);
        }
        let (turns, each) = ([self.shape.rows(), self.interleaved], self.interleaved * self.shape.len());
        let [a, b] = if back { [turns[1], turns[0]] } else { turns };
        let mut all = device.alloc(DType::F32, x.count())?;
        for start in (0..x.count()).step_by(each) {
            let stack = device.layout()?.swap_blocks(&x.slice(start..start + each)?, a, b, self.shape.cols())?;
            device.layout()?.copy_into(&stack, 0..each, &mut all, start)?;
        }
        Ok(all)
    }
}

/// The [matrices](Matrices) of a weight. What declares none is one, divided into rows and columns where both together
/// are fewest, of the whole parameter, so that every mesh divides it there.
fn matrices(spec: &ParamSpec) -> Option<Matrices> {
    let dims = &spec.dims;
    let both = |at: &usize| dims[..*at].iter().product::<usize>() + dims[*at..].iter().product::<usize>();
    let fewest = || Some(Matrices::new(0, dims.len() - (1..dims.len()).min_by_key(both)?));
    if spec.role == Role::Weight { spec.group.matrices.or_else(fewest) } else { None }
}

/// Elements that go by the dims of matrices: `[stacked, rows, interleaved, columns]`.
fn extents(of: Matrices, dims: &[usize]) -> [usize; 4] {
    let (rest, columns) = dims.split_at(dims.len() - of.columns);
    let (rest, turns) = rest.split_at(rest.len() - of.interleaved);
    let (stacked, rows) = rest.split_at(of.stacked);
    [stacked, rows, turns, columns].map(|dims| dims.iter().product())
}

/// What a rank holds of a parameter as matrices; nothing if their factors would not be smaller.
pub fn factored(of: PowerSgd, spec: &ParamSpec, (mesh, coords): (&Mesh, Coords), range: Range<usize>) -> Factored {
    let held = |declared: Matrices| {
        let [stacked, rows, interleaved, columns] = extents(declared, &spec.local(mesh, coords).stored);
        let shape = Shape::matrix(rows, columns).ok()?;
        let thin = of.rank > 0 && of.rank <= shape.rows().min(shape.cols());
        let smaller = thin && of.factors(shape).iter().sum::<usize>() < shape.len();
        smaller.then_some(Parts { count: stacked * interleaved, shape, interleaved })
    };
    Factored { range, matrices: matrices(spec).and_then(held) }
}

/// Refuses factors that are smaller than no parameter.
///
/// # Errors
/// The largest rank that would be.
pub fn require_matrices(compress: &Compress, parameters: &[ParamSpec]) -> Result<(), PlanError> {
    let Scheme::PowerSgd(of) = compress.gradients else { return Ok(()) };
    // (rows + columns) · rank < rows · columns
    let most = |spec: &ParamSpec| {
        let [_, rows, _, columns] = extents(matrices(spec)?, &spec.dims);
        Some((rows * columns).saturating_sub(1) / (rows + columns))
    };
    let most = parameters.iter().filter(|spec| !spec.group.frozen).filter_map(most).max().unwrap_or(0);
    if of.rank <= most {
        return Ok(());
    }
    let problem = format!("its factors are smaller than no parameter; use a rank of 1 to {most}, or another scheme");
    Err(PlanError::Compress { place: "gradients", scheme: of.to_string(), problem })
}

/// The slices of Q that a rank keeps of the members of a bucket. Rows that an axis cuts give each of its ranks a Q of
/// its own.
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
        let Some(declared) = matrices(spec) else { continue };
        let LocalSlice { stored, ranges } = spec.local(mesh, coords);
        let (numbering, columns) = (declared.numbering(spec.dims.len()), spec.dims.len() - declared.columns);
        let mut place = replica(Own::EachSum);
        let of_rows = |dim: usize| dim < columns && !numbering.clone().any(|numbers| numbers == dim);
        for &(axis, _) in spec.placement.shards().iter().filter(|(_, dim)| of_rows(*dim)) {
            place = [place[0] * mesh.degree(axis) + coords.get(axis), place[1] * mesh.degree(axis)];
        }
        // A Q for each matrix.
        let of_columns = |dims: &[usize]| {
            let numbers: Vec<usize> = numbering.clone().map(|dim| dims[dim]).collect();
            Dims::new(&[&numbers, &[of.rank][..], &dims[columns..]].concat())
        };
        let held = numbering.clone().map(|dim| ranges[dim].clone()).chain(std::iter::once(0..of.rank));
        let held = held.chain(ranges[columns..].iter().cloned()).collect();
        let slice = LocalSlice { stored: of_columns(&stored), ranges: held };
        let (dims, slice) = of_replica(of_columns(&spec.dims), slice, place);
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
            let Some(parts) = part.matrices else {
                let (from, range) = whole(&part, &of_p)?;
                device.layout()?.copy_into(&from, range, out, part.range.start)?;
                continue;
            };
            let mut restored = match parts.interleaved {
                1 => Buffer::empty(),
                _ => self.alloc(part.range.len())?,
            };
            for [elements, of_p, of_q] in parts.each(self.of, &of_p, &of_q) {
                let factors = [p.slice(of_p)?, self.q.slice(of_q)?];
                let mut matrix = match parts.interleaved {
                    1 => out.window(part.range.start + elements.start..part.range.start + elements.end)?,
                    _ => restored.window(elements)?,
                };
                device.compression()?.join(self.of, parts.shape, &factors, among, &mut matrix)?;
            }
            if parts.interleaved > 1 {
                let restored = parts.turned(&**device, restored, true)?;
                device.layout()?.copy_into(&restored, 0..restored.count(), out, part.range.start)?;
            }
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
            let Some(parts) = part.matrices else {
                device.layout()?.copy_into(x, part.range, &mut first, of_p.start)?;
                continue;
            };
            let all = parts.turned(&*device, x.slice(part.range)?, false)?;
            for [elements, of_p, of_q] in parts.each(self.of, &of_p, &of_q) {
                let (m, draws) = (all.slice(elements)?, draws.skip(of_q.start));
                let (mut q, mut p) = (self.q.window(of_q)?, first.window(of_p)?);
                kernels.left_factor(self.of, parts.shape, draws, &m, &mut q, &mut p)?;
            }
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
            if let Some(parts) = part.matrices {
                let all = parts.turned(&*device, target.as_ref().unwrap_or(&room).slice(part.range)?, false)?;
                for [elements, of_p, of_q] in parts.each(self.of, &of_p, &of_q) {
                    let m = all.slice(elements)?;
                    let (mut q, mut p) = (self.q.window(of_q)?, received.window(of_p)?);
                    kernels.right_factor(self.of, parts.shape, &m, &mut p, &mut q)?;
                }
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
