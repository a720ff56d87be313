//! Softmax cross entropy as a *sum* over unmasked rows, whole or with the vocabulary sharded.
//!
//! Row `i` of `logits[rows, width]` with target `t` adds `-ln p_t = lse - logits[i, t]`, where
//! `lse = ln Σ_j e^{logits[i, j]}`; a negative target masks the row. `dlogits = (e^{logits - lse} - onehot(t)) scale`.
//!
//! Over a sharded vocabulary, each rank calls [`row_stats`], takes the maximum over the ranks, adjusts its sums with
//! [`rescale`], sums them and the target logits over the ranks, and ends with [`finish`] and [`backward`]. The whole
//! loss, [`forward`], is the same with one shard, where nothing needs rescaling. If the vocabulary is sharded, the
//! caller must check that targets are in the vocabulary, because a single shard cannot.

use super::prelude::*;
use meshwork_tensor::kernel::VocabShard;

/// The column of a target, if it is in this shard.
fn column_of(shard: VocabShard, target: i32) -> Option<usize> {
    let column = usize::try_from(target).ok()?.checked_sub(shard.first)?;
    (column < shard.valid).then_some(column)
}

fn check<T>(shard: VocabShard, logits: &[T], rows: usize, others: &[usize]) {
    let VocabShard { valid, width, skipped, pitch, .. } = shard;
    assert!(
        valid <= width && skipped + width <= pitch && pitch > 0,
        "no columns, or more words than columns: {shard:?}"
    );
    assert_eq!(logits.len(), rows * pitch, "elements of logits for {rows} rows of {pitch}");
    assert!(others.iter().all(|&len| len == rows), "{rows} rows against {others:?}");
}

/// The loss over a whole vocabulary: returns its sum over unmasked rows and saves `lse[rows]` (overwrites).
pub fn forward<T: Float>(shard: VocabShard, logits: &[T], targets: &[i32], lse: &mut [T]) -> f64 {
    check(shard, logits, targets.len(), &[lse.len()]);
    let known = |target: &&i32| **target < 0 || column_of(shard, **target).is_some();
    if let Some(target) = targets.iter().find(|target| !known(target)) {
        panic!("target {target} is not in {shard:?}");
    }
    let [mut max, mut sum_exp, mut target_logit] = [(); 3].map(|()| vec![T::ZERO; targets.len()]);
    row_stats(shard, logits, targets, &mut max, &mut sum_exp, &mut target_logit);
    finish(targets, &max, &sum_exp, &target_logit, lse)
}

/// For the words of this shard: `max[i] = max_j logits[i, j]`, minus infinity if there are none;
/// `sum_exp[i] = Σ_j e^{logits[i, j] - max[i]}`; and `target_logit[i] = logits[i, targets[i]]` if that word is in this
/// shard, else 0. Overwrites all three. Both passes over a row run while it is in the cache.
pub fn row_stats<T: Float>(
    shard: VocabShard,
    logits: &[T],
    targets: &[i32],
    max: &mut [T],
    sum_exp: &mut [T],
    target_logit: &mut [T],
) {
    check(shard, logits, targets.len(), &[max.len(), sum_exp.len(), target_logit.len()]);
    let outputs = max.iter_mut().zip(sum_exp).zip(target_logit);
    wide!({
        let rows = logits.chunks_exact(shard.pitch).zip(targets);
        for ((logits, &target), ((max, sum_exp), target_logit)) in rows.zip(outputs) {
            let words = &logits[shard.skipped..][..shard.valid];
            *max = reduce::max(words);
            // If all words have probability zero, exponentials relative to zero add up to 0 and not to NaN.
            let from = if *max > T::NEG_INFINITY { *max } else { T::ZERO };
            *sum_exp = inlined!(reduce::sum, (words), |x| (x - from).exp());
            *target_logit = column_of(shard, target).map_or(T::ZERO, |column| words[column]);
        }
    });
}

/// `max[i] = max(max[i], other[i])`.
pub fn larger<T: Float>(max: &mut [T], other: &[T]) {
    assert_eq!(max.len(), other.len(), "rows of the maxima");
    max.iter_mut().zip(other).for_each(|(max, &other)| *max = max.larger(other));
}

/// `sum_exp[i] *= e^{local[i] - global[i]}`: rescales the sum of a shard from its own maximum to the maximum of all
/// shards.
pub fn rescale<T: Float>(local: &[T], global: &[T], sum_exp: &mut [T]) {
    assert_eq!([local.len(), global.len()], [sum_exp.len(); 2], "rows of the maxima against the sums");
    for ((sum, &local), &global) in sum_exp.iter_mut().zip(local).zip(global) {
        *sum *= (local - global).exp();
    }
}

/// From the global maxima, sums and target logits: `lse[i] = max[i] + ln sum_exp[i]` (overwrites), and the loss
/// `Σ (lse - target_logit)` over rows with a target that is not negative, in order and in f64.
pub fn finish<T: Float>(targets: &[i32], max: &[T], sum_exp: &[T], target_logit: &[T], lse: &mut [T]) -> f64 {
    let rows = targets.len();
    assert_eq!([max.len(), sum_exp.len(), target_logit.len(), lse.len()], [rows; 4], "rows against targets");
    let mut loss = 0.0;
    for i in 0..rows {
        let log = sum_exp[i].to_f64().ln();
        lse[i] = T::from_f64(max[i].to_f64() + log);
        if targets[i] >= 0 {
            loss += (max[i].to_f64() - target_logit[i].to_f64()) + log;
        }
    }
    loss
}

/// Replaces `logits` by `(e^{logits - lse} - onehot(target)) scale` from the global `lse`; masked rows and padding
/// become zero.
pub fn backward<T: Float>(shard: VocabShard, logits: &mut [T], targets: &[i32], lse: &[T], scale: T) {
    check(shard, logits, targets.len(), &[lse.len()]);
    wide!({
        let rows = logits.chunks_exact_mut(shard.pitch).zip(targets).zip(lse);
        for ((logits, &target), &lse) in rows {
            let logits = &mut logits[shard.skipped..][..shard.width];
            if target < 0 {
                logits.fill(T::ZERO);
                continue;
            }
            let (words, padding) = logits.split_at_mut(shard.valid);
            for x in words.iter_mut() {
                *x = (*x - lse).exp() * scale;
            }
            if let Some(column) = column_of(shard, target) {
                words[column] = words[column] - scale;
            }
            padding.fill(T::ZERO);
        }
    });
}

/// `sums[s, g] = Σ values[s, i]` over the places `i` of sample `s` with `ids[s, i] = g`, in order. Places with a
/// negative id are of no group. Overwrites.
pub fn group_sums(samples: usize, values: &[f64], ids: &[i32], sums: &mut [f64]) {
    let (places, groups) = of_samples(samples, values.len(), ids, sums.len());
    sums.fill(0.0);
    let of_sample = values.chunks(places).zip(ids.chunks(places)).zip(sums.chunks_mut(groups));
    for ((values, ids), sums) in of_sample {
        for (value, &id) in values.iter().zip(ids) {
            if let Ok(group) = usize::try_from(id) {
                sums[group] += value;
            }
        }
    }
}

/// `dvalues[s, i] = dsums[s, ids[s, i]]`, 0 at places of no group. Overwrites.
pub fn group_sums_backward(samples: usize, dsums: &[f64], ids: &[i32], dvalues: &mut [f64]) {
    let (places, groups) = of_samples(samples, dvalues.len(), ids, dsums.len());
    let of_sample = dvalues.chunks_mut(places).zip(ids.chunks(places)).zip(dsums.chunks(groups));
    for ((dvalues, ids), dsums) in of_sample {
        for (dvalue, &id) in dvalues.iter_mut().zip(ids) {
            *dvalue = usize::try_from(id).map_or(0.0, |group| dsums[group]);
        }
    }
}

/// (places, groups) of each sample, at least 1.
fn of_samples(samples: usize, values: usize, ids: &[i32], sums: usize) -> (usize, usize) {
    let [places, groups] = [values, sums].map(|all| all / samples.max(1));
    assert_eq!([values, ids.len(), sums], [samples * places, samples * places, samples * groups], "{samples} samples");
    (places.max(1), groups.max(1))
}
