//! Multi-head causal self-attention on one rank.

use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y = concat_heads(softmax(QKᵀ/√d) V) · Woᵀ + bo`, where `[Q, K, V] = x · Wqkvᵀ + bqkv`.
#[derive(Clone, Debug)]
pub struct SelfAttention {
    name: String,
    qkv: ParamId,
    qkv_bias: ParamId,
    out: ParamId,
    out_bias: ParamId,
}

impl SelfAttention {
    /// Declares `{name}.qkv` [3, heads, head_dim, hidden] and `{name}.out` [hidden, heads, head_dim] with biases.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        hidden: usize,
        heads: usize,
        std: f32,
        out_std: f32,
    ) -> Result<Self> {
        let head_dim = hidden / heads;
        let mut whole = |part: &str, dims: &[usize], role: Role, init: Init| {
            params.declare(format!("{name}.{part}"), dims, Placement::replicated(), role, init)
        };
        Ok(Self {
            qkv: whole("qkv.weight", &[3, heads, head_dim, hidden], Role::Weight, Init::Normal { std })?,
            qkv_bias: whole("qkv.bias", &[3, heads, head_dim], Role::Bias, Init::Zeros)?,
            out: whole("out.weight", &[hidden, heads, head_dim], Role::Weight, Init::Normal { std: out_std })?,
            out_bias: whole("out.bias", &[hidden], Role::Bias, Init::Zeros)?,
            name: name.to_owned(),
        })
    }

    /// `x [b, s, hidden] → [b, s, hidden]`. `dropout` is the probability of dropping an attention weight.
    pub fn forward(&self, tape: &Tape, x: &Var, dropout: f32) -> Result<Var> {
        let qkv = x.linear_bias(&tape.param(self.qkv)?, &tape.param(self.qkv_bias)?, 1)?; // [b, s, 3, heads, d]
        let mixed = qkv.causal_attention(Some((dropout, &self.name)))?; // [b, s, heads, d]
        mixed.linear_bias(&tape.param(self.out)?, &tape.param(self.out_bias)?, 2)
    }
}
