//! Functions of one number: `y = c x`, `e^x`, `tanh x`, `σ(x)`, `x σ(x)`.

use super::whole::require_whole;
use crate::error::Result;
use crate::kernel::Map;
use crate::tape::{Backward, Forward, Op, Padded, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Types};

#[derive(Debug)]
struct Mapped(Map);

impl Var {
    /// `factor · x`. Linear: keeps every type, `Partial` included.
    pub fn scale(&self, factor: f64) -> Result<Var> {
        self.mapped(Map::Scale(factor))
    }

    /// `e^x`. Not linear: refuses `Partial`.
    pub fn exp(&self) -> Result<Var> {
        self.mapped(Map::Exp)
    }

    /// The hyperbolic tangent. Not linear: refuses `Partial`.
    pub fn tanh(&self) -> Result<Var> {
        self.mapped(Map::Tanh)
    }

    /// `1/(1 + e^-x)`. Not linear: refuses `Partial`.
    pub fn sigmoid(&self) -> Result<Var> {
        self.mapped(Map::Sigmoid)
    }

    /// `x/(1 + e^-x)`, also called swish (Elfwing et al., arXiv:1702.03118). Not linear: refuses `Partial`.
    pub fn silu(&self) -> Result<Var> {
        self.mapped(Map::Silu)
    }

    fn mapped(&self, f: Map) -> Result<Var> {
        let op = Mapped(f);
        if !op.is_exact() {
            require_whole(op.name(), &[self])?;
        }
        self.tape().apply(op, &[self])
    }
}

impl Mapped {
    /// Whether the result is exact: a change of sign or a scale by a power of two.
    fn is_exact(&self) -> bool {
        matches!(self.0, Map::Scale(factor) if factor.is_normal() && factor.to_bits() << 12 == 0)
    }
}

fn map(f: Map, x: &Tensor) -> Result<Tensor> {
    Tensor::from_buffer(x.device(), x.device().elementwise()?.map(f, x.buffer())?, x.shape())
}

impl Op for Mapped {
    fn name(&self) -> &'static str {
        match self.0 {
            Map::Scale(_) => "scale",
            Map::Exp => "exp",
            Map::Tanh => "tanh",
            Map::Sigmoid => "sigmoid",
            Map::Silu => "silu",
        }
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        match self.0 {
            Map::Scale(_) => rules::linear_map(self.name(), operands[0]),
            _ => rules::pointwise(self.name(), operands[0]),
        }
    }

    fn padded(&self) -> Padded {
        match self.0 {
            Map::Scale(_) | Map::Tanh | Map::Silu => Padded::Zeros,
            Map::Exp | Map::Sigmoid => Padded::Refused, // e^0 is not 0
        }
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        match self.0 {
            Map::Scale(factor) => vec![("factor", factor)],
            _ => Vec::new(),
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let f = self.0;
        if !matches!(f, Map::Scale(_)) {
            cx.save_input(0)?;
            cx.recipe(move |saved| map(f, &saved[0].restore()?));
        }
        map(f, inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        if let Map::Scale(_) = self.0 {
            return Ok(vec![Some(map(self.0, &grad)?)]);
        }
        let dx = grad.device().elementwise()?.map_grad(self.0, grad.buffer(), cx.saved(0)?.buffer())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
