//! Cross-entropy against its definition, whole and in shards of the vocabulary.

use super::oracle::{assert_close, check_gradient, values, widen};
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::loss::*;
use meshwork_cpu::kernels::preference;
use meshwork_tensor::kernel::{PairNumber, Preference, VocabShard};
use proptest::prelude::*;

/// Loss and gradient in f64, straight from the definition, over the first `valid` of each row's logits.
fn naive(logits: &[f64], width: usize, valid: usize, targets: &[i32], scale: f64) -> (f64, Vec<f64>) {
    let (mut loss, mut grad) = (0.0, vec![0.0; logits.len()]);
    for (i, &target) in targets.iter().enumerate().filter(|(_, t)| **t >= 0) {
        let row = &logits[i * width..][..valid];
        let total: f64 = row.iter().map(|x| x.exp()).sum();
        loss -= (row[target as usize].exp() / total).ln();
        for (j, x) in row.iter().enumerate() {
            let onehot = f64::from(j == target as usize);
            grad[i * width + j] = (x.exp() / total - onehot) * scale;
        }
    }
    (loss, grad)
}

/// Every third row is masked.
fn targets(rows: usize, words: usize) -> Vec<i32> {
    (0..rows).map(|i| if i % 3 == 2 { -100 } else { (i * 7 % words) as i32 }).collect()
}

fn run<T: Float>(columns: VocabShard, logits: &[T], targets: &[i32], scale: T) -> (f64, Vec<T>, Vec<T>) {
    let mut lse = vec![T::ZERO; targets.len()];
    let loss = forward(columns, logits, targets, &mut lse);
    let mut grad = logits.to_vec();
    backward(columns, &mut grad, targets, &lse, scale);
    (loss, lse, grad)
}

proptest! {
    #[test]
    fn loss_and_gradient_match_the_definition(rows in 0..7_usize, words in 1..3000_usize, padding in 0..20_usize) {
        let columns = VocabShard { width: words + padding, pitch: words + padding, ..VocabShard::whole(words) };
        let mut logits: Vec<f32> = values("logits", rows * columns.width);
        logits.iter_mut().for_each(|x| *x *= 3.0);
        let targets = targets(rows, words);
        let (want, want_grad) = naive(&widen(&logits), columns.width, words, &targets, 0.25);
        // Padding may hold anything.
        logits.chunks_mut(columns.width).for_each(|row| row[words..].fill(f32::NAN));
        let (loss, _, grad) = run(columns, &logits, &targets, 0.25);
        assert_close(&[loss], &[want], 2e-6);
        assert_close(&grad, &want_grad, 1e-6);
        for (row, &target) in grad.chunks(columns.width).zip(&targets) {
            prop_assert!(row[words..].iter().all(|g| *g == 0.0));
            prop_assert!(target >= 0 || row.iter().all(|g| *g == 0.0));
        }
    }

    /// Any cut of the vocabulary, even with empty shards and inner padding, gives the whole loss; rows computed
    /// alone have the same bits.
    #[test]
    fn shards_and_rows_give_the_whole(rows in 1..6_usize, words in 1..200_usize, shards in 1..5_usize) {
        let logits: Vec<f32> = values("logits", rows * words);
        let targets = targets(rows, words);
        let (loss, lse, grad) = run(VocabShard::whole(words), &logits, &targets, 2.0);

        let width = words / shards + 1;
        let parts: Vec<(VocabShard, Vec<f32>)> = (0..shards).map(|shard| {
            let first = shard * width;
            let valid = words.saturating_sub(first).min(width);
            let row = |i: usize| (0..width).map(move |j| (i, j));
            let at = |(i, j): (usize, usize)| if j < valid { logits[i * words + first + j] } else { f32::NAN };
            (VocabShard { width, skipped: 0, pitch: width, valid, first, vocab: words }, (0..rows).flat_map(row).map(at).collect())
        }).collect();
        let stats: Vec<[Vec<f32>; 3]> = parts.iter().map(|(columns, logits)| {
            let [mut max, mut sum, mut target] = [(); 3].map(|()| vec![9.0; rows]);
            row_stats(*columns, logits, &targets, &mut max, &mut sum, &mut target);
            [max, sum, target]
        }).collect();
        let mut max = vec![f32::NEG_INFINITY; rows];
        for [local, ..] in &stats {
            max.iter_mut().zip(local).for_each(|(max, local)| *max = max.max(*local));
        }
        let (mut sums, mut target_logits) = (vec![0.0; rows], vec![0.0; rows]);
        for ((columns, _), [local, mut sum, target]) in parts.iter().zip(stats) {
            rescale(&local, &max, &mut sum);
            if columns.valid == 0 {
                prop_assert!(sum.iter().chain(&target).all(|v| *v == 0.0));
            }
            sums.iter_mut().zip(sum).for_each(|(a, b)| *a += b);
            target_logits.iter_mut().zip(target).for_each(|(a, b)| *a += b);
        }
        let mut sharded_lse = vec![9.0; rows];
        let sharded = finish(&targets, &max, &sums, &target_logits, &mut sharded_lse);
        assert_close(&[sharded], &[loss], 1e-6);
        assert_close(&sharded_lse, &widen(&lse), 1e-6);
        for (columns, mut logits) in parts {
            backward(columns, &mut logits, &targets, &sharded_lse, 2.0);
            for (local, whole) in logits.chunks(width).zip(grad.chunks(words)) {
                let (words, padding) = local.split_at(columns.valid);
                let first = columns.first.min(whole.len());
                assert_close(words, &widen(&whole[first..][..columns.valid]), 2e-6);
                prop_assert!(padding.iter().all(|g| *g == 0.0));
            }
        }

        let alone = |i: usize| run(VocabShard::whole(words), &logits[i * words..][..words], &targets[i..=i], 2.0);
        let mut total = 0.0;
        for i in 0..rows {
            let (loss, lse_alone, grad_alone) = alone(i);
            total += loss;
            prop_assert_eq!(lse_alone[0], lse[i]);
            prop_assert_eq!(&grad_alone, &grad[i * words..][..words]);
        }
        prop_assert_eq!(total, loss);
    }

    #[test]
    fn the_gradient_matches_finite_differences(rows in 1..5_usize, words in 1..20_usize) {
        let logits: Vec<f64> = values("logits", rows * words);
        let targets = targets(rows, words);
        let (_, _, grad) = run(VocabShard::whole(words), &logits, &targets, 1.0);
        check_gradient(&logits, &grad, |x| run(VocabShard::whole(words), x, &targets, 1.0).0);
    }
}

/// Large logits neither overflow nor lose the loss, and minus infinity is a word of probability zero.
#[test]
fn extreme_logits_are_handled() {
    let logits = [1e30_f32, 1e30, f32::NEG_INFINITY, -1e30];
    let (loss, _, grad) = run(VocabShard::whole(4), &logits, &[0], 1.0);
    assert!((loss - 2_f64.ln()).abs() < 1e-6, "{loss}");
    assert_eq!(grad[2..], [0.0, 0.0]);
}

/// A shard whose words all have probability zero adds nothing to the others.
#[test]
fn a_shard_of_minus_infinities_adds_nothing() {
    let (columns, logits) = (VocabShard::whole(3), [f32::NEG_INFINITY; 3]);
    let [mut max, mut sum, mut target] = [[9.0]; 3];
    row_stats(columns, &logits, &[7], &mut max, &mut sum, &mut target);
    rescale(&max, &[2.0], &mut sum);
    assert_eq!((max, sum, target), ([f32::NEG_INFINITY], [0.0], [0.0]));
}

#[test]
#[should_panic(expected = "target 4 is not in")]
fn targets_outside_the_vocabulary_are_refused() {
    run(VocabShard { width: 8, pitch: 8, ..VocabShard::whole(4) }, &[0.0_f32; 8], &[4], 1.0);
}

/// Against the formula as the paper has it, and its gradient against differences.
#[test]
fn a_preference_is_the_log_of_a_sigmoid() {
    let (losses, reference, pairs) = ([3.0, 2.0, 1.0, 4.0], [3.5, 1.0, 1.0, 4.0], [1, 1]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for label_smoothing in [0.0, 0.2] {
        let of = Preference { beta: 0.5, label_smoothing };
        let number = |number, losses: &[f64]| {
            let mut out = [f64::NAN; 2];
            preference::forward(of, number, losses, &reference, &pairs, &mut out);
            out
        };
        assert_eq!(number(PairNumber::Chosen, &losses), [0.25, 0.0]);
        assert_eq!(number(PairNumber::Rejected, &losses), [-0.5, 0.0]);
        assert_eq!(number(PairNumber::Margin, &losses), [0.75, 0.0]);
        assert_eq!(number(PairNumber::Correct, &losses), [1.0, 0.0]);
        let wanted = -(1.0 - label_smoothing) * sigmoid(0.75).ln() - label_smoothing * sigmoid(-0.75).ln();
        let got = number(PairNumber::Loss, &losses);
        assert!((got[0] - wanted).abs() < 1e-15 && (got[1] - 2.0_f64.ln()).abs() < 1e-15, "{got:?}");
        let mut slopes = [f64::NAN; 4];
        preference::backward(of, &losses, &reference, &pairs, &[2.0, 3.0], &mut slopes);
        for (at, slope) in slopes.into_iter().enumerate() {
            let sum = |by: f64| {
                let mut moved = losses;
                moved[at] += by;
                let [one, other] = number(PairNumber::Loss, &moved);
                2.0 * one + 3.0 * other
            };
            let difference = (sum(1e-6) - sum(-1e-6)) / 2e-6;
            assert!((slope - difference).abs() < 1e-8, "{at}: {slope} and {difference}");
        }
    }
    // A margin beyond the range of e^x.
    let (of, mut out) = (Preference { beta: 1.0, label_smoothing: 0.0 }, [f64::NAN]);
    preference::forward(of, PairNumber::Loss, &[1e4, 0.0], &[0.0, 0.0], &[1], &mut out);
    assert_eq!(out, [1e4]);
}

/// Three samples with room for two pairs each hold two pairs, one and none. What lies in the unused room has no effect.
#[test]
fn preferences_are_summed_over_the_pairs_of_a_sample() {
    let (losses, reference) = ([3.0, 2.0, 1.0, 4.0, 3.0, 2.0, 7.0, f64::NAN, 9.0, 9.0, 9.0, 9.0], [0.5; 12]);
    let of = Preference { beta: 0.5, label_smoothing: 0.1 };
    for number in [PairNumber::Loss, PairNumber::Rejected, PairNumber::Correct] {
        let (mut alone, mut together) = ([f64::NAN; 2], [f64::NAN; 3]);
        preference::forward(of, number, &losses[..4], &reference[..4], &[1, 1], &mut alone);
        preference::forward(of, number, &losses, &reference, &[2, 1, 0], &mut together);
        assert_eq!(together, [alone[0] + alone[1], alone[0], 0.0], "{number:?}");
    }
    let (mut alone, mut together) = ([f64::NAN; 4], [f64::NAN; 12]);
    preference::backward(of, &losses[..4], &reference[..4], &[1, 1], &[2.0, 2.0], &mut alone);
    preference::backward(of, &losses, &reference, &[2, 1, 0], &[2.0, 1.0, 5.0], &mut together);
    assert_eq!(together[..4], alone);
    assert_eq!(together[4..6], [alone[0] / 2.0, alone[1] / 2.0]);
    assert_eq!(together[6..], [0.0; 6]);
}

/// Against the sum as it is written, and its gradient, of groups that lie in pieces.
#[test]
fn values_are_summed_by_groups() {
    let (samples, places, groups) = (3, 40, 5);
    let values: Vec<f64> = (0..samples * places).map(|at| (at as f64).sin()).collect();
    let ids: Vec<i32> = (0..samples * places).map(|at| (at * at % 23 % (groups + 1)) as i32 - 1).collect();
    let mut sums = vec![f64::NAN; samples * groups];
    group_sums(samples, &values, &ids, &mut sums);
    for sample in 0..samples {
        for group in 0..groups {
            let of_group = |&at: &usize| ids[at] == group as i32;
            let wanted =
                (sample * places..(sample + 1) * places).filter(of_group).fold(0.0, |sum, at| sum + values[at]);
            assert_eq!(sums[sample * groups + group], wanted, "group {group} of sample {sample}");
        }
    }
    let mut slopes = vec![f64::NAN; values.len()];
    group_sums_backward(samples, &sums, &ids, &mut slopes);
    for (at, slope) in slopes.into_iter().enumerate() {
        let wanted = usize::try_from(ids[at]).map_or(0.0, |group| sums[at / places * groups + group]);
        assert_eq!(slope, wanted, "place {at}");
    }
}
