//! Heads against tokens, between neighbours in a group: before attention each has all heads of its tokens, in it all
//! tokens of its heads.
//!
//! Where several ranks read one head of keys and values, each of them gets a copy. Backward runs the same exchanges the
//! other way round, and the gradients of the copies are summed.

use meshwork_core::tree::{self, Counter};
use meshwork_core::{Axes, Axis, Buffer, DType, Group};
use meshwork_tensor::kernel::{AttentionDropout, AttentionMasks, AttentionShape, GroupedShape};
use meshwork_tensor::op::{Exchanged, Order};
use meshwork_tensor::{Device, Error, Result, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The exchange of one rank.
pub(crate) struct Heads<'a> {
    group: &'a Group,
    device: &'a Arc<dyn Device>,
    /// The ranks of the group that exchange.
    ranks: Range<usize>,
    /// The order in which the tokens of these ranks lie: after the exchange they lie in the order of the sequence.
    order: Order,
    of_q: Parts,
    of_kv: Parts,
    pub(crate) share: Share,
}

/// Heads before the exchange: `[b, s/n, parts, heads, d]`, of which `read` are sent, each to `copies` ranks.
struct Parts {
    dims: [usize; 5],
    read: Range<usize>,
    copies: usize,
}

/// The attention of one rank after the exchange.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    /// All tokens of some heads.
    pub(crate) shape: GroupedShape,
    /// The first of them among the heads before the exchange.
    first_head: usize,
}

/// The parts into which heads of queries may be cut, up to `most`: each is whole groups of `group` heads that share
/// keys and values, or an equal part of one.
pub fn parts_of_heads(heads: usize, group: usize, most: usize) -> impl DoubleEndedIterator<Item = usize> {
    (1..=most.min(heads)).filter(move |&parts| {
        let each = heads / parts;
        heads.is_multiple_of(parts) && (each.is_multiple_of(group) || group.is_multiple_of(each))
    })
}

/// The axis that an error names.
pub(crate) fn named(axes: Axes) -> Axis {
    axes.last().copied().unwrap_or(Axis::Cp)
}

impl<'a> Heads<'a> {
    /// Between `degree` neighbours of the group, whose tokens lie in `order`; `stored` is the type of keys and values.
    /// `advice` says which setting would work, given the largest degree for these heads.
    pub(crate) fn new(
        call: &Exchanged<'a>,
        (name, axes): (&'static str, Axes),
        (degree, order): (usize, Order),
        stored: DType,
        advice: impl Fn(usize) -> String,
    ) -> Result<Self> {
        let group = call.tape.rank().group_over(&axes);
        let first = group.rank() / degree * degree;
        let share = share(call, (name, axes), (group.rank() - first, degree), stored, advice)?;
        let AttentionShape { batch, seq, heads, head_dim } = call.shape.queries;
        let (first_kv, kv_heads, read) = (call.shape.first_kv_head, call.shape.kv_heads, heads / call.shape.group);
        Ok(Self {
            group,
            device: call.device,
            ranks: first..first + degree,
            order,
            of_q: Parts { dims: [batch, seq, 1, heads, head_dim], read: 0..heads, copies: 1 },
            of_kv: Parts {
                dims: [batch, seq, 2, kv_heads, head_dim],
                read: first_kv..first_kv + read,
                copies: share.shape.kv_heads * degree / read,
            },
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
        let heads = self.share.first_head..self.share.first_head + self.share.shape.queries.heads;
        let slopes = call.masks.slopes.map(|slopes| &slopes[heads]);
        AttentionMasks { dropout: dropout.as_ref(), slopes, ..call.masks }
    }

    /// Queries of all tokens, `[b, s, 1, heads/n · d]`, or the gradients of their results.
    pub(crate) fn queries(&self, q: &Tensor) -> Result<Tensor> {
        self.to_heads(q, &self.of_q)
    }

    /// Back: `[b, s/n, heads, d]`.
    pub(crate) fn queries_back(&self, q: &Tensor) -> Result<Tensor> {
        let [b, s, _, heads, d] = self.of_q.dims;
        self.tensor(self.to_tokens(q, &self.of_q)?, [b, s, heads, d])
    }

    /// Keys and values of all tokens, `[b, s, 2, kv_heads · d]`, of the heads that the queries of this rank read.
    pub(crate) fn keys(&self, kv: &Tensor) -> Result<Tensor> {
        self.to_heads(kv, &self.of_kv)
    }

    /// The gradients of keys and values of the tokens of this rank, `[b, s/n, 2, kv_heads · d]`.
    pub(crate) fn keys_back(&self, dkv: &Tensor) -> Result<Tensor> {
        let [b, s, parts, heads, d] = self.of_kv.dims;
        self.tensor(self.to_tokens(dkv, &self.of_kv)?, [b, s, parts, heads * d])
    }

    /// `[b, s/n, parts, heads, d] → [b, s, parts, copies · heads/n · d]`.
    fn to_heads(&self, x: &Tensor, of: &Parts) -> Result<Tensor> {
        let (n, layout, [b, s, parts, heads, d]) = (self.ranks.len(), self.device.layout()?, of.dims);
        let (rows, blocks, width) = (b * s * parts, n / of.copies, of.width(n));
        let read = match of.read.len() == heads {
            true => x.buffer().clone(),
            false => layout.narrow(x.buffer(), rows, heads, d, of.read.clone())?,
        };
        if n == 1 {
            return self.tensor(read, [b, s, parts, width]);
        }
        let mut sent = if blocks == 1 { read } else { layout.swap_blocks(&read, rows, blocks, width)? };
        if of.copies > 1 {
            let (each, of_blocks) = (rows * width, sent);
            sent = self.device.alloc(of_blocks.dtype(), n * each)?;
            for rank in 0..n {
                let block = rank / of.copies;
                layout.copy_into(&of_blocks, block * each..(block + 1) * each, &mut sent, rank * each)?;
            }
        }
        let of_ranks = self.exchanged(sent)?;
        self.tensor(self.ordered(of_ranks, of, |ranks, tokens| [ranks, tokens])?, [b, n * s, parts, width])
    }

    /// `[b, s, parts, copies · heads/n · d] → [b, s/n, parts, heads, d]`, back: the sums of the copies.
    fn to_tokens(&self, x: &Tensor, of: &Parts) -> Result<Buffer> {
        let (n, layout, [b, s, parts, heads, d]) = (self.ranks.len(), self.device.layout()?, of.dims);
        let (rows, blocks, width) = (b * s * parts, n / of.copies, of.width(n));
        let mut read = x.buffer().clone();
        if n > 1 {
            let of_ranks = self.ordered(read, of, |ranks, tokens| [tokens, ranks])?;
            read = self.summed(self.exchanged(of_ranks)?, of.copies)?;
        }
        if blocks > 1 {
            read = layout.swap_blocks(&read, blocks, rows, width)?;
        }
        match of.read.len() == heads {
            true => Ok(read),
            false => layout.widen(&read, rows, heads, d, of.read.clone()),
        }
    }

    /// The sums of every `copies` parts, of those that the ranks have for this one: in f32 and in the tree.
    fn summed(&self, parts: Buffer, copies: usize) -> Result<Buffer> {
        if copies == 1 {
            return Ok(parts);
        }
        let (layout, pointwise) = (self.device.layout()?, self.device.pointwise()?);
        let (dtype, count, each) = (parts.dtype(), parts.count(), parts.count() / self.ranks.len());
        let parts = if dtype.is_half() { pointwise.cast(&parts, dtype.widened())? } else { parts };
        let mut sums = self.device.alloc(parts.dtype(), count / copies)?;
        let join = |left: Result<Buffer>, right: Result<Buffer>| {
            let mut left = left?;
            pointwise.add_assign(&mut left, 0, &right?)?;
            Ok(left)
        };
        for block in 0..self.ranks.len() / copies {
            let mut tree = Counter::default();
            for part in block * copies..(block + 1) * copies {
                tree.push(1, layout.narrow(&parts, 1, count, 1, part * each..(part + 1) * each), join);
            }
            if let Some(sum) = tree.finish(join) {
                layout.copy_into(&sum?, 0..each, &mut sums, block * each)?;
            }
        }
        if dtype.is_half() { pointwise.cast(&sums, dtype) } else { Ok(sums) }
    }

    /// Moves rows between `[n, b, s/n]`, as ranks send them, and `[b, s]` in the order of the sequence. `way` says
    /// which of both is read, and which written.
    fn ordered(&self, x: Buffer, of: &Parts, way: impl Fn(usize, usize) -> [usize; 2]) -> Result<Buffer> {
        let (n, [b, s, parts, ..]) = (self.ranks.len(), of.dims);
        if b == 1 && self.order.is_natural() {
            return Ok(x);
        }
        let (layout, row) = (self.device.layout()?, parts * of.width(n));
        let mut moved = self.device.alloc(x.dtype(), x.count())?;
        for rank in 0..n {
            let runs = self.order.tokens(n * s, rank * s..(rank + 1) * s)?;
            for sample in 0..b {
                let mut at = (rank * b + sample) * s;
                for run in &runs {
                    let [from, to] = way(at, sample * n * s + run.start).map(|first| first * row);
                    layout.copy_into(&x, from..from + run.len() * row, &mut moved, to)?;
                    at += run.len();
                }
            }
        }
        Ok(moved)
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
    let (held, read) = (heads / ranks, heads / of.group);
    if !read.is_multiple_of(ranks) && !ranks.is_multiple_of(read) {
        return refuse(format!(
            "each rank takes {held} heads of queries: whole groups of {} that share keys and values, or an equal part of one",
            of.group
        ));
    }
    let group = of.group.min(held);
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
    let queries = AttentionShape { heads: held, seq: seq * ranks, ..of.queries };
    let (kv_heads, keys) = (held / group, queries.seq);
    Ok(Share {
        shape: GroupedShape { queries, keys, group, kv_heads, first_kv_head: 0, ..of },
        first_head: rank * held,
    })
}

impl Parts {
    /// The features that each of `n` ranks gets.
    fn width(&self, n: usize) -> usize {
        self.copies * self.read.len() / n * self.dims[4]
    }
}
