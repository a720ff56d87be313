use super::prelude::*;
use super::vectors::{Vector, Vectors};
use meshwork_core::exact::LIMBS;
use meshwork_kernels::{EXACT_PIECE, SQUARES_PIECE, UPDATE_PIECE};
use meshwork_optim::{AdamWFactors, OnHost, OptimError, Rule, Update};
use meshwork_tensor::kernel::{FlatParts, Optim};

/// Rules that have kernels.
const RULES: &str = "adamw, sgd, lamb, adafactor, muon or adam8bit";

impl CudaDevice {
    pub(super) fn no_rule(&self, rule: &Rule) -> Error {
        Error::UpdateRule { device: self.name().to_owned(), rule: rule.name().to_owned(), valid: RULES }
    }

    /// Adds Σ x² of vectors, given by their places and counts, to a sum in f64 or to digits.
    pub(super) fn add_squares(&self, op: &'static str, vectors: Vec<Vector>, to: Address, exact: bool) -> Result<()> {
        let piece = if exact { EXACT_PIECE } else { SQUARES_PIECE };
        let Some(vectors) = self.vectors(vectors, piece)? else { return Ok(()) };
        let Vectors { count, pieces, .. } = vectors;
        if exact {
            let parts = self.scratch(DType::I64, pieces * LIMBS)?;
            launch!(self, op, "exact_squares", [pieces, 0]; &vectors, &parts)?;
            return launch!(self, op, "exact_squares_sum", [1, 0]; &parts, pieces, to);
        }
        let parts = self.scratch(DType::F64, pieces + count)?;
        launch!(self, op, "sum_of_squares", [pieces, 0]; &vectors, &parts)?;
        let (starts, totals) = (self.first_pieces(op, &vectors)?, self.place(op, &parts)?.offset(8 * pieces));
        launch!(self, op, "sum_of_parts", [1, 1]; &parts, starts, count, totals, to)
    }

    /// Vectors of f32.
    fn counted(&self, op: &'static str, vectors: &[Buffer]) -> Result<Vec<Vector>> {
        self.f32s(op, &vectors.iter().collect::<Vec<_>>())?;
        let vector = |x: &Buffer| Ok(Vector { places: vec![self.place(op, x)?], count: x.count() });
        vectors.iter().map(vector).collect()
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

    fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()> {
        let op = "sum_of_squares";
        self.f64s(sums)?;
        sums.slice(at..at + 1)?;
        let to = self.place_mut(op, sums)?.offset(8 * at);
        self.add_squares(op, self.counted(op, vectors)?, to, false)
    }

    fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()> {
        let op = "exact_sum_of_squares";
        self.f64s(digits)?;
        digits.slice(at..at + LIMBS)?;
        let to = self.place_mut(op, digits)?.offset(8 * at);
        self.add_squares(op, self.counted(op, vectors)?, to, true)
    }

    fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()> {
        let op = "update";
        let (kernel, states, numbers) = match rule {
            Rule::AdamW(rule) => {
                let AdamWFactors { grad_scale, keep, lr_hat, root_hat, mean_new, square_old, square_new, eps } =
                    rule.factors(update);
                ("adamw", 2, vec![grad_scale, keep, lr_hat, root_hat, mean_new, square_old, square_new, eps])
            }
            Rule::Sgd(rule) => {
                let decay = (rule.weight_decay * update.decay_factor) as f32;
                let factors = [update.grad_scale, decay, update.lr as f32, rule.momentum as f32];
                match rule.momentum == 0.0 {
                    true => ("sgd", 0, factors[..3].to_vec()),
                    false => ("sgd_momentum", 1, factors.to_vec()),
                }
            }
            rule => match rule.on_host() {
                OnHost::Whole(whole) if !rule.is_users() => {
                    return Err(OptimError::NeedsWhole { rule: whole.name().to_owned() }.into());
                }
                _ => return Err(self.no_rule(rule)),
            },
        };
        let mut vectors = Vec::new();
        for FlatParts { weights, grads, states: kept, ranges } in flats {
            if kept.len() != states {
                let rule = rule.name().to_owned();
                return Err(OptimError::States { rule, given: kept.len(), expected: states }.into());
            }
            let all: Vec<&Buffer> = [&**weights, grads].into_iter().chain(kept.iter()).collect();
            self.f32s(op, &all)?;
            for (range, x) in ranges.iter().flat_map(|range| all.iter().map(move |x| (range, x))) {
                x.slice(range.clone())?;
            }
            let mut places = vec![self.place_mut(op, weights)?, self.place(op, grads)?];
            for state in kept.iter_mut() {
                places.push(self.place_mut(op, state)?);
            }
            let from = |range: &Range<usize>| places.iter().map(|place| place.offset(4 * range.start)).collect();
            vectors.extend(ranges.iter().map(|range| Vector { places: from(range), count: range.len() }));
        }
        let Some(vectors) = self.vectors(vectors, UPDATE_PIECE)? else { return Ok(()) };
        launch!(self, op, kernel, [vectors.pieces * UPDATE_PIECE as usize, 0]; &vectors, numbers)
    }

    fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()> {
        let count = x.count();
        launch!(self, "divide_by_root", "divide_by_root", [count, 0]; x, squares, least, count)
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        let count = digits.count() / LIMBS;
        let sums = self.alloc(DType::F64, count)?;
        launch!(self, "exact_sums", "exact_values", [count, 0]; digits, &sums, count)?;
        Ok(sums)
    }
}
