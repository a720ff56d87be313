//! Passes that do not train: the loss on other data, and logits for sampling.

use super::Trainer;
use crate::data::Batch;
use crate::engine::{Chunk, Pass, PipeTransport, Purpose, Running, TrainError};
use meshwork_core::Axis;
use meshwork_pipeline::run;
use meshwork_tensor::Error;

impl Trainer {
    /// The mean loss over the unmasked tokens of some batches, without training. Every rank gets it.
    pub fn evaluate(&mut self, batches: impl Iterator<Item = Batch>) -> Result<f64, TrainError> {
        self.require_settled()?;
        let (mut loss, mut tokens) = (0.0, 0);
        for batch in batches {
            tokens += self.count_tokens(&batch)?.into_iter().sum::<i64>();
            let pass = self.pass(Purpose::Evaluate, &batch);
            self.forward_only(&pass)?;
            let losses = self.losses();
            loss += self.sum_over_world(losses)?;
        }
        self.rank.log().drain();
        match tokens {
            0 => Err(TrainError::NoTokens { step: self.steps_begun }),
            tokens => Ok(loss / tokens as f64),
        }
    }

    /// The logits of the token that follows `tokens`, for the real part of the vocabulary; of a longer text than a sequence only the
    /// last tokens count. Every rank gets the same.
    pub fn next_token_logits(&mut self, tokens: &[i32], vocab: usize) -> Result<Vec<f32>, TrainError> {
        self.require_settled()?;
        let mut window = tokens[tokens.len().saturating_sub(self.seq_len)..].to_vec();
        let position = window.len().saturating_sub(1);
        // What stands behind the last token does not matter: attention is causal. Sequence parallelism cuts the sequence
        // evenly, and a few lengths for all tokens of a sample let the device use its memory again.
        let tp = self.rank.mesh().degree(Axis::Tp);
        let even = window.len().next_multiple_of(tp * SAMPLE_BLOCK.div_ceil(tp));
        window.resize(even.min(self.seq_len), 0);
        let seq_len = window.len();
        let batch = Batch { inputs: window, targets: Vec::new(), rows: 1, seq_len };
        let pass = Pass { micro_batch: 1, seq_len, ..self.pass(Purpose::Sample, &batch) };
        self.forward_only(&pass)?;
        let mut row = vec![0f32; vocab];
        if let Some(logits) = self.chunks.iter_mut().find_map(Chunk::take_logits) {
            let width = logits.shape()[2];
            let host = self.device.download(logits.buffer())?;
            row.copy_from_slice(&host.as_slice::<f32>().map_err(Error::from)?[position * width..][..vocab]);
        }
        let last = self.sampling.schedule().stages() - 1;
        self.rank.group(Axis::Pp).broadcast_slice(&mut row, self.sampling.schedule().rank_of(last, 0))?;
        self.rank.log().drain();
        Ok(row)
    }

    /// Runs all micro-batches of a pass that does not train.
    fn forward_only(&mut self, pass: &Pass) -> Result<(), TrainError> {
        let schedule = if pass.purpose == Purpose::Sample { &self.sampling } else { &self.evaluation };
        let pp_rank = self.rank.coords().get(Axis::Pp);
        let boundary = self.chunks[0].stage().boundary(pass.micro_batch, pass.seq_len);
        let in_flight = schedule.report().in_flight;
        let mut transport = PipeTransport::new(&self.rank, self.device.clone(), boundary, self.scatter, in_flight);
        let (learner, live) = (&self.learner, &self.live);
        let running = |chunk| Running { chunk, pass, learner, live, versions: &|_, _| None };
        let mut stages: Vec<Running<'_>> = self.chunks.iter_mut().map(running).collect();
        let walked = run(schedule, pp_rank, &mut stages, &mut transport, &mut |_| {});
        if walked.is_err() {
            self.forget_passes();
        }
        Ok(walked?)
    }
}

/// Tokens of a sample are added to a sequence whose length grows in blocks of at least so many.
const SAMPLE_BLOCK: usize = 32;
