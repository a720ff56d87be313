//! The largest elements, exactly.
//!
//! Elements are compared by the bits of |x|, an order in which infinity is larger than all numbers and a NaN larger than
//! infinity: what is not finite is always among the largest. Of equal elements the one with the lower index is.

use meshwork_core::simd::wide;

/// Below so many elements, one selection among all is faster than a histogram.
const SMALL: usize = 4096;

/// Appends the indices of the `count` largest elements to `out`, increasing, numbered from `base`.
pub fn largest(x: &[f32], count: usize, base: usize, out: &mut Vec<u32>) {
    if count >= x.len() {
        return out.extend((0..x.len()).map(|i| (base + i) as u32));
    }
    if count == 0 {
        return;
    }
    let (threshold, ties) = threshold(x, count);
    let room = out.len();
    out.resize(room + count, 0);
    wide(
        #[inline(always)]
        || emit(x, threshold, ties, base, &mut out[room..]),
    );
}

#[inline(always)]
fn key(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// The key of the `count`-th largest element, and how many of the elements with this key are among the `count` largest.
fn threshold(x: &[f32], count: usize) -> (u32, usize) {
    if x.len() < SMALL {
        return kth(&mut x.iter().map(|&x| key(x)).collect::<Vec<_>>(), count);
    }
    // Sign, exponent and three bits of the mantissa; four histograms, so that equal neighbours do not wait for each other.
    const SHIFT: u32 = 20;
    let mut tables = vec![[0_u32; 4]; 1 << (31 - SHIFT)];
    let (fours, rest) = x.as_chunks::<4>();
    for four in fours {
        for (lane, &x) in four.iter().enumerate() {
            tables[(key(x) >> SHIFT) as usize][lane] += 1;
        }
    }
    for &x in rest {
        tables[(key(x) >> SHIFT) as usize][0] += 1;
    }
    let mut left = count;
    for (bucket, lanes) in tables.iter().enumerate().rev() {
        let here: usize = lanes.iter().map(|&count| count as usize).sum();
        if here >= left {
            let mut keys = vec![0; here + 1];
            wide(
                #[inline(always)]
                || {
                    let mut at = 0;
                    for &x in x {
                        // The last place takes what is not in the bucket: no branch that depends on data.
                        keys[at] = key(x);
                        at += usize::from(key(x) >> SHIFT == bucket as u32);
                    }
                },
            );
            keys.truncate(here);
            return kth(&mut keys, left);
        }
        left -= here;
    }
    (0, 0) // Unreachable: the histograms count all elements, and `count` is fewer.
}

/// The `count`-th largest of the keys, and how many of its equals are among the `count` largest.
fn kth(keys: &mut [u32], count: usize) -> (u32, usize) {
    let (above, &mut kth, _) = keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    (kth, count - above.iter().filter(|&&key| key > kth).count())
}

/// Writes the indices of all elements above the threshold and of the first `ties` that are equal to it.
#[inline(always)]
fn emit(x: &[f32], threshold: u32, mut ties: usize, base: usize, out: &mut [u32]) {
    let mut at = 0;
    for (chunk, x) in x.chunks(64).enumerate() {
        let (mut above, mut equal) = (0_u64, 0_u64);
        for (i, &x) in x.iter().enumerate() {
            above |= u64::from(key(x) > threshold) << i;
            equal |= u64::from(key(x) == threshold) << i;
        }
        while equal != 0 && ties > 0 {
            above |= equal & equal.wrapping_neg();
            equal &= equal - 1;
            ties -= 1;
        }
        while above != 0 {
            out[at] = (base + 64 * chunk) as u32 + above.trailing_zeros();
            at += 1;
            above &= above - 1;
        }
    }
}
