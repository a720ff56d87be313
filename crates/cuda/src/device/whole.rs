//! Update rules that read whole matrices, on the elements that lie here: LAMB, Adafactor, Muon, 8-bit Adam.
//!
//! Elements are numbered run by run; a table on the device says where each lies. What a rule measures of each element
//! is written to scratch memory, and then added up for each set. More than 400 lines: four rules, each with all
//! arguments of its kernels.

use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::exact::LIMBS;
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Adam8bit, AdamWFactors, Lamb, LambFactors, Over, ParamShape, Pass, Rule};
use meshwork_tensor::Result;
use meshwork_tensor::kernel::{Measured, WholePart, WholeVectors};
use std::sync::{Mutex, PoisonError};

const OP: &str = "update";

/// The numbers of 8-bit codes, written to the device once.
#[derive(Debug, Default)]
pub(super) struct Codes(Mutex<Option<Buffer>>);

/// The elements of a part, on the device, counted matrix by matrix.
struct Elements {
    table: Buffer,
    runs: usize,
    /// How many lie in front of each matrix, and after the last how many there are.
    ends: Vec<usize>,
}

impl Elements {
    fn count(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }
}

impl CudaDevice {
    /// The runs of a part: `kernels/cuda/runs.cuh`. Padding is in none.
    fn elements_of(&self, part: &WholePart<'_>) -> Result<Elements> {
        let (mut runs, shape) = (Vec::new(), &part.shape);
        part.for_each_run(|first, range| runs.push((first, range)));
        runs.sort_unstable_by_key(|(first, _)| *first); // of matrices whose rows take turns
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

    /// The table of elements, as every kernel takes it.
    fn runs(&self, elements: &Elements) -> Result<[Argument; 2]> {
        Ok([self.place(OP, &elements.table)?.into(), elements.runs.into()])
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

    fn states<const N: usize>(&self, part: &WholePart<'_>, states: &mut [Buffer]) -> Result<[Address; N]> {
        let mut places = [Address::NULL; N];
        if states.len() != N {
            return Err(self.no_rule(part.rule));
        }
        for (place, state) in places.iter_mut().zip(states) {
            *place = self.place_mut(OP, state)?;
        }
        Ok(places)
    }

    /// Where measure `at` of those of a pass begins, in f64.
    fn total(&self, shape: &ParamShape, over: &[Over], totals: &[Buffer], pass: usize, at: usize) -> Result<Address> {
        let Some(totals) = totals.get(pass) else {
            return Err(self.lacks("update before its passes", DType::F64));
        };
        self.f64s(totals)?;
        let before: usize = over[..at].iter().map(|over| over.count(shape)).sum();
        Ok(self.place(OP, totals)?.offset(8 * before))
    }

    /// Adds what was measured, a vector for each of `over`, by the numbers of elements.
    fn add_measures(
        &self,
        (shape, elements): (&ParamShape, &Elements),
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
                    let (x, to) = (x.offset(4 * held[0]), to.offset(8 * width * matrix));
                    self.add_squares(OP, vec![(vec![x], held[1] - held[0])], to, exact)?;
                }
            } else {
                let kernel = match (largest, exact) {
                    (true, _) => "set_largest",
                    (false, true) => "set_squares_exact",
                    (false, false) => "set_squares",
                };
                let rest = [length.into(), rows.into(), shape.each().into(), to.into(), sets.into()];
                self.launch(OP, kernel, [sets, 0], &[&[x.into()][..], &self.runs(elements)?, &rest].concat())?;
            }
            to = to.offset(8 * width * sets);
        }
        Ok(())
    }

    pub(super) fn measure_whole(
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
        self.f32s(OP, &[weights, grads])?;
        let runs = self.runs(&elements)?;
        let (count, scale): (Argument, Argument) = (elements.count().into(), part.update.grad_scale.into());
        let (w, g) = (self.place(OP, weights)?.into(), self.place(OP, grads)?.into());
        let scratch = self.scratch(DType::F32, 2 * elements.count())?;
        let first = self.place(OP, &scratch)?;
        let numbers = [first, first.offset(4 * elements.count())];
        let [to, second] = numbers.map(Argument::from);
        let rule = part.rule.of(shape);
        let passes = rule.passes(shape);
        // Two numbers of each element, or one twice.
        let measured = match rule {
            Rule::Lamb(rule) => {
                let states = self.states::<2>(part, states)?.map(Argument::from);
                let rest = [scale, to, second, count];
                let LambFactors { mean_new, square_old, square_new, .. } = rule.factors(&part.update);
                let moments = [mean_new, square_old, square_new].map(Argument::from);
                let args =
                    [&runs[..], &[w, g], &states, &rest[..1], &moments, &steps_of(rule, part), &rest[1..]].concat();
                self.launch(OP, "lamb_measure", [elements.count(), 0], &args)?;
                numbers
            }
            Rule::Adafactor(_) if shape.is_matrix() && pass == 0 => {
                let args = [&runs[..], &[g, scale, to, count]].concat();
                self.launch(OP, "adafactor_scaled", [elements.count(), 0], &args)?;
                [first; 2]
            }
            Rule::Adafactor(_) if shape.is_matrix() => {
                let factors = self.factors(shape, passes[0].over(), totals)?;
                let args = [&runs[..], &[w, g, scale], &factors, &[to, second, count]].concat();
                self.launch(OP, "adafactor_measure", [elements.count(), 0], &args)?;
                numbers
            }
            Rule::Adafactor(rule) => {
                let [variance] = self.states::<1>(part, states)?;
                let (share, eps) = (rule.new_share(&part.update) as f32, rule.eps as f32);
                let rest = [variance.into(), scale, share.into(), eps.into(), to, second, count];
                let args = [&runs[..], &[w, g], &rest].concat();
                self.launch(OP, "adafactor_vector_measure", [elements.count(), 0], &args)?;
                numbers
            }
            Rule::Muon(rule) => {
                let [mean] = self.states::<1>(part, states)?;
                let values = match into {
                    Some(Measured::Values(values)) => self.place_mut(OP, values)?,
                    _ => Address::NULL,
                };
                let [old, now] = [rule.momentum as f32, (1.0 - rule.momentum) as f32].map(Argument::from);
                let args = [&runs[..], &[g, mean.into(), scale, old, now, values.into(), count]].concat();
                return self.launch(OP, "muon_measure", [elements.count(), 0], &args);
            }
            Rule::Adam8bit(rule) => {
                let codes = self.states::<2>(part, states)?.map(Argument::from);
                let largest = self.largest(part, sets)?;
                let block = [self.codes()?.into(), rule.block.into(), shape.each().into(), scale];
                let args = [&runs[..], &[g], &codes, &largest, &block, &moments_of(rule, part), &[to, second, count]];
                self.launch(OP, "adam8bit_measure", [elements.count(), 0], &args.concat())?;
                numbers
            }
            other => return Err(self.no_rule(other)),
        };
        match passes.get(pass) {
            Some(pass) => self.add_measures((shape, &elements), pass, &measured, into),
            None => Ok(()),
        }
    }

    /// The factors of rows and of columns, and what rows and columns are.
    fn factors(&self, shape: &ParamShape, over: &[Over], totals: &[Buffer]) -> Result<[Argument; 4]> {
        let of = |at| self.total(shape, over, totals, 0, at);
        Ok([of(0)?.into(), of(1)?.into(), shape.rows.into(), shape.columns.into()])
    }

    /// The largest values of blocks of means and squares.
    fn largest(&self, part: &WholePart<'_>, sets: &[Buffer]) -> Result<[Argument; 2]> {
        match sets {
            [mean, square] => Ok([self.place(OP, mean)?.into(), self.place(OP, square)?.into()]),
            _ => Err(self.no_rule(part.rule)),
        }
    }

    pub(super) fn settle_whole(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        self.f64s(totals)?;
        let (shape, rule) = (&part.shape, part.rule.of(&part.shape));
        let to = self.place_mut(OP, totals)?.offset(8 * at);
        match rule {
            Rule::Lamb(_) => self.launch(OP, "lamb_settle", [shape.matrices, 0], &[to.into(), shape.matrices.into()]),
            Rule::Adafactor(rule) if shape.is_matrix() && pass == 0 => {
                let [rows, columns] = self.states::<2>(part, sets)?;
                let [of_rows, of_columns] = [Over::Rows, Over::Columns].map(|over| over.count(shape));
                let of_columns_at = to.offset(8 * of_rows);
                let share = rule.new_share(&part.update);
                for (variance, totals, terms, count) in
                    [(rows, to, shape.columns, of_rows), (columns, of_columns_at, shape.rows, of_columns)]
                {
                    let numbers = [terms as f64, share, rule.eps].map(Argument::from);
                    let args = [&[variance.into(), totals.into()][..], &numbers, &[count.into()]].concat();
                    self.launch(OP, "adafactor_means", [count, 0], &args)?;
                }
                let means = self.scratch(DType::F64, shape.matrices)?;
                let (means, rows): (Argument, Argument) = (self.place(OP, &means)?.into(), shape.rows.into());
                let args = [to.into(), rows, means, shape.matrices.into()];
                self.launch(OP, "adafactor_row_means", [shape.matrices, 0], &args)?;
                let args = [to.into(), means, rows, of_rows.into()];
                self.launch(OP, "adafactor_row_factors", [of_rows, 0], &args)?;
                self.launch(OP, "adafactor_column_factors", [of_columns, 0], &[of_columns_at.into(), of_columns.into()])
            }
            Rule::Adafactor(rule) => {
                let lr = rule.largest_step(&part.update);
                let args = [
                    to.into(),
                    (shape.each() as f64).into(),
                    i32::from(rule.relative_step).into(),
                    lr.into(),
                    rule.eps_scale.into(),
                    rule.clip_threshold.into(),
                    shape.matrices.into(),
                ];
                self.launch(OP, "adafactor_settle", [shape.matrices, 0], &args)
            }
            Rule::Adam8bit(rule) => {
                let blocks = Over::Blocks(rule.block).count(shape);
                for (at, largest) in self.states::<2>(part, sets)?.into_iter().enumerate() {
                    let args = [largest.into(), to.offset(8 * at * blocks).into(), blocks.into()];
                    self.launch(OP, "adam8bit_settle", [blocks, 0], &args)?;
                }
                Ok(())
            }
            Rule::Muon(_) => Ok(()),
            other => Err(self.no_rule(other)),
        }
    }

    pub(super) fn update_of_whole(
        &self,
        part: &WholePart<'_>,
        weights: &mut Buffer,
        vectors: WholeVectors<'_>,
    ) -> Result<()> {
        let WholeVectors { grads, states, sets, totals, gathered } = vectors;
        let (shape, elements) = (&part.shape, self.elements_of(part)?);
        if elements.count() == 0 {
            return Ok(());
        }
        self.f32s(OP, &[weights, grads])?;
        let runs = self.runs(&elements)?;
        let (count, scale): (Argument, Argument) = (elements.count().into(), part.update.grad_scale.into());
        let (w, g) = (self.place_mut(OP, weights)?.into(), self.place(OP, grads)?.into());
        let rule = part.rule.of(shape);
        let passes = rule.passes(shape);
        let first = |pass: usize| {
            let over = passes.get(pass).map_or(&[][..], Pass::over);
            Ok::<Argument, meshwork_tensor::Error>(self.total(shape, over, totals, pass, 0)?.into())
        };
        let sizes = [elements.count(), 0];
        match rule {
            Rule::Lamb(rule) => {
                let states = self.states::<2>(part, states)?.map(Argument::from);
                let ratio = [first(0)?, shape.each().into(), part.update.lr.into()];
                let args = [&runs[..], &[w], &states, &ratio, &steps_of(rule, part), &[count]].concat();
                self.launch(OP, "lamb_update", sizes, &args)
            }
            Rule::Adafactor(rule) => {
                let keep = keep(part, rule.weight_decay);
                if shape.is_matrix() {
                    let factors = self.factors(shape, passes[0].over(), totals)?;
                    let args = [&runs[..], &[w, g, scale], &factors, &[first(1)?, keep, count]].concat();
                    return self.launch(OP, "adafactor_update", sizes, &args);
                }
                let [variance] = self.states::<1>(part, states)?;
                let args =
                    [&runs[..], &[w, g, variance.into(), scale, first(0)?, shape.each().into(), keep, count]].concat();
                self.launch(OP, "adafactor_vector_update", sizes, &args)
            }
            Rule::Muon(rule) => {
                let size: Argument = rule.size(&part.update, shape).into();
                let matrices = self.place_or_none(OP, gathered)?;
                if matrices.place().is_none() {
                    return Err(self.lacks("update without its matrices", DType::F32));
                }
                let args = [&runs[..], &[w, matrices, keep(part, rule.weight_decay), size, count]].concat();
                self.launch(OP, "muon_update", sizes, &args)
            }
            Rule::Adam8bit(rule) => {
                let codes = self.states::<2>(part, states)?.map(Argument::from);
                let before = [0, 1].map(|at| self.total(shape, passes[0].over(), totals, 0, at));
                let [mean, square] = before;
                let zeros = Adam8bit::codes_of_moments().map(|code| Argument::from(i32::from(code.zero)));
                let AdamWFactors { keep, lr_hat, root_hat, eps, .. } = rule.adamw.factors(part.update);
                let args = [
                    &runs[..],
                    &[w, g],
                    &codes,
                    &self.largest(part, sets)?,
                    &[mean?.into(), square?.into(), self.codes()?.into()],
                    &zeros,
                    &[rule.block.into(), shape.each().into(), scale],
                    &moments_of(rule, part),
                    &[keep, lr_hat, root_hat, eps].map(Argument::from),
                    &[count],
                ];
                self.launch(OP, "adam8bit_update", sizes, &args.concat())
            }
            other => Err(self.no_rule(other)),
        }
    }
}

/// What makes the step of LAMB from the moments.
fn steps_of(rule: &Lamb, part: &WholePart<'_>) -> [Argument; 4] {
    let LambFactors { mean_hat, root_hat, eps, decay, .. } = rule.factors(&part.update);
    [mean_hat, root_hat, eps, decay].map(Argument::from)
}

/// What makes the moments of 8-bit Adam.
fn moments_of(rule: &Adam8bit, part: &WholePart<'_>) -> [Argument; 3] {
    let AdamWFactors { mean_new, square_old, square_new, .. } = rule.adamw.factors(part.update);
    [mean_new, square_old, square_new].map(Argument::from)
}

/// The share of a weight that a step keeps.
fn keep(part: &WholePart<'_>, weight_decay: f64) -> Argument {
    ((1.0 - part.update.lr * (weight_decay * part.update.decay_factor)) as f32).into()
}
