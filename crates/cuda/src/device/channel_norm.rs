use super::prelude::*;
use super::rows::Cut;
use meshwork_tensor::kernel::{ChannelNorm, Groups, MeanVariance, Statistics};

const OP: &str = "channel_norm";

/// Extents as arguments of the kernels in `channel_norm.cu`.
fn extents(Groups { rows, groups, channels, .. }: Groups) -> [usize; 3] {
    [rows, groups, channels]
}

impl CudaDevice {
    /// Cuts the rows into blocks that are summed separately.
    fn cut_blocks(&self, groups: Groups) -> Result<Cut> {
        self.cut(groups.blocks * groups.rows, RowBlocks { samples: groups.blocks, slices: 1 })
    }

    /// The sum over each group of channels, divided by `members`.
    fn group_means(&self, groups: Groups, sums: &Buffer) -> Result<Buffer> {
        let count = groups.blocks * groups.groups;
        let means = self.alloc(DType::F32, count)?;
        launch!(self, OP, "channel_means", [count, 0];
            sums, groups.members() as f32, &means, count, groups.groups, groups.channels
        )?;
        Ok(means)
    }
}

impl ChannelNorm for CudaDevice {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.f32s(OP, &[x])?;
        let (cut, n) = (self.cut_blocks(groups)?, groups.channels);
        let sums = self.sum_rows(OP, x, &cut, n)?;
        let mean = self.group_means(groups, &self.sum_parts(OP, &sums, &cut, n)?)?;
        launch!(self, OP, "channel_squares_parts", [cut.parts(), n];
            x, &mean, self.starts(OP, &cut)?, &sums, cut.parts(), extents(groups)
        )?;
        let variance = self.group_means(groups, &self.sum_parts(OP, &sums, &cut, n)?)?;
        Ok((mean, variance))
    }

    fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer> {
        let [gamma, beta] = affine;
        let (y, count) = (self.alloc(DType::F32, x.count())?, x.count());
        launch!(self, OP, "channel_norm_forward", [count / groups.channels.max(1), groups.channels];
            x, by.mean, by.variance, by.eps as f32, gamma, beta, &y, count, extents(groups)
        )?;
        Ok(y)
    }

    fn normalise_grad(
        &self,
        groups: Groups,
        dy: &Buffer,
        x: &Buffer,
        by: MeanVariance<'_>,
        statistics: Statistics,
        gamma: &Buffer,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let (cut, n, eps) = (self.cut_blocks(groups)?, groups.channels, by.eps as f32);
        let (parts, starts) = (cut.parts(), self.starts(OP, &cut)?);
        let sums = self.alloc(DType::F32, 2 * n * parts)?;
        let [dgammas, dbetas] = [sums.slice(0..n * parts)?, sums.slice(n * parts..2 * n * parts)?];
        launch!(self, OP, "channel_norm_backward_parts", [parts, n];
            dy, x, by.mean, by.variance, eps, starts, &dgammas, &dbetas, parts, extents(groups)
        )?;
        let (dgamma, dbeta) = self.sum_both_parts(OP, &sums, &cut, n)?;

        let scale = match statistics {
            Statistics::OfInput => (1.0 / groups.members() as f64) as f32,
            Statistics::Given => 0.0,
        };
        let of_groups = groups.blocks * groups.groups;
        let [g, gx] = [self.scratch(DType::F32, of_groups)?, self.scratch(DType::F32, of_groups)?];
        for (sums, means) in [(&dbeta, &g), (&dgamma, &gx)] {
            launch!(self, OP, "channel_gradient_means", [of_groups, 0];
                sums, gamma, scale, means, of_groups, groups.groups, n
            )?;
        }
        let (dx, count) = (self.alloc(DType::F32, x.count())?, x.count());
        launch!(self, OP, "channel_norm_backward", [count / n.max(1), n];
            dy, x, by.mean, by.variance, eps, gamma, &g, &gx, &dx, count, extents(groups)
        )?;
        Ok((dx, dgamma, dbeta))
    }
}
