//! Self-attention with the heads cut over tp: with keys and values for each head, and with groups of heads that share
//! them.

use crate::linear::require_even;
use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::{Axis, Mesh};
use meshwork_tensor::op::{GroupedHeads, Mask, Rotary};
use meshwork_tensor::{Declarations, Error, Init, Result, Tape, Var};

/// `x + dropout(concat_heads(softmax(QKᵀ/√d) V) · Woᵀ + bo)`, where `[Q, K, V] = x̂ · Wqkvᵀ + bqkv` and each rank of tp
/// has heads/tp of the heads. x̂ is the normed input. Biases and residual are optional.
#[derive(Clone, Debug)]
pub struct ParallelAttention {
    name: String,
    qkv: ColumnLinear,
    out: RowLinear,
}

impl ParallelAttention {
    /// Declares `{name}.qkv` [3, heads, head_dim, hidden] cut along heads and `{name}.out` [hidden, heads, head_dim]
    /// likewise, with biases or without. `init` has the initial values of each.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        heads: usize,
        bias: bool,
        [qkv, out]: [Init; 2],
    ) -> Result<Self> {
        let head_dim = hidden / heads;
        let (qkv_name, out_name) = (format!("{name}.qkv"), format!("{name}.out"));
        require_even(mesh, &qkv_name, &[3, heads, head_dim], 1)?;
        Ok(Self {
            name: name.to_owned(),
            qkv: ColumnLinear::new(params, mesh, &qkv_name, hidden, (&[3, heads, head_dim], 1), bias, qkv)?,
            out: RowLinear::new(params, mesh, &out_name, (&[heads, head_dim], 0), hidden, bias, out)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same. `mask` are documents, a window or both.
    pub fn forward<'a>(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        mask: impl Into<Mask<'a>>,
        dropout: f32,
    ) -> Result<Var> {
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        let qkv = self.qkv.forward(tape, &x)?; // [b, s, 3, heads/tp, d], Shard(heads)
        let mixed = qkv.causal_attention(mask, Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + b, + residual
    }

    /// The same with an attention of the caller's, as that of a sequence which other axes cut: `attend` takes queries
    /// `[b, s, heads/tp, d]`, keys and values `[b, s, 2, heads/tp · d]`, and (p, layer name) of the dropout.
    pub fn forward_by(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        attend: impl FnOnce(&Var, &Var, Option<(f32, &str)>) -> Result<Var>,
        dropout: f32,
    ) -> Result<Var> {
        let qkv = self.qkv.forward(tape, &region.enter(normed)?)?; // [b, s, 3, heads/tp, d], Shard(heads)
        let q = qkv.narrow(2, 0..1)?.squeeze(2)?; // [b, s, heads/tp, d]
        let kv = qkv.narrow(2, 1..3)?.flatten(3..5)?; // [b, s, 2, heads/tp · d]
        let mixed = attend(&q, &kv, Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + b, + residual
    }
}

/// The same with groups of heads that share keys and values (Ainslie et al., 2023): `Q = x̂ · Wqᵀ + bq`, `[K, V] = x̂ ·
/// Wkvᵀ + bkv`. Queries and keys are rotated by their positions if there is a rotary embedding.
///
/// Where tp divides the heads of keys and values, each rank holds whole groups. Where there are fewer of these heads
/// than ranks, the features of K and V are still cut evenly, both weights and products. The activations are gathered
/// over tp, and each rank reads the heads that its queries need. Their gradient is `Partial`; the backward of the
/// gather sums and cuts it. So the parameters are the same on every mesh, nothing is computed twice, and no weight is
/// replicated.
#[derive(Clone, Debug)]
pub struct ParallelGroupedAttention {
    name: String,
    rotary: Option<Rotary>,
    q: ColumnLinear,
    kv: ColumnLinear,
    /// Whether ranks share heads of keys and values.
    gathered: bool,
    out: RowLinear,
}

/// The dim of the features of `[b, s, 2, kv_heads · d]`.
const FEATURES: usize = 3;

impl ParallelGroupedAttention {
    /// Declares `{name}.q` [heads, head_dim, hidden] cut along heads, `{name}.kv` [2, kv_heads · head_dim, hidden]
    /// (keys, then values) cut along their features, and `{name}.out` [hidden, heads, head_dim] cut along heads, with
    /// biases or without. `init` has the initial values of the input projections and of the output projection.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        of: GroupedHeads,
        bias: bool,
        [init, out]: [Init; 2],
    ) -> Result<Self> {
        let GroupedHeads { heads, kv_heads, head_dim, rotary } = of;
        let [q_name, kv_name, out_name] = ["q", "kv", "out"].map(|part| format!("{name}.{part}"));
        require_even(mesh, &q_name, &[heads, head_dim], 0)?;
        let q = ColumnLinear::new(params, mesh, &q_name, hidden, (&[heads, head_dim], 0), bias, init)?;
        let kv = ColumnLinear::new(params, mesh, &kv_name, hidden, (&[2, kv_heads * head_dim], 1), bias, init)?;
        require_groups(mesh, name, of)?;
        Ok(Self {
            name: name.to_owned(),
            rotary,
            q,
            kv,
            gathered: !kv_heads.is_multiple_of(mesh.degree(Axis::Tp)),
            out: RowLinear::new(params, mesh, &out_name, (&[heads, head_dim], 0), hidden, bias, out)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same. `mask` are documents, a window or both.
    pub fn forward<'a>(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        mask: impl Into<Mask<'a>>,
        dropout: f32,
    ) -> Result<Var> {
        let mask = mask.into();
        let attend = |q: &Var, kv: &Var, rotary, dropout: Option<(f32, &str)>| {
            q.grouped_attention(&region.whole_keys(kv)?, rotary, mask, dropout)
        };
        self.forward_by(tape, normed, region, residual, attend, dropout)
    }

    /// The same with an attention of the caller's, as that of a sequence which other axes cut: `attend` takes queries
    /// `[b, s, heads/tp, d]`, keys and values `[b, s, 2, kv_heads · d/tp]`, or of all heads where there are fewer than
    /// ranks, the rotary embedding, and (p, layer name) of the dropout.
    pub fn forward_by(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        attend: impl FnOnce(&Var, &Var, Option<Rotary>, Option<(f32, &str)>) -> Result<Var>,
        dropout: f32,
    ) -> Result<Var> {
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        // [b, s, heads/tp, d], Shard(heads), and [b, s, 2, kv_heads · d/tp], Shard(features)
        let [q, mut kv] = ColumnLinear::forward_pair([&self.q, &self.kv], tape, &x)?;
        if self.gathered {
            kv = kv.all_gather(Axis::Tp, FEATURES)?; // [b, s, 2, kv_heads · d], Replicate
        }
        let mixed = attend(&q, &kv, self.rotary, Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + residual
    }
}

/// Refuses groups of heads that tp would cut unevenly.
fn require_groups(mesh: &Mesh, name: &str, of: GroupedHeads) -> Result<()> {
    let GroupedHeads { heads, kv_heads, .. } = of;
    let degree = mesh.degree(Axis::Tp);
    let refuse = |extent, degree, problem| {
        Err(Error::Placement { what: name.to_owned(), dim: 0, extent, axis: Axis::Tp, degree, problem })
    };
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return refuse(
            heads,
            degree,
            format!("the {kv_heads} heads of keys and values must divide the {heads} of queries"),
        );
    }
    let (held, group) = (heads / degree, heads / kv_heads);
    if held.is_multiple_of(group) || group.is_multiple_of(held) {
        return Ok(());
    }
    let problem = format!("each rank must hold whole groups of {group} heads, or an equal part of one");
    refuse(heads, degree, problem)
}
