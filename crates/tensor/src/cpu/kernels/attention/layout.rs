//! The layout of the heads of one call, and their groups.

use super::super::Float;
use super::rotary::Angles;
use super::tiles::Tiles;
use super::{Dims, Dropout, Groups};
use crate::cpu::kernels::dropout::Mask;

/// Values that all heads of a call share.
#[derive(Clone, Copy)]
pub(super) struct Call<'a, T> {
    pub(super) tiles: Tiles<T>,
    pub(super) dims: Dims,
    pub(super) groups: Groups,
    pub(super) layout: Layout,
    pub(super) angles: Option<Angles<'a, T>>,
    pub(super) dropout: Option<Dropout>,
}

/// The heads of a sample that share keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Group {
    pub(super) sample: usize,
    /// Index among the groups held here.
    pub(super) index: usize,
}

/// The places of the heads of a tensor: head h begins in row i of sample s at `start + (s seq + i) row + h head_dim`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    start: usize,
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

/// Elements from a group to the one that this thread does next: in the queries, in keys and values, in the output.
pub(super) type Distance = [usize; 3];

/// The dropout of one head: its mask and the global index of its first element.
pub(super) type HeadDropout = Option<(Mask, u64)>;

impl Layout {
    /// `qkv[batch, seq, 3, heads, head_dim]`.
    pub(super) fn fused(dims: Dims) -> Self {
        let width = dims.heads * dims.head_dim;
        let part = |part: usize| Heads { start: part * width, row: 3 * width };
        Layout { q: part(0), k: part(1), v: part(2), out: Heads { start: 0, row: width } }
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

impl<T: Float> Call<'_, T> {
    pub(super) fn check(&self) {
        if let Some(angles) = &self.angles {
            angles.check(self.dims.seq, self.dims.head_dim);
        }
    }

    pub(super) fn scale(&self) -> T {
        self.dims.scale()
    }

    /// Where a group's queries, keys and values start.
    pub(super) fn starts(&self, group: Group) -> [usize; 3] {
        let (Group { sample, index }, Layout { q, k, v, .. }) = (group, self.layout);
        let kv_head = self.groups.first + index;
        [(q, group.first_head(self.groups)), (k, kv_head), (v, kv_head)].map(|(x, head)| x.at(self.dims, sample, head))
    }

    /// Where its output starts.
    pub(super) fn out_start(&self, group: Group) -> usize {
        self.layout.out.at(self.dims, group.sample, group.first_head(self.groups))
    }

    /// Elements from a group to the one after it, the next sample's first after the last.
    pub(super) fn distance_to_next(&self, group: Group) -> Distance {
        let Group { sample, index } = group;
        let next = match index + 1 == self.groups.used(self.dims) {
            true => Group { sample: sample + 1, index: 0 },
            false => Group { sample, index: index + 1 },
        };
        let ([q, k, _], [next_q, next_k, _]) = (self.starts(group), self.starts(next));
        [next_q - q, next_k - k, self.out_start(next) - self.out_start(group)]
    }

    /// The dropout of a head of a group.
    pub(super) fn head_dropout(&self, group: Group, head: usize) -> HeadDropout {
        let head = group.first_head(self.groups) + head;
        self.dropout.map(|dropout| (dropout.mask, dropout.head_start(self.dims, group.sample, head)))
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
