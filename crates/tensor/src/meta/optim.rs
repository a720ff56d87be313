use super::Meta;
use crate::error::Result;
use crate::kernel::Optim;
use meshwork_core::Buffer;
use meshwork_optim::{Rule, Update};
use std::ops::Range;

impl Optim for Meta {
    fn zero(&self, _x: &mut Buffer, _range: Range<usize>) -> Result<()> {
        Ok(())
    }

    fn sum_of_squares(
        &self,
        _x: &Buffer,
        _range: Range<usize>,
        _segments: usize,
        _pitch: usize,
        _sums: &mut Buffer,
        _at: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn update(
        &self,
        _rule: &Rule,
        _update: Update,
        _weights: &mut Buffer,
        _grads: &Buffer,
        _states: &mut [Buffer],
        _range: Range<usize>,
    ) -> Result<()> {
        Ok(())
    }
}
