use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Compression;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::{Buffer, DType};

impl Compression for Meta {
    fn pack(
        &self,
        _scheme: &Scheme,
        _shape: Shape,
        _draws: Draws,
        _x: &Buffer,
        _message: &mut Buffer,
        _at: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn unpack(
        &self,
        _scheme: &Scheme,
        _shape: Shape,
        _message: &Buffer,
        _fold: Fold,
        _out: &mut Buffer,
        _at: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn take(&self, sparse: &Sparse, shape: Shape, _indices: &Buffer, _x: &Buffer) -> Result<Buffer> {
        self.alloc(DType::F32, sparse.count(shape))
    }

    fn put(&self, _sparse: &Sparse, shape: Shape, _indices: &Buffer, _values: &Buffer) -> Result<Buffer> {
        self.alloc(DType::F32, shape.len())
    }

    fn outgoing(&self, _feedback: Feedback, x: &Buffer, _first: bool, _sender: &mut Sender<Buffer>) -> Result<Buffer> {
        self.alloc(DType::F32, x.count())
    }

    fn sent(&self, _feedback: Feedback, _target: &Buffer, _sent: &Buffer, _sender: &mut Sender<Buffer>) -> Result<()> {
        Ok(())
    }

    fn left_factor(
        &self,
        _of: PowerSgd,
        _shape: Shape,
        _draws: Draws,
        _m: &Buffer,
        _q: &mut Buffer,
        _p: &mut Buffer,
    ) -> Result<()> {
        Ok(())
    }

    fn right_factor(&self, _of: PowerSgd, _shape: Shape, _m: &Buffer, _p: &mut Buffer, _q: &mut Buffer) -> Result<()> {
        Ok(())
    }

    fn join(
        &self,
        _of: PowerSgd,
        _shape: Shape,
        _factors: &[Buffer; 2],
        _among: usize,
        _out: &mut Buffer,
    ) -> Result<()> {
        Ok(())
    }
}
