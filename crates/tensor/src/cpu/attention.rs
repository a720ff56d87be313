use super::kernels::{attention, dropout};
use super::{Cpu, for_float};
use crate::device::{Device, Work};
use crate::error::Result;
use crate::family::{Attention, AttentionDropout, AttentionShape};
use meshwork_core::Buffer;

fn dims(shape: AttentionShape) -> attention::Dims {
    let AttentionShape { batch, seq, heads, head_dim } = shape;
    attention::Dims { batch, seq, heads, head_dim }
}

fn mask(dropout: Option<&AttentionDropout>) -> Option<attention::Dropout> {
    dropout.map(|d| attention::Dropout {
        mask: dropout::Mask { key: d.key, p: d.p },
        first_sample: d.first_sample,
        first_head: d.first_head,
        global_heads: d.global_heads,
    })
}

impl Attention for Cpu {
    fn causal(
        &self,
        shape: AttentionShape,
        qkv: &Buffer,
        dropout: Option<&AttentionDropout>,
    ) -> Result<(Buffer, Buffer)> {
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        for_float!(self, "attention", qkv, T => {
            let qkv = qkv.as_slice::<T>()?;
            let mut lse = self.output::<T>(shape.batch * shape.heads * shape.seq, |_| {})?;
            let rows = lse.as_mut_slice::<T>()?;
            let out = self.output::<T>(qkv.len() / 3, |out| {
                attention::forward(self.precision, dims(shape), qkv, out, rows, mask(dropout));
            })?;
            Ok((out, lse))
        })
    }

    fn causal_grad(
        &self,
        shape: AttentionShape,
        dout: &Buffer,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        dropout: Option<&AttentionDropout>,
    ) -> Result<Buffer> {
        self.meter().add_flops(Work::Attention, shape.backward_flops());
        for_float!(self, "attention", qkv, T => {
            let saved = attention::Saved {
                qkv: qkv.as_slice::<T>()?,
                out: out.as_slice::<T>()?,
                lse: lse.as_slice::<T>()?,
            };
            let dout = dout.as_slice::<T>()?;
            self.output::<T>(qkv.count(), |dqkv| {
                attention::backward(self.precision, dims(shape), saved, dout, dqkv, mask(dropout));
            })
        })
    }
}
