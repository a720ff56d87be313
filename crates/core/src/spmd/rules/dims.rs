//! Rules of linear maps of one value that move, merge or remove dims. They keep every type but `Shard`, `Partial` included.

use super::{Operand, Verdict, per_axis};
use crate::spmd::{SpmdError, Ty, Types};
use std::ops::Range;

/// A linear map that moves dims. `moved` gives the type of a value that is sharded along a dim.
pub fn moves_dims(op: &str, x: Operand<'_>, moved: impl Fn(usize) -> Verdict) -> Result<Types, SpmdError> {
    per_axis(op, &[x], |_, types| types[0].dim().map_or(Ok(types[0]), &moved))
}

/// The sum over `dim`, which is removed. Over a sharded dim each rank has its share of the sum: `Partial`.
pub fn sum_over(op: &str, x: Operand<'_>, dim: usize) -> Result<Types, SpmdError> {
    moves_dims(op, x, |sharded| {
        Ok(match sharded {
            _ if sharded == dim => Ty::Partial,
            _ if sharded > dim => Ty::Shard(sharded - 1),
            _ => Ty::Shard(sharded),
        })
    })
}

/// A part of `dim` (narrow), of which this rank must hold the whole.
pub fn part_of(op: &str, x: Operand<'_>, dim: usize) -> Result<Types, SpmdError> {
    moves_dims(op, x, |sharded| match sharded == dim {
        false => Ok(Ty::Shard(sharded)),
        true => Err((
            format!("dim {dim} of {} is sharded, and {op} needs the whole of it on one rank", x.name),
            format!("all_gather {} along dim {dim} first", x.name),
        )),
    })
}

/// Swaps dims `a` and `b`.
pub fn transpose(op: &str, x: Operand<'_>, a: usize, b: usize) -> Result<Types, SpmdError> {
    moves_dims(op, x, |sharded| {
        Ok(Ty::Shard(match sharded {
            _ if sharded == a => b,
            _ if sharded == b => a,
            other => other,
        }))
    })
}

/// The same elements in the same order under other dims. `from` and `to` are the extents on this rank, with the same
/// number of elements.
///
/// A sharded dim must be the first of the dims that it is merged with: only then are the elements of a rank one
/// contiguous run of each merged dim. The first of the resulting dims is sharded.
pub fn reshape(op: &str, x: Operand<'_>, from: &[usize], to: &[usize]) -> Result<Types, SpmdError> {
    let groups = reshaped_groups(from, to);
    moves_dims(op, x, |sharded| {
        let (merged, into) = groups.iter().find(|(merged, _)| merged.contains(&sharded)).cloned().unwrap_or_default();
        match merged.start == sharded && !into.is_empty() {
            true => Ok(Ty::Shard(into.start)),
            false => Err((
                format!(
                    "dim {sharded} of {} is sharded and not the first of dims {merged:?}, which become dims {into:?}: \
                     a rank's elements would lie scattered over the new dims",
                    x.name
                ),
                format!("transpose dim {sharded} to the front of them first, or all_gather {} along it", x.name),
            )),
        }
    })
}

/// The smallest runs of dims of `from` and of `to` that hold the same elements.
fn reshaped_groups(from: &[usize], to: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    let (mut groups, mut i, mut j) = (Vec::new(), 0, 0);
    while i < from.len() || j < to.len() {
        let (first, second) = (i, j);
        let (mut held, mut made) = (1, 1);
        // At least one dim of each, if there are any.
        loop {
            if i < from.len() && (held <= made || j == to.len()) {
                held *= from[i];
                i += 1;
            } else if j < to.len() {
                made *= to[j];
                j += 1;
            }
            let one_each = (i > first || i == from.len()) && (j > second || j == to.len());
            if (one_each && held == made) || (i == from.len() && j == to.len()) {
                break;
            }
        }
        groups.push((first..i, second..j));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_are_grouped_by_the_elements_that_they_hold() {
        let groups = |from: &[usize], to: &[usize]| {
            let plain = |(a, b): (Range<usize>, Range<usize>)| [a.start, a.end, b.start, b.end];
            reshaped_groups(from, to).into_iter().map(plain).collect::<Vec<_>>()
        };
        assert_eq!(groups(&[2, 3, 8], &[2, 3, 2, 4]), [[0, 1, 0, 1], [1, 2, 1, 2], [2, 3, 2, 4]]);
        assert_eq!(groups(&[2, 3, 2, 4], &[2, 3, 8]), [[0, 1, 0, 1], [1, 2, 1, 2], [2, 4, 2, 3]]);
        assert_eq!(groups(&[4, 6], &[6, 4]), [[0, 2, 0, 2]]);
        assert_eq!(groups(&[2, 1, 3], &[2, 3]), [[0, 1, 0, 1], [1, 3, 1, 2]]);
        assert_eq!(groups(&[2, 3, 1], &[2, 3]), [[0, 1, 0, 1], [1, 2, 1, 2], [2, 3, 2, 2]]);
        assert_eq!(groups(&[5], &[5, 1]), [[0, 1, 0, 1], [1, 1, 1, 2]]);
        assert!(groups(&[], &[]).is_empty());
    }
}
