use super::Meta;
use crate::device::{Device, Work};
use crate::error::Result;
use crate::kernel::{Attention, AttentionMasks, AttentionShape, GroupedShape};
use meshwork_core::Buffer;

impl Attention for Meta {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, _masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        let lse = self.alloc(qkv.dtype().widened(), shape.batch * shape.heads * shape.seq)?;
        Ok((self.alloc(qkv.dtype(), qkv.count() / 3)?, lse))
    }

    fn causal_grad(
        &self,
        shape: AttentionShape,
        _dout: &Buffer,
        qkv: &Buffer,
        _out: &Buffer,
        _lse: &Buffer,
        _masks: AttentionMasks<'_>,
    ) -> Result<Buffer> {
        self.meter().add_flops(Work::Attention, shape.backward_flops());
        self.alloc(qkv.dtype(), qkv.count())
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        _kv: &Buffer,
        _masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let of = shape.queries;
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        let lse = self.alloc(q.dtype().widened(), of.batch * of.heads * of.seq)?;
        Ok((self.alloc(q.dtype(), q.count())?, lse))
    }

    fn decode(&self, shape: GroupedShape, q: &Buffer, _kv: &Buffer, _cache: &mut Buffer) -> Result<Buffer> {
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        self.alloc(q.dtype(), q.count())
    }

    fn grouped_grad(
        &self,
        shape: GroupedShape,
        _dout: &Buffer,
        q: &Buffer,
        kv: &Buffer,
        _out: &Buffer,
        _lse: &Buffer,
        _masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        self.meter().add_flops(Work::Attention, shape.backward_flops());
        Ok((self.alloc(q.dtype(), q.count())?, self.alloc(kv.dtype(), kv.count())?))
    }
}
