//! The largest element along a dim, and elements chosen along a dim by indices.

use super::prelude::*;
use crate::kernel::Picks;

/// The largest elements along a dim, which is removed.
#[derive(Debug)]
struct Max {
    dim: usize,
    shape: Shape,
}

/// Where they are.
#[derive(Debug)]
struct Argmax {
    dim: usize,
}

/// Elements along a dim by indices.
#[derive(Debug)]
struct Pick {
    dim: usize,
    shape: Shape,
    index_shape: Shape,
    each: bool,
}

impl Var {
    /// The largest element along `dim`, which is removed and must be whole on this rank. The gradient goes to that
    /// element: the first of equal ones, and the first NaN if there is one. Refuses `Partial`.
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
    /// let x = tape.constant(Tensor::from_slice(&device, &[1.0_f32, 5.0, 5.0, 4.0, 2.0, 0.0], [2, 3])?, types);
    /// assert_eq!(x.max(1)?.tensor().to_vec::<f32>()?, [5.0, 4.0]);
    /// assert_eq!(x.argmax(1)?.tensor().to_vec::<i32>()?, [1, 0]);
    /// let order = tape.constant(Tensor::from_slice(&device, &[2, 0], [2])?, types);
    /// assert_eq!(x.index_select(1, &order)?.tensor().to_vec::<f32>()?, [5.0, 1.0, 0.0, 4.0]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn max(&self, dim: usize) -> Result<Var> {
        self.tape().apply(Max { dim, shape: self.shape() }, &[self])
    }

    /// The index, in i32, of the [`max`](Self::max) along `dim`, without a gradient.
    pub fn argmax(&self, dim: usize) -> Result<Var> {
        self.tape().apply(Argmax { dim }, &[&self.detach()])
    }

    /// The elements of `dim`, which must be whole on this rank, at the indices in the vector `index`, i32 and the same
    /// on every rank: PyTorch's `index_select`. The gradient of an element is the sum of its uses in the order of
    /// `index`. For rows of a weight, use [`embedding`](Self::embedding).
    ///
    /// # Errors
    /// An index outside of the dim.
    pub fn index_select(&self, dim: usize, index: &Var) -> Result<Var> {
        self.picked(dim, index, false)
    }

    /// `out[.., j, ..] = x[.., index[.., j, ..], ..]` along `dim`, which must be whole on this rank: PyTorch's
    /// `take_along_dim`. `index`, i32, has the other dims of x, cut as those of x are. The gradient is that of
    /// [`index_select`](Self::index_select).
    ///
    /// # Errors
    /// An index outside of the dim.
    pub fn take_along_dim(&self, dim: usize, index: &Var) -> Result<Var> {
        self.picked(dim, index, true)
    }

    fn picked(&self, dim: usize, index: &Var, each: bool) -> Result<Var> {
        let op = Pick { dim, shape: self.shape(), index_shape: index.shape(), each };
        self.tape().apply(op, &[self, index])
    }
}

/// The types of a result without `dim`, of x that is whole along it.
fn without(op: &str, x: Operand<'_>, dim: usize) -> std::result::Result<Types, SpmdError> {
    let types = rules::along_dim(op, x, dim, &[])?;
    rules::sum_over(op, Operand::value(x.name, types, x.ndim), dim)
}

fn require_dim(cx: &Forward<'_>, dim: usize, x: &Tensor) -> Result<()> {
    let ndim = x.shape().len();
    cx.require(dim < ndim, format_args!("x has no dim {dim}: its dims are 0..{ndim}"))
}

/// Where the largest elements along a dim are.
fn argmax(cx: &Forward<'_>, dim: usize, x: &Tensor) -> Result<Tensor> {
    require_dim(cx, dim, x)?;
    cx.require(x.shape()[dim] > 0, format_args!("dim {dim} has no elements, and so no largest one"))?;
    let index = x.device().indexing()?.argmax(x.buffer(), x.shape().around(dim).into())?;
    Tensor::from_buffer(x.device(), index, removed(&x.shape(), dim))
}

/// The shape without a dim.
fn removed(shape: &Shape, dim: usize) -> Shape {
    Shape::new(&[&shape[..dim], &shape[dim + 1..]].concat())
}

/// One element along a dim of each of these extents.
fn one_of_each(shape: &Shape, dim: usize) -> Picks {
    let (outer, extent, inner) = shape.around(dim);
    Picks { outer, extent, inner, count: 1, each: true }
}

impl Op for Max {
    stated! { "max": x; only_moves, reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        without(self.name(), operands[0], self.dim)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, index) = (inputs[0], argmax(cx, self.dim, inputs[0])?);
        cx.save_exact(&index)?;
        let y = x.device().indexing()?.pick(x.buffer(), index.buffer(), one_of_each(&self.shape, self.dim))?;
        Tensor::from_buffer(x.device(), y, index.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (index, picks) = (cx.saved(0)?, one_of_each(&self.shape, self.dim));
        let dx = grad.device().indexing()?.pick_grad(grad.buffer(), index.buffer(), picks)?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, self.shape)?)])
    }
}

impl Op for Argmax {
    stated! { "argmax": x; reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        without(self.name(), operands[0], self.dim)
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        argmax(cx, self.dim, inputs[0])
    }

    fn backward(&self, _cx: &mut Backward<'_>, _grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![None]) // of a constant
    }
}

impl Pick {
    fn picks(&self) -> Picks {
        let (outer, extent, inner) = self.shape.around(self.dim);
        let count = if self.each { self.index_shape[self.dim] } else { self.index_shape.count() };
        Picks { outer, extent, inner, count, each: self.each }
    }
}

impl Op for Pick {
    fn name(&self) -> &'static str {
        if self.each { "take_along_dim" } else { "index_select" } // as `Picks::op`
    }

    stated! { x, index; reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (x, index) = (operands[0], operands[1]);
        if self.each {
            rules::along_dim(self.name(), x, self.dim, &[])?;
            return rules::elementwise(self.name(), operands);
        }
        // The index is whole wherever x is used, as the weight of a norm is.
        rules::along_dim(self.name(), x, self.dim, &[index])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, index) = (inputs[0], inputs[1]);
        require_dim(cx, self.dim, x)?;
        if self.each {
            let fits = index.shape().len() == x.shape().len()
                && removed(&x.shape(), self.dim) == removed(&index.shape(), self.dim);
            cx.require(fits, format_args!("index has the dims of x, but for dim {}", self.dim))?;
        } else {
            cx.require(index.shape().len() == 1, "index is a vector")?;
        }
        cx.save_exact(index)?;
        let (picks, shape) = (self.picks(), x.shape().with(self.dim, self.picks().count));
        Tensor::from_buffer(x.device(), x.device().indexing()?.pick(x.buffer(), index.buffer(), picks)?, shape)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let index = cx.saved(0)?;
        let dx = grad.device().indexing()?.pick_grad(grad.buffer(), index.buffer(), self.picks())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, self.shape)?), None])
    }
}
