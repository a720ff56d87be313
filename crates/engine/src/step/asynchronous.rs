//! The step of asynchronous schedules: weights change while the schedule runs, and the pipeline is not drained between steps
//! (PipeDream: Narayanan et al. 2019; PipeDream-2BW: Narayanan et al. 2021).
//!
//! A rank's part of step t ends with its last forward of that step's batch: backwards and updates of the youngest micro-batches,
//! of which the first rank has the most in flight, fall into its part of step t+1 (or later, where a step has fewer of them than
//! there are ranks). So a step's loss is complete at its end, but its last updates only at the end of the next one, and it is
//! reported one step later still, when no rank has to wait to hear of it.
//!
//! ```text
//! schedule of two steps:  │ F F F F B F B F │ B F B F B F B F │ B B B      (first rank, m = 4)
//!                         └ the first step ─┴ every later one ┴ drain
//! ```

use super::settle::Unsettled;
use super::{Mode, StepReport, Trainer};
use crate::config::sections::Pipeline;
use crate::data::Batch;
use crate::engine::{Pass, Purpose, TrainError};
use meshwork_pipeline::{Event, Lowered, lower};
use std::ops::Range;

/// An asynchronous schedule, as one pp rank sees it.
#[derive(Debug)]
pub(super) struct Stream {
    /// Of one step, of two, and so on until one step more is more of the same: each drained at its end.
    schedules: Vec<Lowered>,
    /// Per step of the last of them: the number of actions by its end.
    ends: Vec<usize>,
    micros: usize,
    /// Steps begun since the pipeline was empty.
    begun: usize,
    /// Updates before that.
    updates_before: u64,
}

impl Stream {
    /// The stream that a configuration asks for over `pp` ranks.
    pub(super) fn new(pipeline: &Pipeline, pp: usize, pp_rank: usize) -> Result<Self, TrainError> {
        let micros = pipeline.num_microbatches;
        // The first rank is up to pp micro-batches ahead of its backwards: so many steps, begun, the pipeline is not full.
        let filling = pp.div_ceil(micros);
        let build = |steps| Ok(lower(&pipeline.build_steps(pp, steps)?)?);
        let schedules = (1..=filling + 1).map(build).collect::<Result<Vec<Lowered>, TrainError>>()?;
        // Where the forwards of the step that follows begin.
        let longer = build(filling + 2)?;
        let ends = (1..=filling + 1).map(|step| longer.after_forwards(pp_rank, step * micros)).collect();
        Ok(Self { ends, schedules, micros, begun: 0, updates_before: 0 })
    }

    /// The schedule of the steps begun, as far as it is not more of the same.
    pub(super) fn schedule(&self) -> &Lowered {
        &self.schedules[self.part()]
    }

    fn steady(&self) -> &Lowered {
        &self.schedules[self.schedules.len() - 1]
    }

    /// Which step of its schedule the step begun last is.
    fn part(&self) -> usize {
        self.begun.clamp(1, self.schedules.len()) - 1
    }

    /// How many steps the step begun last is ahead of that.
    fn steps_ahead(&self) -> usize {
        self.begun.saturating_sub(self.schedules.len())
    }

    /// Steps that are begun when the first of them becomes certain: its last updates fall into the steps that follow, and one later
    /// no rank has to wait to hear of them.
    pub(super) fn lag(&self) -> usize {
        self.schedules.len()
    }

    /// Messages that must be able to be on their way to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        self.steady().report().in_flight
    }

    /// Updates in a step.
    pub(super) fn updates(&self) -> usize {
        self.schedules[0].updates().max(1)
    }

    /// The newest versions of the weights among which is what any forward of the rank reads.
    pub(super) fn versions_kept(&self, pp_rank: usize) -> usize {
        1 + self.steady().versions_behind(pp_rank)
    }

    /// The number of the first micro-batch of the step begun last, and how far that count is ahead of the schedule's.
    fn micros_before(&self) -> (usize, usize) {
        (self.begun.saturating_sub(1) * self.micros, self.steps_ahead() * self.micros)
    }

    /// The version that a micro-batch of the schedule reads at a stage.
    pub(super) fn version(&self, stage: usize, micro: usize) -> u64 {
        let ahead = self.steps_ahead() * self.updates();
        self.updates_before + (ahead + self.schedule().version(stage, micro)) as u64
    }

    /// The actions of the step begun last, and those that are left if no step follows.
    fn actions(&self) -> (Range<usize>, Range<usize>) {
        let part = self.part();
        let start = if part == 0 { 0 } else { self.ends[part - 1] };
        (start..self.ends[part], self.ends[part]..usize::MAX)
    }
}

impl Trainer {
    fn stream(&mut self) -> &mut Stream {
        match &mut self.mode {
            Mode::Stream(stream) => stream,
            Mode::Flush(_) => unreachable!("called for asynchronous schedules only"),
        }
    }

    pub(super) fn advance_stream(
        &mut self,
        batch: &Batch,
        tokens: &[i64],
        stop: &impl Fn() -> bool,
        observe: &mut impl FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let updates = self.learner.get_mut().updates();
        let stream = self.stream();
        stream.begun += 1;
        let begins = stream.begun == 1;
        if begins {
            stream.updates_before = updates;
            self.learner.get_mut().gradients.begin();
        }
        let stream = self.stream();
        let ((first_micro, ahead), (actions, _)) = (stream.micros_before(), stream.actions());
        let pass = Pass { first_micro, ahead, ..self.training_pass(batch, tokens) };
        self.walk(&pass, actions, observe)?;
        self.steps_begun += 1;
        let (step, losses) = (self.steps_begun, self.losses());
        let tokens = tokens.iter().sum();
        let records = self.rank.log().drain();
        self.unsettled.push_back(Unsettled { step, tokens, losses, records, sums: None, tally: None });
        let lag = self.stream().lag() as u64;
        self.start_settling((step + 1).saturating_sub(lag), stop)?;
        self.finish_settling((step + 1).saturating_sub(lag))
    }

    /// Runs what is left of the steps begun, and makes them certain.
    pub(super) fn drain_stream(&mut self, observe: &mut impl FnMut(Event)) -> Result<Vec<StepReport>, TrainError> {
        let stream = self.stream();
        if stream.begun == 0 {
            return Ok(Vec::new());
        }
        let ((first_micro, ahead), (_, rest)) = (stream.micros_before(), stream.actions());
        let none = Batch { inputs: Vec::new(), targets: Vec::new(), rows: 0, seq_len: self.seq_len };
        let last = self.steps_begun;
        let mut pass = Pass { first_micro, ahead, ..self.pass(Purpose::Train, &none) };
        pass.position.step = last - 1;
        self.walk(&pass, rest, observe)?;
        self.transport.flush()?;
        self.stream().begun = 0;
        self.rank.log().drain();
        self.start_settling(last, &|| false)?;
        self.finish_settling(last + 1)
    }

    /// Starts the sums of the steps up to and with `last`, of which every update has been made on this rank.
    fn start_settling(&mut self, last: u64, stop: &impl Fn() -> bool) -> Result<(), TrainError> {
        let mut unsettled = std::mem::take(&mut self.unsettled);
        for step in unsettled.iter_mut().filter(|step| step.step <= last && step.sums.is_none()) {
            let norms = self.learner.get_mut().take_norms(step.step);
            step.sums = Some(self.start_sums(std::mem::take(&mut step.losses), norms)?);
            step.tally = Some(self.start_tally(&step.records, stop())?);
        }
        self.unsettled = unsettled;
        Ok(())
    }

    /// Waits for the sums of the steps before `end`.
    fn finish_settling(&mut self, end: u64) -> Result<Vec<StepReport>, TrainError> {
        let mut reports = Vec::new();
        while self.unsettled.front().is_some_and(|step| step.step < end)
            && let Some(Unsettled { step, tokens, records, sums: Some(sums), tally: Some(tally), .. }) =
                self.unsettled.pop_front()
        {
            let measured = sums.measure(tokens)?;
            if let Some((what, value)) = measured.not_finite() {
                return Err(TrainError::Diverged { step, what, value });
            }
            reports.push(self.report(step, measured, tally, records)?);
        }
        Ok(reports)
    }
}
