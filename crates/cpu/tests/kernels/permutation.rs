//! The order of tokens by expert, and sums of their choices.

use super::oracle::{check_gradient, dot, values};
use meshwork_core::tree;
use meshwork_cpu::kernels::permutation::*;
use proptest::prelude::*;

/// Three tokens with two choices each among four experts; the second choice of token 1 is not used.
const CHOICES: [i32; 6] = [1, 3, 0, -1, 1, 2];

#[test]
fn a_permutation_by_hand() {
    let mut found = [0; 4];
    counts(&CHOICES, &(0..4), &mut found);
    assert_eq!(found, [1, 2, 1, 1]);
    let mut order = [0; 5];
    sort(&CHOICES, &(0..4), &mut order).unwrap();
    assert_eq!(order, [2, 0, 4, 5, 1], "expert 0 has position 2, expert 1 positions 0 and 4, ..");
    let mut slots = [0; 6];
    invert(&order, &mut slots);
    assert_eq!(slots, [1, 4, 0, -1, 2, 3]);
    let mut upper = [0; 2];
    sort(&CHOICES, &(2..4), &mut upper).unwrap();
    assert_eq!(upper, [5, 1], "those of experts 2 and 3 alone");
    assert_eq!(sort(&CHOICES, &(0..4), &mut upper), Err(5));

    let mut groups = [0; 6];
    group_ids(&CHOICES, 2, 2, false, &mut groups);
    assert_eq!(groups, [0, 1, 0, -1, 0, 1]);
    group_ids(&[0, 1, 2, 3, -1, 3], 3, 2, true, &mut groups);
    assert_eq!(groups, [0, -1, 1, 1, -1, -1], "each row has a group once");
    let mut rows = [0; 5];
    gather(&[10, 20, 30], &order, 2, 1, &mut rows);
    assert_eq!(rows, [20, 10, 30, 30, 10]);
}

#[test]
fn a_combination_by_hand() {
    let rows = [1.0_f32, 10.0, 100.0, 1000.0, 10000.0];
    let slots = [1, 4, 0, -1, 2, 3];
    let choices = Choices { ids: &CHOICES, slots: &slots, k: 2 };
    let mut out = [9.0; 3];
    combine(&rows, choices, &[0.5, 0.25, 2.0, 7.0, 1.0, 3.0], 1, &mut out);
    assert_eq!(out, [5.0 + 2500.0, 2.0, 100.0 + 3000.0]);
    combine(&rows, choices, &[], 1, &mut out);
    assert_eq!(out, [10010.0, 1.0, 1100.0]);
    combine(&rows, Choices { slots: &[-1; 6], ..choices }, &[], 1, &mut out);
    assert_eq!(out, [0.0; 3], "a token that no expert takes");
}

fn choices_of(experts: usize, k: usize, seed: u64) -> Vec<i32> {
    let mut order: Vec<(u64, i32)> = (0..experts)
        .map(|e| (seed.wrapping_add(e as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17, e as i32))
        .collect();
    order.sort_unstable();
    let mut chosen: Vec<i32> = order[..k].iter().map(|&(_, e)| e).collect();
    chosen.sort_unstable();
    chosen
}

proptest! {
    /// The result is the same if a rank first sums its own experts, a whole subtree, before the ranks' sums are
    /// added.
    #[test]
    fn subtrees_can_be_summed_elsewhere(k in 1..9_usize, seed in 0..1000_u64, size in prop::sample::select(vec![1, 2, 4, 8])) {
        let (experts, width) = (16, 5);
        let ids = choices_of(experts, k, seed);
        let slots: Vec<i32> = (0..k as i32).collect();
        let rows: Vec<f32> = values("rows", k * width);
        let mut want = vec![9.0; width];
        combine(&rows, Choices { ids: &ids, slots: &slots, k }, &[], width, &mut want);
        let mut sums: Vec<(i32, Vec<f32>)> = Vec::new();
        for rank in 0..(experts / size) as i32 {
            let mine: Vec<i32> = (0..k as i32).map(|j| if ids[j as usize] / size as i32 == rank { j } else { -1 }).collect();
            if mine.iter().any(|&slot| slot >= 0) {
                let mut sum = vec![9.0; width];
                combine(&rows, Choices { ids: &ids, slots: &mine, k }, &[], width, &mut sum);
                sums.push((rank, sum));
            }
        }
        let (ids, slots): (Vec<i32>, Vec<i32>) = sums.iter().enumerate().map(|(i, (rank, _))| (*rank, i as i32)).unzip();
        let rows: Vec<f32> = sums.iter().flat_map(|(_, sum)| sum.clone()).collect();
        let mut got = vec![9.0; width];
        combine(&rows, Choices { ids: &ids, slots: &slots, k: ids.len() }, &[], width, &mut got);
        prop_assert_eq!(got, want);
    }
}

/// With all experts present, the sum equals the tree's own definition.
#[test]
fn all_experts_make_the_balanced_tree() {
    for experts in 1..20 {
        let ids: Vec<i32> = (0..experts as i32).collect();
        let rows: Vec<f32> = values("rows", experts);
        let mut got = [9.0];
        combine(&rows, Choices { ids: &ids, slots: &ids, k: experts }, &[], 1, &mut got);
        assert_eq!(Some(got[0]), tree::sum(&rows, |a, b| a + b), "{experts}");
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let (width, k) = (3, 2);
    let (ids, order) = (CHOICES, [2, 0, 4, 5, 1]);
    let mut slots = [0; 6];
    invert(&order, &mut slots);
    let choices = Choices { ids: &ids, slots: &slots, k };
    let (rows, weights): (Vec<f64>, Vec<f64>) = (values("rows", 5 * width), values("weights", 6));
    let dout: Vec<f64> = values("dout", 3 * width);
    let loss = |rows: &[f64], weights: &[f64]| {
        let mut out = vec![9.0; 3 * width];
        combine(rows, choices, weights, width, &mut out);
        dot(&out, &dout)
    };
    let mut drows = vec![9.0; rows.len()];
    spread(&dout, &order, &weights, k, width, &mut drows);
    check_gradient(&rows, &drows, |rows| loss(rows, &weights));
    let mut dweights = vec![9.0; 6];
    dots(&dout, &rows, &slots, k, width, &mut dweights);
    check_gradient(&weights, &dweights, |weights| loss(&rows, weights));
}
