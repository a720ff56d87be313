//! The task: sequences of different lengths, and their reversals.

use meshwork::models::language::{TARGETS, TOKENS};
use meshwork::prelude::*;
use std::ops::Range;

/// 0 begins what the decoder reads, and fills sequences up.
pub(crate) const VOCAB: usize = 16;

/// Tokens of the longest sequence.
pub(crate) const SEQ: usize = 8;

/// The fields of what the encoder reads, and of how much of it counts.
pub(crate) const SOURCE: &str = "source";
pub(crate) const LENGTH: &str = "length";

pub(crate) fn fields() -> Vec<Field> {
    let ids = |name, least| Field::ids(name, [SEQ], least..VOCAB as i32);
    vec![ids(SOURCE, 0), ids(TOKENS, 0), ids(TARGETS, i32::MIN), Field::ids(LENGTH, [], 0..SEQ as i32 + 1)]
}

/// Drawn anew for each step.
pub(crate) struct Reversals;

impl BatchSource for Reversals {
    fn batch(&self, step: u64, size: usize, samples: Range<usize>) -> Result<Batch> {
        let (count, [mut source, mut tokens, mut targets, mut lengths]) = (samples.len(), [const { Vec::new() }; 4]);
        for sample in samples {
            let mut random = (step * size as u64 + sample as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut below = |most: usize| {
                random = (random ^ random >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                (random >> 33) as usize % most
            };
            let length = SEQ / 2 + below(SEQ / 2 + 1);
            let drawn: Vec<i32> = (0..length).map(|_| 1 + below(VOCAB - 1) as i32).collect();
            let reversed = || drawn.iter().rev().copied();
            source.extend(drawn.iter().copied().chain([0; SEQ]).take(SEQ));
            tokens.extend([0].into_iter().chain(reversed()).chain([0; SEQ]).take(SEQ));
            targets.extend(reversed().chain([-1; SEQ]).take(SEQ));
            lengths.push(length as i32);
        }
        let batch = Batch::new(count).with(SOURCE, [SEQ], source)?.with(TOKENS, [SEQ], tokens)?;
        batch.with(TARGETS, [SEQ], targets)?.with(LENGTH, [], lengths)
    }
}
