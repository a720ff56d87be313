//! How values at cuts become messages: shape and size of messages, refused values, and how a message is restored.

use super::settings::Compress;
use crate::boundary::Boundary;
use crate::prelude::*;
use meshwork_compress::{Compressor, Fold, Scheme, Shape as Matrix, Sparse, wire_bytes};
use meshwork_nn::Activation;
use meshwork_tensor::Shape;

/// How a value becomes a message.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    /// The scheme of the message.
    pub scheme: Scheme,
    /// The content of the message as a matrix: the value, or the elements of it that are sent.
    pub sent: Matrix,
    /// How the indices of the activation were chosen, where these choose the elements.
    pub chosen: Option<Sparse>,
    /// The value as a matrix.
    pub shape: Matrix,
    /// Bytes of the message.
    pub bytes: usize,
}

/// A value at a cut.
#[derive(Clone, Copy, Debug)]
pub struct CutValue<'a> {
    pub boundary: &'a Boundary,
    /// Whether it is an activation or its gradient.
    pub direction: Direction,
    /// Its shape and types on a rank.
    pub value: &'a Activation,
}

/// A received message without the padding of its parts.
pub fn part(message: &Buffer, bytes: usize) -> Result<Buffer> {
    Ok(message.slice(0..bytes).map_err(meshwork_tensor::Error::from)?)
}

/// A value as a matrix with a row for each sample.
fn matrix(shape: &Shape) -> Result<Matrix, meshwork_compress::CompressError> {
    let rows = shape.first().copied().unwrap_or(1).max(1);
    Matrix::matrix(rows, shape.count() / rows)
}

impl CutValue<'_> {
    /// How the value becomes a message of a scheme.
    pub fn pack(&self, compress: &Compress, scheme: Scheme) -> Result<Packed> {
        let chosen = match scheme {
            Scheme::Sparse(sparse) if compress.share_indices && self.direction == Direction::Gradient => Some(sparse),
            _ => None,
        };
        let packed = matrix(&self.value.shape).and_then(|shape| {
            let (scheme, sent) =
                chosen.map_or((scheme, shape), |sparse| (Scheme::Values(sparse.values), sparse.taken(shape)));
            Ok(Packed { scheme, sent, chosen, shape, bytes: wire_bytes(&scheme, sent)? })
        });
        packed.map_err(|error| self.refuse(scheme, error.to_string()).into())
    }

    /// The error of a scheme that does not compress the value.
    pub fn refuse(&self, scheme: Scheme, problem: String) -> PlanError {
        let place = if self.direction == Direction::Activation { "activations" } else { "activation gradients" };
        PlanError::Compress { place, scheme: scheme.name(), problem: format!("{}: {problem}", self.boundary.name) }
    }

    /// How the value is compressed in training, if it is. Refuses compression that would lose the meaning of the value.
    /// `canonical`: whether every mesh must lose the same.
    pub fn require(&self, compress: &Compress, mesh: &Mesh, canonical: bool) -> Result<Option<Packed>> {
        let Some(scheme) = compress.at_cuts(self.direction) else { return Ok(None) };
        let Activation { dtype, types, .. } = self.value;
        let refuse = |problem: String| Err(self.refuse(scheme, problem).into());
        if *dtype != DType::F32 && !dtype.is_half() {
            return refuse(format!("it sends {dtype}, and only f32, bf16 and f16 are compressed"));
        }
        let split = || types.iter().filter(|(axis, _)| mesh.degree(*axis) > 1);
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
        let packed = self.pack(compress, scheme)?;
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
}

/// The value that a message restores to, without feedback.
pub fn restored(device: &dyn Device, of: &Packed, message: &Buffer, indices: Option<&Buffer>) -> Result<Buffer> {
    let kernels = device.compression()?;
    let mut sent = device.alloc(DType::F32, of.sent.len())?;
    kernels.unpack(&of.scheme, of.sent, message, Fold::Replace, &mut sent)?;
    match (of.chosen, indices) {
        (Some(sparse), Some(indices)) => Ok(kernels.put(&sparse, of.shape, indices, &sent)?),
        _ => Ok(sent),
    }
}
