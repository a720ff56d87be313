//! Decoding: a pass over the tokens behind the tokens of earlier passes. The keys and values of earlier tokens are
//! cached, so that each token goes through the model once.

use super::cut_cache::{CutCache, CutOver};
use super::{Mode, Position, Tape};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{AttentionMasks, AttentionShape, GroupedShape, TurnedHeads};
use crate::param::Params;
use meshwork_core::{Axis, Buffer, Rank, Ty, Types};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The keys and values of each attention of a stage, for the tokens of the passes so far. It has room for a number of
/// tokens of each sequence; memory is allocated with the first pass and is reused after [`clear`](Self::clear).
///
/// Operations that mix the tokens of a sequence must be attentions of this crate: an operation of another crate that
/// reads earlier tokens would find none.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    capacity: usize,
    past: Cell<usize>,
    /// One for each attention, in the order in which they run.
    entries: RefCell<Vec<Buffer>>,
    /// Attentions that ran in this pass.
    ran: Cell<usize>,
}

impl KeyValueCache {
    /// An empty cache with room for `capacity` tokens of each sequence.
    pub fn new(capacity: usize) -> Self {
        let inner = Inner { capacity, past: Cell::new(0), entries: RefCell::default(), ran: Cell::new(0) };
        Self { inner: Rc::new(inner) }
    }

    /// Tokens of each sequence for which it has room.
    pub fn capacity(&self) -> usize {
        self.inner.capacity
    }

    /// Tokens of each sequence in it.
    pub fn past(&self) -> usize {
        self.inner.past.get()
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.inner.entries.borrow().iter().map(|entry| entry.count() * entry.dtype().size()).sum()
    }

    /// Attentions that have an entry.
    pub fn attentions(&self) -> usize {
        self.inner.entries.borrow().len()
    }

    /// Ends a pass over `tokens` new tokens of each sequence: the next pass follows them.
    pub fn advance(&self, tokens: usize) {
        self.inner.past.set(self.inner.past.get() + tokens);
        self.inner.ran.set(0);
    }

    /// Forgets all tokens.
    pub fn clear(&self) {
        self.inner.past.set(0);
        self.inner.ran.set(0);
    }

    /// The attention of new tokens, after their keys, rotated, and values have joined the cache.
    pub(crate) fn attend(
        &self,
        device: &Arc<dyn Device>,
        new: GroupedShape,
        [q, kv]: [&Buffer; 2],
        masks: AttentionMasks<'_>,
        cut_over: Option<CutOver<'_>>,
    ) -> Result<Buffer> {
        let Inner { capacity, past, entries, ran } = &*self.inner;
        let (number, past) = (ran.get(), past.get());
        let cut = cut_over.map(|over| CutCache::new(device, over, *capacity, past));
        let keys = cut.as_ref().map_or(*capacity, |cut| cut.held);
        let shape = GroupedShape { keys, first_query: past, rotary: None, ..new };
        let (tokens, elements, mut entries) = (shape.tokens().end, shape.kv_elements(), entries.borrow_mut());
        let refuse = |problem| Err(Error::Shape { op: "decode", problem, shapes: Vec::new() });
        if tokens > *capacity {
            return refuse(format!("{tokens} tokens, and the cache has room for {capacity}"));
        }
        if number == entries.len() {
            let mut entry = device.alloc(q.dtype(), elements)?;
            device.optim()?.zero(&mut entry, 0..elements)?; // rows that no query sees are multiplied by 0
            entries.push(entry);
        }
        let entry = &mut entries[number];
        if (entry.dtype(), entry.count()) != (q.dtype(), elements) {
            let held = entry.count();
            return refuse(format!("attention {number} has a cache of {held} elements and needs {elements}"));
        }
        ran.set(number + 1);
        if let Some(cut) = cut.as_ref().filter(|cut| !cut.over.whole) {
            return cut.attend(new, [q, kv], entry, masks);
        }
        let AttentionShape { batch, seq, heads, head_dim } = shape.queries;
        let (attention, layout, kv_heads) = (device.attention()?, device.layout()?, shape.kv_heads);
        let turned = |x: &Buffer, tokens: Range<usize>, all, heads| match new.rotary {
            None => Ok(x.clone()),
            Some(rotary) => {
                let (first, seq) = (tokens.start, tokens.len());
                attention.turn(TurnedHeads { rotary, seq, first, all, heads, head_dim }, x)
            }
        };
        let q = turned(q, past..tokens, heads, heads)?;
        if let Some(cut) = cut {
            let whole = turned(&cut.whole(new, kv, entry, *capacity)?, 0..*capacity, 2 * kv_heads, kv_heads)?;
            return Ok(attention.grouped(GroupedShape { keys: *capacity, ..shape }, &q, &whole, masks)?.0);
        }
        let kv = turned(kv, past..tokens, 2 * kv_heads, kv_heads)?;
        let row = 2 * kv_heads * head_dim;
        for sample in 0..batch {
            let new = sample * seq * row..(sample + 1) * seq * row;
            layout.copy_into(&kv, new, entry, (sample * capacity + past) * row)?;
        }
        Ok(attention.grouped(shape, &q, entry, masks)?.0)
    }
}

impl Tape {
    /// A tape for tokens that follow those in `cache`. It records nothing, and learned positions, rotations and
    /// attentions count from the tokens in the cache. [`KeyValueCache::advance`] ends the pass.
    pub fn decoding(rank: Arc<Rank>, params: Arc<Params>, device: Arc<dyn Device>, cache: KeyValueCache) -> Self {
        let tape = Self::new(rank, params, device, Mode::Evaluate, Position::default());
        _ = tape.inner.cache.set(cache);
        tape
    }

    /// The cache, on a tape that decodes.
    pub(crate) fn cache(&self) -> Option<&KeyValueCache> {
        self.inner.cache.get()
    }

    /// The ranks of cp, which cut the cache of an attention of queries with these types, the same on all of them.
    pub(crate) fn cache_group(&self, types: Types) -> Option<CutOver<'_>> {
        let (rank, whole) = (self.rank(), self.reduction_blocks().is_some());
        let cuts = rank.mesh().context_degree() > 1 && types.get(Axis::Cp) == Some(Ty::Invariant);
        cuts.then(|| CutOver { group: rank.group_over(&Axis::CONTEXT), whole })
    }

    /// Whether this tape [decodes](Self::decoding).
    pub fn decodes(&self) -> bool {
        self.cache().is_some()
    }

    /// Tokens of each sequence before the tokens on this tape.
    pub fn past(&self) -> usize {
        self.cache().map_or(0, KeyValueCache::past)
    }
}
