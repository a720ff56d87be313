use super::kernels::round::Loaded;
use super::kernels::{loss, preference};
use super::prelude::*;
use meshwork_tensor::kernel::{Loss, PairLosses, PairNumber, Preference, VocabShard};

impl Loss for Cpu {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        for_widened!(self, "cross_entropy", logits, T => {
            let (dtype, logits, ids) = (logits.dtype(), loaded::<T>(logits)?, targets.as_slice::<i32>()?);
            if let Some(at) = ids.iter().position(|&id| usize::try_from(id).is_ok_and(|id| id >= shard.vocab)) {
                return Err(Error::Id { op: "cross_entropy", id: ids[at], at, vocab: shard.vocab });
            }
            let mut max = self.output::<T>(ids.len(), |_| {})?;
            let maxima = max.as_mut_slice::<T>()?;
            let sums = self.output::<T>(2 * ids.len(), |sums| {
                let (sum_exp, target) = sums.split_at_mut(ids.len());
                let piece = row_piece_of(dtype, shard.pitch);
                let rows = piece / shard.pitch;
                let outputs = maxima.chunks_mut(rows).zip(sum_exp.chunks_mut(rows)).zip(target.chunks_mut(rows));
                let pieces = logits.chunks(piece).zip(ids.chunks(rows)).zip(outputs);
                for_each(pieces, |((logits, ids), ((max, sum_exp), target))| {
                    read([logits], |[logits]| loss::row_stats(shard, logits, ids, max, sum_exp, target));
                });
            })?;
            Ok((max, sums))
        })
    }

    fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()> {
        for_float!(self, "cross_entropy", other, T => {
            loss::larger(max.as_mut_slice::<T>()?, other.as_slice::<T>()?);
            Ok(())
        })
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        for_float!(self, "cross_entropy", local, T => {
            let (local, global) = (local.as_slice::<T>()?, global.as_slice::<T>()?);
            loss::rescale(local, global, &mut sums.as_mut_slice::<T>()?[..local.len()]);
            Ok(())
        })
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        for_float!(self, "cross_entropy", max, T => {
            let (max, sums, targets) = (max.as_slice::<T>()?, sums.as_slice::<T>()?, targets.as_slice::<i32>()?);
            let (sum_exp, target) = sums.split_at(max.len());
            let mut totals = vec![0.0; samples];
            let rows = (targets.len() / samples.max(1)).max(1);
            let lse = self.output::<T>(max.len(), |lse| {
                for (i, (total, lse)) in totals.iter_mut().zip(lse.chunks_mut(rows)).enumerate() {
                    let of = i * rows..(i + 1) * rows;
                    let (targets, max) = (&targets[of.clone()], &max[of.clone()]);
                    *total = loss::finish(targets, max, &sum_exp[of.clone()], &target[of], lse);
                }
            })?;
            Ok((self.output::<f64>(samples, |out| out.copy_from_slice(&totals))?, lse))
        })
    }

    fn grad(&self, logits: &mut Buffer, ids: &Buffer, lse: &Buffer, scale: &Buffer, shard: VocabShard) -> Result<()> {
        for_float!(self, "cross_entropy", lse, T => {
            let (targets, lse) = (ids.as_slice::<i32>()?, lse.as_slice::<T>()?);
            let scale = scale.as_slice::<f64>()?;
            // Pieces of the rows of one sample, which share a scale.
            let sample = (targets.len() / scale.len().max(1)).max(1);
            let rows = row_piece_of(logits.dtype(), shard.pitch) / shard.pitch;
            let samples = stored::<T>(logits)?.chunks(sample * shard.pitch).zip(scale);
            let pieces = samples.zip(targets.chunks(sample).zip(lse.chunks(sample))).flat_map(|((logits, &scale), (targets, lse))| {
                logits.chunks(rows * shard.pitch).zip(targets.chunks(rows).zip(lse.chunks(rows))).map(move |piece| (piece, scale))
            });
            for_each(pieces, |((logits, (targets, lse)), scale)| {
                logits.update(|logits| loss::backward(shard, logits, targets, lse, T::from_f64(scale)));
            });
            Ok(())
        })
    }

    fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer> {
        for_widened!(self, "correct", logits, T => {
            let (logits, targets) = (loaded::<T>(logits)?, targets.as_slice::<i32>()?);
            let rows = (targets.len() / samples.max(1)).max(1);
            let right = |(row, &target): (Loaded<'_, T>, &i32)| read([row], |[row]| {
                let target = usize::try_from(target).ok().filter(|&target| target < row.len());
                target.is_some_and(|t| {
                    row[..t].iter().all(|x| x.to_f64() < row[t].to_f64())
                        && row[t..].iter().all(|x| x.to_f64() <= row[t].to_f64())
                })
            });
            let of = |(logits, targets): (Loaded<'_, T>, &[i32])| {
                logits.chunks(width.max(1)).zip(targets).filter(|&row| right(row)).count() as f64
            };
            let counts: Vec<f64> = logits.chunks((rows * width).max(1)).zip(targets.chunks(rows)).map(of).collect();
            self.output::<f64>(samples, |out| out.copy_from_slice(&counts))
        })
    }

    fn group_sums(&self, values: &Buffer, ids: &Buffer, samples: usize, groups: usize) -> Result<Buffer> {
        let (values, ids) = (values.as_slice::<f64>()?, ids.as_slice::<i32>()?);
        if let Some(at) = ids.iter().position(|&id| usize::try_from(id).is_ok_and(|id| id >= groups)) {
            let problem = format!("index {} at place {at}: indices are from 0 to {}", ids[at], groups as i64 - 1);
            return Err(Error::Shape { op: "group_sums", problem, shapes: Vec::new() });
        }
        self.output::<f64>(samples * groups, |sums| loss::group_sums(samples, values, ids, sums))
    }

    fn group_sums_grad(&self, dsums: &Buffer, ids: &Buffer, samples: usize) -> Result<Buffer> {
        let (dsums, ids) = (dsums.as_slice::<f64>()?, ids.as_slice::<i32>()?);
        self.output::<f64>(ids.len(), |dvalues| loss::group_sums_backward(samples, dsums, ids, dvalues))
    }

    fn preference(&self, of: Preference, number: PairNumber, answers: PairLosses<'_>) -> Result<Buffer> {
        let PairLosses { losses, reference, pairs } = answers;
        let (losses, reference, pairs) = (losses.as_slice()?, reference.as_slice()?, pairs.as_slice()?);
        self.output::<f64>(pairs.len(), |out| preference::forward(of, number, losses, reference, pairs, out))
    }

    fn preference_grad(&self, of: Preference, answers: PairLosses<'_>, dloss: &Buffer) -> Result<Buffer> {
        let PairLosses { losses, reference, pairs } = answers;
        let (losses, reference, pairs) = (losses.as_slice()?, reference.as_slice()?, pairs.as_slice()?);
        let dloss = dloss.as_slice()?;
        self.output::<f64>(losses.len(), |dlosses| preference::backward(of, losses, reference, pairs, dloss, dlosses))
    }
}
