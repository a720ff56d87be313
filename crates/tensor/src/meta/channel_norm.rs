use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{ChannelNorm, Groups, MeanVariance, Statistics};
use meshwork_core::Buffer;

impl Groups {
    fn parts(&self) -> usize {
        self.row_blocks().parts(self.blocks * self.rows)
    }
}

impl ChannelNorm for Meta {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let _parts = self.alloc(x.dtype(), groups.channels * groups.parts())?;
        let _sums = self.alloc(x.dtype(), groups.blocks * groups.channels)?;
        let count = groups.blocks * groups.groups;
        Ok((self.alloc(x.dtype(), count)?, self.alloc(x.dtype(), count)?))
    }

    fn normalise(&self, _groups: Groups, x: &Buffer, _by: MeanVariance<'_>, _affine: [&Buffer; 2]) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn normalise_grad(
        &self,
        groups: Groups,
        _dy: &Buffer,
        x: &Buffer,
        _by: MeanVariance<'_>,
        _statistics: Statistics,
        _gamma: &Buffer,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let _parts = self.alloc(x.dtype(), 2 * groups.channels * groups.parts())?;
        let vectors = groups.blocks * groups.channels;
        let (dgamma, dbeta) = (self.alloc(x.dtype(), vectors)?, self.alloc(x.dtype(), vectors)?);
        Ok((self.alloc(x.dtype(), x.count())?, dgamma, dbeta))
    }
}
