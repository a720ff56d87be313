//! The order in which the tokens of a sequence lie before ranks cut it.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use std::ops::Range;
use std::sync::Arc;

/// A permutation of the tokens of a sequence, in equal chunks: the order in which they lie before ranks cut them. Ranks
/// that hold neighbouring places of the order may hold tokens from several parts of the sequence.
///
/// ```
/// use meshwork_tensor::op::Order;
///
/// // Four ranks, each with an early and a late chunk, have equally many pairs of a query and an earlier key.
/// let zigzag = Order::zigzag(4);
/// assert_eq!(zigzag.tokens(16, 0..4)?, [0..2, 14..16]);
/// assert_eq!(zigzag.tokens(16, 12..16)?, [6..10]);
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The chunk of the sequence that lies at each place.
    chunks: Arc<[usize]>,
}

impl Default for Order {
    /// The order of the sequence.
    fn default() -> Self {
        Self { chunks: [0].into() }
    }
}

impl Order {
    /// Pairs of an early and a late chunk, of `2 · pairs` chunks: 0 and the last, 1 and the last but one, and so on.
    /// Where a number of ranks that divides `pairs` cuts the sequence, each has the same number of pairs of a query and
    /// a key under the causal mask.
    pub fn zigzag(pairs: usize) -> Self {
        Self { chunks: (0..pairs).flat_map(|at| [at, 2 * pairs - 1 - at]).collect() }
    }

    /// The order of these chunks, each of which comes once: of every token, if there is a chunk for each.
    ///
    /// # Errors
    /// Chunks that are no permutation of `0..chunks.len()`.
    pub fn new(chunks: Vec<usize>) -> Result<Self> {
        let mut sorted = chunks.clone();
        sorted.sort_unstable();
        if chunks.is_empty() || sorted.iter().enumerate().any(|(at, &chunk)| at != chunk) {
            let problem = format!("{chunks:?} is no order of {} chunks: each of them comes once", chunks.len());
            return Err(Error::Shape { op: "order", problem, shapes: Vec::new() });
        }
        Ok(Self { chunks: chunks.into() })
    }

    /// The number of chunks, by which the tokens of a sequence must be divisible.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Whether tokens lie in the order of the sequence.
    pub fn is_natural(&self) -> bool {
        self.chunks.is_sorted()
    }

    /// The tokens at the places `places` of the order of a sequence of `seq` tokens, in runs.
    ///
    /// # Errors
    /// A sequence that is not divisible into the chunks; places behind its end.
    pub fn tokens(&self, seq: usize, places: Range<usize>) -> Result<Vec<Range<usize>>> {
        let count = self.chunks.len();
        if !seq.is_multiple_of(count) || places.end > seq {
            let problem = format!("places {places:?} of {seq} tokens in {count} equal chunks");
            return Err(Error::Shape { op: "order", problem, shapes: Vec::new() });
        }
        let each = seq / count;
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (at, &chunk) in self.chunks.iter().enumerate() {
            let (start, end) = (places.start.max(at * each), places.end.min((at + 1) * each));
            if start >= end {
                continue;
            }
            let first = chunk * each + start - at * each;
            match runs.last_mut().filter(|run| run.end == first) {
                Some(run) => run.end += end - start,
                None => runs.push(first..first + end - start),
            }
        }
        Ok(runs)
    }
}

/// The places of the tokens of a sequence, from token 0 on, where `runs` are the tokens of its places.
pub(super) fn places(runs: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut at = 0;
    let mut placed: Vec<(usize, Range<usize>)> = Vec::with_capacity(runs.len());
    for run in runs {
        placed.push((run.start, at..at + run.len()));
        at += run.len();
    }
    placed.sort_unstable_by_key(|(token, _)| *token);
    placed.into_iter().map(|(_, places)| places).collect()
}

/// The indices of dim `dim` in the order of `runs`.
pub(super) fn in_order(x: &Tensor, dim: usize, runs: &[Range<usize>]) -> Result<Tensor> {
    let (outer, extent, inner) = x.shape().around(dim);
    let (device, layout) = (x.device(), x.device().layout()?);
    let mut ordered = device.alloc(x.dtype(), x.count())?;
    for row in (0..outer).map(|row| row * extent) {
        let mut at = row;
        for run in runs {
            layout.copy_into(
                x.buffer(),
                (row + run.start) * inner..(row + run.end) * inner,
                &mut ordered,
                at * inner,
            )?;
            at += run.len();
        }
    }
    Tensor::from_buffer(device, ordered, x.shape())
}
