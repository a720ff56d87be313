//! The named, differentiable operations that change an SPMD type, with their conjugates. Nothing else changes a type.
//!
//! | op | forward | backward |
//! |---|---|---|
//! | [`copy`](Var::copy) I→R | identity | all-reduce |
//! | [`all_reduce`](Var::all_reduce) P→I | all-reduce | identity |
//! | [`all_reduce_replicate`](Var::all_reduce_replicate) P→R | all-reduce | all-reduce |
//! | [`all_gather`](Var::all_gather) S→R | all-gather | reduce-scatter |
//! | [`all_gather_invariant`](Var::all_gather_invariant) S→I | all-gather | split |
//! | [`reduce_scatter`](Var::reduce_scatter) P→S | reduce-scatter | all-gather |
//! | [`split`](Var::split) I→S | local slice | all-gather |
//! | [`all_to_all`](Var::all_to_all) S(i)→S(j) | all-to-all | all-to-all |
//! | [`slice`](Var::slice) R→S | local slice | zero-padded, Partial |
//! | [`as_partial`](Var::as_partial) V→P | identity | identity |
//! | [`max_reduce`](Var::max_reduce) | all-reduce (max) | no gradient |
//!
//! Each takes one axis or several, which must have the same type, and is then one operation over the group of all of
//! them: `x.all_gather(Axis::DATA, 0)` gathers the samples of all ranks. Where several axes cut one dim,
//! [the slowest cuts outermost](meshwork_core::Types). A gather undoes innermost cuts, and a cut is made inside of
//! those that are there; another order would shuffle elements and is refused. An axis of degree 1 cuts nothing and is
//! never in the way.

use crate::error::{Error, Result};
use crate::shape::Shape;
use crate::tape::{Backward, Forward, Op, Padded, Tape, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::Operand;
use meshwork_core::{Axes, Axis, Group, ReduceOp, SpmdError, Ty, Types};

/// The effect of a collective on memory. The conjugate of each kind is one of these kinds too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    Identity,
    AllReduce,
    /// Concatenate the ranks' slices along the dim.
    Gather(usize),
    /// Sum, then keep this rank's slice of the dim.
    ReduceScatter(usize),
    /// Keep this rank's slice of the dim.
    Slice(usize),
    /// This rank's slice of the dim, zeros elsewhere.
    Pad(usize),
    /// Exchange slices: gathers the first dim, cuts the second.
    Exchange(usize, usize),
}

#[derive(Debug)]
struct Collective {
    name: &'static str,
    axes: Axes,
    /// The axes of the mesh above degree 1.
    wide: Axes,
    from: Ty,
    to: Ty,
    forward: Move,
    backward: Move,
    /// The gathered zeros beyond the true extent, where shards are padded.
    zeros: Option<Zeros>,
}

/// Zeros at the end of a dim: `stored` elements, of which `extent` are real.
#[derive(Clone, Copy, Debug)]
struct Zeros {
    axis: Axis,
    dim: usize,
    extent: usize,
    stored: usize,
}

impl Zeros {
    fn cut_off(self, x: &Tensor) -> Result<Tensor> {
        let (outer, stored, inner) = x.shape().around(self.dim);
        let real = x.device().layout()?.narrow(x.buffer(), outer, stored, inner, 0..self.extent)?;
        Tensor::from_buffer(x.device(), real, x.shape().with(self.dim, self.extent))
    }

    fn append(self, x: &Tensor) -> Result<Tensor> {
        let (outer, extent, inner) = x.shape().around(self.dim);
        let padded = x.device().layout()?.widen(x.buffer(), outer, self.stored, inner, 0..extent)?;
        Tensor::from_buffer(x.device(), padded, x.shape().with(self.dim, self.stored))
    }
}

impl Var {
    /// I→R before work that differs per rank (a column-parallel layer): Megatron-LM's operator f
    /// (`copy_to_tensor_model_parallel_region`). The identity in forward; the gradient is summed over `axes`.
    pub fn copy(&self, axes: impl Into<Axes>) -> Result<Var> {
        self.convert("copy", axes.into(), Ty::Invariant, Ty::Replicate, Move::Identity, Move::AllReduce)
    }

    /// P→I: the sum over the ranks of `axes`, after a row-parallel layer: Megatron-LM's operator g
    /// (`reduce_from_tensor_model_parallel_region`). The gradient passes unchanged.
    pub fn all_reduce(&self, axes: impl Into<Axes>) -> Result<Var> {
        self.convert("all_reduce", axes.into(), Ty::Partial, Ty::Invariant, Move::AllReduce, Move::Identity)
    }

    /// P→R: sums, for use that differs per rank.
    pub fn all_reduce_replicate(&self, axes: impl Into<Axes>) -> Result<Var> {
        self.convert("all_reduce", axes.into(), Ty::Partial, Ty::Replicate, Move::AllReduce, Move::AllReduce)
    }

    /// S(dim)→R.
    pub fn all_gather(&self, axes: impl Into<Axes>, dim: usize) -> Result<Var> {
        let (gather, scatter) = (Move::Gather(dim), Move::ReduceScatter(dim));
        self.convert("all_gather", axes.into(), Ty::Shard(dim), Ty::Replicate, gather, scatter)
    }

    /// S(dim)→I.
    pub fn all_gather_invariant(&self, axes: impl Into<Axes>, dim: usize) -> Result<Var> {
        self.convert("all_gather", axes.into(), Ty::Shard(dim), Ty::Invariant, Move::Gather(dim), Move::Slice(dim))
    }

    /// P→S(dim): sums, and each rank keeps its slice.
    pub fn reduce_scatter(&self, axes: impl Into<Axes>, dim: usize) -> Result<Var> {
        let (scatter, gather) = (Move::ReduceScatter(dim), Move::Gather(dim));
        self.convert("reduce_scatter", axes.into(), Ty::Partial, Ty::Shard(dim), scatter, gather)
    }

    /// I→S(dim).
    pub fn split(&self, axes: impl Into<Axes>, dim: usize) -> Result<Var> {
        self.convert("split", axes.into(), Ty::Invariant, Ty::Shard(dim), Move::Slice(dim), Move::Gather(dim))
    }

    /// R→S(dim).
    pub fn slice(&self, axes: impl Into<Axes>, dim: usize) -> Result<Var> {
        self.convert("slice", axes.into(), Ty::Replicate, Ty::Shard(dim), Move::Slice(dim), Move::Pad(dim))
    }

    /// S(from)→S(to).
    pub fn all_to_all(&self, axes: impl Into<Axes>, from: usize, to: usize) -> Result<Var> {
        self.require_unpadded("all_to_all", "x")?;
        let (there, back) = (Move::Exchange(from, to), Move::Exchange(to, from));
        self.convert("all_to_all", axes.into(), Ty::Shard(from), Ty::Shard(to), there, back)
    }

    /// V→P: declares each rank's own value to be a share of a sum.
    pub fn as_partial(&self, axes: impl Into<Axes>) -> Result<Var> {
        self.convert("as_partial", axes.into(), Ty::Varying, Ty::Partial, Move::Identity, Move::Identity)
    }

    /// The largest value over the ranks, element by element, `Invariant`. No gradient flows.
    pub fn max_reduce(&self, axes: impl Into<Axes>) -> Result<Var> {
        let axes = self.on_mesh(axes.into());
        if let Some(&axis) = axes.iter().find(|&&axis| !matches!(self.ty(axis), Ty::Varying | Ty::Shard(_))) {
            return Err(SpmdError {
                op: "max_reduce".to_owned(),
                axis,
                problem: format!("x is {}", self.ty(axis)),
                fix: "a maximum is taken over values that vary: Varying or Shard".to_owned(),
            }
            .into());
        }
        self.require_unpadded("max_reduce", "x")?;
        let input = self.tensor();
        let out = input.device().alloc(input.dtype(), input.count())?;
        let reduced =
            self.tape().rank().group_over(&axes).all_reduce_into(input.buffer().clone(), out, ReduceOp::Max)?;
        let tensor = Tensor::from_buffer(input.device(), reduced, input.shape())?;
        let types = axes.iter().fold(self.types(), |types, &axis| types.with(axis, Ty::Invariant));
        Ok(self.tape().input_without_gradient(tensor, types))
    }

    /// The axes that the mesh has; all, if it has none of them.
    fn on_mesh(&self, axes: Axes) -> Axes {
        let mesh = self.tape().rank().mesh();
        let on: Axes = axes.iter().copied().filter(|&axis| mesh.has(axis)).collect();
        if on.is_empty() { axes } else { on }
    }

    fn convert(&self, name: &'static str, axes: Axes, from: Ty, to: Ty, forward: Move, backward: Move) -> Result<Var> {
        let (axes, rank, types) = (self.on_mesh(axes), self.tape().rank(), self.types());
        if forward == Move::Gather(0) && axes.iter().any(|axis| axis.is_data()) {
            self.tape().mixes_samples();
        }
        let zeros = match forward {
            // Remaining cuts keep the padding.
            Move::Gather(dim) if types.cuts(dim).all(|axis| axes.contains(&axis)) => {
                let padded = types.cuts(dim).find_map(|axis| Some((axis, self.padding().extent(axis)?)));
                padded.map(|(axis, extent)| {
                    let stored = self.shape()[dim] * rank.group_over(&axes).size();
                    Zeros { axis, dim, extent, stored }
                })
            }
            _ => None,
        };
        let wide = rank.mesh().axes().filter(|&axis| rank.mesh().degree(axis) > 1).collect();
        self.tape().apply(Collective { name, axes, wide, from, to, forward, backward, zeros }, &[self])
    }
}

impl Op for Collective {
    fn name(&self) -> &'static str {
        self.name
    }

    fn only_moves(&self) -> bool {
        true
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (name, types, ndim) = (self.name, operands[0].types, operands[0].ndim);
        let refuse = |axis: Axis, problem: String, fix: String| SpmdError { op: name.to_owned(), axis, problem, fix };
        for &axis in self.axes.iter() {
            let Some(ty) = types.get(axis) else {
                return Err(refuse(
                    axis,
                    "x does not lie on this axis".to_owned(),
                    "use a mesh that has it".to_owned(),
                ));
            };
            if ty != self.from {
                return Err(refuse(
                    axis,
                    format!("x is {ty} and {name} takes {}", self.from),
                    advice(name, ty, self.from),
                ));
            }
        }
        let Some(&axis) = self.axes.last() else { return Ok(types) };
        if let (Ty::Shard(from), Ty::Shard(to)) = (self.from, self.to)
            && from == to
        {
            let problem = format!("dim {from} would be gathered and cut at once");
            return Err(refuse(axis, problem, format!("drop this {name}: x is Shard({from}) already")));
        }
        if let Some(dim) = self.to.dim().filter(|&dim| dim >= ndim) {
            return Err(refuse(
                axis,
                format!("x has {ndim} dims and no dim {dim}"),
                format!("name a dim below {ndim}"),
            ));
        }
        // The cuts that are made or undone are the innermost ones.
        let moved = |axis: &Axis| self.axes.contains(axis);
        let slowest = self.axes.iter().rev().find(|axis| self.wide.contains(axis));
        for dim in self.from.dim().into_iter().chain(self.to.dim()) {
            let Some(&slowest) = slowest else { continue };
            let Some(inner) = types.cuts(dim).find(|axis| *axis < slowest && self.wide.contains(axis) && !moved(axis))
            else {
                continue;
            };
            return Err(match self.from.dim() == Some(dim) {
                true => refuse(
                    slowest,
                    format!("dim {dim} is also cut over {inner}, inside of the cut over {slowest}"),
                    format!("gather it over {inner} first, or over both at once"),
                ),
                false => refuse(
                    slowest,
                    format!("dim {dim} is cut over {inner}, and a cut over {slowest} is outside of that"),
                    format!("gather it over {inner} first, or cut it over {slowest} before {inner}"),
                ),
            });
        }
        Ok(self.axes.iter().fold(types, |types, &axis| types.with(axis, self.to)))
    }

    fn padded(&self) -> Padded {
        if let Some(Zeros { axis, extent, .. }) = self.zeros { Padded::Knows { axis, extent } } else { Padded::Zeros }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let moves = self.forward != Move::Identity && cx.tape().rank().group_over(&self.axes).size() > 1;
        if !moves && self.zeros.is_none() {
            cx.same_as(0);
        }
        let moved = self.forward.run(self, cx.tape(), inputs[0].clone())?;
        if let Some(zeros) = self.zeros { zeros.cut_off(&moved) } else { Ok(moved) }
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let grad = if let Some(zeros) = self.zeros { zeros.append(&grad)? } else { grad };
        Ok(vec![Some(self.backward.run(self, cx.tape(), grad)?)])
    }
}

/// The operation that was probably intended.
fn advice(name: &str, is: Ty, wants: Ty) -> String {
    match (name, is) {
        ("all_reduce" | "reduce_scatter", Ty::Invariant | Ty::Replicate) => {
            format!("it holds the sum already, and reducing twice would multiply it by the degree: drop this {name}")
        }
        ("all_reduce" | "reduce_scatter", Ty::Varying) => {
            "if it is a share of a sum, say so with as_partial".to_owned()
        }
        ("all_gather", Ty::Replicate | Ty::Invariant) => {
            "every rank holds the whole already: drop this all_gather".to_owned()
        }
        (_, Ty::Partial) => "all_reduce or reduce_scatter it first".to_owned(),
        _ => format!("bring x to {wants} first"),
    }
}

impl Move {
    fn run(self, op: &Collective, tape: &Tape, x: Tensor) -> Result<Tensor> {
        let group = tape.rank().group_over(&op.axes);
        let n = group.size();
        if n == 1 {
            return Ok(x);
        }
        let device = x.device().clone();
        let shape = x.shape();
        match self {
            Move::Identity => Ok(x),
            Move::AllReduce => {
                // In place if nothing else holds the memory; otherwise into new memory, without a copy first.
                let buffer = match x.buffer().is_unique() {
                    true => group.all_reduce(x.into_buffer(), ReduceOp::Sum)?,
                    false => {
                        let out = device.alloc(x.dtype(), x.count())?;
                        group.all_reduce_into(x.into_buffer(), out, ReduceOp::Sum)?
                    }
                };
                Tensor::from_buffer(&device, buffer, shape)
            }
            Move::Gather(dim) => {
                let (outer, extent, inner) = shape.around(dim);
                let out = device.alloc(x.dtype(), n * x.count())?;
                let mut all = group.all_gather(x.into_buffer(), out)?;
                if outer > 1 {
                    all = device.layout()?.swap_blocks(&all, n, outer, extent * inner)?;
                }
                Tensor::from_buffer(&device, all, shape.with(dim, n * extent))
            }
            Move::ReduceScatter(dim) => {
                let (outer, held, inner) = even(op, group, shape, dim)?;
                let mut all = x.into_buffer();
                if outer > 1 {
                    all = device.layout()?.swap_blocks(&all, outer, n, held * inner)?;
                }
                let out = device.alloc(all.dtype(), outer * held * inner)?;
                let part = group.reduce_scatter(all, out, ReduceOp::Sum)?;
                Tensor::from_buffer(&device, part, shape.with(dim, held))
            }
            Move::Slice(dim) => {
                let (outer, held, inner) = even(op, group, shape, dim)?;
                let start = group.rank() * held;
                let part = device.layout()?.narrow(x.buffer(), outer, n * held, inner, start..start + held)?;
                Tensor::from_buffer(&device, part, shape.with(dim, held))
            }
            Move::Pad(dim) => {
                let (outer, held, inner) = shape.around(dim);
                let start = group.rank() * held;
                let whole = device.layout()?.widen(x.buffer(), outer, n * held, inner, start..start + held)?;
                Tensor::from_buffer(&device, whole, shape.with(dim, n * held))
            }
            Move::Exchange(gathered, cut) => {
                let (outer, held, inner) = even(op, group, shape, cut)?;
                let to_send = device.layout()?.swap_blocks(x.buffer(), outer, n, held * inner)?;
                let counts = vec![outer * held * inner; n];
                let received = device.alloc(x.dtype(), x.count())?;
                let received = group.all_to_all(to_send, received, &counts, &counts)?;
                let part = shape.with(cut, held);
                let (outer, extent, inner) = part.around(gathered);
                let joined = device.layout()?.swap_blocks(&received, n, outer, extent * inner)?;
                Tensor::from_buffer(&device, joined, part.with(gathered, n * extent))
            }
        }
    }
}

/// `[outer, held by each rank, inner]` of a dim to be cut evenly over a group.
fn even(op: &Collective, group: &Group, shape: Shape, dim: usize) -> Result<(usize, usize, usize)> {
    let (outer, extent, inner) = shape.around(dim);
    if extent % group.size() != 0 {
        // Data parallelism has the name of its slowest axis.
        let axis = op.axes.last().copied().unwrap_or(Axis::Dp);
        return Err(Error::uneven(op.name, dim, extent, axis, group.size()));
    }
    Ok((outer, extent / group.size(), inner))
}
