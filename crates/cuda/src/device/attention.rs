use super::{CudaDevice, documents::Packed};
use crate::driver::{Address, Argument};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::cpu::Precision;
use meshwork_tensor::kernel::{Attention, AttentionMasks, AttentionShape, DecodeShape, GroupedShape, Optim};
use meshwork_tensor::{Device, Result, Work};

const OP: &str = "attention";

/// The longest head that kernels take.
const HEAD: usize = 128;

/// Where queries, keys and values begin, and how many elements lie from one token to the next.
struct Heads {
    q: Address,
    q_row: usize,
    k: Address,
    v: Address,
    kv_row: usize,
    group: usize,
    first_kv: usize,
}

impl Heads {
    /// Of qkv `[batch, seq, 3, heads, head_dim]`.
    fn fused(at: Address, shape: AttentionShape) -> Self {
        let width = shape.heads * shape.head_dim;
        let [k, v] = [1, 2].map(|part| at.offset(4 * part * width));
        Self { q: at, q_row: 3 * width, k, v, kv_row: 3 * width, group: 1, first_kv: 0 }
    }

    /// Of queries `[batch, seq, heads, head_dim]` and keys and values `[batch, seq, 2, kv_heads, head_dim]`.
    fn grouped(q: Address, kv: Address, shape: GroupedShape) -> Self {
        let GroupedShape { queries, group, kv_heads, first_kv_head, .. } = shape;
        let (width, kv_width) = (queries.heads * queries.head_dim, kv_heads * queries.head_dim);
        let (k, v) = (kv, kv.offset(4 * kv_width));
        Self { q, q_row: width, k, v, kv_row: 2 * kv_width, group, first_kv: first_kv_head }
    }

    fn args(&self) -> Vec<Argument> {
        vec![self.q.into(), self.q_row.into(), self.k.into(), self.v.into(), self.kv_row.into()]
    }
}

impl CudaDevice {
    /// The kernel for heads of this length, and the arguments that all of them end with.
    fn attention(
        &self,
        kernels: [&'static str; 2],
        shape: AttentionShape,
        heads: &Heads,
        masks: AttentionMasks<'_>,
        packed: Option<&Packed>,
    ) -> Result<(&'static str, Vec<Argument>)> {
        if shape.head_dim > HEAD {
            return Err(self.lacks("attention of heads above 128", DType::F32));
        }
        let dropout = masks.dropout.copied();
        let ([key0, key1], p) = dropout.map_or(([0, 0], 0.0), |dropout| (dropout.key.words(), dropout.p));
        let places = dropout.map_or([0; 3], |of| [of.first_sample, of.first_head, of.global_heads]);
        let mut args: Vec<Argument> =
            [shape.seq, shape.heads, heads.group, heads.first_kv].map(Argument::from).to_vec();
        args.push((shape.head_dim as i32).into());
        args.push(((1.0 / (shape.head_dim as f64).sqrt()) as f32).into());
        args.extend([key0, key1].map(Argument::from));
        args.extend([p, (1.0 / (1.0 - f64::from(p))) as f32].map(Argument::from));
        args.extend(places.map(|place| Argument::from(place as i64)));
        args.push(self.place_or_none(OP, packed.and_then(|packed| packed.firsts.as_ref()))?);
        args.push(i32::from(self.precision == Precision::Bf16).into());
        Ok((kernels[usize::from(shape.head_dim > HEAD / 2)], args))
    }

    /// Queries, and keys with values, after the rotation of queries and keys; `None` without one.
    fn turned(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        packed: Option<&Packed>,
    ) -> Result<Option<(Buffer, Buffer)>> {
        let Some(rotary) = shape.rotary else { return Ok(None) };
        let AttentionShape { seq, heads, head_dim, .. } = shape.queries;
        let positions = packed.map(|packed| &packed.positions);
        let q = self.rotated(rotary, q, heads * head_dim, [seq, heads, head_dim], positions)?;
        let kv = self.rotated(rotary, kv, 2 * shape.kv_heads * head_dim, [seq, shape.kv_heads, head_dim], positions)?;
        Ok(Some((q, kv)))
    }

    fn attend(
        &self,
        shape: AttentionShape,
        heads: &Heads,
        masks: AttentionMasks<'_>,
        packed: Option<&Packed>,
    ) -> Result<(Buffer, Buffer)> {
        let AttentionShape { batch, seq, heads: count, head_dim } = shape;
        let kernels = ["attention_forward_64", "attention_forward_128"];
        let (kernel, rest) = self.attention(kernels, shape, heads, masks, packed)?;
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        let lse = self.alloc(DType::F32, batch * count * seq)?;
        let out = self.alloc(DType::F32, batch * seq * count * head_dim)?;
        let mut args = heads.args();
        args.extend([self.place(OP, &out)?, self.place(OP, &lse)?].map(Argument::from));
        args.extend(rest);
        self.launch(OP, kernel, [batch * count, seq], &args)?;
        Ok((out, lse))
    }

    /// Writes the gradients of queries (place, elements to the next token), and of each head's own keys and values.
    fn attend_back(
        &self,
        shape: AttentionShape,
        heads: &Heads,
        [dout, out, lse]: [&Buffer; 3],
        (masks, packed): (AttentionMasks<'_>, Option<&Packed>),
        dq: (Address, usize),
        (dk, dv, dkv_row): (Address, Address, usize),
    ) -> Result<()> {
        let AttentionShape { batch, seq, heads: count, head_dim } = shape;
        let of_q = ["attention_backward_q_64", "attention_backward_q_128"];
        let of_kv = ["attention_backward_kv_64", "attention_backward_kv_128"];
        let (of_q, rest) = self.attention(of_q, shape, heads, masks, packed)?;
        let (of_kv, _) = self.attention(of_kv, shape, heads, masks, packed)?;
        self.meter().add_flops(Work::Attention, shape.backward_flops());
        let dots = self.scratch(DType::F32, batch * seq * count)?;
        let place = |buffer| self.place(OP, buffer);
        let (dout, lse, dots) = (place(dout)?, place(lse)?, place(&dots)?);
        let sizes = [batch, seq, count, head_dim].map(Argument::from);
        let args = [&[dout.into(), place(out)?.into(), dots.into()][..], &sizes].concat();
        self.launch(OP, "attention_dots", [16 * batch * seq * count, 0], &args)?;
        let mut saved = heads.args();
        saved.extend([dout, lse, dots].map(Argument::from));
        let args = [&saved[..], &[dq.0.into(), dq.1.into()], &rest].concat();
        self.launch(OP, of_q, [batch * count, seq], &args)?;
        let args = [&saved[..], &[dk.into(), dv.into(), dkv_row.into()], &rest].concat();
        self.launch(OP, of_kv, [batch * count, seq], &args)
    }
}

impl Attention for CudaDevice {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        self.f32s(OP, &[qkv])?;
        let packed = self.packed(shape, masks)?;
        self.attend(shape, &Heads::fused(self.place(OP, qkv)?, shape), masks, packed.as_ref())
    }

    fn causal_grad(
        &self,
        shape: AttentionShape,
        dout: &Buffer,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<Buffer> {
        self.f32s(OP, &[dout, qkv, out, lse])?;
        let dqkv = self.alloc(DType::F32, qkv.count())?;
        let heads = Heads::fused(self.place(OP, qkv)?, shape);
        let Heads { q, q_row, k, v, kv_row, .. } = Heads::fused(self.place(OP, &dqkv)?, shape);
        let packed = self.packed(shape, masks)?;
        self.attend_back(shape, &heads, [dout, out, lse], (masks, packed.as_ref()), (q, q_row), (k, v, kv_row))?;
        Ok(dqkv)
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        self.f32s(OP, &[q, kv])?;
        let packed = self.packed(shape.queries, masks)?;
        let packed = packed.as_ref();
        let turned = self.turned(shape, q, kv, packed)?;
        let (q, kv) = turned.as_ref().map_or((q, kv), |(q, kv)| (q, kv));
        self.attend(shape.queries, &Heads::grouped(self.place(OP, q)?, self.place(OP, kv)?, shape), masks, packed)
    }

    fn decode(&self, shape: DecodeShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
        self.decoded(shape, q, kv, cache)
    }

    fn grouped_grad(
        &self,
        shape: GroupedShape,
        dout: &Buffer,
        q: &Buffer,
        kv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        self.f32s(OP, &[dout, q, kv, out, lse])?;
        let GroupedShape { queries, group, kv_heads, first_kv_head, rotary } = shape;
        let AttentionShape { batch, seq, heads, head_dim } = queries;
        let (rows, width, kv_width) = (batch * seq, heads * head_dim, kv_heads * head_dim);
        let mut dq = self.alloc(DType::F32, q.count())?;
        let mut dkv = self.alloc(DType::F32, kv.count())?;
        let packed = self.packed(queries, masks)?;
        let packed = packed.as_ref();
        let turned = self.turned(shape, q, kv, packed)?;
        let (q, kv) = turned.as_ref().map_or((q, kv), |(q, kv)| (q, kv));
        let of = Heads::grouped(self.place(OP, q)?, self.place(OP, kv)?, shape);
        // Keys and values of each head of queries, before a group is summed.
        let [dk, dv] = [self.scratch(DType::F32, rows * width)?, self.scratch(DType::F32, rows * width)?];
        let (dq_at, [dk, dv]) = (self.place_mut(OP, &mut dq)?, [self.place(OP, &dk)?, self.place(OP, &dv)?]);
        self.attend_back(queries, &of, [dout, out, lse], (masks, packed), (dq_at, width), (dk, dv, width))?;
        if let Some(rotary) = rotary {
            let positions = packed.map(|packed| &packed.positions);
            self.turned_back(rotary, dq_at, rows, [seq, heads, head_dim], positions)?;
            self.turned_back(rotary, dk, rows, [seq, heads, head_dim], positions)?;
        }
        let count = dkv.count();
        self.zero(&mut dkv, 0..count)?; // heads of keys and values that no head here reads
        let to = self.place_mut(OP, &mut dkv)?;
        let sizes = [2 * kv_width, rows, heads, group, first_kv_head, head_dim].map(Argument::from);
        for (from, to) in [(dk, to), (dv, to.offset(4 * kv_width))] {
            let args = [&[from.into(), to.into()][..], &sizes].concat();
            self.launch(OP, "attention_group_sum", [rows * heads / group * head_dim, 0], &args)?;
        }
        Ok((dq, dkv))
    }
}
