//! Attention of new tokens over a cache that ranks cut along the sequence: each has the keys and values of consecutive
//! tokens, and the results of all are joined by their log-sum-exp.
//!
//! ```text
//! capacity    0 ─────────── 15 16 ─────────── 31
//!             rank 0: ████████ rank 1: ████░░░░     of 28 tokens
//! new token   q ─▶ out₀, lse₀  q ─▶ out₁, lse₁  ═all-gather═▶  Σ_r softmax(lse)_r · out_r
//! ```
//!
//! Rotations depend on the distance of a query and a key alone, so that a rank counts both from its first token. It
//! keeps keys as they come, and turns them as they are read.
//!
//! In canonical numerics, where a sum over keys has the order of one rank, each layer in turn gathers all keys and
//! values for as long as its attention runs.

use crate::device::Device;
use crate::error::Result;
use crate::kernel::{AttentionMasks, AttentionShape, Choices, GroupedShape};
use meshwork_core::{Buffer, DType, Group};
use std::sync::Arc;

/// The ranks that cut a cache.
#[derive(Clone, Copy)]
pub(crate) struct CutOver<'a> {
    pub group: &'a Group,
    /// Whether each attention reads the keys of all ranks, for the order of its sums.
    pub whole: bool,
}

/// What a rank keeps of a cache for `capacity` tokens, and the tokens of a pass.
pub(super) struct CutCache<'a> {
    pub device: &'a Arc<dyn Device>,
    pub over: CutOver<'a>,
    /// Tokens of which each rank keeps keys and values.
    pub held: usize,
    /// Tokens before this pass.
    pub past: usize,
}

impl<'a> CutCache<'a> {
    pub fn new(device: &'a Arc<dyn Device>, over: CutOver<'a>, capacity: usize, past: usize) -> Self {
        Self { device, over, held: capacity.div_ceil(over.group.size()), past }
    }

    /// The first token that this rank keeps.
    fn first(&self) -> usize {
        self.over.group.rank() * self.held
    }

    /// The output of the new queries, after this rank has kept its part of their keys and values.
    pub fn attend(
        &self,
        new: GroupedShape,
        [q, kv]: [&Buffer; 2],
        entry: &mut Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<Buffer> {
        self.keep(new, kv, entry)?;
        let (out, lse) = self.own(new, q, entry, masks)?;
        self.joined(new.queries, out, lse, q.dtype())
    }

    /// Keys and values of all ranks, `[batch, capacity, 2, kv_heads, head_dim]`, after this rank has kept its part.
    pub fn whole(&self, new: GroupedShape, kv: &Buffer, entry: &mut Buffer, capacity: usize) -> Result<Buffer> {
        self.keep(new, kv, entry)?;
        let (layout, group, batch) = (self.device.layout()?, self.over.group, new.queries.batch);
        let (ranks, row) = (group.size(), 2 * new.kv_heads * new.queries.head_dim);
        let room = self.device.alloc(entry.dtype(), ranks * entry.count())?;
        let parts = group.all_gather(entry.clone(), room)?; // [ranks, batch, held, ..]
        let places = layout.swap_blocks(&parts, ranks, batch, self.held * row)?;
        layout.narrow(&places, batch, ranks * self.held, row, 0..capacity)
    }

    fn keep(&self, new: GroupedShape, kv: &Buffer, entry: &mut Buffer) -> Result<()> {
        let (layout, AttentionShape { batch, seq, head_dim, .. }) = (self.device.layout()?, new.queries);
        let row = 2 * new.kv_heads * head_dim;
        let here = |token: usize| token.clamp(self.first(), self.first() + self.held);
        let own = here(self.past)..here(self.past + seq);
        (0..batch).filter(|_| !own.is_empty()).try_for_each(|sample| {
            let from = (sample * seq + own.start - self.past) * row;
            let to = (sample * self.held + own.start - self.first()) * row;
            layout.copy_into(kv, from..from + own.len() * row, entry, to)
        })
    }

    /// The attention over the keys of this rank, in f32: zeros and -∞ for queries before all of them, and for
    /// those whose window is behind all of them.
    fn own(
        &self,
        new: GroupedShape,
        q: &Buffer,
        entry: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let (device, layout) = (self.device, self.device.layout()?);
        let AttentionShape { batch, seq, heads, head_dim } = new.queries;
        let width = heads * head_dim;
        let before = self.first().saturating_sub(self.past).min(seq);
        let (mut out, mut lse) = (device.alloc(DType::F32, batch * seq * width)?, vec![0f32; batch * heads * seq]);
        device.optim()?.zero(&mut out, 0..batch * seq * width)?;
        lse.fill(f32::NEG_INFINITY);
        let mut lse = device.upload(&Buffer::from_vec(lse))?;
        let count = seq - before;
        if count > 0 {
            let queries = AttentionShape { seq: count, ..new.queries };
            let first_query = self.past + before - self.first();
            let shape = GroupedShape { queries, keys: self.held, first_query, ..new };
            let q = layout.narrow(q, batch, seq, width, before..seq)?;
            let (part, sums) = device.attention()?.grouped(shape, &q, entry, masks)?;
            let part = self.cast(part, DType::F32)?;
            for sample in 0..batch {
                let rows = sample * count * width..(sample + 1) * count * width;
                layout.copy_into(&part, rows, &mut out, (sample * seq + before) * width)?;
            }
            for row in 0..batch * heads {
                layout.copy_into(&sums, row * count..(row + 1) * count, &mut lse, row * seq + before)?;
            }
        }
        Ok((out, lse))
    }

    /// `Σ_r softmax(lse)_r · out_r` over the ranks.
    fn joined(&self, of: AttentionShape, out: Buffer, lse: Buffer, dtype: DType) -> Result<Buffer> {
        let (device, group, layout) = (self.device, self.over.group, self.device.layout()?);
        let AttentionShape { batch, seq, heads, head_dim } = of;
        let (ranks, tokens) = (group.size(), batch * seq * heads);
        let outs = group.all_gather(out, device.alloc(DType::F32, ranks * tokens * head_dim)?)?;
        let sums = group.all_gather(lse, device.alloc(DType::F32, ranks * tokens)?)?; // [ranks, batch, heads, seq]
        let sums = layout.swap_blocks(&sums, ranks, tokens, 1)?;
        let mut by_token = device.alloc(DType::F32, ranks * tokens)?; // [batch, seq, heads, ranks]
        let sample = heads * seq * ranks;
        for start in (0..batch).map(|at| at * sample) {
            let turned = layout.swap_blocks(&sums.slice(start..start + sample)?, heads, seq, ranks)?;
            layout.copy_into(&turned, 0..sample, &mut by_token, start)?;
        }
        let weights = device.reduction()?.softmax(&by_token, ranks)?;
        let of_ranks = |of: &dyn Fn(usize, usize) -> usize| -> Result<Buffer> {
            let numbers = (0..tokens).flat_map(|token| (0..ranks).map(move |rank| (token, rank)));
            let numbers: Vec<i32> = numbers.map(|(token, rank)| of(token, rank) as i32).collect();
            device.upload(&Buffer::from_vec(numbers))
        };
        let (ids, slots) = (of_ranks(&|_, rank| rank)?, of_ranks(&|token, rank| rank * tokens + token)?);
        let choices = Choices { ids: &ids, slots: &slots, k: ranks };
        let joined = device.permutation()?.combine(&outs, choices, Some(&weights), head_dim)?;
        self.cast(joined, dtype)
    }

    fn cast(&self, x: Buffer, to: DType) -> Result<Buffer> {
        if x.dtype() == to { Ok(x) } else { self.device.pointwise()?.cast(&x, to) }
    }
}
