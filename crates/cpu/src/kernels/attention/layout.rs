//! The layout of the heads of one call, and their groups.

use super::super::Float;
use super::documents::{self, Document, Packing};
use super::heads::RowsMut;
use super::rotary::Angles;
use super::stored::StoredAs;
use super::tiles::Tiles;
use super::{Dims, FORWARD_KEYS, Groups, Masks};
use crate::kernels::dropout::Mask;
use meshwork_tensor::kernel::Reach;
use std::ops::Range;

/// Values shared by all heads of a call.
#[derive(Clone, Copy)]
pub(super) struct Call<'a, T> {
    pub(super) tiles: Tiles<T>,
    pub(super) dims: Dims,
    pub(super) groups: Groups,
    pub(super) layout: Layout,
    pub(super) angles: Option<Angles<'a, T>>,
    pub(super) masks: Masks<'a>,
    /// What is added to each score, `[heads, seq, keys]`.
    pub(super) bias: Option<&'a [T]>,
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
    /// The token of the first query.
    pub(super) token: usize,
    /// The keys, by their rows in memory.
    pub(super) keys: Document,
    /// Keys before the last one that the first query sees, if there are as many.
    pub(super) past: usize,
    /// Whether these queries follow another run of queries.
    pub(super) later: bool,
}

impl QueryBlock {
    /// The keys that the queries before row `end` see, counted from the part's first key.
    pub(super) fn seen_by(&self, end: usize) -> usize {
        self.keys.len.min(self.past + end)
    }

    /// The keys before those that the query of this row sees, counted in the same way.
    pub(super) fn hidden_from(&self, row: usize, window: Option<usize>) -> usize {
        window.map_or(0, |window| (self.past + row + 1).saturating_sub(window))
    }

    /// The end of the queries that see a key before `end`.
    pub(super) fn seeing(&self, end: usize, window: Option<usize>) -> usize {
        let seeing = |window| end.saturating_add(window).saturating_sub(1 + self.past);
        window.map_or(self.queries.len, |window| self.queries.len.min(seeing(window)))
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
            let tokens = self.masks.runs(self.dims).map(|run| run.end).fold(self.dims.keys.tokens().end, usize::max);
            angles.check(tokens.max(packed), self.dims.head_dim);
        }
        let samples = self.masks.packing.map_or(self.dims.batch, Packing::samples);
        assert_eq!(samples, self.dims.batch, "samples with documents for {:?}", self.dims);
        let runs = || self.masks.runs(self.dims);
        assert_eq!(runs().map(|run| run.len()).sum::<usize>(), self.dims.seq, "queries in runs of {:?}", self.dims);
        let known = self.masks.packing.is_none() || runs().all(|run| run.end <= self.dims.keys.sequence);
        assert!(known, "queries without a document in {:?}", self.dims);
        assert_ne!(self.masks.window, Some(0), "a window of no keys");
        let Dims { batch, seq, heads, keys, .. } = self.dims;
        let lengths = self.masks.lengths.map_or(batch, <[_]>::len);
        assert_eq!(lengths, batch, "lengths for {:?}", self.dims);
        assert_eq!(self.masks.slopes.map_or(heads, <[_]>::len), heads, "slopes for {:?}", self.dims);
        let of_pairs = heads * seq * keys.count;
        assert_eq!(self.bias.map_or(of_pairs, <[_]>::len), of_pairs, "bias for {:?}", self.dims);
        let before = runs().all(|run| self.dims.keys.first <= run.start);
        assert!(before, "keys behind queries in {:?}", self.dims);
    }

    pub(super) fn scale(&self) -> T {
        self.dims.scale()
    }

    /// The call for rows in the layout of [`read`](super::stored::read).
    pub(super) fn as_read<S: StoredAs<T>>(&self) -> Self {
        let layout = if S::COPIED { Layout::copied(self.dims, self.groups) } else { self.layout };
        Self { layout, ..*self }
    }

    /// Whether a query may see no key, because its window or its document begins behind them.
    pub(super) fn hides_all_keys(&self) -> bool {
        let (behind, packed) = (self.dims.keys.tokens().end, self.masks.packing.is_some());
        let Reach { ahead, window } = self.masks.reach();
        let windowed = |run: &Range<usize>| window.is_some_and(|of| (run.end + ahead).saturating_sub(of) >= behind);
        let hides = |run: Range<usize>| windowed(&run) || packed && run.end > behind;
        behind == self.dims.keys.first || self.masks.lengths.is_some() || self.masks.runs(self.dims).any(hides)
    }

    /// What attends to itself in a sample, as far as it has queries here that see a key.
    fn attending(&self, sample: usize) -> Vec<QueryBlock> {
        let (held, Reach { ahead, window }) = (self.dims.keys.tokens(), self.masks.reach());
        let shown = self.masks.lengths.map_or(held.end, |lengths| lengths[sample].min(held.end));
        let (mut row, mut parts) = (0, Vec::new());
        let end = self.masks.runs(self.dims).map(|run| run.end).fold(held.end, usize::max);
        let whole = Document { first: 0, len: end, position: 0 };
        for (number, run) in self.masks.runs(self.dims).enumerate() {
            let documents = documents::attending(self.masks.packing, sample, &whole).iter();
            parts.extend(documents.filter_map(|document| {
                let own = document.among(&run)?;
                let keys = document.among(&(held.start..shown.min(own.range().end + ahead)))?;
                let seeing = window
                    .map_or(usize::MAX, |window| (keys.range().end.saturating_add(window) - 1).saturating_sub(ahead));
                let own = own.among(&(0..seeing))?;
                // From the block of the first key that is seen, so that sums begin at the same blocks in every call.
                let last = own.first + ahead + 1;
                let hidden = window.map_or(0, |window| last.saturating_sub(keys.first.saturating_add(window)));
                let first = keys.first + hidden / FORWARD_KEYS * FORWARD_KEYS;
                let keys = keys.among(&(first..usize::MAX))?;
                let queries = Document { first: row + own.first - run.start, ..own };
                let past = own.first + ahead - keys.first;
                let keys = Document { first: keys.first - held.start, ..keys };
                Some(QueryBlock { queries, token: own.first, keys, past, later: number > 0 })
            }));
            row += run.len();
        }
        parts
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
        let first_key = part.keys.first + self.dims.keys.first;
        [Document { first: part.token, ..part.queries }, Document { first: first_key, ..part.keys }]
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

impl Masks<'_> {
    /// The tokens that the queries are, in runs.
    pub(super) fn runs(&self, dims: Dims) -> impl Iterator<Item = Range<usize>> {
        let given = self.runs.unwrap_or_default();
        let all = self.runs.is_none().then(|| dims.queries());
        all.into_iter().chain(given.iter().cloned())
    }
}

impl Groups {
    /// Every head is its own group.
    pub fn alone(dims: Dims) -> Self {
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

#[cfg(test)]
mod tests {
    use super::super::Tiled;
    use super::*;
    use meshwork_tensor::Precision;

    /// From every group to the one after it, in both layouts.
    #[test]
    fn the_next_group_is_where_it_starts() {
        let d = Dims::new([2, 5, 6, 4]);
        let groups = Groups { size: 2, kv_heads: 5, first: 1 };
        for (groups, layout) in [(Groups::alone(d), Layout::fused(d)), (groups, Layout::apart(d, groups))] {
            let call = Call {
                tiles: f64::tiles(Precision::F32),
                dims: d,
                groups,
                layout,
                angles: None,
                masks: Masks::default(),
                bias: None,
            };
            let all: Vec<_> = groups.each(d).collect();
            for pair in all.windows(2) {
                let whole = call.parts(pair[0], false)[0].0;
                let ([q, k, v], [next_q, next_k, next_v]) = (call.starts(pair[0], whole), call.starts(pair[1], whole));
                let out = call.out_start(pair[1], whole) - call.out_start(pair[0], whole);
                let next = call.parts(pair[0], true)[0].1.unwrap();
                assert_eq!((next.distance, next.rows), ([next_q - q, next_k - k, out], d.seq));
                assert_eq!(next_v - v, next_k - k);
            }
        }
    }
}
