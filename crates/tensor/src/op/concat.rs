//! Concatenation of two values along a dim, as in a skip connection that keeps both.

use super::prelude::*;

#[derive(Debug)]
struct Concat {
    dim: usize,
    /// Shapes of both on this rank.
    shapes: [Shape; 2],
}

impl Var {
    /// `self` and then `other` along `dim`, which must be whole on this rank; the other dims are equal. Dim 0 counts
    /// samples and cannot be concatenated. Linear: both may be `Partial`.
    pub fn concat(&self, other: &Var, dim: usize) -> Result<Var> {
        let shapes = [self.shape(), other.shape()];
        let apart =
            |shape: Shape| shape.iter().enumerate().filter(|&(at, _)| at != dim).map(|(_, &n)| n).collect::<Vec<_>>();
        let [x, y] = shapes;
        if dim == 0 || dim >= x.len() || x.len() != y.len() || apart(x) != apart(y) {
            return Err(Error::Shape {
                op: "concat",
                problem: match dim {
                    0 => "dim 0 counts samples and stays as it is".to_owned(),
                    _ => format!("both must have dim {dim}, and be alike in all other dims"),
                },
                shapes: shapes.map(|shape| shape.to_vec()).to_vec(),
            });
        }
        self.tape().apply(Concat { dim, shapes }, &[self, other])
    }
}

impl Op for Concat {
    stated! { "concat": x, y; only_moves, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let types = rules::add(self.name(), operands[0], operands[1])?;
        rules::part_of(self.name(), Operand { types, ..operands[0] }, self.dim)
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let [(outer, first, inner), (_, second, _)] = self.shapes.map(|shape| shape.around(self.dim));
        let (device, extent) = (inputs[0].device(), first + second);
        // Each value is placed among zeros, and both are added.
        let layout = device.layout()?;
        let mut both = layout.widen(inputs[0].buffer(), outer, extent, inner, 0..first)?;
        let behind = layout.widen(inputs[1].buffer(), outer, extent, inner, first..extent)?;
        device.pointwise()?.add_assign(&mut both, 0, &behind)?;
        Tensor::from_buffer(device, both, self.shapes[0].with(self.dim, extent))
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (outer, extent, inner) = grad.shape().around(self.dim);
        let first = self.shapes[0][self.dim];
        let part = |i: usize, range| {
            let part = grad.device().layout()?.narrow(grad.buffer(), outer, extent, inner, range)?;
            Tensor::from_buffer(grad.device(), part, self.shapes[i])
        };
        let dx = cx.needs(0).then(|| part(0, 0..first)).transpose()?;
        Ok(vec![dx, cx.needs(1).then(|| part(1, first..extent)).transpose()?])
    }
}
