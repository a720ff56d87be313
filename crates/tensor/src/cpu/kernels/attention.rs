//! Causal self attention of many heads, without the matrix of all pairs.
//!
//! Layout: `qkv[batch, seq, 3, heads, head_dim]`, `out[batch, seq, heads, head_dim]`, `lse[batch, heads, seq]`. Per
//! sample and head, with `S = Q Kᵀ / √head_dim` for `j <= i` and `M` the dropout factors (1 without dropout):
//! `lse_i = ln Σ_j e^{S_ij}`, `P = e^{S - lse}`, `O = (P∘M) V`. Backward, `P` recomputed from `lse` (as in Dao et
//! al., arXiv:2205.14135): `dV = (P∘M)ᵀ dO`, `dP = (dO Vᵀ)∘M`, `D_i = Σ_e dO_ie O_ie`, `dS = P∘(dP - D)`,
//! `dQ = dS K / √head_dim`, `dK = dSᵀ Q / √head_dim`.
//!
//! # The order of sums
//!
//! Each product is summed in tiles, one chain in the order of its terms (see `tiles`), and blocks of terms are added
//! one after another:
//!
//! - `S` and `dP`: one chain over the features.
//! - `O`: over the keys, in blocks of 256 from key 0; multiplied at the end by one over the row's total of `e^{S - max}`,
//!   which is summed in the same order.
//! - `dQ`: over the keys, in blocks of 128 from key 0. `dK` and `dV`: over the queries, in blocks of 128 from query 0.
//!
//! What the mask hides is skipped or exactly zero, and a zero changes no sum. So the bits of a row of `O` or `dQ`
//! depend on its own query and the keys before it, those of `dK` and `dV` on the queries after it: not on later
//! positions, other heads, other samples, or who computed them.
//!
//! # The precision
//!
//! In [`Precision::Bf16`] both operands of each of these products are rounded to `bf16`: `Q`, `K`, `V` and `dO`,
//! but also `e^{S - max}∘M` in `O`, `P∘M` in `dV`, and `dS / √head_dim` in `dQ` and `dK`. Sums stay `f32`, and so does all
//! that is between the products: softmax with its totals and `lse`, `D`, dropout. `f64` stays `f64`.
//!
//! # The work
//!
//! Heads are shared among threads; each is one thread's, products and all. Forward: panels of as many queries as a tile
//! is wide pass by the keys, with all their scores at once, a row for each key: a vector holds one key's scores of many
//! queries, so that maxima, totals and exponentials need no sums within a vector. Backward: over blocks of 128 keys, and
//! for each over blocks of 128 queries, so that what is written often stays in the L2 cache however long the sequence.
//! On the diagonal both stop at a tile's edge.
//!
//! A head's rows are short and far apart, so that no CPU foresees them: coming from memory they would take a third of the
//! time. A thread takes neighbouring heads one after the other (see `runs`), and the tiles of one fetch the rows of the
//! next into the L2 cache, its gradients' too (see `ahead`), unless the sequence is too long for them to stay there.
//!
//! More than 400 lines: both directions share the orders above, and what one leaves as zeros the next product relies on.

mod ahead;
mod heads;
mod rows;
mod runs;
mod scratch;
mod tiles;

use super::Float;
use super::dropout::Mask;
use super::matmul::{Precision, Update};
use ahead::Ahead;
use heads::{RowsMut, heads_mut};
use meshwork_core::pool;
use meshwork_core::simd::wide;
use rows::{VECTOR, softmax};
use runs::Runs;
use std::ops::Range;
pub use tiles::Tiled;
use tiles::{Left, MAX_WIDTH, Panels, Tiles};

/// Keys in a block of the forward's sums: an even number, for whole words of `bf16`.
const FORWARD_KEYS: usize = 256;

/// Queries and keys in a block of the backward, an even number: two squares of them are a quarter of a common L2 cache.
const BLOCK: usize = 128;

/// Between rows of the backward's squares of scores: longer by a vector, so that rows do not all map to the same sets of the L1 cache.
const STRIDE: usize = BLOCK + VECTOR;

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
    /// Global index of the first element of a head, both local.
    fn head_start(&self, dims: Dims, sample: usize, head: usize) -> u64 {
        let sample = self.first_sample + sample as u64;
        let head = self.first_head + head as u64;
        (sample * self.global_heads + head) * (dims.seq * dims.seq) as u64
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

/// `out` and `lse` from `qkv`, in a precision. Overwrites both.
pub fn forward<T: Tiled>(
    precision: Precision,
    dims: Dims,
    qkv: &[T],
    out: &mut [T],
    lse: &mut [T],
    dropout: Option<Dropout>,
) {
    forward_in(T::tiles(precision), dims, qkv, out, lse, dropout);
}

/// `dqkv` from `dout`, with the forward's precision and dropout. Overwrites it.
pub fn backward<T: Tiled>(
    precision: Precision,
    dims: Dims,
    saved: Saved<'_, T>,
    dout: &[T],
    dqkv: &mut [T],
    dropout: Option<Dropout>,
) {
    backward_in(T::tiles(precision), dims, saved, dout, dqkv, dropout);
}

/// [`forward`] with these tiles.
fn forward_in<T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    qkv: &[T],
    out: &mut [T],
    lse: &mut [T],
    dropout: Option<Dropout>,
) {
    dims.check(&[qkv.len()], &[out.len()], lse.len());
    let outputs = heads_mut::<1, T>(out, dims.array()).zip(lse.chunks_mut(dims.seq.max(1)));
    let heads = Runs::new(dims.batch * dims.heads, dims.each_head().zip(outputs), pool::threads());
    pool::share(heads, |(((sample, head), ([out], lse)), next)| {
        let to_next = next.then(|| dims.distance_to_next(head));
        let [q, k, v] = dims.qkv_starts(sample, head).map(|start| &qkv[start..]);
        let dropout = dropout.map(|dropout| (dropout.mask, dropout.head_start(dims, sample, head)));
        forward_head(tiles, dims, [q, k, v], out, lse, dropout, to_next);
    });
}

/// [`backward`] with these tiles.
fn backward_in<T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    saved: Saved<'_, T>,
    dout: &[T],
    dqkv: &mut [T],
    dropout: Option<Dropout>,
) {
    let Saved { qkv, out, lse } = saved;
    dims.check(&[qkv.len(), dqkv.len()], &[out.len(), dout.len()], lse.len());
    let gradients = heads_mut::<3, T>(dqkv, dims.array());
    let heads = Runs::new(dims.batch * dims.heads, dims.each_head().zip(gradients), pool::threads());
    pool::share(heads, |(((sample, head), gradients), next)| {
        let to_next = next.then(|| dims.distance_to_next(head));
        let [q, k, v] = dims.qkv_starts(sample, head).map(|start| &qkv[start..]);
        let o = dims.out_start(sample, head);
        let lse = &lse[(sample * dims.heads + head) * dims.seq..][..dims.seq];
        let dropout = dropout.map(|dropout| (dropout.mask, dropout.head_start(dims, sample, head)));
        backward_head(tiles, dims, [q, k, v, &out[o..], &dout[o..]], lse, gradients, dropout, to_next);
    });
}

/// The dropout of one head: its mask and the global index of its first element.
type HeadDropout = Option<(Mask, u64)>;

/// Elements from a head to the one that this thread does next, in `qkv` and in `out`, if it is known.
type ToNext = Option<[usize; 2]>;

/// One head's `out` and `lse`; `q`, `k` and `v` begin at its first position.
fn forward_head<T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    [q, k, v]: [&[T]; 3],
    mut out: RowsMut<'_, T>,
    lse: &mut [T],
    dropout: HeadDropout,
    to_next: ToNext,
) {
    let Dims { seq, head_dim, .. } = dims;
    let ((in_row, out_row), scale, width) = (dims.rows(), dims.scale(), tiles.width());
    let to_next = to_next.filter(|_| ahead::stay::<T>(4, [seq, head_dim]));
    let next = to_next.map(|[in_qkv, in_out]| {
        let [q, k, v] = [q, k, v].map(|x| (x.as_ptr().wrapping_add(in_qkv), in_row));
        [k, q, v, (out.as_ptr().wrapping_add(in_out), out_row)]
    });
    let mut ahead = Ahead::new(next.as_slice().as_flattened(), [seq, head_dim]);
    let lens = [
        tiles.left_len([seq, head_dim]),
        tiles.packed_len([head_dim, seq]),
        tiles.packed_len([seq, head_dim]),
        seq * width,
        tiles.left_len([width, seq]),
        seq,
    ];
    scratch::with(lens, |[k_words, qt, vs, scores, p_words, factors]| {
        let ks = tiles.left([seq, head_dim], (k, (in_row, 1)), k_words);
        let qt = tiles.pack([head_dim, seq], (q, (1, in_row)), qt);
        let vs = tiles.pack([seq, head_dim], (v, (in_row, 1)), vs);
        for queries in blocks(0..seq, width) {
            let live = queries.end;
            let scores = &mut scores[..live * width];
            products(&tiles, ks, qt, queries.clone(), RowsMut::new(scores, width), &mut ahead);
            let mut inverses = [T::ZERO; MAX_WIDTH];
            for strip in (0..queries.len()).step_by(VECTOR) {
                let first = queries.start + strip;
                let [lses, ones] = softmax(scale, &mut scores[strip..], width, first);
                lse[first..].iter_mut().zip(lses).for_each(|(to, lse)| *to = lse);
                inverses[strip..][..VECTOR].copy_from_slice(&ones);
            }
            if let Some((mask, start)) = dropout {
                for (lane, i) in queries.clone().enumerate() {
                    let factors = &mut factors[..live];
                    mask.factors(start + (i * seq) as u64, factors);
                    scores[lane..].iter_mut().step_by(width).zip(factors).for_each(|(p, factor)| *p *= *factor);
                }
            }
            let p = tiles.left([queries.len(), live], (scores, (1, width)), p_words);
            for rows in panels(queries.clone(), tiles.rows) {
                let (first, height) = (rows.start - queries.start, rows.len());
                let mut out = out.part(rows.clone(), 0);
                for keys in blocks(0..rows.end, FORWARD_KEYS) {
                    let update = if keys.start == 0 { Update::Overwrite } else { Update::Accumulate };
                    let p = p.from(first, keys.start);
                    tiles.times(height, p, (vs, keys, 0..head_dim), out.part(0..height, 0), update, &mut ahead);
                }
                for (r, inverse) in inverses[first..][..height].iter().enumerate() {
                    out.row(r).iter_mut().for_each(|o| *o *= *inverse);
                }
            }
        }
    });
}

/// One head's gradients of `q`, `k` and `v`; those, `out` and `dout` begin at its first position.
fn backward_head<T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    [q, k, v, out, dout]: [&[T]; 5],
    lse: &[T],
    [mut q_grad, mut k_grad, mut v_grad]: [RowsMut<'_, T>; 3],
    dropout: HeadDropout,
    to_next: ToNext,
) {
    let Dims { seq, head_dim, .. } = dims;
    let ((in_row, out_row), scale) = (dims.rows(), dims.scale());
    // Of a longer head nothing is fetched ahead, and its gradients are summed where their rows lie close together.
    let in_place = ahead::stay::<T>(8, [seq, head_dim]);
    let next = to_next.filter(|_| in_place).map(|[in_qkv, in_out]| {
        let [q, k, v] = [q, k, v].map(|x| (x.as_ptr().wrapping_add(in_qkv), in_row));
        let [out, dout] = [out, dout].map(|x| (x.as_ptr().wrapping_add(in_out), out_row));
        let gradients = [&k_grad, &v_grad, &q_grad];
        let [k_grad, v_grad, q_grad] = gradients.map(|x| (x.as_ptr().wrapping_add(in_qkv), in_row));
        [k, v, q, dout, out, k_grad, v_grad, q_grad]
    });
    let mut ahead = Ahead::new(next.as_slice().as_flattened(), [seq, head_dim]);
    let ([by_feature, by_row], square) =
        ([[head_dim, seq], [seq, head_dim]].map(|d| tiles.packed_len(d)), BLOCK * STRIDE);
    let left = tiles.left_len([seq, head_dim]);
    let sums = if in_place { 0 } else { seq * head_dim };
    let lens = [
        by_feature,
        by_feature,
        by_row,
        by_row,
        by_row,
        square,
        square,
        sums,
        sums,
        sums,
        seq,
        tiles.rows * STRIDE,
        left,
        left,
        tiles.left_len([BLOCK, BLOCK]),
    ];
    scratch::with(lens, |[kt, vt, ks, qs, gs, p, ds, dq, dk, dv, dots, factors, q_words, g_words, words]| {
        let kt = tiles.pack([head_dim, seq], (k, (1, in_row)), kt);
        let vt = tiles.pack([head_dim, seq], (v, (1, in_row)), vt);
        let ks = tiles.pack([seq, head_dim], (k, (in_row, 1)), ks);
        let qs = tiles.pack([seq, head_dim], (q, (in_row, 1)), qs);
        let gs = tiles.pack([seq, head_dim], (dout, (out_row, 1)), gs);
        let q = tiles.left([seq, head_dim], (q, (in_row, 1)), q_words);
        let g = tiles.left([seq, head_dim], (dout, (out_row, 1)), g_words);
        for (i, d) in dots.iter_mut().enumerate() {
            let at = i * out_row;
            *d = tiles.dot(&dout[at..][..head_dim], &out[at..][..head_dim]);
        }
        let [mut q_sums, mut k_sums, mut v_sums] = if in_place {
            [&mut q_grad, &mut k_grad, &mut v_grad].map(|gradient| gradient.part(0..seq, 0))
        } else {
            [&mut *dq, &mut *dk, &mut *dv].map(|sums| RowsMut::new(sums, head_dim))
        };
        for keys in blocks(0..seq, BLOCK) {
            for queries in blocks(keys.start..seq, BLOCK) {
                let diagonal = queries.start == keys.start;
                for rows in panels(queries.clone(), tiles.rows) {
                    let (first, height) = (rows.start, rows.len());
                    let live = keys.start..keys.end.min(rows.end);
                    let at = (first - queries.start) * STRIDE;
                    let (p, ds) = (&mut p[at..][..height * STRIDE], &mut ds[at..][..height * STRIDE]);
                    for (a, b, to) in [(q, kt, &mut *p), (g, vt, &mut *ds)] {
                        let b = (b, 0..head_dim, live.clone());
                        tiles.times(
                            height,
                            a.from(first, 0),
                            b,
                            RowsMut::new(to, STRIDE),
                            Update::Overwrite,
                            &mut ahead,
                        );
                    }
                    let factors = dropout.map(|(mask, start)| {
                        for (i, factors) in rows.clone().zip(factors.chunks_exact_mut(STRIDE)) {
                            let start = start + (i * seq + keys.start) as u64;
                            mask.factors(start, &mut factors[..live.len()]);
                        }
                        &factors[..height * STRIDE]
                    });
                    factors.into_iter().for_each(|factors| multiply(ds, factors, STRIDE, live.len()));
                    wide(
                        #[inline(always)]
                        || {
                            let rows = rows.clone().zip(p.chunks_exact_mut(STRIDE).zip(ds.chunks_exact_mut(STRIDE)));
                            for (i, (p, ds)) in rows {
                                let shown = live.len().min(i + 1 - keys.start);
                                softmax_backward(scale, [lse[i], dots[i]], [p, ds], shown);
                            }
                        },
                    );
                    factors.into_iter().for_each(|factors| multiply(p, factors, STRIDE, live.len()));
                    let update = if keys.start == 0 { Update::Overwrite } else { Update::Accumulate };
                    let ds = tiles.left([height, live.len()], (ds, (STRIDE, 1)), words);
                    let dq = q_sums.part(rows, 0);
                    tiles.times(height, ds, (ks, live, 0..head_dim), dq, update, &mut ahead);
                }
                let update = if diagonal { Update::Overwrite } else { Update::Accumulate };
                for columns in panels(0..keys.len(), tiles.rows) {
                    // On the diagonal, queries before these keys have nothing for them; terms begin at an even one.
                    let first = queries.start + if diagonal { columns.start / 2 * 2 } else { 0 };
                    let at = (first - queries.start) * STRIDE + columns.start;
                    for (scores, rows, sums) in [(&*p, gs, &mut v_sums), (&*ds, qs, &mut k_sums)] {
                        let terms = first..queries.end;
                        let a = tiles.left([columns.len(), terms.len()], (&scores[at..], (1, STRIDE)), words);
                        let sums = sums.part(keys.start + columns.start..keys.start + columns.end, 0);
                        tiles.times(columns.len(), a, (rows, terms, 0..head_dim), sums, update, &mut ahead);
                    }
                }
            }
        }
        for (gradient, sums) in [(&mut q_grad, dq), (&mut k_grad, dk), (&mut v_grad, dv)] {
            for (i, sums) in sums.chunks_exact(head_dim).enumerate() {
                gradient.row(i).copy_from_slice(sums);
            }
        }
    });
}

/// The products of all keys up to a panel of queries, a row each, with those queries: what the mask keeps, and more up to
/// a tile's edges.
fn products<T: Tiled>(
    tiles: &Tiles<T>,
    keys: Left<'_, T>,
    right: Panels<'_, T>,
    queries: Range<usize>,
    mut to: RowsMut<'_, T>,
    ahead: &mut Ahead<'_, T>,
) {
    // From there on, only the second vector of queries sees the keys.
    let second = queries.start + tiles.lanes;
    let middle = second.min(queries.end);
    for (seen, first) in [(0..middle, queries.start), (middle..queries.end, second)] {
        for rows in panels(seen, tiles.rows) {
            let b = (right, 0..right.terms, first..queries.end.next_multiple_of(tiles.lanes));
            let to = to.part(rows.clone(), first - queries.start);
            tiles.times(rows.len(), keys.from(rows.start, 0), b, to, Update::Overwrite, ahead);
        }
    }
}

/// Turns the first `live` products of a row of `S` and of `dP` into `P` and `dS`, those after them, up to a whole
/// vector and one more, into zeros.
#[inline(always)]
fn softmax_backward<T: Float>(scale: T, [lse, d]: [T; 2], [p, ds]: [&mut [T]; 2], live: usize) {
    let (p, ds) = (p.as_chunks_mut::<VECTOR>().0, ds.as_chunks_mut::<VECTOR>().0);
    let vectors = live.div_ceil(VECTOR);
    for (at, (p, ds)) in p[..vectors].iter_mut().zip(&mut ds[..vectors]).enumerate() {
        let shown = (live - at * VECTOR) as i32;
        for l in 0..VECTOR {
            let probability = (p[l] * scale - lse).exp();
            let gradient = probability * (ds[l] - d) * scale;
            // Not by filling up the row beforehand: a load of what several stores just wrote waits for all that is before it.
            (p[l], ds[l]) = if (l as i32) < shown { (probability, gradient) } else { (T::ZERO, T::ZERO) };
        }
    }
    p[vectors] = [T::ZERO; VECTOR];
    ds[vectors] = [T::ZERO; VECTOR];
}

/// `x[i] *= by[i]` for the first `len` of each row.
fn multiply<T: Float>(x: &mut [T], by: &[T], stride: usize, len: usize) {
    for (x, by) in x.chunks_exact_mut(stride).zip(by.chunks_exact(stride)) {
        x[..len].iter_mut().zip(&by[..len]).for_each(|(x, by)| *x *= *by);
    }
}

/// A range in pieces of `len`, the last one shorter.
fn blocks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(len).map(move |start| start..range.end.min(start + len))
}

/// A range in as few pieces of at most `height` as it takes, all about as long.
fn panels(range: Range<usize>, height: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = range.len().div_ceil(height);
    let edge = move |piece: usize| range.start + piece * range.len() / pieces;
    (0..pieces).map(move |piece| edge(piece)..edge(piece + 1))
}

impl Dims {
    fn check(&self, qkvs: &[usize], outs: &[usize], lse: usize) {
        let Dims { batch, seq, heads, head_dim } = *self;
        let elements = batch * seq * heads * head_dim;
        assert!(head_dim > 0, "heads of no elements");
        assert!(qkvs.iter().all(|&len| len == 3 * elements), "elements of qkv {qkvs:?} for {self:?}");
        assert!(outs.iter().all(|&len| len == elements), "elements of out {outs:?} for {self:?}");
        assert_eq!(lse, batch * heads * seq, "elements of lse for {self:?}");
    }

    fn scale<T: Float>(&self) -> T {
        T::from_f64(1.0 / (self.head_dim as f64).sqrt())
    }

    /// Distance of neighbouring positions in `qkv` and in `out`.
    fn rows(&self) -> (usize, usize) {
        (3 * self.heads * self.head_dim, self.heads * self.head_dim)
    }

    fn each_head(self) -> impl Iterator<Item = (usize, usize)> + Send {
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

    /// Elements from a head to the one after it, the next sample's first after the last, in `qkv` and in `out`.
    fn distance_to_next(&self, head: usize) -> [usize; 2] {
        let (in_row, out_row) = self.rows();
        let last = head + 1 == self.heads;
        [in_row, out_row].map(|row| if last { self.seq * row - head * self.head_dim } else { self.head_dim })
    }

    fn array(&self) -> [usize; 4] {
        [self.batch, self.seq, self.heads, self.head_dim]
    }
}

#[cfg(test)]
mod tests;
