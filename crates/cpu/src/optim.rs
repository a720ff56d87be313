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
