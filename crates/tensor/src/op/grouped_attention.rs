//! Causal self-attention of heads in groups that share keys and values (Ainslie et al., arXiv:2305.13245), on queries
//! `[b, s, heads, d]`, and keys and values `[b, s, 2, kv_heads · d]`.

use super::documents::{self, Documents, Masking};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{AttentionMasks, AttentionShape, GroupedShape, Rotary};
use crate::tape::{Backward, Forward, Op, Slices, Tokens, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::tree::{self, Counter};
use meshwork_core::{Axis, Buffer, SpmdError, Ty, Types};

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
    /// The queries, over whose slices of the sequence the gradients of keys and values are summed.
    tokens: Tokens,
    masks: Masking,
    /// The reason, if groups and heads do not fit.
    misfit: Option<&'static str>,
}

impl Var {
    /// Queries `[b, s, heads, d]` with keys and values `[b, s, 2, kv_heads · d]` → `[b, s, heads, d]`: each head of
    /// keys and values has the same number of heads of queries. Queries and keys are rotated by `rotary`, if there is
    /// one, as they are read.
    ///
    /// The sequence of the queries may be sharded where keys and values are `Replicate`: each rank's queries read the
    /// keys of all tokens up to their own, as `all_gather` brings them together. The gradient of keys and values is
    /// `Partial` there. In `documents` the positions are those of all tokens.
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
        let queries = AttentionShape { batch: extent(0), seq: extent(1), heads: extent(2), head_dim: extent(3) };
        let (kv_offset, kv_global) = kv.global_position();
        let held = kv.shape().get(3).copied().unwrap_or(0);
        let fit = fit(queries, (offset[2], global[2]), (kv_offset[3], held, kv_global[3]));
        let ((group, kv_heads, first_kv_head), misfit) = match fit {
            Ok(groups) => (groups, None),
            Err(problem) => ((1, 0, 0), Some(problem)),
        };
        let (keys, first_query) = (kv.shape().get(1).copied().unwrap_or(0), offset[1] as usize);
        let misfit = misfit.or((keys as u64 != global[1]).then_some("kv has the tokens that q has over all ranks"));
        let shape = GroupedShape { queries, keys, first_query, group, kv_heads, first_kv_head, rotary };
        if misfit.is_none() {
            self.require_trees(kv, shape, (global[2], kv_global[3]))?;
        }
        let masks = Masking::new(self, 2, documents, dropout)?;
        let op = GroupedAttention { shape, tokens: Tokens::of(self, 2), masks, misfit };
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
    /// The gradients of queries, and of keys and values, which are summed over slices of the queries in the tree.
    fn gradients_in(
        &self,
        Slices { here, .. }: Slices,
        device: &dyn Device,
        [dout, q, kv, out, lse]: [&Buffer; 5],
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let (layout, attention, pointwise) = (device.layout()?, device.attention()?, device.pointwise()?);
        let (all, slices) = (self.shape.queries, here.len());
        let (width, mut dq) = (all.heads * all.head_dim, device.alloc(q.dtype(), q.count())?);
        let join = |left: Result<Buffer>, right: Result<Buffer>| {
            let mut left = left?;
            pointwise.add_assign(&mut left, 0, &right?)?;
            Ok(left)
        };
        let mut sums = Counter::default();
        for slice in 0..slices {
            let tokens = all.seq * slice / slices..all.seq * (slice + 1) / slices;
            let of = |x: &Buffer| layout.narrow(x, all.batch, all.seq, width, tokens.clone());
            let (dout, q, out) = (of(dout)?, of(q)?, of(out)?);
            let lse = layout.narrow(lse, all.batch * all.heads, all.seq, 1, tokens.clone())?;
            let queries = AttentionShape { seq: tokens.len(), ..all };
            let shape = GroupedShape { queries, first_query: self.shape.first_query + tokens.start, ..self.shape };
            let (part, share) = attention.grouped_grad(shape, &dout, &q, kv, &out, &lse, masks)?;
            let each = tokens.len() * width;
            for sample in 0..all.batch {
                let to = (sample * all.seq + tokens.start) * width;
                layout.copy_into(&part, sample * each..(sample + 1) * each, &mut dq, to)?;
            }
            sums.push(1, Ok(share), join);
        }
        let sum = sums.finish(join).unwrap_or_else(|| device.alloc(kv.dtype(), kv.count()))?;
        Ok((dq, sum))
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
        if self.masks.has_positions() { &["q", "kv", "positions"] } else { &["q", "kv"] }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        // The softmax runs along the keys, and each head mixes its q, k and v over all its features.
        let (q, kv) = (operands[0], operands[1]);
        let some = |axis, ty| ty == Ty::Shard(1) && matches!(kv.types.get(axis), Some(Ty::Replicate | Ty::Invariant));
        let of_all = q.types.iter().filter(|&(axis, ty)| !some(axis, ty)).collect::<Vec<_>>();
        rules::along_dim(self.name(), Operand { types: Types::of(&of_all), ..q }, 1, &[])?;
        for (x, whole) in [(q, 3), (kv, 1), (kv, 2)] {
            rules::along_dim(self.name(), x, whole, &[])?;
        }
        operands[2..].iter().try_for_each(|positions| documents::infer(self.name(), operands[0], *positions))?;
        rules::per_axis(self.name(), &operands[..2], |axis, types| match (types[0], types[1]) {
            (Ty::Shard(2), Ty::Shard(3) | Ty::Replicate) => Ok(Ty::Shard(2)),
            (Ty::Shard(1), Ty::Replicate) => Ok(Ty::Shard(1)),
            (q, kv) if q == kv && !matches!(q, Ty::Shard(2 | 3)) => Ok(q),
            (q @ Ty::Shard(1 | 2), Ty::Invariant) => Err((
                format!("q is {q} and kv is Invariant: the gradient of kv would miss the other ranks' share"),
                "copy(I→R) kv first".to_owned(),
            )),
            (q, kv) => Err((
                format!("q is {q} and kv is {kv}: they do not hold the same groups"),
                format!("cut the heads of both over {axis}, or all_gather kv along dim 3"),
            )),
        })
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        let mut scalars = self.masks.scalars();
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
            q_shape.len() == 4 && kv_shape.len() == 4 && kv_shape[0] == q_shape[0] && kv_shape[2] == 2,
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
            cx.require(!self.masks.has_positions(), || "decoding continues one document".to_owned(), inputs)?;
            cx.require(
                s.is_whole(),
                || "decoding takes the queries of all new tokens: gather them".to_owned(),
                inputs,
            )?;
            let out = cache.attend(q.device(), s, q.buffer(), kv.buffer())?;
            return Tensor::from_buffer(q.device(), out, q_shape);
        }
        let (out, lse) =
            q.device().attention()?.grouped(s, q.buffer(), kv.buffer(), self.masks.with(inputs.get(2).copied()))?;
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
        let positions = self.masks.has_positions().then(|| cx.saved(4)).transpose()?;
        let slices = cx.tape().slices(self.name(), self.tokens)?.filter(|_| !self.tokens.are_whole());
        let saved = [&grad, &q, &kv, &out, &lse].map(Tensor::buffer);
        let masks = self.masks.with(positions.as_ref());
        let (dq, dkv) = match slices {
            Some(slices) => self.gradients_in(slices, &**grad.device(), saved, masks)?,
            None => {
                let [dout, q, kv, out, lse] = saved;
                grad.device().attention()?.grouped_grad(self.shape, dout, q, kv, out, lse, masks)?
            }
        };
        let gradient = |buffer, of: &Tensor| Tensor::from_buffer(grad.device(), buffer, of.shape());
        let (dq, dkv) = (gradient(dq, &q)?, gradient(dkv, &kv)?);
        let gradients = [Some(dq).filter(|_| cx.needs(0)), Some(dkv).filter(|_| cx.needs(1))];
        Ok(gradients.into_iter().chain(positions.map(|_| None)).collect())
    }
}
