//! The matrices of each parameter. PowerSGD approximates their gradients by low-rank factors. Each rank has its shard
//! of each matrix. Vectors, and matrices whose factors would be no smaller, are summed uncompressed.

use crate::Compress;
use crate::prelude::*;
use meshwork_compress::{PowerSgd, Scheme, Shape};
use meshwork_core::Coords;
use meshwork_tensor::Role;
use meshwork_tensor::param::Matrices;

/// A parameter in a bucket: its elements there, and its matrices, if their factors are smaller.
#[derive(Clone, Debug)]
pub struct FactoredParameter {
    pub range: Range<usize>,
    pub matrices: Option<LocalMatrices>,
}

/// The matrices of a parameter that a rank holds, all of one shape.
#[derive(Clone, Copy, Debug)]
pub struct LocalMatrices {
    count: usize,
    pub shape: Shape,
    /// How many of them take turns, row by row.
    pub interleaved: usize,
}

/// The elements of a matrix in its parameter, and of its factors in their buffers.
pub struct MatrixRanges {
    pub elements: Range<usize>,
    pub p: Range<usize>,
    pub q: Range<usize>,
}

impl FactoredParameter {
    /// A parameter whose elements are `range` of the bucket.
    pub fn new(of: PowerSgd, spec: &ParamSpec, mesh: &Mesh, coords: Coords, range: Range<usize>) -> Self {
        let held = |declared: Matrices| {
            let [stacked, rows, interleaved, columns] = extents(declared, &spec.local(mesh, coords).stored);
            let shape = Shape::matrix(rows, columns).ok()?;
            let thin = of.rank > 0 && of.rank <= shape.rows().min(shape.cols());
            let smaller = thin && of.factors(shape).iter().sum::<usize>() < shape.len();
            smaller.then_some(LocalMatrices { count: stacked * interleaved, shape, interleaved })
        };
        Self { range, matrices: matrices(spec).and_then(held) }
    }

    /// Elements of P, or of the parameter where it is summed as it is, and of Q.
    pub fn lengths(&self, of: PowerSgd) -> [usize; 2] {
        self.matrices.map_or([self.range.len(), 0], |all| of.factors(all.shape).map(|each| all.count * each))
    }
}

impl LocalMatrices {
    /// The ranges of each matrix, where the factors of all begin at `p` and `q` of their buffers.
    pub fn each(self, of: PowerSgd, p: usize, q: usize) -> impl Iterator<Item = MatrixRanges> + use<> {
        let ([each_p, each_q], each) = (of.factors(self.shape), self.shape.len());
        let place = |start: usize, at: usize, each: usize| start + at * each..start + (at + 1) * each;
        let ranges =
            move |at| MatrixRanges { elements: place(0, at, each), p: place(p, at, each_p), q: place(q, at, each_q) };
        (0..self.count).map(ranges)
    }

    /// The elements of a parameter matrix by matrix; with `back`, the reverse.
    pub fn regrouped(self, device: &dyn Device, x: Buffer, back: bool) -> Result<Buffer, Error> {
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

/// The [matrices](Matrices) of a weight. A weight that declares none is one matrix. It is divided into rows and columns
/// where both together are fewest, of the whole parameter, so that every mesh divides it there.
pub fn matrices(spec: &ParamSpec) -> Option<Matrices> {
    let dims = &spec.dims;
    let both = |at: &usize| dims[..*at].iter().product::<usize>() + dims[*at..].iter().product::<usize>();
    let fewest = || Some(Matrices::new(0, dims.len() - (1..dims.len()).min_by_key(both)?));
    if spec.role == Role::Weight { spec.group.matrices.or_else(fewest) } else { None }
}

/// The products of the dims of matrices: `[stacked, rows, interleaved, columns]`.
fn extents(of: Matrices, dims: &[usize]) -> [usize; 4] {
    let (rest, columns) = dims.split_at(dims.len() - of.columns);
    let (rest, turns) = rest.split_at(rest.len() - of.interleaved);
    let (stacked, rows) = rest.split_at(of.stacked);
    [stacked, rows, turns, columns].map(|dims| dims.iter().product())
}

/// Refuses factors that make no parameter smaller.
///
/// # Errors
/// Names the largest rank that would do.
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
    let valid = if most > 0 { format!("a rank of 1 to {most}, or ") } else { String::new() };
    let problem = format!("its factors are smaller than no parameter; use {valid}another scheme");
    Err(PlanError::Compress { place: "gradients", scheme: of.to_string(), problem })
}
