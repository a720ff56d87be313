//! Cross attention with the heads cut over tp: the queries of a sequence read the keys and values of another one.

use crate::linear::require_even;
use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::Mesh;
use meshwork_tensor::op::{Mask, Pattern};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `x + dropout(concat_heads(softmax(QKᵀ/√d) V) · Woᵀ + bo)`, where `Q = x̂ · Wqᵀ + bq` and
/// `[K, V] = memory · Wkvᵀ + bkv`, as a decoder reads the states of an encoder. Each rank of tp has heads/tp of the
/// heads. x̂ is the normed input. Biases and residual are optional.
#[derive(Clone, Debug)]
pub struct ParallelCrossAttention {
    name: String,
    q: ColumnLinear,
    kv: ColumnLinear,
    out: RowLinear,
}

impl ParallelCrossAttention {
    /// Declares `{name}.q` [heads, head_dim, hidden] cut along heads, `{name}.kv` [2, hidden, hidden] (keys, then
    /// values) cut along their features and `{name}.out` [hidden, heads, head_dim] cut along heads, with biases or
    /// without. `init` has the initial values of the input projections and of the output projection.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        heads: usize,
        bias: bool,
        [init, out]: [Init; 2],
    ) -> Result<Self> {
        let ([q_name, kv_name, out_name], each) =
            (["q", "kv", "out"].map(|part| format!("{name}.{part}")), [heads, hidden / heads]);
        require_even(mesh, &q_name, &each, 0)?;
        Ok(Self {
            name: name.to_owned(),
            q: ColumnLinear::new(params, mesh, &q_name, hidden, (&each, 0), bias, init)?,
            kv: ColumnLinear::new(params, mesh, &kv_name, hidden, (&[2, each[0] * each[1]], 1), bias, init)?,
            out: RowLinear::new(params, mesh, &out_name, (&each, 0), hidden, bias, out)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` and `memory [b, keys, hidden]` in the region → `[b, s, hidden]` in it.
    /// `lengths` are the keys of each sequence, `[b]` in i32, where those behind fill it up.
    #[expect(clippy::too_many_arguments, reason = "one more than self-attention, and what is its mask")]
    pub fn forward(
        &self,
        tape: &Tape,
        normed: &Var,
        memory: &Var,
        region: Region,
        residual: Option<&Var>,
        lengths: Option<&Var>,
        dropout: f32,
    ) -> Result<Var> {
        // [b, s, heads/tp, d], Shard(heads), and [b, keys, 2, heads · d/tp], Shard(features)
        let q = self.q.forward_adapted(tape, &region.enter(normed)?, normed, region)?;
        let kv = self.kv.forward_adapted(tape, &region.enter(memory)?, memory, region)?;
        let mask = Mask { pattern: Pattern::Cross, lengths, ..Mask::default() };
        let mixed = q.grouped_attention(&kv, None, mask, Some((dropout, &self.name)))?; // [b, s, heads/tp, d]
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + b, + residual
    }
}
