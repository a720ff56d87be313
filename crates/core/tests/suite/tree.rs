//! Sums in the balanced tree.

use meshwork_core::tree::{Counter, degrees, fits, subtrees, sum};
use proptest::prelude::*;

/// The tree by its definition.
fn by_definition(leaves: &[f32]) -> f32 {
    match leaves {
        [one] => *one,
        _ => {
            let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
            by_definition(left) + by_definition(right)
        }
    }
}

fn add(a: f32, b: f32) -> f32 {
    a + b
}

fn leaves(count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * i) as f32 * 0.7).sin() * 10f32.powi(i as i32 % 5)).collect()
}

#[test]
fn sums_are_those_of_the_definition() {
    let mut orders = 0;
    for n in 1..200 {
        let leaves = leaves(n);
        let tree = by_definition(&leaves);
        assert_eq!(sum(&leaves, add).unwrap().to_bits(), tree.to_bits(), "{n} leaves");
        orders += usize::from(leaves.iter().sum::<f32>() != tree);
    }
    assert!(orders > 100, "the values must tell orders apart");
    assert_eq!(sum(&[], add), None);
}

#[test]
fn degrees_are_those_that_fit() {
    for leaves in 1..100 {
        let fitting: Vec<usize> = (1..=leaves + 1).filter(|&degree| fits(leaves, degree)).collect();
        assert_eq!(degrees(leaves), fitting, "{leaves} leaves");
    }
    assert_eq!(degrees(12), [1, 3, 6, 12]);
    assert_eq!(degrees(0), [1], "no leaves: no rank but one");
    assert!(!fits(8, 0) && !fits(8, 3) && !fits(6, 2));
}

proptest! {
    /// However the leaves are cut into runs, and each run into its subtrees, the sum has the same bits.
    #[test]
    fn any_cut_gives_the_same_bits(cuts in prop::collection::vec(1..40_usize, 1..8)) {
        let leaves = leaves(cuts.iter().sum());
        let mut counter = Counter::default();
        let mut start = 0;
        for run in cuts {
            let mut next = start;
            for subtree in subtrees(start..start + run) {
                prop_assert_eq!(subtree.start, next);
                prop_assert!(subtree.len().is_power_of_two() && subtree.start % subtree.len() == 0);
                next = subtree.end;
                counter.push(subtree.len(), by_definition(&leaves[subtree]), add);
            }
            start += run;
            prop_assert_eq!(next, start);
            prop_assert!(counter.waiting() <= start.ilog2() as usize + 1);
        }
        prop_assert_eq!(counter.finish(add).unwrap().to_bits(), by_definition(&leaves).to_bits());
    }

    /// Ranks that fit add up their leaves, and the tree over the ranks continues from there.
    #[test]
    fn ranks_that_fit_continue_the_tree(odd in 0..6_usize, twos in 0..5_u32) {
        let leaves = leaves((2 * odd + 1) << twos);
        for degree in degrees(leaves.len()) {
            let ranks: Vec<f32> = leaves.chunks(leaves.len() / degree).map(by_definition).collect();
            prop_assert_eq!(by_definition(&ranks).to_bits(), by_definition(&leaves).to_bits());
        }
    }
}
