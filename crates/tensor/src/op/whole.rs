//! In canonical numerics a sum that the mesh cuts has the bits of one rank only if nothing is rounded between its
//! shares and the sum. So an operation that rounds needs whole values, and returns whole gradients.

use crate::error::{Error, Result};
use crate::tape::{Source, Var};
use meshwork_core::{Axis, Ty};

/// Refuses, in canonical numerics, operands that are shares of a sum.
pub(super) fn require_whole_values(op: &'static str, inputs: &[&Var]) -> Result<()> {
    refuse(op, inputs, |_, _, ty| {
        let problem = "each rank would round its share of a Partial value";
        (ty == Ty::Partial).then_some((problem, "it after all_reduce or reduce_scatter"))
    })
}

/// Refuses, in canonical numerics, operands that are shares of a sum, and those whose gradients would be.
pub(super) fn require_whole(op: &'static str, inputs: &[&Var]) -> Result<()> {
    inputs.iter().try_for_each(|input| require_whole_but(op, input, |_| false))
}

/// The same of one operand, on all axes but those where the shares of its gradient are `in_tree`: sums of whole
/// reduction blocks, which are added up in the tree.
pub(super) fn require_whole_but(op: &'static str, input: &Var, in_tree: impl Fn(Axis) -> bool) -> Result<()> {
    require_whole_values(op, &[input])?;
    refuse(op, &[input], |input, axis, ty| {
        let problem = "the gradient of a Replicate value is Partial, and each rank would round its share";
        let computed = matches!(input.source(), Source::Node(_)) && !in_tree(axis);
        (computed && ty == Ty::Replicate).then_some((problem, "it before copy or all_gather"))
    })
}

fn refuse(
    op: &'static str,
    inputs: &[&Var],
    why: impl Fn(&Var, Axis, Ty) -> Option<(&'static str, &'static str)>,
) -> Result<()> {
    let canonical = inputs.iter().filter(|input| input.tape().reduction_blocks().is_some());
    let found = canonical.flat_map(|input| input.types().iter().filter_map(|(axis, ty)| why(input, axis, ty))).next();
    found.map_or(Ok(()), |(problem, valid)| Err(Error::NotCanonical { op, problem, valid }))
}
