//! `y[n, i, j, o] = Σ_{k, l, c} x[n, i·stride + k - padding, j·stride + l - padding, c] · w[o, k, l, c] (+ b[o])`: the
//! two-dimensional convolution of images `[samples, height, width, channels]` (in fact a correlation, as in all
//! frameworks), zero beyond the edges.
//!
//! It is one product of the images' patches with the weight (Chellapilla, Puri and Simard, 2006), so each element has
//! the bits that products guarantee for a sum of this length, whatever the number of images. The patches are recomputed
//! for the weight gradient: if they were kept, they would take as many times the memory of the image as a window has
//! pixels.

use super::bias::bias_grad;
use super::images::whole_images;
use super::pool::{require_images, require_windows};
use super::prelude::*;
use crate::kernel::{Gemm, Windows};
use crate::tape::Terms;
use meshwork_core::Buffer;

#[derive(Debug)]
struct Conv2d {
    stride: usize,
    padding: usize,
    input_shape: Shape,
    weight_shape: Shape,
    bias: Option<Shape>,
    tokens: Tokens,
}

impl Var {
    /// Images `[n, h, w, c] → [n, h', w', o]` for a weight `[o, kh, kw, c]` and a bias `[o]`, with
    /// `h' = ⌊(h + 2·padding - kh) / stride⌋ + 1` and w' alike. Weights are whole on every rank, and so is an image.
    pub fn conv2d(&self, weight: &Var, bias: Option<&Var>, stride: usize, padding: usize) -> Result<Var> {
        let (input_shape, weight_shape) = (self.shape(), weight.shape());
        let (bias_shape, tokens) = (bias.map(Var::shape), Tokens::new(self, 1));
        let op = Conv2d { stride, padding, input_shape, weight_shape, bias: bias_shape, tokens };
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
        self.tape().apply(op, &inputs)
    }
}

impl Conv2d {
    fn windows(&self) -> Windows {
        let [samples, height, width, channels] = std::array::from_fn(|dim| self.input_shape[dim]);
        let kernel = [self.weight_shape[1], self.weight_shape[2]];
        Windows { samples, image: [height, width], channels, kernel, stride: self.stride, padding: self.padding }
    }

    /// The product of patches and weight: rows, features, terms.
    fn mnk(&self) -> [usize; 3] {
        [self.windows().rows(), self.weight_shape[0], self.windows().patch()]
    }

    /// The patches of x, which may be x itself.
    fn patches(&self, x: &Tensor) -> Result<Buffer> {
        match self.windows().are_pixels() {
            true => Ok(x.buffer().clone()),
            false => x.device().window()?.patches(self.windows(), x.buffer()),
        }
    }
}

impl Op for Conv2d {
    fn name(&self) -> &'static str {
        if self.bias.is_some() { "conv2d_bias" } else { "conv2d" }
    }

    fn operands(&self) -> &'static [&'static str] {
        if self.bias.is_some() { &["x", "weight", "bias"] } else { &["x", "weight"] }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        whole_images(self.name(), operands[0], &operands[1..])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, w) = (inputs[0], inputs[1]);
        require_images(cx, x)?;
        cx.require(
            w.shape().len() == 4 && w.shape()[3] == x.shape()[3],
            "weight must be [features, kernel height, kernel width, channels of x]",
        )?;
        let bias = self.bias.unwrap_or(Shape::new(&[w.shape()[0]]));
        cx.require(bias[..] == w.shape()[..1], "bias has a number per feature of weight")?;
        let windows = self.windows();
        require_windows(cx, windows)?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        let ([m, n, k], device) = (self.mnk(), x.device());
        let patches = self.patches(x)?;
        let y = match inputs.get(2) {
            Some(b) => device.matmul()?.linear_bias([m, n, k], &patches, w.buffer(), b.buffer())?,
            None => {
                let mut y = device.alloc(x.dtype(), m * n)?;
                device.matmul()?.gemm(Gemm::linear(m, n, k), &patches, w.buffer(), &mut y, 0)?;
                y
            }
        };
        let [height, width] = windows.count();
        Tensor::from_buffer(device, y, [windows.samples, height, width, n])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let ([m, n, k], windows, device) = (self.mnk(), self.windows(), grad.device());
        let db = self.bias.map(|shape| bias_grad(cx, 2, &grad, shape, self.tokens)).transpose()?;
        let mut dw = None;
        if cx.needs(1) {
            let (patches, rows) = (self.patches(&cx.saved(0)?)?, m / windows.samples);
            dw = cx.write_grad(1, grad.dtype(), self.weight_shape, windows.samples, |room| {
                let (from, to) = (room.samples.start * rows, room.samples.end * rows);
                let terms = Terms { blocks: room.blocks, ..Terms::WHOLE };
                let spec = Gemm::linear_weight_grad(to - from, n, k).accumulating(room.accumulate).over(terms);
                let (dy, patches) = (grad.buffer().slice(from * n..to * n)?, patches.slice(from * k..to * k)?);
                device.matmul()?.gemm(spec, &dy, &patches, room.buffer, room.start)
            })?;
        }
        let mut dx = None;
        if cx.needs(0) {
            let w = cx.saved(1)?;
            let mut dpatches = device.alloc(grad.dtype(), m * k)?;
            device.matmul()?.gemm(Gemm::linear_input_grad(m, n, k), grad.buffer(), w.buffer(), &mut dpatches, 0)?;
            let images = match windows.are_pixels() {
                true => dpatches,
                false => device.window()?.patches_grad(windows, &dpatches)?,
            };
            dx = Some(Tensor::from_buffer(device, images, self.input_shape)?);
        }
        Ok([dx, dw].into_iter().chain(db).collect())
    }
}
