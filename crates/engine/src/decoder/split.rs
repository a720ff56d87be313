//! A decoder splits a sequence into passes. That is right only if nothing but attentions of meshwork mixes its tokens:
//! these keep the keys and values of earlier tokens. A convolution along the sequence, a shift or a sum of tokens,
//! attention made of products and a softmax, or positions that are counted from 0 in each pass give other logits, and
//! one pass alone does not show it. So a decoder checks itself at its first use: it compares one pass over some tokens
//! with two passes over the same tokens, where the second pass has only the last token.
//!
//! ```text
//! one pass      t0 t1 t2 ... t14 t15 ── logits of t15 ┐
//!                                                     ├ the same but for rounding
//! two passes    t0 t1 t2 ... t14 │ t15 ─ logits of t15 ┘
//! ```
//!
//! The tokens of the first sample that arrives are taken over and over, each id shifted by its place so that no two
//! are alike. Nothing is compressed: what a scheme loses depends on how tokens are put together. Experts that decode
//! take all tokens that come.
//!
//! **Tolerance.** Both are the same sums, in orders that kernels choose by the number of rows. In f32 that is a
//! relative 1e-6 or so, and 1e-3 is refused; in 16 bits each value may be rounded to the other neighbour, 2⁻⁹ of it,
//! and 5e-2 is refused. A router may choose another expert where two are all but equal, so tokens that differ are tried
//! once more, with other ids.

use super::Decoder;
use crate::prelude::*;
use meshwork_nn::Field;
use meshwork_tensor::tape::KeyValueCache;
use meshwork_tensor::{Result, Shape};

/// The most tokens that are tried: a power of 2, so that the last token of blocks of 2, 4, .. tokens is among the last
/// ones.
const TOKENS: usize = 16;

impl Decoder {
    /// Refuses a model whose logits depend on how a sequence is split into passes. `batch` has `tokens` tokens of each
    /// sample. Collective over the world.
    pub(super) fn require_split(
        &self,
        batch: &Batch,
        tokens: usize,
        columns: usize,
    ) -> std::result::Result<(), TrainError> {
        let probe = Probe::new(&self.plan.model().fields(), batch.part(0..batch.samples().min(1))?, tokens)?;
        let count = probe.most.min(self.capacity);
        if count < 2 || columns == 0 {
            return Ok(());
        }
        let mut relative = [0.0];
        for shift in [1, 3] {
            let fresh = || self.segments.iter().map(|_| KeyValueCache::new(count)).collect::<Vec<_>>();
            let pass = |caches: &[KeyValueCache], places: Range<usize>| {
                let batch = probe.tokens(shift, places.clone())?;
                self.pass(caches, &self.compress.exact_in_forward(), &batch, places.len(), columns)
            };
            let (whole, caches) = (pass(&fresh(), 0..count)?, fresh());
            pass(&caches, 0..count - 1)?;
            relative = [distance(&pass(&caches, count - 1..count)?, &whole)];
            self.rank.world().all_reduce_slice(&mut relative, ReduceOp::Max)?;
            self.rank.log().drain();
            if relative[0] <= self.rounding {
                return Ok(());
            }
        }
        Err(TrainError::Split { tokens: count, relative: relative[0], most: self.rounding })
    }
}

/// The distance of two vectors of logits, relative to their norm; 0 if they are not finite, which other checks report.
fn distance(got: &[f32], wanted: &[f32]) -> f64 {
    let square = |sum: f64, x: f64| sum + x * x;
    let apart = got.iter().zip(wanted).map(|(&got, &wanted)| f64::from(got) - f64::from(wanted)).fold(0.0, square);
    let size = wanted.iter().map(|&x| f64::from(x)).fold(0.0, square);
    if apart == 0.0 || !(apart + size).is_finite() { 0.0 } else { (apart / size.max(f64::MIN_POSITIVE)).sqrt() }
}

/// Tokens of one sample, as many as are wanted.
struct Probe {
    sample: Batch,
    fields: Vec<Field>,
    /// Tokens that the sample has.
    tokens: usize,
    /// Tokens that it may have.
    most: usize,
    /// Whether no field shows the sequence by another extent than the model declares.
    whole: bool,
}

impl Probe {
    fn new(fields: &[Field], sample: Batch, tokens: usize) -> Result<Self> {
        let mut probe = Self { sample, fields: fields.to_vec(), tokens, most: TOKENS, whole: false };
        let held = |field: &&Field| probe.sample.dims(field.name).is_ok();
        let dims = |field: &Field| Ok((field.dims, probe.dim(field.name, probe.sample.dims(field.name)?)));
        let of_tokens = fields.iter().filter(held).map(dims).collect::<Result<Vec<_>>>()?;
        probe.whole = of_tokens.iter().all(|(_, dim)| dim.is_none());
        // A sequence has at most as many tokens as the model declares.
        let longest = of_tokens.iter().filter_map(|&(dims, dim)| dims.get(dim?).copied()).min();
        probe.most = if probe.whole { tokens } else { longest.unwrap_or(TOKENS) }.min(TOKENS);
        Ok(probe)
    }

    /// The dim that counts tokens in one sample of a field, if there is one: its extent is the number of tokens, and
    /// differs from the declared extent unless all fields have their declared extents.
    fn dim(&self, name: &str, dims: Shape) -> Option<usize> {
        let declared = self.fields.iter().find(|field| field.name == name).map(|field| field.dims);
        let other = |dim: usize| declared.is_none_or(|declared| declared.get(dim) != dims.get(dim));
        (0..dims.len()).find(|&dim| dims[dim] == self.tokens && (self.whole || other(dim)))
    }

    /// The tokens at some places: that at place k is token k of the sample, which begins anew behind its last one, and
    /// ids are shifted by `shift · k` within those that the field has.
    fn tokens(&self, shift: usize, places: Range<usize>) -> Result<Batch> {
        self.sample.map(|name, dims, values| {
            let Some(dim) = self.dim(name, dims) else { return Ok((dims, values.clone())) };
            let ids = self.fields.iter().find(|field| field.name == name).and_then(|field| field.ids.clone());
            let (outer, inner) = (dims[..dim].iter().product::<usize>(), dims[dim + 1..].iter().product::<usize>());
            let mut extents = dims.to_vec();
            extents[dim] = places.len();
            let mut made = Buffer::zeros(values.dtype(), outer * places.len() * inner);
            let size = values.dtype().size() * inner;
            let (from, to) = (values.as_bytes()?, made.as_bytes_mut()?);
            for (row, to) in to.chunks_exact_mut(size.max(1)).enumerate() {
                let (outer, place) = (row / places.len(), places.start + row % places.len());
                to.copy_from_slice(&from[(outer * self.tokens + place % self.tokens) * size..][..size]);
            }
            if let (DType::I32, Some(ids)) = (made.dtype(), ids) {
                let (first, end) = (i64::from(ids.start.max(0)), i64::from(ids.end));
                for (at, id) in made.as_mut_slice::<i32>()?.iter_mut().enumerate().filter(|(_, id)| **id >= 0) {
                    let place = places.start + at / inner.max(1) % places.len();
                    let shifted = i64::from(*id) - first + (shift * place) as i64;
                    *id = (first + shifted % (end - first).max(1)) as i32;
                }
            }
            Ok((Shape::new(&extents), made))
        })
    }
}
