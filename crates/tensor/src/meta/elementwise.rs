use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Elementwise, HostFn, Map, Zip};
use meshwork_core::Buffer;

impl Elementwise for Meta {
    fn map(&self, _f: Map, x: &Buffer) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn map_grad(&self, _f: Map, dy: &Buffer, _x: &Buffer) -> Result<Buffer> {
        self.alloc(dy.dtype(), dy.count())
    }

    fn zip(&self, _f: Zip, x: &Buffer, _y: &Buffer) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn host_map(&self, inputs: &[&Buffer], _f: &HostFn<'_>) -> Result<Option<Buffer>> {
        inputs.first().map(|x| self.alloc(x.dtype(), x.count())).transpose()
    }
}
