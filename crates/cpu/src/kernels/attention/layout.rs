//! The layout of the heads of one call, and their groups.

use super::super::Float;
use super::documents::{self, Document, Packing};
use super::heads::RowsMut;
use super::rotary::Angles;
use super::stored::StoredAs;
use super::tiles::Tiles;
use super::{Dims, Groups, Masks};
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

/// The places of the heads of a tensor: head h begins in row i of sample s at `start + (s seq + i) row + h head_dim`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    start: usize,
    /// Stride between positions.
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
        let part = |part: usize| Heads { start: part * width, row: 3 * width };
        Layout { q: part(0), k: part(1), v: part(2), out: Heads { start: 0, row: width } }
    }

    /// The layout of one group's rows copied without gaps.
    pub(super) fn copied(dims: Dims, groups: Groups) -> Self {
        let rows = |heads: usize| Heads { start: 0, row: heads * dims.head_dim };
        Layout { q: rows(groups.size), k: rows(1), v: rows(1), out: rows(groups.size) }
    }

    /// `q[batch, seq, heads, head_dim]`, `kv[batch, seq, 2, kv_heads, head_dim]`.
    pub(super) fn apart(dims: Dims, groups: Groups) -> Self {
        let (width, kv) = (dims.heads * dims.head_dim, groups.kv_heads * dims.head_dim);
        let whole = Heads { start: 0, row: width };
        let part = |part: usize| Heads { start: part * kv, row: 2 * kv };
        Layout { q: whole, k: part(0), v: part(1), out: whole }
    }
}

impl Heads {
    fn at(self, dims: Dims, sample: usize, head: usize) -> usize {
        self.start + sample * dims.seq * self.row + head * dims.head_dim
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
            angles.check(self.dims.seq.max(packed), self.dims.head_dim);
        }
        let samples = self.masks.packing.map_or(self.dims.batch, Packing::samples);
        assert_eq!(samples, self.dims.batch, "samples with documents for {:?}", self.dims);
    }

    pub(super) fn scale(&self) -> T {
        self.dims.scale()
    }

    /// The call for rows in the layout of [`read`](super::stored::read).
    pub(super) fn as_read<S: StoredAs<T>>(&self) -> Self {
        let layout = if S::COPIED { Layout::copied(self.dims, self.groups) } else { self.layout };
        Self { layout, ..*self }
    }

    /// All rows of a sample.
    fn whole(&self) -> Document {
        Document { first: 0, len: self.dims.seq, position: 0 }
    }

    /// The parts of a group in order of computation, each with the part that follows it: after the last one, the first
    /// part of the next group, if this thread computes that group `next`.
    pub(super) fn parts(&self, group: Group, next: bool) -> Vec<(Document, Option<Next>)> {
        let (whole, packing) = (self.whole(), self.masks.packing);
        let parts = documents::attending(packing, group.sample, &whole);
        let after = self.after(group);
        let beyond = next.then(|| documents::attending(packing, after.sample, &whole).first()).flatten();
        let following =
            parts.iter().skip(1).map(|&part| Some((group, part))).chain([beyond.map(|&part| (after, part))]);
        parts
            .iter()
            .zip(following)
            .map(|(&part, next)| (part, next.map(|next| self.next((group, part), next))))
            .collect()
    }

    fn next(&self, (group, part): (Group, Document), (next, rows): (Group, Document)) -> Next {
        let ([q, k, _], [next_q, next_k, _]) = (self.starts(group, part), self.starts(next, rows));
        let pairs = [(q, next_q), (k, next_k), (self.out_start(group, part), self.out_start(next, rows))];
        Next { distance: pairs.map(|(from, to)| to.wrapping_sub(from)), rows: rows.len }
    }

    /// The group after this one; after the last group, the first group of the next sample.
    fn after(&self, Group { sample, index }: Group) -> Group {
        match index + 1 == self.groups.used(self.dims) {
            true => Group { sample: sample + 1, index: 0 },
            false => Group { sample, index: index + 1 },
        }
    }

    /// The starts of a group's queries, keys and values, at a part's first row.
    pub(super) fn starts(&self, group: Group, part: Document) -> [usize; 3] {
        let (Group { sample, index }, Layout { q, k, v, .. }) = (group, self.layout);
        let kv_head = self.groups.first + index;
        let starts = [(q, group.first_head(self.groups)), (k, kv_head), (v, kv_head)];
        starts.map(|(x, head)| x.at(self.dims, sample, head) + part.first * x.row)
    }

    /// The start of its output.
    pub(super) fn out_start(&self, group: Group, part: Document) -> usize {
        let out = self.layout.out;
        out.at(self.dims, group.sample, group.first_head(self.groups)) + part.first * out.row
    }

    /// Rotates the rows of a part of a head, `row` apart, by their positions; `to` gets them contiguously.
    pub(super) fn turn(
        &self,
        angles: Angles<'_, T>,
        (group, part): (Group, Document),
        (from, row): (&[T], usize),
        to: &mut [T],
    ) {
        let head_dim = self.dims.head_dim;
        for document in documents::within(self.masks.packing, group.sample, &part) {
            let first = document.first - part.first;
            let to = &mut to[first * head_dim..][..document.len * head_dim];
            angles.from(document.position, head_dim).turn((&from[first * row..], row), head_dim, to);
        }
    }

    /// Rotates them back, in place.
    pub(super) fn turn_back(&self, angles: Angles<'_, T>, (group, part): (Group, Document), rows: &mut RowsMut<'_, T>) {
        for document in documents::within(self.masks.packing, group.sample, &part) {
            let first = document.first - part.first;
            let mut rows = rows.part(first..first + document.len, 0);
            angles.from(document.position, self.dims.head_dim).turn_back(&mut rows, document.len, self.dims.head_dim);
        }
    }

    /// The dropout of a part of a head of a group: the factors of consecutive queries are `seq` apart.
    pub(super) fn head_dropout(&self, (group, part): (Group, Document), head: usize) -> HeadDropout {
        let head = group.first_head(self.groups) + head;
        let first = (part.first * (self.dims.seq + 1)) as u64;
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
        let elements = dims.batch * dims.seq * 2 * kv_heads * dims.head_dim;
        assert!(kvs.iter().all(|&len| len == elements), "elements of kv {kvs:?} for {dims:?}, {self:?}");
    }
}

impl Dims {
    pub(super) fn check(&self, outs: &[usize], lse: usize) {
        let Dims { batch, seq, heads, head_dim } = *self;
        assert!(head_dim > 0, "heads of no elements");
        let elements = batch * seq * heads * head_dim;
        assert!(outs.iter().all(|&len| len == elements), "elements of queries and outputs {outs:?} for {self:?}");
        assert_eq!(lse, batch * heads * seq, "elements of lse for {self:?}");
    }

    pub(super) fn scale<T: Float>(&self) -> T {
        T::from_f64(1.0 / (self.head_dim as f64).sqrt())
    }
}
