use super::kernels::{Float, loss};
use super::{Cpu, for_float};
use crate::error::{Error, Result};
use crate::family::{Loss, VocabShard};
use meshwork_core::Buffer;

fn columns(shard: VocabShard) -> loss::Columns {
    loss::Columns { width: shard.width, valid: shard.valid, first: shard.first }
}

impl Loss for Cpu {
    fn row_max(&self, logits: &Buffer, shard: VocabShard) -> Result<Buffer> {
        for_float!(self, "cross_entropy", logits, T => {
            let logits = logits.as_slice::<T>()?;
            self.output::<T>(logits.len() / shard.width, |max| loss::row_max(columns(shard), logits, max))
        })
    }

    fn row_sums(&self, logits: &Buffer, targets: &Buffer, max: &Buffer, shard: VocabShard) -> Result<Buffer> {
        for_float!(self, "cross_entropy", logits, T => {
            let ids = targets.as_slice::<i32>()?;
            if let Some(at) = ids.iter().position(|&id| usize::try_from(id).is_ok_and(|id| id >= shard.vocab)) {
                return Err(Error::Id { op: "cross_entropy", id: ids[at], at, vocab: shard.vocab });
            }
            let (logits, targets, max) = (logits.as_slice::<T>()?, targets.as_slice::<i32>()?, max.as_slice::<T>()?);
            self.output::<T>(2 * max.len(), |sums| {
                let (sum_exp, target) = sums.split_at_mut(max.len());
                loss::sum_exp_and_target(columns(shard), logits, targets, max, sum_exp, target);
            })
        })
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer) -> Result<(Buffer, Buffer)> {
        for_float!(self, "cross_entropy", max, T => {
            let (max, sums, targets) = (max.as_slice::<T>()?, sums.as_slice::<T>()?, targets.as_slice::<i32>()?);
            let (sum_exp, target) = sums.split_at(max.len());
            let mut total = 0.0;
            let lse = self.output::<T>(max.len(), |lse| total = loss::finish(targets, max, sum_exp, target, lse))?;
            Ok((self.output::<f64>(1, |one| one[0] = total)?, lse))
        })
    }

    fn grad(
        &self,
        logits: &mut Buffer,
        targets: &Buffer,
        lse: &Buffer,
        scale: &Buffer,
        shard: VocabShard,
    ) -> Result<()> {
        for_float!(self, "cross_entropy", lse, T => {
            let scale = T::from_f64(scale.as_slice::<f64>()?[0]);
            let (targets, lse) = (targets.as_slice::<i32>()?, lse.as_slice::<T>()?);
            loss::backward(columns(shard), logits.as_mut_slice::<T>()?, targets, lse, scale);
            Ok(())
        })
    }
}
