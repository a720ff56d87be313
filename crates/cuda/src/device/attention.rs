use super::documents::Packed;
use super::rotary::TurnedRows;
use super::{CudaDevice, Products};
use crate::driver::{Address, Argument};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{Attention, AttentionMasks, AttentionShape, GroupedShape, Optim, Pointwise};
use meshwork_tensor::{Device, Result, Work};

const OP: &str = "attention";

/// The longest head that kernels take.
const HEAD: usize = 128;

/// The addresses of queries, keys and values, and their strides in elements from token to token. On tensor cores they
/// have 16 bits.
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
    /// For qkv `[batch, seq, 3, heads, head_dim]`.
    fn fused(at: Address, shape: AttentionShape, dtype: DType) -> Self {
        let width = shape.heads * shape.head_dim;
        let [k, v] = [1, 2].map(|part| at.offset(dtype.size() * part * width));
        Self { q: at, q_row: 3 * width, k, v, kv_row: 3 * width, group: 1, first_kv: 0 }
    }

    /// For queries `[batch, seq, heads, head_dim]` and keys and values `[batch, seq, 2, kv_heads, head_dim]`.
    fn grouped(q: Address, kv: Address, shape: GroupedShape, dtype: DType) -> Self {
        let GroupedShape { queries, group, kv_heads, first_kv_head, .. } = shape;
        let (width, kv_width) = (queries.heads * queries.head_dim, kv_heads * queries.head_dim);
        let (k, v) = (kv, kv.offset(dtype.size() * kv_width));
        Self { q, q_row: width, k, v, kv_row: 2 * kv_width, group, first_kv: first_kv_head }
    }

    fn args(&self) -> Vec<Argument> {
        vec![self.q.into(), self.q_row.into(), self.k.into(), self.v.into(), self.kv_row.into()]
    }
}

/// The kernel for heads of this length.
fn of_room(shape: AttentionShape, kernels: [&'static str; 2]) -> &'static str {
    kernels[usize::from(shape.head_dim > HEAD / 2)]
}

/// Queries, and keys with their values, as rows that are rotated.
fn turned_rows<'a>(shape: &GroupedShape, packed: Option<&'a Packed>) -> [TurnedRows<'a>; 2] {
    let AttentionShape { heads, head_dim, .. } = shape.queries;
    let [of_queries, of_keys] = [packed.map(|packed| &packed.of_queries), packed.map(|packed| &packed.positions)];
    let (tokens, kv_heads) = (shape.tokens(), shape.kv_heads);
    [
        TurnedRows { row: heads * head_dim, heads, tokens, positions: of_queries },
        TurnedRows { row: 2 * kv_heads * head_dim, heads: kv_heads, tokens: 0..shape.keys, positions: of_keys },
    ]
}

impl CudaDevice {
    /// Whether the kernels for tensor cores take this: they round operands to bf16, promise no order of sums, and know
    /// queries of all tokens.
    fn on_tensor_cores(&self, shape: GroupedShape, masks: AttentionMasks<'_>) -> bool {
        let fast = self.precision == Precision::Bf16 && self.products == Products::OfTheLibrary;
        let drops = masks.dropout.is_some_and(|dropout| dropout.p > 0.0);
        let head_dim = shape.queries.head_dim;
        fast && shape.is_whole() && !drops && head_dim <= HEAD && head_dim.is_multiple_of(8)
    }

    /// An operand in the type of the kernels. Tensor-core kernels, on bf16, load 16 bytes at a time.
    fn loaded(&self, x: &Buffer, of: DType) -> Result<Buffer> {
        let x = self.read_as(x, of)?;
        if of == DType::Bf16 { self.aligned(OP, &x) } else { Ok(x) }
    }

    /// The last arguments of all tensor-core kernels.
    fn flash_arguments(&self, shape: AttentionShape, heads: &Heads, packed: Option<&Packed>) -> Result<Vec<Argument>> {
        let mut args: Vec<Argument> =
            [shape.seq, shape.heads, heads.group, heads.first_kv].map(Argument::from).to_vec();
        args.push((shape.head_dim as i32).into());
        args.push(((1.0 / (shape.head_dim as f64).sqrt()) as f32).into());
        args.push(self.place_or_none(OP, packed.and_then(|packed| packed.firsts.as_ref()))?);
        Ok(args)
    }

    /// As [`attend`](Self::attend), for heads in bf16.
    fn flash(
        &self,
        shape: AttentionShape,
        heads: &Heads,
        packed: Option<&Packed>,
        dtype: DType,
    ) -> Result<(Buffer, Buffer)> {
        let AttentionShape { batch, seq, heads: count, head_dim } = shape;
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        let lse = self.alloc(DType::F32, batch * count * seq)?;
        let out = self.room(DType::Bf16, dtype, batch * seq * count * head_dim)?;
        let mut args = heads.args();
        args.extend([self.place(OP, &out)?, self.place(OP, &lse)?].map(Argument::from));
        args.extend(self.flash_arguments(shape, heads, packed)?);
        let kernel = of_room(shape, ["flash_forward_64", "flash_forward_128"]);
        self.launch(OP, kernel, [batch * count, seq], &args)?;
        Ok((self.settled(out, dtype)?, lse))
    }

    /// Writes the gradients of queries, and of keys and values, summed over each group, in 16 bits.
    fn flash_back(
        &self,
        shape: AttentionShape,
        heads: &Heads,
        [dout, out, lse]: [&Buffer; 3],
        packed: Option<&Packed>,
        dq: (Address, usize),
        (dk, dv, dkv_row): (Address, Address, usize),
    ) -> Result<()> {
        let AttentionShape { batch, heads: count, seq, .. } = shape;
        self.meter().add_flops(Work::Attention, shape.backward_flops());
        let dots = self.dots(shape, [dout, out], true)?;
        let dout = self.loaded(dout, DType::Bf16)?;
        let mut saved = heads.args();
        for of in [&dout, lse, &dots] {
            saved.push(self.place(OP, of)?.into());
        }
        let rest = self.flash_arguments(shape, heads, packed)?;
        let args = [&saved[..], &[dq.0.into(), dq.1.into()], &rest].concat();
        let kernel = of_room(shape, ["flash_backward_q_64", "flash_backward_q_128"]);
        self.launch(OP, kernel, [batch * count, seq], &args)?;
        let args = [&saved[..], &[dk.into(), dv.into(), dkv_row.into()], &rest].concat();
        let kernel = of_room(shape, ["flash_backward_kv_64", "flash_backward_kv_128"]);
        self.launch(OP, kernel, [batch * count / heads.group, seq], &args)
    }

    /// `Σ_e dout_ie out_ie` of each row; on tensor cores directly from tensors of bf16.
    fn dots(&self, shape: AttentionShape, [dout, out]: [&Buffer; 2], flash: bool) -> Result<Buffer> {
        let AttentionShape { batch, seq, heads, head_dim } = shape;
        let dots = self.scratch(DType::F32, batch * seq * heads)?;
        let as_they_are = flash && [dout.dtype(), out.dtype()] == [DType::Bf16; 2];
        let (kernel, lanes, of) = match as_they_are {
            true => ("flash_dots", (head_dim / 8).next_power_of_two(), DType::Bf16),
            false => ("attention_dots", 16, DType::F32),
        };
        // Kept alive until the kernel is queued.
        let operands = [self.loaded(dout, of)?, self.loaded(out, of)?];
        let mut args = Vec::with_capacity(7);
        for of in [&operands[0], &operands[1], &dots] {
            args.push(self.place(OP, of)?.into());
        }
        args.extend([batch, seq, heads, head_dim].map(Argument::from));
        self.launch(OP, kernel, [lanes * batch * seq * heads, 0], &args)?;
        Ok(dots)
    }

    /// The kernel for heads of this length, and the last arguments of all of them.
    fn attention(
        &self,
        kernels: [&'static str; 2],
        all: GroupedShape,
        heads: &Heads,
        masks: AttentionMasks<'_>,
        packed: Option<&Packed>,
    ) -> Result<(&'static str, Vec<Argument>)> {
        let shape = all.queries;
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
        args.extend([all.keys, all.first_query].map(Argument::from));
        Ok((of_room(shape, kernels), args))
    }

    /// Queries, and keys with values, after the rotation of queries and keys; `None` without a rotation. They stay bf16
    /// if tensor cores read them, and are f32 otherwise.
    fn turned(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        (packed, flash): (Option<&Packed>, bool),
    ) -> Result<Option<(Buffer, Buffer)>> {
        let Some(rotary) = shape.rotary else { return Ok(None) };
        let of = if flash && q.dtype() == DType::Bf16 { DType::Bf16 } else { DType::F32 };
        let [q, kv] = [&self.read_as(q, of)?, &self.read_as(kv, of)?];
        let [of_queries, of_keys] = turned_rows(&shape, packed);
        let (q, kv) = (self.rotated(rotary, &shape, q, &of_queries)?, self.rotated(rotary, &shape, kv, &of_keys)?);
        Ok(Some((q, kv)))
    }

    fn attend(
        &self,
        shape: GroupedShape,
        heads: &Heads,
        masks: AttentionMasks<'_>,
        packed: Option<&Packed>,
        dtype: DType,
    ) -> Result<(Buffer, Buffer)> {
        let AttentionShape { batch, seq, heads: count, head_dim } = shape.queries;
        let kernels = ["attention_forward_64", "attention_forward_128"];
        let (kernel, rest) = self.attention(kernels, shape, heads, masks, packed)?;
        self.meter().add_flops(Work::Attention, shape.forward_flops());
        let lse = self.alloc(DType::F32, batch * count * seq)?;
        let out = self.room(DType::F32, dtype, batch * seq * count * head_dim)?;
        let mut args = heads.args();
        args.extend([self.place(OP, &out)?, self.place(OP, &lse)?].map(Argument::from));
        args.extend(rest);
        self.launch(OP, kernel, [batch * count, seq], &args)?;
        Ok((self.settled(out, dtype)?, lse))
    }

    /// Writes the gradients of queries (address, stride in elements), and of each head's own keys and values.
    fn attend_back(
        &self,
        shape: GroupedShape,
        heads: &Heads,
        [dout, out, lse]: [&Buffer; 3],
        (masks, packed): (AttentionMasks<'_>, Option<&Packed>),
        dq: (Address, usize),
        (dk, dv, dkv_row): (Address, Address, usize),
    ) -> Result<()> {
        let AttentionShape { batch, seq, heads: count, .. } = shape.queries;
        let of_q = ["attention_backward_q_64", "attention_backward_q_128"];
        let of_kv = ["attention_backward_kv_64", "attention_backward_kv_128"];
        let (of_q, rest) = self.attention(of_q, shape, heads, masks, packed)?;
        let (of_kv, _) = self.attention(of_kv, shape, heads, masks, packed)?;
        self.meter().add_flops(Work::Attention, shape.backward_flops());
        let dots = self.dots(shape.queries, [dout, out], false)?;
        let dout = &self.read_as(dout, DType::F32)?;
        let place = |buffer| self.place(OP, buffer);
        let (dout, lse, dots) = (place(dout)?, place(lse)?, place(&dots)?);
        let mut saved = heads.args();
        saved.extend([dout, lse, dots].map(Argument::from));
        let args = [&saved[..], &[dq.0.into(), dq.1.into()], &rest].concat();
        self.launch(OP, of_q, [batch * count, seq], &args)?;
        let args = [&saved[..], &[dk.into(), dv.into(), dkv_row.into()], &rest].concat();
        self.launch(OP, of_kv, [batch * count, shape.keys], &args)
    }
}

/// On tensor cores, operands and results of bf16 are used directly; all other paths use copies in the type of the
/// kernels.
impl Attention for CudaDevice {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        self.storage(OP, &[qkv])?;
        let all = GroupedShape::alone(shape);
        let (packed, flash) = (self.packed(all, masks)?, self.on_tensor_cores(all, masks));
        let of = if flash { DType::Bf16 } else { DType::F32 };
        let read = self.loaded(qkv, of)?;
        let heads = Heads::fused(self.place(OP, &read)?, shape, of);
        if flash {
            return self.flash(shape, &heads, packed.as_ref(), qkv.dtype());
        }
        self.attend(all, &heads, masks, packed.as_ref(), qkv.dtype())
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
        self.f32s(OP, &[lse])?;
        self.storage(OP, &[dout, qkv, out])?;
        let all = GroupedShape::alone(shape);
        let (packed, flash) = (self.packed(all, masks)?, self.on_tensor_cores(all, masks));
        let of = if flash { DType::Bf16 } else { DType::F32 };
        let (read, dqkv) = (self.loaded(qkv, of)?, self.room(of, qkv.dtype(), qkv.count())?);
        let heads = Heads::fused(self.place(OP, &read)?, shape, of);
        let Heads { q, q_row, k, v, kv_row, .. } = Heads::fused(self.place(OP, &dqkv)?, shape, of);
        let (dq, dkv) = ((q, q_row), (k, v, kv_row));
        match flash {
            true => self.flash_back(shape, &heads, [dout, out, lse], packed.as_ref(), dq, dkv)?,
            false => self.attend_back(all, &heads, [dout, out, lse], (masks, packed.as_ref()), dq, dkv)?,
        }
        self.settled(dqkv, qkv.dtype())
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        self.storage(OP, &[q, kv])?;
        let packed = self.packed(shape, masks)?;
        let packed = packed.as_ref();
        let dtype = q.dtype();
        let flash = self.on_tensor_cores(shape, masks);
        let turned = self.turned(shape, q, kv, (packed, flash))?;
        let (q, kv) = turned.as_ref().map_or((q, kv), |(q, kv)| (q, kv));
        let of = if flash { DType::Bf16 } else { DType::F32 };
        let (q, kv) = (self.loaded(q, of)?, self.loaded(kv, of)?);
        let heads = Heads::grouped(self.place(OP, &q)?, self.place(OP, &kv)?, shape, of);
        if flash {
            return self.flash(shape.queries, &heads, packed, dtype);
        }
        self.attend(shape, &heads, masks, packed, dtype)
    }

    fn decode(&self, shape: GroupedShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
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
        self.f32s(OP, &[lse])?;
        self.storage(OP, &[dout, q, kv, out])?;
        let GroupedShape { queries, keys, group, kv_heads, first_kv_head, rotary, .. } = shape;
        let AttentionShape { batch, heads, head_dim, .. } = queries;
        let (rows, width, kv_width) = (batch * keys, heads * head_dim, kv_heads * head_dim);
        let dtype = q.dtype();
        let packed = self.packed(shape, masks)?;
        let packed = packed.as_ref();
        let flash = self.on_tensor_cores(shape, masks);
        let [of_queries, of_keys] = turned_rows(&shape, packed);
        let turned = self.turned(shape, q, kv, (packed, flash))?;
        let (q, kv) = turned.as_ref().map_or((q, kv), |(q, kv)| (q, kv));
        if flash && dtype == DType::Bf16 {
            let (dq, mut dkv) = (self.alloc(dtype, q.count())?, self.alloc(dtype, kv.count())?);
            let count = dkv.count();
            self.zero(&mut dkv, 0..count)?; // heads of keys and values that no local head reads
            let (q, kv) = (self.loaded(q, dtype)?, self.loaded(kv, dtype)?);
            let of = Heads::grouped(self.place(OP, &q)?, self.place(OP, &kv)?, shape, dtype);
            let (dq_at, dk_at) = (self.place(OP, &dq)?, self.place(OP, &dkv)?);
            let dkv_at = (dk_at, dk_at.offset(dtype.size() * kv_width), 2 * kv_width);
            self.flash_back(queries, &of, [dout, out, lse], packed, (dq_at, width), dkv_at)?;
            if let Some(rotary) = rotary {
                self.turned_back(rotary, &shape, (dq_at, dtype), &of_queries)?;
                self.turned_back(rotary, &shape, (dk_at, dtype), &of_keys)?;
            }
            return Ok((dq, dkv));
        }
        let mut dq = self.room(DType::F32, dtype, q.count())?;
        let mut dkv = self.room(DType::F32, dtype, kv.count())?;
        // The gradients of keys and values: on tensor cores per head of keys and values, else per head of queries,
        // before the sum over a group.
        let (of_heads, of_group, first) = if flash { (kv_heads, 1, 0) } else { (heads, group, first_kv_head) };
        let [mut dk, mut dv] = [
            self.scratch(DType::F32, rows * of_heads * head_dim)?,
            self.scratch(DType::F32, rows * of_heads * head_dim)?,
        ];
        if flash {
            let (q, kv) = (self.loaded(q, DType::Bf16)?, self.loaded(kv, DType::Bf16)?);
            let of = Heads::grouped(self.place(OP, &q)?, self.place(OP, &kv)?, shape, DType::Bf16);
            let half_dq = self.scratch(DType::Bf16, q.count())?;
            let mut half = self.scratch(DType::Bf16, 2 * dk.count())?;
            let count = dk.count();
            self.zero(&mut half, 0..2 * count)?; // heads of keys and values that no local head reads
            let (dq_at, dk_at) = (self.place(OP, &half_dq)?, self.place(OP, &half)?);
            let dkv_at = (dk_at, dk_at.offset(DType::Bf16.size() * count), kv_width);
            self.flash_back(queries, &of, [dout, out, lse], packed, (dq_at, width), dkv_at)?;
            self.cast_into(&half_dq, &mut dq, 0)?;
            self.cast_into(&half.slice(0..count)?, &mut dk, 0)?;
            self.cast_into(&half.slice(count..2 * count)?, &mut dv, 0)?;
        } else {
            let (q, kv) = (self.read_as(q, DType::F32)?, self.read_as(kv, DType::F32)?);
            let of = Heads::grouped(self.place(OP, &q)?, self.place(OP, &kv)?, shape, DType::F32);
            let at = (self.place(OP, &dk)?, self.place(OP, &dv)?, width);
            self.attend_back(shape, &of, [dout, out, lse], (masks, packed), (self.place(OP, &dq)?, width), at)?;
        }
        let (dq_at, dk, dv) = (self.place_mut(OP, &mut dq)?, self.place(OP, &dk)?, self.place(OP, &dv)?);
        if let Some(rotary) = rotary {
            self.turned_back(rotary, &shape, (dq_at, DType::F32), &of_queries)?;
            let of_k = TurnedRows { row: of_heads * head_dim, heads: of_heads, ..of_keys };
            self.turned_back(rotary, &shape, (dk, DType::F32), &of_k)?;
        }
        let count = dkv.count();
        self.zero(&mut dkv, 0..count)?; // heads of keys and values that no local head reads
        let to = self.place_mut(OP, &mut dkv)?;
        let sizes = [2 * kv_width, rows, of_heads, of_group, first, head_dim].map(Argument::from);
        for (from, to) in [(dk, to), (dv, to.offset(4 * kv_width))] {
            let args = [&[from.into(), to.into()][..], &sizes].concat();
            self.launch(OP, "attention_group_sum", [rows * of_heads / of_group * head_dim, 0], &args)?;
        }
        Ok((self.settled(dq, dtype)?, self.settled(dkv, dtype)?))
    }
}
