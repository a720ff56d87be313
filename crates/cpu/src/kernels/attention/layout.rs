//! The layout of the heads of one call, and their groups.

use super::super::Float;
use super::documents::{self, Document, Packing};
use super::heads::RowsMut;
use super::rotary::Angles;
use super::stored::StoredAs;
use super::tiles::Tiles;
use super::{Dims, Groups, Keys, Masks};
use crate::kernels::dropout::Mask;

/// Values shared by all heads of a call.
#[derive(Clone, Copy)]
pub(super) struct Call<'a, T> {
    pub(super) tiles: Tiles<T>,
    pub(super) dims: Dims,
    pub(super) groups: Groups,
    pub(super) layout: Layout,
    pub(super) angles: Option<Angles<'a, T>>,
    pub(super) masks: Masks<'a>,
}

/// The heads of a sample that share keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Group {
    pub(super) sample: usize,
    /// Index among the local groups.
    pub(super) index: usize,
}

/// Queries of a group that are computed together, and the keys that one of them sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryBlock {
    /// The queries, by their rows in memory.
    pub(super) queries: Document,
    /// The keys, by their rows in memory.
    pub(super) keys: Document,
    /// Keys before the first query's own.
    pub(super) past: usize,
}

impl QueryBlock {
    /// The keys that the queries before row `end` see, counted from the part's first key.
    pub(super) fn seen_by(&self, end: usize) -> usize {
        self.keys.len.min(self.past + end)
    }
}

/// The places of the heads of a tensor: head h begins in row i of sample s, of `rows` rows each, at
/// `start + (s rows + i) row + h head_dim`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    start: usize,
    rows: usize,
    /// From one position to the next.
    pub(super) row: usize,
}

/// The places of all heads: queries in one slice, keys and values in another one or the same, and the output in a
/// separate one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) q: Heads,
    pub(super) k: Heads,
    pub(super) v: Heads,
    pub(super) out: Heads,
}

/// The next work of a thread, relative to its current work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Next {
    /// Offsets to it in the queries, in keys and values, and in the output; modulo the size of addresses, because they
    /// may be negative.
    pub(super) distance: [usize; 3],
    /// Its rows.
    pub(super) rows: usize,
}

/// The dropout of one head: its mask and the global index of its first element.
pub(super) type HeadDropout = Option<(Mask, u64)>;

impl Layout {
    /// `qkv[batch, seq, 3, heads, head_dim]`.
    pub(super) fn fused(dims: Dims) -> Self {
        let width = dims.heads * dims.head_dim;
        let part = |part: usize| Heads { start: part * width, rows: dims.seq, row: 3 * width };
        Layout { q: part(0), k: part(1), v: part(2), out: Heads { start: 0, rows: dims.seq, row: width } }
    }

    /// The layout of one group's rows copied without gaps.
    pub(super) fn copied(dims: Dims, groups: Groups) -> Self {
        let rows = |heads: usize| Heads { start: 0, rows: 0, row: heads * dims.head_dim };
        Layout { q: rows(groups.size), k: rows(1), v: rows(1), out: rows(groups.size) }
    }

    /// `q[batch, seq, heads, head_dim]`, `kv[batch, keys, 2, kv_heads, head_dim]`.
    pub(super) fn apart(dims: Dims, groups: Groups) -> Self {
        let (width, kv) = (dims.heads * dims.head_dim, groups.kv_heads * dims.head_dim);
        let whole = Heads { start: 0, rows: dims.seq, row: width };
        let part = |part: usize| Heads { start: part * kv, rows: dims.keys.count, row: 2 * kv };
        Layout { q: whole, k: part(0), v: part(1), out: whole }
    }
}

impl Heads {
    fn at(self, sample: usize, row: usize, head: usize) -> usize {
        self.start + (sample * self.rows + row) * self.row + head
    }
}

impl Group {
    /// Its first head of queries.
    pub(super) fn first_head(self, groups: Groups) -> usize {
        self.index * groups.size
    }
}

impl<'a, T: Float> Call<'a, T> {
    pub(super) fn check(&self) {
        if let Some(angles) = &self.angles {
            let packed = self.masks.packing.map_or(0, Packing::positions);
            let Dims { seq, keys, head_dim, .. } = self.dims;
            angles.check((keys.first_query + seq).max(keys.tokens().end).max(packed), head_dim);
        }
        assert!(self.dims.keys.first <= self.dims.keys.first_query, "keys behind queries in {:?}", self.dims);
        let samples = self.masks.packing.map_or(self.dims.batch, Packing::samples);
        assert_eq!(samples, self.dims.batch, "samples with documents for {:?}", self.dims);
        let known = self.masks.packing.is_none() || self.dims.queries().end <= self.dims.keys.sequence;
        assert!(known, "queries without a document in {:?}", self.dims);
    }

    pub(super) fn scale(&self) -> T {
        self.dims.scale()
    }

    /// The call for rows in the layout of [`read`](super::stored::read).
    pub(super) fn as_read<S: StoredAs<T>>(&self) -> Self {
        let layout = if S::COPIED { Layout::copied(self.dims, self.groups) } else { self.layout };
        Self { layout, ..*self }
    }

    /// What attends to itself in a sample, as far as it has queries here.
    fn attending(&self, sample: usize) -> Vec<QueryBlock> {
        let (keys @ Keys { first_query, first, .. }, queries) = (self.dims.keys, self.dims.queries());
        let whole = Document { first: 0, len: keys.tokens().end.max(queries.end), position: 0 };
        let parts = documents::attending(self.masks.packing, sample, &whole).iter().filter_map(|document| {
            let own = document.among(&queries)?;
            let seen = document.among(&(first..keys.tokens().end.min(own.range().end)))?;
            let queries = Document { first: own.first - first_query, ..own };
            let keys = Document { first: seen.first - first, ..seen };
            Some(QueryBlock { queries, keys, past: own.first - seen.first })
        });
        parts.collect()
    }

    /// The parts of a group that are computed one after the other, each with what follows it: after the last one the
    /// first part of the next group, if this thread computes that one `next`.
    pub(super) fn parts(&self, group: Group, next: bool) -> Vec<(QueryBlock, Option<Next>)> {
        let parts = self.attending(group.sample);
        let after = self.after(group);
        let beyond = next.then(|| self.attending(after.sample).first().copied()).flatten();
        let following = parts.iter().skip(1).map(|&part| Some((group, part))).chain([beyond.map(|part| (after, part))]);
        parts
            .iter()
            .zip(following)
            .map(|(&part, next)| (part, next.map(|next| self.next((group, part), next))))
            .collect()
    }

    fn next(&self, (group, part): (Group, QueryBlock), (next, rows): (Group, QueryBlock)) -> Next {
        let ([q, k, _], [next_q, next_k, _]) = (self.starts(group, part), self.starts(next, rows));
        let pairs = [(q, next_q), (k, next_k), (self.out_start(group, part), self.out_start(next, rows))];
        let rows = rows.queries.len.min(rows.keys.len);
        Next { distance: pairs.map(|(from, to)| to.wrapping_sub(from)), rows }
    }

    /// The group after this one; after the last group, the first group of the next sample.
    fn after(&self, Group { sample, index }: Group) -> Group {
        match index + 1 == self.groups.used(self.dims) {
            true => Group { sample: sample + 1, index: 0 },
            false => Group { sample, index: index + 1 },
        }
    }

    /// Where a group's queries, keys and values start, from a part's first row on.
    pub(super) fn starts(&self, group: Group, part: QueryBlock) -> [usize; 3] {
        let (Group { sample, index }, Layout { q, k, v, .. }) = (group, self.layout);
        let (q_row, k_row, kv_head) = (part.queries.first, part.keys.first, self.groups.first + index);
        let starts = [(q, q_row, group.first_head(self.groups)), (k, k_row, kv_head), (v, k_row, kv_head)];
        starts.map(|(x, row, head)| x.at(sample, row, head * self.dims.head_dim))
    }

    /// Where its output starts.
    pub(super) fn out_start(&self, group: Group, part: QueryBlock) -> usize {
        let head = group.first_head(self.groups) * self.dims.head_dim;
        self.layout.out.at(group.sample, part.queries.first, head)
    }

    /// The queries of a part by the tokens that they are, and its keys.
    pub(super) fn tokens(&self, part: QueryBlock) -> [Document; 2] {
        let Keys { first_query, first, .. } = self.dims.keys;
        let of = |rows: Document, first| Document { first: rows.first + first, ..rows };
        [of(part.queries, first_query), of(part.keys, first)]
    }

    /// Rotates the rows of tokens of a head, `row` apart, by their positions; `to` gets them one after the other.
    pub(super) fn turn(
        &self,
        angles: Angles<'_, T>,
        (group, tokens): (Group, Document),
        (from, row): (&[T], usize),
        to: &mut [T],
    ) {
        let head_dim = self.dims.head_dim;
        for document in documents::within(self.masks.packing, group.sample, &tokens) {
            let first = document.first - tokens.first;
            let to = &mut to[first * head_dim..][..document.len * head_dim];
            angles.from(document.position, head_dim).turn((&from[first * row..], row), head_dim, to);
        }
    }

    /// Rotates them back, in place.
    pub(super) fn turn_back(
        &self,
        angles: Angles<'_, T>,
        (group, tokens): (Group, Document),
        rows: &mut RowsMut<'_, T>,
    ) {
        for document in documents::within(self.masks.packing, group.sample, &tokens) {
            let first = document.first - tokens.first;
            let mut rows = rows.part(first..first + document.len, 0);
            angles.from(document.position, self.dims.head_dim).turn_back(&mut rows, document.len, self.dims.head_dim);
        }
    }

    /// The dropout of a part of a head of a group: the factors of a query follow those of the one before by the tokens
    /// of a sequence.
    pub(super) fn head_dropout(&self, (group, part): (Group, QueryBlock), head: usize) -> HeadDropout {
        let head = group.first_head(self.groups) + head;
        let [queries, keys] = self.tokens(part);
        let first = (queries.first * self.dims.keys.sequence + keys.first) as u64;
        self.masks.dropout.map(|dropout| (dropout.mask, dropout.head_start(self.dims, group.sample, head) + first))
    }
}

impl Groups {
    /// Every head is its own group.
    pub(super) fn alone(dims: Dims) -> Self {
        Groups { size: 1, kv_heads: dims.heads, first: 0 }
    }

    /// Heads of keys and values that are read.
    pub(super) fn used(self, dims: Dims) -> usize {
        dims.heads / self.size
    }

    pub(super) fn each(self, dims: Dims) -> impl Iterator<Item = Group> + Send {
        (0..dims.batch).flat_map(move |sample| (0..self.used(dims)).map(move |index| Group { sample, index }))
    }

    pub(super) fn check(self, dims: Dims, kvs: &[usize]) {
        let Groups { size, kv_heads, first } = self;
        assert!(
            size > 0 && dims.heads.is_multiple_of(size) && first + dims.heads / size <= kv_heads,
            "{self:?} of {dims:?}"
        );
        let elements = dims.batch * dims.keys.count * 2 * kv_heads * dims.head_dim;
        assert!(kvs.iter().all(|&len| len == elements), "elements of kv {kvs:?} for {dims:?}, {self:?}");
    }
}

impl Dims {
    pub(super) fn check(&self, outs: &[usize], lse: usize) {
        let Dims { batch, seq, heads, head_dim, .. } = *self;
        assert!(head_dim > 0, "heads of no elements");
        let elements = batch * seq * heads * head_dim;
        assert!(outs.iter().all(|&len| len == elements), "elements of queries and outputs {outs:?} for {self:?}");
        assert_eq!(lse, batch * heads * seq, "elements of lse for {self:?}");
    }

    pub(super) fn scale<T: Float>(&self) -> T {
        T::from_f64(1.0 / (self.head_dim as f64).sqrt())
    }
}
