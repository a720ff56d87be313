//! Properties of a value on a tape.

use super::blocks::SEQ;
use super::prelude::*;
use crate::shape::MAX_DIMS;

impl Var {
    /// The value on this rank.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The value on this rank, taken out.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// The same value without its memory: it keeps its shape, its types and the destination of its gradient.
    pub fn released(self) -> Self {
        Self { tensor: self.tensor.without_memory(), recipe: None, ..self }
    }

    /// The same value as a [constant](Tape::constant): no gradient flows through it.
    #[must_use]
    pub fn detach(&self) -> Self {
        Self { source: Source::Constant, recipe: None, ..self.clone() }
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

    /// Whether an operation computed it, from values that take gradients.
    pub(crate) fn is_computed(&self) -> bool {
        matches!(self.source, Source::Node(_))
    }

    /// Whether backward may run from it: it depends on an input or a parameter that takes a gradient.
    pub fn takes_gradient(&self) -> bool {
        self.source.takes_gradient()
    }

    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Per dim: (global position of local element 0, global extent). Dim 0 counts samples. Of a block of tokens it is
    /// the position of its first run.
    pub(crate) fn global_position(&self) -> ([u64; MAX_DIMS], [u64; MAX_DIMS]) {
        let (rank, shape) = (self.tape.rank(), self.shape());
        let mesh = rank.mesh();
        let (mut offset, mut global) = ([0; MAX_DIMS], [1; MAX_DIMS]);
        for (dim, &extent) in shape.iter().enumerate() {
            // A block of tokens is a part of those that the rank has.
            let block = self.tape.block().filter(|block| dim == SEQ && block.tokens() == extent);
            let (extent, first) = block.map_or((extent, 0), |block| (block.seq(), block.runs()[0].start));
            global[dim] = extent as u64;
            for axis in self.types.cuts(dim).rev().filter(|axis| dim > 0 || !axis.is_data()) {
                offset[dim] = offset[dim] * mesh.degree(axis) as u64 + rank.coords().get(axis) as u64;
                global[dim] *= mesh.degree(axis) as u64;
            }
            let padded = self.types.cuts(dim).find_map(|axis| self.padding.extent(axis));
            global[dim] = padded.map_or(global[dim], |extent| extent as u64);
            offset[dim] = offset[dim] * extent as u64 + first as u64;
        }
        // Samples have no upper limit.
        offset[0] += self.first_of_data();
        global[0] = offset[0] + shape.first().map_or(1, |&samples| samples as u64);
        (offset, global)
    }

    /// Number of the sample in row 0, in the batch of the step. Randomness that is drawn by it depends on neither mesh
    /// nor micro-batches.
    pub fn first_sample(&self) -> u64 {
        self.global_position().0[0]
    }

    /// The tape's first sample. Of a value that ranks with other samples share, gathered from them or computed without
    /// samples, the first sample of the first of these ranks, so that all of them draw the same.
    fn first_of_data(&self) -> u64 {
        let (rank, first) = (self.tape.rank(), self.tape.first_sample());
        let own = |axis: Axis| matches!(self.types.get(axis), None | Some(Ty::Shard(_) | Ty::Varying));
        let shared = || Axis::DATA.into_iter().filter(|&axis| rank.mesh().degree(axis) > 1 && !own(axis));
        if shared().next().is_none() {
            return first;
        }
        let leader = shared().fold(rank.coords(), |coords, axis| coords.with(axis, 0));
        let before = rank.mesh().data_rank(rank.coords()) - rank.mesh().data_rank(leader);
        match self.tape.rank_samples() {
            0 => 0, // nobody knows what the others have
            apart => first.saturating_sub(before as u64 * apart),
        }
    }
}
