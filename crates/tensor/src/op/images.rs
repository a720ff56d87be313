//! The SPMD types of operations on images `[samples, height, width, channels]`.

use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Types};

/// Images are whole on a rank: an axis may cut only samples (data parallelism), and weights are whole. A window over an
/// image that is cut in height or width would need its neighbours' pixels, and a norm their sums.
pub(super) fn whole_images(
    op: &'static str,
    x: Operand<'_>,
    weights: &[Operand<'_>],
) -> std::result::Result<Types, SpmdError> {
    let channels = x.ndim.saturating_sub(1);
    let types = rules::along_dim(op, x, channels, weights)?;
    match types.iter().find(|(_, ty)| ty.dim().is_some_and(|dim| dim > 0)) {
        None => Ok(types),
        Some((axis, ty)) => Err(SpmdError {
            op: op.to_owned(),
            axis,
            problem: format!("{} is {ty}, and {op} needs whole images on one rank", x.name),
            fix: format!("all_gather {} first, or cut its samples", x.name),
        }),
    }
}
