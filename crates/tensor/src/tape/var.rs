//! What a value on a tape says of itself.

use super::{Padding, Source, Tape, Var};
use crate::error::Result;
use crate::shape::{MAX_DIMS, Shape};
use crate::tensor::Tensor;
use meshwork_core::{Axis, DType, Ty, Types};

impl Var {
    /// The value on this rank.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The value on this rank, taken out.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// The same without its memory: where a gradient goes, and of which shape and types it is.
    pub fn released(self) -> Self {
        Self { tensor: self.tensor.without_memory(), recipe: None, ..self }
    }

    /// The value of a scalar, for reports. Refused if no rank holds the true value.
    pub fn item(&self) -> Result<f64> {
        self.types.require_final("item")?;
        match self.tensor.dtype() {
            DType::F64 => Ok(self.tensor.to_vec::<f64>()?.first().copied().unwrap_or(f64::NAN)),
            _ => Ok(self.tensor.to_vec::<f32>()?.first().copied().map_or(f64::NAN, f64::from)),
        }
    }

    /// Its SPMD types.
    pub fn types(&self) -> Types {
        self.types
    }

    /// Its type on one axis; `Invariant` where the mesh lacks the axis (one rank does all the work).
    pub fn ty(&self, axis: Axis) -> Ty {
        self.types.get(axis).unwrap_or(Ty::Invariant)
    }

    /// The true extents of dims whose shards are padded with zeros.
    pub fn padding(&self) -> &Padding {
        &self.padding
    }

    /// Extents on this rank, padding included.
    pub fn shape(&self) -> Shape {
        self.tensor.shape()
    }

    /// The tape of the value.
    pub fn tape(&self) -> &Tape {
        &self.tape
    }

    /// Whether backward may run from it: it depends on an input or a parameter that takes a gradient.
    pub fn takes_gradient(&self) -> bool {
        self.source.takes_gradient()
    }

    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Per dim: (global position of local element 0, global extent). Dim 0 counts samples from the tape's first one.
    pub(crate) fn global_position(&self) -> ([u64; MAX_DIMS], [u64; MAX_DIMS]) {
        let rank = self.tape.rank();
        let mut offset = [0; MAX_DIMS];
        let mut global = [1; MAX_DIMS];
        for (dim, &extent) in self.shape().iter().enumerate() {
            global[dim] = extent as u64;
            for (axis, ty) in self.types.iter() {
                if ty == Ty::Shard(dim) {
                    offset[dim] = offset[dim] * rank.mesh().degree(axis) as u64 + rank.coords().get(axis) as u64;
                    global[dim] *= rank.mesh().degree(axis) as u64;
                    if let Some(extent) = self.padding.extent(axis) {
                        global[dim] = extent as u64;
                    }
                }
            }
            offset[dim] *= extent as u64;
        }
        // Samples have no upper limit.
        offset[0] = self.tape.first_sample();
        global[0] = offset[0] + self.shape().first().map_or(1, |&samples| samples as u64);
        (offset, global)
    }
}
