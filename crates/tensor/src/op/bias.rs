//! `y = x + b`: `b` is repeated over the leading dims of `x`.

use super::prelude::*;
use super::whole::require_whole_values;

#[derive(Debug)]
struct Bias {
    bias_shape: Shape,
    tokens: Tokens,
}

impl Var {
    /// `x + b`. A bias added to a `Partial` value would be counted once per rank: refused.
    pub fn bias(&self, bias: &Var) -> Result<Var> {
        require_whole_values("bias", &[self, bias])?;
        let tokens = Tokens::new(self, bias.shape().len());
        self.tape().apply(Bias { bias_shape: bias.shape(), tokens }, &[self, bias])
    }
}

impl Op for Bias {
    stated! { "bias": x, bias; reads_values, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::add(self.name(), operands[0], operands[1])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, b) = (inputs[0], inputs[1]);
        cx.require(x.shape().ends_with(&b.shape()), "the trailing dims of x must be those of bias")?;
        Tensor::from_buffer(x.device(), x.device().pointwise()?.bias(x.buffer(), b.buffer())?, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let db = bias_grad(cx, 1, &grad, self.bias_shape, self.tokens)?;
        Ok(vec![cx.needs(0).then_some(grad), db])
    }
}

/// `bias`, or zeros of that shape where there is none, on the device and of the type of `like`.
pub(super) fn or_zeros(bias: Option<Tensor>, like: &Tensor, shape: Shape) -> Result<Tensor> {
    bias.map_or_else(|| Tensor::zeros(like.device(), like.dtype(), shape), Ok)
}

/// The gradient of a bias, which is input `i`, if it is needed: the sum of the rows of `grad`.
pub(super) fn bias_grad(
    cx: &mut Backward<'_>,
    i: usize,
    grad: &Tensor,
    shape: Shape,
    tokens: Tokens,
) -> Result<Option<Tensor>> {
    if !cx.needs(i) {
        return Ok(None);
    }
    let blocks = cx.row_blocks(i, tokens);
    let sums = grad.device().pointwise()?.bias_grad(grad.buffer(), shape.count(), blocks)?;
    cx.sum_blocks(i, sums, shape, tokens, blocks)
}
