use super::prelude::*;
use meshwork_tensor::kernel::{Loss, PairNumber, Preference, VocabShard};

const OP: &str = "cross_entropy";

impl Loss for CudaDevice {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        self.check_ids(Checked::CrossEntropy, targets, shard.vocab, true)?;
        let rows = targets.count();
        let (max, sums) = (self.alloc(DType::F32, rows)?, self.alloc(DType::F32, 2 * rows)?);
        let sum = self.place(OP, &sums)?;
        launch!(self, OP, "cross_entropy_stats", [rows, shard.valid];
            logits, targets, shard.pitch, shard.skipped, shard.valid, shard.first, &max, sum, sum.offset(4 * rows), rows
        )?;
        Ok((max, sums))
    }

    fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()> {
        let rows = other.count();
        launch!(self, OP, "cross_entropy_larger", [rows, 0]; max, other, rows)
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        let rows = local.count();
        launch!(self, OP, "cross_entropy_rescale", [rows, 0]; local, global, sums, rows)
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        let rows = max.count();
        let (lse, totals) = (self.alloc(DType::F32, rows)?, self.alloc(DType::F64, samples)?);
        launch!(self, OP, "cross_entropy_lse", [rows, 0]; max, sums, &lse, rows)?;
        let target = self.place(OP, sums)?.offset(4 * rows);
        launch!(self, OP, "cross_entropy_loss", [samples, 0]; targets, max, sums, target, &totals, samples, rows)?;
        Ok((totals, lse))
    }

    fn grad(&self, logits: &mut Buffer, ids: &Buffer, lse: &Buffer, scale: &Buffer, shard: VocabShard) -> Result<()> {
        let rows = ids.count();
        launch!(self, OP, "cross_entropy_backward", [rows, shard.width];
            logits, ids, lse, scale, shard.pitch, shard.skipped, shard.width, shard.valid, shard.first,
            scale.count(), rows
        )
    }

    fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer> {
        const OP: &str = "correct";
        let logits = &self.read_as(logits, DType::F32)?;
        let (rows, out) = (targets.count(), self.alloc(DType::F64, samples)?);
        let right = self.scratch(DType::I32, rows)?;
        launch!(self, OP, "correct_rows", [rows, 0]; logits, targets, width, &right, rows)?;
        launch!(self, OP, "correct_counts", [samples, 0]; &right, &out, samples, rows / samples.max(1))?;
        Ok(out)
    }

    fn preference(&self, losses: &Buffer, reference: &Buffer, of: Preference, number: PairNumber) -> Result<Buffer> {
        let pairs = losses.count() / 2;
        let out = self.alloc(DType::F64, pairs)?;
        let number: usize = match number {
            PairNumber::Loss => 0,
            PairNumber::Chosen => 1,
            PairNumber::Rejected => 2,
            PairNumber::Margin => 3,
            PairNumber::Correct => 4,
        };
        launch!(self, "preference", "preference_forward", [pairs, 0];
            losses, reference, &out, of.beta, of.label_smoothing, number, pairs
        )?;
        Ok(out)
    }

    fn preference_grad(&self, losses: &Buffer, reference: &Buffer, dloss: &Buffer, of: Preference) -> Result<Buffer> {
        let (pairs, dlosses) = (dloss.count(), self.alloc(DType::F64, losses.count())?);
        launch!(self, "preference", "preference_backward", [pairs, 0];
            losses, reference, dloss, &dlosses, of.beta, of.label_smoothing, pairs
        )?;
        Ok(dlosses)
    }
}
