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
        let (batch, seq, runs) = (shape.queries.batch, shape.sequence, masks.runs(shape));
        let count = batch * seq;
        if documents.positions.count() != count {
            let problem = format!("{} positions: every token has one", documents.positions.count());
            return Err(Error::Shape { op: OP, problem, shapes: vec![vec![batch, seq]] });
        }
        if let Some(run) = runs.iter().chain([&shape.key_tokens()]).find(|run| run.end > seq) {
            let problem = format!("tokens {run:?}, and positions of {seq}");
            return Err(Error::Shape { op: OP, problem, shapes: vec![vec![batch, seq]] });
        }
        let [positions, firsts] = [self.scratch(DType::I32, count)?, self.scratch(DType::I32, count)?];
        let (given, found) = (documents.positions, self.fault_of(Checked::Documents));
        launch!(self, OP, "check_positions", [usize::from(count > 0), 1]; given, found, count, seq)?;
        launch!(self, OP, "document_starts", [count, 0]; given, &positions, &firsts, count, seq)?;
        let of_queries = match &runs[..] {
            [run] if *run == (0..seq) => positions.clone(),
            _ => {
                let (mut of_queries, mut row) = (self.scratch(DType::I32, batch * shape.queries.seq)?, 0);
                for run in runs {
                    for sample in 0..batch {
                        let from = sample * seq + run.start..sample * seq + run.end;
                        self.copy_into(&positions, from, &mut of_queries, sample * shape.queries.seq + row)?;
                    }
                    row += run.len();
                }
                of_queries
            }
        };
        let of_keys = match shape.key_tokens() {
            all if all == (0..seq) => positions,
            keys => self.narrow(&positions, batch, seq, 1, keys)?,
        };
        Ok(Some(Packed { of_keys, of_queries, firsts: documents.apart.then_some(firsts) }))
    }
}
