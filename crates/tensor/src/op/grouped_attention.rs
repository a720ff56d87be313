//! Causal self-attention of heads in groups that share keys and values (Ainslie et al., arXiv:2305.13245), on queries
//! `[b, s, heads, d]`, and keys and values `[b, s, 2, kv_heads · d]`.

use super::documents::{self, Apart, Documents};
use super::dropout::random_scalars;
use crate::error::{Error, Result};
use crate::kernel::{AttentionDropout, AttentionMasks, AttentionShape, GroupedShape, Rotary};
use crate::tape::{Backward, Forward, Mode, Op, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, SpmdError, Ty, Types, tree};

/// The heads of an attention in groups, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupedHeads {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; must divide the heads of queries.
    pub kv_heads: usize,
    /// Features of each.
    pub head_dim: usize,
    /// The rotary embedding of queries and keys, if there is one.
    pub rotary: Option<Rotary>,
}

#[derive(Debug)]
struct GroupedAttention {
    shape: GroupedShape,
    dropout: Option<AttentionDropout>,
    documents: Option<Apart>,
    /// The reason, if groups and heads do not fit.
    misfit: Option<&'static str>,
}

impl Var {
    /// Queries `[b, s, heads, d]` with keys and values `[b, s, 2, kv_heads · d]` → `[b, s, heads, d]`: each head of
    /// keys and values has the same number of heads of queries. Queries and keys are rotated by `rotary`, if there is
    /// one, as they are read. The sequence may not be sharded.
    ///
    /// Heads may be sharded. Either the heads of keys and values are sharded too, and each rank holds whole groups. Or
    /// there are fewer of them than ranks: then keys and values are `Replicate`, each rank reads the heads that its
    /// queries need, and their gradient is `Partial`.
    ///
    /// `dropout` is (p, layer name) for the attention probabilities. Without `documents` each sequence is one.
    pub fn grouped_attention(
        &self,
        kv: &Var,
        rotary: Option<Rotary>,
        documents: Option<&Documents>,
        dropout: Option<(f32, &str)>,
    ) -> Result<Var> {
        let extents = self.shape();
        let extent = |dim: usize| extents.get(dim).copied().unwrap_or(0);
        let (offset, global) = self.global_position();
        let training = self.tape().mode() == Mode::Train;
        let dropout: Option<Result<_>> = dropout.filter(|(p, _)| *p > 0.0 && training).map(|(p, name)| {
            Ok(AttentionDropout {
                p,
                key: self.tape().random_key(name)?,
                first_sample: offset[0],
                first_head: offset[2],
                global_heads: global[2],
            })
        });
        let dropout = dropout.transpose()?;
        let queries = AttentionShape { batch: extent(0), seq: extent(1), heads: extent(2), head_dim: extent(3) };
        let (kv_offset, kv_global) = kv.global_position();
        let held = kv.shape().get(3).copied().unwrap_or(0);
        let fit = fit(queries, (offset[2], global[2]), (kv_offset[3], held, kv_global[3]));
        let (shape, misfit) = match fit {
            Ok((group, kv_heads, first_kv_head)) => {
                (GroupedShape { queries, group, kv_heads, first_kv_head, rotary }, None)
            }
            Err(problem) => (GroupedShape { queries, group: 1, kv_heads: 0, first_kv_head: 0, rotary }, Some(problem)),
        };
        if misfit.is_none() {
            self.require_trees(kv, shape, (global[2], kv_global[3]))?;
        }
        let apart = documents.map(|documents| Apart(documents.apart));
        let op = GroupedAttention { shape, dropout, documents: apart, misfit };
        match documents {
            None => self.tape().apply(op, &[self, kv]),
            Some(documents) => self.tape().apply(op, &[self, kv, &documents.positions]),
        }
    }

    /// In canonical numerics, refuses ranks that do not share the heads of a group as whole subtrees.
    fn require_trees(&self, kv: &Var, shape: GroupedShape, (heads, kv_width): (u64, u64)) -> Result<()> {
        let shared = |axis: Axis| self.ty(axis) == Ty::Shard(2) && kv.ty(axis) == Ty::Replicate;
        let mesh = self.tape().rank().mesh();
        let Some(axis) = Axis::ALL.into_iter().find(|&axis| self.tape().reduction_blocks().is_some() && shared(axis))
        else {
            return Ok(());
        };
        let (held, degree) = (shape.queries.heads, mesh.degree(axis));
        let group = (heads * shape.queries.head_dim as u64 / kv_width.max(1)) as usize;
        let ranks = group / held.max(1);
        if group <= held || tree::fits(group, ranks) && (ranks.is_power_of_two() || ranks == degree) {
            return Ok(());
        }
        Err(Error::Placement {
            what: "grouped_attention".to_owned(),
            dim: 2,
            extent: heads as usize,
            axis,
            degree,
            problem: format!(
                "in canonical numerics the ranks that share a group of {group} heads, here {ranks}, must be a power of two, and \
                 hold a power of two of them each"
            ),
        })
    }
}

/// Takes the heads of queries here, with the first of them and their number over all ranks, and the features of keys
/// and values (the first, the number here, the number over all ranks). Returns the number of heads of queries per head
/// of keys and values here, the number of heads of keys and values here, and the first of them that is read.
fn fit(
    queries: AttentionShape,
    (first, heads): (u64, u64),
    (kv_first, kv_held, kv_all): (u64, usize, u64),
) -> std::result::Result<(usize, usize, usize), &'static str> {
    let (held, d) = (queries.heads, queries.head_dim);
    let wide = d as u64;
    if d == 0 || held == 0 || kv_held == 0 || !kv_held.is_multiple_of(d) || !kv_first.is_multiple_of(wide) {
        return Err("a rank holds whole heads of keys and values, of as many features as those of queries");
    }
    let kv_heads = kv_all / wide;
    if !heads.is_multiple_of(kv_heads) {
        return Err("the heads of keys and values divide those of queries");
    }
    let group = (heads / kv_heads) as usize;
    if !held.is_multiple_of(group) && !group.is_multiple_of(held) {
        return Err("a rank holds whole groups of heads, or a part of one that divides it");
    }
    let (read, kv_first) = (first / group as u64, kv_first / wide);
    let here = group.min(held);
    match read.checked_sub(kv_first).map(|at| at as usize) {
        Some(at) if at + held / here <= kv_held / d => Ok((here, kv_held / d, at)),
        _ => Err("a rank holds the heads of keys and values that its queries read"),
    }
}

impl GroupedAttention {
    fn masks<'a>(&'a self, positions: Option<&'a Tensor>) -> AttentionMasks<'a> {
        let documents = self.documents.zip(positions).map(|(apart, positions)| apart.with(positions));
        AttentionMasks { dropout: self.dropout.as_ref(), documents }
    }
}

impl Op for GroupedAttention {
    fn name(&self) -> &'static str {
        "grouped_attention"
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn operands(&self) -> &'static [&'static str] {
        if self.documents.is_some() { &["q", "kv", "positions"] } else { &["q", "kv"] }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        // The softmax runs along the sequence, and each head mixes its q, k and v over all its features.
        for (x, whole) in [(0, 1), (0, 3), (1, 1), (1, 2)] {
            rules::along_dim(self.name(), operands[x], whole, &[])?;
        }
        operands[2..].iter().try_for_each(|positions| documents::infer(self.name(), operands[0], *positions))?;
        rules::per_axis(self.name(), &operands[..2], |axis, types| match (types[0], types[1]) {
            (Ty::Shard(2), Ty::Shard(3) | Ty::Replicate) => Ok(Ty::Shard(2)),
            (q, kv) if q == kv && !matches!(q, Ty::Shard(2 | 3)) => Ok(q),
            (Ty::Shard(2), Ty::Invariant) => Err((
                "q is Shard(2) and kv is Invariant: the gradient of kv would miss the other ranks' share".to_owned(),
                "copy(I→R) kv first".to_owned(),
            )),
            (q, kv) => Err((
                format!("q is {q} and kv is {kv}: they do not hold the same groups"),
                format!("cut the heads of both over {axis}, or all_gather kv along dim 3"),
            )),
        })
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        let mut scalars = self.dropout.map_or(Vec::new(), |dropout| random_scalars(dropout.p, dropout.key));
        if let Some(Rotary { theta, scaling }) = self.shape.rotary {
            scalars.push(("theta", theta));
            let scaling =
                scaling.map(|scaling| [("factor", scaling.factor), ("positions", scaling.original_positions as f64)]);
            scalars.extend(scaling.into_iter().flatten());
        }
        scalars
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (q, kv, s) = (inputs[0], inputs[1], self.shape);
        let of = s.queries;
        let (q_shape, kv_shape) = (q.shape(), kv.shape());
        cx.require(
            q_shape.len() == 4 && kv_shape.len() == 4 && kv_shape[..2] == q_shape[..2] && kv_shape[2] == 2,
            || "q is [batch, seq, heads, head_dim] and kv [batch, seq, 2, features]".to_owned(),
            inputs,
        )?;
        cx.require(self.misfit.is_none(), || self.misfit.unwrap_or_default().to_owned(), inputs)?;
        cx.require(
            s.rotary.is_none() || of.head_dim.is_multiple_of(2),
            || "features turn in pairs: head_dim is even".to_owned(),
            inputs,
        )?;
        if let Some(cache) = cx.tape().cache() {
            cx.require(self.documents.is_none(), || "decoding continues one document".to_owned(), inputs)?;
            let out = cache.attend(q.device(), s, q.buffer(), kv.buffer())?;
            return Tensor::from_buffer(q.device(), out, q_shape);
        }
        let (out, lse) =
            q.device().attention()?.grouped(s, q.buffer(), kv.buffer(), self.masks(inputs.get(2).copied()))?;
        let out = Tensor::from_buffer(q.device(), out, q_shape)?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        cx.save(&out)?;
        cx.save_exact(&Tensor::from_buffer(q.device(), lse, [of.batch, of.heads, of.seq])?)?;
        inputs[2..].iter().try_for_each(|positions| cx.save(positions))?;
        Ok(out)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) && !cx.needs(1) {
            return Ok(vec![None; self.operands().len()]);
        }
        let (q, kv, out, lse) = (cx.saved(0)?, cx.share(cx.saved(1)?)?, cx.saved(2)?, cx.saved(3)?);
        let positions = self.documents.map(|_| cx.saved(4)).transpose()?;
        let (dq, dkv) = grad.device().attention()?.grouped_grad(
            self.shape,
            grad.buffer(),
            q.buffer(),
            kv.buffer(),
            out.buffer(),
            lse.buffer(),
            self.masks(positions.as_ref()),
        )?;
        let gradient = |buffer, of: &Tensor| Tensor::from_buffer(grad.device(), buffer, of.shape());
        let (dq, dkv) = (gradient(dq, &q)?, gradient(dkv, &kv)?);
        let gradients = [Some(dq).filter(|_| cx.needs(0)), Some(dkv).filter(|_| cx.needs(1))];
        Ok(gradients.into_iter().chain(positions.map(|_| None)).collect())
    }
}
