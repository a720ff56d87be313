//! A value repeated along a new dim, which the ranks of an axis share out: as the part of keys that all heads have in
//! common, where each rank has some of the heads. The gradient is the sum over that dim.

use super::prelude::*;
use super::sum::tree_sum;
use meshwork_core::{Axis, tree};

#[derive(Debug)]
struct Repeat {
    dim: usize,
    /// Shape of the result on this rank.
    shape: Shape,
    over: Axis,
    /// Slices of the dim on this rank whose sums are added up in the tree.
    blocks: usize,
}

impl Var {
    /// The value `extent` times on each rank of `over`, along a new dim in front of dim `dim`, which is cut over that
    /// axis. It must be `Replicate` there, because each rank's copies have other gradients. In canonical numerics the
    /// reduction blocks of the new dim must fit the ranks.
    pub fn repeat(&self, dim: usize, extent: usize, over: Axis) -> Result<Var> {
        let from = self.shape();
        if dim == 0 || dim > from.len() {
            return Err(Error::Shape {
                op: "repeat",
                problem: match dim {
                    0 => "dim 0 counts samples and stays as it is".to_owned(),
                    _ => format!("a new dim lies in front of one of {} dims, or behind them", from.len()),
                },
                shapes: vec![from.to_vec()],
            });
        }
        let degree = self.tape().rank().mesh().degree(over);
        let blocks = self.tape().reduction_blocks().unwrap_or(degree);
        if !tree::fits(blocks, degree) {
            return Err(Error::Placement {
                what: "repeat".to_owned(),
                dim,
                extent: extent * degree,
                axis: over,
                degree,
                problem: format!("{blocks} reduction blocks fit degrees {:?}", tree::degrees(blocks)),
            });
        }
        let shape = Shape::new(&[&from[..dim], &[extent], &from[dim..]].concat());
        self.tape().apply(Repeat { dim, shape, over, blocks: blocks / degree }, &[self])
    }
}

impl Op for Repeat {
    stated! { "repeat": x }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::per_axis(self.name(), operands, |axis, types| match types[0] {
            Ty::Replicate if axis == self.over => Ok(Ty::Shard(self.dim)),
            other if axis == self.over => Err((
                format!("x is {other}, and each rank repeats all of it"),
                "copy or all_gather x first, so that it is Replicate".to_owned(),
            )),
            Ty::Shard(dim) if dim >= self.dim => Ok(Ty::Shard(dim + 1)),
            other => Ok(other),
        })
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (device, around) = (inputs[0].device(), self.shape.around(self.dim));
        let copies = device.reduction()?.spread(inputs[0].buffer(), around.into(), 1.0)?;
        Tensor::from_buffer(device, copies, self.shape)
    }

    fn backward(&self, _cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let sum = tree_sum(grad.device(), grad.buffer(), self.shape.around(self.dim), self.blocks, 1.0)?;
        let others = (0..self.shape.len()).filter(|&dim| dim != self.dim).map(|dim| self.shape[dim]);
        Ok(vec![Some(Tensor::from_buffer(grad.device(), sum, &others.collect::<Vec<_>>()[..])?)])
    }
}
