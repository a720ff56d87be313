//! Documents packed into a sequence.

use super::{CudaDevice, checked::Checked, launch::launch};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{AttentionMasks, AttentionShape};
use meshwork_tensor::{Error, Result};

/// The documents of all sequences, on the device: the host does not know them.
pub(super) struct Packed {
    /// The position of each token in its document, checked.
    pub(super) positions: Buffer,
    /// The first token of each token's document, if tokens see only their own document.
    pub(super) firsts: Option<Buffer>,
}

impl CudaDevice {
    /// The documents of a call, whose positions a kernel checks; the next download reports invalid ones.
    pub(super) fn packed(&self, shape: AttentionShape, masks: AttentionMasks<'_>) -> Result<Option<Packed>> {
        const OP: &str = "attention";
        let Some(documents) = masks.documents else { return Ok(None) };
        let (count, AttentionShape { batch, seq, .. }) = (shape.batch * shape.seq, shape);
        if documents.positions.count() != count {
            let problem = format!("{} positions: every token has one", documents.positions.count());
            return Err(Error::Shape { op: OP, problem, shapes: vec![vec![batch, seq]] });
        }
        let [positions, firsts] = [self.scratch(DType::I32, count)?, self.scratch(DType::I32, count)?];
        let (given, found) = (documents.positions, self.fault_of(Checked::Documents));
        launch!(self, OP, "check_positions", [usize::from(count > 0), 1]; given, found, count, seq)?;
        launch!(self, OP, "document_starts", [count, 0]; given, &positions, &firsts, count, seq)?;
        Ok(Some(Packed { positions, firsts: documents.apart.then_some(firsts) }))
    }
}
