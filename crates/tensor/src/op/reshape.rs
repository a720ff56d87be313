//! The same elements under other dims (`reshape`, and what says more: `unflatten`, `flatten`, `unsqueeze`, `squeeze`),
//! in another order (`transpose`, `to_order`, `from_order`), a part of them (`narrow`), and zeros beside them
//! (`widen`). Nothing is computed, so all keep `Partial`, and the zeros of padded shards.

use super::order::{self, Order};
use super::prelude::*;
use crate::device::Device;
use crate::shape::MAX_DIMS;
use meshwork_core::Buffer;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
enum Reshape {
    /// To other extents.
    Free,
    /// A run of dims becomes so many others: the operation of this name.
    Regroup(&'static str, Range<usize>, usize),
    /// Swaps two dims.
    Transpose(usize, usize),
    /// A range of a dim.
    Narrow(usize, Range<usize>),
    /// A dim becomes a range of a longer one.
    Widen(usize, Range<usize>),
    /// The indices of a dim in the order of these runs.
    Order(usize, Vec<Range<usize>>),
}

#[derive(Debug)]
struct Reshaped {
    how: Reshape,
    /// Shape of x on this rank.
    from: Shape,
    /// Shape of the result.
    to: Shape,
}

impl Var {
    /// The same elements, in the same order, with the extents `extents` on this rank. Dim 0 counts samples and does not
    /// change. A sharded dim must be the first of the dims that it is merged with or cut into.
    ///
    /// With extents of 1, the local extents can be ambiguous: `[2, 8, 8]` becomes `[2, 8, 1, 8]` by a split into heads
    /// with one head on this rank, or by an inserted dim. An ambiguous reshape is refused, so a reshape may be refused
    /// at one degree and not at another. Code for every mesh uses [`unflatten`](Self::unflatten),
    /// [`flatten`](Self::flatten), [`unsqueeze`](Self::unsqueeze), [`squeeze`](Self::squeeze).
    pub fn reshape(&self, extents: &[usize]) -> Result<Var> {
        if extents.first() != self.shape().first() && extents.iter().product::<usize>() == self.shape().count() {
            return Err(self.misfit("reshape", "dim 0 counts samples and stays as it is".to_owned(), extents));
        }
        self.reshaped(Reshape::Free, "reshape", extents)
    }

    /// Splits `dim` into dims of the extents `extents` on this rank, as features into heads. If `dim` is sharded, the
    /// first of them is.
    ///
    /// ```
    /// # use meshwork_core::{Axis, Rank, Ty, Types};
    /// # use meshwork_tensor::{Params, Declarations, Tape, Tensor, meta::Meta, tape::{Mode, Position}};
    /// # use std::sync::Arc;
    /// # let rank = Arc::new(Rank::recording(&"tp=4".parse().unwrap(), 0).unwrap());
    /// # let (device, all) = (Meta::device(), Arc::new(Declarations::new()));
    /// # let params = Arc::new(Params::new(all, rank.mesh(), rank.coords(), &device, &[], 7)?);
    /// # let tape = Tape::new(rank.clone(), params, device.clone(), Mode::Train, Position::default());
    /// # let types = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Tp, Ty::Shard(2));
    /// // Queries of 4 heads of 8 features on one of four ranks of tp: one head. [samples, sequence, features]
    /// let queries = tape.constant(Tensor::from_slice(&device, &[0.0f32; 96], [2, 6, 8])?, types);
    /// let heads = queries.unflatten(2, &[1, 8])?; // [samples, sequence, heads, features]
    /// assert_eq!((&heads.shape()[..], heads.ty(Axis::Tp)), (&[2, 6, 1, 8][..], Ty::Shard(2)));
    /// assert!(queries.reshape(&[2, 6, 1, 8]).is_err()); // a head, or a dim of extent 1 before the features?
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    pub fn unflatten(&self, dim: usize, extents: &[usize]) -> Result<Var> {
        let none = extents.is_empty().then(|| "a dim is split into one or more".to_owned());
        self.regrouped("unflatten", dim..dim.saturating_add(1), extents, none)
    }

    /// Merges the dims `dims` into one, as heads into features. A sharded dim among them must be the first, and then
    /// the merged dim is sharded.
    pub fn flatten(&self, dims: Range<usize>) -> Result<Var> {
        let none = dims.is_empty().then(|| format!("{dims:?} has no dims to merge"));
        let extent = self.shape().get(dims.clone()).map_or(0, |extents| extents.iter().product());
        self.regrouped("flatten", dims, &[extent], none)
    }

    /// Inserts a dim of extent 1 before dim `dim`; all dims keep their types.
    pub fn unsqueeze(&self, dim: usize) -> Result<Var> {
        self.regrouped("unsqueeze", dim..dim, &[1], None)
    }

    /// Removes dim `dim`, whose extent must be 1 over all ranks. (In PyTorch a dim of another extent stays; here it is
    /// refused.)
    pub fn squeeze(&self, dim: usize) -> Result<Var> {
        let more = self.shape().get(dim).copied().filter(|&extent| extent != 1);
        let more = more.map(|extent| format!("dim {dim} has extent {extent}, and is removed only at extent 1"));
        self.regrouped("squeeze", dim..dim.saturating_add(1), &[], more)
    }

    /// Swaps dims `a` and `b`. Dim 0 counts samples and does not change.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Var> {
        let ndim = self.shape().len();
        if a.max(b) >= ndim || (a.min(b) == 0 && a != b) {
            return Err(Error::Shape {
                op: "transpose",
                problem: format!("dims {a} and {b} must be among 1..{ndim}; dim 0 counts samples and stays in front"),
                shapes: vec![self.shape().to_vec()],
            });
        }
        let (first, second) = (self.shape()[a], self.shape()[b]);
        let to = self.shape().with(a, second).with(b, first);
        self.reshaped(Reshape::Transpose(a.min(b), a.max(b)), "transpose", &to)
    }

    /// The indices `range` of `dim`, which must be whole on this rank. Dim 0 counts samples and does not change.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Var> {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        if dim == 0 || dim >= self.shape().len() || range.start > range.end || range.end > extent {
            return Err(Error::Shape {
                op: "narrow",
                problem: match dim {
                    0 => "dim 0 counts samples and stays as it is".to_owned(),
                    _ => format!("{range:?} is no part of dim {dim}, of extent {extent}"),
                },
                shapes: vec![self.shape().to_vec()],
            });
        }
        let to = self.shape().with(dim, range.len());
        self.reshaped(Reshape::Narrow(dim, range), "narrow", &to)
    }

    /// Zeros behind the elements along `dim`, up to the extent `extent`. The dim must be whole on this rank. Dim 0
    /// counts samples and does not change.
    pub fn widen(&self, dim: usize, extent: usize) -> Result<Var> {
        let held = self.shape().get(dim).copied().filter(|&held| dim > 0 && held <= extent);
        let Some(held) = held else {
            let problem = format!("dim {dim} is none of 1..{}, or longer than {extent}", self.shape().len());
            return Err(self.misfit("widen", problem, &[extent]));
        };
        if held == extent {
            return Ok(self.clone());
        }
        self.reshaped(Reshape::Widen(dim, 0..held), "widen", &self.shape().with(dim, extent))
    }

    /// The tokens along `dim`, which lie in the order of the sequence, in `order`. The dim must be whole on this rank.
    pub fn to_order(&self, dim: usize, order: &Order) -> Result<Var> {
        self.ordered(dim, order, |runs| runs)
    }

    /// The tokens along `dim`, which lie in `order`, in the order of the sequence. The dim must be whole on this rank.
    pub fn from_order(&self, dim: usize, order: &Order) -> Result<Var> {
        self.ordered(dim, order, |runs| order::places(&runs))
    }

    fn ordered(
        &self,
        dim: usize,
        order: &Order,
        runs: impl FnOnce(Vec<Range<usize>>) -> Vec<Range<usize>>,
    ) -> Result<Var> {
        let extent = self.shape().get(dim).copied().filter(|_| dim > 0);
        let Some(extent) = extent else {
            return Err(self.misfit("order", format!("dim {dim} is no dim of tokens"), &[]));
        };
        match order.is_natural() {
            true => Ok(self.clone()),
            false => {
                let how = Reshape::Order(dim, runs(order.tokens(extent, 0..extent)?));
                self.reshaped(how, "order", &self.shape())
            }
        }
    }

    /// `dims` become dims of the extents `into`, unless there is a problem.
    fn regrouped(&self, op: &'static str, dims: Range<usize>, into: &[usize], problem: Option<String>) -> Result<Var> {
        let from = self.shape();
        let problem = match dims.start {
            0 => Some("dim 0 counts samples and stays as it is".to_owned()),
            _ if dims.end > from.len() => Some(format!("x has {} dims, and {dims:?} are not among them", from.len())),
            _ => problem,
        };
        if let Some(problem) = problem {
            return Err(self.misfit(op, problem, into));
        }
        let to = [&from[..dims.start], into, &from[dims.end..]].concat();
        self.reshaped(Reshape::Regroup(op, dims, into.len()), op, &to)
    }

    fn reshaped(&self, how: Reshape, op: &'static str, to: &[usize]) -> Result<Var> {
        let from = self.shape();
        let as_many =
            matches!(how, Reshape::Narrow(..) | Reshape::Widen(..)) || to.iter().product::<usize>() == from.count();
        if to.len() > MAX_DIMS || !as_many {
            let problem = format!("as many elements on this rank as before, in at most {MAX_DIMS} dims");
            return Err(self.misfit(op, problem, to));
        }
        self.tape().apply(Reshaped { how, from, to: Shape::new(to) }, &[self])
    }

    fn misfit(&self, op: &'static str, problem: String, extents: &[usize]) -> Error {
        Error::Shape { op, problem, shapes: vec![self.shape().to_vec(), extents.to_vec()] }
    }
}

/// The indices `range` of dim `dim`, of this shape.
fn narrowed(x: &Tensor, dim: usize, range: &Range<usize>, shape: Shape) -> Result<Tensor> {
    let (outer, extent, inner) = x.shape().around(dim);
    Tensor::from_buffer(
        x.device(),
        x.device().layout()?.narrow(x.buffer(), outer, extent, inner, range.clone())?,
        shape,
    )
}

/// `x` as the indices `range` of dim `dim` of this shape, among zeros.
fn widened(x: &Tensor, dim: usize, range: &Range<usize>, shape: Shape) -> Result<Tensor> {
    let (outer, extent, inner) = shape.around(dim);
    Tensor::from_buffer(x.device(), x.device().layout()?.widen(x.buffer(), outer, extent, inner, range.clone())?, shape)
}

/// `x` with dims `a` and `b` swapped, `a` the smaller one.
fn transposed(x: &Tensor, a: usize, b: usize) -> Result<Tensor> {
    let shape = x.shape();
    if a == b {
        return Ok(x.clone());
    }
    let (first, second) = (shape[a], shape[b]);
    let product = |dims: Range<usize>| shape[dims].iter().product::<usize>();
    let (outer, middle, inner) = (product(0..a), product(a + 1..b), product(b + 1..shape.len()));
    // [outer, first, middle, second, inner]: second to the front of first, and then first behind middle.
    let ahead = swapped(x.device(), x.buffer(), [outer, first * middle, second, inner])?;
    let done = swapped(x.device(), &ahead, [outer * second, first, middle, inner])?;
    Tensor::from_buffer(x.device(), done, shape.with(a, second).with(b, first))
}

/// `[outer, a, b, inner] → [outer, b, a, inner]`.
fn swapped(device: &Arc<dyn Device>, x: &Buffer, [outer, a, b, inner]: [usize; 4]) -> Result<Buffer> {
    if a == 1 || b == 1 {
        return Ok(x.clone());
    }
    // b to the front of everything, and then behind outer.
    let front = device.layout()?.swap_blocks(x, outer * a, b, inner)?;
    if outer == 1 { Ok(front) } else { device.layout()?.swap_blocks(&front, b, outer, a * inner) }
}

impl Op for Reshaped {
    fn name(&self) -> &'static str {
        match self.how {
            Reshape::Free => "reshape",
            Reshape::Regroup(name, ..) => name,
            Reshape::Transpose(..) => "transpose",
            Reshape::Narrow(..) => "narrow",
            Reshape::Widen(..) => "widen",
            Reshape::Order(..) => "order",
        }
    }

    stated! { x; only_moves }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (name, x) = (self.name(), operands[0]);
        match &self.how {
            Reshape::Free => rules::reshape(name, x, &self.from, &self.to),
            Reshape::Regroup(_, dims, into) => rules::regroup(name, x, &self.from, dims.clone(), *into),
            Reshape::Transpose(a, b) => rules::transpose(name, x, *a, *b),
            Reshape::Narrow(dim, _) | Reshape::Widen(dim, _) | Reshape::Order(dim, _) => rules::part_of(name, x, *dim),
        }
    }

    fn padded(&self) -> Padded {
        Padded::Moved { from: self.from, to: self.to }
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        match &self.how {
            Reshape::Free | Reshape::Regroup(..) => x.clone().reshape(self.to),
            Reshape::Transpose(a, b) => transposed(x, *a, *b),
            Reshape::Narrow(dim, range) => narrowed(x, *dim, range, self.to),
            Reshape::Widen(dim, range) => widened(x, *dim, range, self.to),
            Reshape::Order(dim, runs) => order::in_order(x, *dim, runs),
        }
    }

    fn backward(&self, _cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(match &self.how {
            Reshape::Free | Reshape::Regroup(..) => grad.reshape(self.from)?,
            Reshape::Transpose(a, b) => transposed(&grad, *a, *b)?,
            Reshape::Narrow(dim, range) => widened(&grad, *dim, range, self.from)?,
            Reshape::Widen(dim, range) => narrowed(&grad, *dim, range, self.from)?,
            Reshape::Order(dim, runs) => order::in_order(&grad, *dim, &order::places(runs))?,
        })])
    }
}
