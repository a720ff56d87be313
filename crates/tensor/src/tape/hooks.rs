//! The hooks of the tape.

use super::Position;
use super::reduction_blocks::GradShard;
use crate::error::{Error, Result};
use crate::param::ParamId;
use crate::tensor::Tensor;
use meshwork_core::{Buffer, Types};
use std::fmt::{self, Debug};
use std::rc::Rc;

/// How an operation's saved tensors wait for the backward pass: kept, compressed, offloaded, recomputed.
pub trait SavedPolicy: Debug {
    /// Takes a tensor that operation `op` will want back.
    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved>;

    /// Whether values that are cheap to make again, those with a [recipe](super::Forward::recipe), are made again in backward
    /// and not saved at all.
    fn recomputes(&self) -> bool {
        false
    }
}

/// A tensor put away by a [`SavedPolicy`].
pub trait SavedTensor: Debug {
    /// Brings the tensor back. Called at least once; more often where weight gradients are deferred.
    fn restore(&self) -> Result<Tensor>;
}

/// A saved tensor: as it is, or put away.
#[derive(Debug)]
pub enum Saved {
    /// As it is.
    Kept(Tensor),
    /// Put away by a policy.
    Packed(Box<dyn SavedTensor>),
    /// Taken back for good by [`Backward::take_saved`](super::Backward::take_saved).
    Taken,
}

impl Saved {
    /// The tensor.
    pub fn restore(&self) -> Result<Tensor> {
        match self {
            Saved::Kept(tensor) => Ok(tensor.clone()),
            Saved::Packed(packed) => packed.restore(),
            Saved::Taken => Err(Error::Backward("a saved tensor was taken and then asked for again".to_owned())),
        }
    }
}

/// How the result of an operation is made again from what the operation saved, see
/// [`Forward::recipe`](super::Forward::recipe).
pub(super) struct Recipe {
    pub(super) saved: Rc<[Saved]>,
    pub(super) make: Box<Make>,
}

/// A result, with the bits of the first time, from what its operation saved.
pub(super) type Make = dyn Fn(&[Saved]) -> Result<Tensor>;

impl SavedTensor for Rc<Recipe> {
    fn restore(&self) -> Result<Tensor> {
        (self.make)(&self.saved)
    }
}

impl Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recipe").field("saved", &self.saved).finish_non_exhaustive()
    }
}

/// Keeps saved tensors as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep;

impl SavedPolicy for Keep {
    fn save(&self, _op: &'static str, tensor: Tensor) -> Result<Saved> {
        Ok(Saved::Kept(tensor))
    }
}

/// Keeps saved tensors as they are, but makes norms and activation functions again: a pass over memory or two each, of which
/// the results would be a good part of all that is saved (selective recomputation, Korthikanti et al., arXiv:2205.05198,
/// section 5, which spares the scores of attention; those are never saved here).
#[derive(Clone, Copy, Debug, Default)]
pub struct Selective;

impl SavedPolicy for Selective {
    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        Keep.save(op, tensor)
    }

    fn recomputes(&self) -> bool {
        true
    }
}

/// Where a share of the gradient of a parameter goes.
#[derive(Debug)]
pub struct GradSlot<'a> {
    /// Memory for it.
    pub buffer: &'a mut Buffer,
    /// Its first element there.
    pub start: usize,
    /// Whether it overwrites whatever is there, or is added. In canonical numerics it always overwrites: the sink adds up.
    pub first: bool,
}

/// Where parameter gradients go.
pub trait GradSink {
    /// Adds a share to the gradient of a parameter. Shares of several uses and micro-batches add up.
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()>;

    /// Where an operation may write or add its share itself, which then needs no memory of its own and no pass over
    /// both; it must. `None` where there is no such place.
    fn place(&mut self, _share: &GradShard) -> Result<Option<GradSlot<'_>>> {
        Ok(None)
    }

    /// Every use of the parameter on this tape has added its share.
    fn ready(&mut self, id: ParamId) -> Result<()>;
}

/// When backward computes the gradients of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Together with the gradients that flow on.
    Now,
    /// When [`Tape::weight_gradients`](super::Tape::weight_gradients) is called: zero-bubble's split of backward into B and W.
    Deferred,
}

/// Sees every value that a tape computes, and may put another in its place: what compares two runs, or injects a fault into
/// one, attaches here with [`Tape::observe`](super::Tape::observe).
pub trait Observer: Debug {
    /// Sees a value before anything reads it. What this gives back, of the same dtype and shape, takes its place.
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>>;
}

/// A value under an observer's eyes: the output of an operation, or the gradient of an input as one operation gave it, before
/// those of other uses are added. Gradients of parameters are not seen here: they are written where they are kept.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The operation.
    pub op: &'static str,
    /// How many operations were applied on this tape before it.
    pub number: usize,
    /// `None` for the output; in backward the operand whose gradient this is.
    pub operand: Option<&'static str>,
    /// In backward the number of the operation that made the operand; `None` if it came from outside.
    pub maker: Option<usize>,
    /// Names of the parameters that the operation reads.
    pub params: &'a [&'a str],
    /// Its inputs; none in backward.
    pub inputs: &'a [&'a Tensor],
    /// Where in the run this is.
    pub position: Position,
    /// Types of the value: of a gradient, the duals of the operand's.
    pub types: Types,
    /// The value on this rank.
    pub tensor: &'a Tensor,
}
