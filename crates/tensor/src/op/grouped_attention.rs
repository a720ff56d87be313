//! Attention of heads in groups that share keys and values (Ainslie et al., arXiv:2305.13245), on queries
//! `[b, s, heads, d]`, and keys and values `[b, s, 2, kv_heads · d]`: of the same sequence, or of another one.
//!
//! More than 400 lines: the heads that fit, the runs of queries, and both directions of one operation.

use super::attention_mask::{Mask, MaskedOperands, Masking, masked_operands};
use super::exchange::{Exchange, Exchanged};
use super::order::Order;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{
    AttentionDropout, AttentionMasks, AttentionShape, DocumentPositions, GroupedShape, Pattern, Rotary, TableGrad,
};
use crate::shape::Shape;
use crate::tape::{Backward, BlockSlot, Forward, Op, Tape, Tokens, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::tree::{self, Counter};
use meshwork_core::{Axis, Buffer, SpmdError, Ty, Types};
use std::ops::Range;
use std::sync::Arc;

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
    /// The types of the queries.
    types: Types,
    shape: GroupedShape,
    /// The tokens that the queries are, in runs.
    runs: Vec<Range<usize>>,
    /// The queries, over whose slices of the sequence the gradients of keys and values are summed.
    tokens: Tokens,
    masks: Masking,
    /// What ranks exchange that hold parts of the sequence, and the order in which the tokens of all lie.
    exchange: Option<(Arc<dyn Exchange>, Order)>,
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
    /// `Partial` there. The positions of documents are those of all tokens.
    ///
    /// Heads may be sharded. Either the heads of keys and values are sharded too, and each rank holds whole groups. Or
    /// there are fewer of them than ranks: then keys and values are `Replicate`, each rank reads the heads that its
    /// queries need, and their gradient is `Partial`.
    ///
    /// `mask` says which keys a query sees: by default those up to its own. Keys and values of
    /// [another sequence](Pattern::Cross) may have any number of tokens. `dropout` is (p, layer name) for the attention
    /// probabilities.
    ///
    /// # Errors
    /// Masks that do not fit: a window of no tokens, slopes of other heads, a bias of other pairs, and what needs a
    /// distance between the tokens of two sequences.
    pub fn grouped_attention<'a>(
        &self,
        kv: &Var,
        rotary: Option<Rotary>,
        mask: impl Into<Mask<'a>>,
        dropout: Option<(f32, &str)>,
    ) -> Result<Var> {
        self.grouped_attention_in(&Order::default(), kv, rotary, mask, dropout)
    }

    /// The same with queries whose tokens lie in `order`. Keys, values and documents lie in the order of the
    /// sequence.
    ///
    /// # Errors
    /// A sequence that is not divisible into the chunks of the order.
    pub fn grouped_attention_in<'a>(
        &self,
        order: &Order,
        kv: &Var,
        rotary: Option<Rotary>,
        mask: impl Into<Mask<'a>>,
        dropout: Option<(f32, &str)>,
    ) -> Result<Var> {
        let (offset, global) = self.global_position();
        let held = self.shape().get(1).copied().unwrap_or(0);
        let (first, all) =
            (offset.get(1).map_or(0, |&first| first as usize), global.get(1).map_or(0, |&all| all as usize));
        let runs = match order.is_natural() {
            true => std::iter::once(first..first + held).collect(),
            false => order.tokens(all, first..first + held)?,
        };
        self.attention_of(runs, None, kv, rotary, mask.into(), dropout)
    }

    /// The same with keys and values that are cut along the sequence like the queries: the ranks of an axis exchange
    /// what `exchange` says. Queries, keys and values lie in `order`, documents in that of the sequence.
    ///
    /// # Errors
    /// Those of the exchange; a bias of pairs, and keys of another sequence, which no rank needs to exchange.
    pub fn exchanged_attention<'a>(
        &self,
        exchange: Arc<dyn Exchange>,
        order: &Order,
        kv: &Var,
        rotary: Option<Rotary>,
        mask: impl Into<Mask<'a>>,
        dropout: Option<(f32, &str)>,
    ) -> Result<Var> {
        let (held, mask) = (self.shape().get(1).copied().unwrap_or(0), mask.into());
        if mask.pattern == Pattern::Cross || mask.bias.is_some() {
            let problem = "a bias of pairs and keys of another sequence: all_gather keys and values, and use \
                           grouped_attention";
            return Err(refuse(exchange.name(), problem.to_owned()));
        }
        let runs = std::iter::once(0..held).collect();
        self.attention_of(runs, Some((exchange, order.clone())), kv, rotary, mask, dropout)
    }

    fn attention_of(
        &self,
        runs: Vec<Range<usize>>,
        exchange: Option<(Arc<dyn Exchange>, Order)>,
        kv: &Var,
        rotary: Option<Rotary>,
        mask: Mask<'_>,
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
        let keys = kv.shape().get(1).copied().unwrap_or(0);
        let of_keys = if exchange.is_some() { kv_global[1] } else { keys as u64 };
        let crosses = mask.pattern == Pattern::Cross;
        let alike = crosses || of_keys == global[1];
        let misfit = misfit.or((!alike).then_some("kv has the tokens that q has over all ranks"));
        let first_query = runs.first().map_or(0, |run| run.start);
        // Pairs are numbered by tokens of the longer sequence.
        let sequence = of_keys.max(global[1]) as usize;
        let bias = mask.bias.map(|bias| bias.cast(self.tensor().dtype().widened())).transpose()?;
        let mask = Mask { bias: bias.as_ref(), ..mask };
        if let Some(problem) = self.unfit(rotary, &runs, mask) {
            return Err(refuse("grouped_attention", problem.to_owned()));
        }
        let shape =
            GroupedShape { queries, keys, first_query, first_key: 0, sequence, group, kv_heads, first_kv_head, rotary };
        if misfit.is_none() {
            self.require_trees(kv, shape, (global[2], kv_global[3]))?;
        }
        let masks = Masking::new(self, 2, mask, dropout)?;
        let op = GroupedAttention {
            types: self.types(),
            shape,
            runs,
            tokens: Tokens::new(self, 2),
            masks,
            exchange,
            misfit,
        };
        self.tape().apply(op, &[self, kv].into_iter().chain(mask.vars()).collect::<Vec<_>>())
    }

    /// Why a mask does not go with a rotary embedding or with these runs of queries, if so.
    fn unfit(&self, rotary: Option<Rotary>, runs: &[Range<usize>], mask: Mask<'_>) -> Option<&'static str> {
        match (mask.pattern, mask.bias) {
            (Pattern::Cross, _) if rotary.is_some() => {
                Some("a rotary embedding in cross attention: tokens of two sequences have no distance")
            }
            (_, Some(_)) if rotary.is_some() => Some("a bias of pairs is for queries and keys that do not turn"),
            (_, Some(_)) if runs.len() > 1 => Some("a bias of pairs is for queries in the order of the sequence"),
            (_, Some(bias)) if bias.is_computed() && self.tape().reduction_blocks().is_some() => {
                Some("in canonical numerics the bias of pairs is a parameter: its gradient is a sum over samples")
            }
            _ => None,
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

fn refuse(op: &'static str, problem: String) -> Error {
    Error::Shape { op, problem, shapes: Vec::new() }
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
    /// Whether the queries are all tokens in the order of the sequence.
    fn is_whole(&self) -> bool {
        self.runs.len() == 1 && self.shape.is_whole()
    }

    /// The masks of the kernel, for queries of these runs.
    fn masks<'a>(&'a self, masks: &[&'a Tensor], runs: &'a [Range<usize>]) -> AttentionMasks<'a> {
        AttentionMasks { runs: (runs.len() > 1).then_some(runs), ..self.masks.with(masks) }
    }

    /// The runs among these rows of the queries.
    fn runs_of(&self, rows: &Range<usize>) -> Vec<Range<usize>> {
        let begins = self.runs.iter().scan(0, |at, run| Some(std::mem::replace(at, *at + run.len())));
        let runs = self.runs.iter().zip(begins).map(|(run, begin)| {
            let of = |row: usize| run.start + row.clamp(begin, begin + run.len()) - begin;
            of(rows.start)..of(rows.end)
        });
        runs.filter(|run| !run.is_empty()).collect()
    }

    /// The gradients of queries, and of keys and values. Those are summed over each of `slices` of the queries, and
    /// over the slices in the tree.
    fn gradients_in(
        &self,
        slices: impl Iterator<Item = Range<usize>>,
        device: &dyn Device,
        [dout, q, kv, out, lse]: [&Buffer; 5],
        masks: &[&Tensor],
    ) -> Result<(Buffer, Buffer)> {
        let (attention, pointwise, layout) = (device.attention()?, device.pointwise()?, device.layout()?);
        let AttentionShape { batch, seq, heads, head_dim } = self.shape.queries;
        let (width, mut dq) = (heads * head_dim, device.alloc(q.dtype(), q.count())?);
        let join = |left: Result<Buffer>, right: Result<Buffer>| {
            let mut left = left?;
            pointwise.add_assign(&mut left, 0, &right?)?;
            Ok(left)
        };
        let mut sums = Counter::default();
        for rows in slices.filter(|rows| !rows.is_empty()) {
            let of = |x, outer, inner| layout.narrow(x, outer, seq, inner, rows.clone());
            let (dout, q, out) = (of(dout, batch, width)?, of(q, batch, width)?, of(out, batch, width)?);
            let lse = of(lse, batch * heads, 1)?;
            let runs = self.runs_of(&rows);
            let queries = AttentionShape { seq: rows.len(), ..self.shape.queries };
            let shape = GroupedShape { queries, first_query: runs.first().map_or(0, |run| run.start), ..self.shape };
            let masks = self.masks(masks, &runs);
            let (part, share) = attention.grouped_grad(shape, &dout, &q, kv, &out, &lse, masks)?;
            let each = rows.len() * width;
            for sample in 0..batch {
                let at = (sample * seq + rows.start) * width;
                layout.copy_into(&part, sample * each..(sample + 1) * each, &mut dq, at)?;
            }
            sums.push(1, Ok(share), join);
        }
        let sum = sums.finish(join).unwrap_or_else(|| device.alloc(kv.dtype(), kv.count()))?;
        Ok((dq, sum))
    }

    /// Writes the gradient of the bias of pairs of some samples.
    fn write_bias_grad(&self, saved: [&Tensor; 5], masks: AttentionMasks<'_>, room: BlockSlot<'_>) -> Result<()> {
        let AttentionShape { batch, seq, heads, .. } = self.shape.queries;
        let samples = room.samples.clone();
        let part = |x: &Buffer| {
            let each = x.count() / batch.max(1);
            x.slice(samples.start * each..samples.end * each)
        };
        let [dout, q, kv, out, lse] = saved.map(|x| part(x.buffer()));
        let queries = AttentionShape { batch: samples.len(), ..self.shape.queries };
        let shape = GroupedShape { queries, ..self.shape };
        let positions = masks.documents.map(|documents| part(documents.positions)).transpose()?;
        let lengths = masks.lengths.map(part).transpose()?;
        let dropout =
            masks.dropout.map(|of| AttentionDropout { first_sample: of.first_sample + samples.start as u64, ..*of });
        let documents = masks.documents.zip(positions.as_ref());
        let documents = documents.map(|(documents, positions)| DocumentPositions { positions, ..documents });
        let masks = AttentionMasks { dropout: dropout.as_ref(), documents, lengths: lengths.as_ref(), ..masks };
        let into = TableGrad::new(room, [heads * seq, self.shape.keys]);
        let attention = saved[0].device().attention()?;
        attention.pair_bias_grad(shape, &dout?, &q?, &kv?, &out?, &lse?, masks, into)
    }
}

impl Op for GroupedAttention {
    fn name(&self) -> &'static str {
        self.exchange.as_ref().map_or("grouped_attention", |(exchange, _)| exchange.name())
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn operands(&self) -> &'static [&'static str] {
        const NAMES: MaskedOperands = masked_operands!("q", "kv");
        self.masks.operands(&NAMES)
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        // The softmax runs along the keys, and each head mixes its q, k and v over all its features.
        let (q, kv) = (operands[0], operands[1]);
        let exchanged = |axis| self.exchange.as_ref().is_some_and(|(exchange, _)| exchange.axes().contains(&axis));
        let some = |axis, ty| ty == Ty::Shard(1) && matches!(kv.types.get(axis), Some(Ty::Replicate | Ty::Invariant));
        let of_all = q.types.iter().filter(|&(axis, ty)| !some(axis, ty) && !exchanged(axis)).collect::<Vec<_>>();
        let of_keys = kv.types.iter().filter(|&(axis, _)| !exchanged(axis)).collect::<Vec<_>>();
        rules::along_dim(self.name(), Operand { types: Types::new(&of_all), ..q }, 1, &[])?;
        for (x, whole) in [(q, 3), (Operand { types: Types::new(&of_keys), ..kv }, 1), (kv, 2)] {
            rules::along_dim(self.name(), x, whole, &[])?;
        }
        self.masks.infer(self.name(), (q, 2), &operands[2..])?;
        rules::per_axis(self.name(), &operands[..2], |axis, types| match (types[0], types[1]) {
            (Ty::Shard(1), Ty::Shard(1)) if exchanged(axis) => Ok(Ty::Shard(1)),
            (q, kv) if exchanged(axis) => Err((
                format!("q is {q} and kv is {kv}: ranks exchange the tokens that each holds"),
                format!("cut both along the sequence over {axis}, or use grouped_attention"),
            )),
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

    fn tokens(&self, tape: &Tape) -> Vec<Range<usize>> {
        let cut = |axis: &Axis| self.types.get(*axis) == Some(Ty::Shard(1));
        match &self.exchange {
            Some((exchange, order)) => {
                let (group, held) = (tape.rank().group_over(&exchange.axes()), self.shape.queries.seq);
                let first = group.rank() * held;
                order.tokens(group.size() * held, first..first + held).unwrap_or_default()
            }
            None if Axis::CONTEXT.iter().any(cut) => self.runs.clone(),
            None => Vec::new(),
        }
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        let mut scalars = self.masks.scalars();
        scalars.extend(self.shape.rotary.into_iter().flat_map(|rotary| rotary.scalars()));
        scalars
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (q, kv, s) = (inputs[0], inputs[1], self.shape);
        let of = s.queries;
        let (q_shape, kv_shape) = (q.shape(), kv.shape());
        cx.require(
            q_shape.len() == 4 && kv_shape.len() == 4 && kv_shape[0] == q_shape[0] && kv_shape[2] == 2,
            "q is [batch, seq, heads, head_dim] and kv [batch, seq, 2, features]",
        )?;
        cx.require(self.misfit.is_none(), self.misfit.unwrap_or_default())?;
        cx.require(s.rotary.is_none() || of.head_dim.is_multiple_of(2), "features turn in pairs: head_dim is even")?;
        if let Some(bias) = inputs.last().filter(|_| self.masks.has_bias()) {
            let shape = Shape::new(&[of.heads, of.seq, s.keys]);
            cx.require(bias.shape() == shape, format_args!("bias is [heads, queries, keys], {shape:?}"))?;
        }
        if let Some((exchange, order)) = &self.exchange {
            cx.require(cx.tape().cache().is_none(), "decoding takes whole sequences: gather them")?;
            let masks = self.masks.with(&inputs[2..]);
            let call = Exchanged { tape: cx.tape(), device: q.device(), shape: s, masks, order };
            let (out, [q, kv, whole, lse]) = exchange.attend(&call, q, kv)?;
            for (i, saved) in [&q, &kv].into_iter().enumerate() {
                match Arc::ptr_eq(saved.buffer().memory(), inputs[i].buffer().memory()) {
                    true => cx.save_input(i)?,
                    false => cx.save(saved)?,
                }
            }
            cx.save(&whole)?;
            cx.save_exact(&lse)?;
            inputs[2..].iter().try_for_each(|mask| cx.save(mask))?;
            return Ok(out);
        }
        if let Some(cache) = cx.tape().cache() {
            cx.require(!self.masks.has_positions(), "decoding continues one document")?;
            self.masks.require_plain(self.name(), "decoding continues causal attention")?;
            cx.require(self.is_whole(), "decoding takes the queries of all new tokens: gather them")?;
            let (masks, group) = (self.masks.with(&[]), cx.tape().cache_group(self.types));
            let out = cache.attend(q.device(), s, [q.buffer(), kv.buffer()], masks, group)?;
            return Tensor::from_buffer(q.device(), out, q_shape);
        }
        let masks = self.masks(&inputs[2..], &self.runs);
        let (out, lse) = q.device().attention()?.grouped(s, q.buffer(), kv.buffer(), masks)?;
        let out = Tensor::from_buffer(q.device(), out, q_shape)?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        cx.save(&out)?;
        cx.save_exact(&Tensor::from_buffer(q.device(), lse, [of.batch, of.heads, of.seq])?)?;
        let of_samples = inputs.len() - usize::from(self.masks.has_bias());
        inputs[2..of_samples].iter().try_for_each(|mask| cx.save(mask))?;
        (of_samples..inputs.len()).try_for_each(|bias| cx.save_input(bias))?;
        Ok(out)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (operands, bias) = (self.operands().len(), self.operands().len() - 1);
        let learns_bias = self.masks.has_bias() && cx.needs(bias);
        if !cx.needs(0) && !cx.needs(1) && !learns_bias {
            return Ok(vec![None; operands]);
        }
        let (q, kv, out, lse) = (cx.saved(0)?, cx.share(cx.saved(1)?)?, cx.saved(2)?, cx.saved(3)?);
        let masks = (2..operands).map(|i| cx.saved(2 + i)).collect::<Result<Vec<_>>>()?;
        let masks: Vec<&Tensor> = masks.iter().collect();
        if let Some((exchange, order)) = &self.exchange {
            let none = masks.iter().map(|_| None);
            let masks = self.masks.with(&masks);
            let call = Exchanged { tape: cx.tape(), device: grad.device(), shape: self.shape, masks, order };
            let (dq, dkv) = exchange.gradients(&call, &grad, [q, kv, out, lse])?;
            let gradients = [Some(dq).filter(|_| cx.needs(0)), Some(dkv).filter(|_| cx.needs(1))];
            return Ok(gradients.into_iter().chain(none).collect());
        }
        let dbias = match masks.last().filter(|_| learns_bias) {
            None => None,
            Some(of) => cx.write_grad(bias, of.dtype(), of.shape(), self.shape.queries.batch, |room| {
                self.write_bias_grad([&grad, &q, &kv, &out, &lse], self.masks(&masks, &self.runs), room)
            })?,
        };
        let slices = cx.tape().slices(self.name(), self.tokens)?.filter(|_| !self.tokens.are_whole());
        let saved = [&grad, &q, &kv, &out, &lse].map(Tensor::buffer);
        let seq = self.shape.queries.seq;
        let slices = slices.map_or(1, |slices| slices.here.len());
        let (dq, dkv) = match slices {
            1 => {
                let ([dout, q, kv, out, lse], masks) = (saved, self.masks(&masks, &self.runs));
                grad.device().attention()?.grouped_grad(self.shape, dout, q, kv, out, lse, masks)?
            }
            _ => {
                let slices = (0..slices).map(|slice| seq * slice / slices..seq * (slice + 1) / slices);
                self.gradients_in(slices, &**grad.device(), saved, &masks)?
            }
        };
        let gradient = |buffer, of: &Tensor| Tensor::from_buffer(grad.device(), buffer, of.shape());
        let (dq, dkv) = (gradient(dq, &q)?, gradient(dkv, &kv)?);
        let mut gradients = vec![Some(dq).filter(|_| cx.needs(0)), Some(dkv).filter(|_| cx.needs(1))];
        gradients.resize(operands, None);
        if self.masks.has_bias() {
            gradients[bias] = dbias;
        }
        Ok(gradients)
    }
}
