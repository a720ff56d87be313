use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{DropoutMask, Pick, Routing, Selected, Selection};
use meshwork_core::{Buffer, DType};

impl Routing for Meta {
    fn select(&self, scores: &Buffer, _bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        let tokens = scores.count() / of.experts;
        let choices = || self.alloc(DType::I32, tokens * of.k);
        let ranked = self.alloc(DType::I32, tokens * of.ranked())?;
        let (kept, weights) = (choices()?, self.pick(scores, None, pick)?);
        let (chosen, routed) = match of.ranked() == of.k {
            true => (ranked.clone(), ranked),
            false => (choices()?, choices()?),
        };
        Ok(Selected { chosen, routed, kept, weights })
    }

    fn select_tokens(&self, scores: &Buffer, _samples: usize, _experts: usize, _capacity: usize) -> Result<Buffer> {
        self.alloc(DType::I32, scores.count())
    }

    fn pick(&self, scores: &Buffer, _choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        self.alloc(scores.dtype(), scores.count() / of.experts * of.k)
    }

    fn pick_grad(&self, scores: &Buffer, _choices: Option<&Buffer>, _dout: &Buffer, _of: Pick) -> Result<Buffer> {
        self.alloc(scores.dtype(), scores.count())
    }

    fn balance(
        &self,
        _scores: &Buffer,
        _counts: &Buffer,
        samples: usize,
        _experts: usize,
        _scale: f64,
    ) -> Result<Buffer> {
        self.alloc(DType::F64, samples)
    }

    fn balance_grad(
        &self,
        _dout: &Buffer,
        _counts: &Buffer,
        tokens: usize,
        experts: usize,
        _scale: f64,
        dtype: DType,
    ) -> Result<Buffer> {
        self.alloc(dtype, tokens * experts)
    }

    fn z_loss(&self, _logits: &Buffer, samples: usize, _experts: usize) -> Result<Buffer> {
        self.alloc(DType::F64, samples)
    }

    fn z_loss_grad(&self, logits: &Buffer, _dout: &Buffer, _experts: usize) -> Result<Buffer> {
        self.alloc(logits.dtype(), logits.count())
    }

    fn entropy(&self, _scores: &Buffer, samples: usize, _experts: usize) -> Result<Buffer> {
        self.alloc(DType::F64, samples)
    }

    fn unused(&self, _kept: &Buffer, samples: usize) -> Result<Buffer> {
        self.alloc(DType::F64, samples)
    }

    fn loads(&self, _choices: &Buffer, experts: usize) -> Result<Buffer> {
        self.alloc(DType::F32, experts)
    }

    fn jitter(&self, x: &Buffer, _mask: &DropoutMask) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }
}
