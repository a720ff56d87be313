use super::{Cpu, PIECE};
use crate::error::Result;
use crate::family::{Optim, UpdateRule};
use meshwork_core::Buffer;
use meshwork_core::pool::share;
use meshwork_core::simd::wide;
use std::iter;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Running sums of a piece.
const LANES: usize = 32;

impl Optim for Cpu {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        // Pieces in bytes: the dtype does not matter.
        let size = x.dtype().size();
        let bytes = &mut x.as_bytes_mut()?[range.start * size..range.end * size];
        share(bytes.chunks_mut(8 * PIECE), |piece| piece.fill(0));
        Ok(())
    }

    fn sum_of_squares(&self, x: &Buffer, range: Range<usize>, blocks: usize, pitch: usize) -> Result<f64> {
        let x = x.as_slice::<f32>()?;
        let block = |i: usize| &x[range.start + i * pitch..range.end + i * pitch];
        if range.len() >= PIECE {
            let pieces = || (0..blocks).flat_map(|i| block(i).chunks(PIECE));
            let mut sums = vec![0.0; pieces().count()];
            share(pieces().zip(&mut sums), |(x, sum)| *sum = sum_of_squares(x));
            return Ok(sums.iter().sum());
        }
        // Small ones are shared by many.
        let many = PIECE / range.len().max(1);
        let mut sums = vec![0.0; blocks];
        share(sums.chunks_mut(many).enumerate(), |(first, sums)| {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = sum_of_squares(block(first * many + i));
            }
        });
        Ok(sums.iter().sum())
    }

    fn update(
        &self,
        rule: &dyn UpdateRule,
        weights: &mut Buffer,
        grads: &Buffer,
        states: &mut [Buffer],
        range: Range<usize>,
    ) -> Result<()> {
        let mut states_pieces = Vec::with_capacity(states.len());
        for state in states {
            states_pieces.push(state.as_mut_slice::<f32>()?[range.clone()].chunks_mut(PIECE));
        }
        let weights = weights.as_mut_slice::<f32>()?[range.clone()].chunks_mut(PIECE);
        let grads = grads.as_slice::<f32>()?[range].chunks(PIECE);
        let states = iter::from_fn(|| Some(states_pieces.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()));
        let outcome = Mutex::new(Ok(()));
        share(weights.zip(grads).zip(states), |((weights, grads), mut states)| {
            if let Err(error) = rule.apply(weights, grads, &mut states) {
                *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
            }
        });
        outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `Σ x²` of a piece in f64: element `i` is added to lane `i % 32`, then the lanes one after another.
fn sum_of_squares(x: &[f32]) -> f64 {
    wide(
        #[inline(always)]
        || {
            let mut lanes = [0_f64; LANES];
            let (whole, rest) = x.as_chunks::<LANES>();
            for x in whole {
                for l in 0..LANES {
                    lanes[l] += f64::from(x[l]) * f64::from(x[l]);
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane += f64::from(x) * f64::from(x);
            }
            lanes.iter().sum()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::Float;
    use crate::random::{fill_normal, key};

    fn buffer(x: &[f32]) -> Buffer {
        Buffer::from_slice(x)
    }

    /// The order spelled out with its own numbers, over ranges of one piece and several.
    #[test]
    fn squares_are_summed_in_the_documented_order() {
        let mut x = vec![0.0_f32; 100_000];
        fill_normal(key(0, "squares"), 0, &mut x);
        for range in [0..0, 3..20, 7..1000, 0..32_768, 5..32_774, 0..100_000] {
            let piece = |x: &[f32]| -> f64 {
                let lane = |l: usize| x.iter().skip(l).step_by(32).fold(0.0, |sum, x| sum + x.to_f64() * x.to_f64());
                (0..32).map(lane).sum()
            };
            let want: f64 = x[range.clone()].chunks(32_768).map(piece).sum();
            assert_eq!(Cpu::default().sum_of_squares(&buffer(&x), range.clone(), 1, 0).unwrap(), want, "{range:?}");
        }
    }

    struct Add;

    impl UpdateRule for Add {
        fn apply(&self, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<()> {
            assert_eq!(
                [grads.len(), states.len(), states[0].len(), states[1].len()],
                [weights.len(), 2, weights.len(), weights.len()]
            );
            for i in 0..weights.len() {
                states[0][i] += grads[i];
                states[1][i] -= grads[i];
                weights[i] += states[0][i];
            }
            if weights.contains(&1234.0) { Err(crate::Error::Update("seen".to_owned())) } else { Ok(()) }
        }
    }

    /// Pieces of all vectors go together, the range alone is touched, and an error of any piece comes out.
    #[test]
    fn updates_reach_each_element_of_the_range_once() {
        let count = 3 * PIECE;
        let grads: Vec<f32> = (0..count).map(|i| (i % 1000) as f32).collect();
        let (mut weights, mut states) =
            (buffer(&vec![0.5; count]), [buffer(&vec![1.0; count]), buffer(&vec![2.0; count])]);
        let range = 5..2 * PIECE + 9;
        let cpu = Cpu::default();
        cpu.update(&Add, &mut weights, &buffer(&grads), &mut states, range.clone()).unwrap();
        for (i, &grad) in grads.iter().enumerate() {
            let g = if range.contains(&i) { grad } else { 0.0 };
            let w = if range.contains(&i) { 1.5 + g } else { 0.5 };
            let got = [&weights, &states[0], &states[1]].map(|buffer| buffer.as_slice::<f32>().unwrap()[i]);
            assert_eq!(got, [w, 1.0 + g, 2.0 - g], "{i}");
        }
        weights.as_mut_slice::<f32>().unwrap()[PIECE] = 1234.0 - 1.0 - grads[PIECE] * 2.0;
        let refused = cpu.update(&Add, &mut weights, &buffer(&grads), &mut states, range);
        assert!(refused.unwrap_err().to_string().contains("seen"));
    }

    #[test]
    fn zeros_reach_each_element_of_the_range_and_no_other() {
        let (count, range) = (4 * PIECE, 7..3 * PIECE + 1);
        let mut x = buffer(&vec![0.5; count]);
        Cpu::default().zero(&mut x, range.clone()).unwrap();
        let x = x.as_slice::<f32>().unwrap();
        assert!((0..count).all(|i| x[i] == if range.contains(&i) { 0.0 } else { 0.5 }));
    }
}
