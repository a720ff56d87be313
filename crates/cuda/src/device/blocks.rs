//! Free memory of one stream, cut from large allocations of the driver ("segments"), as in PyTorch's caching allocator
//! (`c10/cuda/CUDACachingAllocator.cpp`, whose sizes these are).
//!
//! A block is cut from the smallest free one that is large enough, and a block that is given back joins its free
//! neighbours. Among free blocks of one size the lowest address is used first. So what is free follows from what is in
//! use, in whatever order it was given back: steps with the same allocations get the same addresses, and their work can
//! be replayed unchanged ([`crate::replay`]).

use crate::driver::{Address, Event};
use std::collections::{BTreeMap, BTreeSet};

/// Sizes of blocks are multiples of this many bytes.
const UNIT: usize = 256;

/// Small blocks have segments of their own, so that a few of them that stay do not keep a large segment in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Small,
    Large,
}

/// A piece of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) at: Address,
    pub(super) bytes: usize,
    /// The event after which its last owner is done, if that event is not in the stream that uses the block next.
    pub(super) done: Option<Event>,
}

/// The free blocks of a stream.
#[derive(Debug)]
pub(super) struct Blocks {
    /// [`Properties::granule`](crate::driver::Properties::granule).
    granule: usize,
    /// The bytes of each segment, by its address.
    segments: BTreeMap<Address, usize>,
    free: BTreeMap<Address, Block>,
    /// The free blocks of each kind, by size.
    sizes: [BTreeSet<(usize, Address)>; 2],
}

impl Blocks {
    pub(super) fn new(granule: usize) -> Self {
        Self { granule, segments: BTreeMap::new(), free: BTreeMap::new(), sizes: Default::default() }
    }

    /// The size of a block for `bytes` bytes.
    pub(super) fn size(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(UNIT)
    }

    /// The kind of a block of `bytes` bytes.
    fn kind(&self, bytes: usize) -> Kind {
        if bytes <= self.granule / 2 { Kind::Small } else { Kind::Large }
    }

    /// Bytes of a segment for a block of `bytes` bytes: with a granule of 2 MiB, 2 MiB for blocks of up to 1 MiB, 20
    /// MiB for blocks of less than 10 MiB, and for others the next multiple of 2 MiB.
    pub(super) fn segment(&self, bytes: usize) -> usize {
        match self.kind(bytes) {
            Kind::Small => self.granule,
            Kind::Large if bytes < 5 * self.granule => 10 * self.granule,
            Kind::Large => bytes.next_multiple_of(self.granule),
        }
    }

    /// A block of at least `bytes` bytes, a [`size`](Self::size), if there is one.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Block> {
        let kind = self.kind(bytes);
        let &(_, at) = self.sizes[kind as usize].range((bytes, Address::NULL)..).next()?;
        let block = self.remove(at)?;
        Some(self.cut(block, bytes))
    }

    /// The first `bytes` bytes of a new segment of `size` bytes.
    pub(super) fn add(&mut self, at: Address, size: usize, bytes: usize) -> Block {
        self.segments.insert(at, size);
        self.cut(Block { at, bytes: size, done: None }, bytes)
    }

    /// Keeps the rest of a block free, unless it is too small to be of use.
    fn cut(&mut self, block: Block, bytes: usize) -> Block {
        let rest = block.bytes - bytes;
        let least = match self.kind_at(block.at) {
            Kind::Small => UNIT,
            Kind::Large => UNIT.max(self.granule / 2 + 1),
        };
        if rest < least {
            return block;
        }
        self.insert(Block { at: block.at.offset(bytes), bytes: rest, ..block });
        Block { bytes, ..block }
    }

    /// Takes a block back, and joins it with its free neighbours in the segment. Of their events the last is the
    /// joined block's: all of them are of one stream.
    pub(super) fn give(&mut self, block: Block) {
        let mut joined = block;
        let end = block.at.offset(block.bytes);
        if !self.segments.contains_key(&end)
            && let Some(next) = self.remove(end)
        {
            joined = Block { bytes: joined.bytes + next.bytes, done: joined.done.max(next.done), ..joined };
        }
        let before = self.free.range(..block.at).next_back().map(|(_, before)| *before);
        if let Some(before) = before.filter(|before| before.at.offset(before.bytes) == block.at)
            && !self.segments.contains_key(&block.at)
        {
            self.remove(before.at);
            joined = Block { at: before.at, bytes: before.bytes + joined.bytes, done: joined.done.max(before.done) };
        }
        self.insert(joined);
    }

    /// Segments without a block in use: their sizes and addresses.
    pub(super) fn unused(&self) -> impl Iterator<Item = (usize, Address)> {
        let whole = |block: &&Block| self.segments.get(&block.at) == Some(&block.bytes);
        self.free.values().filter(whole).map(|block| (block.bytes, block.at))
    }

    /// Removes a segment that has no block in use, before the driver frees it.
    pub(super) fn forget(&mut self, segment: Address) {
        self.remove(segment);
        self.segments.remove(&segment);
    }

    /// All segments, when nobody needs them any more.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Address> + use<> {
        let granule = self.granule;
        std::mem::replace(self, Self::new(granule)).segments.into_keys()
    }

    /// The kind of the blocks in the segment of an address.
    fn kind_at(&self, at: Address) -> Kind {
        let segment = self.segments.range(..=at).next_back();
        segment.map_or(Kind::Large, |(_, &bytes)| if bytes == self.granule { Kind::Small } else { Kind::Large })
    }

    fn insert(&mut self, block: Block) {
        let kind = self.kind_at(block.at);
        self.sizes[kind as usize].insert((block.bytes, block.at));
        self.free.insert(block.at, block);
    }

    fn remove(&mut self, at: Address) -> Option<Block> {
        let block = self.free.remove(&at)?;
        let kind = self.kind_at(at);
        self.sizes[kind as usize].remove(&(block.bytes, at));
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Free memory of a driver whose granule is 2 MiB, and the driver: it gives segments one behind the other.
    struct Driver(Blocks, u64);

    impl Driver {
        fn new() -> Self {
            Self(Blocks::new(2 * MIB), 0x1000_0000)
        }

        fn take(&mut self, bytes: usize) -> Block {
            let bytes = Blocks::size(bytes);
            self.0.take(bytes).unwrap_or_else(|| {
                let (at, size) = (Address(self.1), self.0.segment(bytes));
                self.1 += size as u64;
                self.0.add(at, size, bytes)
            })
        }

        fn segments(&self) -> Vec<usize> {
            self.0.segments.values().copied().collect()
        }
    }

    #[test]
    fn blocks_are_cut_and_joined() {
        let mut of = Driver::new();
        let [a, b, c] = [1000, 300 << 10, 1].map(|bytes| of.take(bytes));
        assert_eq!([a.bytes, b.bytes, c.bytes], [1024, 300 << 10, 256]);
        assert_eq!([b.at, c.at], [a.at.offset(1024), a.at.offset(1024 + (300 << 10))]);
        [a, c, b].into_iter().for_each(|block| of.0.give(block));
        let whole = Block { at: a.at, bytes: 2 * MIB, done: None };
        assert_eq!(of.0.free.values().collect::<Vec<_>>(), [&whole], "in any order they join");
        assert_eq!(of.take(MIB).at, a.at);
        let [d, e] = [3 * MIB, 4 * MIB].map(|bytes| of.take(bytes));
        assert_eq!((e.at, of.segments()), (d.at.offset(3 * MIB), vec![2 * MIB, 20 * MIB]));
        assert_eq!(of.take(12 * MIB + 1).bytes, 13 * MIB, "a rest of at most 1 MiB is not cut off");
        assert_eq!(of.take(11 * MIB).bytes, 12 * MIB);
        assert_eq!(of.segments(), [2 * MIB, 20 * MIB, 12 * MIB]);
    }

    /// Segments that lie one behind the other are freed one by one, so no block spans two.
    #[test]
    fn segments_stay_apart_and_are_given_back_whole() {
        let mut of = Driver::new();
        let blocks = [12, 14, 16].map(|size| of.take(size * MIB));
        blocks.iter().for_each(|block| of.0.give(*block));
        assert_eq!(of.0.free.len(), 3);
        let part = of.take(12 * MIB);
        let unused: Vec<_> = of.0.unused().collect();
        assert_eq!(unused, [(14 * MIB, blocks[1].at), (16 * MIB, blocks[2].at)]);
        of.0.forget(blocks[1].at);
        of.0.give(part);
        assert_eq!(of.0.drain().collect::<Vec<_>>(), [blocks[0].at, blocks[2].at]);
    }

    #[test]
    fn a_joined_block_waits_for_the_last_of_its_owners() {
        let mut of = Driver::new();
        let blocks = [1, 2, 3].map(|_| of.take(256));
        for (block, event) in blocks.iter().zip([5, 9, 7]) {
            of.0.give(Block { done: Some(Event(event)), ..*block });
        }
        assert_eq!(of.take(700).done, Some(Event(9)));
        assert_eq!(of.take(256).done, Some(Event(9)), "and so does its rest");
    }

    /// As on the emulator, whose allocations have exactly the bytes that were asked for.
    #[test]
    fn a_granule_of_a_byte_gives_segments_of_the_size_of_the_block() {
        let mut blocks = Blocks::new(1);
        assert_eq!([256, 512, 1 << 20].map(|bytes| blocks.segment(bytes)), [256, 512, 1 << 20]);
        let whole = blocks.add(Address(4096), 1024, 1024);
        blocks.give(whole);
        assert_eq!(blocks.take(256).map(|block| (block.at, block.bytes)), Some((Address(4096), 256)));
        assert_eq!(blocks.take(1024), None);
        assert_eq!(blocks.take(512).map(|block| (block.at, block.bytes)), Some((Address(4352), 512)));
    }
}
