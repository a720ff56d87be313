use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{Draw, DropoutMask, Pick, Routing, Selected, Selection};
use meshwork_tensor::{Device, Error, Result};

/// Experts that a warp chooses among: bits of 64 for each of its lanes.
const MAX_EXPERTS: usize = 2048;

/// Tokens of a sample whose choices a warp counts.
const PART: usize = 256;

impl CudaDevice {
    fn few_experts(&self, op: &'static str, experts: usize) -> Result<()> {
        if experts <= MAX_EXPERTS {
            return Ok(());
        }
        let fault = format!("{experts} experts are more than the {MAX_EXPERTS} that the kernels choose among").into();
        Err(Error::Device { op, device: self.name().to_owned(), fault })
    }

    /// An f64 for each sample: the mean of the terms of its tokens, which a kernel makes of rows of x.
    fn sample_means(
        &self,
        op: &'static str,
        kernel: &'static str,
        x: &Buffer,
        samples: usize,
        experts: usize,
    ) -> Result<Buffer> {
        self.f32s(op, &[x])?;
        let tokens = x.count() / experts;
        if tokens == 0 {
            return self.zeros(DType::F64, samples);
        }
        let (out, terms) = (self.alloc(DType::F64, samples)?, self.scratch(DType::F64, tokens)?);
        let terms = self.place(op, &terms)?.into();
        let args = [self.place(op, x)?.into(), terms, tokens.into(), experts.into()];
        self.launch(op, kernel, [tokens, 0], &args)?;
        let args = [terms, self.place(op, &out)?.into(), samples.into(), (tokens / samples).into()];
        self.launch(op, "sample_means", [samples, 0], &args)?;
        Ok(out)
    }
}

/// From the counts of a sample to the next one's: 0 if all samples have the same.
fn pitch(counts: &Buffer, experts: usize) -> usize {
    if counts.count() == experts { 0 } else { experts }
}

impl Routing for CudaDevice {
    fn select(&self, scores: &Buffer, bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        const OP: &str = "select";
        let Selection { samples, experts, k, groups, top_groups, group_best, capacity, second, .. } = *of;
        self.f32s(OP, &[scores])?;
        self.f32s(OP, bias.as_slice())?;
        self.few_experts(OP, experts)?;
        let (tokens, width) = (scores.count() / experts, of.ranked());
        let each = tokens / samples.max(1);
        let ranked = self.alloc(DType::I32, tokens * width)?;
        let of_groups = self.scratch(DType::F32, tokens * groups)?;
        let from: Argument = self.place(OP, scores)?.into();
        let by_preference: Argument = self.place(OP, &ranked)?.into();
        // Where each choice is used whatever other tokens choose, one kernel does all.
        let (kept, weights) = (self.alloc(DType::I32, tokens * k)?, self.alloc(DType::F32, tokens * k)?);
        let used: Argument = self.place(OP, &kept)?.into();
        let weighed = [i32::from(pick.normalise).into(), (pick.scale as f32).into(), self.place(OP, &weights)?.into()];
        let all_used = capacity.is_none() && second.is_none();
        let args = [
            from,
            self.place_or_none(OP, bias)?,
            experts.into(),
            groups.into(),
            top_groups.into(),
            group_best.into(),
            width.into(),
            self.place(OP, &of_groups)?.into(),
            by_preference,
            if all_used { used } else { Address::NULL.into() },
        ];
        self.launch(OP, "route_rank", [tokens, 0], &[&args[..], &weighed, &[tokens.into()]].concat())?;
        if all_used {
            return Ok(Selected { chosen: ranked.clone(), routed: ranked, kept, weights });
        }
        let capacity = capacity.map_or(i64::MAX, |capacity| capacity as i64).into();
        let ([key0, key1], first) = second.map_or(([0; 2], 0), |Draw { key, first }| (key.words(), first as i64));
        let draw = [i32::from(second.is_some()).into(), key0.into(), key1.into(), first.into()];
        let chosen_of = [from, by_preference, experts.into(), k.into()];
        let of_samples = [samples.into(), each.into()];
        if width == k {
            let parts = each.div_ceil(PART).max(1);
            let counts = self.scratch(DType::I32, samples * k * parts * experts)?;
            let taken = self.scratch(DType::I32, samples * parts * experts)?;
            let cut = [PART.into(), parts.into(), self.place(OP, &counts)?.into()];
            let args = [&chosen_of[..], &draw, &cut, &of_samples].concat();
            self.launch(OP, "route_parts", [samples * k * parts, 0], &args)?;
            let into = [self.place(OP, &taken)?.into(), used];
            let args = [&chosen_of[..], &[capacity], &draw, &cut, &into, &weighed, &of_samples].concat();
            self.launch(OP, "route_limit", [samples * parts, 0], &args)?;
            return Ok(Selected { chosen: ranked.clone(), routed: ranked, kept, weights });
        }
        let taken = self.scratch(DType::I32, samples * experts)?;
        let at = self.place(OP, &taken)?;
        self.pool.driver.zero(self.pool.compute, at, 4 * samples * experts).map_err(self.failed(OP))?;
        let args = [&chosen_of[..], &[width.into(), capacity], &draw, &[at.into(), used], &of_samples].concat();
        self.launch(OP, "route_reroute", [samples, 0], &args)?;
        let (chosen, routed) = (self.alloc(DType::I32, tokens * k)?, self.alloc(DType::I32, tokens * k)?);
        let to: Argument = self.place(OP, &routed)?.into();
        let args = [by_preference, used, width.into(), k.into(), self.place(OP, &chosen)?.into(), to, tokens.into()];
        self.launch(OP, "route_first", [tokens, 0], &args)?;
        let args = [from, experts.into(), to, used, k.into()];
        self.launch(OP, "route_sort", [tokens, 0], &[&args[..], &weighed, &[tokens.into()]].concat())?;
        Ok(Selected { chosen, routed, kept, weights })
    }

    fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer> {
        const OP: &str = "select";
        self.f32s(OP, &[scores])?;
        let (count, kept) = (scores.count(), self.alloc(DType::I32, scores.count())?);
        let args = [
            self.place(OP, scores)?.into(),
            experts.into(),
            capacity.into(),
            self.place(OP, &kept)?.into(),
            count.into(),
            (count / experts / samples.max(1)).into(),
        ];
        self.launch(OP, "route_tokens", [count, 0], &args)?;
        Ok(kept)
    }

    fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        const OP: &str = "pick";
        self.f32s(OP, &[scores])?;
        let tokens = scores.count() / of.experts;
        let out = self.alloc(DType::F32, tokens * of.k)?;
        let args = [
            self.place(OP, scores)?.into(),
            self.place_or_none(OP, choices)?,
            of.experts.into(),
            of.k.into(),
            i32::from(of.normalise).into(),
            (of.scale as f32).into(),
            self.place(OP, &out)?.into(),
            tokens.into(),
        ];
        self.launch(OP, "route_pick", [tokens, 0], &args)?;
        Ok(out)
    }

    fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, of: Pick) -> Result<Buffer> {
        const OP: &str = "pick";
        self.f32s(OP, &[scores, dout])?;
        let (tokens, dscores) = (scores.count() / of.experts, self.alloc(DType::F32, scores.count())?);
        let args = [
            self.place(OP, scores)?.into(),
            self.place_or_none(OP, choices)?,
            self.place(OP, dout)?.into(),
            of.experts.into(),
            of.k.into(),
            i32::from(of.normalise).into(),
            (of.scale as f32).into(),
            self.place(OP, &dscores)?.into(),
            tokens.into(),
        ];
        self.launch(OP, "route_pick_backward", [tokens, 0], &args)?;
        Ok(dscores)
    }

    fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer> {
        const OP: &str = "balance";
        self.f32s(OP, &[scores])?;
        let out = self.alloc(DType::F64, samples)?;
        let sums = self.scratch(DType::F64, samples * experts)?;
        let each = scores.count() / experts / samples.max(1);
        let at: Argument = self.place(OP, &sums)?.into();
        let args = [self.place(OP, scores)?.into(), at, samples.into(), each.into(), experts.into()];
        self.launch(OP, "balance_sums", [samples * experts, 0], &args)?;
        let args = [
            at,
            self.place(OP, counts)?.into(),
            pitch(counts, experts).into(),
            scale.into(),
            self.place(OP, &out)?.into(),
            samples.into(),
            experts.into(),
        ];
        self.launch(OP, "balance_forward", [samples, 0], &args)?;
        Ok(out)
    }

    fn balance_grad(
        &self,
        dout: &Buffer,
        counts: &Buffer,
        tokens: usize,
        experts: usize,
        scale: f64,
        dtype: DType,
    ) -> Result<Buffer> {
        const OP: &str = "balance";
        if dtype != DType::F32 {
            return Err(self.lacks(OP, dtype));
        }
        let (count, dscores) = (tokens * experts, self.alloc(DType::F32, tokens * experts)?);
        let args = [
            self.doubles(OP, dout)?,
            self.place(OP, counts)?.into(),
            pitch(counts, experts).into(),
            scale.into(),
            self.place(OP, &dscores)?.into(),
            count.into(),
            (tokens / dout.count().max(1)).into(),
            experts.into(),
        ];
        self.launch(OP, "balance_backward", [count, 0], &args)?;
        Ok(dscores)
    }

    fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.sample_means("z_loss", "z_terms", logits, samples, experts)
    }

    fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer> {
        const OP: &str = "z_loss";
        self.f32s(OP, &[logits])?;
        let (tokens, dlogits) = (logits.count() / experts, self.alloc(DType::F32, logits.count())?);
        let args = [
            self.place(OP, logits)?.into(),
            self.doubles(OP, dout)?,
            self.place(OP, &dlogits)?.into(),
            tokens.into(),
            (tokens / dout.count().max(1)).into(),
            experts.into(),
        ];
        self.launch(OP, "z_backward", [tokens, 0], &args)?;
        Ok(dlogits)
    }

    fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.sample_means("entropy", "entropy_terms", scores, samples, experts)
    }

    fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer> {
        const OP: &str = "unused";
        if kept.count() == 0 {
            return self.zeros(DType::F64, samples);
        }
        let out = self.alloc(DType::F64, samples)?;
        let each = kept.count() / samples;
        let args = [self.place(OP, kept)?.into(), self.place(OP, &out)?.into(), samples.into(), each.into()];
        self.launch(OP, "route_unused", [samples, 0], &args)?;
        Ok(out)
    }

    fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer> {
        const OP: &str = "loads";
        let (count, loads) = (choices.count(), self.alloc(DType::F32, experts)?);
        let of = self.parts_of(count, 1);
        let parts = self.scratch(DType::I32, of.parts * experts)?;
        self.count_parts(OP, choices, of, &(0..experts), &parts)?;
        let (from, to) = (self.place(OP, &parts)?.into(), self.place(OP, &loads)?.into());
        self.launch(OP, "choice_loads", [experts, 0], &[from, of.parts.into(), to, experts.into()])?;
        Ok(loads)
    }

    fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.f32s("jitter", &[x])?;
        self.times_drawn("jitter", ["jitter"; 2], x, mask, [1.0 - mask.p, 2.0 * mask.p])
    }
}
