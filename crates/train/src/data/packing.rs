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
//! An example may have several documents, such as the two answers of a pair, each behind its prompt. They lie in the
//! same row one behind the other, and do not see each other.
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

/// The documents of an example, by their tokens.
type Example = Vec<Range<usize>>;

/// The tokens of an example.
fn len(example: &Example) -> usize {
    example.iter().map(Range::len).sum()
}

/// Packs the examples of a stream, of so many `documents` each, into rows of `row` tokens. The last `held_out` of the
/// examples, a share, are for validation.
///
/// # Errors
/// Tokens that cannot be read.
pub(super) fn pack(
    stream: &Stream,
    documents: usize,
    row: usize,
    held_out: f64,
    overlong: Overlong,
) -> Result<Packed, DataError> {
    let (tokens, all) = documents_of(stream)?;
    let all: Vec<Example> = all.chunks_exact(documents).map(<[_]>::to_vec).collect();
    let long = all.iter().filter(|example| len(example) > row).count();
    let fits = |example: &Example| overlong == Overlong::Truncate || len(example) <= row;
    let fitting = all.into_iter().filter(fits).map(|example| cut(example, row));
    // Every document has an answer, and two of them are not the same.
    let learnt = |example: &Example| {
        let differ = example.windows(2).all(|two| tokens[two[0].clone()] != tokens[two[1].clone()]);
        differ && example.iter().all(|document| has_answer(stream, document))
    };
    let (mut training, unanswered): (Vec<_>, Vec<_>) = fitting.partition(learnt);
    let held = training.split_off(training.len() - (training.len() as f64 * held_out) as usize);
    let (of_training, of_held) = (best_fit(&training, row), best_fit(&held, row));
    let (what, lacks) = match documents {
        1 => ("examples", "an answer"),
        _ => ("pairs", "two different answers"),
    };
    let counts = [
        (held.len(), "held out for validation".to_owned()),
        (long, format!("of more than {row} tokens {}", overlong_word(overlong))),
        (unanswered.len(), format!("without {lacks} in what is left of them left out")),
    ];
    let mut rows = Rows { row, tokens: &tokens, stream, laid: Vec::new(), starts: Vec::new(), masked: Vec::new() };
    rows.lay(&training, &of_training);
    let end_of_training = rows.laid.len() as u64;
    if !held.is_empty() {
        rows.lay(&held, &of_held);
    }
    let Rows { laid, starts, masked, .. } = rows;
    let stream = Stream::new(Tokens::Memory(laid.into()), Documents::Starts(starts.into()))?.masked(masked);
    let told = told(what, &training, of_training.len(), row, &counts);
    Ok(Packed { stream, training: end_of_training, told })
}

/// The tokens of a stream, and its documents in them.
fn documents_of(stream: &Stream) -> Result<(Vec<i32>, Vec<Range<usize>>), DataError> {
    let tokens = stream.tokens.read(0..stream.tokens.len())?;
    let starts = stream.documents.starts(0..stream.tokens.len(), &tokens)?;
    let edges: Vec<usize> = [0].into_iter().chain(starts).chain([stream.tokens.len()]).map(|at| at as usize).collect();
    Ok((tokens, edges.windows(2).map(|edge| edge[0]..edge[1]).collect()))
}

/// Of an example that is longer than a row, the beginning of each document: as much as all of them have room for.
fn cut(example: Example, row: usize) -> Example {
    if len(&example) <= row {
        return example;
    }
    let most = row / example.len();
    example.into_iter().map(|document| document.start..document.end.min(document.start + most)).collect()
}

/// Whether a document has a token to learn. A first token follows no other that could predict it.
fn has_answer(stream: &Stream, document: &Range<usize>) -> bool {
    document.clone().skip(1).any(|at| !stream.masked.get(at).copied().unwrap_or(false))
}

/// The examples of each row, in the order of the first of each.
fn best_fit(examples: &[Example], row: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..examples.len()).collect();
    order.sort_by_key(|&example| Reverse(len(&examples[example])));
    // The room of each row that has some, and the row.
    let (mut rows, mut rooms): (Vec<Vec<usize>>, BTreeSet<(usize, usize)>) = Default::default();
    for example in order {
        let len = len(&examples[example]);
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
fn next_fit(examples: &[Example], row: usize) -> usize {
    let (mut rows, mut room) = (0, 0);
    for len in examples.iter().map(len) {
        if len > room {
            (rows, room) = (rows + 1, row);
        }
        room -= len;
    }
    rows
}

/// How full the rows are, and what there is some of.
fn told(what: &str, examples: &[Example], rows: usize, row: usize, counts: &[(usize, String)]) -> String {
    let tokens: usize = examples.iter().map(len).sum();
    let filled = 100.0 * tokens as f64 / (rows * row).max(1) as f64;
    let mut told = format!(
        "{} {what} of {tokens} tokens in {rows} rows of {row}, {filled:.1}% full (one behind the other: {} rows)",
        examples.len(),
        next_fit(examples, row)
    );
    for (count, what) in counts.iter().filter(|(count, _)| *count > 0) {
        told += &format!("; {count} {what}");
    }
    told
}

fn overlong_word(overlong: Overlong) -> &'static str {
    if overlong == Overlong::Truncate { "truncated" } else { "left out" }
}

/// Rows under way.
struct Rows<'a> {
    row: usize,
    /// The tokens of the examples, and their masks.
    tokens: &'a [i32],
    stream: &'a Stream,
    laid: Vec<i32>,
    starts: Vec<u64>,
    masked: Vec<bool>,
}

impl Rows<'_> {
    /// Adds rows, and the token behind them.
    fn lay(&mut self, examples: &[Example], rows: &[Vec<usize>]) {
        for row in rows {
            let end = self.laid.len() + self.row;
            for document in row.iter().flat_map(|&example| examples[example].clone()) {
                self.starts.push(self.laid.len() as u64);
                self.masked.push(true);
                let behind = document.clone().skip(1);
                self.masked.extend(behind.map(|at| self.stream.masked.get(at).copied().unwrap_or(false)));
                self.laid.extend_from_slice(&self.tokens[document]);
            }
            self.pad(end);
        }
        self.pad(self.laid.len() + 1);
    }

    /// Adds padding up to `end`.
    fn pad(&mut self, end: usize) {
        if self.laid.len() < end {
            self.starts.push(self.laid.len() as u64);
            self.laid.resize(end, PADDING);
            self.masked.resize(end, true);
        }
    }
}

#[cfg(test)]
mod tests;
