//! Causal self-attention on a fused qkv tensor, and with groups of heads that share keys and values.

use super::Rotary;
use super::table::*;
use crate::random::Key;
use meshwork_core::Buffer;

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

/// Queries `[batch, seq, heads, head_dim]`, and keys and values `[batch, seq, 2, kv_heads, head_dim]` that groups of
/// heads share; `out` has the shape of the queries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedShape {
    /// Extents of the queries.
    pub queries: AttentionShape,
    /// Query heads per head of keys and values.
    pub group: usize,
    /// Heads of keys and values in memory.
    pub kv_heads: usize,
    /// The head of keys and values for the first group of query heads; each following group reads the next one.
    pub first_kv_head: usize,
    /// The rotary embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
}

impl GroupedShape {
    /// Multi-head attention: every query head has its own keys and values.
    pub fn alone(queries: AttentionShape) -> Self {
        Self { queries, group: 1, kv_heads: queries.heads, first_kv_head: 0, rotary: None }
    }
}

/// Attention of new tokens to the tokens in a cache and to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeShape {
    /// Extents of the new tokens' queries, keys and values.
    pub new: GroupedShape,
    /// Tokens of each sequence in the cache.
    pub past: usize,
    /// Tokens of each sequence for which the cache has room.
    pub capacity: usize,
}

impl DecodeShape {
    /// Elements of the cache, `[batch, capacity, 2, kv_heads, head_dim]`.
    pub fn cache_elements(&self) -> usize {
        let GroupedShape { queries, kv_heads, .. } = self.new;
        queries.batch * self.capacity * 2 * kv_heads * queries.head_dim
    }

    /// FLOPs of two products for each new token, over all tokens up to itself.
    pub fn flops(&self) -> u64 {
        let of = self.new.queries;
        let earlier = (of.batch * of.heads * of.seq * self.past) as u64;
        4 * of.head_dim as u64 * (earlier + of.pairs())
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
            | profile(Attention: qkv), halves(as_is);

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
            | profile(Attention: dout, qkv, out, lse), halves(alike dout, qkv, out -> qkv);

        /// (out, lse) of groups.
        fn grouped(
            &self,
            shape: GroupedShape,
            q: &Buffer,
            kv: &Buffer,
            masks: AttentionMasks<'_>,
        ) -> Result<(Buffer, Buffer)>
            | profile(Attention: q, kv), halves(alike q, kv -> q);

        /// Appends the rotated keys and the values of the new tokens to the cache, and returns the attention output of
        /// the new tokens. The cache is `[batch, capacity, 2, kv_heads, head_dim]`.
        fn decode(&self, shape: DecodeShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer>
            | profile(Attention: q, kv), halves(own);

        /// (dq, dkv) of groups: dkv is summed over the heads of a group in the [tree](meshwork_core::tree), and zero
        /// for heads of keys and values that no query head of this rank reads.
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
            | profile(Attention: dout, q, kv, out, lse), halves(own);
    }
}
