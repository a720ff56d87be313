use super::prelude::*;
use meshwork_tensor::kernel::{Loss, PairLosses, PairNumber, Preference, VocabShard};

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

    fn group_sums(&self, values: &Buffer, ids: &Buffer, samples: usize, groups: usize) -> Result<Buffer> {
        self.check_ids(Checked::GroupSums, ids, groups, true)?;
        let (sums, count) = (self.alloc(DType::F64, samples * groups)?, samples * groups);
        launch!(self, "group_sums", "group_sums_forward", [count, 0];
            values, ids, &sums, ids.count() / samples.max(1), groups.max(1), count
        )?;
        Ok(sums)
    }

    fn group_sums_grad(&self, dsums: &Buffer, ids: &Buffer, samples: usize) -> Result<Buffer> {
        let (dvalues, count) = (self.alloc(DType::F64, ids.count())?, ids.count());
        launch!(self, "group_sums", "group_sums_backward", [count, 0];
            dsums, ids, &dvalues, (count / samples.max(1)).max(1), dsums.count() / samples.max(1), count
        )?;
        Ok(dvalues)
    }

    fn preference(&self, of: Preference, number: PairNumber, answers: PairLosses<'_>) -> Result<Buffer> {
        let PairLosses { losses, reference, pairs } = answers;
        let samples = pairs.count();
        let out = self.alloc(DType::F64, samples)?;
        launch!(self, "preference", "preference_forward", [samples, 0];
            losses, reference, pairs, &out, of.beta, of.label_smoothing, number as usize,
            losses.count() / samples.max(1), samples
        )?;
        Ok(out)
    }

    fn preference_grad(&self, of: Preference, answers: PairLosses<'_>, dloss: &Buffer) -> Result<Buffer> {
        let PairLosses { losses, reference, pairs } = answers;
        let (samples, dlosses) = (pairs.count(), self.alloc(DType::F64, losses.count())?);
        launch!(self, "preference", "preference_backward", [samples, 0];
            losses, reference, pairs, dloss, &dlosses, of.beta, of.label_smoothing,
            losses.count() / samples.max(1), samples
        )?;
        Ok(dlosses)
    }
}
