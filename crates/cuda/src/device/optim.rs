use super::CudaDevice;
use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, BufferError, DType};
use meshwork_kernels::{EXACT_PIECE, SQUARES_PIECE};
use meshwork_optim::{AdamWFactors, Rule, Update};
use meshwork_tensor::kernel::{Measured, Optim, WholePart, WholeVectors};
use meshwork_tensor::{Device, Error, Result};
use std::ops::Range;

/// Rules that have kernels.
const RULES: &str = "adamw or sgd";

impl CudaDevice {
    fn no_rule(&self, rule: &Rule) -> Error {
        Error::UpdateRule { device: self.name().to_owned(), rule: rule.name().to_owned(), valid: RULES }
    }

    /// That elements `range` of x are f32, and the bytes before them.
    fn range(&self, op: &'static str, x: &Buffer, range: &Range<usize>) -> Result<usize> {
        self.f32s(op, &[x])?;
        x.slice(range.clone())?;
        Ok(4 * range.start)
    }

    fn f64s(&self, x: &Buffer) -> Result<()> {
        match x.dtype() {
            DType::F64 => Ok(()),
            actual => Err(BufferError::DType { actual, asked: DType::F64 }.into()),
        }
    }
}

impl Optim for CudaDevice {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        x.slice(range.clone())?;
        let size = x.dtype().size();
        let at = self.place_mut("zero", x)?.offset(range.start * size);
        match range.len() * size {
            0 => Ok(()),
            bytes => self.pool.driver.zero(self.pool.compute, at, bytes).map_err(self.failed("zero")),
        }
    }

    fn sum_of_squares(&self, x: &Buffer, range: Range<usize>, sums: &mut Buffer, at: usize) -> Result<()> {
        let op = "sum_of_squares";
        let from = self.place(op, x)?.offset(self.range(op, x, &range)?);
        self.f64s(sums)?;
        sums.slice(at..at + 1)?;
        let pieces = range.len().div_ceil(SQUARES_PIECE as usize);
        let parts = self.scratch(DType::F64, pieces)?;
        let parts = self.place(op, &parts)?;
        let args = [from.into(), range.len().into(), 1_usize.into(), 0_usize.into(), parts.into()];
        self.launch(op, "sum_of_squares", [pieces, 0], &args)?;
        let args = [parts.into(), pieces.into(), self.place_mut(op, sums)?.into(), at.into()];
        self.launch(op, "sum_of_parts", [1, 0], &args)
    }

    fn exact_sum_of_squares(&self, x: &Buffer, range: Range<usize>, digits: &mut Buffer, at: usize) -> Result<()> {
        let op = "exact_sum_of_squares";
        let from = self.place(op, x)?.offset(self.range(op, x, &range)?);
        self.f64s(digits)?;
        digits.slice(at..at + LIMBS)?;
        let pieces = range.len().div_ceil(EXACT_PIECE as usize);
        let parts = self.scratch(DType::I64, pieces * LIMBS)?;
        let parts = self.place(op, &parts)?;
        self.launch(op, "exact_squares", [pieces, 0], &[from.into(), parts.into(), range.len().into(), pieces.into()])?;
        let args = [parts.into(), pieces.into(), self.place_mut(op, digits)?.into(), at.into()];
        self.launch(op, "exact_squares_sum", [1, 0], &args)
    }

    fn update(
        &self,
        rule: &Rule,
        update: Update,
        weights: &mut Buffer,
        grads: &Buffer,
        states: &mut [Buffer],
        range: Range<usize>,
    ) -> Result<()> {
        let op = "update";
        let from = self.range(op, weights, &range)?;
        self.range(op, grads, &range)?;
        let count = range.len();
        let mut kept = Vec::with_capacity(states.len());
        for state in states {
            self.range(op, state, &range)?;
            kept.push(self.place_mut(op, state)?.offset(from).into());
        }
        let (w, g) = (self.place_mut(op, weights)?.offset(from).into(), self.place(op, grads)?.offset(from).into());
        match (rule, &kept[..]) {
            (Rule::AdamW(rule), &[mean, square]) => {
                let AdamWFactors { grad_scale, keep, lr_hat, root_hat, mean_new, square_old, square_new, eps } =
                    rule.factors(update);
                let factors = [grad_scale, keep, lr_hat, root_hat, mean_new, square_old, square_new, eps];
                let args = [&[w, g, mean, square][..], &factors.map(Into::into), &[count.into()]].concat();
                self.launch(op, "adamw", [count, 0], &args)
            }
            (Rule::Sgd(rule), states) => {
                let decay = (rule.weight_decay * update.decay_factor) as f32;
                let factors = [update.grad_scale.into(), decay.into(), (update.lr as f32).into()];
                match *states {
                    [] => self.launch(op, "sgd", [count, 0], &[&[w, g][..], &factors, &[count.into()]].concat()),
                    [buffer] => {
                        let rest = [(rule.momentum as f32).into(), count.into()];
                        let args = [&[w, g, buffer][..], &factors, &rest].concat();
                        self.launch(op, "sgd_momentum", [count, 0], &args)
                    }
                    _ => Err(self.no_rule(&Rule::Sgd(*rule))),
                }
            }
            _ => Err(self.no_rule(rule)),
        }
    }

    fn measure(
        &self,
        part: &WholePart<'_>,
        _pass: usize,
        _weights: &Buffer,
        _vectors: WholeVectors<'_>,
        _into: Option<Measured<'_>>,
    ) -> Result<()> {
        Err(self.no_rule(part.rule))
    }

    fn divide_by_root(&self, x: &mut Buffer, _squares: &Buffer, _least: f64) -> Result<()> {
        Err(self.lacks("divide_by_root", x.dtype()))
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        Err(self.lacks("exact_sums", digits.dtype()))
    }

    fn settle(
        &self,
        part: &WholePart<'_>,
        _pass: usize,
        _totals: &mut Buffer,
        _at: usize,
        _sets: &mut [Buffer],
    ) -> Result<()> {
        Err(self.no_rule(part.rule))
    }

    fn update_whole(&self, part: &WholePart<'_>, _weights: &mut Buffer, _vectors: WholeVectors<'_>) -> Result<()> {
        Err(self.no_rule(part.rule))
    }
}
