//! Self-attention on one rank: with keys and values for each head, and with groups of heads that share them.

use crate::Linear;
use meshwork_tensor::op::{GroupedHeads, Mask, Rotary};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `y = concat_heads(softmax(QKᵀ/√d) V) · Woᵀ + bo`, where `[Q, K, V] = x · Wqkvᵀ + bqkv`, the biases optional.
#[derive(Clone, Debug)]
pub struct SelfAttention {
    name: String,
    qkv: Linear,
    out: Linear,
}

impl SelfAttention {
    /// Declares `{name}.qkv` [3, heads, head_dim, hidden] and `{name}.out` [hidden, heads, head_dim], with biases or
    /// without.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        hidden: usize,
        heads: usize,
        bias: bool,
        init: impl Into<Init>,
        out_init: impl Into<Init>,
    ) -> Result<Self> {
        let (head_dim, part) = (hidden / heads, |part: &str| format!("{name}.{part}"));
        Ok(Self {
            qkv: Linear::structural(params, &part("qkv"), &[hidden], &[3, heads, head_dim], bias, init)?,
            out: Linear::structural(params, &part("out"), &[heads, head_dim], &[hidden], bias, out_init)?,
            name: name.to_owned(),
        })
    }

    /// `x [b, s, hidden] → [b, s, hidden]`. `mask` says which tokens see each other: by default each sees itself and
    /// those before it. `dropout` is the probability of dropping an attention weight.
    pub fn forward<'a>(&self, tape: &Tape, x: &Var, mask: impl Into<Mask<'a>>, dropout: f32) -> Result<Var> {
        let qkv = self.qkv.forward(tape, x)?; // [b, s, 3, heads, d]
        let mixed = qkv.self_attention(mask, Some((dropout, &self.name)))?; // [b, s, heads, d]
        self.out.forward(tape, &mixed)
    }
}

/// The same with groups of heads that share keys and values (Ainslie et al., 2023): `Q = x · Wqᵀ + bq`, `[K, V] = x ·
/// Wkvᵀ + bkv`, where K and V have fewer heads. Queries and keys are rotated by their positions (Su et al., 2021) if
/// there is a rotary embedding.
#[derive(Clone, Debug)]
pub struct GroupedSelfAttention {
    name: String,
    rotary: Option<Rotary>,
    q: Linear,
    kv: Linear,
    out: Linear,
}

impl GroupedSelfAttention {
    /// Declares `{name}.q` [heads, head_dim, hidden], `{name}.kv` [2, kv_heads · head_dim, hidden] (keys, then values)
    /// and `{name}.out` [hidden, heads, head_dim], with biases or without.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        hidden: usize,
        of: GroupedHeads,
        bias: bool,
        init: impl Into<Init>,
        out_init: impl Into<Init>,
    ) -> Result<Self> {
        let (GroupedHeads { heads, kv_heads, head_dim, rotary }, init) = (of, init.into());
        let part = |part: &str| format!("{name}.{part}");
        Ok(Self {
            q: Linear::structural(params, &part("q"), &[hidden], &[heads, head_dim], bias, init)?,
            kv: Linear::structural(params, &part("kv"), &[hidden], &[2, kv_heads * head_dim], bias, init)?,
            out: Linear::structural(params, &part("out"), &[heads, head_dim], &[hidden], bias, out_init)?,
            name: name.to_owned(),
            rotary,
        })
    }

    /// `x [b, s, hidden] → [b, s, hidden]`. `mask` says which tokens see each other: by default each sees itself and
    /// those before it. `dropout` is the probability of dropping an attention weight.
    pub fn forward<'a>(&self, tape: &Tape, x: &Var, mask: impl Into<Mask<'a>>, dropout: f32) -> Result<Var> {
        let q = self.q.forward(tape, x)?; // [b, s, heads, d]
        let kv = self.kv.forward(tape, x)?; // [b, s, 2, kv_heads · d]
        let mixed = q.grouped_attention(&kv, self.rotary, mask, Some((dropout, &self.name)))?; // [b, s, heads, d]
        self.out.forward(tape, &mixed)
    }
}
