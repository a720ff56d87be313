//! Rows moved to where they are computed, and back: the permutations of a mixture of experts.
//!
//! A *choice* is an i32 id. Each token has `k` places for choices: used choices in ascending order, and -1 in unused
//! places. The *position* of a choice is `token · k + place`. A *slot* is the row that belongs to a choice, or -1.

use super::table::*;
use meshwork_core::Buffer;
use std::ops::Range;

/// Input of a combination: `k` choices for each token, and the slot of each choice.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Ids, `[tokens, k]`.
    pub ids: &'a Buffer,
    /// Rows, `[tokens, k]`.
    pub slots: &'a Buffer,
    /// Choices of a token.
    pub k: usize,
}

kernels! {
    /// Permutations of rows by integers on the device.
    pub trait Permutation at permutation {
        /// How many choices each id in `ids` has, an i32 for each sample and id: `[samples, ids.len()]`. Other ids are
        /// not counted.
        fn counts(&self, choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer>
            | profile(Memory: choices), halves(as_is), meta(I32 => samples * ids.len());

        /// (order, slots), both i32. `order` has the positions of the `total` choices with ids in `ids`, sorted by id,
        /// then by position. `slots` is its [inverse](Self::invert): for each choice its index in `order`, or -1.
        ///
        /// # Errors
        /// A number of such choices other than `total`.
        fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)>
            | profile(Memory: choices), halves(as_is), meta(I32 => total, I32 => choices.count());

        /// The inverse of part of a permutation: `slots[order[i]] = i`, -1 elsewhere; `[n]` in i32.
        fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer>
            | profile(Memory: order), halves(as_is), meta(I32 => n);

        /// Choices of groups of `size` ids: each id divided by `size`. If `once`, each row of `k` keeps only the first
        /// choice of each group.
        fn group_ids(&self, choices: &Buffer, k: usize, size: usize, once: bool) -> Result<Buffer>
            | profile(Memory: choices), halves(as_is), meta(I32 => choices.count());

        /// `out[i] = x[index[i] / per]`, rows of `width` elements of any type.
        fn gather(&self, x: &Buffer, index: &Buffer, per: usize, width: usize) -> Result<Buffer>
            | profile(= Traffic::gather(x, index, width)), halves(as_is), meta(x => index.count() * width);

        /// `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` over the choices that have a slot; without weights, the sum
        /// of the rows. The terms are added in the [tree](meshwork_core::tree) over the ids; absent ids are skipped. So
        /// another rank may sum a whole subtree of ids first, with the same bits.
        fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer>
            | profile(Memory: rows, choices.ids, choices.slots), halves({
                  let weights = weights.map(|weights| self.wide(weights)).transpose()?;
                  let sums = self.inner.permutation()?.combine(&self.wide(rows)?, choices, weights.as_ref(), width)?;
                  self.rounded(sums, rows.dtype())
              }),
              meta(rows => choices.ids.count() / choices.k * width);

        /// The gradients of [`combine`](Self::combine) with respect to its rows and its weights:
        /// `drows[slots[t, j]] = weights[t, j] · dout[t]`, and `dweights[t, j] = dout[t] · rows[slots[t, j]]`, 0
        /// without a slot. `order` has the position of the choice of each row.
        fn combine_grad(
            &self,
            dout: &Buffer,
            rows: &Buffer,
            choices: Choices<'_>,
            order: &Buffer,
            weights: &Buffer,
            width: usize,
        ) -> Result<(Buffer, Buffer)>
            | profile(Memory: dout, rows, choices.slots, order, weights), halves({
                  let [dout, wide, by] = &self.all_wide([dout, rows, weights])?;
                  let (drows, dweights) = self.inner.permutation()?.combine_grad(dout, wide, choices, order, by, width)?;
                  Ok((self.rounded(drows, rows.dtype())?, self.rounded(dweights, weights.dtype())?))
              }),
              meta(rows => rows.count(), rows => choices.slots.count());
    }
}
