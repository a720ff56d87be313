use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Window, Windows};
use meshwork_core::Buffer;

impl Window for Meta {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.alloc(x.dtype(), windows.rows() * windows.patch())
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        self.alloc(dpatches.dtype(), windows.samples * windows.pixels())
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let (count, places) = (windows.rows() * windows.channels, windows.place_dtype());
        let places = self.alloc(places, count)?;
        Ok((self.alloc(x.dtype(), count)?, places))
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, _places: &Buffer) -> Result<Buffer> {
        self.alloc(dy.dtype(), windows.samples * windows.pixels())
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.alloc(x.dtype(), windows.rows() * windows.channels)
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        self.alloc(dy.dtype(), windows.samples * windows.pixels())
    }
}
