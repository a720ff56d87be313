//! Causal self attention of many heads, without the matrix of all pairs.
//!
//! Layout: `qkv[batch, seq, 3, heads, head_dim]`, `out[batch, seq, heads, head_dim]`, `lse[batch, heads, seq]`. Per
//! sample and head, with `S = Q Kᵀ / √head_dim` for `j <= i` and `M` the dropout factors (1 without dropout):
//! `lse_i = ln Σ_j e^{S_ij}`, `P = e^{S - lse}`, `O = (P∘M) V`. Backward, `P` recomputed from `lse` (as in Dao et
//! al., arXiv:2205.14135): `dV = (P∘M)ᵀ dO`, `dP = (dO Vᵀ)∘M`, `D_i = Σ_e dO_ie O_ie`, `dS = P∘(dP - D)`,
//! `dQ = dS K / √head_dim`, `dK = dSᵀ Q / √head_dim`.
//!
//! One head at a time, in blocks of 64 query rows against all keys up to the block's last row; the masked
//! corner of a block holds exact zeros. `dK` and `dV` add up the blocks in order. So a head's bits do not depend on
//! the other heads or samples, and a row's output not on later rows (zeros add nothing).

use super::Float;
use super::dropout::Mask;
use super::matmul::{Strides, Update, gemm};
use super::reduce;

/// Query rows per block.
const BLOCK: usize = 64;

/// The dims of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Samples.
    pub batch: usize,
    /// Positions of each sample.
    pub seq: usize,
    /// Heads held here.
    pub heads: usize,
    /// Elements of a head's query, key and value.
    pub head_dim: usize,
}

/// Dropout of the probabilities. Element `(sample, head, i, j)` of the global `[samples, heads, seq, seq]` decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Stream and probability.
    pub mask: Mask,
    /// Global index of sample 0 of this call.
    pub first_sample: u64,
    /// Global index of head 0 of this call.
    pub first_head: u64,
    /// Heads of all ranks together.
    pub global_heads: u64,
}

impl Dropout {
    /// Global index of element `(sample, head, i, 0)`, the first two local.
    fn row_start(&self, dims: Dims, sample: usize, head: usize, i: usize) -> u64 {
        let sample = self.first_sample + sample as u64;
        let head = self.first_head + head as u64;
        ((sample * self.global_heads + head) * dims.seq as u64 + i as u64) * dims.seq as u64
    }
}

/// What the forward leaves for the backward.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, T> {
    /// The forward's input.
    pub qkv: &'a [T],
    /// The forward's output.
    pub out: &'a [T],
    /// The forward's log-sum-exp per row.
    pub lse: &'a [T],
}

/// Elements of scratch that [`forward`] and [`backward`] need for sequences of `seq`.
pub fn scratch_len(seq: usize) -> usize {
    (2 * BLOCK.min(seq) + 1) * seq
}

/// `out` and `lse` from `qkv`. Overwrites both, and the scratch.
pub fn forward<T: Float>(
    dims: Dims,
    qkv: &[T],
    out: &mut [T],
    lse: &mut [T],
    dropout: Option<Dropout>,
    scratch: &mut [T],
) {
    dims.check(&[qkv.len()], &[out.len()], lse.len(), scratch.len());
    let Dims { seq, head_dim, .. } = dims;
    let (in_row, out_row) = dims.rows();
    let (factors, scores) = scratch.split_at_mut(seq);
    for (sample, head) in dims.each_head() {
        let [q, k, v] = dims.qkv_starts(sample, head);
        let o = dims.out_start(sample, head);
        let lse = &mut lse[(sample * dims.heads + head) * seq..][..seq];
        for (first, rows, columns) in dims.blocks() {
            let scores = &mut scores[..rows * columns];
            let q = (&qkv[q + first * in_row..], (in_row, 1));
            gemm([rows, columns, head_dim], q, (&qkv[k..], (1, in_row)), (scores, (columns, 1)), Update::Overwrite);
            for (i, row) in (first..).zip(scores.chunks_exact_mut(columns)) {
                lse[i] = softmax(dims.scale(), row, i + 1);
                if let Some(dropout) = dropout {
                    let factors = &mut factors[..=i];
                    dropout.mask.factors(dropout.row_start(dims, sample, head, i), factors);
                    row.iter_mut().zip(factors).for_each(|(p, factor)| *p *= *factor);
                }
            }
            let o = (&mut out[o + first * out_row..], (out_row, 1));
            gemm([rows, head_dim, columns], (scores, (columns, 1)), (&qkv[v..], (in_row, 1)), o, Update::Overwrite);
        }
    }
}

/// `dqkv` from `dout`, with the forward's dropout. Overwrites `dqkv`, and the scratch.
pub fn backward<T: Float>(
    dims: Dims,
    saved: Saved<'_, T>,
    dout: &[T],
    dqkv: &mut [T],
    dropout: Option<Dropout>,
    scratch: &mut [T],
) {
    let Saved { qkv, out, lse } = saved;
    dims.check(&[qkv.len(), dqkv.len()], &[out.len(), dout.len()], lse.len(), scratch.len());
    let Dims { seq, head_dim, .. } = dims;
    let (in_row, out_row) = dims.rows();
    let (in_strides, out_strides): (Strides, Strides) = ((in_row, 1), (out_row, 1));
    let (factors, scratch) = scratch.split_at_mut(seq);
    let (scores, grads) = scratch.split_at_mut(BLOCK.min(seq) * seq);
    factors.fill(T::ONE);
    dqkv.fill(T::ZERO);
    for (sample, head) in dims.each_head() {
        let [q, k, v] = dims.qkv_starts(sample, head);
        let o = dims.out_start(sample, head);
        let lse = &lse[(sample * dims.heads + head) * seq..][..seq];
        for (first, rows, columns) in dims.blocks() {
            let (p, ds) = (&mut scores[..rows * columns], &mut grads[..rows * columns]);
            let (square, transposed): (Strides, Strides) = ((columns, 1), (1, columns));
            let q_block = q + first * in_row;
            let q_rows = (&qkv[q_block..], in_strides);
            let do_rows = (&dout[o + first * out_row..], out_strides);
            let pairs = [rows, columns, head_dim];
            gemm(pairs, q_rows, (&qkv[k..], (1, in_row)), (p, square), Update::Overwrite);
            gemm(pairs, do_rows, (&qkv[v..], (1, in_row)), (ds, square), Update::Overwrite);
            let block_rows = p.chunks_exact_mut(columns).zip(ds.chunks_exact_mut(columns));
            for (i, (p, ds)) in (first..).zip(block_rows) {
                if let Some(dropout) = dropout {
                    let start = dropout.row_start(dims, sample, head, i);
                    dropout.mask.factors(start, &mut factors[..=i]);
                }
                let at = o + i * out_row;
                let d = reduce::sum2(&dout[at..][..head_dim], &out[at..][..head_dim], |g, o| g * o);
                softmax_backward(dims.scale(), lse[i], d, &factors[..=i], p, ds);
            }
            let per_key = [columns, head_dim, rows];
            gemm(per_key, (p, transposed), do_rows, (&mut dqkv[v..], in_strides), Update::Accumulate);
            gemm(per_key, (ds, transposed), q_rows, (&mut dqkv[k..], in_strides), Update::Accumulate);
            let dq_rows = (&mut dqkv[q_block..], in_strides);
            gemm([rows, head_dim, columns], (ds, square), (&qkv[k..], in_strides), dq_rows, Update::Overwrite);
        }
    }
}

/// Turns the first `live` products of a row into probabilities, the rest into zeros; returns the log-sum-exp.
fn softmax<T: Float>(scale: T, row: &mut [T], live: usize) -> T {
    let (row, masked) = row.split_at_mut(live);
    let max = reduce::max(row);
    for s in row.iter_mut() {
        *s = ((*s - max) * scale).exp();
    }
    let total = reduce::sum(row, |e| e);
    let inverse = T::ONE / total;
    for e in row.iter_mut() {
        *e *= inverse;
    }
    masked.fill(T::ZERO);
    T::from_f64((max * scale).to_f64() + total.to_f64().ln())
}

/// Turns a row of products `p` into `P∘M` and of `dO Vᵀ` in `ds` into `dS scale`; `factors` ends at the diagonal,
/// zeros follow it.
fn softmax_backward<T: Float>(scale: T, lse: T, d: T, factors: &[T], p: &mut [T], ds: &mut [T]) {
    let (p, p_masked) = p.split_at_mut(factors.len());
    let (ds, ds_masked) = ds.split_at_mut(factors.len());
    for ((p, ds), &factor) in p.iter_mut().zip(ds).zip(factors) {
        let probability = (*p * scale - lse).exp();
        *ds = probability * (*ds * factor - d) * scale;
        *p = probability * factor;
    }
    p_masked.fill(T::ZERO);
    ds_masked.fill(T::ZERO);
}

impl Dims {
    fn check(&self, qkvs: &[usize], outs: &[usize], lse: usize, scratch: usize) {
        let Dims { batch, seq, heads, head_dim } = *self;
        let elements = batch * seq * heads * head_dim;
        assert!(head_dim > 0, "heads of no elements");
        assert!(qkvs.iter().all(|&len| len == 3 * elements), "elements of qkv {qkvs:?} for {self:?}");
        assert!(outs.iter().all(|&len| len == elements), "elements of out {outs:?} for {self:?}");
        assert_eq!(lse, batch * heads * seq, "elements of lse for {self:?}");
        assert!(scratch >= scratch_len(seq), "scratch of {scratch}, {} needed", scratch_len(seq));
    }

    fn scale<T: Float>(&self) -> T {
        T::from_f64(1.0 / (self.head_dim as f64).sqrt())
    }

    /// Distance of neighbouring positions in `qkv` and in `out`.
    fn rows(&self) -> (usize, usize) {
        (3 * self.heads * self.head_dim, self.heads * self.head_dim)
    }

    fn each_head(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |sample| (0..self.heads).map(move |head| (sample, head)))
    }

    /// Where a head's queries, keys and values start in `qkv`.
    fn qkv_starts(&self, sample: usize, head: usize) -> [usize; 3] {
        let start = |part: usize| ((sample * self.seq * 3 + part) * self.heads + head) * self.head_dim;
        [start(0), start(1), start(2)]
    }

    /// Where a head starts in `out`.
    fn out_start(&self, sample: usize, head: usize) -> usize {
        (sample * self.seq * self.heads + head) * self.head_dim
    }

    /// First row, number of rows and number of keys of each block.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let seq = self.seq;
        (0..seq).step_by(BLOCK).map(move |first| {
            let rows = BLOCK.min(seq - first);
            (first, rows, first + rows)
        })
    }
}

#[cfg(test)]
mod tests;
