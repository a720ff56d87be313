//! The hooks of the tape.

use super::Position;
use super::prelude::*;
use crate::param::Params;
use std::fmt::{self, Debug};

/// How an operation's saved tensors are stored for the backward pass: kept, compressed, offloaded, recomputed.
pub trait SavedPolicy: Debug {
    /// Saves a tensor for the backward of operation `op`.
    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved>;

    /// The same for a tensor that must come back bit by bit: the statistics of a norm, the log-sum-exp of attention,
    /// the logits of a loss. They are few, and a small error in them is a large error in the gradient.
    fn save_exact(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        self.save(op, tensor)
    }

    /// Whether values with a [recipe](super::Forward::recipe), which are cheap to recompute, are recomputed in backward
    /// and not saved at all.
    fn recomputes(&self) -> bool {
        false
    }
}

/// A tensor stored by a [`SavedPolicy`].
pub trait SavedTensor: Debug {
    /// Restores the tensor. Called at least once, and more often if weight gradients are deferred.
    fn restore(&self) -> Result<Tensor>;
}

/// A saved tensor: unchanged, or stored by a policy.
#[derive(Debug)]
pub enum Saved {
    /// Unchanged.
    Kept(Tensor),
    /// Stored by a policy.
    Packed(Box<dyn SavedTensor>),
    /// Taken out by [`Backward::take_saved`](super::Backward::take_saved).
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

/// How the result of an operation is recomputed from the tensors that the operation saved, see
/// [`Forward::recipe`](super::Forward::recipe).
pub(super) struct Recipe {
    pub(super) saved: Rc<[Saved]>,
    pub(super) make: Box<Make>,
}

/// Recomputes a result, bit for bit, from the tensors that its operation saved.
pub(super) type Make = dyn Fn(&[Saved]) -> Result<Tensor>;

impl SavedTensor for Rc<Recipe> {
    fn restore(&self) -> Result<Tensor> {
        (self.make)(&self.saved)
    }
}

/// A parameter that is read again in backward.
#[derive(Debug)]
pub(super) struct ReadAgain {
    pub(super) params: Arc<Params>,
    pub(super) id: ParamId,
    /// How it was read.
    pub(super) read: fn(&Params, ParamId) -> Result<Tensor>,
}

impl SavedTensor for ReadAgain {
    fn restore(&self) -> Result<Tensor> {
        (self.read)(&self.params, self.id)
    }
}

impl Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recipe").field("saved", &self.saved).finish_non_exhaustive()
    }
}

/// Keeps saved tensors unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep;

impl SavedPolicy for Keep {
    fn save(&self, _op: &'static str, tensor: Tensor) -> Result<Saved> {
        Ok(Saved::Kept(tensor))
    }
}

/// Keeps saved tensors unchanged, but recomputes norms and activation functions. Each takes a pass over memory or two,
/// and their results would be a large part of all saved memory (selective recomputation, Korthikanti et al.,
/// arXiv:2205.05198, section 5, which recomputes the scores of attention; those are never saved here).
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

/// When backward computes the gradients of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Together with the gradients of inputs.
    Now,
    /// When [`Tape::weight_gradients`](super::Tape::weight_gradients) is called: zero-bubble's split of backward into B
    /// and W.
    Deferred,
}

/// Sees every value that a tape computes, and may replace it. [`Tape::observe`](super::Tape::observe) attaches it, to
/// compare two runs or to inject a fault into one.
pub trait Observer: Debug {
    /// Sees a value before anything reads it. A returned tensor, which must have the same dtype and shape, replaces it.
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>>;

    /// Sees a value that comes to the tape from outside, `a constant` or `an input`, with the types that it is said to
    /// have.
    fn source(&self, kind: &'static str, types: Types, tensor: &Tensor) {
        _ = (kind, types, tensor);
    }

    /// Whether it compares values with those of other meshes. Then an operation gives its share of a gradient by itself
    /// where it would add it to those of other uses, which differ between meshes. The sums have the same bits.
    fn compares_meshes(&self) -> bool {
        false
    }
}

/// The observers of a tape, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Observers(RefCell<Vec<Rc<dyn Observer>>>);

impl Observers {
    pub(super) fn add(&self, observer: Rc<dyn Observer>) {
        self.0.borrow_mut().push(observer);
    }

    /// The value that replaces the seen one, if any observer replaced it.
    pub(super) fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>> {
        let observers = self.0.borrow().clone();
        let mut now: Option<Tensor> = None;
        for observer in observers {
            let seen = Seen { tensor: now.as_ref().unwrap_or(seen.tensor), ..*seen };
            if let Some(tensor) = observer.see(&seen)? {
                if (tensor.shape(), tensor.dtype()) != (seen.tensor.shape(), seen.tensor.dtype()) {
                    let problem = format!(
                        "an observer gave {} for {}: dtype and shape must be the same",
                        tensor.dtype(),
                        seen.tensor.dtype()
                    );
                    let shapes = vec![tensor.shape().to_vec(), seen.tensor.shape().to_vec()];
                    return Err(Error::Shape { op: seen.op, problem, shapes });
                }
                now = Some(tensor);
            }
        }
        Ok(now)
    }

    pub(super) fn compare_meshes(&self) -> bool {
        self.0.borrow().iter().any(|observer| observer.compares_meshes())
    }

    pub(super) fn source(&self, kind: &'static str, types: Types, tensor: &Tensor) {
        let observers = self.0.borrow().clone();
        observers.iter().for_each(|observer| observer.source(kind, types, tensor));
    }
}

/// A value shown to an observer: the output of an operation, or the gradient that one operation returned for an input,
/// before the gradients of other uses are added. Gradients of parameters are not seen here: they are written where they
/// are kept.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// The operation.
    pub op: &'static str,
    /// Number of operations applied on this tape before it.
    pub number: usize,
    /// The part of the samples, of an operation that is applied [to each of several](super::Tape::for_parts); else 0.
    pub part: usize,
    /// `None` for the output; in backward the operand whose gradient this is.
    pub operand: Option<&'static str>,
    /// Of each input, in backward of the operand alone: the number of the operation that made it, and `None` if it came
    /// from outside.
    pub makers: &'a [Option<usize>],
    /// Names of the parameters that the operation reads.
    pub params: &'a [&'a str],
    /// Its inputs; empty in backward.
    pub inputs: &'a [&'a Tensor],
    /// [Numbers](super::Op::scalars) that it computes with; empty in backward.
    pub scalars: &'a [(&'static str, f64)],
    /// The [tokens](super::Op::tokens) that this rank has, as far as the operation knows; empty in backward.
    pub tokens: &'a [std::ops::Range<usize>],
    /// The position in the run.
    pub position: Position,
    /// Types of the value; for a gradient, the duals of the operand's types.
    pub types: Types,
    /// True extents of its dims that are padded with zeros.
    pub padding: &'a Padding,
    /// The value on this rank.
    pub tensor: &'a Tensor,
}
