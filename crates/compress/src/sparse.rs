//! Sparse methods: few elements are sent, the largest or randomly chosen ones.

use crate::compressor::{Draws, Guarantee, SumMethod};
use crate::indices::Packed;
use crate::select::largest;
use crate::wire::HEADER;
use crate::{CompressError, Compressor, Fold, MessageError, Method, Per, Shape, Values, indices};
use meshwork_core::random::{Key, blocks};
use std::fmt;
use std::ops::Range;

/// How many elements are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    /// This fraction of each part, rounded to the nearest number, at least one. Above 0, at most 1.
    Fraction(f64),
    /// This many of each part, at least one; all of a smaller part.
    Count(usize),
}

impl Keep {
    /// Number of elements kept of `len`.
    pub fn of(self, len: usize) -> usize {
        match self {
            Keep::Fraction(fraction) => ((fraction * len as f64).round() as usize).max(1).min(len),
            Keep::Count(count) => count.max(1).min(len),
        }
    }
}

/// Which elements are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The largest |x| of each part; ties go to lower indices. Infinity is larger than all numbers, and NaN larger than
    /// infinity.
    Largest(Per),
    /// Chosen uniformly without replacement (R. Floyd's algorithm). Values that are not chosen are lost, even if they
    /// are not finite.
    Random {
        /// Whether values are multiplied by n/k, so that the mean over all draws is x.
        unbiased: bool,
    },
}

/// Sends few elements; all others are restored as zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sparse {
    /// Which elements are sent.
    pub choice: Choice,
    /// How many elements are sent.
    pub keep: Keep,
    /// How their values are sent. The values form a vector in the order of the indices.
    pub values: Values,
}

impl fmt::Display for Sparse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.choice, Choice::Largest(_)) { "topk:" } else { "randk:" })?;
        match self.keep {
            // Always with a point, even for whole numbers, to distinguish a fraction from a count.
            Keep::Fraction(fraction) => write!(f, "{fraction:?}")?,
            Keep::Count(count) => write!(f, "{count}")?,
        }
        match self.choice {
            Choice::Largest(per) => write!(f, "{per}")?,
            Choice::Random { unbiased: true } => f.write_str("/unbiased")?,
            Choice::Random { unbiased: false } => {}
        }
        match self.values {
            Values::F32 => Ok(()),
            values => write!(f, "+{values}"),
        }
    }
}

/// Bytes of the key and the first counter from which indices are drawn.
const DRAWS: usize = 16;

impl Sparse {
    /// Number of elements sent.
    pub fn count(&self, shape: Shape) -> usize {
        match self.choice {
            Choice::Largest(per) => {
                let (unit, len) = (per.unit(shape), shape.len());
                len / unit * self.keep.of(unit) + self.keep.of(len % unit)
            }
            Choice::Random { .. } => self.keep.of(shape.len()),
        }
    }

    /// The smallest fraction of a part that is sent.
    fn fraction(&self, shape: Shape) -> f64 {
        let of = |len: usize| if len == 0 { 1.0 } else { self.keep.of(len) as f64 / len as f64 };
        match self.choice {
            Choice::Largest(per) => of(per.unit(shape).min(shape.len())).min(of(shape.len() % per.unit(shape))),
            Choice::Random { .. } => of(shape.len()),
        }
    }

    /// The factor of sent values.
    pub fn factor(&self, shape: Shape) -> f32 {
        match self.choice {
            Choice::Random { unbiased: true } if !shape.is_empty() => (1.0 / self.fraction(shape)) as f32,
            _ => 1.0,
        }
    }

    /// The indices of the elements that are sent, increasing.
    pub fn indices(&self, x: &[f32], shape: Shape, draws: Draws) -> Vec<u32> {
        let mut chosen = Vec::with_capacity(self.count(shape));
        match self.choice {
            Choice::Largest(per) => per.ranges(shape).for_each(|range| {
                let keep = self.keep.of(range.len());
                largest(&x[range.clone()], keep, range.start, &mut chosen);
            }),
            Choice::Random { .. } => chosen = drawn(self.keep.of(shape.len()), shape.len(), draws),
        }
        chosen
    }

    /// The range of index bytes in a message of the largest elements; empty for randomly chosen elements, whose indices
    /// follow from the message's key and counter.
    pub fn index_bytes(&self, shape: Shape) -> Range<usize> {
        let bytes = match self.choice {
            Choice::Largest(_) => indices::bytes(self.count(shape), shape.len()),
            Choice::Random { .. } => 0,
        };
        HEADER..HEADER + bytes
    }

    /// How the indices of a message are packed, if they are not a bitmap.
    pub fn packed(&self, shape: Shape) -> Option<Packed> {
        Packed::of(self.count(shape), shape.len())
    }

    /// The indices in [`index_bytes`](Self::index_bytes) of a message of this scheme and shape.
    ///
    /// # Errors
    /// Bytes that encode no valid indices, or too few bytes.
    pub fn read_indices(&self, bytes: &[u8], shape: Shape) -> Result<Vec<u32>, CompressError> {
        crate::message::count("the indices", bytes.len(), self.index_bytes(shape).len())?;
        Ok(indices::read(bytes, self.count(shape), shape.len())?)
    }

    /// The values of some elements, as in a message of this scheme.
    pub fn take(&self, x: &[f32], shape: Shape, indices: &[u32]) -> Vec<f32> {
        let factor = self.factor(shape);
        indices.iter().map(|&index| x[index as usize] * factor).collect()
    }

    /// The shape of the sent values.
    pub fn taken(&self, shape: Shape) -> Shape {
        Shape::vector(self.count(shape)).unwrap_or(shape) // They are no more than the elements.
    }
}

/// `count` distinct numbers below `below`; every set is equally likely.
fn drawn(count: usize, below: usize, draws: Draws) -> Vec<u32> {
    // The values may draw from the same stream, so this uses another key.
    let [first, second] = draws.key.words();
    let key = Key::from_words([!first, second]);
    let mut taken = vec![0_u64; below.div_ceil(64)];
    for (i, last) in (below - count..below).enumerate() {
        let [[low], [high], ..] = blocks::<1>(key, draws.start.wrapping_add(i as u64));
        let word = u64::from(high) << 32 | u64::from(low);
        let at = ((u128::from(word) * (last as u128 + 1)) >> 64) as usize;
        let new = if taken[at / 64] >> (at % 64) & 1 == 0 { at } else { last };
        taken[new / 64] |= 1 << (new % 64);
    }
    let mut drawn = Vec::with_capacity(count);
    for (i, mut word) in taken.into_iter().enumerate() {
        while word != 0 {
            drawn.push(64 * i as u32 + word.trailing_zeros());
            word &= word - 1;
        }
    }
    drawn
}

impl Compressor for Sparse {
    fn name(&self) -> String {
        self.to_string()
    }

    fn method(&self) -> Method {
        match self.choice {
            Choice::Largest(_) => Method::TopK,
            Choice::Random { .. } => Method::RandomK,
        }
    }

    fn check(&self, shape: Shape) -> Result<(), CompressError> {
        self.values.check(shape)
    }

    fn body_bytes(&self, shape: Shape) -> usize {
        let indices = match self.choice {
            Choice::Largest(_) => indices::bytes(self.count(shape), shape.len()),
            Choice::Random { .. } => DRAWS,
        };
        indices + self.values.body_bytes(self.taken(shape))
    }

    fn guarantee(&self, shape: Shape) -> Guarantee {
        let (kept, values) = (self.fraction(shape), self.values.guarantee(self.taken(shape)));
        let error = match self.choice {
            // The largest elements hold at least the fraction `kept` of |x|², and may hold all.
            Choice::Largest(_) => (1.0 - kept * (1.0 - values.error)).max(values.error),
            Choice::Random { unbiased: false } => 1.0 - kept * (1.0 - values.error),
            Choice::Random { unbiased: true } => {
                let (drawing, rounding) = (1.0 / kept - 1.0, values.error / kept);
                match values.unbiased {
                    true => drawing + rounding,
                    false => (drawing.sqrt() + rounding.sqrt()).powi(2),
                }
            }
        };
        let all = self.choice != (Choice::Random { unbiased: true }) && kept < 1.0;
        Guarantee { error, unbiased: values.unbiased && !all }
    }

    fn sum(&self) -> SumMethod {
        match (self.choice, self.values) {
            (Choice::Random { .. }, Values::F32) => SumMethod::SharedIndices(*self),
            _ => SumMethod::Gather,
        }
    }

    fn write(&self, x: &[f32], shape: Shape, draws: Draws, warm: &mut [f32], body: &mut [u8]) {
        let chosen = self.indices(x, shape, draws);
        let at = body.len() - self.values.body_bytes(self.taken(shape));
        let (head, values) = body.split_at_mut(at);
        match self.choice {
            Choice::Largest(_) => indices::write(&chosen, shape.len(), head),
            Choice::Random { .. } => {
                let [first, second] = draws.key.words();
                head[0..4].copy_from_slice(&first.to_le_bytes());
                head[4..8].copy_from_slice(&second.to_le_bytes());
                head[8..16].copy_from_slice(&draws.start.to_le_bytes());
            }
        }
        self.values.write(&self.take(x, shape, &chosen), self.taken(shape), draws, warm, values);
    }

    fn read(&self, body: &[u8], shape: Shape, fold: Fold, out: &mut [f32]) -> Result<(), MessageError> {
        let count = self.count(shape);
        let (head, values) = body.split_at(body.len() - self.values.body_bytes(self.taken(shape)));
        let chosen = match self.choice {
            Choice::Largest(_) => indices::read(head, count, shape.len())?,
            Choice::Random { .. } => {
                let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| head[at + i]));
                let start = u64::from(word(12)) << 32 | u64::from(word(8));
                drawn(count, shape.len(), Draws { key: Key::from_words([word(0), word(4)]), start })
            }
        };
        let mut restored = vec![0.0; count];
        self.values.read(values, self.taken(shape), Fold::Replace, &mut restored)?;
        if fold == Fold::Replace {
            out.fill(0.0);
        }
        for (&index, value) in chosen.iter().zip(restored) {
            match fold {
                Fold::Replace => out[index as usize] = value,
                Fold::Add => out[index as usize] += value,
            }
        }
        Ok(())
    }
}
