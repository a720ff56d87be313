use super::prelude::*;
use meshwork_tensor::kernel::{Draw, DropoutMask, Optim, Pick, Routing, Selected, Selection};

/// Most experts that a warp can choose from: 64 bits for each of its lanes.
const MAX_EXPERTS: usize = 2048;

/// Tokens of a sample per warp that counts choices.
const PART: usize = 256;

impl CudaDevice {
    fn few_experts(&self, op: &'static str, experts: usize) -> Result<()> {
        if experts <= MAX_EXPERTS {
            return Ok(());
        }
        let fault = format!("{experts} experts are more than the {MAX_EXPERTS} that the kernels choose among").into();
        Err(Error::Device { op, device: self.name().to_owned(), fault })
    }

    /// An f64 for each sample: the mean of the terms of its tokens, which a kernel computes from rows of x.
    fn sample_means(
        &self,
        op: &'static str,
        kernel: &'static str,
        x: &Buffer,
        samples: usize,
        experts: usize,
    ) -> Result<Buffer> {
        let tokens = x.count() / experts;
        if tokens == 0 {
            return self.zeros(DType::F64, samples);
        }
        let (out, terms) = (self.alloc(DType::F64, samples)?, self.scratch(DType::F64, tokens)?);
        launch!(self, op, kernel, [tokens, 0]; x, &terms, tokens, experts)?;
        launch!(self, op, "sample_means", [samples, 0]; &terms, &out, samples, tokens / samples)?;
        Ok(out)
    }
}

/// The stride between the counts of samples: 0 if all samples share the counts.
fn pitch(counts: &Buffer, experts: usize) -> usize {
    if counts.count() == experts { 0 } else { experts }
}

impl Routing for CudaDevice {
    fn select(&self, scores: &Buffer, bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        const OP: &str = "select";
        let Selection { samples, experts, k, groups, top_groups, group_best, capacity, second, .. } = *of;
        self.few_experts(OP, experts)?;
        let (tokens, width) = (scores.count() / experts, of.ranked());
        let each = tokens / samples.max(1);
        let ranked = self.alloc(DType::I32, tokens * width)?;
        let of_groups = self.scratch(DType::F32, tokens * groups)?;
        // If choices do not depend on other tokens, one kernel does everything.
        let (kept, weights) = (self.alloc(DType::I32, tokens * k)?, self.alloc(DType::F32, tokens * k)?);
        let (normalise, scale) = (pick.normalise, pick.scale as f32);
        let all_used = capacity.is_none() && second.is_none();
        launch!(self, OP, "route_rank", [tokens, 0];
            scores, bias, experts, groups, top_groups, group_best, width, &of_groups, &ranked, all_used.then_some(&kept),
            normalise, scale, &weights, tokens
        )?;
        if all_used {
            return Ok(Selected { chosen: ranked.clone(), routed: ranked, kept, weights });
        }
        let capacity = capacity.map_or(i64::MAX, |capacity| capacity as i64);
        let (key, first) = second.map_or(([0; 2], 0), |Draw { key, first }| (key.words(), first as i64));
        let draws = second.is_some();
        if width == k {
            let parts = each.div_ceil(PART).max(1);
            let counts = self.scratch(DType::I32, samples * k * parts * experts)?;
            let taken = self.scratch(DType::I32, samples * parts * experts)?;
            launch!(self, OP, "route_parts", [samples * k * parts, 0];
                scores, &ranked, experts, k, draws, key, first, PART, parts, &counts, samples, each
            )?;
            launch!(self, OP, "route_limit", [samples * parts, 0];
                scores, &ranked, experts, k, capacity, draws, key, first, PART, parts, &counts, &taken, &kept,
                normalise, scale, &weights, samples, each
            )?;
            return Ok(Selected { chosen: ranked.clone(), routed: ranked, kept, weights });
        }
        let mut taken = self.scratch(DType::I32, samples * experts)?;
        self.zero(&mut taken, 0..samples * experts)?;
        launch!(self, OP, "route_reroute", [samples, 0];
            scores, &ranked, experts, k, width, capacity, draws, key, first, &taken, &kept, samples, each
        )?;
        let (chosen, routed) = (self.alloc(DType::I32, tokens * k)?, self.alloc(DType::I32, tokens * k)?);
        launch!(self, OP, "route_first", [tokens, 0]; &ranked, &kept, width, k, &chosen, &routed, tokens)?;
        launch!(self, OP, "route_sort", [tokens, 0];
            scores, experts, &routed, &kept, k, normalise, scale, &weights, tokens
        )?;
        Ok(Selected { chosen, routed, kept, weights })
    }

    fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer> {
        let (count, kept) = (scores.count(), self.alloc(DType::I32, scores.count())?);
        let each = count / experts / samples.max(1);
        launch!(self, "select", "route_tokens", [count, 0]; scores, experts, capacity, &kept, count, each)?;
        Ok(kept)
    }

    fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        let Pick { experts, k, normalise, scale } = of;
        let tokens = scores.count() / experts;
        let out = self.alloc(DType::F32, tokens * k)?;
        launch!(self, "pick", "route_pick", [tokens, 0];
            scores, choices, experts, k, normalise, scale as f32, &out, tokens
        )?;
        Ok(out)
    }

    fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, of: Pick) -> Result<Buffer> {
        let Pick { experts, k, normalise, scale } = of;
        let (tokens, dscores) = (scores.count() / experts, self.alloc(DType::F32, scores.count())?);
        launch!(self, "pick", "route_pick_backward", [tokens, 0];
            scores, choices, dout, experts, k, normalise, scale as f32, &dscores, tokens
        )?;
        Ok(dscores)
    }

    fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer> {
        const OP: &str = "balance";
        let (out, sums) = (self.alloc(DType::F64, samples)?, self.scratch(DType::F64, samples * experts)?);
        let (each, pitch) = (scores.count() / experts / samples.max(1), pitch(counts, experts));
        launch!(self, OP, "balance_sums", [samples * experts, 0]; scores, &sums, samples, each, experts)?;
        launch!(self, OP, "balance_forward", [samples, 0]; &sums, counts, pitch, scale, &out, samples, experts)?;
        Ok(out)
    }

    fn balance_grad(
        &self,
        dout: &Buffer,
        counts: &Buffer,
        dims: [usize; 2],
        scale: f64,
        dtype: DType,
    ) -> Result<Buffer> {
        const OP: &str = "balance";
        let [tokens, experts] = dims;
        if dtype != DType::F32 {
            return Err(self.lacks(OP, dtype));
        }
        let (count, dscores) = (tokens * experts, self.alloc(DType::F32, tokens * experts)?);
        let (each, pitch) = (tokens / dout.count().max(1), pitch(counts, experts));
        launch!(self, OP, "balance_backward", [count, 0]; dout, counts, pitch, scale, &dscores, count, each, experts)?;
        Ok(dscores)
    }

    fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.sample_means("z_loss", "z_terms", logits, samples, experts)
    }

    fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer> {
        let (tokens, dlogits) = (logits.count() / experts, self.alloc(DType::F32, logits.count())?);
        let each = tokens / dout.count().max(1);
        launch!(self, "z_loss", "z_backward", [tokens, 0]; logits, dout, &dlogits, tokens, each, experts)?;
        Ok(dlogits)
    }

    fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.sample_means("entropy", "entropy_terms", scores, samples, experts)
    }

    fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer> {
        if kept.count() == 0 {
            return self.zeros(DType::F64, samples);
        }
        let out = self.alloc(DType::F64, samples)?;
        launch!(self, "unused", "route_unused", [samples, 0]; kept, &out, samples, kept.count() / samples)?;
        Ok(out)
    }

    fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer> {
        const OP: &str = "loads";
        let (count, loads) = (choices.count(), self.alloc(DType::F32, experts)?);
        let of = self.parts_of(count, 1);
        let parts = self.scratch(DType::I32, of.parts * experts)?;
        self.count_parts(OP, choices, of, &(0..experts), &parts)?;
        launch!(self, OP, "choice_loads", [experts, 0]; &parts, of.parts, &loads, experts)?;
        Ok(loads)
    }

    fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.times_drawn("jitter", x, mask, [1.0 - mask.p, 2.0 * mask.p])
    }
}
