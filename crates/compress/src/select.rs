//! The largest elements, exactly.
//!
//! Elements are compared by the bits of |x|, an order in which infinity is larger than all numbers and a NaN larger
//! than infinity. So elements that are not finite are always among the largest, and of equal elements the first.

use meshwork_core::simd::wide;

/// Below this number of elements, one selection over all is faster than a histogram.
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
    emit(x, threshold, ties, base, &mut out[room..]);
}

#[inline(always)]
fn key(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// The key of the `count`-th largest element, and the number of elements with this key among the `count` largest.
fn threshold(x: &[f32], count: usize) -> (u32, usize) {
    if x.len() < SMALL {
        return kth(&mut x.iter().map(|&x| key(x)).collect::<Vec<_>>(), count);
    }
    // Sign, exponent and three bits of the mantissa; four histograms, so that updates for equal neighbours do not stall
    // each other.
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
            let (mut keys, low) = (Vec::with_capacity(here), (bucket as u32) << SHIFT);
            for x in x.chunks(64) {
                each_one(mask(x, low, low + (1 << SHIFT) - 1), |i| keys.push(key(x[i])));
            }
            return kth(&mut keys, left);
        }
        left -= here;
    }
    (0, 0) // Unreachable: the histograms count all elements, and `count` is fewer.
}

/// The `count`-th largest of the keys, and the number of equal keys among the `count` largest.
fn kth(keys: &mut [u32], count: usize) -> (u32, usize) {
    let (above, &mut kth, _) = keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    (kth, count - above.iter().filter(|&&key| key > kth).count())
}

/// Writes the indices of all elements above the threshold and of the first `ties` elements equal to it.
fn emit(x: &[f32], threshold: u32, mut ties: usize, base: usize, out: &mut [u32]) {
    let mut at = 0;
    for (chunk, x) in x.chunks(64).enumerate() {
        let mut chosen = mask(x, threshold + 1, u32::MAX);
        let mut equal = if ties > 0 { mask(x, threshold, threshold) } else { 0 };
        while equal != 0 && ties > 0 {
            chosen |= equal & equal.wrapping_neg();
            equal &= equal - 1;
            ties -= 1;
        }
        each_one(chosen, |i| {
            out[at] = (base + 64 * chunk + i) as u32;
            at += 1;
        });
    }
}

/// One bit for each of at most 64 elements: whether its key is in `low..=high`.
#[inline(always)]
fn mask(x: &[f32], low: u32, high: u32) -> u64 {
    let mut flags = [0_u8; 64];
    wide!(match x.first_chunk::<64>() {
        Some(x) => {
            flags.iter_mut().zip(x).for_each(|(flag, &x)| *flag = u8::from(key(x).wrapping_sub(low) <= high - low))
        }
        None => {
            flags.iter_mut().zip(x).for_each(|(flag, &x)| *flag = u8::from(key(x).wrapping_sub(low) <= high - low))
        }
    });
    let (eights, _) = flags.as_chunks::<8>();
    // The product moves the lowest bits of eight bytes into the highest byte, the first one lowest.
    let byte = |flags: &[u8; 8]| u64::from_le_bytes(*flags).wrapping_mul(0x0102_0408_1020_4080) >> 56;
    eights.iter().enumerate().fold(0, |mask, (i, flags)| mask | byte(flags) << (8 * i))
}

/// Calls `f` with the position of each set bit.
#[inline(always)]
fn each_one(mut mask: u64, mut f: impl FnMut(usize)) {
    while mask != 0 {
        f(mask.trailing_zeros() as usize);
        mask &= mask - 1;
    }
}
