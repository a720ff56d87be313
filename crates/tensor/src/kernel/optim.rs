//! Operations of an optimizer step on flat vectors. The rules themselves are in `meshwork-optim`.

use super::table::*;
use crate::param::LocalSlice;
use crate::shape::Shape;
use meshwork_core::Buffer;
use meshwork_core::exact::LIMBS;
use meshwork_optim::{ParamShape, Rule, Update};
use std::ops::Range;

// The weights of a widened device are the optimizer's f32 weights; gradients may have 16 bits.
kernels! {
    /// Flat vectors of weights, gradients and optimizer states.
    pub trait Optim at optim {
        /// Sets a range of elements to zero.
        fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()>
            | profile(= Traffic::moved(Class::Optimizer, "zero", x, range.len())), halves(as_is), meta(nothing);

        /// Adds Σ x² of each of these vectors, one vector after the other, to element `at` of the f64 vector `sums`.
        /// Each sum is accumulated in f64 in an order that depends on the length of the vector alone. The sums stay on
        /// the device, so the host does not wait.
        fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()>
            | profile(= Traffic::vectors("sum_of_squares", vectors)), halves({
                  self.wide_in_turn(vectors, |vectors| self.inner.optim()?.sum_of_squares(vectors, sums, at))
              }), meta(nothing);

        /// Adds Σ x² of all of these vectors, exactly, to the [`LIMBS`](meshwork_core::exact::LIMBS) elements of the
        /// f64 vector `digits` from `at` on. The result does not depend on how the sum is cut over ranks. Exact for up
        /// to 2^21 additions to the same digits.
        fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()>
            | profile(= Traffic::vectors("exact_sum_of_squares", vectors)), halves({
                  self.wide_in_turn(vectors, |vectors| self.inner.optim()?.exact_sum_of_squares(vectors, digits, at))
              }), meta(nothing);

        /// Applies one update of a rule to elements of all these flat vectors; a device may process many vectors in one
        /// launch.
        ///
        /// A device whose memory the host cannot read matches on `rule` and runs its own kernel. For [`Rule::Custom`],
        /// and for a rule without a kernel, it returns [`Error::UpdateRule`](crate::Error::UpdateRule).
        fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()>
            | profile(= Traffic::update(flats)), halves({
                  let optim = self.inner.optim()?;
                  if flats.iter().all(|flat| !flat.grads.dtype().is_half()) {
                      return optim.update(rule, update, flats);
                  }
                  // One vector after the other, so that only one vector of gradients exists in f32 at a time.
                  flats.iter_mut().try_for_each(|FlatParts { weights, grads, states, ranges }| {
                      let grads = &self.wide(grads)?;
                      optim.update(rule, update, &mut [FlatParts { weights, grads, states, ranges }])
                  })
              }), meta(nothing);

        /// Divides x by the square root of the only element of `squares`, an f64, or by `least` if that is larger.
        fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()>
            | profile(Optimizer: x, x), halves(as_is), meta(nothing);

        /// The values of exact sums, from [`LIMBS`](meshwork_core::exact::LIMBS) digits in `digits` for each.
        fn exact_sums(&self, digits: &Buffer) -> Result<Buffer>
            | profile(Optimizer: digits), halves(as_is), meta(F64 => digits.count() / LIMBS);
    }
}

kernels! {
    /// Rules that read whole matrices.
    pub trait WholeOptim at whole_optim {
        /// [Measures](meshwork_optim::WholeOptimizer::measure) elements of a parameter in pass `pass`, and adds the
        /// measures to `into`; without `into`, only the states of elements are updated. Refuses rules as
        /// [`update`](Optim::update) does.
        fn measure(
            &self,
            part: &WholePart<'_>,
            pass: usize,
            weights: &Buffer,
            vectors: WholeVectors<'_>,
            into: Option<Measured<'_>>,
        ) -> Result<()>
            | profile(= Traffic::whole("measure", part, weights, &vectors)), halves({
                  let grads = &self.wide(vectors.grads)?;
                  self.inner.whole_optim()?.measure(part, pass, weights, WholeVectors { grads, ..vectors }, into)
              }), meta(nothing);

        /// [Finishes](meshwork_optim::WholeOptimizer::finish_pass) pass `pass` of a parameter, whose totals are the
        /// elements of `totals` from `at` on.
        fn finish_pass(
            &self,
            part: &WholePart<'_>,
            pass: usize,
            totals: &mut Buffer,
            at: usize,
            sets: &mut [Buffer],
        ) -> Result<()>
            | profile(= Traffic::finish_pass(totals, sets)), halves(as_is), meta(nothing);

        /// [Updates](meshwork_optim::WholeOptimizer::update) the weights of elements of a parameter.
        fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()>
            | profile(= Traffic::whole("update", part, weights, &vectors)), halves({
                  let grads = &self.wide(vectors.grads)?;
                  self.inner.whole_optim()?.update_whole(part, weights, WholeVectors { grads, ..vectors })
              }), meta(nothing);
    }
}

/// Matching elements of f32 vectors: weights, their gradients and the rule's states.
#[derive(Debug)]
pub struct FlatParts<'a> {
    /// Weights.
    pub weights: &'a mut Buffer,
    /// Gradients.
    pub grads: &'a Buffer,
    /// A vector for each of the rule's [names](Rule::state_names).
    pub states: &'a mut [Buffer],
    /// The elements: ranges that apply to all these vectors and do not overlap.
    pub ranges: &'a [Range<usize>],
}

/// Consecutive elements of a parameter in flat vectors, with a rule that needs the whole parameter.
#[derive(Clone, Debug)]
pub struct WholePart<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// The step.
    pub update: Update,
    /// The whole parameter, as the rule sees it: its matrices.
    pub shape: ParamShape,
    /// Its extents.
    pub dims: Shape,
    /// The slice of the parameter on this rank.
    pub slice: &'a LocalSlice,
    /// The elements of the slice, in storage order.
    pub part: Range<usize>,
    /// Index of the first element in weights, gradients and states.
    pub at: usize,
}

impl WholePart<'_> {
    /// Calls `visit(first element, range of the flat vectors)` for each run, in the order of the vectors. The elements
    /// of a run are consecutive both in the vectors and in the parameter. Elements are
    /// [counted](meshwork_optim::ParamShape::counted) matrix by matrix. Padding is in no run.
    pub fn for_each_run(&self, mut visit: impl FnMut(usize, Range<usize>)) {
        let ParamShape { interleaved, columns, .. } = self.shape;
        for (inner, place) in self.slice.boxes(self.part.clone()) {
            let origin = self.at + place.start - self.part.start;
            inner.for_each_run(self.dims, |first, range| {
                let (first, mut start, end) = (first as usize, origin + range.start, origin + range.end);
                if interleaved == 1 {
                    return visit(first, start..end);
                }
                while start < end {
                    let stored = first + start - origin - range.start;
                    let row = (columns - stored % columns).min(end - start);
                    visit(self.shape.counted(stored), start..start + row);
                    start += row;
                }
            });
        }
    }
}

/// The vectors that belong to elements of a parameter.
#[derive(Debug)]
pub struct WholeVectors<'a> {
    /// Gradients.
    pub grads: &'a Buffer,
    /// The states of elements, in f32 or in bytes.
    pub states: &'a mut [Buffer],
    /// The states of sets.
    pub sets: &'a [Buffer],
    /// The totals of the passes so far.
    pub totals: &'a [Buffer],
    /// The whole transformed matrices, one after the other, once they are gathered.
    pub gathered: Option<&'a Buffer>,
}

/// Destination of the measures.
#[derive(Debug)]
pub enum Measured<'a> {
    /// f64 numbers from this element on, one per set: a measure is added, or the maximum is kept.
    Sums(&'a mut Buffer, usize),
    /// Digits of exact sums, from this element on.
    Digits(&'a mut Buffer, usize),
    /// Elements of whole matrices, one matrix after the other.
    Values(&'a mut Buffer),
}
