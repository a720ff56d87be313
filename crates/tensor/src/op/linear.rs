//! `y[lead.., N..] = x[lead.., K..] · w[N.., K..]ᵀ`: the product of a linear layer over structural dims; and in one
//! pass `y + b[N..]`, `gelu(y + b)` (b optional) and the SwiGLU of y, with the bits of the separate operations. To y or
//! `y + b` a second product `u · vᵀ` of few terms may be added, in the memory of the first.
//!
//! More than 400 lines: forward and backward of all these forms are the same two products.

use super::bias::{bias_grad, or_zeros};
use super::prelude::*;
use super::swiglu;
use crate::kernel::{FEW_TERMS, Gemm};
use crate::shape::MAX_DIMS;
use crate::tape::{RowBlocks, Terms};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

#[derive(Debug)]
struct Linear {
    product: Product,
    /// The product that is added to it.
    plus: Option<Product>,
    then: Then,
    joined: Joined,
}

/// One product of two operands.
#[derive(Debug)]
struct Product {
    /// The place of the input among the operands, in front of that of the weight.
    input: usize,
    /// Number of trailing dims that are summed over.
    contract: usize,
    weight_shape: Shape,
    input_shape: Shape,
    /// How the sums of the product and of the input's gradient are cut.
    terms: [Terms; 2],
    tokens: Tokens,
    /// Whether the operands are never rounded.
    exact: bool,
}

/// Whether another product reads the same input, right before or after this one on the tape, and the gradient of the
/// input is computed for both at once.
#[derive(Debug)]
enum Joined {
    Alone,
    /// With the product after it, whose part of the gradient waits here.
    WithNext(Waiting),
    WithPrevious(Waiting),
}

/// The gradient of a product and its weight, until the gradient of the input is computed.
type Waiting = Rc<RefCell<Option<(Tensor, Tensor, Terms)>>>;

/// The operation on the product, with the shape of the bias if there is one.
#[derive(Debug)]
enum Then {
    Nothing,
    Bias(Shape),
    Gelu(Option<Shape>),
    /// SwiGLU, of a product whose last dim has pairs. In backward: whether the saved product has been replaced by its
    /// gradient.
    Swiglu(Cell<bool>),
}

impl Product {
    fn new(input: usize, x: &Var, weight: &Var, contract: usize) -> Self {
        let (weight_shape, input_shape) = (weight.shape(), x.shape());
        let out = weight_shape.len().saturating_sub(contract);
        let terms = [out..weight_shape.len(), 0..out].map(|dims| x.tape().terms(weight, dims));
        let tokens = Tokens::new(x, contract);
        Self { input, contract, weight_shape, input_shape, terms, tokens, exact: false }
    }

    /// The dims of the weight that are not summed over.
    fn out(&self) -> Shape {
        Shape::new(&self.weight_shape[..self.weight_shape.len() - self.contract])
    }

    fn mnk(&self) -> (usize, usize, usize) {
        let (m, k) = self.input_shape.rows_columns(self.contract);
        (m, self.weight_shape.rows_columns(self.contract).0, k)
    }

    /// The product itself, into memory or added to what is there.
    fn spec(&self) -> Gemm {
        let (m, n, k) = self.mnk();
        Gemm::linear(m, n, k).over(self.terms[0]).exact(self.exact)
    }

    /// The gradient of the weight, if it is needed, from that of the product and the input, which was saved.
    fn weight_grad(&self, cx: &mut Backward<'_>, grad: &Tensor, saved: usize) -> Result<Option<Tensor>> {
        if !cx.needs(self.input + 1) {
            return Ok(None);
        }
        let (_, n, k) = self.mnk();
        let samples = self.input_shape.first().copied().unwrap_or(1);
        let x = cx.saved(saved)?;
        cx.write_grad(self.input + 1, grad.dtype(), self.weight_shape, self.tokens, |room| {
            let (dy, x) = (room.rows(grad, samples)?, room.rows(&x, samples)?);
            let terms = Terms { blocks: room.blocks, ..Terms::WHOLE };
            let rows = x.count() / k.max(1);
            let spec = Gemm::linear_weight_grad(rows, n, k).accumulating(room.accumulate).over(terms).exact(self.exact);
            grad.device().matmul()?.gemm(spec, &dy, &x, room.buffer, room.start)
        })
    }

    /// The gradient of the input, if it is needed, from that of the product and the weight; and of `other`, a product
    /// with the same input.
    fn input_grad(
        &self,
        cx: &mut Backward<'_>,
        grad: &Tensor,
        w: &Tensor,
        other: Option<(Tensor, Tensor, Terms)>,
    ) -> Result<Option<Tensor>> {
        if !cx.needs(self.input) {
            return Ok(None);
        }
        let ((m, n, k), matmul) = (self.mnk(), grad.device().matmul()?);
        let spec = Gemm::linear_input_grad(m, n, k).over(self.terms[1]).exact(self.exact);
        // Added to the gradients of other uses of the input where they lie, with the bits of a sum of its own.
        let few = n <= FEW_TERMS && self.terms[1] == Terms::WHOLE && other.is_none() && !cx.is_compared();
        if let Some(sum) = if few { cx.take_sum(self.input) } else { None } {
            let mut buffer = sum.into_buffer();
            matmul.gemm(spec.accumulating(true), grad.buffer(), w.buffer(), &mut buffer, 0)?;
            return Ok(Some(Tensor::from_buffer(grad.device(), buffer, self.input_shape)?));
        }
        cx.write_grad(self.input, grad.dtype(), self.input_shape, self.tokens, |room| {
            let Some((next_grad, next_w, terms)) = &other else {
                return matmul.gemm(spec, grad.buffer(), w.buffer(), room.buffer, room.start);
            };
            let specs = [spec, Gemm::linear_input_grad(m, next_w.count() / k.max(1), k).over(*terms)];
            let (a, b) = ([grad.buffer(), next_grad.buffer()], [w.buffer(), next_w.buffer()]);
            matmul.gemm_sum(specs, a, b, room.buffer, room.start)
        })
    }
}

impl Linear {
    fn new(x: &Var, weight: &Var, contract: usize, then: Then) -> Self {
        Self { product: Product::new(0, x, weight, contract), plus: None, then, joined: Joined::Alone }
    }

    /// The gradient of the input from that of the product and, if two products share the input, from that of the other
    /// product.
    fn input_grad(&self, cx: &mut Backward<'_>, grad: &Tensor) -> Result<Option<Tensor>> {
        let w = cx.saved(1)?;
        let mut other = None;
        match &self.joined {
            Joined::Alone => {}
            // The product before it on the tape comes after it in backward, and adds this part if a gradient flows to
            // it.
            Joined::WithPrevious(waiting) => {
                if cx.needs(0) && cx.flows_before() {
                    waiting.replace(Some((grad.clone(), w, self.product.terms[1])));
                    cx.leave_to_later(0);
                    return Ok(None);
                }
            }
            Joined::WithNext(waiting) => other = waiting.take(),
        }
        self.product.input_grad(cx, grad, &w, other)
    }

    /// From the gradient of the result: (the gradient of the product, the gradient of the bias if it is needed).
    fn product_grad(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<(Tensor, Option<Tensor>)> {
        match &self.then {
            Then::Nothing => Ok((grad, None)),
            &Then::Bias(shape) => {
                let db = bias_grad(cx, 2, &grad, shape, self.product.tokens)?;
                Ok((grad, db))
            }
            // With deferred weight gradients this is computed twice: keeping it from one call to the other would hold
            // as much memory as the product.
            &Then::Gelu(bias) => {
                let (product, device) = (cx.saved(2)?, grad.device().clone());
                let b = or_zeros(bias.map(|_| cx.saved(3)).transpose()?, &product, self.product.out())?;
                let wanted = bias.filter(|_| cx.needs(2));
                let blocks = wanted.map_or(RowBlocks::WHOLE, |_| cx.row_blocks(2, self.product.tokens));
                let (grad_shape, mut grad) = (grad.shape(), grad.into_owned_buffer()?);
                let db = device.pointwise()?.bias_gelu_grad(&mut grad, product.buffer(), b.buffer(), blocks)?;
                let db = match wanted {
                    Some(shape) => cx.sum_blocks(2, db, shape, self.product.tokens, blocks)?,
                    None => None,
                };
                Ok((Tensor::from_buffer(&device, grad, grad_shape)?, db))
            }
            Then::Swiglu(turned) if turned.get() => Ok((cx.saved(2)?, None)),
            // Overwrites the product, which is twice as large as the incoming gradient.
            Then::Swiglu(turned) => {
                let product = cx.take_saved(2)?;
                let grad = swiglu::gradient(&grad, product)?;
                turned.set(cx.replace_saved(2, grad.clone()));
                Ok((grad, None))
            }
        }
    }
}

impl Var {
    /// `x · wᵀ`, summed over the last `contract` dims of both; `contract = 1` is `torch.nn.functional.linear`. A fused
    /// qkv is `x[b, s, h].linear(w[3, heads, d, h], 1)`, and the projection back is
    /// `y[b, s, heads, d].linear(w[h, heads, d], 2)`. Summing over a dim that both shard gives `Partial`.
    pub fn linear(&self, weight: &Var, contract: usize) -> Result<Var> {
        self.tape().apply(Linear::new(self, weight, contract, Then::Nothing), &[self, weight])
    }

    /// [`linear`](Self::linear) in the type of its operands, also on a device that computes products of rounded ones:
    /// for a router, whose decision a rounded operand would change. x is not stored as a matmul operand.
    pub fn exact_linear(&self, weight: &Var, contract: usize) -> Result<Var> {
        let mut op = Linear::new(self, weight, contract, Then::Nothing);
        op.product.exact = true;
        self.tape().apply(op, &[self, weight])
    }

    /// `x · wᵀ + b`: [`linear`](Self::linear), then [`bias`](Self::bias) with the dims of `w` that are not summed over.
    /// A bias added to a `Partial` product would be counted once per rank: refused.
    pub fn linear_bias(&self, weight: &Var, bias: &Var, contract: usize) -> Result<Var> {
        self.tape().apply(Linear::new(self, weight, contract, Then::Bias(bias.shape())), &[self, weight, bias])
    }

    /// `x · wᵀ + u · vᵀ`, or `(x · wᵀ + b) + u · vᵀ`, where the second product is summed over the last dim of `u`
    /// `[lead.., terms]` and `v` `[N.., terms]`: a weight and the adapter beside it. The second is added in the memory
    /// of the first, with the bits of the separate operations if it has at most [`FEW_TERMS`].
    pub fn linear_plus(&self, weight: &Var, bias: Option<&Var>, contract: usize, [u, v]: [&Var; 2]) -> Result<Var> {
        let then = bias.map_or(Then::Nothing, |bias| Then::Bias(bias.shape()));
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).chain([u, v]).collect();
        let plus = Some(Product::new(inputs.len() - 2, u, v, 1));
        self.tape().apply(Linear { plus, ..Linear::new(self, weight, contract, then) }, &inputs)
    }

    /// Two products of the same x, each with an optional bias: the results of [`linear`](Self::linear) and
    /// [`linear_bias`](Self::linear_bias). The gradient of x is computed for both at once, as if they were one product
    /// with the features of both. In canonical numerics each block has a slice of either.
    pub fn linear_pair(&self, weights: [(&Var, Option<&Var>); 2], contract: usize) -> Result<[Var; 2]> {
        let waiting = Waiting::default();
        let [first, second] = [Joined::WithNext(Rc::clone(&waiting)), Joined::WithPrevious(waiting)];
        let apply = |(weight, bias): (&Var, Option<&Var>), joined: Joined| {
            let then = bias.map_or(Then::Nothing, |bias| Then::Bias(bias.shape()));
            let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
            self.tape().apply(Linear { joined, ..Linear::new(self, weight, contract, then) }, &inputs)
        };
        Ok([apply(weights[0], first)?, apply(weights[1], second)?])
    }

    /// `gelu(x · wᵀ + b)`, tanh form: [`linear_bias`](Self::linear_bias), then [`gelu`](Self::gelu), as a
    /// [matmul operand](crate::Device::operand_dtype): nothing but matrix products and collectives can read it. Without
    /// a bias, as with one of zeros.
    pub fn linear_gelu<'a>(&self, weight: &Var, bias: impl Into<Option<&'a Var>>, contract: usize) -> Result<Var> {
        let bias = bias.into();
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
        self.tape().apply(Linear::new(self, weight, contract, Then::Gelu(bias.map(Var::shape))), &inputs)
    }

    /// The [SwiGLU](Self::swiglu) of `x · wᵀ`, for `w` `[.., features, 2, K..]`: the pair (gate, up) of a feature is
    /// contiguous. The result is a [matmul operand](crate::Device::operand_dtype): nothing but matrix products and
    /// collectives can read it.
    pub fn linear_swiglu(&self, weight: &Var, contract: usize) -> Result<Var> {
        self.tape().apply(Linear::new(self, weight, contract, Then::Swiglu(Cell::new(false))), &[self, weight])
    }
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        match self.then {
            Then::Nothing if self.plus.is_some() => "linear_plus",
            Then::Bias(_) if self.plus.is_some() => "linear_bias_plus",
            Then::Nothing => "linear",
            Then::Bias(_) => "linear_bias",
            Then::Gelu(Some(_)) => "linear_bias_gelu",
            Then::Gelu(None) => "linear_gelu",
            Then::Swiglu(_) => "linear_swiglu",
        }
    }

    fn operands(&self) -> &'static [&'static str] {
        match self.then {
            Then::Nothing if self.plus.is_some() => &["x", "weight", "u", "v"],
            Then::Bias(_) if self.plus.is_some() => &["x", "weight", "bias", "u", "v"],
            Then::Nothing | Then::Gelu(None) | Then::Swiglu(_) => &["x", "weight"],
            Then::Bias(_) | Then::Gelu(Some(_)) => &["x", "weight", "bias"],
        }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (x, weight) = (operands[0], operands[1]);
        let contract = self.product.contract;
        let mut product = rules::contract(self.name(), x, weight, contract)?;
        let ndim = x.ndim + weight.ndim - 2 * contract;
        if let Some(Product { input, .. }) = self.plus {
            let of_u = rules::contract(self.name(), operands[input], operands[input + 1], 1)?;
            let added = Operand::value("u · vᵀ", of_u, operands[input].ndim + operands[input + 1].ndim - 2);
            product = rules::add(self.name(), Operand::value("x · weightᵀ", product, ndim), added)?;
        }
        let sum = |bias| rules::add(self.name(), Operand::value("x · weightᵀ", product, ndim), bias);
        match self.then {
            Then::Nothing => Ok(product),
            Then::Bias(_) => sum(operands[2]),
            Then::Gelu(None) => rules::pointwise(self.name(), Operand::value("x · weightᵀ", product, ndim)),
            Then::Gelu(Some(_)) => {
                rules::pointwise(self.name(), Operand::value("x · weightᵀ + bias", sum(operands[2])?, ndim))
            }
            Then::Swiglu(_) => swiglu::infer(self.name(), Operand::value("x · weightᵀ", product, ndim)),
        }
    }

    fn padded(&self) -> Padded {
        Padded::Zeros
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, w) = (inputs[0], inputs[1]);
        let (xs, ws) = (x.shape(), w.shape());
        let contract = self.product.contract;
        cx.require(
            xs.len() >= contract && ws.len() >= contract && xs[xs.len() - contract..] == ws[ws.len() - contract..],
            format_args!("the last {contract} dims of x and weight are summed over and must be equal"),
        )?;
        let (lead, out) = (&xs[..xs.len() - contract], &ws[..ws.len() - contract]);
        cx.require(lead.len() + out.len() <= MAX_DIMS, format_args!("the result has at most {MAX_DIMS} dims"))?;
        if let Then::Bias(bias) | Then::Gelu(Some(bias)) = &self.then {
            cx.require(bias[..] == *out, "bias has the dims of weight that are not summed over")?;
        }
        if let Some(Product { input_shape: us, weight_shape: vs, terms: [of_sum, _], .. }) = &self.plus {
            let fits = |of: &[usize], dims: &[usize]| of.split_last().is_some_and(|(_, leading)| leading == dims);
            cx.require(
                fits(us, lead) && fits(vs, out) && us.last() == vs.last(),
                "u has the leading dims of x, v those of weight, and the last dim of both is summed over",
            )?;
            cx.require(*of_sum == Terms::WHOLE, "no axis cuts the last dim of u and v")?;
        }
        let (device, shape) = (x.device(), Shape::new(&[lead, out].concat()));
        let gated = swiglu::gated(&shape).filter(|_| !out.is_empty());
        if let Then::Swiglu(_) = self.then {
            cx.require(gated.is_some(), "weight is [.., features, 2, ..], pairs of gate and up")?;
        }
        cx.save_input_for(0, 1)?;
        cx.save_input(1)?;
        let (m, n, k) = self.product.mnk();
        let matmul = device.matmul()?;
        let mut y = match self.then {
            Then::Nothing => {
                let w = &cx.share(w)?;
                // An exact product is in the type of x, whatever its weights are stored in.
                let dtype = if self.product.exact { x.dtype() } else { cx.product_dtype(w) };
                let mut y = device.alloc(dtype, m * n)?;
                matmul.gemm(self.product.spec(), x.buffer(), w.buffer(), &mut y, 0)?;
                y
            }
            Then::Bias(_) => matmul.linear_bias([m, n, k], x.buffer(), w.buffer(), inputs[2].buffer())?,
            Then::Gelu(bias) => {
                let out = self.product.out();
                let dtype = cx.product_dtype(w);
                let b = bias.map_or_else(|| Tensor::zeros(device, dtype, out), |_| Ok(inputs[2].clone()))?;
                let stored = device.operand_dtype(dtype);
                let (product, y) = matmul.linear_bias_gelu([m, n, k], x.buffer(), w.buffer(), b.buffer(), stored)?;
                cx.save(&Tensor::from_buffer(device, product, shape)?)?;
                if bias.is_some() {
                    cx.save_input(2)?;
                }
                cx.recipe(move |saved| {
                    let product = saved[2].restore()?;
                    let b = or_zeros(saved.get(3).map(|b| b.restore()).transpose()?, &product, out)?;
                    let y = product.device().pointwise()?.bias_gelu(product.buffer(), b.buffer(), stored)?;
                    Tensor::from_buffer(product.device(), y, product.shape())
                });
                y
            }
            Then::Swiglu(_) => {
                let stored = device.operand_dtype(cx.product_dtype(w));
                let (product, y) = matmul.linear_swiglu([m, n, k], x.buffer(), w.buffer(), stored)?;
                cx.save(&Tensor::from_buffer(device, product, shape)?)?;
                let gated = gated.unwrap_or_default();
                cx.recipe(move |saved| {
                    let product = saved[2].restore()?;
                    let y = product.device().pointwise()?.swiglu(product.buffer(), stored)?;
                    Tensor::from_buffer(product.device(), y, gated)
                });
                return Tensor::from_buffer(device, y, gated);
            }
        };
        if let Some(plus) = &self.plus {
            cx.save_input_for(plus.input, plus.input + 1)?;
            cx.save_input(plus.input + 1)?;
            let (u, v) = (inputs[plus.input], cx.share(inputs[plus.input + 1])?);
            matmul.gemm(plus.spec().accumulating(true), u.buffer(), v.buffer(), &mut y, 0)?;
        }
        Tensor::from_buffer(device, y, shape)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (grad, db) = self.product_grad(cx, grad)?;
        // The weight gradient comes first, so that a recomputed x is freed before the memory of dx is allocated.
        let dw = self.product.weight_grad(cx, &grad, 0)?;
        let plus = match &self.plus {
            None => None,
            Some(plus) => {
                let (dv, v) = (plus.weight_grad(cx, &grad, 2)?, cx.saved(3)?);
                Some([plus.input_grad(cx, &grad, &v, None)?, dv])
            }
        };
        let dx = self.input_grad(cx, &grad)?;
        let db = matches!(self.then, Then::Bias(_) | Then::Gelu(Some(_))).then_some(db);
        Ok([dx, dw].into_iter().chain(db).chain(plus.into_iter().flatten()).collect())
    }
}
