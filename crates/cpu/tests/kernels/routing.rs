//! The choice of experts, by hand.

use super::oracle::{check_gradient, dot, values};
use meshwork_cpu::kernels::routing::*;
use meshwork_tensor::kernel::{Draw, Overflow, Pick, Selection};
use meshwork_tensor::random;

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
    let scores = [[0.4, 0.3, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.1, 0.2_f32]].concat();
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
