use super::{CudaDevice, rows::Cut};
use crate::driver::Argument;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{ChannelNorm, Groups, MeanVariance, Statistics};
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Device, Result};

const OP: &str = "channel_norm";

/// Extents as the kernels of `channel_norm.cu` take them.
fn extents(groups: Groups) -> [Argument; 3] {
    [groups.rows, groups.groups, groups.channels].map(Argument::from)
}

impl CudaDevice {
    /// The rows of all blocks, each summed by itself.
    fn cut_blocks(&self, groups: Groups) -> Result<Cut> {
        self.cut(groups.blocks * groups.rows, RowBlocks { samples: groups.blocks, slices: 1 })
    }

    fn places(&self, buffers: &[&Buffer]) -> Result<Vec<Argument>> {
        buffers.iter().map(|buffer| Ok(self.place(OP, buffer)?.into())).collect()
    }

    /// The sum of each group of channels over `members`.
    fn group_means(&self, groups: Groups, sums: &Buffer) -> Result<Buffer> {
        let count = groups.blocks * groups.groups;
        let means = self.alloc(DType::F32, count)?;
        let mut args: Vec<Argument> = vec![self.place(OP, sums)?.into(), (groups.members() as f32).into()];
        args.extend::<[Argument; 4]>([
            self.place(OP, &means)?.into(),
            count.into(),
            groups.groups.into(),
            groups.channels.into(),
        ]);
        self.launch(OP, "channel_means", [count, 0], &args)?;
        Ok(means)
    }
}

impl ChannelNorm for CudaDevice {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.f32s(OP, &[x])?;
        let (cut, n) = (self.cut_blocks(groups)?, groups.channels);
        let parts = self.sum_rows(OP, x, &cut, n)?;
        let sums = self.sum_parts(OP, &parts, &cut, n)?;
        let mean = self.group_means(groups, &sums)?;
        drop(sums);
        let mut args = self.places(&[x, &mean])?;
        args.extend::<[Argument; 3]>([
            self.starts(OP, &cut)?.into(),
            self.place(OP, &parts)?.into(),
            cut.parts().into(),
        ]);
        args.extend(extents(groups));
        self.launch(OP, "channel_squares_parts", [cut.parts(), n], &args)?;
        let sums = self.sum_parts(OP, &parts, &cut, n)?;
        let variance = self.group_means(groups, &sums)?;
        Ok((mean, variance))
    }

    fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer> {
        let [gamma, beta] = affine;
        self.f32s(OP, &[x, by.mean, by.variance, gamma, beta])?;
        let (y, count) = (self.alloc(DType::F32, x.count())?, x.count());
        let mut args = self.places(&[x, by.mean, by.variance])?;
        args.push((by.eps as f32).into());
        args.extend(self.places(&[gamma, beta, &y])?);
        args.push(count.into());
        args.extend(extents(groups));
        self.launch(OP, "channel_norm_forward", [count / groups.channels.max(1), groups.channels], &args)?;
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
        self.f32s(OP, &[dy, x, by.mean, by.variance, gamma])?;
        let (cut, n, eps) = (self.cut_blocks(groups)?, groups.channels, Argument::from(by.eps as f32));
        let parts = self.alloc(DType::F32, 2 * n * cut.parts())?;
        let [dgammas, dbetas] = [parts.slice(0..n * cut.parts())?, parts.slice(n * cut.parts()..2 * n * cut.parts())?];
        let stats = [&self.places(&[dy, x, by.mean, by.variance])?[..], &[eps]].concat();
        let mut args = stats.clone();
        args.push(self.starts(OP, &cut)?.into());
        args.extend(self.places(&[&dgammas, &dbetas])?);
        args.push(cut.parts().into());
        args.extend(extents(groups));
        self.launch(OP, "channel_norm_backward_parts", [cut.parts(), n], &args)?;
        let [dgamma, dbeta] = [self.sum_parts(OP, &dgammas, &cut, n)?, self.sum_parts(OP, &dbetas, &cut, n)?];

        let scale = match statistics {
            Statistics::OfInput => (1.0 / groups.members() as f64) as f32,
            Statistics::Given => 0.0,
        };
        let of_groups = groups.blocks * groups.groups;
        let [g, gx] = [self.scratch(DType::F32, of_groups)?, self.scratch(DType::F32, of_groups)?];
        for (sums, means) in [(&dbeta, &g), (&dgamma, &gx)] {
            let mut args = self.places(&[sums, gamma])?;
            args.extend::<[Argument; 3]>([scale.into(), self.place(OP, means)?.into(), of_groups.into()]);
            args.extend([groups.groups, n].map(Argument::from));
            self.launch(OP, "channel_gradient_means", [of_groups, 0], &args)?;
        }
        let (dx, count) = (self.alloc(DType::F32, x.count())?, x.count());
        let mut args = stats;
        args.extend(self.places(&[gamma, &g, &gx, &dx])?);
        args.push(count.into());
        args.extend(extents(groups));
        self.launch(OP, "channel_norm_backward", [count / n.max(1), n], &args)?;
        Ok((dx, dgamma, dbeta))
    }
}
