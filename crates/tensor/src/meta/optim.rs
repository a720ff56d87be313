use super::Meta;
use crate::error::Result;
use crate::family::{Optim, UpdateRule};
use meshwork_core::Buffer;
use std::ops::Range;

impl Optim for Meta {
    fn zero(&self, _x: &mut Buffer, _range: Range<usize>) -> Result<()> {
        Ok(())
    }

    fn sum_of_squares(&self, _x: &Buffer, _range: Range<usize>, _blocks: usize, _pitch: usize) -> Result<f64> {
        Ok(0.0)
    }

    fn update(
        &self,
        _rule: &dyn UpdateRule,
        _weights: &mut Buffer,
        _grads: &Buffer,
        _states: &mut [Buffer],
        _range: Range<usize>,
    ) -> Result<()> {
        Ok(())
    }
}
