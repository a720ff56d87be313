//! Self-attention with the heads cut over tp: with keys and values for each head, and with groups of heads that share
//! them.

use crate::linear::require_even;
use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::{Axis, Mesh};
use meshwork_tensor::op::{GroupedHeads, Mask, Rotary};
use meshwork_tensor::{Declarations, Error, Init, ParamId, Placement, Result, Role, Tape, Var};

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

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same. `mask` says which tokens see each other: by
    /// default each sees itself and those before it.
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
        let qkv = self.qkv.forward_adapted(tape, &x, normed, region)?; // [b, s, 3, heads/tp, d], Shard(heads)
        let mixed = qkv.self_attention(mask, Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
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
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        let qkv = self.qkv.forward_adapted(tape, &x, normed, region)?; // [b, s, 3, heads/tp, d], Shard(heads)
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
    of: GroupedHeads,
    q: ColumnLinear,
    kv: ColumnLinear,
    /// Whether ranks share heads of keys and values.
    gathered: bool,
    norms: Option<HeadNorms>,
    /// The factor of queries, if it is not one.
    scale: Option<f64>,
    out: RowLinear,
}

/// The dim of the features of `[b, s, 2, kv_heads · d]`.
const FEATURES: usize = 3;

/// Whether the projections of an attention have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBias {
    /// The projections of queries, keys and values.
    pub input: bool,
    /// The output projection.
    pub output: bool,
}

impl From<bool> for AttentionBias {
    /// All of them, or none.
    fn from(all: bool) -> Self {
        Self { input: all, output: all }
    }
}

/// The features over which queries and keys are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOver {
    /// Each head by itself; all heads share the weight.
    Head,
    /// All heads together.
    Heads,
}

/// Root mean square norms of queries and keys.
#[derive(Clone, Copy, Debug)]
struct HeadNorms {
    over: NormOver,
    eps: f64,
    /// Of queries and of keys.
    weights: [ParamId; 2],
}

impl HeadNorms {
    /// `x [b, s, heads, d]` after the norm.
    fn of(&self, weight: &Var, x: &Var) -> Result<Var> {
        match self.over {
            NormOver::Head => x.rms_norm(weight, self.eps),
            NormOver::Heads => x.flatten(2..4)?.rms_norm(weight, self.eps)?.unflatten(2, &x.shape()[2..]),
        }
    }

    /// Whether a rank norms the heads that it holds. Where the sum of a norm runs over the heads of all ranks, or the
    /// gradient of its weight does and has one rank's bits, each rank norms the heads of all.
    fn is_local(&self, tape: &Tape) -> bool {
        self.over == NormOver::Head && tape.reduction_blocks().is_none()
    }
}

impl ParallelGroupedAttention {
    /// Declares `{name}.q` [heads, head_dim, hidden] cut along heads, `{name}.kv` [2, kv_heads · head_dim, hidden]
    /// (keys, then values) cut along their features, and `{name}.out` [hidden, heads, head_dim] cut along heads, with
    /// these biases. `init` has the initial values of the input projections and of the output projection.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        of: GroupedHeads,
        bias: impl Into<AttentionBias>,
        [init, out]: [Init; 2],
    ) -> Result<Self> {
        let (GroupedHeads { heads, kv_heads, head_dim, .. }, bias) = (of, bias.into());
        let [q_name, kv_name, out_name] = ["q", "kv", "out"].map(|part| format!("{name}.{part}"));
        require_even(mesh, &q_name, &[heads, head_dim], 0)?;
        let q = ColumnLinear::new(params, mesh, &q_name, hidden, (&[heads, head_dim], 0), bias.input, init)?;
        let kv = ColumnLinear::new(params, mesh, &kv_name, hidden, (&[2, kv_heads * head_dim], 1), bias.input, init)?;
        require_groups(mesh, name, of)?;
        Ok(Self {
            name: name.to_owned(),
            of,
            q,
            kv,
            gathered: !kv_heads.is_multiple_of(mesh.degree(Axis::Tp)),
            norms: None,
            scale: None,
            out: RowLinear::new(params, mesh, &out_name, (&[heads, head_dim], 0), hidden, bias.output, out)?,
        })
    }

    /// The same with root mean square norms of queries and keys before they turn. Declares `{name}.q_norm.weight` and
    /// `{name}.k_norm.weight`, ones, whole on each rank.
    pub fn with_norms(self, params: &mut Declarations, over: NormOver, eps: f64) -> Result<Self> {
        let GroupedHeads { heads, kv_heads, head_dim, .. } = self.of;
        let mut weight = |part: &str, heads: usize| {
            let features = if over == NormOver::Heads { heads * head_dim } else { head_dim };
            let (name, whole) = (format!("{}.{part}.weight", self.name), Placement::replicated());
            params.declare(name, &[features], whole, Role::Norm, Init::Ones)
        };
        let weights = [weight("q_norm", heads)?, weight("k_norm", kv_heads)?];
        Ok(Self { norms: Some(HeadNorms { over, eps, weights }), ..self })
    }

    /// The same with scores times `scale`, in place of 1/√head_dim.
    #[must_use]
    pub fn with_scale(self, scale: f64) -> Self {
        Self { scale: query_factor(scale, self.of.head_dim), ..self }
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same. `mask` says which tokens see each other: by
    /// default each sees itself and those before it.
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
        let [q, kv] = ColumnLinear::forward_pair([&self.q, &self.kv], tape, &x)?;
        let mut q = self.q.adapted(tape, q, normed, region)?;
        let mut kv = self.kv.adapted(tape, kv, normed, region)?;
        if let Some(norms) = &self.norms {
            (q, kv) = (self.normed_queries(tape, norms, &q)?, self.normed_keys(tape, norms, &kv)?);
        } else if self.gathered {
            kv = kv.all_gather(Axis::Tp, FEATURES)?; // [b, s, 2, kv_heads · d], Replicate
        }
        if let Some(scale) = self.scale {
            q = q.scale(scale)?;
        }
        let mixed = attend(&q, &kv, self.of.rotary, Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + residual
    }

    fn normed_queries(&self, tape: &Tape, norms: &HeadNorms, q: &Var) -> Result<Var> {
        let weight = tape.param(norms.weights[0])?;
        match norms.is_local(tape) {
            true => norms.of(&weight, q),
            false => norms.of(&weight, &q.all_gather_invariant(Axis::Tp, 2)?)?.split(Axis::Tp, 2),
        }
    }

    /// Keys and values with the keys normed, gathered where ranks share them.
    fn normed_keys(&self, tape: &Tape, norms: &HeadNorms, kv: &Var) -> Result<Var> {
        let (weight, d) = (tape.param(norms.weights[1])?, self.of.head_dim);
        let of = |at: usize| kv.narrow(2, at..at + 1)?.squeeze(2); // [b, s, kv_heads · d/tp]
        let (mut k, mut v) = (of(0)?, of(1)?);
        let local = norms.is_local(tape) && !self.gathered;
        if !local {
            k = k.all_gather_invariant(Axis::Tp, 2)?;
        }
        k = norms.of(&weight, &k.unflatten(2, &[k.shape()[2] / d, d])?)?.flatten(2..4)?;
        if self.gathered {
            (k, v) = (k.copy(Axis::Tp)?, v.all_gather(Axis::Tp, 2)?);
        } else if !local {
            k = k.split(Axis::Tp, 2)?;
        }
        k.unsqueeze(2)?.concat(&v.unsqueeze(2)?, 2)
    }
}

/// The factor of queries whose scores are multiplied by `scale` where attention multiplies them by 1/√head_dim, if it
/// is not one.
pub(crate) fn query_factor(scale: f64, head_dim: usize) -> Option<f64> {
    let factor = scale * (head_dim as f64).sqrt();
    (factor != 1.0).then_some(factor)
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
