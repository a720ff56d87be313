use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Reduction;
use crate::tape::Terms;
use meshwork_core::{Buffer, DType};

impl Reduction for Meta {
    fn sum(&self, x: &Buffer, [outer, _, inner]: [usize; 3], blocks: usize, _scale: f64) -> Result<Buffer> {
        self.alloc(x.dtype(), blocks * outer * inner)
    }

    fn spread(&self, dy: &Buffer, shape: [usize; 3], _scale: f64) -> Result<Buffer> {
        self.alloc(dy.dtype(), shape.iter().product())
    }

    fn softmax(&self, x: &Buffer, _n: usize) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn softmax_grad(&self, dy: &Buffer, _y: &Buffer, _n: usize) -> Result<Buffer> {
        self.alloc(dy.dtype(), dy.count())
    }

    fn squared_error(
        &self,
        _x: &Buffer,
        _targets: &Buffer,
        samples: usize,
        terms: Terms,
        _scale: f64,
    ) -> Result<Buffer> {
        self.alloc(DType::F64, terms.blocks * samples)
    }

    fn squared_error_grad(&self, x: &Buffer, _targets: &Buffer, _dloss: &Buffer, _scale: f64) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }
}
