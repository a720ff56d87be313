use super::kernels::{Float, loss};
use super::{Cpu, for_float, row_piece};
use crate::error::{Error, Result};
use crate::family::{Loss, VocabShard};
use meshwork_core::Buffer;
use meshwork_core::pool::share;

fn columns(shard: VocabShard) -> loss::Columns {
    loss::Columns { width: shard.width, valid: shard.valid, first: shard.first }
}

impl Loss for Cpu {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        for_float!(self, "cross_entropy", logits, T => {
            let (logits, ids) = (logits.as_slice::<T>()?, targets.as_slice::<i32>()?);
            if let Some(at) = ids.iter().position(|&id| usize::try_from(id).is_ok_and(|id| id >= shard.vocab)) {
                return Err(Error::Id { op: "cross_entropy", id: ids[at], at, vocab: shard.vocab });
            }
            let mut max = self.output::<T>(ids.len(), |_| {})?;
            let maxima = max.as_mut_slice::<T>()?;
            let sums = self.output::<T>(2 * ids.len(), |sums| {
                let (sum_exp, target) = sums.split_at_mut(ids.len());
                let piece = row_piece(shard.width);
                let rows = piece / shard.width;
                let outputs = maxima.chunks_mut(rows).zip(sum_exp.chunks_mut(rows)).zip(target.chunks_mut(rows));
                let pieces = logits.chunks(piece).zip(ids.chunks(rows)).zip(outputs);
                share(pieces, |((logits, ids), ((max, sum_exp), target))| {
                    loss::row_stats(columns(shard), logits, ids, max, sum_exp, target);
                });
            })?;
            Ok((max, sums))
        })
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        for_float!(self, "cross_entropy", local, T => {
            let (local, global) = (local.as_slice::<T>()?, global.as_slice::<T>()?);
            loss::rescale(local, global, &mut sums.as_mut_slice::<T>()?[..local.len()]);
            Ok(())
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
            let piece = row_piece(shard.width);
            let rows = targets.chunks(piece / shard.width).zip(lse.chunks(piece / shard.width));
            share(logits.as_mut_slice::<T>()?.chunks_mut(piece).zip(rows), |(logits, (targets, lse))| {
                loss::backward(columns(shard), logits, targets, lse, scale);
            });
            Ok(())
        })
    }
}
