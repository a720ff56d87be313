//! Dropout whose mask is a function of global position, so that it does not depend on the mesh, and every rank of an
//! `Invariant` value drops the same elements.

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::DropoutMask;
use crate::random::Key;
use crate::shape::MAX_DIMS;
use crate::tape::Mode;

#[derive(Debug)]
struct Dropout {
    mask: DropoutMask,
}

impl Var {
    /// Drops elements with probability `p` and scales the rest by 1/(1-p); the identity when evaluating or at p = 0.
    /// `name` is the name of the layer; each use needs its own. On an axis where the value is `Varying` it has no
    /// global position, and every rank drops the same places.
    pub fn dropout(&self, p: f32, name: &str) -> Result<Var> {
        if p == 0.0 || self.tape().mode() == Mode::Evaluate {
            return Ok(self.clone());
        }
        let mask = self.random_mask("dropout", p, name)?;
        self.tape().apply(Dropout { mask }, &[self])
    }

    /// What `op`, a layer called `name`, draws for each element.
    pub(super) fn random_mask(&self, op: &'static str, p: f32, name: &str) -> Result<DropoutMask> {
        require_whole(op, &[self])?;
        let (offset, global) = self.global_position();
        let mut local = [1; MAX_DIMS];
        local[..self.shape().len()].copy_from_slice(&self.shape());
        Ok(DropoutMask { p, key: self.tape().random_key(name)?, ndim: self.shape().len(), local, offset, global })
    }
}

impl Dropout {
    fn masked(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::from_buffer(x.device(), x.device().pointwise()?.dropout(x.buffer(), &self.mask)?, x.shape())
    }
}

/// Of an operation that draws: the probability, and the stream that it draws from.
pub(super) fn random_scalars(p: f32, key: Key) -> Vec<(&'static str, f64)> {
    let [first, second] = key.words();
    vec![("p", p.into()), ("key word 0", first.into()), ("key word 1", second.into())]
}

impl Op for Dropout {
    stated! { "dropout": x; reads_values, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::linear_map(self.name(), operands[0])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        random_scalars(self.mask.p, self.mask.key)
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        self.masked(inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        match cx.needs(0) {
            true => Ok(vec![Some(self.masked(&grad)?)]),
            false => Ok(vec![None]),
        }
    }
}
