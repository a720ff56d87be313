//! Rules of linear maps of one value that move, merge or remove dims. They keep every type but `Shard`, `Partial`
//! included.

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
/// number of elements. A first extent that stays is the same dim.
///
/// The sharded dim stays one contiguous run on each rank if a new dim begins at the same place: the product of the
/// extents before both is equal. The new dim is then the sharded one. A dim of extent 1 begins at the same place as the
/// dim behind it, so several new dims may qualify. If the old shape has equally many such dims, they are matched one by
/// one. Otherwise the local extents are ambiguous, and the reshape is refused. An example is `[2, 8, 8]` with
/// `Shard(2)`, reshaped to `[2, 8, 1, 8]`: either dim 2 is split into heads, one of them on this rank (`Shard(2)`), or
/// a dim is inserted (`Shard(3)`). [`regroup`] takes the intent as an argument.
pub fn reshape(op: &str, x: Operand<'_>, from: &[usize], to: &[usize]) -> Result<Types, SpmdError> {
    let kept = usize::from(!from.is_empty() && from.first() == to.first());
    let types = moves_dims(op, x, |sharded| {
        if sharded < kept {
            return Ok(Ty::Shard(sharded));
        }
        if sharded >= from.len() {
            return Err(scattered(x.name, sharded, &format!("no dim of {from:?}")));
        }
        // As if an extent of 0 was an unknown one.
        let before = |dims: &[usize], dim: usize| {
            let count =
                |(zeros, product), &extent| if extent == 0 { (zeros + 1, product) } else { (zeros, product * extent) };
            dims[..dim].iter().fold((0, 1), count)
        };
        let begins = |dims: &[usize]| -> Vec<usize> {
            (kept..dims.len()).filter(|&dim| before(dims, dim) == before(from, sharded)).collect()
        };
        let (old, new) = (begins(from), begins(to));
        let at = old.iter().position(|&dim| dim == sharded).filter(|_| old.len() == new.len());
        match (&new[..], at) {
            ([only], _) => Ok(Ty::Shard(*only)),
            (_, Some(at)) => Ok(Ty::Shard(new[at])),
            ([], _) => Err(scattered(x.name, sharded, &format!("no dim of {to:?} begins where it does in {from:?}"))),
            ([first, ..], _) => Err((
                format!(
                    "dim {sharded} of {} is sharded, and any of dims {first}..{} may be what becomes of it: from {from:?} to {to:?}, the \
                     extents of one rank, a dim may have been split, merged, inserted or removed",
                    x.name,
                    first + new.len()
                ),
                "say which with unflatten, flatten, unsqueeze or squeeze".to_owned(),
            )),
        }
    })?;
    nested(op, x, types)
}

/// The dims `dims` of `x`, whose extents on this rank are `from`, become `into` dims in their place, with the same
/// elements in the same order; all others stay. A sharded dim among them must be the first but for dims of extent 1,
/// and then the first of the new ones is sharded. A dim that is removed (`into` is 0) must be whole.
pub fn regroup(op: &str, x: Operand<'_>, from: &[usize], dims: Range<usize>, into: usize) -> Result<Types, SpmdError> {
    let types = moves_dims(op, x, |sharded| match sharded {
        _ if sharded < dims.start => Ok(Ty::Shard(sharded)),
        _ if sharded >= dims.end => Ok(Ty::Shard(sharded - dims.len() + into)),
        _ if into == 0 => Err((
            format!("dim {sharded} of {} is sharded: the other ranks have more of it", x.name),
            format!("all_gather {} along dim {sharded} first", x.name),
        )),
        _ if from[dims.start..sharded].iter().all(|&extent| extent == 1) => Ok(Ty::Shard(dims.start)),
        _ => Err(scattered(x.name, sharded, &format!("not the first of dims {dims:?}, which are merged"))),
    })?;
    nested(op, x, types)
}

fn scattered(name: &str, dim: usize, why: &str) -> (String, String) {
    (
        format!("dim {dim} of {name} is sharded, and {why}: a rank's elements would lie scattered over the new dims"),
        format!(
            "transpose dim {dim} to the front of those that it is merged with first, or all_gather {name} along it"
        ),
    )
}

/// Refuses two cuts of two dims as cuts of one dim in the wrong order: of one dim the slowest axis makes the outermost
/// cut.
fn nested(op: &str, x: Operand<'_>, types: Types) -> Result<Types, SpmdError> {
    let cuts = || x.types.iter().filter_map(|(axis, ty)| Some((axis, ty.dim()?, types.get(axis)?.dim()?)));
    for (axis, from, to) in cuts() {
        let Some((slower, inner, _)) = cuts().find(|&(other, inner, at)| other > axis && inner > from && at == to)
        else {
            continue;
        };
        return Err(SpmdError {
            op: op.to_owned(),
            axis,
            problem: format!(
                "dim {from} of {}, which {axis} cuts, and dim {inner}, which {slower} cuts, become one dim, and {slower} cuts outside of {axis}",
                x.name
            ),
            fix: format!("all_gather {} along one of them first", x.name),
        });
    }
    Ok(types)
}
