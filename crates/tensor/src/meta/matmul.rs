use super::Meta;
use crate::device::{Device, Work};
use crate::error::Result;
use crate::family::{Gemm, Matmul};
use meshwork_core::Buffer;

impl Matmul for Meta {
    fn gemm(&self, spec: Gemm, _a: &Buffer, _b: &Buffer, _c: &mut Buffer, _start: usize) -> Result<()> {
        self.meter().add_flops(Work::Matmul, spec.flops());
        Ok(())
    }
}
