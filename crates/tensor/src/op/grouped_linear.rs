//! Products and biases of rows in groups, each group with a matrix of its own: the layers of experts.
//!
//! `Y_g = X_g · W_gᵀ + b_g` for the rows `X_g` of each expert g, without padding. The ranks of some axes hold different
//! experts, and there the rows are `Varying`: each rank has those of its own experts, whichever rank their tokens are
//! from.

use super::prelude::*;
use super::swiglu;
use crate::kernel::{GroupedGemm, GroupedGrad};
use crate::tape::{BlockSlot, Terms};
use meshwork_core::{Axes, Axis};
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

/// Rows grouped by the expert that computes them; within a group they are in the order of the samples that they come
/// from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroups {
    axes: Axes,
    sources: Vec<Range<u64>>,
    /// Rows of each group and sample.
    counts: Vec<Vec<usize>>,
    /// Rows of each group.
    rows: Vec<usize>,
}

impl RowGroups {
    /// Groups of which the ranks of `axes` have different ones. `sources` are the samples that the rows come from, runs
    /// of consecutive numbers within the batch, and `counts` has the rows of each group and sample.
    pub fn new(axes: impl Into<Axes>, sources: Vec<Range<u64>>, counts: Vec<Vec<usize>>) -> Self {
        let rows = counts.iter().map(|counts| counts.iter().sum()).collect();
        Self { axes: axes.into(), sources, counts, rows }
    }

    /// Rows of each group.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// All rows.
    pub fn total(&self) -> usize {
        self.rows.iter().sum()
    }

    /// Per group, the rows of these samples, in a block for each of them, or in one.
    fn blocks(&self, samples: &Range<usize>, blocks: usize) -> Vec<Vec<Range<usize>>> {
        let mut first = 0;
        let of_group = |counts: &Vec<usize>| {
            let mut next = first + counts[..samples.start].iter().sum::<usize>();
            first += counts.iter().sum::<usize>();
            let mut take = |count: usize| {
                next += count;
                next - count..next
            };
            match blocks {
                1 => vec![take(counts[samples.clone()].iter().sum())],
                _ => counts[samples.clone()].iter().map(|&count| take(count)).collect(),
            }
        };
        self.counts.iter().map(of_group).collect()
    }

    /// The types without the dim of groups, and a refusal where groups are not where their rows are.
    fn of_one<'a>(&self, op: &str, [x, w]: [Operand<'a>; 2]) -> std::result::Result<[Operand<'a>; 2], SpmdError> {
        let refuse = |axis: Axis, problem: String, fix: &str| {
            Err(SpmdError { op: op.to_owned(), axis, problem, fix: fix.to_owned() })
        };
        if let Some((axis, ty)) = x.types.iter().find(|(_, ty)| *ty == Ty::Shard(0)) {
            let problem = format!("{} are {ty}, and the rows of groups are those of their experts, whole", x.name);
            return refuse(axis, problem, "dispatch them over this axis first: Varying");
        }
        let mut one = [x, Operand { ndim: w.ndim.saturating_sub(1), ..w }];
        for (axis, tw) in w.types.iter() {
            let tx = x.types.get(axis).unwrap_or(Ty::Invariant);
            let held = match (self.axes.contains(&axis), tx, tw) {
                (true, Ty::Varying, Ty::Shard(0)) => Ty::Replicate, // each rank its own
                (true, _, Ty::Shard(0)) => {
                    let fix = "dispatch them over this axis first";
                    return refuse(
                        axis,
                        format!(
                            "the experts are cut and {} are {tx}: each rank would give its experts rows meant for others",
                            x.name
                        ),
                        fix,
                    );
                }
                (true, ..) => {
                    let fix = "declare it Shard(0) on this axis: each rank holds its own experts";
                    return refuse(
                        axis,
                        format!("{} is {tw}, and the rows are those of this rank's experts", w.name),
                        fix,
                    );
                }
                (false, _, Ty::Shard(0)) => {
                    return refuse(
                        axis,
                        format!(
                            "{} is cut along its experts, whose rows lie over {}",
                            w.name,
                            self.axes.iter().map(|axis| axis.name()).collect::<Vec<_>>().join(", ")
                        ),
                        "cut the features instead",
                    );
                }
                (false, _, Ty::Shard(dim)) => Ty::Shard(dim - 1),
                (false, _, ty) => ty,
            };
            one[1].types = one[1].types.with(axis, held);
        }
        Ok(one)
    }

    fn fits(&self, cx: &Forward<'_>, inputs: &[&Tensor]) -> Result<()> {
        let [x, w] = [inputs[0].shape(), inputs[1].shape()];
        let found = (x.first().copied(), w.first().copied());
        cx.require(
            found == (Some(self.total()), Some(self.rows.len())),
            format_args!("there are {} groups of {} rows altogether", self.rows.len(), self.total()),
        )
    }
}

#[derive(Debug)]
struct GroupedLinear {
    groups: Rc<RowGroups>,
    contract: usize,
    weight_shape: Shape,
    /// How the sums of the product and of the gradient of x are cut.
    terms: [Terms; 2],
    then: Then,
}

/// The operation on the product.
#[derive(Debug)]
enum Then {
    Nothing,
    /// SwiGLU, of a product whose last dim has pairs. In backward: whether the saved product has been replaced by its
    /// gradient.
    Swiglu(Cell<bool>),
}

impl Var {
    /// `X_g · W_gᵀ` for the rows of each group, summed over the last `contract` dims of both: `x [rows, K..]`,
    /// `weight [groups, N.., K..]` to `[rows, N..]`. See [`RowGroups`].
    pub fn grouped_linear(&self, weight: &Var, contract: usize, groups: &Rc<RowGroups>) -> Result<Var> {
        self.tape().apply(GroupedLinear::new(self, weight, contract, groups, Then::Nothing), &[self, weight])
    }

    /// The [SwiGLU](Self::swiglu) of [`grouped_linear`](Self::grouped_linear), for `weight`
    /// `[groups, features, 2, K..]`. The result is a [matmul operand](crate::Device::operand_dtype), as that of
    /// [`linear_swiglu`](Self::linear_swiglu).
    pub fn grouped_linear_swiglu(&self, weight: &Var, contract: usize, groups: &Rc<RowGroups>) -> Result<Var> {
        let then = Then::Swiglu(Cell::new(false));
        self.tape().apply(GroupedLinear::new(self, weight, contract, groups, then), &[self, weight])
    }

    /// `X_g + b_g`: `x [rows, N..]`, `bias [groups, N..]`.
    pub fn grouped_bias(&self, bias: &Var, groups: &Rc<RowGroups>) -> Result<Var> {
        super::whole::require_whole_values("grouped_bias", &[self, bias])?;
        self.tape().apply(GroupedBias { groups: Rc::clone(groups), bias_shape: bias.shape() }, &[self, bias])
    }
}

impl GroupedLinear {
    fn new(x: &Var, weight: &Var, contract: usize, groups: &Rc<RowGroups>, then: Then) -> Self {
        let dims = weight.shape().len();
        let out = dims.saturating_sub(contract).max(1);
        let terms = [out..dims, 1..out].map(|dims| x.tape().terms(weight, dims));
        Self { groups: Rc::clone(groups), contract, weight_shape: weight.shape(), terms, then }
    }

    /// The gradient of the product from the gradient of the result.
    fn product_grad(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Tensor> {
        match &self.then {
            Then::Nothing => Ok(grad),
            Then::Swiglu(turned) if turned.get() => cx.saved(2),
            // Overwrites the product, which is twice as large as the incoming gradient.
            Then::Swiglu(turned) => {
                let product = cx.take_saved(2)?;
                let grad = swiglu::gradient(&grad, product)?;
                turned.set(cx.replace_saved(2, grad.clone()));
                Ok(grad)
            }
        }
    }

    fn gemm(&self, terms: Terms) -> GroupedGemm<'_> {
        let (all, k) = self.weight_shape.rows_columns(self.contract);
        GroupedGemm { rows: &self.groups.rows, n: all / self.groups.rows.len().max(1), k, terms }
    }
}

impl Op for GroupedLinear {
    fn name(&self) -> &'static str {
        match self.then {
            Then::Nothing => "grouped_linear",
            Then::Swiglu(_) => "grouped_linear_swiglu",
        }
    }

    stated! { x, weight }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let [x, w] = self.groups.of_one(self.name(), [operands[0], operands[1]])?;
        let product = rules::contract(self.name(), x, w, self.contract)?;
        match self.then {
            Then::Nothing => Ok(product),
            Then::Swiglu(_) => {
                let ndim = x.ndim + w.ndim - 2 * self.contract;
                swiglu::infer(self.name(), Operand::value("x · weightᵀ", product, ndim))
            }
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, w) = (inputs[0], inputs[1]);
        self.groups.fits(cx, inputs)?;
        let (xs, ws) = (x.shape(), w.shape());
        cx.require(
            xs.len() == 1 + self.contract && ws.len() > self.contract && xs[1..] == ws[ws.len() - self.contract..],
            format_args!("x is [rows, ..] with the last {} dims of weight, which are summed over", self.contract),
        )?;
        cx.save_input_for(0, 1)?;
        cx.save_input(1)?;
        let (device, spec) = (x.device(), self.gemm(self.terms[0]));
        let shape = Shape::new(&[&[self.groups.total()], &ws[1..ws.len() - self.contract]].concat());
        if let Then::Nothing = self.then {
            let y = device.grouped_matmul()?.grouped_linear(spec, x.buffer(), cx.share(w)?.buffer())?;
            return Tensor::from_buffer(device, y, shape);
        }
        let gated = swiglu::gated(&shape);
        cx.require(gated.is_some(), "weight is [groups, .., features, 2, ..], pairs of gate and up")?;
        let (gated, stored) = (gated.unwrap_or_default(), device.operand_dtype(w.dtype()));
        let (product, y) = device.grouped_matmul()?.grouped_linear_swiglu(spec, x.buffer(), w.buffer(), stored)?;
        cx.save(&Tensor::from_buffer(device, product, shape)?)?;
        cx.recipe(move |saved| {
            let product = saved[2].restore()?;
            let y = product.device().pointwise()?.swiglu(product.buffer(), stored)?;
            Tensor::from_buffer(product.device(), y, gated)
        });
        Tensor::from_buffer(device, y, gated)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let grad = self.product_grad(cx, grad)?;
        let device = grad.device();
        let mut dw = None;
        if cx.needs(1) {
            let x = cx.saved(0)?;
            dw = cx.write_grad_of(1, grad.dtype(), self.weight_shape, &self.groups.sources, |slot| {
                let blocks = self.groups.blocks(&slot.samples, slot.blocks);
                let BlockSlot { buffer, start, accumulate, .. } = slot;
                let dw = GroupedGrad { buffer, start, accumulate };
                let spec = self.gemm(Terms::WHOLE);
                device.grouped_matmul()?.grouped_weight_grad(spec, &blocks, grad.buffer(), x.buffer(), dw)
            })?;
        }
        let dx = match cx.needs(0) {
            true => {
                let (w, grad) = (cx.saved(1)?, cx.share(grad.clone())?);
                let dx =
                    device.grouped_matmul()?.grouped_input_grad(self.gemm(self.terms[1]), grad.buffer(), w.buffer())?;
                let contracted = &self.weight_shape[self.weight_shape.len() - self.contract..];
                Some(Tensor::from_buffer(device, dx, &[&[self.groups.total()], contracted].concat()[..])?)
            }
            false => None,
        };
        Ok(vec![dx, dw])
    }
}

#[derive(Debug)]
struct GroupedBias {
    groups: Rc<RowGroups>,
    bias_shape: Shape,
}

impl Op for GroupedBias {
    stated! { "grouped_bias": x, bias }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let [x, bias] = self.groups.of_one(self.name(), [operands[0], operands[1]])?;
        rules::add(self.name(), x, bias)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, bias) = (inputs[0], inputs[1]);
        self.groups.fits(cx, inputs)?;
        let fits = x.shape()[1..] == bias.shape()[1..];
        cx.require(fits, "x and bias have the same dims after the first")?;
        let y = x.device().grouped_matmul()?.grouped_bias(&self.groups.rows, x.buffer(), bias.buffer())?;
        Tensor::from_buffer(x.device(), y, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let n = self.bias_shape[1..].iter().product();
        let db = cx.write_grad_of(1, grad.dtype(), self.bias_shape, &self.groups.sources, |slot| {
            let blocks = self.groups.blocks(&slot.samples, slot.blocks);
            let BlockSlot { buffer, start, accumulate, .. } = slot;
            let db = GroupedGrad { buffer, start, accumulate };
            grad.device().grouped_matmul()?.grouped_bias_grad(&blocks, n, grad.buffer(), db)
        })?;
        Ok(vec![cx.needs(0).then_some(grad), db])
    }
}
