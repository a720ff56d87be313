//! `x - y`, `x · y` and `x / y`, element by element: `y` may have fewer dims, and is then repeated over the leading
//! dims of `x`.

use super::bias::bias_grad;
use super::prelude::*;
use super::whole::{require_whole, require_whole_values};
use crate::kernel::{Map, Zip};

#[derive(Debug)]
struct Zipped {
    f: Zip,
    y_shape: Shape,
    /// The rows over which y is repeated, if it has fewer dims.
    repeated: Option<Tokens>,
}

impl Var {
    /// `self - other`. Linear: both may be `Partial`.
    pub fn sub(&self, other: &Var) -> Result<Var> {
        self.zipped(Zip::Sub, other)
    }

    /// `self · other`, element by element; whichever has fewer dims is repeated over the leading dims of the other one.
    /// Linear in each: one may be `Partial` where the other is `Replicate`.
    pub fn mul(&self, other: &Var) -> Result<Var> {
        match self.shape().len() < other.shape().len() {
            true => other.zipped(Zip::Mul, self),
            false => self.zipped(Zip::Mul, other),
        }
    }

    /// `self / other`, element by element. Refuses `Partial`.
    pub fn div(&self, other: &Var) -> Result<Var> {
        self.zipped(Zip::Div, other)
    }

    fn zipped(&self, f: Zip, y: &Var) -> Result<Var> {
        let repeated = (y.shape().len() < self.shape().len()).then(|| Tokens::new(self, y.shape().len()));
        let op = Zipped { f, y_shape: y.shape(), repeated };
        // A difference rounds, but its gradients do not, unless they are summed over rows.
        match (f, repeated) {
            (Zip::Sub, None) => require_whole_values(op.name(), &[self, y])?,
            _ => require_whole(op.name(), &[self, y])?,
        }
        self.tape().apply(op, &[self, y])
    }
}

fn zip(f: Zip, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    Tensor::from_buffer(x.device(), x.device().elementwise()?.zip(f, x.buffer(), y.buffer())?, x.shape())
}

fn negated(x: &Tensor) -> Result<Tensor> {
    Tensor::from_buffer(x.device(), x.device().elementwise()?.map(Map::Scale(-1.0), x.buffer())?, x.shape())
}

impl Zipped {
    /// The gradient of y, if it is needed, in the shape of x.
    fn y_grad(&self, cx: &Backward<'_>, grad: &Tensor) -> Result<Option<Tensor>> {
        if !cx.needs(1) {
            return Ok(None);
        }
        Ok(Some(match self.f {
            Zip::Sub => negated(grad)?,
            Zip::Mul => zip(Zip::Mul, grad, &cx.saved(0)?)?,
            // -dz x / y²
            Zip::Div => {
                let (x, y) = (cx.saved(0)?, cx.saved(1)?);
                negated(&zip(Zip::Mul, &zip(Zip::Div, grad, &y)?, &zip(Zip::Div, &x, &y)?)?)?
            }
        }))
    }
}

impl Op for Zipped {
    fn name(&self) -> &'static str {
        match self.f {
            Zip::Sub => "sub",
            Zip::Mul => "mul",
            Zip::Div => "div",
        }
    }

    stated! { x, y }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        match self.f {
            Zip::Sub => rules::add(self.name(), operands[0], operands[1]),
            Zip::Mul => rules::product(self.name(), operands[0], operands[1]),
            Zip::Div => rules::elementwise(self.name(), operands),
        }
    }

    fn padded(&self) -> Padded {
        match self.f {
            Zip::Sub | Zip::Mul => Padded::Zeros,
            Zip::Div => Padded::Refused, // 0/0
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, y) = (inputs[0], inputs[1]);
        let fits = x.shape().ends_with(&y.shape());
        cx.require(fits, || "the dims of y must be those of x, or its trailing ones".to_owned(), inputs)?;
        if self.f != Zip::Sub {
            cx.save_input(0)?;
            cx.save_input(1)?;
        }
        zip(self.f, x, y)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let dy = match (self.y_grad(cx, &grad)?, self.repeated) {
            (Some(dy), Some(tokens)) => bias_grad(cx, 1, &dy, self.y_shape, tokens)?,
            (dy, _) => dy,
        };
        let dx = match self.f {
            _ if !cx.needs(0) => None,
            Zip::Sub => Some(grad),
            Zip::Mul | Zip::Div => Some(zip(self.f, &grad, &cx.saved(1)?)?),
        };
        Ok(vec![dx, dy])
    }
}
