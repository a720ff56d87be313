//! Rows moved by integers, and their weighted sums. Choices, positions and slots are defined at
//! [`kernel::Permutation`](meshwork_tensor::kernel::Permutation).

use super::prelude::*;

/// Adds the numbers of choices of each id in `ids` to `counts`.
pub fn counts(choices: &[i32], ids: &Range<usize>, counts: &mut [i32]) {
    assert_eq!(counts.len(), ids.len(), "counts of {ids:?}");
    for at in choices.iter().filter_map(|&id| within(id, ids)) {
        counts[at] += 1;
    }
}

/// The positions of the choices with ids in `ids`, sorted by id and then by position, in `order`. The error is their
/// number, if it differs from the length of `order`.
pub fn sort(choices: &[i32], ids: &Range<usize>, order: &mut [i32]) -> Result<(), usize> {
    let mut next = vec![0; ids.len()];
    counts(choices, ids, &mut next);
    let mut total = 0;
    for next in &mut next {
        total += std::mem::replace(next, total);
    }
    if total as usize != order.len() {
        return Err(total as usize);
    }
    for (position, &id) in choices.iter().enumerate() {
        if let Some(at) = within(id, ids) {
            order[next[at] as usize] = position as i32;
            next[at] += 1;
        }
    }
    Ok(())
}

fn within(id: i32, ids: &Range<usize>) -> Option<usize> {
    usize::try_from(id).ok().filter(|id| ids.contains(id)).map(|id| id - ids.start)
}

/// `slots[order[i]] = i`, -1 elsewhere. Overwrites.
pub fn invert(order: &[i32], slots: &mut [i32]) {
    slots.fill(-1);
    for (i, &at) in order.iter().enumerate() {
        slots[at as usize] = i as i32;
    }
}

/// Choices of groups of `size` ids; if `once`, a group equal to the previous choice's group becomes -1. Overwrites.
pub fn group_ids(choices: &[i32], k: usize, size: usize, once: bool, groups: &mut [i32]) {
    for (choices, groups) in choices.chunks_exact(k).zip(groups.chunks_exact_mut(k)) {
        let mut last = -1;
        for (&id, group) in choices.iter().zip(groups) {
            *group = if id < 0 { -1 } else { id / size as i32 };
            if once && *group == last {
                *group = -1;
            }
            last = last.max(*group);
        }
    }
}

/// `out[i] = x[index[i] / per]`, rows of `bytes` bytes. Overwrites.
pub fn gather(x: &[u8], index: &[i32], per: usize, bytes: usize, out: &mut [u8]) {
    assert_eq!(out.len(), index.len() * bytes, "bytes of out against {} rows of {bytes}", index.len());
    if bytes == 0 {
        return;
    }
    for (&index, out) in index.iter().zip(out.chunks_exact_mut(bytes)) {
        out.copy_from_slice(&x[index as usize / per * bytes..][..bytes]);
    }
}

/// The choices of some tokens.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// Ids, `[tokens, k]`.
    pub ids: &'a [i32],
    /// Rows, `[tokens, k]`.
    pub slots: &'a [i32],
    /// Choices of a token.
    pub k: usize,
}

/// A term of a sum: (id, slot, weight).
type Term<T> = (i32, usize, Option<T>);

/// `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` in the tree over the ids; `weights` may be empty. Overwrites.
pub fn combine<T: Float>(rows: &[T], choices: Choices<'_>, weights: &[T], width: usize, out: &mut [T]) {
    let Choices { ids, slots, k } = choices;
    assert!(ids.len() == slots.len() && (weights.is_empty() || weights.len() == ids.len()), "a slot for each choice");
    assert_eq!(out.len() * k, ids.len() * width, "elements of out against {} choices by {k}", ids.len());
    if width == 0 {
        return;
    }
    let (mut terms, mut scratch): (Vec<Term<T>>, Vec<T>) = (Vec::new(), Vec::new());
    for (token, out) in out.chunks_exact_mut(width).enumerate() {
        let at = token * k..(token + 1) * k;
        terms.clear();
        terms.extend(at.filter_map(|at| {
            let slot = usize::try_from(slots[at]).ok()?;
            Some((ids[at], slot, weights.get(at).copied()))
        }));
        if terms.is_empty() { out.fill(T::ZERO) } else { sum(rows, &terms, out, &mut scratch) }
    }
}

/// The sum of `terms`, at least one, in the tree over their ids. Overwrites.
fn sum<T: Float>(rows: &[T], terms: &[Term<T>], out: &mut [T], scratch: &mut Vec<T>) {
    let width = out.len();
    let row = |slot: usize| &rows[slot * width..][..width];
    // Two leaves separate at the highest bit in which their indices differ.
    let apart = |pair: &[Term<T>; 2]| (pair[0].0 ^ pair[1].0).leading_zeros();
    let Some(split) = terms.array_windows().enumerate().min_by_key(|(_, pair)| apart(pair)).map(|(i, _)| i + 1) else {
        let (_, slot, weight) = terms[0];
        return scaled(row(slot), weight, out, |_, x| x);
    };
    let (left, right) = terms.split_at(split);
    sum(rows, left, out, scratch);
    if let [(_, slot, weight)] = *right {
        return scaled(row(slot), weight, out, |sum, x| sum + x);
    }
    let mut other = std::mem::take(scratch);
    other.resize(width, T::ZERO);
    sum(rows, right, &mut other, scratch);
    scaled(&other, None, out, |sum, x| sum + x);
    *scratch = other;
}

/// `out[i] = f(out[i], weight · x[i])`.
#[inline(always)]
fn scaled<T: Float>(x: &[T], weight: Option<T>, out: &mut [T], f: impl Fn(T, T) -> T) {
    wide!(match weight {
        None => out.iter_mut().zip(x).for_each(|(out, &x)| *out = f(*out, x)),
        Some(weight) => out.iter_mut().zip(x).for_each(|(out, &x)| *out = f(*out, weight * x)),
    });
}

/// `drows[i] = weights[order[i]] · dout[order[i] / k]`. Overwrites.
pub fn spread<T: Float>(dout: &[T], order: &[i32], weights: &[T], k: usize, width: usize, drows: &mut [T]) {
    assert_eq!(drows.len(), order.len() * width, "elements of drows against {} rows", order.len());
    for (&at, drow) in order.iter().zip(drows.chunks_exact_mut(width.max(1))) {
        let at = at as usize;
        scaled(&dout[at / k * width..][..width], Some(weights[at]), drow, |_, x| x);
    }
}

/// `dweights[t, j] = dout[t] · rows[slots[t, j]]`, 0 without a slot. Overwrites.
pub fn dots<T: Float>(dout: &[T], rows: &[T], slots: &[i32], k: usize, width: usize, dweights: &mut [T]) {
    assert_eq!(dweights.len(), slots.len(), "a weight for each choice");
    wide!(for (at, (&slot, dweight)) in slots.iter().zip(dweights).enumerate() {
        *dweight = match usize::try_from(slot) {
            Err(_) => T::ZERO,
            Ok(slot) => {
                let (x, y) = (&dout[at / k * width..][..width], &rows[slot * width..][..width]);
                let [dot] = inlined!(reduce::sums, (x, y, y), |x, y, _| [x * y]);
                dot
            }
        };
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{check_gradient, dot, values};
    use super::*;
    use meshwork_core::tree;
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
}
