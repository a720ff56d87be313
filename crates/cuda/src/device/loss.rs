use super::CudaDevice;
use super::checked::Checked;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{Loss, VocabShard};
use meshwork_tensor::{Device, Result};

const OP: &str = "cross_entropy";

impl Loss for CudaDevice {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        let (kernel, f16) = self.of_storage(OP, &[logits], ["cross_entropy_stats", "cross_entropy_stats_16"])?;
        self.check_ids(Checked::CrossEntropy, targets, shard.vocab, true)?;
        let rows = targets.count();
        let (max, sums) = (self.alloc(DType::F32, rows)?, self.alloc(DType::F32, 2 * rows)?);
        let sum = self.place(OP, &sums)?;
        let args = [
            self.place(OP, logits)?.into(),
            self.place(OP, targets)?.into(),
            shard.pitch.into(),
            shard.skipped.into(),
            shard.valid.into(),
            shard.first.into(),
            self.place(OP, &max)?.into(),
            sum.into(),
            sum.offset(4 * rows).into(),
            rows.into(),
        ];
        self.launch(OP, kernel, [rows, shard.valid], &[&args[..], f16.as_slice()].concat())?;
        Ok((max, sums))
    }

    fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()> {
        self.f32s(OP, &[max, other])?;
        let rows = other.count();
        let args = [self.place_mut(OP, max)?.into(), self.place(OP, other)?.into(), rows.into()];
        self.launch(OP, "cross_entropy_larger", [rows, 0], &args)
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        self.f32s(OP, &[sums, local, global])?;
        let (rows, sum) = (local.count(), self.place_mut(OP, sums)?);
        let args = [self.place(OP, local)?.into(), self.place(OP, global)?.into(), sum.into(), rows.into()];
        self.launch(OP, "cross_entropy_rescale", [rows, 0], &args)
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        self.f32s(OP, &[max, sums])?;
        let rows = max.count();
        let lse = self.alloc(DType::F32, rows)?;
        let totals = self.alloc(DType::F64, samples)?;
        let (max, sum) = (self.place(OP, max)?, self.place(OP, sums)?);
        self.launch(
            OP,
            "cross_entropy_lse",
            [rows, 0],
            &[max.into(), sum.into(), self.place(OP, &lse)?.into(), rows.into()],
        )?;
        let args = [
            self.place(OP, targets)?.into(),
            max.into(),
            sum.into(),
            sum.offset(4 * rows).into(),
            self.place(OP, &totals)?.into(),
            samples.into(),
            rows.into(),
        ];
        self.launch(OP, "cross_entropy_loss", [samples, 0], &args)?;
        Ok((totals, lse))
    }

    fn grad(
        &self,
        logits: &mut Buffer,
        targets: &Buffer,
        lse: &Buffer,
        scale: &Buffer,
        shard: VocabShard,
    ) -> Result<()> {
        self.f32s(OP, &[lse])?;
        let (kernel, f16) = self.of_storage(OP, &[logits], ["cross_entropy_backward", "cross_entropy_backward_16"])?;
        let rows = targets.count();
        let args = [
            self.place_mut(OP, logits)?.into(),
            self.place(OP, targets)?.into(),
            self.place(OP, lse)?.into(),
            self.doubles(OP, scale)?,
            shard.pitch.into(),
            shard.skipped.into(),
            shard.width.into(),
            shard.valid.into(),
            shard.first.into(),
            scale.count().into(),
            rows.into(),
        ];
        self.launch(OP, kernel, [rows, shard.width], &[&args[..], f16.as_slice()].concat())
    }

    fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer> {
        const OP: &str = "correct";
        let logits = &self.read_as(logits, DType::F32)?;
        let (rows, out) = (targets.count(), self.alloc(DType::F64, samples)?);
        let right = self.scratch(DType::I32, rows)?;
        let at = self.place(OP, &right)?.into();
        let args = [self.place(OP, logits)?.into(), self.place(OP, targets)?.into(), width.into(), at, rows.into()];
        self.launch(OP, "correct_rows", [rows, 0], &args)?;
        let args = [at, self.place(OP, &out)?.into(), samples.into(), (rows / samples.max(1)).into()];
        self.launch(OP, "correct_counts", [samples, 0], &args)?;
        Ok(out)
    }
}
