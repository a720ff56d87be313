//! Attention of many heads, without the matrix of all pairs: causal self attention, and other [patterns](Reach).
//! More than 400 lines: the calls of every form, and what each promises of its sums.
//!
//! Layout: `qkv[batch, seq, 3, heads, head_dim]`, `out[batch, seq, heads, head_dim]`, `lse[batch, heads, seq]`. Per
//! sample and head, with `S = Q Kᵀ / √head_dim` for `j <= i` and `M` the dropout factors (1 without dropout):
//! `lse_i = ln Σ_j e^{S_ij}`, `P = e^{S - lse}`, `O = (P∘M) V`. Backward, `P` recomputed from `lse` (as in Dao et
//! al., arXiv:2205.14135): `dV = (P∘M)ᵀ dO`, `dP = (dO Vᵀ)∘M`, `D_i = Σ_e dO_ie O_ie`, `dS = P∘(dP - D)`,
//! `dQ = dS K / √head_dim`, `dK = dSᵀ Q / √head_dim`.
//!
//! Or grouped (Ainslie et al., arXiv:2305.13245): `q[batch, seq, heads, head_dim]` and
//! `kv[batch, keys, 2, kv_heads, head_dim]`, where several heads of queries share one head of keys and values; its `dK`
//! and `dV` are the sums over them. The queries may be [some of the tokens](Keys) that the keys are of, in several
//! runs. Queries and keys may be [rotated](Angles) by their positions first. Scores may have a soft cap:
//! `S ← cap tanh(S/cap)`, `dS ← dS (1 - (S/cap)²)`. Sequences may be [packed](Packing) with documents, each computed as
//! if it were a sequence by itself. With a window blocks of keys that no query of a block sees are not computed. In
//! other patterns each query stands for a causal one that is further on. A shift may be added to each score.
//!
//! # The order of sums
//!
//! Each product is summed in tiles, one chain in the order of its terms (see `tiles`), and blocks of terms are added
//! one after another:
//!
//! - `S` and `dP`: one chain over the features.
//! - `O`: over the keys, in blocks of 256 from key 0; multiplied at the end by one over the row's total of
//!   `e^{S - max}`, which is summed in the same order.
//! - `dQ`: over the keys, in blocks of 128 from key 0. `dK` and `dV`: over the queries, in blocks of 128 from query 0;
//!   then over the heads of a group, in the [tree](meshwork_core::tree); then over the runs of queries, one after the
//!   other.
//!
//! Masked elements are skipped or exactly zero, and a zero changes no sum. So the bits of a row of `O` or `dQ` depend
//! only on its own query and the keys before it, and the bits of a row of `dK` or `dV` only on the queries after it:
//! not on later positions, other heads, other samples, or the thread.
//!
//! # The precision
//!
//! In [`Precision::Bf16`](meshwork_tensor::Precision::Bf16) both operands of each of these products are rounded to
//! `bf16`: `Q`, `K`, `V` and `dO`, but also `e^{S - max}∘M` in `O`, `P∘M` in `dV`, and `dS / √head_dim` in `dQ` and
//! `dK`. Sums stay `f32`, and so does everything between the products: softmax with its totals and `lse`, `D`, dropout,
//! and the rotation before them. `f64` stays `f64`. [`Precision::Tf32`](meshwork_tensor::Precision::Tf32) rounds the
//! same operands to TF32.
//!
//! Heads may be stored in 16 bits ([`StoredAs`]): the rows of a group are copied to f32 before the computation, and
//! rounded once afterwards, bitwise identical to copies of the whole tensors.
//!
//! # The work
//!
//! Groups of heads (without groups: heads) are distributed over threads. One thread computes a whole group, and packs
//! its keys and values once. Forward: panels of queries, as wide as a tile, are multiplied with all keys, with a row of
//! scores for each key. A vector holds one key's scores of many queries, so that maxima, totals and exponentials need
//! no sums within a vector. One or two queries, as in decoding, have a row each. Backward: over blocks
//! of 128 keys, and for each over blocks of 128 queries, so that frequently written memory stays in the L2 cache,
//! however long the sequence is. On the diagonal, both stop at a tile's edge.
//!
//! A head's rows are short and far apart, so no CPU prefetches them; loading them from memory would take a third of the
//! time. A thread takes neighbouring heads one after the other (see `runs`), and the tiles of one head prefetch the
//! rows of the next, including its gradients, into the L2 cache (see `ahead`), unless the sequence is too long for the
//! cache: then the rows that tiles read in place are copied first, close together.

mod ahead;
mod backward;
mod bias;
mod documents;
mod forward;
mod heads;
mod join;
mod layout;
mod rotary;
mod rows;
mod runs;
mod scratch;
mod shift;
mod stored;
mod tiles;

use super::dropout::Mask;
pub use bias::pair_bias_grad;
pub use documents::{Misplaced, Packing, pairs};
use heads::{RowsMut, heads_mut};
pub use join::join;
use layout::{Call, Layout};
use meshwork_core::pool;
use meshwork_tensor::kernel::Reach;
pub use rotary::{Angles, turn};
use rows::VECTOR;
use runs::Runs;
use std::ops::Range;
use stored::Placed;
pub use stored::StoredAs;
pub use tiles::{Tiled, Tiles};

/// Keys in a block of the forward's sums: an even number, for whole words of `bf16`.
pub const FORWARD_KEYS: usize = 256;

/// Queries and keys in a block of the backward, an even number: two such squares take a quarter of a common L2 cache.
pub const BLOCK: usize = 128;

/// Distance between rows of the backward's squares of scores: one vector longer than a row, so that rows do not all map
/// to the same sets of the L1 cache.
const STRIDE: usize = BLOCK + VECTOR;

/// The dims of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Samples.
    pub batch: usize,
    /// Queries of each sample.
    pub seq: usize,
    /// Query heads on this rank.
    pub heads: usize,
    /// Elements of a head's query, key and value.
    pub head_dim: usize,
    /// The keys of each sample.
    pub keys: Keys,
}

/// The keys of a sample, and the place of its queries among them: query i is token `first_query` + i, key j token
/// `first` + j, and a query sees the keys up to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Keys in memory.
    pub count: usize,
    /// The token of the first query.
    pub first_query: usize,
    /// The token of the first key: not behind the first query.
    pub first: usize,
    /// Tokens of a whole sequence.
    pub sequence: usize,
}

impl Keys {
    /// The keys of all tokens, and where queries begin among them.
    pub fn new(count: usize, first_query: usize) -> Self {
        Self { count, first_query, first: 0, sequence: count }
    }

    /// The tokens that they are.
    pub fn tokens(&self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

impl Dims {
    /// `[batch, seq, heads, head_dim]`, with a key for each query.
    pub fn new([batch, seq, heads, head_dim]: [usize; 4]) -> Self {
        Self { batch, seq, heads, head_dim, keys: Keys::new(seq, 0) }
    }

    /// The tokens that the queries are.
    pub fn queries(&self) -> Range<usize> {
        self.keys.first_query..self.keys.first_query + self.seq
    }
}

/// Groups of query heads that share heads of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Query heads per head of keys and values; divides the number of local query heads.
    pub size: usize,
    /// Heads of keys and values in memory.
    pub kv_heads: usize,
    /// The head of keys and values of the first group of query heads; each following group has the next one.
    pub first: usize,
}

/// Dropout of the probabilities. Element `(sample, head, i, j)` of the global `[samples, heads, seq, seq]` determines
/// the random bits.
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

/// Which keys queries see.
#[derive(Clone, Copy, Debug, Default)]
pub struct Masks<'a> {
    /// Dropout of probabilities.
    pub dropout: Option<Dropout>,
    /// The documents of each sequence.
    pub packing: Option<&'a Packing>,
    /// Keys that a query sees at most, the last ones.
    pub window: Option<usize>,
    /// Tokens from a query to the last key that it sees: 0 in causal attention.
    pub ahead: usize,
    /// The keys of each sequence, in tokens: those behind are hidden.
    pub lengths: Option<&'a [usize]>,
    /// The tokens that the queries are, in runs, if they are not those from `first_query` on.
    pub runs: Option<&'a [Range<usize>]>,
    /// The soft cap of scores.
    pub cap: Option<f64>,
    /// The slope of each head, by which scores fall with the distance of query and key.
    pub slopes: Option<&'a [f32]>,
}

impl Masks<'_> {
    /// The keys that a query sees.
    pub fn reach(&self) -> Reach {
        Reach { ahead: self.ahead, window: self.window }
    }
}

impl Dropout {
    /// Global index of the first element of a head, both local.
    fn head_start(&self, dims: Dims, sample: usize, head: usize) -> u64 {
        let sample = self.first_sample + sample as u64;
        let head = self.first_head + head as u64;
        (sample * self.global_heads + head) * (dims.keys.sequence * dims.keys.sequence) as u64
    }
}

/// The operands and results of the forward that the backward needs.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, S, T> {
    /// The forward's queries; of `qkv`, all of it.
    pub q: &'a [S],
    /// The forward's keys and values; of `qkv`, all of it.
    pub kv: &'a [S],
    /// The forward's output.
    pub out: &'a [S],
    /// The forward's log-sum-exp per row.
    pub lse: &'a [T],
}

/// `out` and `lse` from `qkv`, in the precision of the tiles. Overwrites both.
pub fn forward<S: StoredAs<T>, T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    qkv: &[S],
    out: &mut [S],
    lse: &mut [T],
    masks: Masks<'_>,
) {
    dims.check(&[qkv.len() / 3, out.len()], lse.len());
    assert_eq!(qkv.len(), 3 * out.len(), "elements of qkv for {dims:?}");
    let groups = Groups::alone(dims);
    let call = Call { tiles, dims, groups, layout: Layout::fused(dims), angles: None, masks, bias: None };
    forward_of(&call, [qkv, qkv], out, lse);
}

/// `out` and `lse` from `q` and `kv`, in the precision of the tiles. Overwrites both.
#[expect(clippy::too_many_arguments, reason = "two operands and a bias, two results, and what they are")]
pub fn grouped_forward<S: StoredAs<T>, T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    groups: Groups,
    angles: Option<Angles<'_, T>>,
    [q, kv]: [&[S]; 2],
    out: &mut [S],
    lse: &mut [T],
    masks: Masks<'_>,
    bias: Option<&[T]>,
) {
    dims.check(&[q.len(), out.len()], lse.len());
    groups.check(dims, &[kv.len()]);
    let call = Call { tiles, dims, groups, layout: Layout::apart(dims, groups), angles, masks, bias };
    forward_of(&call, [q, kv], out, lse);
}

/// The forward of all heads; queries are in the first slice, keys and values in the second.
fn forward_of<S: StoredAs<T>, T: Tiled>(call: &Call<'_, T>, [q, kv]: [&[S]; 2], out: &mut [S], lse: &mut [T]) {
    let Call { dims, groups, layout, .. } = *call;
    call.check();
    let (read, used) = (call.as_read::<S>(), groups.used(dims));
    if call.hides_all_keys() {
        out.fill(S::zeroed());
        lse.fill(T::NEG_INFINITY);
    }
    let outputs = heads_mut::<1, S>(out, [dims.batch, dims.seq, used, groups.size * dims.head_dim]);
    let outputs = outputs.zip(lse.chunks_mut((groups.size * dims.seq).max(1)));
    let items = Runs::new(dims.batch * used, groups.each(dims).zip(outputs), pool::threads());
    pool::for_each(items, |((group, ([mut out], lse)), next)| {
        for (rows, to_next) in call.parts(group, next) {
            let ([q_start, k_start, v_start], out) = (call.starts(group, rows), out.part(rows.queries.range(), 0));
            let (wide, to_next) = (groups.size * dims.head_dim, to_next.filter(|_| !S::COPIED));
            let [queries, keys] = [rows.queries.len, rows.keys.len];
            let operands = [
                Placed { rows: queries, from: &q[q_start..], row: layout.q.row, width: wide },
                Placed { rows: keys, from: &kv[k_start..], row: layout.k.row, width: dims.head_dim },
                Placed { rows: keys, from: &kv[v_start..], row: layout.v.row, width: dims.head_dim },
            ];
            stored::read(operands, |operands| {
                stored::write([out], |[out]| forward::part(&read, (group, rows), operands, out, lse, to_next));
            });
        }
    });
}

/// `dqkv` from `dout`, with the forward's tiles and masks. Overwrites it.
pub fn backward<S: StoredAs<T>, T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    saved: Saved<'_, S, T>,
    dout: &[S],
    dqkv: &mut [S],
    masks: Masks<'_>,
) {
    let Saved { q: qkv, kv, out, lse } = saved;
    dims.check(&[out.len(), dout.len()], lse.len());
    assert_eq!([qkv.len(), kv.len(), dqkv.len()], [3 * out.len(); 3], "elements of qkv for {dims:?}");
    let groups = Groups::alone(dims);
    let call = Call { tiles, dims, groups, layout: Layout::fused(dims), angles: None, masks, bias: None };
    if masks.lengths.is_some() {
        dqkv.fill(S::zeroed()); // of what no query reads, and of queries that see no key
    }
    let gradients = heads_mut::<3, S>(dqkv, [dims.batch, dims.seq, dims.heads, dims.head_dim]);
    backward_of(&call, saved, dout, gradients);
}

/// `dq` and `dkv` from `dout`, with the forward's tiles, groups, angles and masks. Overwrites both. Keys
/// and values that no query of this call reads get zeros.
#[expect(clippy::too_many_arguments, reason = "as above")]
pub fn grouped_backward<S: StoredAs<T>, T: Tiled>(
    tiles: Tiles<T>,
    dims: Dims,
    groups: Groups,
    angles: Option<Angles<'_, T>>,
    saved: Saved<'_, S, T>,
    dout: &[S],
    [dq, dkv]: [&mut [S]; 2],
    masks: Masks<'_>,
    bias: Option<&[T]>,
) {
    dims.check(&[saved.q.len(), dq.len(), saved.out.len(), dout.len()], saved.lse.len());
    groups.check(dims, &[saved.kv.len(), dkv.len()]);
    let Dims { batch, seq, head_dim, keys, .. } = dims;
    let Groups { size, kv_heads, first } = groups;
    let call = Call { tiles, dims, groups, layout: Layout::apart(dims, groups), angles, masks, bias };
    let used = groups.used(dims);
    // No query of this call reads the other heads and keys.
    let all_read = masks.runs.is_none() && masks.lengths.is_none() && dims.queries() == (0..keys.count);
    if used < kv_heads || !all_read {
        dkv.fill(S::zeroed());
    }
    if call.hides_all_keys() {
        dq.fill(S::zeroed());
    }
    let read = (0..batch).flat_map(|_| 0..kv_heads).map(move |head| (first..first + used).contains(&head));
    let of_kv = heads_mut::<2, S>(dkv, [batch, keys.count, kv_heads, head_dim]).zip(read);
    let of_kv = of_kv.filter(|(_, read)| *read).map(|(gradients, _)| gradients);
    let gradients =
        heads_mut::<1, S>(dq, [batch, seq, used, size * head_dim]).zip(of_kv).map(|([q], [k, v])| [q, k, v]);
    backward_of(&call, saved, dout, gradients);
}

/// The backward of all heads, whose gradients are given group by group.
fn backward_of<'g, S: StoredAs<T>, T: Tiled>(
    call: &Call<'_, T>,
    saved: Saved<'_, S, T>,
    dout: &[S],
    gradients: impl Iterator<Item = [RowsMut<'g, S>; 3]> + Send,
) {
    let Call { dims, groups, layout, .. } = *call;
    let Saved { q, kv, out, lse } = saved;
    call.check();
    let read = call.as_read::<S>();
    let items = Runs::new(dims.batch * groups.used(dims), groups.each(dims).zip(gradients), pool::threads());
    pool::for_each(items, |((group, [mut dq, dk, dv]), next)| {
        let lse = &lse[(group.sample * dims.heads + group.first_head(groups)) * dims.seq..];
        // The sums over all runs of queries are rounded once.
        stored::write([dk, dv], |mut sums| {
            if S::COPIED {
                sums.iter_mut().for_each(RowsMut::zero);
            }
            for (rows, to_next) in call.parts(group, next) {
                let ([q_start, k_start, v_start], o) = (call.starts(group, rows), call.out_start(group, rows));
                let (wide, to_next) = (groups.size * dims.head_dim, to_next.filter(|_| !S::COPIED && !rows.later));
                let [of_queries, of_keys] = [rows.queries, rows.keys];
                let operands = [
                    Placed { rows: of_queries.len, from: &q[q_start..], row: layout.q.row, width: wide },
                    Placed { rows: of_keys.len, from: &kv[k_start..], row: layout.k.row, width: dims.head_dim },
                    Placed { rows: of_keys.len, from: &kv[v_start..], row: layout.v.row, width: dims.head_dim },
                    Placed { rows: of_queries.len, from: &out[o..], row: layout.out.row, width: wide },
                    Placed { rows: of_queries.len, from: &dout[o..], row: layout.out.row, width: wide },
                ];
                // A later run of queries adds to what the runs before it have written.
                let each = of_keys.len * dims.head_dim;
                let mut share = rows.later.then(|| vec![T::zeroed(); 2 * each]);
                let [k, v] = match &mut share {
                    None => sums.each_mut().map(|sum| sum.part(of_keys.range(), 0)),
                    Some(share) => {
                        let (k, v) = share.split_at_mut(each);
                        [k, v].map(|rows| RowsMut::new(rows, dims.head_dim))
                    }
                };
                stored::read(operands, |operands| {
                    stored::write([dq.part(of_queries.range(), 0)], |[q]| {
                        backward::part(&read, (group, rows), operands, lse, [q, k, v], to_next);
                    });
                });
                for (sum, share) in sums.iter_mut().zip(share.iter().flat_map(|share| share.chunks(each))) {
                    sum.part(of_keys.range(), 0).add(share);
                }
            }
        });
    });
}

/// Copies rows, so that they follow each other in memory.
fn copied_rows<'a, T: Copy>(from: &[T], row: usize, width: usize, to: &'a mut [T]) -> &'a [T] {
    to.chunks_exact_mut(width).zip(from.chunks(row)).for_each(|(to, from)| to.copy_from_slice(&from[..width]));
    to
}

/// A range cut into pieces of `len`; the last one may be shorter.
fn blocks(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(len).map(move |start| start..range.end.min(start + len))
}

/// A range cut at the multiples of `len`.
fn aligned(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let blocks = range.start / len..range.end.div_ceil(len);
    blocks.map(move |block| range.start.max(block * len)..range.end.min((block + 1) * len))
}

/// A range cut into the smallest number of pieces of at most `height`, all of about the same length.
fn panels(range: Range<usize>, height: usize) -> impl Iterator<Item = Range<usize>> {
    let pieces = range.len().div_ceil(height);
    // The first pieces are one longer. A division for each piece would take as long as some of its multiplications.
    let (each, longer) = (range.len() / pieces.max(1), range.len() % pieces.max(1));
    let edge = move |piece: usize| range.start + piece * each + piece.min(longer);
    (0..pieces).map(move |piece| edge(piece)..edge(piece + 1))
}
