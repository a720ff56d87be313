//! Documents packed into a sequence.

use super::{CudaDevice, checked::Checked, launch::launch};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{AttentionMasks, GroupedShape, Layout};
use meshwork_tensor::{Error, Result};

/// The documents of all sequences, on the device: the host does not know them.
pub(super) struct Packed {
    /// The position of each key in its document, checked.
    pub(super) of_keys: Buffer,
    /// Those of the queries.
    pub(super) of_queries: Buffer,
    /// The first token of the document of each token of a sequence, if tokens see only those of their own.
    pub(super) firsts: Option<Buffer>,
}

impl CudaDevice {
    /// The documents of a call, whose positions a kernel checks; the next download returns the fault.
    pub(super) fn packed(&self, shape: GroupedShape, masks: AttentionMasks<'_>) -> Result<Option<Packed>> {
        const OP: &str = "attention";
        let Some(documents) = masks.documents else { return Ok(None) };
        let (batch, seq, tokens) = (shape.queries.batch, shape.sequence, shape.tokens());
        let count = batch * seq;
        if documents.positions.count() != count {
            let problem = format!("{} positions: every token has one", documents.positions.count());
            return Err(Error::Shape { op: OP, problem, shapes: vec![vec![batch, seq]] });
        }
        if tokens.end.max(shape.key_tokens().end) > seq {
            let problem = format!("queries of tokens {tokens:?}, and positions of {seq}");
            return Err(Error::Shape { op: OP, problem, shapes: vec![vec![batch, seq]] });
        }
        let [positions, firsts] = [self.scratch(DType::I32, count)?, self.scratch(DType::I32, count)?];
        let (given, found) = (documents.positions, self.fault_of(Checked::Documents));
        launch!(self, OP, "check_positions", [usize::from(count > 0), 1]; given, found, count, seq)?;
        launch!(self, OP, "document_starts", [count, 0]; given, &positions, &firsts, count, seq)?;
        let among = |tokens| match tokens == (0..seq) {
            true => Ok(positions.clone()),
            false => self.narrow(&positions, batch, seq, 1, tokens),
        };
        let (of_queries, of_keys) = (among(tokens)?, among(shape.key_tokens())?);
        Ok(Some(Packed { of_keys, of_queries, firsts: documents.apart.then_some(firsts) }))
    }
}
