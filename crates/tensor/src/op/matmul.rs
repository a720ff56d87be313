//! Products of two activations, `[.., m, k] · [.., k, n]`: the scores of an attention, a bilinear form.
//!
//! The leading dims number the matrices, and both operands have them. Either operand of a product may be stored
//! transposed, but not both; with `z` as the product the three forms have each other as gradients:
//!
//! | product | gradient of x | gradient of y |
//! |---|---|---|
//! | `z = x · y` | `dz · yᵀ` | `xᵀ · dz` |
//! | `z = x · yᵀ` | `dz · y` | `dzᵀ · x` |
//! | `z = xᵀ · y` | `y · dzᵀ` | `x · dz` |
//!
//! They are products of groups of rows (`Grouped`), all groups with as many rows. In canonical numerics each of the
//! three sums has reduction blocks, whether this mesh cuts the dim or not.

use super::prelude::*;
use crate::kernel::{GroupedGemm, GroupedGrad};
use crate::tape::Terms;
use meshwork_core::DType;

/// The operand that is stored transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// `x · y`: neither.
    Nn,
    /// `x · yᵀ`.
    Nt,
    /// `xᵀ · y`.
    Tn,
}

#[derive(Debug)]
struct Matmul {
    form: Form,
    /// Extents of the operands on this rank.
    shapes: [Shape; 2],
    /// Reduction blocks on this rank of the sums over k, of the gradient of x over n, and of that of y over m.
    blocks: [usize; 3],
}

impl Var {
    /// `x · y` of matrices `[.., m, k]` and `[.., k, n]`, one for each index of the leading dims, which both have:
    /// PyTorch's `bmm`, with any number of leading dims. The leading dims may be cut alike; a dim k that both cut gives
    /// `Partial`. With a weight, use [`linear`](Self::linear).
    ///
    /// ```
    /// # use meshwork_core::{Mesh, Rank, Ty, Types};
    /// # use meshwork_cpu::Cpu;
    /// # use meshwork_tensor::{Declarations, Error, Params, Tape, Tensor, tape::{Mode, Position}};
    /// # let rank = std::sync::Arc::new(Rank::recording(&"dp=1".parse::<Mesh>().unwrap(), 0).unwrap());
    /// # let device = Cpu::device();
    /// # let (all, mesh) = (std::sync::Arc::new(Declarations::new()), rank.mesh().clone());
    /// # let params = std::sync::Arc::new(Params::new(all, &mesh, rank.coords(), &device, &[], 7)?);
    /// # let tape = Tape::new(rank, params, device.clone(), Mode::Evaluate, Position::default());
    /// # let types = Types::all(&mesh, Ty::Invariant);
    /// let x = tape.constant(Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0], [1, 2, 2])?, types);
    /// assert_eq!(x.matmul(&x)?.tensor().to_vec::<f32>()?, [7.0, 10.0, 15.0, 22.0]);
    /// assert_eq!(x.matmul_nt(&x)?.tensor().to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]); // x · xᵀ
    /// # Ok::<(), Error>(())
    /// ```
    pub fn matmul(&self, other: &Var) -> Result<Var> {
        self.product(Form::Nn, other)
    }

    /// `x · yᵀ` of `[.., m, k]` and `[.., n, k]`: see [`matmul`](Self::matmul).
    pub fn matmul_nt(&self, other: &Var) -> Result<Var> {
        self.product(Form::Nt, other)
    }

    /// `xᵀ · y` of `[.., k, m]` and `[.., k, n]`: see [`matmul`](Self::matmul).
    pub fn matmul_tn(&self, other: &Var) -> Result<Var> {
        self.product(Form::Tn, other)
    }

    fn product(&self, form: Form, y: &Var) -> Result<Var> {
        let mut op = Matmul { form, shapes: [self.shape(), y.shape()], blocks: [1; 3] };
        if let (Some(blocks), true) = (self.tape().reduction_blocks(), op.fits()) {
            let ([m, k], [_, n]) = op.dims();
            op.blocks = [
                self.blocks_of(op.name(), k, blocks)?,
                y.blocks_of(op.name(), n, blocks)?,
                self.blocks_of(op.name(), m, blocks)?,
            ];
        }
        self.tape().apply(op, &[self, y])
    }
}

impl Matmul {
    /// The dims m and k of x, and k and n of y.
    fn dims(&self) -> ([usize; 2], [usize; 2]) {
        let (row, column) = (self.shapes[0].len().saturating_sub(2), self.shapes[0].len().saturating_sub(1));
        match self.form {
            Form::Nn => ([row, column], [row, column]),
            Form::Nt => ([row, column], [column, row]),
            Form::Tn => ([column, row], [row, column]),
        }
    }

    fn fits(&self) -> bool {
        let [x, y] = self.shapes;
        let ([_, k], [of_y, _]) = self.dims();
        x.len() >= 2 && x.len() == y.len() && x[..x.len() - 2] == y[..x.len() - 2] && x[k] == y[of_y]
    }
}

/// One product for each index of the leading dims, in the type `dtype`.
fn product(form: Form, [x, y]: [&Tensor; 2], blocks: usize, dtype: DType) -> Result<Tensor> {
    let (device, [xs, ys]) = (x.device(), [x.shape(), y.shape()]);
    let lead = xs.len() - 2;
    let batch = xs[..lead].iter().product();
    let ([rows, columns], [first, last]) = ([xs[lead], xs[lead + 1]], [ys[lead], ys[lead + 1]]);
    let (groups, terms) = (vec![rows; batch], Terms { segments: 1, blocks });
    let kernels = device.grouped_matmul()?;
    let shape = |extents: [usize; 2]| Shape::new(&[&xs[..lead], &extents].concat());
    match form {
        Form::Nt => {
            let spec = GroupedGemm { rows: &groups, n: first, k: last, terms };
            let z = kernels.grouped_linear(spec, x.buffer(), y.buffer())?;
            Tensor::from_buffer(device, z, shape([rows, first]))?.cast(dtype)
        }
        Form::Nn => {
            let spec = GroupedGemm { rows: &groups, n: first, k: last, terms };
            let z = kernels.grouped_input_grad(spec, x.buffer(), y.buffer())?;
            Tensor::from_buffer(device, z, shape([rows, last]))?.cast(dtype)
        }
        Form::Tn => {
            let spec = GroupedGemm { rows: &groups, n: columns, k: last, terms: Terms::WHOLE };
            let of = |group: usize| {
                let place = move |block: usize| group * rows + rows * block / blocks;
                (0..blocks).map(move |block| place(block)..place(block + 1)).collect()
            };
            let rows: Vec<_> = (0..batch).map(of).collect();
            let mut z = device.alloc(dtype, batch * columns * last)?;
            let into = GroupedGrad { buffer: &mut z, start: 0, accumulate: false };
            kernels.grouped_weight_grad(spec, &rows, x.buffer(), y.buffer(), into)?;
            Tensor::from_buffer(device, z, shape([columns, last]))
        }
    }
}

impl Op for Matmul {
    fn name(&self) -> &'static str {
        match self.form {
            Form::Nn => "matmul",
            Form::Nt => "matmul_nt",
            Form::Tn => "matmul_tn",
        }
    }

    stated! { x, y; padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (of_x, of_y) = self.dims();
        rules::matrices(self.name(), operands[0], operands[1], of_x, of_y)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, y) = match self.form {
            Form::Nn => ("[.., m, k]", "[.., k, n]"),
            Form::Nt => ("[.., m, k]", "[.., n, k]"),
            Form::Tn => ("[.., k, m]", "[.., k, n]"),
        };
        cx.require(self.fits(), format_args!("x is {x} and y {y}, with the same k and the same leading dims"))?;
        cx.save_input_for(0, 1)?;
        cx.save_input_for(1, 0)?;
        let y = &cx.share(inputs[1])?;
        product(self.form, [inputs[0], y], self.blocks[0], y.dtype())
    }

    fn backward(&self, cx: &mut Backward<'_>, dz: Tensor) -> Result<Vec<Option<Tensor>>> {
        let dz = &cx.share(dz)?;
        let dtype = dz.dtype();
        let dx = match cx.needs(0) {
            true => {
                let (y, blocks) = (&cx.saved(1)?, self.blocks[1]);
                Some(match self.form {
                    Form::Nn => product(Form::Nt, [dz, y], blocks, dtype)?,
                    Form::Nt => product(Form::Nn, [dz, y], blocks, dtype)?,
                    Form::Tn => product(Form::Nt, [y, dz], blocks, dtype)?,
                })
            }
            false => None,
        };
        let dy = match cx.needs(1) {
            true => {
                let (x, blocks) = (&cx.saved(0)?, self.blocks[2]);
                Some(match self.form {
                    Form::Nn => product(Form::Tn, [x, dz], blocks, dtype)?,
                    Form::Nt => product(Form::Tn, [dz, x], blocks, dtype)?,
                    Form::Tn => product(Form::Nn, [x, dz], blocks, dtype)?,
                })
            }
            false => None,
        };
        Ok(vec![dx, dy])
    }
}
