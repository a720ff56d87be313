use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Loss, VocabShard};
use meshwork_core::{Buffer, DType};

impl Loss for Meta {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, _shard: VocabShard) -> Result<(Buffer, Buffer)> {
        let of = logits.dtype().widened();
        let max = self.alloc(of, targets.count())?;
        Ok((max, self.alloc(of, 2 * targets.count())?))
    }

    fn larger(&self, _max: &mut Buffer, _other: &Buffer) -> Result<()> {
        Ok(())
    }

    fn rescale(&self, _sums: &mut Buffer, _local: &Buffer, _global: &Buffer) -> Result<()> {
        Ok(())
    }

    fn total(&self, max: &Buffer, _sums: &Buffer, _targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        let lse = self.alloc(max.dtype(), max.count())?;
        Ok((self.alloc(DType::F64, samples)?, lse))
    }

    fn grad(
        &self,
        _logits: &mut Buffer,
        _targets: &Buffer,
        _lse: &Buffer,
        _scale: &Buffer,
        _shard: VocabShard,
    ) -> Result<()> {
        Ok(())
    }

    fn correct(&self, _logits: &Buffer, _targets: &Buffer, _width: usize, samples: usize) -> Result<Buffer> {
        self.alloc(DType::F64, samples)
    }
}
