use super::kernels::reduce::sum_of_squares;
use super::prelude::*;
use meshwork_core::exact::{self, LIMBS};
use meshwork_optim::{Rule, Update};
use meshwork_tensor::kernel::{FlatParts, Optim};
use std::iter;
use std::sync::{Mutex, PoisonError};

impl Optim for Cpu {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        // In bytes, because the dtype does not matter.
        let size = x.dtype().size();
        let bytes = &mut x.as_bytes_mut()?[range.start * size..range.end * size];
        for_each(bytes.chunks_mut(8 * PIECE), |piece| piece.fill(0));
        Ok(())
    }

    fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()> {
        for vector in vectors {
            let x = vector.as_slice::<f32>()?;
            let mut parts = vec![0.0; x.len().div_ceil(PIECE)];
            for_each(x.chunks(PIECE).zip(&mut parts), |(x, sum)| *sum = sum_of_squares(x));
            sums.as_mut_slice::<f64>()?[at] += parts.iter().sum::<f64>();
        }
        Ok(())
    }

    fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()> {
        let vectors = vectors.iter().map(Buffer::as_slice).collect::<std::result::Result<Vec<&[f32]>, _>>()?;
        let pieces: Vec<&[f32]> = vectors.into_iter().flat_map(|x| x.chunks(PIECE)).collect();
        let mut parts = vec![[0; LIMBS]; pieces.len()];
        for_each(pieces.into_iter().zip(&mut parts), |(x, part)| exact::add_squares(part, x));
        let mut sum = [0; LIMBS];
        for mut part in parts {
            exact::carry(&mut part); // digits below 2^32, so that no sum overflows
            sum.iter_mut().zip(part).for_each(|(sum, digit)| *sum += digit);
        }
        let all = &mut digits.as_mut_slice::<f64>()?[at..at + LIMBS];
        all.iter_mut().zip(exact::carry(&mut sum)).for_each(|(all, digit)| *all += digit);
        Ok(())
    }

    fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()> {
        flats.iter_mut().try_for_each(|FlatParts { weights, grads, states, ranges }| {
            ranges.iter().try_for_each(|range| update_range(rule, update, (weights, grads, states), range))
        })
    }

    fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()> {
        let norm = squares.as_slice::<f64>()?.iter().sum::<f64>().sqrt().max(least) as f32;
        for_each(x.as_mut_slice::<f32>()?.chunks_mut(PIECE), |piece| piece.iter_mut().for_each(|x| *x /= norm));
        Ok(())
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        let mut sums = self.alloc(DType::F64, digits.count() / LIMBS)?;
        let digits = digits.as_slice::<f64>()?.chunks_exact(LIMBS);
        sums.as_mut_slice::<f64>()?.iter_mut().zip(digits).for_each(|(sum, digits)| *sum = exact::value(digits));
        Ok(sums)
    }
}

/// Updates a range of the vectors in pieces.
fn update_range(
    rule: &Rule,
    update: Update,
    (weights, grads, states): (&mut Buffer, &Buffer, &mut [Buffer]),
    range: &Range<usize>,
) -> Result<()> {
    let mut states_pieces = Vec::with_capacity(states.len());
    for state in states {
        states_pieces.push(state.as_mut_slice::<f32>()?[range.clone()].chunks_mut(PIECE));
    }
    let weights = weights.as_mut_slice::<f32>()?[range.clone()].chunks_mut(PIECE);
    let grads = grads.as_slice::<f32>()?[range.clone()].chunks(PIECE);
    let states = iter::from_fn(|| Some(states_pieces.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()));
    let outcome = Mutex::new(Ok(()));
    for_each(weights.zip(grads).zip(states), |((weights, grads), mut states)| {
        if let Err(error) = rule.update(update, weights, grads, &mut states) {
            *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
        }
    });
    Ok(outcome.into_inner().unwrap_or_else(PoisonError::into_inner)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Float;
    use meshwork_optim::{OptimError, Optimizer};
    use meshwork_tensor::random::{fill_normal, key};

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
            let mut sums = Buffer::from_vec(vec![0.5, 0.0, 0.5]);
            let vector = buffer(&x).slice(range.clone()).unwrap();
            Cpu::default().sum_of_squares(std::slice::from_ref(&vector), &mut sums, 1).unwrap();
            assert_eq!(sums.as_slice::<f64>().unwrap(), [0.5, want, 0.5], "{range:?}");
            // A second call adds to the first.
            Cpu::default().sum_of_squares(&[vector], &mut sums, 1).unwrap();
            assert_eq!(sums.as_slice::<f64>().unwrap(), [0.5, want + want, 0.5], "{range:?}");
        }
    }

    /// The digits of a sum are the same for every cut of the vector, and its value is near the sum in f64.
    #[test]
    fn exact_sums_do_not_depend_on_how_they_are_cut() {
        let mut x = vec![0.0_f32; 100_000];
        fill_normal(key(0, "exact"), 0, &mut x);
        let x = buffer(&x);
        let sum = |cuts: &[usize]| {
            let mut digits = Buffer::from_vec(vec![0.0; LIMBS + 1]);
            let vectors: Vec<Buffer> = cuts.windows(2).map(|cut| x.slice(cut[0]..cut[1]).unwrap()).collect();
            Cpu::default().exact_sum_of_squares(&vectors, &mut digits, 1).unwrap();
            exact::value(&digits.as_slice::<f64>().unwrap()[1..])
        };
        let whole = sum(&[0, 100_000]);
        assert_eq!([sum(&[0, 3, 40_000, 100_000]), sum(&[0, 32_768, 65_537, 100_000])], [whole; 2]);
        let mut near = Buffer::from_vec(vec![0.0_f64]);
        Cpu::default().sum_of_squares(&[x], &mut near, 0).unwrap();
        assert!((whole / near.as_slice::<f64>().unwrap()[0] - 1.0).abs() < 1e-13);
    }

    #[derive(Debug)]
    struct Add;

    impl Optimizer for Add {
        fn name(&self) -> &str {
            "add"
        }

        fn state_names(&self) -> &[&'static str] {
            &["sum", "difference"]
        }

        fn update(
            &self,
            update: Update,
            weights: &mut [f32],
            grads: &[f32],
            states: &mut [&mut [f32]],
        ) -> std::result::Result<(), OptimError> {
            assert_eq!(update.step, 3);
            assert_eq!(
                [grads.len(), states.len(), states[0].len(), states[1].len()],
                [weights.len(), 2, weights.len(), weights.len()]
            );
            for i in 0..weights.len() {
                states[0][i] += grads[i];
                states[1][i] -= grads[i];
                weights[i] += states[0][i];
            }
            let seen = OptimError::Custom { rule: "add".to_owned(), problem: "seen".to_owned() };
            if weights.contains(&1234.0) { Err(seen) } else { Ok(()) }
        }
    }

    /// Pieces of all vectors are updated together, only the ranges are changed, and an error of any piece is returned.
    #[test]
    fn updates_reach_each_element_of_the_ranges_once() {
        let count = 3 * PIECE;
        let grads: Vec<f32> = (0..count).map(|i| (i % 1000) as f32).collect();
        let (mut weights, mut states) =
            (buffer(&vec![0.5; count]), [buffer(&vec![1.0; count]), buffer(&vec![2.0; count])]);
        // The second range begins at the end of the first.
        let ranges = [5..2 * PIECE, 2 * PIECE..2 * PIECE + 9, 3 * PIECE - 1..3 * PIECE];
        let cpu = Cpu::default();
        let (rule, update) = (Rule::custom(Add), Update { step: 3, lr: 1.0, grad_scale: 1.0, decay_factor: 0.0 });
        let vectors = FlatParts { weights: &mut weights, grads: &buffer(&grads), states: &mut states, ranges: &ranges };
        cpu.update(&rule, update, &mut [vectors]).unwrap();
        for (i, &grad) in grads.iter().enumerate() {
            let updated = ranges.iter().any(|range| range.contains(&i));
            let (g, w) = if updated { (grad, 1.5 + grad) } else { (0.0, 0.5) };
            let got = [&weights, &states[0], &states[1]].map(|buffer| buffer.as_slice::<f32>().unwrap()[i]);
            assert_eq!(got, [w, 1.0 + g, 2.0 - g], "{i}");
        }
        weights.as_mut_slice::<f32>().unwrap()[PIECE] = 1234.0 - 1.0 - grads[PIECE] * 2.0;
        let vectors = FlatParts { weights: &mut weights, grads: &buffer(&grads), states: &mut states, ranges: &ranges };
        let refused = cpu.update(&rule, update, &mut [vectors]);
        assert_eq!(refused.unwrap_err().to_string(), "optimizer: add: seen");
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
