//! The step of synchronous schedules: all actions see one version of the weights, and one update ends it.
//!
//! Where the schedule ends in the slope in which the next step begins, the update does not wait for the norm of the whole gradient
//! (post-validation: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4). Ranks update from their own gradients and
//! begin the next step; before its first backward they see what the sums over the world say. Where that asks for clipping, or
//! shows a value that is not finite, they take the update back, do it again as it should be, and run again what they had begun.
//! After a step that was clipped the next one waits: most likely it will be clipped too.
//!
//! ```text
//! step n:  forward, backward ... ─ reduce ─ start sums ─ update, tentatively
//! step n+1:  forwards of the warm-up ─ see sums ┬ all is well ───────────────────────────── backward ...
//!                                               └ take back ─ update, clipped ─ forwards again ─┘
//! ```

use super::settle::Unsettled;
use super::{Mode, StepReport, Trainer};
use crate::data::Batch;
use crate::engine::TrainError;
use meshwork_optim::clip_factor;
use meshwork_pipeline::{Event, Lowered};

/// A synchronous schedule, as one pp rank sees it.
#[derive(Debug)]
pub(super) struct Flush {
    schedule: Lowered,
    /// Actions before the first backward; none where steps do not overlap.
    warm_up: usize,
    /// Per pp rank: activations of the warm-up that it sends and this rank does not receive within its own.
    stale: Vec<usize>,
    /// Whether the last step was clipped.
    clipped: bool,
}

impl Flush {
    pub(super) fn new(schedule: Lowered, pp_rank: usize, overlaps: bool) -> Self {
        let stale = if overlaps { schedule.unreceived(pp_rank) } else { None };
        let warm_up = if stale.is_some() { schedule.warm_up(pp_rank) } else { 0 };
        Self { warm_up, stale: stale.unwrap_or_default(), schedule, clipped: false }
    }

    pub(super) fn schedule(&self) -> &Lowered {
        &self.schedule
    }

    /// Whether a step may begin before the one before it is certain.
    pub(super) fn overlaps(&self) -> bool {
        self.warm_up > 0
    }
}

impl Trainer {
    fn flush(&mut self) -> &mut Flush {
        match &mut self.mode {
            Mode::Flush(flush) => flush,
            Mode::Stream(_) => unreachable!("called for synchronous schedules only"),
        }
    }

    pub(super) fn advance_with_flush(
        &mut self,
        batch: &Batch,
        tokens: &[i64],
        stop: &impl Fn() -> bool,
        observe: &mut impl FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let step = self.steps_begun + 1;
        let pass = self.training_pass(batch, tokens);
        let warm_up = if self.unsettled.is_empty() { 0 } else { self.flush().warm_up };
        self.walk(&pass, 0..warm_up, observe)?;
        let validated = self.validate(warm_up > 0)?;
        if let Some((_, true)) = validated {
            self.walk(&pass, 0..warm_up, observe)?;
        }
        let mut reports: Vec<StepReport> = validated.into_iter().map(|(report, _)| report).collect();

        self.learner.get_mut().gradients.begin();
        self.walk(&pass, warm_up..usize::MAX, observe)?;
        self.transport.flush()?;
        drop(pass);
        self.learner.get_mut().gradients.finish()?;
        let losses = self.losses();
        let norms = self.learner.get_mut().norms()?;
        let sums = self.start_sums(losses, norms)?;
        let (tokens, lr) = (tokens.iter().sum(), self.learner.get_mut().lr(step));

        let flush = self.flush();
        if flush.overlaps() && !flush.clipped {
            self.learner.get_mut().update_tentatively(lr, 1.0)?;
            self.steps_begun = step;
            let records = self.rank.log().drain();
            let tally = Some(self.start_tally(&records, stop())?);
            self.unsettled.push_back(Unsettled { step, tokens, losses: Vec::new(), records, sums: Some(sums), tally });
        } else {
            let measured = sums.measure(tokens)?.finite(step)?;
            let factor = clip_factor(measured.grad_norm, self.max_norm);
            self.learner.get_mut().update(lr, factor)?;
            self.steps_begun = step;
            self.flush().clipped = factor != 1.0;
            let records = self.rank.log().drain();
            let tally = self.start_tally(&records, stop())?;
            reports.push(self.report(step, measured, tally, records)?);
        }
        Ok(reports)
    }

    /// Makes the last step certain, if it is not: its report, and whether its update had to be done again. Then, and after an
    /// error, what was `begun` of the next step with the wrong weights is forgotten.
    pub(super) fn validate(&mut self, begun: bool) -> Result<Option<(StepReport, bool)>, TrainError> {
        let Some(Unsettled { step, tokens, records, sums: Some(sums), tally: Some(tally), .. }) =
            self.unsettled.pop_front()
        else {
            return Ok(None);
        };
        let measured = match sums.measure(tokens)?.finite(step) {
            Ok(measured) => measured,
            Err(error) => {
                self.take_back(begun)?;
                self.steps_begun = step - 1;
                return Err(error);
            }
        };
        let factor = clip_factor(measured.grad_norm, self.max_norm);
        let clipped = factor != 1.0;
        if clipped {
            self.take_back(begun)?;
            let learner = self.learner.get_mut();
            learner.update(learner.lr(step), factor)?;
        } else {
            self.learner.get_mut().confirm();
        }
        self.flush().clipped = clipped;
        Ok(Some((self.report(step, measured, tally, records)?, clipped)))
    }

    /// Undoes the last update, and what was begun with its weights.
    fn take_back(&mut self, begun: bool) -> Result<(), TrainError> {
        self.forget_passes();
        self.learner.get_mut().take_back();
        if begun {
            let stale = self.flush().stale.clone();
            for (from, messages) in stale.into_iter().enumerate() {
                self.transport.discard(from, messages)?;
            }
        }
        Ok(())
    }
}
