//! How values at cuts become messages: their shape and size, what is refused, and what a message restores to.

use crate::boundary::Boundary;
use crate::{Compress, PlanError, TrainError};
use meshwork_compress::{Compressor, Fold, Scheme, Shape as Matrix, Sparse, wire_bytes};
use meshwork_core::{Buffer, DType, Mesh, Ty};
use meshwork_nn::Activation;
use meshwork_pipeline::Direction;
use meshwork_tensor::{Device, Shape};

/// A value as its scheme makes a message of it.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// The scheme of the message.
    pub scheme: Scheme,
    /// What the message is made of, as a matrix: the value, or the elements of it that are sent.
    pub sent: Matrix,
    /// Where elements are chosen by the indices of the activation: how these were chosen.
    pub chosen: Option<Sparse>,
    /// The value as a matrix.
    pub shape: Matrix,
    /// Bytes of the message.
    pub bytes: usize,
}

/// The first bytes of what was received: all but the padding of its parts.
pub fn part(message: &Buffer, bytes: usize) -> Result<Buffer, TrainError> {
    Ok(message.slice(0..bytes).map_err(meshwork_tensor::Error::from)?)
}

/// A value as a matrix with a row for each sample.
fn matrix(shape: &Shape) -> Result<Matrix, meshwork_compress::CompressError> {
    let rows = shape.first().copied().unwrap_or(1).max(1);
    Matrix::matrix(rows, shape.count() / rows)
}

pub fn pack(
    compress: &Compress,
    scheme: Scheme,
    boundary: &Boundary,
    direction: Direction,
    value: &Activation,
) -> Result<Packed, TrainError> {
    let chosen = match scheme {
        Scheme::Sparse(sparse) if compress.share_indices && direction == Direction::Gradient => Some(sparse),
        _ => None,
    };
    let packed = matrix(&value.shape).and_then(|shape| {
        let (scheme, sent) =
            chosen.map_or((scheme, shape), |sparse| (Scheme::Values(sparse.values), sparse.taken(shape)));
        Ok(Packed { scheme, sent, chosen, shape, bytes: wire_bytes(&scheme, sent)? })
    });
    packed.map_err(|error| refuse(scheme, boundary, direction, error.to_string()).into())
}

/// The error of a value that is not compressed so.
pub fn refuse(scheme: Scheme, boundary: &Boundary, direction: Direction, problem: String) -> PlanError {
    let place = if direction == Direction::Activation { "activations" } else { "activation gradients" };
    PlanError::Compress { place, scheme: scheme.name(), problem: format!("{}: {problem}", boundary.name) }
}

/// How a value is compressed in training, if it is, refused where that would lose its meaning. `canonical`: whether
/// every mesh must lose the same.
pub fn require(
    compress: &Compress,
    boundary: &Boundary,
    direction: Direction,
    value: &Activation,
    (mesh, canonical): (&Mesh, bool),
) -> Result<Option<Packed>, TrainError> {
    let Some(scheme) = compress.at_cuts(direction) else { return Ok(None) };
    let refuse = |problem: String| Err(refuse(scheme, boundary, direction, problem).into());
    if value.dtype != DType::F32 && !value.dtype.is_half() {
        return refuse(format!("it sends {}, and only f32, bf16 and f16 are compressed", value.dtype));
    }
    let split = || value.types.iter().filter(|(axis, _)| mesh.degree(*axis) > 1);
    if let Some((axis, _)) = split().find(|(_, ty)| *ty == Ty::Partial) {
        return refuse(format!(
            "it sends shares of a sum over {axis}, and the sum of compressed shares is not the compressed sum: let the model send the sum, \
             Invariant or Shard on {axis}, or do not compress it"
        ));
    }
    let cut = split().find(|(axis, ty)| !axis.is_data() && matches!(ty, Ty::Shard(_) | Ty::Varying));
    if let Some((axis, ty)) = cut.filter(|_| canonical) {
        return refuse(format!(
            "canonical numerics promise the bits of one rank, and the value is {ty} on {axis}: ranks lose other things of parts than one \
             loses of the whole; let it be the same on {axis} (no sequence parallelism), or use numerics Fast"
        ));
    }
    let packed = pack(compress, scheme, boundary, direction, value)?;
    if canonical && !scheme.takes_rows_apart(packed.shape) {
        return refuse(
            "canonical numerics promise the same bits for every number of micro-batches, and what is lost of a sample depends on those beside \
             it: use /row, or blocks that divide a row; of random numbers, quant/row/stochastic alone"
                .to_owned(),
        );
    }
    match compress.feedback.check(&scheme, packed.shape) {
        Ok(()) => Ok(Some(packed)),
        Err(error) => refuse(error.to_string()),
    }
}

/// What a message restores to, without feedback.
pub fn restored(
    device: &dyn Device,
    of: &Packed,
    message: &Buffer,
    indices: Option<&Buffer>,
) -> Result<Buffer, TrainError> {
    let kernels = device.compression()?;
    let mut sent = device.alloc(DType::F32, of.sent.len())?;
    kernels.unpack(&of.scheme, of.sent, message, Fold::Replace, &mut sent, 0)?;
    match (of.chosen, indices) {
        (Some(sparse), Some(indices)) => Ok(kernels.put(&sparse, of.shape, indices, &sent)?),
        _ => Ok(sent),
    }
}
