//! A loss is one number for each sample, summed over its terms, and the trainer divides by the terms of the whole
//! batch. A model that divides by the samples of its micro-batch as well trains towards another loss on every mesh, and
//! the same one on all ranks of each. So before its first step a trainer that verifies holds the losses and metrics of
//! one micro-batch against the losses and metrics of its samples one by one.
//!
//! **Cost.** Two forward passes over one micro-batch, once. They take less memory than the step: they keep nothing for
//! backward, and no more samples run at once. A micro-batch of one sample has nothing to compare, and gives the numbers
//! that were meant. A model that counts the samples of its micro-batch by a number of its own, so that none of one
//! sample runs, is not compared.
//!
//! **Tolerance.** In canonical numerics a sample has the same bits, whatever samples are beside it. Else kernels choose
//! an order of sums by the number of rows: a relative 1e-6 or so in f32, of which 1e-3 is refused; in 16 bits values
//! may be rounded to the other neighbour, and 5e-2 is refused. A loss that is all but zero is held against the others
//! of its micro-batch. Where a layer decides something from values, as a router does, a rounding may choose another
//! expert: of such models only the loss is compared, and 5e-2 of it is refused.

use super::AtCuts;
use super::prelude::*;
use crate::trace::takes;

const VALID: &str = "give for each sample the sum over its own terms, which the trainer divides by the terms of the whole batch, or say by \
                     Tape::mixes_samples that samples depend on each other by design";

impl Trainer {
    /// Refuses a model whose loss or metrics of a sample depend on the samples of its micro-batch, unless a layer
    /// [said so](meshwork_tensor::Tape::mixes_samples). Only before the first step of a trainer that verifies it.
    /// Collective over the world.
    pub(super) fn require_samples_apart(&mut self, batch: &Batch) -> Result<()> {
        let begins = self.steps_of_trainer == 0 && self.plan.verify.includes(0);
        if !begins || self.cut.micro_batch < 2 || !self.device.has_values() {
            return Ok(());
        }
        let blank = Batch::blank(&self.cut.model.model().fields(), 1);
        let mut refuse = [f64::from(u8::from(!takes(&self.cut.model, self.rank.world_rank(), &blank)))];
        self.rank.world().all_reduce_slice(&mut refuse, ReduceOp::Max)?;
        if refuse[0] != 0.0 {
            return Ok(());
        }
        let device = self.device.clone();
        let (together, alone) = device.meter().uncounted(|| {
            let first = self.with_reference(batch)?.part(0..self.cut.micro_batch)?;
            Ok::<_, TrainError>((self.numbers_in(&first, self.cut.micro_batch)?, self.numbers_in(&first, 1)?))
        })?;
        let (Some((together, decides)), Some((alone, _))) = (together, alone) else { return Ok(()) };
        let canonical = self.plan.blocks().is_some();
        // Metrics against a reference are differences of numbers that may be all but the same.
        let metrics = if self.cut.model.model().reference().is_some() { 0 } else { self.reporting.metrics.len() };
        let (most, rows) = match (canonical, decides) {
            (true, _) => (0.0, 1 + self.reporting.metrics.len()),
            (false, true) => (5e-2, 1),
            (false, false) => (self.plan.rounding(), 1 + metrics),
        };
        let (samples, per_rank) = (self.plan.global_batch_size, self.samples().len());
        for (row, (together, alone)) in together.chunks(samples).zip(alone.chunks(samples)).take(rows).enumerate() {
            let apart = |first: usize| {
                let of = first..first + self.cut.micro_batch;
                Some(first + first_apart(&together[of.clone()], &alone[of], most)?)
            };
            if let Some(sample) = (0..samples).step_by(per_rank).find_map(apart) {
                let what = match row.checked_sub(1) {
                    None => "the loss".to_owned(),
                    Some(metric) => format!("{:?}", self.reporting.metrics[metric].name),
                };
                return Err(TrainError::Claim {
                    step: self.steps_begun + 1,
                    claim: format!(
                        "{what} of sample {sample} is {:?} in a micro-batch of {} samples",
                        together[sample], self.cut.micro_batch
                    ),
                    broken: format!("it is {:?} in one of its own", alone[sample]),
                    valid: VALID.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Losses and metrics of the first samples of each rank, in micro-batches of `micro_batch`, in rows as long as the
    /// global batch, and whether a layer decided something from values. `None` if one says that samples depend on each
    /// other.
    fn numbers_in(&mut self, first: &Batch, micro_batch: usize) -> Result<Option<(Vec<f64>, bool)>> {
        let mut pass = self.pass(Purpose::Evaluate, first)?;
        pass.micro_batch = micro_batch;
        pass.activations = self.cut.model.activations(&first.part(0..micro_batch)?)?.into();
        pass.rows = self.plan.compress.exact_in_forward().row_schemes();
        self.forward_only(&pass, AtCuts::Exact, first.samples() / micro_batch)?;
        let mut said = [pass.mixes_samples.get(), pass.decides.get()].map(|said| f64::from(u8::from(said)));
        self.rank.world().all_reduce_slice(&mut said, ReduceOp::Max)?;
        let [mixes, decides] = said.map(|said| said > 0.0);
        let sums = self.rank.world().start_all_reduce(pass.numbers.into_inner(), ReduceOp::Sum)?;
        let all = self.device.download(&sums.wait()?)?;
        self.rank.log().drain();
        let numbers = all.as_slice::<f64>()?.to_vec();
        Ok((!mixes).then_some((numbers, decides)))
    }
}

/// The first sample whose two numbers are apart by more than a relative `most`: of them, or of the root of the mean
/// square of all.
fn first_apart(together: &[f64], alone: &[f64], most: f64) -> Option<usize> {
    let size = (alone.iter().map(|x| x * x).sum::<f64>() / alone.len().max(1) as f64).sqrt();
    let apart = |(&a, &b): (&f64, &f64)| (a - b).abs() > most * a.abs().max(b.abs()).max(size);
    together.iter().zip(alone).position(apart)
}
