//! Sparse methods: few elements are sent, the largest or randomly chosen ones.

use crate::compressor::{Draws, Guarantee, SumMethod};
use crate::indices::Packed;
use crate::select::largest;
use crate::wire::HEADER;
use crate::{Choice, Compressor, Fold, MessageError, Method, Result, Shape, Sparse, Values, indices};
use meshwork_core::random::{Key, blocks};
use std::ops::Range;

/// Bytes of the key and first counter that draw indices.
const DRAWS: usize = 16;

impl Sparse {
    /// Number of elements sent.
    pub fn count(&self, shape: Shape) -> usize {
        match self.choice {
            Choice::Largest(per) => {
                let (unit, len) = (per.unit(shape), shape.len());
                len / unit * self.keep.count(unit) + self.keep.count(len % unit)
            }
            Choice::Random { .. } => self.keep.count(shape.len()),
        }
    }

    /// The smallest fraction of a part that is sent.
    fn fraction(&self, shape: Shape) -> f64 {
        let of = |len: usize| if len == 0 { 1.0 } else { self.keep.count(len) as f64 / len as f64 };
        match self.choice {
            Choice::Largest(per) => of(per.unit(shape).min(shape.len())).min(of(shape.len() % per.unit(shape))),
            Choice::Random { .. } => of(shape.len()),
        }
    }

    /// The factor of values.
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
                let keep = self.keep.count(range.len());
                largest(&x[range.clone()], keep, range.start, &mut chosen);
            }),
            Choice::Random { .. } => chosen = drawn(self.keep.count(shape.len()), shape.len(), draws),
        }
        chosen
    }

    /// Where a message of the largest elements has their indices; empty for elements that are drawn, as the indices of
    /// a message are known by its draws.
    pub fn index_bytes(&self, shape: Shape) -> Range<usize> {
        let bytes = match self.choice {
            Choice::Largest(_) => indices::bytes(self.count(shape), shape.len()),
            Choice::Random { .. } => 0,
        };
        HEADER..HEADER + bytes
    }

    /// How the indices of a message are packed, if they are not a bitmap.
    pub fn packed(&self, shape: Shape) -> Option<Packed> {
        Packed::new(self.count(shape), shape.len())
    }

    /// The indices in [`index_bytes`](Self::index_bytes) of a message of this scheme and shape.
    ///
    /// # Errors
    /// Bytes that encode no valid indices, or too few bytes.
    pub fn read_indices(&self, bytes: &[u8], shape: Shape) -> Result<Vec<u32>> {
        crate::error::require_count("the indices", bytes.len(), self.index_bytes(shape).len())?;
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

    fn check(&self, shape: Shape) -> Result<()> {
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
                if values.unbiased { drawing + rounding } else { (drawing.sqrt() + rounding.sqrt()).powi(2) }
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
