//! Where a run is in its data: the samples that it has taken of each stream, and not its number of steps. So a run that
//! is resumed takes the samples that come next, whatever its batch, its mesh, its other sources or the length of its
//! samples.
//!
//! ```text
//! stream, by token   │ epoch 0, in order: start ─ taken samples ─▶ next │ epoch 1 ...
//! stream, shuffled   │ epoch 2, by `order`: place 0, 1 .. taken ─▶ next │ epoch 3, by the order of this run ...
//! mixture            which stream sample n is from: goes on at `next`, or anew with other sources or shares
//! ```

use super::permutation::Permutation;
use super::{Data, seed_of};
use serde::{Deserialize, Serialize};

/// Where a run is in its data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Samples taken since the beginning of the run.
    pub samples: u64,
    /// Tokens in them.
    pub tokens: u64,
    shares: Vec<u64>,
    /// The place in the sequence of streams from which the next sample comes.
    next: u64,
    streams: Vec<StreamPosition>,
}

/// Where a run is in one stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct StreamPosition {
    /// Fingerprint of the stream, in hexadecimal.
    stream: String,
    /// Tokens of its training part.
    tokens: u64,
    seq_len: u64,
    /// Times that it was read to its end.
    epoch: u64,
    /// The seed by which the samples of this epoch are permuted; without one they come in order.
    order: Option<u64>,
    /// The token at which the first sample of this epoch begins: 0, unless the length of samples has changed within it.
    start: u64,
    /// Samples taken in this epoch.
    taken: u64,
}

impl Position {
    /// Whether it can be one, of a file that anybody may have written.
    pub(crate) fn is_sound(&self) -> bool {
        self.streams
            .iter()
            .all(|place| place.seq_len > 0 && place.start < place.tokens && place.taken <= place.samples())
    }
}

impl StreamPosition {
    /// Whole samples of this epoch, those taken with them.
    fn samples(&self) -> u64 {
        self.tokens.saturating_sub(self.start.saturating_add(1)) / self.seq_len
    }

    /// The beginning of epoch `epoch`, in the order `later`.
    fn begin(self, epoch: u64, later: Option<u64>) -> Self {
        Self { epoch, order: later, start: 0, taken: 0, ..self }
    }

    /// `samples` further on. Epochs after this one have the order `later`.
    fn after(self, samples: u128, later: Option<u64>) -> Self {
        let left = u128::from(self.samples() - self.taken);
        if samples < left {
            return Self { taken: self.taken + samples as u64, ..self };
        }
        let (rest, epoch) = (samples - left, self.epoch + 1);
        let next = self.begin(epoch, later);
        let whole = u128::from(next.samples().max(1));
        Self { epoch: epoch + (rest / whole) as u64, taken: (rest % whole) as u64, ..next }
    }

    /// The token at which the next sample begins.
    fn token(&self) -> u64 {
        let sample = match self.order {
            Some(seed) => Permutation::new(self.samples(), seed, self.epoch).at(self.taken),
            None => self.taken,
        };
        self.start + sample * self.seq_len
    }
}

/// Where a run began or went on: samples are counted from there.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    position: Position,
    /// For each stream, the samples of it before `next`, by the mixture.
    before: Vec<u128>,
}

impl Data {
    /// The streams from their beginning.
    fn fresh(&self) -> Position {
        let name = |source: usize| format!("{:016x}", self.parts[source].stream.hash);
        let place = |source: usize| StreamPosition { stream: name(source), ..self.fresh_place(source) };
        let streams = (0..self.parts.len()).map(place).collect();
        Position { samples: 0, tokens: 0, shares: self.mixture.shares().to_vec(), next: 0, streams }
    }

    /// The seed of the order of a stream in the epochs that this run begins.
    fn order_of(&self, source: usize) -> Option<u64> {
        self.shuffle.map(|seed| seed_of(seed, source))
    }

    /// The stream of the `index`-th sample from where this run began or went on, and the token in it at which that
    /// begins.
    pub(super) fn place(&self, index: u128) -> (usize, u64) {
        let next = self.origin.as_ref().map_or(0, |origin| origin.position.next);
        let (source, nth) = self.mixture.at(u128::from(next) + index);
        let (from, before) = match &self.origin {
            Some(origin) => (origin.position.streams[source].clone(), origin.before[source]),
            None => (self.fresh_place(source), 0),
        };
        assert!(from.samples() > 0, "{} training tokens hold no sample of {} + 1", from.tokens, self.seq_len);
        (source, from.after(nth - before, self.order_of(source)).token())
    }

    /// A stream from its beginning, without its name.
    fn fresh_place(&self, source: usize) -> StreamPosition {
        StreamPosition {
            stream: String::new(),
            tokens: self.parts[source].training,
            seq_len: self.seq_len as u64,
            epoch: 0,
            order: self.order_of(source),
            start: 0,
            taken: 0,
        }
    }

    /// Where a run is that has taken `samples` samples since it began or went on.
    pub(crate) fn position(&self, samples: u64) -> Position {
        let (from, before) = match &self.origin {
            Some(origin) => (origin.position.clone(), origin.before.clone()),
            None => (self.fresh(), vec![0; self.parts.len()]),
        };
        let next = from.next + samples;
        let place = |(source, place): (usize, StreamPosition)| {
            let taken = self.mixture.before(source, u128::from(next)) - before[source];
            place.after(taken, self.order_of(source))
        };
        let streams = from.streams.into_iter().enumerate().map(place).collect();
        let tokens = from.tokens + samples * self.seq_len as u64;
        Position { samples: from.samples + samples, tokens, next, streams, ..from }
    }

    /// Where a run was after `samples` samples that kept no position: it had these streams, in samples of `seq_len`,
    /// and held out `fraction` of each; `shuffle` was its seed, if it shuffled.
    pub(crate) fn position_of(&self, samples: u64, seq_len: usize, fraction: f64, shuffle: Option<u64>) -> Position {
        let was = Self { origin: None, seq_len, shuffle, ..self.clone() }.hold_out(fraction);
        was.position(samples)
    }

    /// The same data, from where the resumed run is, and notes about it. A stream that the run did
    /// not have begins at its beginning. With `anew`, a stream that cannot go on begins its next epoch.
    ///
    /// # Errors
    /// Why streams cannot go on.
    pub(crate) fn going_on(self, from: &Position, anew: bool) -> Result<(Self, Vec<String>), Vec<String>> {
        let (mut streams, mut told, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        let fresh = self.fresh();
        let mut known: Vec<Option<&StreamPosition>> = from.streams.iter().map(Some).collect();
        for (source, fresh) in fresh.streams.iter().enumerate() {
            // The same stream may be there twice, and its path is of no matter.
            let same = |place: &&mut Option<&StreamPosition>| place.is_some_and(|place| place.stream == fresh.stream);
            let Some(was) = known.iter_mut().find(same).and_then(Option::take) else {
                streams.push(fresh.clone());
                continue;
            };
            let later = self.order_of(source);
            let next = || fresh.clone().begin(was.epoch + 1, later);
            streams.push(if was.tokens == fresh.tokens && was.seq_len == fresh.seq_len {
                was.clone()
            } else if was.taken == 0 && was.start == 0 {
                fresh.clone().begin(was.epoch, later)
            } else if was.order.is_none() {
                // The token that comes next begins a sample of another length.
                let there = StreamPosition { start: was.token(), order: None, epoch: was.epoch, ..fresh.clone() };
                if there.samples() > 0 { there } else { next() }
            } else {
                let StreamPosition { stream, epoch, taken, seq_len, .. } = was;
                let (all, tokens) = (was.samples(), fresh.tokens);
                let problem = format!(
                    "{taken} of the {all} samples of epoch {epoch} of the stream {stream} are taken in shuffled order, \
                     and in samples of {} tokens of {tokens}, instead of {seq_len} of {}, the others cannot be told",
                    fresh.seq_len, was.tokens
                );
                match anew {
                    true => told.push(format!("{problem}: it begins epoch {}", epoch + 1)),
                    false => refused.push(problem),
                }
                next()
            });
        }
        if !refused.is_empty() {
            return Err(refused);
        }
        let names = |position: &Position| position.streams.iter().map(|of| of.stream.clone()).collect::<Vec<_>>();
        let same_mixture = from.shares == fresh.shares && names(from) == names(&fresh);
        let next = if same_mixture { from.next } else { 0 };
        let before = (0..self.parts.len()).map(|source| self.mixture.before(source, u128::from(next))).collect();
        let position = Position { samples: from.samples, tokens: from.tokens, next, streams, ..fresh };
        Ok((Self { origin: Some(Origin { position, before }), ..self }, told))
    }
}

#[cfg(test)]
mod tests {
    use super::super::mixture::Mixture;
    use super::super::tokens::{Fnv, Tokens};
    use super::super::{Documents, Stream};
    use super::*;

    const SEQ: usize = 4;

    /// A stream whose tokens are `first` and those after it.
    fn stream(first: i32, tokens: i32) -> Stream {
        let ids: Vec<i32> = (first..first + tokens).collect();
        let mut hash = Fnv::default();
        ids.iter().for_each(|id| hash.add(&id.to_le_bytes()));
        Stream {
            tokens: Tokens::Memory(ids.into()),
            documents: Documents::Unmarked,
            masked: Vec::new().into(),
            hash: hash.0,
        }
    }

    fn data(streams: &[(i32, i32)], weights: &[f64], seq_len: usize) -> Data {
        let streams = streams.iter().map(|&(first, tokens)| stream(first, tokens)).collect();
        Data::from_streams(streams, Mixture::new(weights).unwrap(), seq_len)
    }

    /// The first tokens of samples `from..to` since the data began or went on.
    fn firsts(data: &Data, from: u64, to: u64) -> Vec<i32> {
        let batch = data.batch_at(from, 0..(to - from) as usize).unwrap();
        batch.values::<i32>("tokens").unwrap().chunks(data.seq_len).map(|sample| sample[0]).collect()
    }

    /// As files hold it.
    fn saved(position: &Position) -> Position {
        serde_json::from_str(&serde_json::to_string(position).unwrap()).unwrap()
    }

    /// The story: four steps of 8 samples, then 16. Step 5 read samples 64 to 80.
    #[test]
    fn parts_of_any_batch_take_the_samples_of_one_whole_run() {
        for shuffle in [None, Some(7)] {
            for (streams, weights) in [(&[(0, 100)][..], &[1.0][..]), (&[(0, 90), (1000, 41)], &[0.7, 0.3])] {
                let data = Data { shuffle, ..data(streams, weights, SEQ) };
                let whole = firsts(&data, 0, 128);
                let (mut now, mut all) = (data.clone(), Vec::new());
                for (batch, steps) in [(8, 4), (16, 1), (3, 5), (1, 2), (32, 1)] {
                    let taken = batch * steps;
                    all.extend(firsts(&now, 0, taken));
                    let position = saved(&now.position(taken));
                    assert_eq!(position.samples as usize, all.len());
                    now = data.clone().going_on(&position, false).unwrap().0;
                }
                assert_eq!(all, whole[..all.len()], "{shuffle:?}");
            }
        }
    }

    #[test]
    fn another_mixture_goes_on_in_each_stream() {
        let two = data(&[(0, 400), (1000, 400)], &[0.5, 0.5], SEQ);
        let position = saved(&two.position(10)); // five of each
        let other = data(&[(5000, 400), (1000, 400), (0, 400)], &[1.0, 1.0, 1.0], SEQ);
        let (other, told) = other.going_on(&position, false).unwrap();
        assert_eq!((firsts(&other, 0, 6), told.len()), (vec![5000, 1020, 20, 5004, 1024, 24], 0));
        // And back: the one that was left stands where it was.
        let back = two.clone().going_on(&saved(&other.position(6)), false).unwrap().0;
        assert_eq!(firsts(&back, 0, 2), [28, 1028]);
    }

    #[test]
    fn samples_of_another_length_begin_at_the_token_that_comes_next() {
        let short = data(&[(0, 101)], &[1.0], SEQ);
        let long = data(&[(0, 101)], &[1.0], 10).going_on(&saved(&short.position(3)), false).unwrap().0;
        assert_eq!(firsts(&long, 0, 10), [12, 22, 32, 42, 52, 62, 72, 82, 0, 10]);
        let short = short.going_on(&saved(&long.position(1)), false).unwrap().0;
        assert_eq!(firsts(&short, 0, 3), [22, 26, 30]);
        assert_eq!(long.position(9).tokens, 12 + 90);
    }

    #[test]
    fn a_shuffled_epoch_in_samples_of_another_length_is_refused_or_ends() {
        let of = |seq_len| Data { shuffle: Some(3), ..data(&[(0, 101)], &[1.0], seq_len) };
        let position = of(SEQ).position(30); // 25 in the first epoch
        let refused = of(10).going_on(&position, false).unwrap_err();
        assert!(refused[0].starts_with("5 of the 25 samples of epoch 1 of the stream "), "{refused:?}");
        let (data, told) = of(10).going_on(&position, true).unwrap();
        assert!(told[0].ends_with(": it begins epoch 2"), "{told:?}");
        let mut epoch = firsts(&data, 0, 10);
        epoch.sort_unstable();
        assert_eq!(epoch, (0..10).map(|sample| 10 * sample).collect::<Vec<_>>());
        // At its end there is nothing that could be lost.
        assert!(of(10).going_on(&of(SEQ).position(25), false).is_ok());
    }

    /// The epoch under way keeps its order, so that no sample of it comes twice.
    #[test]
    fn another_seed_or_none_begins_with_the_next_epoch() {
        let of = |shuffle| Data { shuffle, ..data(&[(0, 41)], &[1.0], SEQ) };
        for (before, after) in [(Some(1), Some(2)), (Some(1), None), (None, Some(2))] {
            let first = firsts(&of(before), 0, 10);
            let went_on = of(after).going_on(&saved(&of(before).position(6)), false).unwrap().0;
            assert_eq!(firsts(&went_on, 0, 4), first[6..]);
            assert_eq!(firsts(&went_on, 4, 14), firsts(&of(after), 10, 20));
        }
    }

    #[test]
    fn a_run_that_kept_no_position_is_where_its_batches_say() {
        let of = |shuffle| Data { shuffle, ..data(&[(0, 101), (1000, 57)], &[3.0, 2.0], SEQ).hold_out(0.1) };
        let was = of(Some(5));
        assert_eq!(of(Some(9)).position_of(23, SEQ, 0.1, Some(5)), was.position(23));
    }
}
