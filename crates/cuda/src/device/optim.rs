use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, BufferError, DType};
use meshwork_kernels::{EXACT_PIECE, SQUARES_PIECE};
use meshwork_optim::{AdamWFactors, OnHost, OptimError, Rule, Update};
use meshwork_tensor::kernel::{Measured, Optim, WholePart, WholeVectors};
use meshwork_tensor::{Device, Error, Result};
use std::ops::Range;

/// Rules that have kernels.
const RULES: &str = "adamw, sgd, lamb, adafactor, muon or adam8bit";

impl CudaDevice {
    pub(super) fn no_rule(&self, rule: &Rule) -> Error {
        Error::UpdateRule { device: self.name().to_owned(), rule: rule.name().to_owned(), valid: RULES }
    }

    /// That elements `range` of x are f32, and the bytes before them.
    fn range(&self, op: &'static str, x: &Buffer, range: &Range<usize>) -> Result<usize> {
        self.f32s(op, &[x])?;
        x.slice(range.clone())?;
        Ok(4 * range.start)
    }

    /// Adds Σ x² of `count` numbers to a sum in f64 or to digits.
    pub(super) fn add_squares(
        &self,
        op: &'static str,
        x: Address,
        count: usize,
        to: Address,
        exact: bool,
    ) -> Result<()> {
        let (x, to, first): (Argument, Argument, Argument) = (x.into(), to.into(), 0_usize.into());
        if exact {
            let pieces = count.div_ceil(EXACT_PIECE as usize);
            let parts = self.scratch(DType::I64, pieces * LIMBS)?;
            let parts = self.place(op, &parts)?.into();
            self.launch(op, "exact_squares", [pieces, 0], &[x, parts, count.into(), pieces.into()])?;
            return self.launch(op, "exact_squares_sum", [1, 0], &[parts, pieces.into(), to, first]);
        }
        let pieces = count.div_ceil(SQUARES_PIECE as usize);
        let parts = self.scratch(DType::F64, pieces)?;
        let parts = self.place(op, &parts)?.into();
        self.launch(op, "sum_of_squares", [pieces, 0], &[x, count.into(), 1_usize.into(), first, parts])?;
        self.launch(op, "sum_of_parts", [1, 0], &[parts, pieces.into(), to, first])
    }

    pub(super) fn f64s(&self, x: &Buffer) -> Result<()> {
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
        let to = self.place_mut(op, sums)?.offset(8 * at);
        self.add_squares(op, from, range.len(), to, false)
    }

    fn exact_sum_of_squares(&self, x: &Buffer, range: Range<usize>, digits: &mut Buffer, at: usize) -> Result<()> {
        let op = "exact_sum_of_squares";
        let from = self.place(op, x)?.offset(self.range(op, x, &range)?);
        self.f64s(digits)?;
        digits.slice(at..at + LIMBS)?;
        let to = self.place_mut(op, digits)?.offset(8 * at);
        self.add_squares(op, from, range.len(), to, true)
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
            (rule, _) => match rule.on_host() {
                OnHost::Whole(whole) if !rule.is_users() => {
                    Err(OptimError::NeedsWhole { rule: whole.name().to_owned() }.into())
                }
                _ => Err(self.no_rule(rule)),
            },
        }
    }

    fn measure(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        weights: &Buffer,
        vectors: WholeVectors<'_>,
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        self.measure_whole(part, pass, weights, vectors, into)
    }

    fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()> {
        let (op, count) = ("divide_by_root", x.count());
        self.f32s(op, &[x])?;
        let args = [self.place_mut(op, x)?.into(), self.doubles(op, squares)?, least.into(), count.into()];
        self.launch(op, "divide_by_root", [count, 0], &args)
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        let (op, count) = ("exact_sums", digits.count() / LIMBS);
        let sums = self.alloc(DType::F64, count)?;
        let args = [self.doubles(op, digits)?, self.place(op, &sums)?.into(), count.into()];
        self.launch(op, "exact_values", [count, 0], &args)?;
        Ok(sums)
    }

    fn settle(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        self.settle_whole(part, pass, totals, at, sets)
    }

    fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()> {
        self.update_of_whole(part, weights, vectors)
    }
}
