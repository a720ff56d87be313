//! Joins the attention of some queries over two blocks of keys (as in Milakov and Gimelshein, arXiv:1805.02867).
//!
//! `lse = m + ln(e^{a - m} + e^{b - m})` with `m = max(a, b)`, and `out = (e^{a - m} A + e^{b - m} B) / (e^{a - m} +
//! e^{b - m})`. A query that sees no key of a block has -∞ there, and keeps its other result as it is.

use super::super::Float;
use super::Dims;
use meshwork_core::pool;
use meshwork_core::simd::wide;

/// The shares of two blocks with the log-sum-exps `a` and `b`, and the log-sum-exp of both.
fn shares<T: Float>(a: T, b: T) -> [T; 3] {
    if b == T::NEG_INFINITY {
        return [T::ONE, T::ZERO, a];
    }
    let max = a.larger(b);
    let (of_a, of_b) = ((a - max).exp(), (b - max).exp());
    let total = of_a + of_b;
    [of_a / total, of_b / total, max + total.ln()]
}

/// Joins `part[batch, seq, heads, head_dim]` and `part_lse[batch, heads, seq]` to `out` and `lse`.
pub fn join<T: Float>(dims: Dims, [out, lse]: [&mut [T]; 2], [part, part_lse]: [&[T]; 2]) {
    let Dims { seq, heads, head_dim, .. } = dims;
    dims.check(&[out.len(), part.len()], lse.len());
    assert_eq!(lse.len(), part_lse.len(), "elements of lse for {dims:?}");
    let row = (heads * head_dim).max(1);
    let old = &*lse;
    pool::for_each(out.chunks_mut(row).zip(part.chunks(row)).enumerate(), |(at, (out, part))| {
        let (sample, i) = (at / seq, at % seq);
        for (head, (out, part)) in out.chunks_mut(head_dim).zip(part.chunks(head_dim)).enumerate() {
            let at = (sample * heads + head) * seq + i;
            if part_lse[at] == T::NEG_INFINITY {
                continue;
            }
            let [of_out, of_part, _] = shares(old[at], part_lse[at]);
            wide(
                #[inline(always)]
                || out.iter_mut().zip(part).for_each(|(out, &part)| *out = *out * of_out + part * of_part),
            );
        }
    });
    lse.iter_mut().zip(part_lse).for_each(|(lse, &part)| *lse = shares(*lse, part)[2]);
}
