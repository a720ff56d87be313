//! Attention on a fused qkv tensor, and with groups of heads that share keys and values: causal, in both directions, or
//! over the keys of another sequence.

use super::table::*;
use super::{Rotary, TableGrad};
use crate::random::Key;
use meshwork_core::Buffer;
use std::iter;
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

/// Queries `[batch, seq, heads, head_dim]`, and keys and values `[batch, keys, 2, kv_heads, head_dim]` that groups of
/// heads share; `out` has the shape of the queries. Query i is token `first_query` + i of a sequence, or what the
/// [masks](fn@AttentionMasks::runs) say, and key j is token `first_key` + j. A query sees the keys that the
/// [masks](AttentionMasks::pattern) say: in causal attention those up to its own, so that queries behind the last key
/// see all of them.
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

    /// (query, key) pairs that the masks keep, over all heads and sequences of one document each, whole as far as keys
    /// go.
    pub fn pairs(&self, masks: &AttentionMasks<'_>) -> u64 {
        let (AttentionShape { batch, heads, .. }, reach) = (self.queries, masks.reach(*self));
        let pairs = masks.runs(*self).into_iter().map(|run| reach.pairs(run, self.key_tokens()));
        (batch * heads) as u64 * pairs.sum::<u64>()
    }

    /// Forward: two products, QKᵀ and PV.
    pub fn forward_flops(&self, masks: &AttentionMasks<'_>) -> u64 {
        4 * self.queries.head_dim as u64 * self.pairs(masks)
    }

    /// Backward: QKᵀ again, dV, dP, dQ, dK.
    pub fn backward_flops(&self, masks: &AttentionMasks<'_>) -> u64 {
        10 * self.queries.head_dim as u64 * self.pairs(masks)
    }
}

/// Pairs of one of `queries` and a key that it sees, among the tokens `keys`: its own, those before it, and with a
/// window no more than that many of them.
pub fn seen_pairs(queries: Range<usize>, keys: Range<usize>, window: Option<usize>) -> u64 {
    let up_to_own = |tokens: usize| {
        let own = tokens.min(keys.end).saturating_sub(keys.start) as u64;
        own * (own + 1) / 2 + (tokens.saturating_sub(keys.end) * keys.len()) as u64
    };
    let seen = |tokens: usize| up_to_own(tokens) - window.map_or(0, |window| up_to_own(tokens.saturating_sub(window)));
    seen(queries.end) - seen(queries.start)
}

/// Which keys a query sees, by their places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pattern {
    /// Its own token and those before it.
    #[default]
    Causal,
    /// All tokens of its sequence.
    Bidirectional,
    /// All keys: they are those of another sequence.
    Cross,
}

/// The keys that queries see, as causal queries see them that are `ahead` tokens further on, through a window of so
/// many keys: kernels know no other patterns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Tokens from a query to the last one that it sees.
    pub ahead: usize,
    /// Keys that it sees at most, the last ones.
    pub window: Option<usize>,
}

impl Reach {
    /// Pairs of one of `queries` and a key that it sees, among the tokens `keys`.
    ///
    /// ```
    /// use meshwork_tensor::kernel::Reach;
    ///
    /// // Of five tokens each sees itself and its neighbours: three, and two at the ends.
    /// assert_eq!(Reach { ahead: 1, window: Some(3) }.pairs(0..5, 0..5), 13);
    /// ```
    pub fn pairs(&self, queries: Range<usize>, keys: Range<usize>) -> u64 {
        seen_pairs(queries.start + self.ahead..queries.end + self.ahead, keys, self.window)
    }
}

/// Rows of heads whose features turn by the positions of their tokens, of `[batch, seq, all, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurnedHeads {
    /// The angles.
    pub rotary: Rotary,
    /// Tokens of a sequence.
    pub seq: usize,
    /// The position of the first of them.
    pub first: usize,
    /// Heads of a token in memory, such as those of keys and of values.
    pub all: usize,
    /// Heads of a token that turn, the first ones.
    pub heads: usize,
    /// Features of a head.
    pub head_dim: usize,
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

/// Which pairs of a query and a key count, and how much. The score of a pair is
/// `cap(q·k/√d) - slope·|distance| + bias`.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMasks<'a> {
    /// Which keys a query sees, as far as the other masks show them.
    pub pattern: Pattern,
    /// Dropout of attention probabilities.
    pub dropout: Option<&'a AttentionDropout>,
    /// The documents of each sequence; without them, a sequence is one document.
    pub documents: Option<DocumentPositions<'a>>,
    /// A query sees keys nearer than so many tokens: in causal attention at most as many, its own and those before it.
    /// A query that sees no key has the output 0 and the log-sum-exp -∞.
    pub window: Option<usize>,
    /// The keys of each sequence, `[batch]` in i32, from none to all: those behind are hidden from all queries.
    pub lengths: Option<&'a Buffer>,
    /// The tokens that the queries are, in runs; without them, those from `first_query` on.
    pub runs: Option<&'a [Range<usize>]>,
    /// The soft cap of scores, `cap · tanh(score/cap)` (Gemma 2, arXiv:2408.00118, section 2).
    pub cap: Option<f64>,
    /// The slope of each head here, by which its scores fall with the distance of query and key (ALiBi, Press et al.,
    /// arXiv:2108.12409).
    pub slopes: Option<&'a [f32]>,
    /// What is added to the score of each pair, `[heads, queries, keys]` in the type of the log-sum-exps.
    pub bias: Option<&'a Buffer>,
}

impl AttentionMasks<'static> {
    /// Causal attention over whole sequences, without dropout: the default.
    pub const CAUSAL: Self = Self {
        pattern: Pattern::Causal,
        dropout: None,
        documents: None,
        window: None,
        lengths: None,
        runs: None,
        cap: None,
        slopes: None,
        bias: None,
    };
}

impl AttentionMasks<'_> {
    /// The tokens that the queries are, in runs.
    pub fn runs(&self, shape: GroupedShape) -> Vec<Range<usize>> {
        self.runs.map_or_else(|| iter::once(shape.tokens()).collect(), <[_]>::to_vec)
    }

    /// The keys that one of these causal queries sees, if there are as many: what must travel to the queries where
    /// other ranks hold the keys.
    ///
    /// ```
    /// use meshwork_tensor::kernel::AttentionMasks;
    ///
    /// let masks = AttentionMasks { window: Some(4), ..AttentionMasks::default() };
    /// assert_eq!(masks.keys_of(&(10..12)), 7..12);
    /// ```
    pub fn keys_of(&self, queries: &Range<usize>) -> Range<usize> {
        let first = self.window.map_or(0, |window| (queries.start + 1).saturating_sub(window));
        first.min(queries.end)..queries.end
    }

    /// The keys that a query of this shape sees.
    pub fn reach(&self, shape: GroupedShape) -> Reach {
        match (self.pattern, self.window) {
            (Pattern::Causal, window) => Reach { ahead: 0, window },
            (Pattern::Bidirectional, Some(window)) => {
                let ahead = window.min(shape.key_tokens().end + 1) - 1;
                Reach { ahead, window: Some(window.saturating_add(ahead)) }
            }
            (Pattern::Bidirectional | Pattern::Cross, _) => Reach { ahead: shape.key_tokens().end, window: None },
        }
    }

    /// Whether scores are those of queries and keys alone, of causal attention over all keys.
    pub fn is_plain(&self) -> bool {
        self.pattern == Pattern::Causal && self.lengths.is_none() && self.slopes.is_none() && self.bias.is_none()
    }
}

kernels! {
    /// Attention, scaled by 1/√head_dim, without the s×s matrix of all heads. All but `turn` take 16 bits.
    pub trait Attention at attention {
        /// (out, lse [batch, heads, seq]): lse is the log-sum-exp of each row of scores.
        fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)>
            | profile(Attention: qkv), halves(as_is),
              meta(flops Attention: GroupedShape::alone(shape).forward_flops(&masks);
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
              meta(flops Attention: GroupedShape::alone(shape).backward_flops(&masks); like qkv);

        /// (out, lse) of groups.
        fn grouped(
            &self,
            shape: GroupedShape,
            q: &Buffer,
            kv: &Buffer,
            masks: AttentionMasks<'_>,
        ) -> Result<(Buffer, Buffer)>
            | profile(Attention: q, kv), halves(alike q, kv -> q),
              meta(flops Attention: shape.forward_flops(&masks); q => q.count(),
                   q.dtype().widened() => shape.queries.batch * shape.queries.heads * shape.queries.seq);

        /// A copy of heads after the rotation that [`grouped`](Self::grouped) applies with a rotary embedding.
        fn turn(&self, of: TurnedHeads, x: &Buffer) -> Result<Buffer>
            | profile(Attention: x), halves(wide x -> x), meta(like x);

        /// (dq, dkv) of groups: dkv is summed over the heads of a group in the [tree](meshwork_core::tree), then over
        /// the runs of queries one after the other, and zero, of either sign, for keys and values that no query here
        /// sees.
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
              meta(flops Attention: shape.backward_flops(&masks); q => q.count(), kv => kv.count());

        /// The gradient of the bias of pairs, a table of heads · queries rows that are as wide as there are keys: the
        /// sums over the samples, in blocks. Queries and keys do not turn.
        #[expect(clippy::too_many_arguments, reason = "as above, and the table")]
        fn pair_bias_grad(
            &self,
            shape: GroupedShape,
            dout: &Buffer,
            q: &Buffer,
            kv: &Buffer,
            out: &Buffer,
            lse: &Buffer,
            masks: AttentionMasks<'_>,
            into: TableGrad<'_>,
        ) -> Result<()>
            | profile(Attention: dout, q, kv, out, lse, into.buffer), halves({
                  let [dout, q, kv, out] = &self.all_wide([dout, q, kv, out])?;
                  let kernels = self.inner.attention()?;
                  self.write_table(into, |into| kernels.pair_bias_grad(shape, dout, q, kv, out, lse, masks, into))
              }),
              meta(flops Attention: shape.forward_flops(&masks); nothing);

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
