//! Writes that bypass the caches, where the CPU has them.

/// Copies, bypassing the caches with every whole line that is written. [`fence`] must follow before others may read.
///
/// # Safety
///
/// `bytes` can be read from `from` and written to `to`, and these do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    let head = to.align_offset(64).min(bytes);
    let lines = (bytes - head) / 64 * 64;
    // SAFETY: all offsets are at most `bytes`; the addresses of the whole lines are multiples of 64. SSE2 is part of
    // the architecture.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for at in (head..head + lines).step_by(64) {
            for part in [0, 16, 32, 48] {
                let value = _mm_loadu_si128(from.add(at + part).cast::<__m128i>());
                _mm_stream_si128(to.add(at + part).cast::<__m128i>(), value);
            }
        }
        let done = head + lines;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
    }
}

/// Makes streamed bytes visible to every thread that sees what this one does next.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) fn fence() {
    // SAFETY: SSE is part of the architecture.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

/// Copies.
///
/// # Safety
///
/// `bytes` can be read from `from` and written to `to`, and these do not overlap.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline(always)]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise is the same.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Nothing to wait for.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(super) fn fence() {}

#[cfg(test)]
mod tests {
    #[test]
    fn every_byte_arrives_and_no_other_changes() {
        let from: Vec<u8> = (0..400).map(|i| i as u8 | 1).collect();
        for (read, write, bytes) in
            (0..70).flat_map(|i| [(i, 0, 300), (0, i, 300), (i, i, i), (3, i, 64 + i), (i, 5, 0)])
        {
            let mut to = vec![0u8; 400];
            // SAFETY: both offsets and lengths end below 400, and these are two vectors.
            unsafe { super::copy(from[read..].as_ptr(), to[write..].as_mut_ptr(), bytes) };
            super::fence();
            assert_eq!(to[write..write + bytes], from[read..read + bytes]);
            let outside = to[..write].iter().chain(&to[write + bytes..]);
            assert!(outside.copied().all(|byte| byte == 0), "{read} {write} {bytes}");
        }
    }
}
