use super::Cpu;
use crate::error::Result;
use crate::family::{Optim, UpdateRule};
use meshwork_core::Buffer;
use std::ops::Range;

impl Optim for Cpu {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        let size = x.dtype().size();
        x.as_bytes_mut()?[range.start * size..range.end * size].fill(0);
        Ok(())
    }

    fn sum_of_squares(&self, x: &Buffer, range: Range<usize>) -> Result<f64> {
        // Eight lanes, then their sum: an order of its own, whatever the compiler makes of it.
        let mut lanes = [0f64; 8];
        for chunk in x.as_slice::<f32>()?[range].chunks(8) {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(value) * f64::from(value);
            }
        }
        Ok(lanes.iter().sum())
    }

    fn update(
        &self,
        rule: &dyn UpdateRule,
        weights: &mut Buffer,
        grads: &Buffer,
        states: &mut [Buffer],
        range: Range<usize>,
    ) -> Result<()> {
        let mut slices = Vec::with_capacity(states.len());
        for state in states {
            slices.push(&mut state.as_mut_slice::<f32>()?[range.clone()]);
        }
        let weights = &mut weights.as_mut_slice::<f32>()?[range.clone()];
        rule.apply(weights, &grads.as_slice::<f32>()?[range], &mut slices)
    }
}
