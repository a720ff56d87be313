//! `x + y`, `x - y`, `x · y`, `x / y` and choices between elements, element by element, with broadcasting: `y` may have
//! fewer dims than `x`, or dims of extent 1, and is then repeated over those of `x`.
//!
//! The gradient of `y` is summed over the dims of its repetition, from the last to the first; the sum over the leading
//! ones is that of a [bias](Var::bias). In canonical numerics each sum over an inner dim has reduction blocks, whether
//! this mesh cuts the dim or not.

use super::bias::bias_grad;
use super::prelude::*;
use super::sum::tree_sum;
use super::whole::{require_whole, require_whole_but, require_whole_values};
use crate::kernel::{Map, Zip};
use std::ops::Range;

#[derive(Debug)]
struct Zipped {
    f: Zip,
    broadcast: Broadcast,
}

/// How y is broadcast over x.
#[derive(Clone, Debug)]
struct Broadcast {
    /// Extents of x on this rank.
    x: Shape,
    /// Those of y, without the leading dims over which it is repeated.
    y: Shape,
    /// Extents of y as it is.
    y_shape: Shape,
    /// Dims of x over which y is repeated, behind the leading ones: each with the reduction blocks of it on this rank.
    inner: Vec<(usize, usize)>,
    tokens: Tokens,
}

impl Broadcast {
    /// Dims of x over which y is repeated at its front.
    fn leading(&self) -> usize {
        self.x.len().saturating_sub(self.y.len())
    }

    /// The dims of x over which y is repeated, in order.
    fn repeated(&self) -> impl Iterator<Item = usize> {
        (0..self.leading()).chain(self.inner.iter().map(|(dim, _)| *dim))
    }

    /// Whether y is repeated over this dim of x.
    fn repeats(&self, dim: usize) -> bool {
        self.repeated().any(|repeated| repeated == dim)
    }

    /// Refuses an extent of 1 beside another one, in a dim that an axis cuts: it is no single element.
    fn require_whole_ones(&self, op: &str, x: Operand<'_>, y: Operand<'_>) -> std::result::Result<(), SpmdError> {
        let cut_one = |of: Operand<'_>, shape: &Shape, other: &Shape| {
            let ones = shape.iter().rev().zip(other.iter().rev()).enumerate();
            let mut dims =
                ones.filter(|(_, (one, other))| **one == 1 && **other != 1).map(|(back, _)| shape.len() - 1 - back);
            dims.find_map(|dim| Some((of.types.cuts(dim).next()?, of.name.to_owned(), dim)))
        };
        let found = cut_one(y, &self.y_shape, &self.x).or_else(|| cut_one(x, &self.x, &self.y_shape));
        match found {
            Some((axis, name, dim)) if self.repeated().next().is_none() => Err(SpmdError {
                op: op.to_owned(),
                axis,
                problem: format!(
                    "dim {dim} of {name} is sharded, and has one element on this rank: what is repeated must be whole"
                ),
                fix: format!("all_gather {name} along dim {dim} first"),
            }),
            _ => Ok(()),
        }
    }

    /// Runs of neighbouring dims over which y is repeated.
    fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for dim in self.repeated() {
            match runs.last_mut() {
                Some(run) if run.end == dim => run.end += 1,
                _ => runs.push(dim..dim + 1),
            }
        }
        runs
    }

    /// Elements of these dims: of x, or of y where it is not repeated over them yet.
    fn count(&self, dims: Range<usize>, spread: usize) -> usize {
        dims.filter(|&dim| dim >= spread || !self.repeats(dim)).map(|dim| self.x[dim]).product()
    }

    /// `f(x, y)` in the shape of x. Of several runs of repetitions, y is copied along all but the first.
    fn zip(&self, f: Zip, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let (device, all, runs) = (x.device(), self.x.len(), self.runs());
        let mut y = y.buffer().clone();
        for run in runs.iter().skip(1).rev() {
            let extent = self.x[run.clone()].iter().product();
            let shape = [self.count(0..run.start, all), extent, self.count(run.end..all, run.end)];
            y = device.reduction()?.spread(&y, shape, 1.0)?;
        }
        let run = runs.first().cloned().unwrap_or(0..0);
        let [outer, extent, inner] =
            [0..run.start, run.clone(), run.end..all].map(|dims| self.x[dims].iter().product());
        Tensor::from_buffer(device, device.elementwise()?.zip(f, x.buffer(), &y, [outer, extent, inner])?, x.shape())
    }

    /// The gradient of y, which is input 1, from one in the shape of x.
    fn sum(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Option<Tensor>> {
        let grad = if self.inner.is_empty() { grad } else { cx.share(grad)? };
        let device = grad.device().clone();
        let (mut shape, mut sums) = (grad.shape(), grad.buffer().clone());
        for &(dim, blocks) in self.inner.iter().rev() {
            sums = tree_sum(&device, &sums, shape.around(dim), blocks, 1.0)?;
            shape = shape.with(dim, 1);
        }
        let sums = Tensor::from_buffer(&device, sums, shape)?;
        match self.leading() {
            0 => Ok(Some(sums)),
            _ => bias_grad(cx, 1, &sums, self.y_shape, self.tokens),
        }
    }
}

impl Var {
    /// `self + other`, element by element. Dims of extent 1, and leading dims that one of them lacks, are repeated over
    /// those of the other one, as by NumPy and PyTorch. Linear: both may be `Partial`, if neither is repeated.
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
    /// let row = tape.constant(Tensor::from_slice(&device, &[10.0_f32, 20.0], [1, 2, 1])?, types);
    /// assert_eq!(x.add(&row)?.tensor().to_vec::<f32>()?, [11.0, 12.0, 23.0, 24.0]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn add(&self, other: &Var) -> Result<Var> {
        // What lacks dims alone is a bias.
        let has_ones = |of: &Broadcast| !of.inner.is_empty() || of.y != of.y_shape;
        if other.broadcast(self).as_ref().is_some_and(has_ones) {
            return other.zipped(Zip::Add, self);
        }
        let (x, y) = (self.shape(), other.shape());
        let alike = x.ends_with(&y) || y.ends_with(&x);
        match self.broadcast(other) {
            Some(broadcast) if has_ones(&broadcast) => self.zipped(Zip::Add, other),
            None if !alike => self.zipped(Zip::Add, other),
            _ => self.plus(other),
        }
    }

    /// `self - other`, with broadcasting as [`add`](Self::add). Linear: both may be `Partial`.
    pub fn sub(&self, other: &Var) -> Result<Var> {
        self.expanded_over(other)?.zipped(Zip::Sub, other)
    }

    /// `self · other`, element by element, with broadcasting as [`add`](Self::add). Linear in each: one may be
    /// `Partial` where the other is `Replicate`.
    pub fn mul(&self, other: &Var) -> Result<Var> {
        match other.broadcast(self) {
            Some(_) => other.zipped(Zip::Mul, self),
            None => self.zipped(Zip::Mul, other),
        }
    }

    /// `self / other`, element by element, with broadcasting as [`add`](Self::add). Refuses `Partial`.
    pub fn div(&self, other: &Var) -> Result<Var> {
        self.expanded_over(other)?.zipped(Zip::Div, other)
    }

    /// `a` where this mask is not 0, else `b`: PyTorch's `where`, of floats in place of truth values. The mask has no
    /// gradient; where it is 0, no NaN of `a` comes through, nor one of `b` elsewhere. All three are broadcast as by
    /// [`add`](Self::add), but one of them has all dims.
    pub fn select(&self, a: &Var, b: &Var) -> Result<Var> {
        let mask = &self.detach();
        let [a, b] = [a.expanded_over(b)?, b.expanded_over(a)?];
        let [a, b] = [a.expanded_over(mask)?, b.expanded_over(mask)?];
        a.zipped(Zip::Keep, mask)?.add(&b.zipped(Zip::Drop, mask)?)
    }

    /// 1 where `self > other`, else 0: a mask for [`select`](Self::select), without a gradient. Broadcasts as
    /// [`add`](Self::add). Refuses `Partial`.
    pub fn greater(&self, other: &Var) -> Result<Var> {
        self.detach().expanded_over(other)?.zipped(Zip::Greater, &other.detach())
    }

    /// The value repeated to the dims of `other`, of which this rank has its slice: PyTorch's `expand_as`. Refuses
    /// `Partial`.
    pub fn expand_as(&self, other: &Var) -> Result<Var> {
        other.detach().zipped(Zip::Second, self)
    }

    /// The value, repeated to the dims of `other` if it lacks some.
    fn expanded_over(&self, other: &Var) -> Result<Var> {
        match other.broadcast(self) {
            Some(_) => self.expand_as(other),
            None => Ok(self.clone()),
        }
    }

    /// How `other` is repeated over this value; `None` if it is not.
    fn broadcast(&self, other: &Var) -> Option<Broadcast> {
        let (x, y) = (self.shape(), other.shape());
        let lacks = x.len().checked_sub(y.len())?;
        let cut = |value: &Var, dim| value.types().cuts(dim).next().is_some();
        // Extents of 1 are one element only if no axis cuts the dim.
        let repeated = |dim: &usize| {
            let of_y = dim - lacks;
            y[of_y] == 1 && !cut(other, of_y) && (x[*dim] != 1 || cut(self, *dim))
        };
        let fits = |dim: usize| x[dim] == y[dim - lacks] || repeated(&dim);
        if !(lacks..x.len()).all(fits) {
            return None;
        }
        let leading = lacks + (lacks..x.len()).take_while(repeated).count();
        let inner: Vec<_> = (leading..x.len()).filter(repeated).map(|dim| (dim, 1)).collect();
        let own = Shape::new(&y[leading - lacks..]);
        let broadcast = Broadcast { x, y: own, y_shape: y, inner, tokens: Tokens::new(self, own.len()) };
        (leading > 0 || !broadcast.inner.is_empty()).then_some(broadcast)
    }

    fn zipped(&self, f: Zip, y: &Var) -> Result<Var> {
        let found = self.broadcast(y);
        let mut broadcast = found.clone().unwrap_or_else(|| Broadcast {
            x: self.shape(),
            y: self.shape(),
            y_shape: y.shape(),
            inner: Vec::new(),
            tokens: Tokens::new(self, self.shape().len()),
        });
        let name = name(f);
        // A difference rounds, but its gradients do not, unless they are summed over rows.
        match (f, &found) {
            (Zip::Add | Zip::Sub, None) => require_whole_values(name, &[self, y])?,
            _ => {
                require_whole(name, &[self])?;
                // The gradient of y is a share of a tree over the blocks of the only dim that is summed over.
                let in_tree = |axis| match (broadcast.leading(), &broadcast.inner[..]) {
                    (0, [(dim, _)]) => self.types().get(axis) == Some(Ty::Shard(*dim)),
                    _ => false,
                };
                require_whole_but(name, y, in_tree)?;
            }
        }
        if let Some(blocks) = self.tape().reduction_blocks().filter(|_| y.takes_gradient()) {
            for (dim, here) in &mut broadcast.inner {
                *here = self.blocks_of(name, *dim, blocks)?;
            }
        }
        self.tape().apply(Zipped { f, broadcast }, &[self, y])
    }
}

fn name(f: Zip) -> &'static str {
    match f {
        Zip::Add => "add",
        Zip::Sub => "sub",
        Zip::Mul => "mul",
        Zip::Div => "div",
        Zip::Keep | Zip::Drop => "select",
        Zip::Second => "expand_as",
        Zip::Greater => "greater",
    }
}

fn zip(f: Zip, x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let shape = [1, 1, x.count()];
    Tensor::from_buffer(x.device(), x.device().elementwise()?.zip(f, x.buffer(), y.buffer(), shape)?, x.shape())
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
            Zip::Add | Zip::Second => grad.clone(),
            Zip::Sub => negated(grad)?,
            Zip::Mul => zip(Zip::Mul, grad, &cx.saved(0)?)?,
            // -dz x / y²
            Zip::Div => {
                let (x, y) = (cx.saved(0)?, cx.saved(1)?);
                let slope = self.broadcast.zip(Zip::Div, &x, &y)?;
                negated(&zip(Zip::Mul, &self.broadcast.zip(Zip::Div, grad, &y)?, &slope)?)?
            }
            // No function of these is differentiated: y is a constant.
            Zip::Keep | Zip::Drop | Zip::Greater => Tensor::zeros(grad.device(), grad.dtype(), grad.shape())?,
        }))
    }
}

impl Op for Zipped {
    fn name(&self) -> &'static str {
        name(self.f)
    }

    stated! { x, y }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (x, y) = (operands[0], operands[1].repeated(self.broadcast.repeated()));
        self.broadcast.require_whole_ones(self.name(), x, y)?;
        match self.f {
            Zip::Add | Zip::Sub => rules::add(self.name(), x, y),
            Zip::Mul | Zip::Keep | Zip::Drop => rules::product(self.name(), x, y),
            Zip::Div | Zip::Second | Zip::Greater => rules::elementwise(self.name(), &[x, y]),
        }
    }

    fn padded(&self) -> Padded {
        match self.f {
            Zip::Mul | Zip::Keep | Zip::Drop => Padded::Zeros,
            Zip::Add | Zip::Sub if self.broadcast.inner.is_empty() => Padded::Zeros,
            // What is repeated over a dim has no zeros at its end; 0/0.
            Zip::Add | Zip::Sub | Zip::Second | Zip::Greater | Zip::Div => Padded::Refused,
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, y) = (inputs[0], inputs[1]);
        let fits = self.broadcast.repeated().next().is_some() || x.shape() == y.shape();
        cx.require(fits, "the dims of y must be those of x, or its trailing ones, or have extent 1")?;
        match self.f {
            Zip::Mul | Zip::Div => {
                cx.save_input(0)?;
                cx.save_input(1)?;
            }
            Zip::Keep | Zip::Drop => cx.save_input(1)?,
            Zip::Add | Zip::Sub | Zip::Second | Zip::Greater => {}
        }
        self.broadcast.zip(self.f, x, y)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let dy = match self.y_grad(cx, &grad)? {
            Some(dy) => self.broadcast.sum(cx, dy)?,
            None => None,
        };
        let dx = match self.f {
            _ if !cx.needs(0) => None,
            Zip::Add | Zip::Sub => Some(grad),
            Zip::Mul | Zip::Div => Some(self.broadcast.zip(self.f, &grad, &cx.saved(1)?)?),
            Zip::Keep | Zip::Drop => Some(self.broadcast.zip(self.f, &grad, &cx.saved(0)?)?),
            // x gives its dims alone.
            Zip::Second | Zip::Greater => Some(Tensor::zeros(grad.device(), grad.dtype(), grad.shape())?),
        };
        Ok(vec![dx, dy])
    }
}
