//! Batch norm and group norm of images `[samples, height, width, channels]`:
//! `y = (x - mean) / √(variance + eps) · gamma + beta`, with gamma and beta per channel. Beta may be left
//! out: `None` is zero.
//!
//! *Group norm* takes mean and variance over each sample's pixels and a group of channels: samples are independent, so
//! the numbers do not depend on the mesh or the micro-batches.
//!
//! *Batch norm* takes them per channel over the samples and pixels of this tape, that is, of one micro-batch on one
//! rank (GPipe, section 2: "the sufficient statistics of inputs during training are computed over each micro-batch").
//! Unlike everything else here it therefore depends on the number of micro-batches and on dp, and canonical numerics
//! refuse it. It also returns its [`Moments`], for the moving averages that replace them in evaluation.

use super::bias::or_zeros;
use super::images::whole_images;
use super::prelude::*;
use crate::kernel::{Groups, MeanVariance, Statistics};
use crate::tape::RowBlocks;
use meshwork_core::Buffer;

/// Mean and variance of each channel; the variance divides by the number of elements.
#[derive(Clone, Debug)]
pub struct Moments {
    /// `[channels]`.
    pub mean: Tensor,
    /// `[channels]`.
    pub variance: Tensor,
}

#[derive(Debug)]
struct ChannelNorm {
    name: &'static str,
    groups: Groups,
    moments: [Buffer; 2],
    statistics: Statistics,
    eps: f64,
    /// The tokens of the samples, if each sample has a block.
    tokens: Option<Tokens>,
    affine_shape: Shape,
    /// Whether there is a beta.
    shifted: bool,
}

impl Var {
    /// Batch norm of `[n, h, w, c]` over the samples and pixels of this tape, on this rank. Also returns the statistics
    /// that it used.
    pub fn batch_norm<'a>(&self, gamma: &Var, beta: impl Into<Option<&'a Var>>, eps: f64) -> Result<(Var, Moments)> {
        if self.tape().reduction_blocks().is_some() {
            return Err(Error::NotCanonical {
                op: "batch_norm",
                problem: "its statistics are those of one micro-batch on one rank, so they depend on the mesh",
                valid: "group_norm, which takes each sample by itself, or fast numerics",
            });
        }
        let groups = batches("batch_norm", self.shape())?;
        self.tape().mixes_samples();
        let beta = beta.into();
        let op = self.by_its_own("batch_norm", groups, None, (gamma, beta), eps)?;
        let [mean, variance] = op.moments.clone();
        let vector = |buffer| Tensor::from_buffer(self.tape().device(), buffer, [groups.channels]);
        let moments = Moments { mean: vector(mean)?, variance: vector(variance)? };
        Ok((self.scale_and_shift(op, gamma, beta)?, moments))
    }

    /// The same with given statistics, which are constants: batch norm in evaluation.
    pub fn batch_norm_with<'a>(
        &self,
        gamma: &Var,
        beta: impl Into<Option<&'a Var>>,
        moments: &Moments,
        eps: f64,
    ) -> Result<Var> {
        let beta = beta.into();
        let groups = batches("batch_norm_with", self.shape())?;
        let given = [&moments.mean, &moments.variance];
        if given.iter().any(|tensor| tensor.count() != groups.channels) {
            let problem = format!("mean and variance have a number for each of {} channels", groups.channels);
            let shapes = [self.tensor(), &moments.mean, &moments.variance].map(|tensor| tensor.shape().to_vec()).into();
            return Err(Error::Shape { op: "batch_norm_with", problem, shapes });
        }
        let op = ChannelNorm {
            name: "batch_norm_with",
            groups,
            moments: given.map(|tensor| tensor.buffer().clone()),
            statistics: Statistics::Given,
            eps,
            tokens: None,
            affine_shape: gamma.shape(),
            shifted: beta.is_some(),
        };
        self.scale_and_shift(op, gamma, beta)
    }

    /// Group norm of `[n, h, w, c]` in `groups` groups of channels, which must divide c. One group is layer norm over a
    /// sample, c groups are instance norm.
    pub fn group_norm<'a>(
        &self,
        groups: usize,
        gamma: &Var,
        beta: impl Into<Option<&'a Var>>,
        eps: f64,
    ) -> Result<Var> {
        let beta = beta.into();
        let all = batches("group_norm", self.shape())?;
        if groups == 0 || !all.channels.is_multiple_of(groups) {
            let problem = format!("{groups} groups do not divide {} channels", all.channels);
            return Err(Error::Shape { op: "group_norm", problem, shapes: vec![self.shape().to_vec()] });
        }
        let samples = self.shape()[0];
        let each = Groups { blocks: samples, rows: all.rows / samples, groups, ..all };
        let op = self.by_its_own("group_norm", each, Some(Tokens::new(self, 1)), (gamma, beta), eps)?;
        self.scale_and_shift(op, gamma, beta)
    }

    /// The operation with the statistics of this value itself.
    fn by_its_own(
        &self,
        name: &'static str,
        groups: Groups,
        tokens: Option<Tokens>,
        (gamma, beta): (&Var, Option<&Var>),
        eps: f64,
    ) -> Result<ChannelNorm> {
        let norm = self.tape().device().channel_norm();
        let moments = norm.and_then(|norm| norm.moments(groups, self.tensor().buffer()));
        let moments = moments.map_err(|error| error.during(name))?.into();
        let (statistics, affine_shape, shifted) = (Statistics::OfInput, gamma.shape(), beta.is_some());
        Ok(ChannelNorm { name, groups, moments, statistics, eps, tokens, affine_shape, shifted })
    }

    fn scale_and_shift(&self, op: ChannelNorm, gamma: &Var, beta: Option<&Var>) -> Result<Var> {
        match beta {
            Some(beta) => self.tape().apply(op, &[self, gamma, beta]),
            None => self.tape().apply(op, &[self, gamma]),
        }
    }
}

/// One block of all samples, a group for each channel.
fn batches(op: &'static str, shape: Shape) -> Result<Groups> {
    match shape[..] {
        [samples, height, width, channels] if shape.count() > 0 => {
            Ok(Groups { blocks: 1, rows: samples * height * width, channels, groups: channels })
        }
        _ => {
            let problem = "x must be images [samples, height, width, channels]".to_owned();
            Err(Error::Shape { op, problem, shapes: vec![shape.to_vec()] })
        }
    }
}

fn normalise(x: &Tensor, gamma: &Tensor, beta: Option<Tensor>, groups: Groups, by: MeanVariance<'_>) -> Result<Tensor> {
    let beta = or_zeros(beta, gamma, gamma.shape())?;
    let y = x.device().channel_norm()?.normalise(groups, x.buffer(), by, [gamma.buffer(), beta.buffer()])?;
    Tensor::from_buffer(x.device(), y, x.shape())
}

impl Op for ChannelNorm {
    fn name(&self) -> &'static str {
        self.name
    }

    fn operands(&self) -> &'static [&'static str] {
        if self.shifted { &["x", "gamma", "beta"] } else { &["x", "gamma"] }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        whole_images(self.name, operands[0], &operands[1..])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        vec![("eps", self.eps)]
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, gamma, beta) = (inputs[0], inputs[1], inputs.get(2).map(|&beta| beta.clone()));
        cx.require(
            inputs[1..].iter().all(|vector| vector.shape()[..] == [self.groups.channels]),
            "gamma and beta are vectors over the channels of x",
        )?;
        (0..inputs.len()).try_for_each(|input| cx.save_input(input))?;
        let (groups, [mean, variance], eps) = (self.groups, self.moments.clone(), self.eps);
        cx.recipe(move |saved| {
            let by = MeanVariance { mean: &mean, variance: &variance, eps };
            let beta = saved.get(2).map(|beta| beta.restore()).transpose()?;
            normalise(&saved[0].restore()?, &saved[1].restore()?, beta, groups, by)
        });
        normalise(x, gamma, beta, groups, self.by())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, gamma, device) = (cx.saved(0)?, cx.saved(1)?, grad.device());
        let (dx, dgamma, dbeta) = device.channel_norm()?.normalise_grad(
            self.groups,
            grad.buffer(),
            x.buffer(),
            self.by(),
            self.statistics,
            gamma.buffer(),
        )?;
        let mut all = vec![Some(Tensor::from_buffer(device, dx, x.shape())?).filter(|_| cx.needs(0))];
        for (i, sums) in [(1, dgamma), (2, dbeta)].into_iter().take(1 + usize::from(self.shifted)) {
            all.push(if cx.needs(i) { self.affine_grad(cx, i, sums)? } else { None });
        }
        Ok(all)
    }
}

impl ChannelNorm {
    fn by(&self) -> MeanVariance<'_> {
        let [mean, variance] = &self.moments;
        MeanVariance { mean, variance, eps: self.eps }
    }

    /// The gradient of gamma or beta from the gradients of the blocks.
    fn affine_grad(&self, cx: &mut Backward<'_>, i: usize, sums: Buffer) -> Result<Option<Tensor>> {
        let device = cx.tape().device().clone();
        let Some(tokens) = self.tokens else {
            return Ok(Some(Tensor::from_buffer(&device, sums, self.affine_shape)?));
        };
        // In canonical numerics each sample is a block.
        let blocks = RowBlocks { slices: 1, ..cx.row_blocks(i, tokens) };
        let sums = match blocks {
            RowBlocks::WHOLE => device.pointwise()?.bias_grad(&sums, self.groups.channels, blocks)?,
            _ => sums,
        };
        cx.sum_blocks(i, sums, self.affine_shape, tokens, blocks)
    }
}
