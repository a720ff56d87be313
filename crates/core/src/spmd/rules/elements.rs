//! Rules of operations on several values element by element. `y` may have fewer dims than `x`, or dims of extent 1, and
//! is then [repeated](Operand::repeated) over those of `x`.

use super::{Operand, Verdict, not_partial, per_axis};
use crate::spmd::{SpmdError, Ty, Types};

/// The product `x · y`, element by element. It is linear in each operand, so one may be `Partial` if the other is
/// `Replicate`:
///
/// | x | y | x · y | gradient of x | gradient of y |
/// |---|---|---|---|---|
/// | `Invariant` | `Invariant` | `Invariant` | `Invariant` | `Invariant` |
/// | `Replicate` | `Replicate` | `Replicate` | `Partial` | `Partial` |
/// | `Shard(d)` | `Shard(d)` | `Shard(d)` | `Shard(d)` | `Shard(d)` |
/// | `Shard(d)` | `Replicate`, repeated over `d` | `Shard(d)` | `Shard(d)` | `Partial` |
/// | `Varying` | `Varying` | `Varying` | `Varying` | `Varying` |
/// | `Varying` | `Replicate` | `Varying` | `Varying` | `Partial` |
/// | `Partial` | `Replicate` | `Partial` | `Replicate` | `Partial` |
///
/// The last two hold with the operands swapped. Everything else is refused.
pub fn product(op: &str, x: Operand<'_>, y: Operand<'_>) -> Result<Types, SpmdError> {
    let lead = x.ndim.saturating_sub(y.ndim);
    let both = |tx: Ty, ty: Ty| format!("{} is {tx} and {} is {ty}", x.name, y.name);
    per_axis(op, &[x, y], |_, types| match (types[0], types[1]) {
        (Ty::Partial, Ty::Replicate) | (Ty::Replicate, Ty::Partial) => Ok(Ty::Partial),
        (Ty::Partial, Ty::Partial) => Err((
            format!("{} and {} are both Partial, and a product of sums is not the sum of products", x.name, y.name),
            format!("all_reduce_replicate one of them first, as {}", y.name),
        )),
        (Ty::Partial, Ty::Invariant) | (Ty::Invariant, Ty::Partial) => {
            let name = if types[0] == Ty::Invariant { x.name } else { y.name };
            Err((
                format!("{}: the gradient of {name} would miss the other ranks' share", both(types[0], types[1])),
                format!("copy(I→R) {name} first, or all_reduce the Partial one"),
            ))
        }
        (Ty::Partial, other) | (other, Ty::Partial) => {
            let x_is_partial = types[0] == Ty::Partial;
            let name = if x_is_partial { x.name } else { y.name };
            let fix = match other {
                Ty::Shard(dim) if x_is_partial => format!("reduce_scatter {name} along dim {} first", dim + lead),
                Ty::Shard(dim) if dim >= lead => format!("reduce_scatter {name} along dim {} first", dim - lead),
                _ => format!("all_reduce_replicate {name} first"),
            };
            Err((format!("{}: a value used before its reduction", both(types[0], types[1])), fix))
        }
        (tx, ty) => same_elements(x, y, tx, ty),
    })
}

/// Any function of several values element by element, `f(x, y, ..)`: all hold the same elements, and none is `Partial`.
/// The first operand has the most dims. For one operand it is [`pointwise`](super::pointwise).
pub fn elementwise(op: &str, operands: &[Operand<'_>]) -> Result<Types, SpmdError> {
    per_axis(op, operands, |axis, types| {
        for (operand, &ty) in operands.iter().zip(types) {
            not_partial(op, axis, operand.name, ty)?;
        }
        let others = operands.iter().zip(types).skip(1);
        let first = types.first().copied().unwrap_or(Ty::Invariant);
        others.clone().try_fold(first, |so_far, (operand, &ty)| same_elements(operands[0], *operand, so_far, ty))
    })
}

/// The loss of each sample, a sum of `f(x, target)` over all its elements: one element per index of dim 0. `targets`
/// lie like `x`. Sharded samples stay sharded; another sharded dim gives a `Partial` loss.
pub fn sample_loss(op: &str, x: Operand<'_>, targets: Operand<'_>) -> Result<Types, SpmdError> {
    let elements = elementwise(op, &[x, targets])?;
    let types = elements.iter().map(|(axis, ty)| match ty {
        Ty::Shard(dim) if dim > 0 => (axis, Ty::Partial),
        ty => (axis, ty),
    });
    Ok(Types::new(&types.collect::<Vec<_>>()))
}

/// The type of a value computed from the elements of `x` and `y` at the same place. Neither may be `Partial`.
fn same_elements(x: Operand<'_>, y: Operand<'_>, tx: Ty, ty: Ty) -> Verdict {
    let (lead, repeated) = (x.ndim.saturating_sub(y.ndim), |dim| y.is_repeated(dim, x.ndim));
    let both = format!("{} is {tx} and {} is {ty}", x.name, y.name);
    let misses = |name: &str, fix: String| {
        Err((format!("{both}: the gradient of {name} would miss the other ranks' share"), format!("{fix} first")))
    };
    let differ = |fix: String| Err((format!("{both}: they do not hold the same elements"), fix));
    match (tx, ty) {
        (Ty::Shard(d), Ty::Shard(e)) if d == e + lead => Ok(tx),
        // y is repeated over the dim that is sharded.
        (Ty::Shard(d), Ty::Replicate) if repeated(d) => Ok(tx),
        (Ty::Varying, Ty::Replicate) | (Ty::Replicate, Ty::Varying) => Ok(Ty::Varying),
        (tx, ty) if tx == ty && !matches!(tx, Ty::Shard(_)) => Ok(tx),
        (Ty::Invariant, Ty::Shard(e)) => misses(x.name, format!("split(I→S) {} along dim {}", x.name, e + lead)),
        (Ty::Shard(d), Ty::Invariant) if !repeated(d) => {
            misses(y.name, format!("split(I→S) {} along dim {}", y.name, d - lead))
        }
        (Ty::Invariant, _) => misses(x.name, format!("copy(I→R) {}", x.name)),
        (_, Ty::Invariant) => misses(y.name, format!("copy(I→R) {}", y.name)),
        (Ty::Replicate, Ty::Shard(e)) => differ(format!("slice(R→S) {} along dim {} first", x.name, e + lead)),
        (Ty::Shard(d), Ty::Replicate) => differ(format!("slice(R→S) {} along dim {} first", y.name, d - lead)),
        (Ty::Shard(d), Ty::Shard(e)) if d >= lead => {
            differ(format!("all_to_all {} from dim {e} to dim {} first", y.name, d - lead))
        }
        (Ty::Shard(_), Ty::Shard(e)) => differ(format!("all_gather {} along dim {e} first", y.name)),
        _ => differ("bring both to the same type first".to_owned()),
    }
}
