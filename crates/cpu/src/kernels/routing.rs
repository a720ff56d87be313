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

#[cfg(test)]
mod tests {
    use super::super::oracle::{check_gradient, dot, values};
    use super::*;
    use meshwork_tensor::kernel::Overflow;

    const ALL: Selection = Selection {
        samples: 1,
        experts: 4,
        k: 2,
        groups: 1,
        top_groups: 1,
        group_best: 1,
        capacity: None,
        overflow: Overflow::Drop,
        second: None,
    };

    fn chosen(scores: &[f32], bias: &[f32], of: Selection) -> Vec<i32> {
        let mut chosen = vec![9; scores.len() / of.experts * of.k];
        rank(scores, bias, &of, &mut chosen);
        chosen
    }

    #[test]
    fn of_equal_scores_the_lower_expert_is_chosen() {
        assert_eq!(chosen(&[0.25; 4], &[], ALL), [0, 1]);
        assert_eq!(chosen(&[0.1, 0.4, 0.1, 0.4], &[], ALL), [1, 3]);
        assert_eq!(chosen(&[0.1, 0.2, 0.3, 0.4], &[0.5, 0.0, 0.0, 0.0], ALL), [0, 3], "the bias chooses");
    }

    #[test]
    fn groups_limit_the_choice() {
        let limited = Selection { groups: 2, top_groups: 1, group_best: 1, ..ALL };
        // Group 0 has the largest score, group 1 the larger sum.
        assert_eq!(chosen(&[0.5, 0.1, 0.4, 0.4], &[], limited), [0, 1]);
        assert_eq!(chosen(&[0.5, 0.1, 0.4, 0.4], &[], Selection { group_best: 2, ..limited }), [2, 3]);
        assert_eq!(chosen(&[0.5, 0.1, 0.4, 0.4], &[], ALL), [0, 2]);
    }

    /// Five tokens, two experts of four each, room for two: computed by hand.
    #[test]
    fn first_choices_go_before_second_ones() {
        let first = [0, 0, 0, 1, 2];
        let second = [1, 1, 2, 0, 1];
        let chosen: Vec<i32> = first.iter().zip(&second).flat_map(|(&a, &b)| [a, b]).collect();
        let mut kept = vec![9; 10];
        limit(&[0.5_f32; 20], &chosen, &Selection { capacity: Some(2), ..ALL }, 0, &mut kept);
        // Expert 0 takes tokens 0 and 1; expert 1 token 3, then 0 as a second choice; expert 2 tokens 4 and 2.
        assert_eq!(kept, [0, 1, 0, -1, -1, 2, 1, -1, 2, -1]);
        limit(&[0.5_f32; 20], &chosen, &Selection { capacity: Some(0), ..ALL }, 0, &mut kept);
        assert_eq!(kept, [-1; 10]);
        limit(&[0.5_f32; 20], &chosen, &ALL, 0, &mut kept);
        assert_eq!(kept, chosen);
    }

    /// Four tokens, two experts of four each, room for two: computed by hand. All prefer 0, then 1; then 3 and 2, or 2
    /// and 3.
    #[test]
    fn what_overflows_goes_to_the_next_best_expert_with_room() {
        let of = Selection { capacity: Some(2), overflow: Overflow::Reroute, ..ALL };
        let scores =
            [[0.4, 0.3, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.1, 0.2_f32]].concat();
        let mut ranked = vec![9; 16];
        rank(&scores, &[], &of, &mut ranked);
        assert_eq!(ranked, [0, 1, 3, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 3, 2]);
        let mut kept = vec![9; 8];
        limit(&scores, &ranked, &of, 0, &mut kept);
        // First choices: 0 takes tokens 0 and 1; token 2 goes to 2, token 3 to 3. Second ones: 1 takes tokens 0 and 1;
        // token 2 goes to 3, because it is at 2 already, and token 3 to 2. All experts are full, and nothing is
        // dropped.
        assert_eq!(kept, [0, 1, 0, 1, 2, 3, 3, 2]);
        // With room for one: tokens 0, 1 and 2 are at 0, 2 and 3, and nothing is left for token 3. Then token 0 finds
        // room at 1.
        limit(&scores, &ranked, &Selection { capacity: Some(1), ..of }, 0, &mut kept);
        assert_eq!(kept, [0, 1, 2, -1, 3, -1, -1, -1]);
        // A token goes only to the groups that it chose.
        let limited = Selection { groups: 2, top_groups: 1, k: 1, capacity: Some(1), ..of };
        assert_eq!(limited.ranked(), 2);
        let mut ranked = vec![9; 8];
        rank(&scores, &[], &limited, &mut ranked);
        let mut kept = vec![9; 4];
        limit(&scores, &ranked, &limited, 0, &mut kept);
        assert_eq!(kept, [0, 1, -1, -1], "experts 2 and 3 are of another group");
    }

    #[test]
    fn the_second_expert_is_used_in_proportion_to_its_weight() {
        let draw = Draw { key: random::key(3, "second"), first: 0 };
        let used = |weight: f32| {
            let scores: Vec<f32> = [1.0 - weight, weight, 0.0, 0.0].repeat(10_000);
            let mut kept = vec![9; 20_000];
            limit(&scores, &[0, 1].repeat(10_000), &Selection { second: Some(draw), ..ALL }, 0, &mut kept);
            assert!(kept.iter().step_by(2).all(|&first| first == 0));
            kept.iter().filter(|&&second| second == 1).count()
        };
        assert!((used(0.1) as f64 - 2000.0).abs() < 150.0);
        assert!((used(0.4) as f64 - 8000.0).abs() < 150.0);
        assert_eq!(used(0.5), 10_000);
        // The same numbers for the same tokens, wherever the sample begins.
        let scores: Vec<f32> = [0.8_f32, 0.2, 0.0, 0.0].repeat(50);
        let (mut whole, mut part) = (vec![9; 100], vec![9; 40]);
        let of = Selection { second: Some(draw), ..ALL };
        limit(&scores, &[0, 1].repeat(50), &of, 0, &mut whole);
        limit(&scores[..80], &[0, 1].repeat(20), &of, 30, &mut part);
        assert_eq!(part, whole[60..]);
    }

    #[test]
    fn choices_are_brought_into_the_order_of_experts() {
        let (mut chosen, mut kept) = ([3, 1, 2, 0, 4, 3, 1, 0], [3, -1, 2, -1, 4, 3, -1, 0]);
        by_expert(4, &mut chosen, &mut kept);
        assert_eq!((chosen, kept), ([0, 1, 2, 3, 0, 1, 3, 4], [-1, -1, 2, 3, 0, -1, 3, 4]));
    }

    #[test]
    fn experts_choose_tokens() {
        let scores = [0.9_f32, 0.1, 0.5, 0.5, 0.9, 0.4]; // three tokens, two experts
        let mut kept = [9; 6];
        top_tokens(&scores, 2, 2, &mut kept);
        assert_eq!(kept, [0, -1, -1, 1, 0, 1]);
        top_tokens(&[0.5_f32; 6], 2, 1, &mut kept);
        assert_eq!(kept, [0, 1, -1, -1, -1, -1], "of equal scores the earlier token");
    }

    #[test]
    fn weights_and_their_gradients() {
        let scores: Vec<f64> = values::<f64>("scores", 12).iter().map(|x| x.abs() + 0.1).collect();
        let choices = [0, 3, 1, -1, 2, 3];
        let dout: Vec<f64> = values("dout", 6);
        for normalise in [false, true] {
            let of = Pick { experts: 4, k: 2, normalise, scale: 2.5 };
            let weights = |scores: &[f64]| {
                let mut out = vec![9.0; 6];
                pick(scores, &choices, of, &mut out);
                out
            };
            let w = weights(&scores);
            assert_eq!(w[3], 0.0);
            if normalise {
                assert!((w[0] + w[1] - 2.5).abs() < 1e-12 && (w[2] - 2.5).abs() < 1e-12);
            } else {
                assert_eq!(w[0], 2.5 * scores[0]);
            }
            let mut dscores = vec![9.0; 12];
            pick_grad(&scores, &choices, &dout, of, &mut dscores);
            check_gradient(&scores, &dscores, |scores| dot(&weights(scores), &dout));
        }
        let mut all = [9.0_f64; 4];
        pick(&[1.0, 2.0, 4.0, 1.0], &[], Pick { experts: 4, k: 4, normalise: true, scale: 1.0 }, &mut all);
        assert_eq!(all, [0.125, 0.25, 0.5, 0.125], "all experts");
        let mut none = [9.0_f32; 2];
        pick(&[0.0; 4], &[1, 2], Pick { experts: 4, k: 2, normalise: true, scale: 1.0 }, &mut none);
        assert_eq!(none, [0.0; 2], "no score at all is no NaN");
    }

    #[test]
    fn losses_and_their_gradients() {
        let logits: Vec<f64> = values("logits", 12);
        let counts = [3, 0, 2, 1];
        let mut grad = vec![9.0; 12];
        balance_grad(&counts, 0.7, &mut grad);
        check_gradient(&logits, &grad, |x| 0.7 * balance(x, &counts));
        z_loss_grad(&logits, 4, 0.3, &mut grad);
        check_gradient(&logits, &grad, |x| 0.3 * z_loss(x, 4));
        // ln(4 e^1)² of equal logits.
        assert!((z_loss(&[1.0_f32; 8], 4) - (1.0 + 4_f64.ln()).powi(2)).abs() < 1e-12);
        assert!((entropy(&[0.25_f32; 8], 4) - 4_f64.ln()).abs() < 1e-12);
        assert_eq!(entropy(&[1.0_f32, 0.0, 0.0, 0.0], 4), 0.0);
    }
}
