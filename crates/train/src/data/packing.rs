//! Examples packed into rows of one length, each of which is a sample.
//!
//! ```text
//! rows of 8:  │ a a a a a b b b │ c c c c c c · · │ .. │ · │ rows held out .. │ · │
//! ```
//! An example lies in one row as a whole, where its tokens see each other and nothing else. Places that are left hold
//! padding (`·`), a document of its own that nothing reads. The stream is cut into samples as every other one is: a
//! sample is a row and the token behind it, its last target. That token begins a document, and no first token of a
//! document is a target; so the last target of a row is never one of the next row.
//!
//! Of pairs of examples each example has a row of its own, so that a pair is a sample of two rows.
//!
//! Rows are filled by best-fit decreasing: the longest examples first, each into the fullest row that has room for it
//! (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3). What is held out is packed by itself.

use super::prelude::*;
use crate::config::Overlong;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// A stream of rows.
pub(super) struct Packed {
    pub stream: Stream,
    /// Tokens of the training part, at the beginning: its rows, and the token behind them.
    pub training: u64,
    /// How well the rows are filled, and what was cut off or left out.
    pub told: String,
}

/// Padding is this token.
const PADDING: i32 = 0;

/// Packs the examples of a stream into rows of `row` tokens. The last `held_out` of the examples, a share, are for
/// validation.
///
/// # Errors
/// Tokens that cannot be read.
pub(super) fn pack(stream: &Stream, row: usize, held_out: f64, overlong: Overlong) -> Result<Packed, DataError> {
    let (tokens, all) = documents(stream)?;
    let long = all.iter().filter(|example| example.len() > row).count();
    let fits = |example: &&Range<usize>| overlong == Overlong::Truncate || example.len() <= row;
    let fitting: Vec<Range<usize>> = all.iter().filter(fits).map(|example| cut(example, row)).collect();
    let learnt = |example: &Range<usize>| has_answer(stream, example);
    let (mut training, unanswered): (Vec<_>, Vec<_>) = fitting.into_iter().partition(learnt);
    let held = training.split_off(training.len() - (training.len() as f64 * held_out) as usize);
    let (of_training, of_held) = (best_fit(&training, row), best_fit(&held, row));
    let told = told(&training, &of_training, row, [long, unanswered.len(), held.len()], overlong);
    lay((&tokens, stream), row, [(&training, &of_training), (&held, &of_held)], told)
}

/// Lays pairs of examples, whose documents follow each other, out in rows of `row` tokens, one for each example. The
/// last `held_out` of the pairs, a share, are for validation.
///
/// # Errors
/// Tokens that cannot be read.
pub(super) fn pairs(stream: &Stream, row: usize, held_out: f64, overlong: Overlong) -> Result<Packed, DataError> {
    let (tokens, all) = documents(stream)?;
    let all: Vec<[Range<usize>; 2]> = all.chunks_exact(2).map(|pair| [pair[0].clone(), pair[1].clone()]).collect();
    let is_long = |pair: &[Range<usize>; 2]| pair.iter().any(|answer| answer.len() > row);
    let long = all.iter().filter(|pair| is_long(pair)).count();
    let fitting = all.into_iter().filter(|pair| overlong == Overlong::Truncate || !is_long(pair));
    let learnt = |pair: &[Range<usize>; 2]| {
        let [chosen, rejected] = pair.clone().map(|answer| &tokens[answer]);
        chosen != rejected && pair.iter().all(|answer| has_answer(stream, answer))
    };
    let (mut training, alike): (Vec<_>, Vec<_>) =
        fitting.map(|pair| pair.map(|answer| cut(&answer, row))).partition(learnt);
    let held = training.split_off(training.len() - (training.len() as f64 * held_out) as usize);
    let counts = [
        (held.len(), "held out for validation".to_owned()),
        (long, format!("of more than {row} tokens {}", overlong_word(overlong))),
        (alike.len(), "without two different answers in what is left of them left out".to_owned()),
    ];
    let [training, held] = [training, held].map(|pairs| pairs.into_iter().flatten().collect::<Vec<_>>());
    let all: usize = training.iter().map(Range::len).sum();
    let filled = 100.0 * all as f64 / (training.len() * row).max(1) as f64;
    let told = format!("{} pairs of {all} tokens in rows of {row}, {filled:.1}% full", training.len() / 2);
    let alone = |answers: &[Range<usize>]| (0..answers.len()).map(|answer| vec![answer]).collect::<Vec<_>>();
    let (of_training, of_held) = (alone(&training), alone(&held));
    lay((&tokens, stream), row, [(&training, &of_training), (&held, &of_held)], with_counts(told, &counts))
}

/// The tokens of a stream, and its documents in them.
fn documents(stream: &Stream) -> Result<(Vec<i32>, Vec<Range<usize>>), DataError> {
    let tokens = stream.tokens.read(0..stream.tokens.len())?;
    let starts = stream.documents.starts(0..stream.tokens.len(), &tokens)?;
    let edges: Vec<usize> = [0].into_iter().chain(starts).chain([stream.tokens.len()]).map(|at| at as usize).collect();
    Ok((tokens, edges.windows(2).map(|edge| edge[0]..edge[1]).collect()))
}

fn cut(example: &Range<usize>, row: usize) -> Range<usize> {
    example.start..example.end.min(example.start + row)
}

/// Whether an example has a token to learn. A first token follows no other that could predict it.
fn has_answer(stream: &Stream, example: &Range<usize>) -> bool {
    example.clone().skip(1).any(|at| !stream.masked.get(at).copied().unwrap_or(false))
}

/// Examples, and those of each row.
type Filled<'a> = (&'a [Range<usize>], &'a [Vec<usize>]);

/// A stream of the rows of the examples to train on and of those held out.
fn lay(
    from: (&[i32], &Stream),
    row: usize,
    [training, held]: [Filled<'_>; 2],
    told: String,
) -> Result<Packed, DataError> {
    let mut rows = Rows { row, from, tokens: Vec::new(), starts: Vec::new(), masked: Vec::new() };
    rows.lay(training.0, training.1);
    let training = rows.tokens.len() as u64;
    if !held.0.is_empty() {
        rows.lay(held.0, held.1);
    }
    let Rows { tokens, starts, masked, .. } = rows;
    let stream = Stream::new(Tokens::Memory(tokens.into()), Documents::Starts(starts.into()))?.masked(masked);
    Ok(Packed { stream, training, told })
}

/// The examples of each row, in the order of the first of each.
fn best_fit(examples: &[Range<usize>], row: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..examples.len()).collect();
    order.sort_by_key(|&example| Reverse(examples[example].len()));
    // The room of each row that has some, and the row.
    let (mut rows, mut rooms): (Vec<Vec<usize>>, BTreeSet<(usize, usize)>) = Default::default();
    for example in order {
        let len = examples[example].len();
        let found = rooms.range((len, 0)..).next().copied();
        let (room, at) = found.unwrap_or((row, rows.len()));
        match found {
            Some(entry) => _ = rooms.remove(&entry),
            None => rows.push(Vec::new()),
        }
        rows[at].push(example);
        if room > len {
            rooms.insert((room - len, at));
        }
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable_by_key(|row| row[0]);
    rows
}

/// Rows that take examples one behind the other, each row until the next example does not fit.
fn next_fit(examples: &[Range<usize>], row: usize) -> usize {
    let (mut rows, mut room) = (0, 0);
    for example in examples {
        if example.len() > room {
            (rows, room) = (rows + 1, row);
        }
        room -= example.len();
    }
    rows
}

fn told(
    examples: &[Range<usize>],
    rows: &[Vec<usize>],
    row: usize,
    [long, unanswered, held]: [usize; 3],
    overlong: Overlong,
) -> String {
    let (tokens, places) = (examples.iter().map(Range::len).sum::<usize>(), rows.len() * row);
    let filled = 100.0 * tokens as f64 / places.max(1) as f64;
    let told = format!(
        "{} examples of {tokens} tokens in {} rows of {row}, {filled:.1}% full (one behind the other: {} rows)",
        examples.len(),
        rows.len(),
        next_fit(examples, row)
    );
    let counts = [
        (held, "held out for validation".to_owned()),
        (long, format!("of more than {row} tokens {}", overlong_word(overlong))),
        (unanswered, "without an answer in what is left of them left out".to_owned()),
    ];
    with_counts(told, &counts)
}

fn overlong_word(overlong: Overlong) -> &'static str {
    if overlong == Overlong::Truncate { "truncated" } else { "left out" }
}

/// Adds what there is some of.
fn with_counts(mut told: String, counts: &[(usize, String)]) -> String {
    for (count, what) in counts.iter().filter(|(count, _)| *count > 0) {
        told += &format!("; {count} {what}");
    }
    told
}

/// Rows under way.
struct Rows<'a> {
    row: usize,
    /// The tokens and masks of the examples.
    from: (&'a [i32], &'a Stream),
    tokens: Vec<i32>,
    starts: Vec<u64>,
    masked: Vec<bool>,
}

impl Rows<'_> {
    /// Adds rows, and the token behind them.
    fn lay(&mut self, examples: &[Range<usize>], rows: &[Vec<usize>]) {
        let (tokens, stream) = self.from;
        for row in rows {
            let end = self.tokens.len() + self.row;
            for example in row.iter().map(|&example| examples[example].clone()) {
                self.starts.push(self.tokens.len() as u64);
                self.masked.push(true);
                let behind = example.clone().skip(1);
                self.masked.extend(behind.map(|at| stream.masked.get(at).copied().unwrap_or(false)));
                self.tokens.extend_from_slice(&tokens[example]);
            }
            self.pad(end);
        }
        self.pad(self.tokens.len() + 1);
    }

    /// Adds padding up to `end`.
    fn pad(&mut self, end: usize) {
        if self.tokens.len() < end {
            self.starts.push(self.tokens.len() as u64);
            self.tokens.resize(end, PADDING);
            self.masked.resize(end, true);
        }
    }
}

#[cfg(test)]
mod tests;
