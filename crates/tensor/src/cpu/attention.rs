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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Precision;
    use crate::random::{fill_normal, key};

    /// Both directions compute in the precision of the device, the gradient from the same saved results.
    #[test]
    fn the_precision_is_that_of_the_device() -> Result<()> {
        let shape = AttentionShape { batch: 1, seq: 9, heads: 2, head_dim: 5 };
        let [f32, bf16] = [Precision::F32, Precision::Bf16].map(Cpu::new);
        let qkv = f32.output::<f32>(270, |x| fill_normal(key(0, "qkv"), 0, x))?;
        let dout = f32.output::<f32>(90, |x| fill_normal(key(0, "dout"), 0, x))?;
        let (out, lse) = f32.causal(shape, &qkv, None)?;
        let results = [&f32, &bf16].map(|device| {
            let (there, _) = device.causal(shape, &qkv, None)?;
            let back = device.causal_grad(shape, &dout, &qkv, &out, &lse, None)?;
            Ok([there.as_slice::<f32>()?.to_vec(), back.as_slice::<f32>()?.to_vec()])
        });
        let [exact, rounded]: [Result<[Vec<f32>; 2]>; 2] = results;
        for (exact, rounded) in exact?.iter().zip(rounded?) {
            let error = exact.iter().zip(&rounded).map(|(exact, rounded)| (exact - rounded).abs()).fold(0.0, f32::max);
            assert!((1e-4..0.1).contains(&error), "{error} off");
        }
        Ok(())
    }
}
