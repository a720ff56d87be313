//! Causal self-attention on a fused qkv tensor, and with groups of heads that share keys and values.

use super::Rotary;
use super::table::*;
use crate::random::Key;
use meshwork_core::Buffer;
use std::ops::Range;

/// Extents of `qkv [batch, seq, 3, heads, head_dim]`; `out` is `[batch, seq, heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Heads on this rank.
    pub heads: usize,
    /// Features of a head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// (query, key) pairs that the causal mask keeps, over all heads and sequences, if each sequence is one document.
    pub fn pairs(&self) -> u64 {
        let seq = self.seq as u64;
        (self.batch * self.heads) as u64 * (seq * (seq + 1) / 2)
    }

    /// Forward: two products, QKᵀ and PV.
    pub fn forward_flops(&self) -> u64 {
        4 * self.head_dim as u64 * self.pairs()
    }

    /// Backward: QKᵀ again, dV, dP, dQ, dK.
    pub fn backward_flops(&self) -> u64 {
        10 * self.head_dim as u64 * self.pairs()
    }
}

/// Queries `[batch, seq, heads, head_dim]`, and keys and values `[batch, keys, 2, kv_heads, head_dim]` that groups of
/// heads share; `out` has the shape of the queries. Query i is token `first_query` + i of a sequence, key j token
/// `first_key` + j, and a query sees the keys up to its own: queries behind the last key see all of them. A query that
/// sees no key, because its document begins behind them, has zeros as its result and -∞ as its log-sum-exp.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedShape {
    /// Extents of the queries.
    pub queries: AttentionShape,
    /// Keys and values of each sequence in memory.
    pub keys: usize,
    /// The token of the first query.
    pub first_query: usize,
    /// The token of the first key: not behind the first query.
    pub first_key: usize,
    /// Tokens of a whole sequence. Positions of documents are those of all, and dropout numbers pairs of them.
    pub sequence: usize,
    /// Heads of queries here to one of keys and values.
    pub group: usize,
    /// Heads of keys and values in memory.
    pub kv_heads: usize,
    /// The head of keys and values for the first group of query heads; each following group reads the next one.
    pub first_kv_head: usize,
    /// The rotary embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
}

impl GroupedShape {
    /// Every head with keys and values of its own, every query with a key.
    pub fn alone(queries: AttentionShape) -> Self {
        let (keys, kv_heads) = (queries.seq, queries.heads);
        Self {
            queries,
            keys,
            first_query: 0,
            first_key: 0,
            sequence: keys,
            group: 1,
            kv_heads,
            first_kv_head: 0,
            rotary: None,
        }
    }

    /// The tokens that the queries are.
    pub fn tokens(&self) -> Range<usize> {
        self.first_query..self.first_query + self.queries.seq
    }

    /// The tokens that the keys are.
    pub fn key_tokens(&self) -> Range<usize> {
        self.first_key..self.first_key + self.keys
    }

    /// Whether the queries are all tokens.
    pub fn is_whole(&self) -> bool {
        self.tokens() == (0..self.keys)
    }

    /// Elements of keys and values.
    pub fn kv_elements(&self) -> usize {
        self.queries.batch * self.keys * 2 * self.kv_heads * self.queries.head_dim
    }

    /// (query, key) pairs that the causal mask keeps, over all heads and sequences of one document each.
    pub fn pairs(&self) -> u64 {
        let AttentionShape { batch, heads, .. } = self.queries;
        (batch * heads) as u64 * Self::pairs_among(self.tokens(), self.key_tokens())
    }

    /// Pairs of a token of `queries` and a token of `keys` that is not behind it.
    pub fn pairs_among(queries: Range<usize>, keys: Range<usize>) -> u64 {
        let seen = |end: usize| {
            let own = end.min(keys.end).saturating_sub(keys.start) as u64;
            own * (own + 1) / 2 + (end.saturating_sub(keys.end) * keys.len()) as u64
        };
        seen(queries.end) - seen(queries.start)
    }

    /// Forward: two products, QKᵀ and PV.
    pub fn forward_flops(&self) -> u64 {
        4 * self.queries.head_dim as u64 * self.pairs()
    }

    /// Backward: QKᵀ again, dV, dP, dQ, dK.
    pub fn backward_flops(&self) -> u64 {
        10 * self.queries.head_dim as u64 * self.pairs()
    }
}

/// Dropout of attention probabilities, by global position: (sample, head, query, key).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// Probability of dropping, in [0, 1).
    pub p: f32,
    /// The stream of randomness: seed, step and layer.
    pub key: Key,
    /// Global index of the first sequence.
    pub first_sample: u64,
    /// Global index of the first head.
    pub first_head: u64,
    /// Heads over all ranks.
    pub global_heads: u64,
}

/// Several documents packed into a sequence.
#[derive(Clone, Copy, Debug)]
pub struct DocumentPositions<'a> {
    /// The position of each token in its document, `[batch, seq]` in i32: 0 begins a document, and each other position
    /// is its predecessor plus one. A sequence may begin at any position below `seq`.
    pub positions: &'a Buffer,
    /// Whether tokens attend only to their own document. Rotary embeddings follow the positions in either case.
    pub apart: bool,
}

/// Masks of attention, besides the causal mask.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMasks<'a> {
    /// Dropout of attention probabilities.
    pub dropout: Option<&'a AttentionDropout>,
    /// The documents of each sequence; without them, a sequence is one document.
    pub documents: Option<DocumentPositions<'a>>,
}

kernels! {
    /// Causal attention, scaled by 1/√head_dim, without the s×s matrix of all heads. All but `decode` take 16 bits.
    pub trait Attention at attention {
        /// (out, lse [batch, heads, seq]): lse is the log-sum-exp of each row of scores.
        fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)>
            | profile(Attention: qkv), halves(as_is),
              meta(flops Attention: shape.forward_flops();
                   qkv => qkv.count() / 3, qkv.dtype().widened() => shape.batch * shape.heads * shape.seq);

        /// dqkv; probabilities are recomputed from lse.
        fn causal_grad(
            &self,
            shape: AttentionShape,
            dout: &Buffer,
            qkv: &Buffer,
            out: &Buffer,
            lse: &Buffer,
            masks: AttentionMasks<'_>,
        ) -> Result<Buffer>
            | profile(Attention: dout, qkv, out, lse), halves(alike dout, qkv, out -> qkv),
              meta(flops Attention: shape.backward_flops(); like qkv);

        /// (out, lse) of groups.
        fn grouped(
            &self,
            shape: GroupedShape,
            q: &Buffer,
            kv: &Buffer,
            masks: AttentionMasks<'_>,
        ) -> Result<(Buffer, Buffer)>
            | profile(Attention: q, kv), halves(alike q, kv -> q),
              meta(flops Attention: shape.forward_flops(); q => q.count(),
                   q.dtype().widened() => shape.queries.batch * shape.queries.heads * shape.queries.seq);

        /// Writes the keys, rotated, and the values of the queries' tokens into the cache, `[batch, keys, 2, kv_heads,
        /// head_dim]`, behind those of the tokens before, and returns the output of the queries.
        fn decode(&self, shape: GroupedShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer>
            | profile(Attention: q, kv), halves({
                  let [wide_q, kv] = self.all_wide([q, kv])?;
                  let out = self.write(cache, 0..cache.count(), true, |cache, _| {
                      self.inner.attention()?.decode(shape, &wide_q, &kv, cache)
                  })?;
                  self.rounded(out, q.dtype())
              }), meta(flops Attention: shape.forward_flops(); like q);

        /// (dq, dkv) of groups: dkv is summed over the heads of a group in the [tree](meshwork_core::tree), and
        /// zero, of either sign, for keys and values that no query here sees.
        #[expect(clippy::too_many_arguments, reason = "one more than without groups")]
        fn grouped_grad(
            &self,
            shape: GroupedShape,
            dout: &Buffer,
            q: &Buffer,
            kv: &Buffer,
            out: &Buffer,
            lse: &Buffer,
            masks: AttentionMasks<'_>,
        ) -> Result<(Buffer, Buffer)>
            | profile(Attention: dout, q, kv, out, lse), halves({
                  let (dtypes, [dout, q, kv, out]) = ([q, kv].map(Buffer::dtype), &self.alike([dout, q, kv, out])?);
                  let (dq, dkv) = self.inner.attention()?.grouped_grad(shape, dout, q, kv, out, lse, masks)?;
                  Ok((self.rounded(dq, dtypes[0])?, self.rounded(dkv, dtypes[1])?))
              }),
              meta(flops Attention: shape.backward_flops(); q => q.count(), kv => kv.count());

        /// Joins the attention of the same queries over other keys, (`part`, `part_lse`), to `out [batch, seq, heads,
        /// head_dim]` and `lse [batch, heads, seq]`: the results of a softmax over the keys of both. All are of the
        /// type of lse.
        fn join(
            &self,
            shape: AttentionShape,
            out: &mut Buffer,
            lse: &mut Buffer,
            part: &Buffer,
            part_lse: &Buffer,
        ) -> Result<()>
            | profile(Attention: part, part_lse, out, out, lse, lse), halves(as_is), meta(nothing);
    }
}
