//! Sums and means over one dim, or over all but the samples.
//!
//! In canonical numerics a sum over a dim has reduction blocks, whether this mesh cuts the dim or not; a mean scales
//! each block. Micro-batches also cut the samples, so no sum over samples is canonical.

use super::prelude::*;
use super::whole::require_whole_values;
use crate::device::Device;
use meshwork_core::{Buffer, tree};
use std::sync::Arc;

#[derive(Debug)]
struct Sum {
    name: &'static str,
    dim: usize,
    /// Shape of x on this rank.
    shape: Shape,
    /// Slices of the dim on this rank whose sums are added up in the tree.
    blocks: usize,
    scale: f64,
}

impl Var {
    /// The sum over `dim`, which is removed. Linear: keeps `Partial`, and is `Partial` where `dim` is sharded. In
    /// canonical numerics it refuses dim 0, the samples.
    pub fn sum(&self, dim: usize) -> Result<Var> {
        self.summed("sum", dim, 1.0)
    }

    /// The mean over `dim`, over its whole extent on all ranks. Otherwise as [`sum`](Self::sum).
    pub fn mean(&self, dim: usize) -> Result<Var> {
        let extent = self.shape().get(dim).copied().unwrap_or(1) * self.degree_of(dim);
        self.summed("mean", dim, 1.0 / extent as f64)
    }

    /// The sum over all dims but the first: one number per sample, `[samples]`.
    pub fn sum_per_sample(&self) -> Result<Var> {
        self.per_sample(Self::sum)
    }

    /// The mean over all dims but the first: one number per sample, `[samples]`.
    pub fn mean_per_sample(&self) -> Result<Var> {
        self.per_sample(Self::mean)
    }

    /// Reduces one dim after another, from the last; sharded dims come at the end, so that whole values are summed as
    /// long as possible.
    fn per_sample(&self, over: impl Fn(&Var, usize) -> Result<Var>) -> Result<Var> {
        let mut rest = self.clone();
        while rest.shape().len() > 1 {
            let last = rest.shape().len() - 1;
            let sharded = |dim: usize| rest.types().iter().any(|(_, ty)| ty == Ty::Shard(dim));
            let dim = (1..=last).rev().find(|&dim| !sharded(dim)).unwrap_or(last);
            rest = over(&rest, dim)?;
        }
        Ok(rest)
    }

    /// Ranks over which `dim` is cut.
    pub(super) fn degree_of(&self, dim: usize) -> usize {
        self.types().cuts(dim).map(|axis| self.tape().rank().mesh().degree(axis)).product()
    }

    fn summed(&self, name: &'static str, dim: usize, scale: f64) -> Result<Var> {
        require_whole_values(name, &[self])?;
        let blocks = match self.tape().reduction_blocks() {
            None => 1,
            Some(_) if dim == 0 => {
                let problem = "the order of a sum over samples depends on how the batch is cut";
                let valid = "a sum per sample: the seed of backward divides by the number of samples";
                return Err(Error::NotCanonical { op: name, problem, valid });
            }
            Some(blocks) => self.blocks_of(name, dim, blocks)?,
        };
        self.tape().apply(Sum { name, dim, shape: self.shape(), blocks, scale }, &[self])
    }

    /// The number of the `blocks` blocks along `dim` that are on this rank.
    pub(super) fn blocks_of(&self, op: &'static str, dim: usize, blocks: usize) -> Result<usize> {
        let degree = self.degree_of(dim);
        match self.types().cuts(dim).last().filter(|_| !tree::fits(blocks, degree)) {
            None => Ok(blocks / degree),
            Some(axis) => Err(Error::Placement {
                what: op.to_owned(),
                dim,
                extent: self.shape()[dim],
                axis,
                degree,
                problem: format!("{blocks} reduction blocks fit degrees {:?}", tree::degrees(blocks)),
            }),
        }
    }
}

/// `scale` times the sums over the middle dim of x, of which this rank has so many reduction blocks.
pub(super) fn tree_sum(
    device: &Arc<dyn Device>,
    x: &Buffer,
    (outer, extent, inner): (usize, usize, usize),
    blocks: usize,
    scale: f64,
) -> Result<Buffer> {
    let (mut sums, count) = (device.reduction()?.sum(x, [outer, extent, inner], blocks, scale)?, outer * inner);
    if blocks > 1 {
        device.pointwise()?.tree_sum(&mut sums, 0, blocks, count, 0)?;
        sums = sums.slice(0..count)?;
    }
    Ok(sums)
}

impl Op for Sum {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::sum_over(self.name(), operands[0], self.dim)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        let (dim, ndim) = (self.dim, x.shape().len());
        cx.require(dim < ndim, format_args!("x has no dim {dim}: its dims are 0..{ndim}"))?;
        let (outer, extent, inner) = x.shape().around(dim);
        let (device, x) = (x.device(), &cx.share(x)?);
        let sums = tree_sum(device, x.buffer(), (outer, extent, inner), self.blocks, self.scale)?;
        let left: Vec<usize> = (0..ndim).filter(|&other| other != dim).map(|other| x.shape()[other]).collect();
        Tensor::from_buffer(device, sums, &left[..])
    }

    fn backward(&self, _cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (outer, extent, inner) = self.shape.around(self.dim);
        let dx = grad.device().reduction()?.spread(grad.buffer(), [outer, extent, inner], self.scale)?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, self.shape)?)])
    }
}
