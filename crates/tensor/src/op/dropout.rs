//! Random factors that are functions of global position, so that they do not depend on the mesh, and every rank of an
//! `Invariant` value has the same: dropout, and noise around 1.

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::DropoutMask;
use crate::random::Key;
use crate::shape::MAX_DIMS;
use crate::tape::Mode;
use meshwork_core::Buffer;

/// x times the factors of its elements.
#[derive(Debug)]
struct Drawn {
    factors: Factors,
    /// For each run of tokens, which follow each other: one, except in a block of tokens.
    masks: Vec<DropoutMask>,
}

#[derive(Clone, Copy, Debug)]
enum Factors {
    Dropout,
    Jitter,
}

impl Var {
    /// Drops elements with probability `p` and scales the rest by 1/(1-p); the identity when evaluating or at p = 0.
    /// `name` is the name of the layer; each use needs its own. On an axis where the value is `Varying` it has no
    /// global position, and every rank drops the same places.
    pub fn dropout(&self, p: f32, name: &str) -> Result<Var> {
        self.times_drawn(Factors::Dropout, p, name)
    }

    /// Multiplies each element by a number drawn from `[1 - p, 1 + p)`; the identity when evaluating or at p = 0.
    /// `name` is the name of the layer; each use needs its own. (Switch Transformers, section 2.2, of a router's
    /// input.)
    pub fn jitter(&self, p: f32, name: &str) -> Result<Var> {
        self.times_drawn(Factors::Jitter, p, name)
    }

    fn times_drawn(&self, factors: Factors, p: f32, name: &str) -> Result<Var> {
        if p == 0.0 || self.tape().mode() == Mode::Evaluate {
            return Ok(self.clone());
        }
        let op = factors.name();
        let (dtype, stored) = (self.tensor().dtype(), self.tape().params().declarations().dtype());
        if dtype.is_half() && !stored.is_half() {
            return self.cast(stored)?.times_drawn(factors, p, name); // it was rounded for a product
        }
        require_whole(op, &[self])?;
        let (offset, global) = self.global_position();
        let (shape, mut local) = (self.shape(), [1; MAX_DIMS]);
        local[..shape.len()].copy_from_slice(&shape);
        let mask = DropoutMask { p, key: self.tape().random_key(name)?, ndim: shape.len(), local, offset, global };
        let masks = match self.tape().block() {
            None => vec![mask],
            Some(block) if shape.get(1) != Some(&block.tokens()) => {
                let problem = format!("the tape is for blocks of {} tokens, and this value has others", block.tokens());
                return Err(Error::Shape { op, problem, shapes: vec![shape.to_vec()] });
            }
            Some(block) => {
                let first = block.runs()[0].start;
                let mut masks = vec![mask; block.runs().len()];
                for (mask, run) in masks.iter_mut().zip(block.runs()) {
                    mask.local[1] = run.len();
                    mask.offset[1] += (run.start - first) as u64;
                }
                masks
            }
        };
        self.tape().apply(Drawn { factors, masks }, &[self])
    }
}

impl Factors {
    fn name(self) -> &'static str {
        match self {
            Self::Dropout => "dropout",
            Self::Jitter => "jitter",
        }
    }
}

impl Drawn {
    fn times(&self, x: &Tensor) -> Result<Tensor> {
        let device = x.device();
        let of_run = |x: &Buffer, mask| match self.factors {
            Factors::Dropout => device.pointwise()?.dropout(x, mask),
            Factors::Jitter => device.routing()?.jitter(x, mask),
        };
        let y = match &self.masks[..] {
            [mask] => of_run(x.buffer(), mask)?,
            masks => {
                let (mut y, mut at) = (device.alloc(x.dtype(), x.count())?, 0);
                for mask in masks {
                    let count: usize = mask.local[..mask.ndim].iter().product();
                    let run = of_run(&x.buffer().slice(at..at + count)?, mask)?;
                    device.layout()?.copy_into(&run, 0..count, &mut y, at)?;
                    at += count;
                }
                y
            }
        };
        Tensor::from_buffer(device, y, x.shape())
    }
}

/// Of an operation that draws: the probability, and the stream that it draws from.
pub(super) fn random_scalars(p: f32, key: Key) -> Vec<(&'static str, f64)> {
    let [first, second] = key.words();
    vec![("p", p.into()), ("key word 0", first.into()), ("key word 1", second.into())]
}

impl Op for Drawn {
    fn name(&self) -> &'static str {
        self.factors.name()
    }

    stated! { x; padded Zeros }

    fn reads_values(&self) -> bool {
        matches!(self.factors, Factors::Dropout)
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::linear_map(self.name(), operands[0])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        random_scalars(self.masks[0].p, self.masks[0].key)
    }

    fn forward(&self, _cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        self.times(inputs[0])
    }

    fn backward(&self, _cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.times(&grad)?)])
    }
}
