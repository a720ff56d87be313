//! Routers: the choice of experts, its weights, and losses and measures of balance. All functions work on single tokens
//! or one sample; for the definitions see [`kernel::Routing`](meshwork_tensor::kernel::Routing).

use super::prelude::*;
use meshwork_tensor::kernel::{Draw, Pick, Selection};
use meshwork_tensor::random;

/// The [ranked](Selection::ranked) best experts of each token, in its order of preference. Overwrites.
pub fn rank<T: Float>(scores: &[T], bias: &[T], of: &Selection, ranked: &mut [i32]) {
    let Selection { experts, groups, top_groups, group_best, .. } = *of;
    let mut values = vec![T::ZERO; experts];
    let mut best = vec![T::ZERO; groups];
    let (mut free, mut open) = (vec![true; experts], vec![true; groups]);
    let in_group = experts / groups;
    for (scores, ranked) in scores.chunks_exact(experts).zip(ranked.chunks_exact_mut(of.ranked())) {
        values.copy_from_slice(scores);
        values.iter_mut().zip(bias).for_each(|(value, &bias)| *value += bias);
        free.fill(true);
        if top_groups < groups {
            for (best, (values, free)) in best.iter_mut().zip(values.chunks(in_group).zip(free.chunks_mut(in_group))) {
                *best = T::ZERO;
                for _ in 0..group_best.min(in_group) {
                    let at = largest(values, free);
                    free[at] = false;
                    *best += values[at];
                }
            }
            open.fill(true);
            free.fill(false);
            for _ in 0..top_groups {
                let group = largest(&best, &open);
                open[group] = false;
                free[group * in_group..][..in_group].fill(true);
            }
        }
        for place in ranked {
            let expert = largest(&values, &free);
            free[expert] = false;
            *place = expert as i32;
        }
    }
}

/// The first of the largest values that are free.
fn largest<T: Float>(values: &[T], free: &[bool]) -> usize {
    let mut free = free.iter().enumerate().filter(|(_, free)| **free).map(|(at, _)| at);
    let first = free.next().unwrap_or(0);
    free.fold(first, |best, at| if values[at] > values[best] { at } else { best })
}

/// The used choices of one sample, in the order of choice; -1 for dropped ones. `first` is the index of its first
/// token; `ranked` has the experts of each token by preference.
pub fn limit<T: Float>(scores: &[T], ranked: &[i32], of: &Selection, first: u64, kept: &mut [i32]) {
    let Selection { experts, k, capacity, second, .. } = *of;
    let mut taken = vec![0; experts];
    for choice in 0..k {
        for (token, (ranked, kept)) in ranked.chunks_exact(of.ranked()).zip(kept.chunks_exact_mut(k)).enumerate() {
            kept[choice] = -1;
            if let (1, Some(Draw { key, first: start })) = (choice, second) {
                let score = |expert: i32| scores[token * experts + expert as usize];
                let share = score(ranked[1]) / (score(ranked[0]) + score(ranked[1]));
                if T::from(random::uniform(key, start + first + token as u64)) >= share + share {
                    continue;
                }
            }
            let room = |expert: i32| capacity.is_none_or(|capacity| taken[expert as usize] < capacity);
            // The choice's own expert, else the best expert that the token did not choose, each for one of its choices
            // only.
            let others = ranked[k..].iter().filter(|&other| !kept[..choice].contains(other));
            let expert = std::iter::once(&ranked[choice]).chain(others).copied().find(|&expert| room(expert));
            if let Some(expert) = expert {
                kept[choice] = expert;
                taken[expert as usize] += 1;
            }
        }
    }
}

/// The first `k` of every `width` elements. Overwrites.
pub fn first(ranked: &[i32], width: usize, k: usize, out: &mut [i32]) {
    out.chunks_exact_mut(k).zip(ranked.chunks_exact(width)).for_each(|(out, ranked)| out.copy_from_slice(&ranked[..k]));
}

/// Brings the choices of each token into ascending order of experts.
pub fn by_expert(k: usize, chosen: &mut [i32], kept: &mut [i32]) {
    for (chosen, kept) in chosen.chunks_exact_mut(k).zip(kept.chunks_exact_mut(k)) {
        // Insertion sort, because there are few.
        for end in 1..k {
            let mut at = end;
            while at > 0 && chosen[at - 1] > chosen[at] {
                chosen.swap(at - 1, at);
                kept.swap(at - 1, at);
                at -= 1;
            }
        }
    }
}

/// The experts that choose each token of one sample, `[tokens, experts]`, -1 elsewhere. Overwrites.
pub fn top_tokens<T: Float>(scores: &[T], experts: usize, capacity: usize, kept: &mut [i32]) {
    kept.fill(-1);
    let mut tokens: Vec<usize> = Vec::new();
    for expert in 0..experts {
        let score = |token: usize| scores[token * experts + expert];
        tokens.clear();
        tokens.extend(0..scores.len() / experts);
        tokens.sort_by(|&a, &b| score(b).partial_cmp(&score(a)).unwrap_or(std::cmp::Ordering::Equal));
        for &token in tokens.iter().take(capacity) {
            kept[token * experts + expert] = expert as i32;
        }
    }
}

/// Added to the divisor of weights, so that scores of zero give weights of zero.
const TINY: f32 = 1e-20;

/// Weights of choices, or of all experts if there are no choices. Overwrites.
pub fn pick<T: Float>(scores: &[T], choices: &[i32], of: Pick, out: &mut [T]) {
    for (token, (scores, out)) in scores.chunks_exact(of.experts).zip(out.chunks_exact_mut(of.k)).enumerate() {
        let divisor = picked(scores, choices, token, of, out);
        let factor = T::from_f64(of.scale) / divisor;
        out.iter_mut().for_each(|out| *out *= factor);
    }
}

/// The scores of a token's choices, and their divisor.
fn picked<T: Float>(scores: &[T], choices: &[i32], token: usize, of: Pick, out: &mut [T]) -> T {
    for (place, out) in out.iter_mut().enumerate() {
        *out = chosen(choices, token, place, of).map_or(T::ZERO, |expert| scores[expert]);
    }
    if of.normalise { out.iter().fold(T::from(TINY), |sum, &score| sum + score) } else { T::ONE }
}

fn chosen(choices: &[i32], token: usize, place: usize, of: Pick) -> Option<usize> {
    if choices.is_empty() { Some(place) } else { usize::try_from(choices[token * of.k + place]).ok() }
}

/// Their gradient. Overwrites.
pub fn pick_grad<T: Float>(scores: &[T], choices: &[i32], dout: &[T], of: Pick, dscores: &mut [T]) {
    dscores.fill(T::ZERO);
    let mut row = vec![T::ZERO; of.k];
    let rows = scores.chunks_exact(of.experts).zip(dout.chunks_exact(of.k));
    for (token, ((scores, dout), dscores)) in rows.zip(dscores.chunks_exact_mut(of.experts)).enumerate() {
        let divisor = picked(scores, choices, token, of, &mut row);
        let mean = match of.normalise {
            true => row.iter().zip(dout).fold(T::ZERO, |sum, (&s, &d)| sum + s * d) / divisor,
            false => T::ZERO,
        };
        let factor = T::from_f64(of.scale) / divisor;
        for (place, &dout) in dout.iter().enumerate() {
            if let Some(expert) = chosen(choices, token, place, of) {
                dscores[expert] = (dout - mean) * factor;
            }
        }
    }
}

/// `Σ_e counts[e] · Σ_t scores[t, e]` of one sample.
pub fn balance<T: Float>(scores: &[T], counts: &[i32]) -> f64 {
    let mut sums = vec![0.0; counts.len()];
    for scores in scores.chunks_exact(counts.len()) {
        sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += score.to_f64());
    }
    sums.iter().zip(counts).map(|(sum, &count)| sum * f64::from(count)).sum()
}

/// `dscores[t, e] = factor · counts[e]`. Overwrites.
pub fn balance_grad<T: Float>(counts: &[i32], factor: f64, dscores: &mut [T]) {
    for dscores in dscores.chunks_exact_mut(counts.len()) {
        dscores.iter_mut().zip(counts).for_each(|(d, &count)| *d = T::from_f64(factor * f64::from(count)));
    }
}

fn log_sum_exp<T: Float>(logits: &[T]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, logit| max.max(logit.to_f64()));
    max + logits.iter().map(|logit| (logit.to_f64() - max).exp()).sum::<f64>().ln()
}

/// The mean of `ln(Σ e^logit)²` over the tokens of one sample.
pub fn z_loss<T: Float>(logits: &[T], experts: usize) -> f64 {
    let tokens = (logits.len() / experts).max(1) as f64;
    logits.chunks_exact(experts).map(|logits| log_sum_exp(logits).powi(2)).sum::<f64>() / tokens
}

/// Its gradient, for a gradient of the loss. Overwrites.
pub fn z_loss_grad<T: Float>(logits: &[T], experts: usize, dloss: f64, dlogits: &mut [T]) {
    let factor = 2.0 * dloss / (logits.len() / experts).max(1) as f64;
    for (logits, dlogits) in logits.chunks_exact(experts).zip(dlogits.chunks_exact_mut(experts)) {
        let z = log_sum_exp(logits);
        for (&logit, dlogit) in logits.iter().zip(dlogits) {
            *dlogit = T::from_f64(factor * z * (logit.to_f64() - z).exp());
        }
    }
}

/// The mean entropy of the scores of one sample's tokens, each divided by their sum.
pub fn entropy<T: Float>(scores: &[T], experts: usize) -> f64 {
    let tokens = (scores.len() / experts).max(1) as f64;
    let of_token = |scores: &[T]| {
        let sum: f64 = scores.iter().map(|score| score.to_f64()).sum();
        let term = |score: &T| score.to_f64() / sum;
        -scores.iter().map(term).filter(|&p| p > 0.0).map(|p| p * p.ln()).sum::<f64>()
    };
    scores.chunks_exact(experts).map(of_token).sum::<f64>() / tokens
}
