//! The time of a step in a simulated schedule, with its messages and their compression.

use meshwork::pipeline::{CheckError, Costs, Schedule, simulate};

/// Range of bandwidths for the search of a limit, in bytes per second.
const SLOWEST: f64 = 1e3;
const FASTEST: f64 = 1e13;

/// The bytes that a step sends, and the seconds to compress and restore them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Traffic {
    /// Bytes of a message between stages: of an activation, and of its gradient.
    pub(super) messages: [f64; 2],
    /// Seconds to compress, and to restore, each of them.
    pub(super) codec: [[f64; 2]; 2],
    /// Bytes that sums of gradients send: in a first communication, which runs during backward, and after backward.
    pub(super) sums: [f64; 2],
    /// Seconds to compress and restore the sums.
    pub(super) sum_codec: f64,
    /// Bytes that a rank sends to gather weights in the forward of a micro-batch through all of its stages. Its
    /// backward sends as many.
    pub(super) weights: f64,
    /// Seconds to compress and restore the weights.
    pub(super) weights_codec: f64,
    /// Bytes of tokens that a rank sends to experts and gets back from them, in the forward of a micro-batch and in its
    /// backward.
    pub(super) tokens: [f64; 2],
    /// Seconds to compress and restore the tokens.
    pub(super) tokens_codec: [f64; 2],
}

/// A step of a pipeline without its communication.
#[derive(Clone, Debug)]
pub(super) struct Computation {
    /// The schedule.
    pub(super) schedule: Schedule,
    /// Seconds of forward and backward of each stage, for one micro-batch. A third is forward.
    pub(super) seconds: Vec<f64>,
}

impl Computation {
    /// Seconds of a step with this traffic, if a rank sends `bandwidth` bytes per second.
    ///
    /// # Errors
    /// As [`simulate()`].
    pub(super) fn step(&self, traffic: &Traffic, bandwidth: f64) -> Result<f64, CheckError> {
        let last = self.seconds.len().saturating_sub(1);
        let is_sent = |stage: usize| self.schedule.rank_of(stage, 0) != self.schedule.rank_of(stage + 1, 0);
        // Each stage of a rank has an equal part of its gathers and dispatches.
        let share = self.schedule.ranks as f64 / self.seconds.len().max(1) as f64;
        let inside = |seconds: f64, direction: usize| {
            // The next weights arrive while a layer computes.
            let gathered = seconds.max(share * traffic.weights / bandwidth) + share * traffic.weights_codec;
            // Half of the samples are exchanged while experts work on the other half.
            let exchange = share * traffic.tokens[direction] / bandwidth;
            (gathered + exchange / 2.0).max(gathered / 2.0 + exchange) + share * traffic.tokens_codec[direction]
        };
        // Forward compresses the activations that it sends, and restores those that it receives; gradients go the other
        // way.
        let [activation, gradient] = traffic.codec;
        let cuts = |stage: usize, at_start: f64, at_end: f64| {
            let start = if stage > 0 && is_sent(stage - 1) { at_start } else { 0.0 };
            let end = if stage < last && is_sent(stage) { at_end } else { 0.0 };
            start + end
        };
        let forward = |stage: usize| inside(self.seconds[stage] / 3.0, 0) + cuts(stage, activation[1], activation[0]);
        let backward = |stage: usize| {
            let both = inside(self.seconds[stage] * 2.0 / 3.0, 1) - self.seconds[stage] / 3.0;
            both + cuts(stage, gradient[0], gradient[1])
        };
        let costs = Costs {
            forward: (0..=last).map(forward).collect(),
            input_gradient: (0..=last).map(backward).collect(),
            weight_gradient: self.seconds.iter().map(|seconds| seconds / 3.0).collect(),
            transfer: traffic.messages.map(|bytes| bytes / bandwidth),
            overlap: true,
        };
        let hidden = self.seconds.iter().map(|seconds| seconds * 2.0 / 3.0).fold(f64::INFINITY, f64::min);
        let [first, then] = traffic.sums.map(|bytes| bytes / bandwidth);
        Ok(simulate(&self.schedule, &costs)?.span() + (first - hidden).max(0.0) + then + traffic.sum_codec)
    }

    /// The bandwidth below which a step takes less time with `compressed` than with `plain`; `None`: never.
    ///
    /// # Errors
    /// As [`simulate()`].
    pub(super) fn pays_below(&self, plain: &Traffic, compressed: &Traffic) -> Result<Option<f64>, CheckError> {
        let pays = |bandwidth| Ok(self.step(compressed, bandwidth)? < self.step(plain, bandwidth)?);
        let [mut slow, mut fast] = [SLOWEST, FASTEST];
        if !pays(slow)? {
            return Ok(None);
        }
        if pays(fast)? {
            return Ok(Some(f64::INFINITY));
        }
        while fast / slow > 1.001 {
            let middle = (slow * fast).sqrt();
            *(if pays(middle)? { &mut slow } else { &mut fast }) = middle;
        }
        Ok(Some(slow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork::pipeline::gpipe;

    /// Two stages of 3 s per micro-batch.
    fn computation(micros: usize) -> Computation {
        Computation { schedule: gpipe(2, micros), seconds: vec![3.0; 2] }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3 * b.abs().max(1e-9), "{a} {b}");
    }

    #[test]
    fn a_message_delays_the_step_by_its_time_and_that_of_compressing_it() {
        let plain = Traffic { messages: [100e6, 50e6], ..Traffic::default() };
        // Fill and drain: m + 1 forwards and backwards, and a message each way.
        close(computation(4).step(&plain, 100e6).unwrap(), 5.0 * 3.0 + 1.0 + 0.5);
        let compressed = Traffic { messages: [10e6, 50e6], codec: [[0.2, 0.1], [0.0; 2]], ..plain.clone() };
        // Forwards of the first stage take 1.2 s and set the pace; the last forward of the second takes 1.1 s.
        close(computation(4).step(&compressed, 100e6).unwrap(), 4.0 * 1.2 + 1.1 + 0.1 + 5.0 * 2.0 + 0.5);
        // It saves 90 MB and costs 0.9 s.
        close(computation(4).pays_below(&plain, &compressed).unwrap().unwrap(), 100e6);
    }

    #[test]
    fn backward_hides_the_first_communication_of_sums() {
        let plain = Traffic { sums: [100e6, 0.0], ..Traffic::default() };
        let of = |bandwidth| computation(1).step(&plain, bandwidth).unwrap();
        close(of(50e6), 6.0);
        close(of(25e6), 6.0 + 2.0);
        let compressed = Traffic { sums: [10e6, 10e6], sum_codec: 0.1, ..Traffic::default() };
        close(computation(1).step(&compressed, 10e6).unwrap(), 6.0 + 1.0 + 0.1);
        // With b MB/s, 100/b - 2 = 10/b + 0.1 if only the uncompressed sums are not hidden.
        close(computation(1).pays_below(&plain, &compressed).unwrap().unwrap(), 90e6 / 2.1);
    }

    #[test]
    fn what_saves_nothing_never_pays_and_what_costs_nothing_always_does() {
        let plain = Traffic { messages: [100.0; 2], ..Traffic::default() };
        let slower = Traffic { codec: [[0.1; 2]; 2], ..plain.clone() };
        assert_eq!(computation(2).pays_below(&plain, &slower).unwrap(), None);
        let free = Traffic { messages: [50.0; 2], ..Traffic::default() };
        let limit = computation(2).pays_below(&plain, &free).unwrap();
        assert!(limit.is_some_and(|limit| limit > 1e12), "{limit:?}");
    }

    #[test]
    fn weights_come_while_layers_compute_and_half_of_the_tokens_do() {
        // A forward takes 1 s, a backward 2 s.
        let of = |traffic: &Traffic, bandwidth| computation(1).step(traffic, bandwidth).unwrap();
        let gathers = Traffic { weights: 100e6, ..Traffic::default() };
        close(of(&gathers, 100e6), 6.0);
        close(of(&gathers, 50e6), 6.0 + 2.0);
        close(of(&gathers, 25e6), 4.0 * 4.0);
        let compressed = Traffic { weights: 25e6, weights_codec: 0.1, ..Traffic::default() };
        close(of(&compressed, 25e6), 6.0 + 0.4);
        let dispatch = Traffic { tokens: [100e6, 50e6], ..Traffic::default() };
        close(of(&dispatch, 100e6), 2.0 * (1.0 + 0.5) + 2.0 * (2.0 + 0.25));
        close(of(&dispatch, 25e6), 2.0 * (0.5 + 4.0) + 2.0 * (2.0 + 1.0));
    }
}
