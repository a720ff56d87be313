//! Attention of new tokens to cached ones, row by row: the weights of the surrounding layers cause far more memory
//! traffic than these few rows.
//!
//! The cache is `[batch, capacity, 2, kv_heads, head_dim]`, with rotated keys. A score is one dot product, in the order
//! of `reduce`; `O` is summed over the keys from key 0 on, and divided by the total at the end. So the bits of a row
//! depend only on its own query and the keys before it.

use super::super::Float;
use super::super::reduce::sums;
use super::heads::heads_mut;
use super::{Angles, Dims, Groups, Keys};
use meshwork_core::pool;
use meshwork_core::simd::wide;

/// Appends the keys, rotated, and values of `dims.seq` new tokens of each sample,
/// `kv[batch, seq, 2, kv_heads, head_dim]`.
pub fn append<T: Float>(dims: Dims, groups: Groups, angles: Option<Angles<'_, T>>, kv: &[T], cache: &mut [T]) {
    let elements = dims.batch * dims.seq * 2 * groups.kv_heads * dims.head_dim;
    assert_eq!(kv.len(), elements, "elements of new keys and values for {dims:?}, {groups:?}");
    check(dims, groups, angles, cache);
    let Keys { count: capacity, first_query: past, .. } = dims.keys;
    let (row, part) = (2 * groups.kv_heads * dims.head_dim, groups.kv_heads * dims.head_dim);
    let mut turned = vec![T::ZERO; if angles.is_some() { dims.seq * dims.head_dim } else { 0 }];
    for sample in 0..dims.batch {
        let from = &kv[sample * dims.seq * row..][..dims.seq * row];
        let to = &mut cache[(sample * capacity + past) * row..][..dims.seq * row];
        to.copy_from_slice(from);
        let Some(angles) = angles else { continue };
        for head in (0..part).step_by(dims.head_dim) {
            angles.from(past, dims.head_dim).turn((&from[head..], row), dims.head_dim, &mut turned);
            for (i, key) in turned.chunks_exact(dims.head_dim).enumerate() {
                to[i * row + head..][..dims.head_dim].copy_from_slice(key);
            }
        }
    }
}

/// `out[batch, seq, heads, head_dim]` of `dims.seq` new tokens, whose keys and values are in the cache: each sees the
/// tokens before it and itself.
pub fn attend<T: Float>(
    dims: Dims,
    groups: Groups,
    angles: Option<Angles<'_, T>>,
    q: &[T],
    cache: &[T],
    out: &mut [T],
) {
    dims.check(&[q.len(), out.len()], dims.batch * dims.heads * dims.seq);
    check(dims, groups, angles, cache);
    let Dims { batch, seq, heads, head_dim, keys: Keys { count: capacity, first_query: past, .. } } = dims;
    let (row, width) = (2 * groups.kv_heads * head_dim, heads * head_dim);
    let used = groups.used(dims);
    let outputs = heads_mut::<1, T>(out, [batch, seq, used, groups.size * head_dim]);
    pool::share(groups.each(dims).zip(outputs), |(group, [mut out])| {
        let kv = &cache[group.sample * capacity * row + (groups.first + group.index) * head_dim..];
        let values = &kv[groups.kv_heads * head_dim..];
        let first = group.sample * seq * width + group.first_head(groups) * head_dim;
        let (mut scores, mut turned) = (vec![T::ZERO; past + seq], vec![T::ZERO; head_dim]);
        for i in 0..seq {
            let scores = &mut scores[..past + i + 1];
            let queries = &q[first + i * width..][..groups.size * head_dim];
            for (q, out) in queries.chunks_exact(head_dim).zip(out.row(i).chunks_exact_mut(head_dim)) {
                let q = match angles {
                    None => q,
                    Some(angles) => {
                        angles.from(past + i, head_dim).turn((q, head_dim), head_dim, &mut turned);
                        &*turned
                    }
                };
                attend_row(dims.scale(), q, [kv, values], row, scores, out);
            }
        }
    });
}

/// `softmax(scale · q Kᵀ) V` of one query and `scores.len()` keys, `row` elements apart.
fn attend_row<T: Float>(scale: T, q: &[T], [keys, values]: [&[T]; 2], row: usize, scores: &mut [T], out: &mut [T]) {
    wide(
        #[inline(always)]
        || {
            let mut max = T::NEG_INFINITY;
            for (key, score) in keys.chunks(row).zip(&mut *scores) {
                let [product] = sums(
                    q,
                    &key[..q.len()],
                    q,
                    #[inline(always)]
                    |q, k, _| [q * k],
                );
                *score = product * scale;
                max = score.larger(max);
            }
            let mut total = T::ZERO;
            for score in &mut *scores {
                *score = (*score - max).exp();
            }
            for score in &*scores {
                total += *score;
            }
            out.fill(T::ZERO);
            for (value, &share) in values.chunks(row).zip(&*scores) {
                out.iter_mut().zip(value).for_each(|(out, &value)| *out = share.mul_add(value, *out));
            }
            let inverse = T::ONE / total;
            out.iter_mut().for_each(|out| *out *= inverse);
        },
    );
}

fn check<T: Float>(dims: Dims, groups: Groups, angles: Option<Angles<'_, T>>, cache: &[T]) {
    groups.check(dims, &[cache.len()]);
    let tokens = dims.queries().end;
    assert!(tokens <= dims.keys.count, "{tokens} tokens in a cache of {}", dims.keys.count);
    if let Some(angles) = angles {
        angles.check(tokens, dims.head_dim);
    }
}
