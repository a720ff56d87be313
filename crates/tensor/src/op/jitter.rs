//! Noise around 1 that multiplies a value, a function of global position.

use super::dropout::random_scalars;
use super::prelude::*;
use crate::kernel::DropoutMask;
use crate::tape::Mode;

#[derive(Debug)]
struct Jitter(DropoutMask);

impl Var {
    /// Multiplies each element by a number drawn from `[1 - p, 1 + p)`; the identity when evaluating or at p = 0.
    /// `name` is the name of the layer; each use needs its own. (Switch Transformers, section 2.2, of a router's
    /// input.)
    pub fn jitter(&self, p: f32, name: &str) -> Result<Var> {
        if p == 0.0 || self.tape().mode() == Mode::Evaluate {
            return Ok(self.clone());
        }
        self.tape().apply(Jitter(self.random_mask("jitter", p, name)?), &[self])
    }
}

impl Jitter {
    fn scaled(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::from_buffer(x.device(), x.device().routing()?.jitter(x.buffer(), &self.0)?, x.shape())
    }
}

impl Op for Jitter {
    stated! { "jitter": x; padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::linear_map(self.name(), operands[0])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        random_scalars(self.0.p, self.0.key)
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        self.scaled(inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        match cx.needs(0) {
            true => Ok(vec![Some(self.scaled(&grad)?)]),
            false => Ok(vec![None]),
        }
    }
}
