//! Attention by all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509): each rank computes all tokens of some heads.

use crate::heads::{Heads, named};
use meshwork_core::{Axes, DType};
use meshwork_tensor::kernel::AttentionShape;
use meshwork_tensor::op::{Exchange, Exchanged};
use meshwork_tensor::{Result, Tensor};

/// Attention by all-to-all over some axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllToAll {
    axes: Axes,
}

impl AllToAll {
    /// Over the ranks of `axes`.
    pub fn over(axes: impl Into<Axes>) -> Self {
        Self { axes: axes.into() }
    }

    fn heads<'a>(&self, call: &Exchanged<'a>, stored: DType) -> Result<Heads<'a>> {
        let degree = call.tape.rank().group_over(&self.axes).size();
        let advice = |most| format!("use {}={most}, or all_gather", named(self.axes));
        Heads::new(call, (self.name(), self.axes), (degree, call.order.clone()), stored, advice)
    }
}

impl Exchange for AllToAll {
    fn name(&self) -> &'static str {
        "all_to_all_attention"
    }

    fn axes(&self) -> Axes {
        self.axes
    }

    fn attend(&self, call: &Exchanged<'_>, q: &Tensor, kv: &Tensor) -> Result<(Tensor, [Tensor; 4])> {
        let (heads, mut dropout) = (self.heads(call, kv.dtype())?, None);
        let (shape, masks) = (heads.share.shape, heads.masks(call, &mut dropout));
        let (whole_q, whole_kv) = (heads.queries(q)?, heads.keys(kv)?);
        let kernel = call.device.attention()?;
        let (out, lse) = kernel.grouped(shape, whole_q.buffer(), whole_kv.buffer(), masks)?;
        let AttentionShape { batch, seq, heads: held, .. } = shape.queries;
        let lse = Tensor::from_buffer(call.device, lse, [batch, held, seq])?;
        let out = Tensor::from_buffer(call.device, out, whole_q.shape())?;
        Ok((heads.queries_back(&out)?, [whole_q, whole_kv, out, lse]))
    }

    fn gradients(&self, call: &Exchanged<'_>, dout: &Tensor, saved: [Tensor; 4]) -> Result<(Tensor, Tensor)> {
        let (heads, mut dropout) = (self.heads(call, saved[1].dtype())?, None);
        let (shape, masks) = (heads.share.shape, heads.masks(call, &mut dropout));
        let whole = heads.queries(dout)?;
        let [q, kv, out, lse] = saved.each_ref().map(Tensor::buffer);
        let (dq, dkv) = call.device.attention()?.grouped_grad(shape, whole.buffer(), q, kv, out, lse, masks)?;
        let tensor = |x, like: &Tensor| Tensor::from_buffer(call.device, x, like.shape());
        Ok((heads.queries_back(&tensor(dq, &saved[0])?)?, heads.keys_back(&tensor(dkv, &saved[1])?)?))
    }
}
