//! The step of synchronous schedules: all actions see one version of the weights, and one update ends it.
//!
//! Where the end of a step overlaps with the beginning of the next one, the update does not wait for the norm of the
//! whole gradient (post-validation: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4). Ranks update from
//! their own gradients and begin the next step; before its first backward they get the sums over the world. If these
//! require clipping, or show a value that is not finite, the ranks roll the update back, apply the correct one, and
//! rerun the part of the next step that they had begun. After a step that was clipped, the next one waits for its norm,
//! because it will most likely be clipped too.
//!
//! ```text
//! step n:  forward, backward ... ─ reduce ─ start sums ─ update, tentatively
//! step n+1:  forwards of the warm-up ─ see sums ┬ all is well ───────────────────────────── backward ...
//!                                               └ roll back ─ update, clipped ─ forwards again ─┘
//! ```

use super::pending::{Measured, PendingStep, Sums, hash_of_input};
use super::{Driver, StepReport, Trainer};
use crate::TrainError;
use meshwork_nn::Batch;
use meshwork_optim::clip_factor;
use meshwork_pipeline::{Event, Lowered, Tag};

/// A synchronous schedule, as one pp rank sees it.
#[derive(Debug)]
pub(super) struct Synchronous {
    schedule: Lowered,
    /// Number of actions before the first backward; 0 where steps do not overlap.
    warm_up: usize,
    /// Per pp rank: the activations that it sends in its warm-up and that this rank does not receive in its own
    /// warm-up.
    stale: Vec<Vec<Tag>>,
    /// Whether the last step was clipped.
    clipped: bool,
}

impl Synchronous {
    pub(super) fn new(schedule: Lowered, pp_rank: usize, overlaps: bool) -> Self {
        let counts = if overlaps { schedule.unreceived(pp_rank) } else { None };
        let warm_up = if counts.is_some() { schedule.warm_up(pp_rank) } else { 0 };
        let counts = counts.unwrap_or_default().into_iter().enumerate();
        let stale = counts.map(|(from, count)| last_sent(&schedule, from, pp_rank, count)).collect();
        Self { warm_up, stale, schedule, clipped: false }
    }

    pub(super) fn schedule(&self) -> &Lowered {
        &self.schedule
    }

    /// Whether a step may begin before the previous one is certain.
    pub(super) fn overlaps(&self) -> bool {
        self.warm_up > 0
    }
}

/// The last `count` messages that `from` sends to `to` in its warm-up.
fn last_sent(schedule: &Lowered, from: usize, to: usize, count: usize) -> Vec<Tag> {
    let warm_up = &schedule.actions(from)[..schedule.warm_up(from)];
    let to_peer = warm_up.iter().filter(|action| {
        let receives = |other: meshwork_pipeline::Action| schedule.schedule().rank_of(other.stage, other.micro) == to;
        action.kind.is_send() && action.counterpart().is_some_and(receives)
    });
    let tags: Vec<Tag> = to_peer.filter_map(|action| action.tag()).collect();
    tags[tags.len() - count..].to_vec()
}

/// The factor of gradients that are `loss_scale` times too large.
fn unscaled(factor: f32, loss_scale: f64) -> f32 {
    (f64::from(factor) / loss_scale) as f32
}

impl Trainer {
    fn synchronous(&mut self) -> &mut Synchronous {
        match &mut self.driver {
            Driver::Synchronous(driver) => driver,
            Driver::Asynchronous(_) => unreachable!("called for synchronous schedules only"),
        }
    }

    pub(super) fn step_synchronously(
        &mut self,
        batch: &Batch,
        terms: &[u64],
        stop: &dyn Fn() -> bool,
        observe: &mut dyn FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let step = self.steps_begun + 1;
        let mut pass = self.training_pass(batch, terms)?;
        let warm_up = if self.pending.is_empty() { 0 } else { self.synchronous().warm_up };
        self.walk(&pass, 0..warm_up, observe)?;
        let validated = self.validate(warm_up > 0)?;
        if let Some((_, true)) = validated {
            // With new memory for its numbers: losses of forwards with the wrong weights do not count.
            pass = self.training_pass(batch, terms)?;
            self.walk(&pass, 0..warm_up, observe)?;
        }
        let mut reports: Vec<StepReport> = validated.into_iter().map(|(report, _)| report).collect();

        self.weights.get_mut().gradients.begin(step - 1);
        self.walk(&pass, warm_up..usize::MAX, observe)?;
        self.transport.flush()?;
        self.codec.borrow_mut().end_step()?;
        let mut numbers = pass.numbers.into_inner();
        self.weights.get_mut().gradients.finish()?;
        let statistics = self.sum_statistics()?;
        self.verify_claims(&statistics)?;
        self.verify_told()?;
        self.weights.borrow().add_norms(&mut numbers, self.norms_at())?;
        self.tell_loads(&mut numbers)?;
        let sums = self.start_sums(numbers, 1)?;
        let (hash, lr) = (hash_of_input(batch, terms), self.weights.get_mut().lr(step));
        let (terms, loss_scale) = (terms.iter().sum(), pass.loss_scale);
        self.reduced_scale = loss_scale;

        let driver = self.synchronous();
        if driver.overlaps() && !driver.clipped {
            self.weights.get_mut().update_tentatively(lr, (1.0 / loss_scale) as f32, &statistics)?;
            self.steps_begun = step;
            let records = self.rank.log().drain();
            let stats = Some(self.start_stats(&records, &statistics, stop(), hash)?);
            let (numbers, sums) = (None, Some(sums));
            self.pending.push_back(PendingStep {
                step,
                terms,
                loss_scale,
                numbers,
                statistics,
                batch: hash,
                records,
                sums,
                stats,
            });
        } else {
            let measured = self.measured(sums, terms, loss_scale, step);
            self.verify_told()?;
            let measured = match measured {
                Ok(measured) => measured,
                Err(error) => {
                    self.forget_feedback()?;
                    return Err(self.blame(error));
                }
            };
            let factor = clip_factor(measured.grad_norm, self.max_norm);
            if !measured.skipped {
                self.weights.get_mut().update(lr, unscaled(factor, loss_scale), &statistics)?;
            }
            self.steps_begun = step;
            self.synchronous().clipped = factor != 1.0;
            let records = self.rank.log().drain();
            let stats = self.start_stats(&records, &statistics, stop(), hash)?;
            reports.push(self.report(step, measured, stats, records)?);
        }
        Ok(reports)
    }

    /// Makes the last step certain, if it is not yet. Returns its report, and whether its update had to be redone. If
    /// it had to be, and after an error, the part of the next step that was `begun` with the wrong weights is
    /// discarded.
    pub(super) fn validate(&mut self, begun: bool) -> Result<Option<(StepReport, bool)>, TrainError> {
        let Some(PendingStep {
            step,
            terms,
            loss_scale,
            records,
            statistics,
            sums: Some(sums),
            stats: Some(stats),
            ..
        }) = self.pending.pop_front()
        else {
            return Ok(None);
        };
        let measured = match self.measured(sums, terms, loss_scale, step) {
            Ok(measured) => measured,
            Err(error) => {
                self.rollback(begun)?;
                self.forget_feedback()?;
                self.steps_begun = step - 1;
                return Err(self.blame(error));
            }
        };
        let factor = clip_factor(measured.grad_norm, self.max_norm);
        let redone = measured.skipped || factor != 1.0;
        if redone {
            self.rollback(begun)?;
            let weights = self.weights.get_mut();
            if !measured.skipped {
                weights.update(weights.lr(step), unscaled(factor, loss_scale), &statistics)?;
            }
        } else {
            self.weights.get_mut().commit();
        }
        self.synchronous().clipped = redone;
        Ok(Some((self.report(step, measured, stats, records)?, redone)))
    }

    /// Waits for the sums of a step, and follows its gradients with the loss scale: of those that overflowed at a
    /// dynamic scale, the step is skipped. Any other value that is not finite is refused.
    fn measured(&mut self, sums: Sums, terms: u64, loss_scale: f64, step: u64) -> Result<Measured, TrainError> {
        let measured = self.measure(sums, terms, loss_scale)?;
        if measured.loaded {
            self.loads.told(step);
        }
        let overflowed = measured.loss.is_finite() && !measured.grad_norm.is_finite();
        match self.scaler.skips(step, loss_scale, overflowed) {
            true => Ok(Measured { skipped: true, ..measured }),
            false => measured.finite(step),
        }
    }

    /// After a step that was not finite: what compression lost in it is not finite either, and would spoil every later
    /// step.
    fn forget_feedback(&mut self) -> Result<(), TrainError> {
        self.codec.borrow_mut().forget()?;
        self.weights.get_mut().gradients.load_kept(|kept| Ok(vec![0.0; kept.slice.stored.count()]))
    }

    /// Undoes the last update, and what was begun with its weights.
    fn rollback(&mut self, begun: bool) -> Result<(), TrainError> {
        self.forget_passes();
        self.weights.get_mut().rollback();
        if begun {
            let stale = self.synchronous().stale.clone();
            for (from, messages) in stale.iter().enumerate() {
                self.transport.discard(from, messages)?;
            }
        }
        Ok(())
    }
}
