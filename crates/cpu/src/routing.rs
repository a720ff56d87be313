use super::for_dtype;
use super::kernels::{dropout, permutation, routing};
use super::prelude::*;
use meshwork_tensor::kernel::{DropoutMask, Pick, Routing, Selected, Selection};

/// Tokens of a piece of work on scores of `experts` experts.
fn tokens(experts: usize) -> usize {
    row_piece(8 * experts) / (8 * experts).max(1)
}

impl Cpu {
    /// One f64 for each sample of rows of T.
    fn per_sample<T: Element + Float>(
        &self,
        x: &Buffer,
        samples: usize,
        f: impl Fn(usize, &[T]) -> f64 + Sync,
    ) -> Result<Buffer> {
        let x = x.as_slice::<T>()?;
        let of_sample = (x.len() / samples.max(1)).max(1);
        self.output::<f64>(samples, |out| {
            out.fill(0.0);
            for_each(out.iter_mut().zip(x.chunks(of_sample)).enumerate(), |(sample, (out, x))| *out = f(sample, x));
        })
    }
}

impl Routing for Cpu {
    fn select(&self, scores: &Buffer, bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        let weighed = |chosen: Buffer, routed: Buffer, kept: Buffer| {
            let weights = self.pick(scores, Some(&routed), pick)?;
            Ok(Selected { chosen, routed, kept, weights })
        };
        for_float!(self, "select", scores, T => {
            let scores = scores.as_slice::<T>()?;
            let bias = bias.map_or(Ok(&[][..]), |bias| bias.as_slice::<T>())?;
            let (experts, k, width, at_once) = (of.experts, of.k, of.ranked(), tokens(of.experts));
            let (all, of_sample) = (scores.len() / experts, (scores.len() / experts / of.samples.max(1)).max(1));
            let mut ranked = self.output::<i32>(all * width, |ranked| {
                for_each(ranked.chunks_mut(at_once * width).zip(scores.chunks(at_once * experts)), |(ranked, scores)| {
                    routing::rank(scores, bias, of, ranked);
                });
            })?;
            let by_preference = ranked.as_slice::<i32>()?;
            let mut kept = self.output::<i32>(all * k, |kept| {
                let samples = kept.chunks_mut(of_sample * k).zip(by_preference.chunks(of_sample * width));
                for_each(samples.zip(scores.chunks(of_sample * experts)).enumerate(), |(sample, ((kept, ranked), scores))| {
                    routing::limit(scores, ranked, of, (sample * of_sample) as u64, kept);
                });
            })?;
            if width == k {
                routing::by_expert(k, ranked.as_mut_slice()?, kept.as_mut_slice()?);
                return weighed(ranked.clone(), ranked, kept);
            }
            let mut chosen = self.output::<i32>(all * k, |chosen| routing::first(by_preference, width, k, chosen))?;
            let used = kept.as_slice::<i32>()?;
            let mut routed = self.output::<i32>(all * k, |routed| routing::first(by_preference, width, k, routed))?;
            let places = routed.as_mut_slice::<i32>()?.iter_mut().zip(used);
            places.filter(|(_, used)| **used >= 0).for_each(|(routed, used)| *routed = *used);
            routing::by_expert(k, routed.as_mut_slice()?, kept.as_mut_slice()?);
            chosen.as_mut_slice::<i32>()?.chunks_exact_mut(k).for_each(<[i32]>::sort_unstable);
            weighed(chosen, routed, kept)
        })
    }

    fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer> {
        for_float!(self, "select", scores, T => {
            let scores = scores.as_slice::<T>()?;
            let of_sample = (scores.len() / samples.max(1)).max(1);
            self.output::<i32>(scores.len(), |kept| {
                for_each(kept.chunks_mut(of_sample).zip(scores.chunks(of_sample)), |(kept, scores)| {
                    routing::top_tokens(scores, experts, capacity, kept);
                });
            })
        })
    }

    fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        for_float!(self, "pick", scores, T => {
            let scores = scores.as_slice::<T>()?;
            let choices = choices.map_or(Ok(&[][..]), |choices| choices.as_slice::<i32>())?;
            let at_once = tokens(of.experts);
            self.output::<T>(scores.len() / of.experts * of.k, |out| {
                let rows = scores.chunks(at_once * of.experts).enumerate();
                for_each(out.chunks_mut(at_once * of.k).zip(rows), |(out, (i, scores))| {
                    routing::pick(scores, choices.get(i * at_once * of.k..).unwrap_or_default(), of, out);
                });
            })
        })
    }

    fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, of: Pick) -> Result<Buffer> {
        for_float!(self, "pick", scores, T => {
            let (scores, dout) = (scores.as_slice::<T>()?, dout.as_slice::<T>()?);
            let choices = choices.map_or(Ok(&[][..]), |choices| choices.as_slice::<i32>())?;
            let at_once = tokens(of.experts);
            self.output::<T>(scores.len(), |dscores| {
                let rows = scores.chunks(at_once * of.experts).zip(dout.chunks(at_once * of.k)).enumerate();
                for_each(dscores.chunks_mut(at_once * of.experts).zip(rows), |(dscores, (i, (scores, dout)))| {
                    let choices = choices.get(i * at_once * of.k..).unwrap_or_default();
                    routing::pick_grad(scores, choices, dout, of, dscores);
                });
            })
        })
    }

    fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer> {
        for_float!(self, "balance", scores, T => {
            let counts = counts.as_slice::<i32>()?;
            self.per_sample::<T>(scores, samples, |sample, scores| scale * routing::balance(scores, counts_of(counts, sample, experts)))
        })
    }

    fn balance_grad(
        &self,
        dout: &Buffer,
        counts: &Buffer,
        dims: [usize; 2],
        scale: f64,
        dtype: DType,
    ) -> Result<Buffer> {
        let [tokens, experts] = dims;
        for_dtype!(self, "balance", dtype, T => {
            let (dout, counts) = (dout.as_slice::<f64>()?, counts.as_slice::<i32>()?);
            let of_sample = (tokens / dout.len().max(1) * experts).max(1);
            self.output::<T>(tokens * experts, |dscores| {
                for_each(dscores.chunks_mut(of_sample).zip(dout).enumerate(), |(sample, (dscores, dout))| {
                    routing::balance_grad(counts_of(counts, sample, experts), scale * dout, dscores);
                });
            })
        })
    }

    fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        for_float!(self, "z_loss", logits, T => {
            self.per_sample::<T>(logits, samples, |_, logits| routing::z_loss(logits, experts))
        })
    }

    fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer> {
        for_float!(self, "z_loss", logits, T => {
            let (logits, dout) = (logits.as_slice::<T>()?, dout.as_slice::<f64>()?);
            let of_sample = (logits.len() / dout.len().max(1)).max(1);
            self.output::<T>(logits.len(), |dlogits| {
                for_each(dlogits.chunks_mut(of_sample).zip(logits.chunks(of_sample)).zip(dout), |((dlogits, logits), &dout)| {
                    routing::z_loss_grad(logits, experts, dout, dlogits);
                });
            })
        })
    }

    fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        for_float!(self, "entropy", scores, T => {
            self.per_sample::<T>(scores, samples, |_, scores| routing::entropy(scores, experts))
        })
    }

    fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer> {
        let kept = kept.as_slice::<i32>()?;
        let of_sample = (kept.len() / samples.max(1)).max(1);
        self.output::<f64>(samples, |out| {
            out.fill(0.0);
            for (out, kept) in out.iter_mut().zip(kept.chunks(of_sample)) {
                *out = kept.iter().filter(|&&choice| choice < 0).count() as f64 / kept.len() as f64;
            }
        })
    }

    fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer> {
        let choices = choices.as_slice::<i32>()?;
        self.output::<f32>(experts, |loads| {
            let mut counts = vec![0; experts];
            permutation::counts(choices, &(0..experts), &mut counts);
            loads.iter_mut().zip(counts).for_each(|(load, count)| *load = count as f32);
        })
    }

    fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        for_float!(self, "jitter", x, T => {
            let (mask, region) = (dropout::Mask::from(mask), dropout::Region::from(mask));
            self.elements::<T, 1>([x], 1, |first, [x], y| dropout::jitter(mask, region, first, x, y))
        })
    }
}

/// The counts of a sample, or the common counts of all samples.
fn counts_of(counts: &[i32], sample: usize, experts: usize) -> &[i32] {
    if counts.len() == experts { counts } else { &counts[sample * experts..][..experts] }
}
