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
