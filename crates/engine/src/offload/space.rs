//! Which bytes of a store are in use.

use crate::prelude::*;

/// Regions begin and end at multiples of this, in bytes: a page of most systems.
const ALIGNED: u64 = 4096;

/// Which bytes of the store are free.
#[derive(Debug, Default)]
pub struct Space {
    /// Ranges below the end: start and length. Neighbours are joined.
    free: BTreeMap<u64, u64>,
    end: u64,
    most: u64,
}

impl Space {
    /// The most bytes that were in use at once, free ranges between them included.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// The first range that fits, else one at the end.
    fn take(&mut self, bytes: u64) -> u64 {
        let fitting = self.free.iter().find(|&(_, &length)| length >= bytes).map(|(&at, &length)| (at, length));
        let Some((at, length)) = fitting else {
            self.end += bytes;
            self.most = self.most.max(self.end);
            return self.end - bytes;
        };
        self.free.remove(&at);
        if length > bytes {
            self.free.insert(at + bytes, length - bytes);
        }
        at
    }

    fn give_back(&mut self, mut at: u64, mut bytes: u64) {
        if let Some(behind) = self.free.remove(&(at + bytes)) {
            bytes += behind;
        }
        if let Some((&before, &length)) = self.free.range(..at).next_back()
            && before + length == at
        {
            self.free.remove(&before);
            (at, bytes) = (before, bytes + length);
        }
        if at + bytes == self.end { self.end = at } else { _ = self.free.insert(at, bytes) }
    }
}

/// Bytes of the store that are in use while this lives. Reads and writes run in the order of their calls, so they may
/// be given to another use while they are still read or written.
#[derive(Debug)]
pub struct Region {
    at: u64,
    bytes: u64,
    space: Rc<RefCell<Space>>,
}

impl Region {
    /// A region of at least so many bytes.
    pub fn new(space: &Rc<RefCell<Space>>, bytes: u64) -> Self {
        let bytes = bytes.next_multiple_of(ALIGNED);
        let at = space.borrow_mut().take(bytes);
        Self { at, bytes, space: space.clone() }
    }

    /// Where it begins in the store.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Where it ends.
    pub fn end(&self) -> u64 {
        self.at + self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.space.borrow_mut().give_back(self.at, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_again_and_neighbours_are_joined() {
        let mut space = Space::default();
        let at: Vec<u64> = [10, 20, 30, 40].map(|bytes| space.take(bytes)).into();
        assert_eq!((&at[..], space.end), (&[0, 10, 30, 60][..], 100));
        space.give_back(10, 20);
        space.give_back(0, 10);
        assert_eq!(space.free, BTreeMap::from([(0, 30)]));
        assert_eq!((space.take(25), space.take(10)), (0, 100), "what does not fit goes to the end");
        space.give_back(60, 40);
        space.give_back(100, 10);
        assert_eq!((space.end, space.most), (60, 110), "the end moves back");
        space.give_back(30, 30);
        space.give_back(0, 25);
        assert_eq!((space.free.len(), space.end), (0, 0));
    }
}
