//! Decisions of a forward pass: integers that are made from values, such as the experts of tokens.
//!
//! A forward that runs again to recompute its activations [repeats](Tape::repeat) the decisions of the first, and does
//! not decide twice. So the gradient belongs to the forward whose output was sent on, even if the values behind a
//! decision come out differently the second time.

use super::prelude::*;
use std::collections::VecDeque;

/// The decisions of one forward pass, in their order.
#[derive(Clone, Debug, Default)]
pub struct Decisions(VecDeque<Vec<Tensor>>);

/// The decisions of a tape.
#[derive(Debug, Default)]
pub(super) struct Decided {
    made: Decisions,
    /// The decisions that are still to be repeated, on the tape of a forward that runs again.
    repeated: Option<Decisions>,
}

impl Tape {
    /// The result of `decide`, or the decision at this place of the forward that this one repeats.
    ///
    /// # Errors
    /// Errors of `decide`; a forward that decides about other things than the forward that it repeats.
    pub fn decide<const N: usize>(&self, decide: impl FnOnce() -> Result<[Tensor; N]>) -> Result<[Tensor; N]> {
        self.note_decision();
        if let Some(repeated) = &mut self.inner.decided.borrow_mut().repeated {
            let next: Option<[Tensor; N]> = repeated.0.pop_front().and_then(|next| next.try_into().ok());
            return next.ok_or_else(|| Error::Shape {
                op: "decide",
                problem: format!("a forward that runs again decides on {N} tensors here, and the first one did not"),
                shapes: Vec::new(),
            });
        }
        let made = decide()?;
        if self.mode() == Mode::Train {
            self.inner.decided.borrow_mut().made.0.push_back(made.to_vec());
        }
        Ok(made)
    }

    /// Takes the decisions of a forward pass that trains.
    pub fn take_decisions(&self) -> Decisions {
        std::mem::take(&mut self.inner.decided.borrow_mut().made)
    }

    /// Makes the next forward pass take the decisions of an earlier one.
    pub fn repeat(&self, decisions: Decisions) {
        self.inner.decided.borrow_mut().repeated = Some(decisions);
    }
}
