//! What an operation is.

use super::backward::Uses;
use super::hooks::{GradSink, Saved};
use super::{Source, Tape};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use meshwork_core::rules::Operand;
use meshwork_core::{SpmdError, Types};
use std::fmt::Debug;

/// An operation with forward, backward and SPMD rule. A crate adds its own by implementing this and calling
/// [`Tape::apply`](super::Tape::apply).
pub trait Op: Debug {
    /// Its name, in errors and profiles.
    fn name(&self) -> &'static str;

    /// The names of its operands, one each.
    fn operands(&self) -> &'static [&'static str];

    /// The types of the result, or a refusal. Reads of parameters have been resolved.
    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError>;

    /// Computes the result, saving what backward needs.
    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor>;

    /// The gradients of the inputs that [`Backward::needs`] asks for; `None` for the others. With deferred weight gradients
    /// it is called twice, with different needs.
    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// What an operation has at hand in forward.
pub struct Forward<'a> {
    tape: &'a Tape,
    op: &'static str,
    records: bool,
    saved: Vec<Saved>,
}

impl<'a> Forward<'a> {
    pub(super) fn new(tape: &'a Tape, op: &'static str, records: bool) -> Self {
        Self { tape, op, records, saved: Vec::new() }
    }

    /// Keeps a tensor for backward, where `cx.saved(i)` gives back the i-th one saved.
    pub fn save(&mut self, tensor: &Tensor) -> Result<()> {
        if self.records {
            self.saved.push(self.tape.save(self.op, tensor.clone())?);
        }
        Ok(())
    }

    /// The tape.
    pub fn tape(&self) -> &Tape {
        self.tape
    }

    /// Refuses operands whose shapes do not fit.
    pub fn require(&self, fits: bool, problem: impl FnOnce() -> String, inputs: &[&Tensor]) -> Result<()> {
        if fits {
            return Ok(());
        }
        Err(Error::Shape {
            op: self.op,
            problem: problem(),
            shapes: inputs.iter().map(|tensor| tensor.shape().to_vec()).collect(),
        })
    }

    pub(super) fn into_saved(self) -> Vec<Saved> {
        self.saved
    }
}

/// What an operation has at hand in backward.
pub struct Backward<'a> {
    pub(super) tape: &'a Tape,
    pub(super) sink: &'a mut dyn GradSink,
    pub(super) saved: &'a mut [Saved],
    pub(super) sources: &'a [Source],
    pub(super) uses: &'a Uses,
    /// Which kinds of inputs this call is for.
    pub(super) params: bool,
    pub(super) values: bool,
}

impl Backward<'_> {
    /// Whether the gradient of input `i` is wanted now.
    pub fn needs(&self, i: usize) -> bool {
        match self.sources[i] {
            Source::Constant => false,
            Source::Param(_) => self.params,
            Source::Node(_) => self.values,
        }
    }

    /// The i-th tensor that forward saved.
    pub fn saved(&self, i: usize) -> Result<Tensor> {
        self.saved[i].restore()
    }

    /// The i-th tensor that forward saved, for good: its memory can be written if nobody else holds it. Not for operations
    /// with parameters, whose backward may run twice.
    pub fn take_saved(&mut self, i: usize) -> Result<Tensor> {
        match std::mem::replace(&mut self.saved[i], Saved::Taken) {
            Saved::Kept(tensor) => Ok(tensor),
            other => other.restore(),
        }
    }

    /// The tape.
    pub fn tape(&self) -> &Tape {
        self.tape
    }
}
