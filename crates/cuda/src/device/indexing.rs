use super::prelude::*;
use meshwork_tensor::kernel::{Indexing, Picks};

impl Indexing for CudaDevice {
    fn argmax(&self, x: &Buffer, [outer, extent, inner]: [usize; 3]) -> Result<Buffer> {
        let (out, count) = (self.alloc(DType::I32, outer * inner)?, outer * inner);
        launch!(self, "argmax", "argmax_dim", [count, 0]; x, &out, count, extent, inner)?;
        Ok(out)
    }

    fn pick(&self, x: &Buffer, index: &Buffer, picks: Picks) -> Result<Buffer> {
        let checked = if picks.each { Checked::TakeAlongDim } else { Checked::IndexSelect };
        self.check_ids(checked, index, picks.extent, false)?;
        let (out, count) = (self.alloc(DType::F32, picks.taken())?, picks.taken());
        launch!(self, picks.op(), "pick_forward", [count, 0];
            x, index, &out, count, picks.extent, picks.inner, picks.count, picks.each
        )?;
        Ok(out)
    }

    fn pick_grad(&self, dy: &Buffer, index: &Buffer, picks: Picks) -> Result<Buffer> {
        let (dx, count) = (self.alloc(DType::F32, picks.from())?, picks.from());
        launch!(self, picks.op(), "pick_backward", [count, 0];
            dy, index, &dx, count, picks.extent, picks.inner, picks.count, picks.each
        )?;
        Ok(dx)
    }
}
