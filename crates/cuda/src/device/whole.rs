//! Update rules that read whole matrices, on local elements: LAMB, Adafactor, Muon, 8-bit Adam.
//!
//! Elements are numbered run by run; a table on the device says where each lies. A rule's measures of
//! elements are written to scratch memory, and then added up for each set.

use super::prelude::*;
use super::vectors::Vector;
use meshwork_core::exact::LIMBS;
use meshwork_optim::{Adam8bit, AdamWFactors, Lamb, LambFactors, Over, ParamShape, Pass, Rule};
use meshwork_tensor::kernel::{Measured, WholeOptim, WholePart, WholeVectors};

const OP: &str = "update";

/// The numbers of 8-bit codes, written to the device once.
#[derive(Debug, Default)]
pub(super) struct Codes(Mutex<Option<Buffer>>);

/// The elements of a part, on the device, numbered matrix by matrix.
struct Elements {
    table: Buffer,
    runs: usize,
    /// The number of elements before each matrix, then the total number.
    ends: Vec<usize>,
}

impl Elements {
    fn count(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }
}

/// The table of elements, as an argument of every kernel.
impl Operand for &Elements {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        self.table.add_to(operands)?;
        self.runs.add_to(operands)
    }
}

impl CudaDevice {
    /// The runs of a part: `kernels/cuda/runs.cuh`. Padding is in no run.
    fn elements_of(&self, part: &WholePart<'_>) -> Result<Elements> {
        let (mut runs, shape) = (Vec::new(), &part.shape);
        part.for_each_run(|first, range| runs.push((first, range)));
        runs.sort_unstable_by_key(|(first, _)| *first); // for matrices with interleaved rows
        let (mut starts, mut ends, mut count) = (vec![], vec![0], 0);
        for (first, range) in &runs {
            starts.push(count as i64);
            while first + range.len() > ends.len() * shape.each() {
                ends.push(count + (ends.len() * shape.each()).saturating_sub(*first));
            }
            count += range.len();
        }
        starts.push(count as i64);
        ends.resize(shape.matrices, count);
        ends.push(count);
        let firsts = runs.iter().map(|(first, _)| *first as i64);
        let places = runs.iter().map(|(_, range)| range.start as i64);
        let numbers = starts.into_iter().chain(firsts).chain(places).collect();
        Ok(Elements { table: self.kept(numbers)?, runs: runs.len(), ends })
    }

    /// The codes of 8-bit Adam: numbers and middles for means, then for squares.
    fn codes(&self) -> Result<Address> {
        let mut codes = self.codes.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(codes) = &*codes {
            return self.place(OP, codes);
        }
        let [means, squares] = Adam8bit::codes_of_moments();
        let numbers = [&means.values[..], &means.middles, &squares.values, &squares.middles].concat();
        let uploaded = self.uploaded(&Buffer::from_slice(&numbers), false)?;
        self.place(OP, codes.insert(uploaded))
    }

    fn states<'a, const N: usize>(
        &self,
        part: &WholePart<'_>,
        states: &'a mut [Buffer],
    ) -> Result<[&'a mut Buffer; N]> {
        let states: Option<&mut [Buffer; N]> = states.try_into().ok();
        states.map(<[Buffer; N]>::each_mut).ok_or_else(|| self.no_rule(part.rule))
    }

    /// Where measure number `at` of a pass begins, in f64.
    fn total(&self, shape: &ParamShape, over: &[Over], totals: &[Buffer], pass: usize, at: usize) -> Result<Address> {
        let Some(totals) = totals.get(pass) else {
            return Err(self.lacks("update before its passes", DType::F64));
        };
        self.f64s(totals)?;
        let before: usize = over[..at].iter().map(|over| over.count(shape)).sum();
        Ok(self.place(OP, totals)?.offset(8 * before))
    }

    /// Adds the measures of elements, a vector for each of `over`.
    fn add_measures(
        &self,
        shape: &ParamShape,
        elements: &Elements,
        over: &Pass,
        of: &[Address],
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        let (buffer, at, exact) = match into {
            Some(Measured::Sums(sums, at)) => (sums, at, false),
            Some(Measured::Digits(digits, at)) => (digits, at, true),
            _ => return Ok(()),
        };
        self.f64s(buffer)?;
        let (mut to, width) = (self.place_mut(OP, buffer)?.offset(8 * at), if exact { LIMBS } else { 1 });
        let largest = matches!(over, Pass::Largest(_));
        for (&over, &x) in over.over().iter().zip(of) {
            let sets = over.count(shape);
            let (length, rows) = match over {
                Over::Matrix => (shape.each(), 0),
                Over::Rows => (shape.columns, 0),
                Over::Columns => (shape.columns, shape.rows),
                Over::Blocks(length) => (length.max(1), 0),
            };
            if over == Over::Matrix && !largest {
                for (matrix, held) in elements.ends.windows(2).enumerate() {
                    let x = Vector { places: vec![x.offset(4 * held[0])], count: held[1] - held[0] };
                    self.add_squares(OP, vec![x], to.offset(8 * width * matrix), exact)?;
                }
            } else {
                let kernel = match (largest, exact) {
                    (true, _) => "set_largest",
                    (false, true) => "set_squares_exact",
                    (false, false) => "set_squares",
                };
                launch!(self, OP, kernel, [sets, 0]; x, elements, length, rows, shape.each(), to, sets)?;
            }
            to = to.offset(8 * width * sets);
        }
        Ok(())
    }

    /// The totals of the two measures of the first pass: of rows and columns, or of means and squares.
    fn factors(&self, shape: &ParamShape, over: &[Over], totals: &[Buffer]) -> Result<[Address; 2]> {
        Ok([self.total(shape, over, totals, 0, 0)?, self.total(shape, over, totals, 0, 1)?])
    }

    /// The largest values of blocks of means and squares.
    fn largest<'a>(&self, part: &WholePart<'_>, sets: &'a [Buffer]) -> Result<[&'a Buffer; 2]> {
        if let [mean, square] = sets { Ok([mean, square]) } else { Err(self.no_rule(part.rule)) }
    }
}

impl WholeOptim for CudaDevice {
    fn measure(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        weights: &Buffer,
        vectors: WholeVectors<'_>,
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        let WholeVectors { grads, states, sets, totals, .. } = vectors;
        let (shape, elements) = (&part.shape, self.elements_of(part)?);
        if elements.count() == 0 {
            return Ok(());
        }
        let (count, sizes, scale) = (elements.count(), [elements.count(), 0], part.update.grad_scale);
        // Two numbers per element, or one number twice.
        let scratch = self.scratch(DType::F32, 2 * count)?;
        let [first, second] = [self.place(OP, &scratch)?, self.place(OP, &scratch)?.offset(4 * count)];
        let rule = part.rule.for_shape(shape);
        let passes = rule.passes(shape);
        let mut measured = [first, second];
        match rule {
            Rule::Lamb(rule) => {
                let states = self.states::<2>(part, states)?;
                let LambFactors { mean_new, square_old, square_new, .. } = rule.factors(&part.update);
                launch!(self, OP, "lamb_measure", sizes;
                    &elements, weights, grads, states, scale, mean_new, square_old, square_new, steps_of(rule, part),
                    first, second, count
                )?;
            }
            Rule::Adafactor(_) if shape.is_matrix() && pass == 0 => {
                launch!(self, OP, "adafactor_scaled", sizes; &elements, grads, scale, first, count)?;
                measured = [first; 2];
            }
            Rule::Adafactor(_) if shape.is_matrix() => {
                let factors = self.factors(shape, passes[0].over(), totals)?;
                launch!(self, OP, "adafactor_measure", sizes;
                    &elements, weights, grads, scale, factors, shape.rows, shape.columns, first, second, count
                )?;
            }
            Rule::Adafactor(rule) => {
                let [variance] = self.states::<1>(part, states)?;
                let (share, eps) = (rule.new_share(&part.update) as f32, rule.eps as f32);
                launch!(self, OP, "adafactor_vector_measure", sizes;
                    &elements, weights, grads, variance, scale, share, eps, first, second, count
                )?;
            }
            Rule::Muon(rule) => {
                let [mean] = self.states::<1>(part, states)?;
                let values = match into {
                    Some(Measured::Values(values)) => self.place_mut(OP, values)?,
                    _ => Address::NULL,
                };
                let (old, now) = (rule.momentum as f32, (1.0 - rule.momentum) as f32);
                return launch!(self, OP, "muon_measure", sizes; &elements, grads, mean, scale, old, now, values, count);
            }
            Rule::Adam8bit(rule) => {
                let codes = self.states::<2>(part, states)?;
                launch!(self, OP, "adam8bit_measure", sizes;
                    &elements, grads, codes, self.largest(part, sets)?, self.codes()?, rule.block, shape.each(), scale,
                    moments_of(rule, part), first, second, count
                )?;
            }
            other => return Err(self.no_rule(other)),
        }
        match passes.get(pass) {
            Some(pass) => self.add_measures(shape, &elements, pass, &measured, into),
            None => Ok(()),
        }
    }

    fn finish_pass(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        self.f64s(totals)?;
        let (shape, rule, matrices) = (&part.shape, part.rule.for_shape(&part.shape), part.shape.matrices);
        let to = self.place_mut(OP, totals)?.offset(8 * at);
        match rule {
            Rule::Lamb(_) => launch!(self, OP, "lamb_settle", [matrices, 0]; to, matrices),
            Rule::Adafactor(rule) if shape.is_matrix() && pass == 0 => {
                let [rows, columns] = self.states::<2>(part, sets)?;
                let [of_rows, of_columns] = [Over::Rows, Over::Columns].map(|over| over.count(shape));
                let of_columns_at = to.offset(8 * of_rows);
                let share = rule.new_share(&part.update);
                for (variance, totals, terms, count) in
                    [(rows, to, shape.columns, of_rows), (columns, of_columns_at, shape.rows, of_columns)]
                {
                    launch!(self, OP, "adafactor_means", [count, 0];
                        variance, totals, terms as f64, share, rule.eps, count
                    )?;
                }
                let means = self.scratch(DType::F64, matrices)?;
                launch!(self, OP, "adafactor_row_means", [matrices, 0]; to, shape.rows, &means, matrices)?;
                launch!(self, OP, "adafactor_row_factors", [of_rows, 0]; to, &means, shape.rows, of_rows)?;
                launch!(self, OP, "adafactor_column_factors", [of_columns, 0]; of_columns_at, of_columns)
            }
            Rule::Adafactor(rule) => {
                let lr = rule.largest_step(&part.update);
                launch!(self, OP, "adafactor_settle", [matrices, 0];
                    to, shape.each() as f64, rule.relative_step, lr, rule.eps_scale, rule.clip_threshold, matrices
                )
            }
            Rule::Adam8bit(rule) => {
                let blocks = Over::Blocks(rule.block).count(shape);
                for (at, largest) in self.states::<2>(part, sets)?.into_iter().enumerate() {
                    launch!(self, OP, "adam8bit_settle", [blocks, 0]; largest, to.offset(8 * at * blocks), blocks)?;
                }
                Ok(())
            }
            Rule::Muon(_) => Ok(()),
            other => Err(self.no_rule(other)),
        }
    }

    fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()> {
        let WholeVectors { grads, states, sets, totals, gathered } = vectors;
        let (shape, elements) = (&part.shape, self.elements_of(part)?);
        if elements.count() == 0 {
            return Ok(());
        }
        let (count, sizes, scale) = (elements.count(), [elements.count(), 0], part.update.grad_scale);
        let rule = part.rule.for_shape(shape);
        let passes = rule.passes(shape);
        let total = |pass: usize| {
            let over = passes.get(pass).map_or(&[][..], Pass::over);
            self.total(shape, over, totals, pass, 0)
        };
        match rule {
            Rule::Lamb(rule) => {
                let states = self.states::<2>(part, states)?;
                launch!(self, OP, "lamb_update", sizes;
                    &elements, weights, states, total(0)?, shape.each(), part.update.lr, steps_of(rule, part), count
                )
            }
            Rule::Adafactor(rule) if shape.is_matrix() => {
                let (factors, keep) = (self.factors(shape, passes[0].over(), totals)?, keep(part, rule.weight_decay));
                launch!(self, OP, "adafactor_update", sizes;
                    &elements, weights, grads, scale, factors, shape.rows, shape.columns, total(1)?, keep, count
                )
            }
            Rule::Adafactor(rule) => {
                let ([variance], keep) = (self.states::<1>(part, states)?, keep(part, rule.weight_decay));
                launch!(self, OP, "adafactor_vector_update", sizes;
                    &elements, weights, grads, variance, scale, total(0)?, shape.each(), keep, count
                )
            }
            Rule::Muon(rule) => {
                let missing = || self.lacks("update without its matrices", DType::F32);
                let (matrices, keep) = (gathered.ok_or_else(missing)?, keep(part, rule.weight_decay));
                let size = rule.size(&part.update, shape);
                launch!(self, OP, "muon_update", sizes; &elements, weights, matrices, keep, size, count)
            }
            Rule::Adam8bit(rule) => {
                let (codes, before) = (self.states::<2>(part, states)?, self.factors(shape, passes[0].over(), totals)?);
                let zeros = Adam8bit::codes_of_moments().map(|code| i32::from(code.zero));
                let AdamWFactors { keep, lr_hat, root_hat, eps, .. } = rule.adamw.factors(part.update);
                launch!(self, OP, "adam8bit_update", sizes;
                    &elements, weights, grads, codes, self.largest(part, sets)?, before, self.codes()?, zeros, rule.block,
                    shape.each(), scale, moments_of(rule, part), keep, lr_hat, root_hat, eps, count
                )
            }
            other => Err(self.no_rule(other)),
        }
    }
}

/// The factors that make the step of LAMB from the moments.
fn steps_of(rule: &Lamb, part: &WholePart<'_>) -> [f32; 4] {
    let LambFactors { mean_hat, root_hat, eps, decay, .. } = rule.factors(&part.update);
    [mean_hat, root_hat, eps, decay]
}

/// The factors of the moments of 8-bit Adam.
fn moments_of(rule: &Adam8bit, part: &WholePart<'_>) -> [f32; 3] {
    let AdamWFactors { mean_new, square_old, square_new, .. } = rule.adamw.factors(part.update);
    [mean_new, square_old, square_new]
}

/// The factor by which weight decay scales a weight.
fn keep(part: &WholePart<'_>, weight_decay: f64) -> f32 {
    (1.0 - part.update.lr * (weight_decay * part.update.decay_factor)) as f32
}
