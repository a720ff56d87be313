//! Attention by all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509): before it each rank has all heads of its tokens, in
//! it all tokens of its heads.
//!
//! Where a rank's heads of keys and values are fewer than the ranks, or not divisible by them, keys and values of all
//! of these heads come to every rank. Backward runs the same exchanges the other way round.

use meshwork_core::{Axis, Buffer, DType, Group, ReduceOp, tree};
use meshwork_tensor::kernel::{AttentionDropout, AttentionMasks, AttentionShape, GroupedShape};
use meshwork_tensor::op::{Exchange, Exchanged};
use meshwork_tensor::{Error, Result, Tensor};

/// Attention by all-to-all over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllToAll {
    axis: Axis,
}

/// The attention of one rank after the exchange.
struct Share {
    /// All tokens of some heads.
    shape: GroupedShape,
    /// The first of them among the heads before the exchange.
    first_head: usize,
    /// Whether keys and values of all heads were gathered.
    gathered: bool,
}

impl AllToAll {
    /// Over the ranks of `axis`.
    pub fn over(axis: Axis) -> Self {
        Self { axis }
    }

    fn group<'a>(&self, call: &Exchanged<'a>) -> &'a Group {
        call.tape.rank().group(self.axis)
    }

    /// The heads of this rank of queries, and of keys and values.
    fn share(&self, call: &Exchanged<'_>, stored: DType) -> Result<Share> {
        let (group, of) = (self.group(call), call.shape);
        let (ranks, rank) = (group.size(), group.rank());
        let refuse = |extent, problem: String| {
            let what = self.name().to_owned();
            Err(Error::Placement { what, dim: 2, extent, axis: self.axis, degree: ranks, problem })
        };
        let AttentionShape { heads, seq, .. } = of.queries;
        if !heads.is_multiple_of(ranks) {
            let most = (1..=ranks).rev().find(|&degree| heads.is_multiple_of(degree)).unwrap_or(1);
            return refuse(
                heads,
                format!(
                    "each rank takes equally many of the {heads} heads of queries: use {}={most}, or all_gather",
                    self.axis
                ),
            );
        }
        let held = heads / ranks;
        let first_head = rank * held;
        let queries = AttentionShape { heads: held, seq: seq * ranks, ..of.queries };
        let all = GroupedShape { queries, keys: queries.seq, first_query: 0, ..of };
        let whole = of.first_kv_head == 0 && of.kv_heads * of.group == heads;
        if whole && of.kv_heads.is_multiple_of(ranks) {
            let shape = GroupedShape { kv_heads: of.kv_heads / ranks, ..all };
            return Ok(Share { shape, first_head, gathered: false });
        }
        let group = of.group.min(held);
        if !held.is_multiple_of(group) || !of.group.is_multiple_of(group) || !first_head.is_multiple_of(group) {
            return refuse(
                heads,
                format!(
                    "each rank takes {held} heads of queries: whole groups of {} that share keys and values, or an equal part of one",
                    of.group
                ),
            );
        }
        // Each rank holds some of a group's heads: the gradient of their keys is summed over ranks.
        let sharing = of.group / group;
        let in_tree = tree::fits(of.group, sharing) && sharing.is_power_of_two() && !stored.is_half();
        if call.tape.reduction_blocks().is_some() && sharing > 1 && !in_tree {
            return refuse(
                heads,
                format!(
                    "in canonical numerics the {sharing} ranks that share a group of {} heads must be a power of two, \
                     with values in f32: use all_gather",
                    of.group
                ),
            );
        }
        let shape = GroupedShape { group, first_kv_head: of.first_kv_head + first_head / of.group, ..all };
        Ok(Share { shape, first_head, gathered: true })
    }

    /// `[b, s/n, parts, heads, d] → [b, s, parts, heads/n · d]`, in the order of the sequence.
    fn to_heads(self, call: &Exchanged<'_>, x: &Buffer, [b, s, parts, heads, d]: [usize; 5]) -> Result<Tensor> {
        let (group, layout) = (self.group(call), call.device.layout()?);
        let (n, width) = (group.size(), heads / group.size() * d);
        let sent = layout.swap_blocks(x, b * s * parts, n, width)?;
        let received = self.exchanged(call, sent)?;
        let joined = layout.swap_blocks(&received, n, b, s * parts * width)?;
        call.from_order(Tensor::from_buffer(call.device, joined, [b, n * s, parts, width])?)
    }

    /// `[b, s, parts, heads/n · d] → [b, s/n, parts, heads, d]`, back.
    fn to_tokens(self, call: &Exchanged<'_>, x: Buffer, [b, s, parts, heads, d]: [usize; 5]) -> Result<Buffer> {
        let (group, layout) = (self.group(call), call.device.layout()?);
        let (n, width) = (group.size(), heads / group.size() * d);
        let x = call.to_order(Tensor::from_buffer(call.device, x, [b, n * s, parts, width])?)?;
        let sent = layout.swap_blocks(x.buffer(), b, n, s * parts * width)?;
        layout.swap_blocks(&self.exchanged(call, sent)?, n, b * s * parts, width)
    }

    /// An equal part to each rank, and one of each.
    fn exchanged(&self, call: &Exchanged<'_>, sent: Buffer) -> Result<Buffer> {
        let group = self.group(call);
        let counts = vec![sent.count() / group.size(); group.size()];
        let received = call.device.alloc(sent.dtype(), sent.count())?;
        Ok(group.all_to_all(sent, received, &counts, &counts)?)
    }

    /// The masks for the heads of this rank.
    fn masks<'a>(call: &Exchanged<'a>, share: &Share, dropout: &'a mut Option<AttentionDropout>) -> AttentionMasks<'a> {
        *dropout = call
            .masks
            .dropout
            .map(|of| AttentionDropout { first_head: of.first_head + share.first_head as u64, ..*of });
        AttentionMasks { dropout: dropout.as_ref(), ..call.masks }
    }
}

/// The extents `[b, s/n, parts, heads, d]` of queries, and of keys with values.
fn extents(call: &Exchanged<'_>) -> [[usize; 5]; 2] {
    let AttentionShape { batch, seq, heads, head_dim } = call.shape.queries;
    [[batch, seq, 1, heads, head_dim], [batch, seq, 2, call.shape.kv_heads, head_dim]]
}

impl Exchange for AllToAll {
    fn name(&self) -> &'static str {
        "all_to_all_attention"
    }

    fn axis(&self) -> Axis {
        self.axis
    }

    fn attend(&self, call: &Exchanged<'_>, q: &Tensor, kv: &Tensor) -> Result<(Tensor, [Tensor; 4])> {
        let (share, mut dropout) = (self.share(call, kv.dtype())?, None);
        let masks = Self::masks(call, &share, &mut dropout);
        let [of_q, of_kv] = extents(call);
        let whole_q = self.to_heads(call, q.buffer(), of_q)?;
        let whole_kv = match share.gathered {
            true => self.gathered(call, kv, of_kv)?,
            false => self.to_heads(call, kv.buffer(), of_kv)?,
        };
        let kernel = call.device.attention()?;
        let (out, lse) = kernel.grouped(share.shape, whole_q.buffer(), whole_kv.buffer(), masks)?;
        let AttentionShape { batch, seq, heads, .. } = share.shape.queries;
        let lse = Tensor::from_buffer(call.device, lse, [batch, heads, seq])?;
        let mixed = Tensor::from_buffer(call.device, self.to_tokens(call, out.clone(), of_q)?, q.shape())?;
        let out = Tensor::from_buffer(call.device, out, whole_q.shape())?;
        Ok((mixed, [whole_q, whole_kv, out, lse]))
    }

    fn gradients(&self, call: &Exchanged<'_>, dout: &Tensor, saved: [Tensor; 4]) -> Result<(Tensor, Tensor)> {
        let (share, mut dropout) = (self.share(call, saved[1].dtype())?, None);
        let masks = Self::masks(call, &share, &mut dropout);
        let [of_q, of_kv] = extents(call);
        let whole = self.to_heads(call, dout.buffer(), of_q)?;
        let [q, kv, out, lse] = saved.each_ref().map(Tensor::buffer);
        let (dq, dkv) = call.device.attention()?.grouped_grad(share.shape, whole.buffer(), q, kv, out, lse, masks)?;
        let dq = Tensor::from_buffer(call.device, self.to_tokens(call, dq, of_q)?, dout.shape())?;
        let dkv = match share.gathered {
            true => self.scattered(call, dkv, of_kv)?,
            false => self.to_tokens(call, dkv, of_kv)?,
        };
        let [b, s, parts, heads, d] = of_kv;
        Ok((dq, Tensor::from_buffer(call.device, dkv, [b, s, parts, heads * d])?))
    }
}

impl AllToAll {
    /// Keys and values `[b, s/n, 2, heads · d]` of all tokens, `[b, s, 2, heads · d]`.
    fn gathered(&self, call: &Exchanged<'_>, kv: &Tensor, [b, s, parts, heads, d]: [usize; 5]) -> Result<Tensor> {
        let group = self.group(call);
        let n = group.size();
        let all = group.all_gather(kv.buffer().clone(), call.device.alloc(kv.dtype(), n * kv.count())?)?;
        let joined = call.device.layout()?.swap_blocks(&all, n, b, s * parts * heads * d)?;
        call.from_order(Tensor::from_buffer(call.device, joined, [b, n * s, parts, heads * d])?)
    }

    /// The gradients of keys and values of the tokens of this rank: the sums of those that the ranks have of all.
    fn scattered(&self, call: &Exchanged<'_>, dkv: Buffer, [b, s, parts, heads, d]: [usize; 5]) -> Result<Buffer> {
        let group = self.group(call);
        let n = group.size();
        let dkv = call.to_order(Tensor::from_buffer(call.device, dkv, [b, n * s, parts, heads * d])?)?;
        let all = call.device.layout()?.swap_blocks(dkv.buffer(), b, n, s * parts * heads * d)?;
        let held = call.device.alloc(all.dtype(), all.count() / n)?;
        Ok(group.reduce_scatter(all, held, ReduceOp::Sum)?)
    }
}
