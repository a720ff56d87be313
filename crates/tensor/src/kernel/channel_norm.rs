//! Norms over channels that come last: batch norm and group norm are one operation over `[blocks, rows, channels]`.
//!
//! Each group of channels of each block has its own mean and variance:
//! `y = (x - mean) / √(variance + eps) · gamma + beta`. Batch norm has one block, all samples, and groups of one
//! channel; group norm has a block per sample.

use super::table::*;
use crate::tape::RowBlocks;
use meshwork_core::Buffer;

/// Extents of `x [blocks, rows, channels]`, and the number of groups in which the channels are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Blocks, each with its own statistics.
    pub blocks: usize,
    /// Rows of a block.
    pub rows: usize,
    /// Channels of a row.
    pub channels: usize,
    /// Groups of equally many consecutive channels.
    pub groups: usize,
}

impl Groups {
    /// Elements that share a mean.
    pub fn members(&self) -> usize {
        self.rows * (self.channels / self.groups.max(1))
    }

    /// Elements of one vector of channels for each block.
    pub(crate) fn vectors(&self) -> usize {
        self.blocks * self.channels
    }

    /// Parts in which the rows of all blocks are summed.
    pub(crate) fn parts(&self) -> usize {
        self.row_blocks().parts(self.blocks * self.rows)
    }

    /// The rows of all blocks: each is summed by itself.
    pub fn row_blocks(&self) -> RowBlocks {
        RowBlocks { samples: self.blocks, slices: 1 }
    }
}

/// The statistics used for normalisation, `[blocks, groups]` each.
#[derive(Clone, Copy, Debug)]
pub struct MeanVariance<'a> {
    /// Means.
    pub mean: &'a Buffer,
    /// Variances.
    pub variance: &'a Buffer,
    /// Added to the variance.
    pub eps: f64,
}

/// The source of the statistics, which determines the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistics {
    /// From x itself.
    OfInput,
    /// Given from outside, as constants.
    Given,
}

kernels! {
    /// The norm in separate steps, so that its statistics can be kept, and replaced by others.
    pub trait ChannelNorm at channel_norm {
        /// (mean, variance), `[blocks, groups]` each; the variance divides by the number of elements. Per channel, rows
        /// are summed in order in parts of 64, the parts are summed in order, then the channels of a group in order.
        fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)>
            | profile(Norm: x), halves(wide x),
              meta(scratch x => groups.channels * groups.parts(); scratch x => groups.vectors();
                   x => groups.blocks * groups.groups, x => groups.blocks * groups.groups);

        /// y; `affine` are gamma and beta.
        fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer>
            | profile(Norm: x, by.mean, by.variance, affine[0], affine[1]), halves({
                  let [mean, variance, gamma, beta] = &self.all_wide([by.mean, by.variance, affine[0], affine[1]])?;
                  let by = MeanVariance { mean, variance, ..by };
                  let y = self.inner.channel_norm()?.normalise(groups, &self.wide(x)?, by, [gamma, beta])?;
                  self.rounded(y, x.dtype())
              }), meta(like x);

        /// (dx, dgamma, dbeta). dgamma and dbeta are `[blocks, channels]`, summed over the rows of each block as in
        /// [`moments`](Self::moments).
        fn normalise_grad(
            &self,
            groups: Groups,
            dy: &Buffer,
            x: &Buffer,
            by: MeanVariance<'_>,
            statistics: Statistics,
            gamma: &Buffer,
        ) -> Result<(Buffer, Buffer, Buffer)>
            | profile(Norm: dy, x, by.mean, by.variance, gamma), halves({
                  let dtype = x.dtype();
                  let [dy, x, mean, variance, gamma] = &self.all_wide([dy, x, by.mean, by.variance, gamma])?;
                  let by = MeanVariance { mean, variance, ..by };
                  self.rounded(self.inner.channel_norm()?.normalise_grad(groups, dy, x, by, statistics, gamma)?, dtype)
              }),
              meta(scratch x => 2 * groups.channels * groups.parts();
                   x => x.count(), x => groups.vectors(), x => groups.vectors());
    }
}
