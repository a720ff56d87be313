//! Heads against tokens, between neighbours in a group: before attention each has all heads of its tokens, in it all
//! tokens of its heads.
//!
//! Where a rank's heads of keys and values are fewer than the ranks, or not divisible by them, keys and values of all
//! of these heads come to every rank. Backward runs the same exchanges the other way round.

use meshwork_core::{Axes, Axis, Buffer, DType, Group, ReduceOp, tree};
use meshwork_tensor::kernel::{AttentionDropout, AttentionMasks, AttentionShape, GroupedShape};
use meshwork_tensor::op::Exchanged;
use meshwork_tensor::{Device, Error, Result, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The exchange of one rank.
pub(crate) struct Heads<'a> {
    group: &'a Group,
    device: &'a Arc<dyn Device>,
    /// The ranks of the group that exchange.
    ranks: Range<usize>,
    /// Extents `[b, s/n, parts, heads, d]` of queries before it, and of keys with values.
    of_q: [usize; 5],
    of_kv: [usize; 5],
    pub(crate) share: Share,
}

/// The attention of one rank after the exchange.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    /// All tokens of some heads.
    pub(crate) shape: GroupedShape,
    /// The first of them among the heads before the exchange.
    first_head: usize,
    /// Whether keys and values of all heads were gathered.
    gathered: bool,
}

/// The parts into which heads of queries may be cut, up to `most`: each is whole groups of `group` heads that share
/// keys and values, or an equal part of one.
pub fn parts_of_heads(heads: usize, group: usize, most: usize) -> impl DoubleEndedIterator<Item = usize> {
    (1..=most).filter(move |&parts| {
        let each = heads / parts;
        heads.is_multiple_of(parts) && (each.is_multiple_of(group) || group.is_multiple_of(each))
    })
}

/// The axis that an error names.
pub(crate) fn named(axes: Axes) -> Axis {
    axes.last().copied().unwrap_or(Axis::Cp)
}

impl<'a> Heads<'a> {
    /// Between `degree` neighbours of the group; `stored` is the type of keys and values. `advice` says which setting
    /// would work, given the largest degree for these heads.
    pub(crate) fn new(
        call: &Exchanged<'a>,
        (name, axes): (&'static str, Axes),
        degree: usize,
        stored: DType,
        advice: impl Fn(usize) -> String,
    ) -> Result<Self> {
        let group = call.tape.rank().group_over(&axes);
        let first = group.rank() / degree * degree;
        let share = share(call, (name, axes), (group.rank() - first, degree), stored, advice)?;
        let AttentionShape { batch, seq, heads, head_dim } = call.shape.queries;
        Ok(Self {
            group,
            device: call.device,
            ranks: first..first + degree,
            of_q: [batch, seq, 1, heads, head_dim],
            of_kv: [batch, seq, 2, call.shape.kv_heads, head_dim],
            share,
        })
    }

    pub(crate) fn group(&self) -> &'a Group {
        self.group
    }

    /// The masks for the heads of this rank.
    pub(crate) fn masks<'m>(
        &self,
        call: &Exchanged<'m>,
        dropout: &'m mut Option<AttentionDropout>,
    ) -> AttentionMasks<'m> {
        let first = self.share.first_head as u64;
        *dropout = call.masks.dropout.map(|of| AttentionDropout { first_head: of.first_head + first, ..*of });
        AttentionMasks { dropout: dropout.as_ref(), ..call.masks }
    }

    /// Queries of all tokens, `[b, s, 1, heads/n · d]`, or the gradients of their results.
    pub(crate) fn queries(&self, q: &Tensor) -> Result<Tensor> {
        self.to_heads(q, self.of_q)
    }

    /// Back: `[b, s/n, heads, d]`.
    pub(crate) fn queries_back(&self, q: &Tensor) -> Result<Tensor> {
        let [b, s, _, heads, d] = self.of_q;
        self.tensor(self.to_tokens(q, self.of_q)?, [b, s, heads, d])
    }

    /// Keys and values of all tokens, `[b, s, 2, kv_heads · d]`, of the heads of this rank or of all.
    pub(crate) fn keys(&self, kv: &Tensor) -> Result<Tensor> {
        if !self.share.gathered {
            return self.to_heads(kv, self.of_kv);
        }
        let (n, [b, s, parts, heads, d]) = (self.ranks.len(), self.of_kv);
        let (layout, count) = (self.device.layout()?, kv.count());
        let room = self.device.alloc(kv.dtype(), n * count)?;
        let all = match n == self.group.size() {
            true => self.group.all_gather(kv.buffer().clone(), room)?,
            false => {
                let mut copies = room;
                (0..n).try_for_each(|at| layout.copy_into(kv.buffer(), 0..count, &mut copies, at * count))?;
                self.exchanged(copies)?
            }
        };
        self.tensor(layout.swap_blocks(&all, n, b, s * parts * heads * d)?, [b, n * s, parts, heads * d])
    }

    /// The gradients of keys and values of the tokens of this rank, `[b, s/n, 2, kv_heads · d]`: where all were
    /// gathered, the sums of those that the ranks have of all.
    pub(crate) fn keys_back(&self, dkv: &Tensor) -> Result<Tensor> {
        let (n, [b, s, parts, heads, d]) = (self.ranks.len(), self.of_kv);
        let of_tokens = match self.share.gathered {
            true => self.summed(self.device.layout()?.swap_blocks(dkv.buffer(), b, n, s * parts * heads * d)?)?,
            false => self.to_tokens(dkv, self.of_kv)?,
        };
        self.tensor(of_tokens, [b, s, parts, heads * d])
    }

    /// The sum of the parts that the ranks have for this one.
    fn summed(&self, parts: Buffer) -> Result<Buffer> {
        let (n, each) = (self.ranks.len(), parts.count() / self.ranks.len());
        if n == self.group.size() {
            let held = self.device.alloc(parts.dtype(), each)?;
            return Ok(self.group.reduce_scatter(parts, held, ReduceOp::Sum)?);
        }
        let shares = self.exchanged(parts)?;
        let mut sum = self.device.layout()?.narrow(&shares, 1, shares.count(), 1, 0..each)?;
        for at in 1..n {
            self.device.pointwise()?.add_assign(&mut sum, 0, &shares.slice(at * each..(at + 1) * each)?)?;
        }
        Ok(sum)
    }

    /// `[b, s/n, parts, heads, d] → [b, s, parts, heads/n · d]`.
    fn to_heads(&self, x: &Tensor, [b, s, parts, heads, d]: [usize; 5]) -> Result<Tensor> {
        let (n, layout) = (self.ranks.len(), self.device.layout()?);
        let width = heads / n * d;
        let sent = layout.swap_blocks(x.buffer(), b * s * parts, n, width)?;
        let of_heads = layout.swap_blocks(&self.exchanged(sent)?, n, b, s * parts * width)?;
        self.tensor(of_heads, [b, n * s, parts, width])
    }

    /// `[b, s, parts, heads/n · d] → [b, s/n, parts, heads, d]`, back.
    fn to_tokens(&self, x: &Tensor, [b, s, parts, heads, d]: [usize; 5]) -> Result<Buffer> {
        let (n, layout) = (self.ranks.len(), self.device.layout()?);
        let width = heads / n * d;
        let sent = layout.swap_blocks(x.buffer(), b, n, s * parts * width)?;
        layout.swap_blocks(&self.exchanged(sent)?, n, b * s * parts, width)
    }

    fn tensor(&self, x: Buffer, shape: [usize; 4]) -> Result<Tensor> {
        Tensor::from_buffer(self.device, x, shape)
    }

    /// An equal part to each rank that exchanges, and one of each.
    fn exchanged(&self, sent: Buffer) -> Result<Buffer> {
        let each = sent.count() / self.ranks.len();
        let counts: Vec<usize> =
            (0..self.group.size()).map(|rank| if self.ranks.contains(&rank) { each } else { 0 }).collect();
        let received = self.device.alloc(sent.dtype(), sent.count())?;
        Ok(self.group.all_to_all(sent, received, &counts, &counts)?)
    }
}

/// The heads of queries, and of keys and values, of rank `rank` of `ranks`.
fn share(
    call: &Exchanged<'_>,
    (name, axes): (&'static str, Axes),
    (rank, ranks): (usize, usize),
    stored: DType,
    advice: impl Fn(usize) -> String,
) -> Result<Share> {
    let of = call.shape;
    let AttentionShape { heads, seq, .. } = of.queries;
    let refuse = |problem: String| {
        let degree = call.tape.rank().group_over(&axes).size();
        Err(Error::Placement { what: name.to_owned(), dim: 2, extent: heads, axis: named(axes), degree, problem })
    };
    if !heads.is_multiple_of(ranks) {
        let most = (1..=ranks).rev().find(|&degree| heads.is_multiple_of(degree)).unwrap_or(1);
        let problem = format!("each rank takes equally many of the {heads} heads of queries: {}", advice(most));
        return refuse(problem);
    }
    let held = heads / ranks;
    let first_head = rank * held;
    let queries = AttentionShape { heads: held, seq: seq * ranks, ..of.queries };
    let all = GroupedShape { queries, keys: queries.seq, ..of };
    let whole = of.first_kv_head == 0 && of.kv_heads * of.group == heads;
    if whole && of.kv_heads.is_multiple_of(ranks) {
        let shape = GroupedShape { kv_heads: of.kv_heads / ranks, ..all };
        return Ok(Share { shape, first_head, gathered: false });
    }
    let group = of.group.min(held);
    if !held.is_multiple_of(group) || !of.group.is_multiple_of(group) || !first_head.is_multiple_of(group) {
        return refuse(format!(
            "each rank takes {held} heads of queries: whole groups of {} that share keys and values, or an equal part of one",
            of.group
        ));
    }
    // Each rank holds some of a group's heads: the gradient of their keys is summed over ranks.
    let sharing = of.group / group;
    let in_tree = tree::fits(of.group, sharing) && sharing.is_power_of_two() && !stored.is_half();
    if call.tape.reduction_blocks().is_some() && sharing > 1 && !in_tree {
        return refuse(format!(
            "in canonical numerics the {sharing} ranks that share a group of {} heads must be a power of two, with values in \
             f32: use all_gather",
            of.group
        ));
    }
    let shape = GroupedShape { group, first_kv_head: of.first_kv_head + first_head / of.group, ..all };
    Ok(Share { shape, first_head, gathered: true })
}
