use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{FlatParts, Measured, Optim, WholePart, WholeVectors};
use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Rule, Update};
use std::ops::Range;

impl Optim for Meta {
    fn zero(&self, _x: &mut Buffer, _range: Range<usize>) -> Result<()> {
        Ok(())
    }

    fn sum_of_squares(&self, _vectors: &[Buffer], _sums: &mut Buffer, _at: usize) -> Result<()> {
        Ok(())
    }

    fn exact_sum_of_squares(&self, _vectors: &[Buffer], _digits: &mut Buffer, _at: usize) -> Result<()> {
        Ok(())
    }

    fn update(&self, _rule: &Rule, _update: Update, _flats: &mut [FlatParts<'_>]) -> Result<()> {
        Ok(())
    }

    fn measure(
        &self,
        _part: &WholePart<'_>,
        _pass: usize,
        _weights: &Buffer,
        _vectors: WholeVectors<'_>,
        _into: Option<Measured<'_>>,
    ) -> Result<()> {
        Ok(())
    }

    fn divide_by_root(&self, _x: &mut Buffer, _squares: &Buffer, _least: f64) -> Result<()> {
        Ok(())
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        self.alloc(DType::F64, digits.count() / LIMBS)
    }

    fn finish_pass(
        &self,
        _part: &WholePart<'_>,
        _pass: usize,
        _totals: &mut Buffer,
        _at: usize,
        _sets: &mut [Buffer],
    ) -> Result<()> {
        Ok(())
    }

    fn update_whole(&self, _part: &WholePart<'_>, _weights: &mut Buffer, _vectors: WholeVectors<'_>) -> Result<()> {
        Ok(())
    }
}
