//! The same elements under other dims (`reshape`), in another order (`transpose`), and a part of them (`narrow`). Nothing is
//! computed, so all three keep `Partial`.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::shape::{MAX_DIMS, Shape};
use crate::tape::{Backward, Forward, Op, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Buffer, SpmdError, Types};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
enum Reshape {
    /// To other extents.
    To(Shape),
    /// Swaps two dims.
    Transpose(usize, usize),
    /// A range of a dim.
    Narrow(usize, Range<usize>),
}

#[derive(Debug)]
struct Reshaped {
    how: Reshape,
    /// Shape of x on this rank.
    from: Shape,
}

impl Var {
    /// The same elements, in the same order, with the extents `extents` on this rank. Dim 0 counts samples and does not
    /// change. A sharded dim must be the first of the dims that it is merged with or cut into.
    pub fn reshape(&self, extents: &[usize]) -> Result<Var> {
        let keeps_samples = extents.first() == self.shape().first();
        let fits = extents.len() <= MAX_DIMS && extents.iter().product::<usize>() == self.shape().count();
        if !(keeps_samples && fits) {
            return Err(Error::Shape {
                op: "reshape",
                problem: match fits {
                    true => "dim 0 counts samples and stays as it is".to_owned(),
                    false => format!("as many elements on this rank as before, in at most {MAX_DIMS} dims"),
                },
                shapes: vec![self.shape().to_vec(), extents.to_vec()],
            });
        }
        self.reshaped(Reshape::To(Shape::new(extents)))
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
        self.reshaped(Reshape::Transpose(a.min(b), a.max(b)))
    }

    /// The indices `range` of `dim`, which must be whole on this rank. Dim 0 counts samples and does not change.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Var> {
        let extent = self.shape().get(dim).copied().unwrap_or(0);
        if dim == 0 || range.start > range.end || range.end > extent {
            return Err(Error::Shape {
                op: "narrow",
                problem: match dim {
                    0 => "dim 0 counts samples and stays as it is".to_owned(),
                    _ => format!("{range:?} is no part of dim {dim}, of extent {extent}"),
                },
                shapes: vec![self.shape().to_vec()],
            });
        }
        self.reshaped(Reshape::Narrow(dim, range))
    }

    fn reshaped(&self, how: Reshape) -> Result<Var> {
        self.tape().apply(Reshaped { how, from: self.shape() }, &[self])
    }
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
    match outer {
        1 => Ok(front),
        _ => device.layout()?.swap_blocks(&front, b, outer, a * inner),
    }
}

impl Op for Reshaped {
    fn name(&self) -> &'static str {
        match self.how {
            Reshape::To(_) => "reshape",
            Reshape::Transpose(..) => "transpose",
            Reshape::Narrow(..) => "narrow",
        }
    }

    fn only_moves(&self) -> bool {
        true
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        match self.how {
            Reshape::To(to) => rules::reshape(self.name(), operands[0], &self.from, &to),
            Reshape::Transpose(a, b) => rules::transpose(self.name(), operands[0], a, b),
            Reshape::Narrow(dim, _) => rules::part_of(self.name(), operands[0], dim),
        }
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        match &self.how {
            Reshape::To(to) => x.clone().reshape(*to),
            Reshape::Transpose(a, b) => transposed(x, *a, *b),
            Reshape::Narrow(dim, range) => {
                let (outer, extent, inner) = x.shape().around(*dim);
                let part = x.device().layout()?.narrow(x.buffer(), outer, extent, inner, range.clone())?;
                Tensor::from_buffer(x.device(), part, x.shape().with(*dim, range.len()))
            }
        }
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        Ok(vec![Some(match &self.how {
            Reshape::To(_) => grad.reshape(self.from)?,
            Reshape::Transpose(a, b) => transposed(&grad, *a, *b)?,
            Reshape::Narrow(dim, range) => {
                let (outer, extent, inner) = self.from.around(*dim);
                let whole = grad.device().layout()?.widen(grad.buffer(), outer, extent, inner, range.clone())?;
                Tensor::from_buffer(grad.device(), whole, self.from)?
            }
        })])
    }
}
