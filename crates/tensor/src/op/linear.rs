//! `y[lead.., N..] = x[lead.., K..] · w[N.., K..]ᵀ`: the product of a linear layer over structural dims.

use crate::error::Result;
use crate::family::Gemm;
use crate::shape::Shape;
use crate::tape::{Backward, Forward, Op, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Types};

#[derive(Debug)]
struct Linear {
    /// How many trailing dims are summed over.
    contract: usize,
    weight_shape: Shape,
    input_shape: Shape,
}

impl Linear {
    fn mnk(&self) -> (usize, usize, usize) {
        let (m, k) = self.input_shape.rows_columns(self.contract);
        (m, self.weight_shape.rows_columns(self.contract).0, k)
    }
}

impl Var {
    /// `x · wᵀ` over the last `contract` dims of both: a fused qkv is `x[b, s, h].linear(w[3, heads, d, h], 1)`, and the
    /// projection back is `y[b, s, heads, d].linear(w[h, heads, d], 2)`. Summing over a dim that both shard gives `Partial`.
    pub fn linear(&self, weight: &Var, contract: usize) -> Result<Var> {
        let op = Linear { contract, weight_shape: weight.shape(), input_shape: self.shape() };
        self.tape().apply(op, &[self, weight])
    }
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x", "weight"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::contract(self.name(), operands[0], operands[1], self.contract)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, w) = (inputs[0], inputs[1]);
        let (xs, ws) = (x.shape(), w.shape());
        cx.require(
            xs.len() >= self.contract
                && ws.len() >= self.contract
                && xs[xs.len() - self.contract..] == ws[ws.len() - self.contract..],
            || format!("the last {} dims of x and weight are summed over and must be equal", self.contract),
            inputs,
        )?;
        let (m, n, k) = self.mnk();
        let mut y = x.device().alloc(x.dtype(), m * n)?;
        x.device().matmul()?.gemm(Gemm::linear(m, n, k), x.buffer(), w.buffer(), &mut y, 0)?;
        cx.save(x)?;
        cx.save(w)?;
        let lead = &xs[..xs.len() - self.contract];
        let out = &ws[..ws.len() - self.contract];
        Tensor::from_buffer(x.device(), y, Shape::new(&[lead, out].concat()))
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (m, n, k) = self.mnk();
        let device = grad.device();
        let (x, w) = (cx.saved(0)?, cx.saved(1)?);
        let dx = cx.write_grad(0, grad.dtype(), self.input_shape, |dx, start, accumulate| {
            let spec = Gemm::linear_input_grad(m, n, k).accumulating(accumulate);
            device.matmul()?.gemm(spec, grad.buffer(), w.buffer(), dx, start)
        })?;
        let dw = cx.write_grad(1, grad.dtype(), self.weight_shape, |dw, start, accumulate| {
            let spec = Gemm::linear_weight_grad(m, n, k).accumulating(accumulate);
            device.matmul()?.gemm(spec, grad.buffer(), x.buffer(), dw, start)
        })?;
        Ok(vec![dx, dw])
    }
}
