//! The memory of an operation while messages read and write parts of it.
//!
//! A [`Ground`] owns a buffer that nothing else refers to, and hands out [`Claim`]s: ranges that do not overlap, each
//! of which has its bytes alone until it is dropped. So a library may write one range while others are sent, and the
//! buffer comes back only when no claim is left.

use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use meshwork_core::{Buffer, BufferError};

/// A buffer whose ranges are claimed.
#[derive(Debug)]
pub(crate) struct Ground(Arc<Owner>);

#[derive(Debug)]
struct Owner {
    /// Held for its memory, which `at` leads to.
    buffer: Buffer,
    at: *mut u8,
    bytes: usize,
    claimed: Mutex<Vec<Range<usize>>>,
}

// SAFETY: the pointer leads into the memory of `buffer`, which is `Send` and owned by the same value.
unsafe impl Send for Owner {}
// SAFETY: the bytes are reached by claims alone, whose ranges do not overlap; the list of them has a lock.
unsafe impl Sync for Owner {}

impl Owner {
    fn claimed(&self) -> MutexGuard<'_, Vec<Range<usize>>> {
        // The list is changed by one call at a time, which does not panic in between.
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ground {
    /// The ground of a buffer on the host that nothing else refers to.
    pub(crate) fn new(mut buffer: Buffer) -> Result<Ground, BufferError> {
        let bytes = buffer.as_bytes_mut()?;
        let (at, bytes) = (bytes.as_mut_ptr(), bytes.len());
        Ok(Ground(Arc::new(Owner { buffer, at, bytes, claimed: Mutex::default() })))
    }

    /// These bytes alone; none while a claim overlaps them.
    ///
    /// # Panics
    /// If there are no such bytes.
    pub(crate) fn claim(&self, range: Range<usize>) -> Option<Claim> {
        assert!(range.start <= range.end && range.end <= self.0.bytes, "{range:?} of {} bytes", self.0.bytes);
        if !range.is_empty() {
            let mut claimed = self.0.claimed();
            if claimed.iter().any(|other| other.start < range.end && range.start < other.end) {
                return None;
            }
            claimed.push(range.clone());
        }
        Some(Claim { owner: self.0.clone(), range })
    }

    /// All of it; none while there is any other claim.
    pub(crate) fn claim_all(&self) -> Option<Claim> {
        self.claim(0..self.0.bytes)
    }

    /// The first bytes alone, if there are as many and no claim overlaps them.
    pub(crate) fn claim_first(&self, bytes: usize) -> Option<Claim> {
        if bytes <= self.0.bytes { self.claim(0..bytes) } else { None }
    }

    /// Writes these bytes; false while a claim overlaps the range.
    pub(crate) fn write(&mut self, range: Range<usize>, bytes: &[u8]) -> bool {
        if let Some(owner) = Arc::get_mut(&mut self.0) {
            assert!(range.start <= range.end && range.end <= owner.bytes, "{range:?} of {} bytes", owner.bytes);
            // SAFETY: the range is within the bytes at `at`, which live as long as the owner does. No claim is left, as
            // each holds the owner, so nothing else reads or writes them.
            unsafe { std::slice::from_raw_parts_mut(owner.at.add(range.start), range.len()) }.copy_from_slice(bytes);
            return true;
        }
        let Some(mut claim) = self.claim(range) else { return false };
        claim.copy_from_slice(bytes);
        true
    }

    /// Whether no claim is left.
    pub(crate) fn is_free(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// The buffer, if no claim is left.
    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        Arc::into_inner(self.0).map(|owner| owner.buffer)
    }
}

/// A range of a buffer, which its owner alone reads and writes.
#[derive(Debug)]
pub(crate) struct Claim {
    owner: Arc<Owner>,
    range: Range<usize>,
}

impl Deref for Claim {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `Ground::claim` found the range within the bytes at `at`, which live as long as the owner does. No
        // other claim has any of them, and the buffer itself, unique when it came, is not read while it is here.
        unsafe { std::slice::from_raw_parts(self.owner.at.add(self.range.start), self.range.len()) }
    }
}

impl DerefMut for Claim {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the bytes were writable when the buffer came, as it was unique.
        unsafe { std::slice::from_raw_parts_mut(self.owner.at.add(self.range.start), self.range.len()) }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claimed = self.owner.claimed();
        if let Some(at) = claimed.iter().position(|other| *other == self.range) {
            claimed.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_do_not_overlap_and_the_buffer_comes_back_after_the_last() {
        let ground = Ground::new(Buffer::from_vec(vec![0u8; 10])).unwrap();
        let mut first = ground.claim(0..4).unwrap();
        let mut last = ground.claim(4..10).unwrap();
        assert!(ground.claim(3..5).is_none() && ground.claim(9..10).is_none());
        assert!(ground.claim(4..4).is_some(), "nothing overlaps nothing");
        first.fill(1);
        last.fill(2);
        drop(first);
        first = ground.claim(0..4).unwrap();
        assert_eq!(*first, [1; 4]);
        assert!(!ground.is_free());
        drop((first, last));
        assert!(ground.is_free());
        assert_eq!(ground.into_buffer().unwrap().as_slice::<u8>().unwrap(), [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    fn memory_that_others_read_is_no_ground() {
        let buffer = Buffer::from_vec(vec![0u8; 10]);
        let reader = buffer.clone();
        assert!(Ground::new(buffer).is_err());
        drop(reader);
    }
}
