//! Attention: which kernels a call gets, and their arguments, for each run of queries.
//!
//! More than 400 lines: both directions, in the CPU's order of sums and on tensor cores.

use super::documents::Packed;
use super::launch::{Operand, Operands, launch};
use super::rotary::TurnedRows;
use super::{CudaDevice, Products};
use crate::driver::{Address, Argument};
use meshwork_core::{Buffer, DType};
use meshwork_kernels::{Kernel, f16, tf32};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::{
    Attention, AttentionMasks, AttentionShape, GroupedShape, Optim, Pointwise, TableGrad, TurnedHeads,
};
use meshwork_tensor::{Device, Result, Work};
use std::ops::Range;

const OP: &str = "attention";

/// The longest heads of each form of the kernels; no kernel takes longer ones.
const HEADS: [usize; 3] = [64, 128, 256];
const LONGEST: usize = HEADS[HEADS.len() - 1];

/// Where queries, keys and values begin, their type, and how many elements lie from one token to the next.
#[derive(Clone, Copy)]
struct Heads {
    of: DType,
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
    fn fused(at: Address, shape: AttentionShape, dtype: DType) -> Self {
        let width = shape.heads * shape.head_dim;
        let [k, v] = [1, 2].map(|part| at.offset(dtype.size() * part * width));
        Self { of: dtype, q: at, q_row: 3 * width, k, v, kv_row: 3 * width, group: 1, first_kv: 0 }
    }

    /// Of queries `[batch, seq, heads, head_dim]` and keys and values `[batch, keys, 2, kv_heads, head_dim]`.
    fn grouped(q: Address, kv: Address, shape: GroupedShape, dtype: DType) -> Self {
        let GroupedShape { queries, group, kv_heads, first_kv_head, .. } = shape;
        let (width, kv_width) = (queries.heads * queries.head_dim, kv_heads * queries.head_dim);
        let (k, v) = (kv, kv.offset(dtype.size() * kv_width));
        Self { of: dtype, q, q_row: width, k, v, kv_row: 2 * kv_width, group, first_kv: first_kv_head }
    }
}

impl Heads {
    /// The same for the queries of a run.
    fn after(&self, run: &Run, dtype: DType) -> Self {
        Self { q: self.q.offset(dtype.size() * run.row * self.q_row), ..*self }
    }
}

impl Operand for &Heads {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        (self.q, self.of).add_to(operands)?;
        self.q_row.add_to(operands)?;
        [self.k, self.v].add_to(operands)?;
        self.kv_row.add_to(operands)
    }
}

/// How a kernel reads the operands of a run of queries.
enum Read<'a> {
    /// Where they lie, and the gradient of the output behind them where the kernel reads it.
    Places(&'a Heads, Option<Address>),
    /// By maps of these places: the kernels for sm_90a.
    Maps(Buffer),
}

impl Operand for &Read<'_> {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        match self {
            Read::Places(heads, dout) => {
                heads.add_to(operands)?;
                dout.iter().try_for_each(|&dout| dout.add_to(operands))
            }
            Read::Maps(maps) => maps.add_to(operands),
        }
    }
}

/// Words of the maps of queries, keys, values and the gradient of the output: `kernels/cuda/flash_maps.cu`.
const MAPS: usize = 4 * 16;

/// A kernel for each of [`HEADS`].
type Forms = [&'static str; HEADS.len()];

/// The forms of a kernel, for each of [`Kernels`].
macro_rules! forms {
    ($name:literal) => {
        [forms!("attention_", $name), forms!("flash_", $name), forms!("flash_dropout_", $name)]
    };
    ($of:literal, $name:literal) => {
        [concat!($of, $name, "_64"), concat!($of, $name, "_128"), concat!($of, $name, "_256")]
    };
}

/// The kernels that a call runs on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernels {
    /// In the CPU's order of sums.
    Plain,
    /// On tensor cores: with operands of 16 bits or of TF32, and sums in an order of their own.
    Flash,
    /// The same with dropout.
    FlashDropout,
}

/// A call of attention.
#[derive(Clone, Copy)]
struct Call<'a> {
    shape: GroupedShape,
    masks: AttentionMasks<'a>,
    packed: Option<&'a Packed>,
    on: Kernels,
    /// The type of the kernels' operands: on tensor cores f32 is rounded to TF32.
    dtype: DType,
}

/// Queries of a call that are one run of tokens: their first row, and the tokens.
struct Run {
    row: usize,
    tokens: Range<usize>,
}

impl Call<'_> {
    fn runs(&self) -> impl Iterator<Item = Run> {
        let runs = self.masks.runs(self.shape).into_iter();
        runs.scan(0, |row, tokens| Some(Run { row: std::mem::replace(row, *row + tokens.len()), tokens }))
    }

    /// Positions that a token here may have.
    fn known(&self) -> usize {
        self.runs().map(|run| run.tokens.end).fold(self.shape.sequence, usize::max)
    }

    /// Elements from the first query to those of a run.
    fn skipped(&self, run: &Run) -> usize {
        run.row * self.shape.queries.heads * self.shape.queries.head_dim
    }

    /// Whether it runs on tensor cores.
    fn flash(&self) -> bool {
        self.on != Kernels::Plain
    }

    /// Of the forms of a kernel, for each of [`Kernels`], the one for heads of this length.
    fn kernel(&self, forms: [Forms; 3]) -> &'static str {
        of_length(forms[self.on as usize], self.shape)
    }
}

/// The kernel for heads of this length.
fn of_length(forms: Forms, shape: GroupedShape) -> &'static str {
    let longer = HEADS.iter().take(HEADS.len() - 1).filter(|most| shape.queries.head_dim > **most);
    forms[longer.count()]
}

/// Queries, and keys with their values, as rows that are rotated.
fn turned_rows<'a>(call: &Call<'a>) -> [TurnedRows<'a>; 2] {
    let (GroupedShape { queries, kv_heads, .. }, packed) = (call.shape, call.packed);
    let AttentionShape { batch, heads, head_dim, .. } = queries;
    let [of_queries, of_keys] = [packed.map(|packed| &packed.of_queries), packed.map(|packed| &packed.of_keys)];
    let (runs, all) = (call.masks.runs(call.shape), std::iter::once(call.shape.key_tokens()).collect());
    [
        TurnedRows { row: heads * head_dim, heads, head_dim, batch, runs, positions: of_queries },
        TurnedRows { row: 2 * kv_heads * head_dim, heads: kv_heads, head_dim, batch, runs: all, positions: of_keys },
    ]
}

impl CudaDevice {
    /// A call. It runs on tensor cores if their kernels take it: these round operands to bf16 or TF32, or read f16
    /// where all tensors `of` the call have it, promise no order of sums, know no masks but causal ones and dropout,
    /// and documents only where there are keys of all tokens.
    fn call<'a>(
        &self,
        shape: GroupedShape,
        masks: AttentionMasks<'a>,
        packed: Option<&'a Packed>,
        of: &[&Buffer],
    ) -> Call<'a> {
        let all = |dtype| of.iter().all(|x| x.dtype() == dtype);
        let operands = match self.precision {
            Precision::Bf16 => Some(DType::Bf16),
            _ if all(DType::F16) && self.has_room(shape, f16) => Some(DType::F16),
            Precision::Tf32 if all(DType::F32) && self.has_room(shape, tf32) => Some(DType::F32),
            Precision::F32 | Precision::Tf32 => None,
        };
        let fast = self.products == Products::OfTheLibrary && operands.is_some();
        let drops = masks.dropout.is_some_and(|dropout| dropout.p > 0.0);
        let head_dim = shape.queries.head_dim;
        let known = packed.is_none() || shape.keys == shape.sequence;
        let plain = masks.is_plain() && masks.cap.is_none();
        let on = match fast && known && plain && head_dim <= LONGEST && head_dim.is_multiple_of(8) {
            true if drops => Kernels::FlashDropout,
            true => Kernels::Flash,
            false => Kernels::Plain,
        };
        let dtype = operands.filter(|_| on != Kernels::Plain).unwrap_or(DType::F32);
        Call { shape, masks, packed, on, dtype }
    }

    /// Whether the kernels of another type than bf16, which have no variants for little shared memory, fit on this
    /// device.
    fn has_room(&self, shape: GroupedShape, form: fn(&str) -> Option<&'static Kernel>) -> bool {
        let shared = self.pool.driver.properties().shared;
        let forms = [forms!("forward"), forms!("backward_q"), forms!("backward_kv")];
        let names = forms.into_iter().flat_map(|[_, flash, drops]| [flash, drops]).map(|of| of_length(of, shape));
        names.flat_map(form).all(|form| form.geometry.shared() <= shared)
    }

    /// An operand in the type of the kernels. Those for tensor cores load by 16 bytes.
    fn loaded(&self, x: &Buffer, call: &Call<'_>) -> Result<Buffer> {
        let x = self.read_as(x, call.dtype)?;
        if call.flash() { self.aligned(OP, &x) } else { Ok(x) }
    }

    /// The arguments at the end of all kernels of a run of queries.
    fn ending(&self, call: &Call<'_>, run: &Run, heads: &Heads) -> Result<Vec<Argument>> {
        let GroupedShape { queries, keys, first_key, sequence, .. } = call.shape;
        let AttentionShape { seq: rows, heads: count, head_dim, .. } = queries;
        let (seq, first_query) = (run.tokens.len(), run.tokens.start - first_key);
        let (reach, scale) = (call.masks.reach(call.shape), (1.0 / (head_dim as f64).sqrt()) as f32);
        // A window of all keys that a query may see hides none.
        let all = run.tokens.end + reach.ahead;
        let window = reach.window.map_or(all, |window| window.min(all));
        if head_dim > LONGEST {
            return Err(self.lacks("attention of heads above 256", DType::F32));
        }
        let mut args = [seq, count, heads.group, heads.first_kv].map(Argument::from).to_vec();
        args.extend([Argument::from(head_dim as i32), scale.into()]);
        let firsts = self.place_or_none(OP, call.packed.and_then(|packed| packed.firsts.as_ref()))?;
        let tokens = [keys, first_query, rows, window].map(Argument::from);
        let dropout = call.masks.dropout.copied();
        let (key, p) = dropout.map_or(([0, 0], 0.0), |dropout| (dropout.key.words(), dropout.p));
        let places = dropout.map_or([0; 3], |of| [of.first_sample, of.first_head, of.global_heads]);
        let mut drops = key.map(Argument::from).to_vec();
        drops.extend([p, (1.0 / (1.0 - f64::from(p))) as f32].map(Argument::from));
        drops.extend(places.map(|place| Argument::from(place as i64)));
        let of_sequence = [first_key, sequence].map(Argument::from);
        if call.flash() {
            args.push(firsts);
            args.extend(tokens);
            if call.on == Kernels::FlashDropout {
                args.extend(drops.into_iter().chain(of_sequence));
            }
            return Ok(args);
        }
        args.extend(drops);
        let rounded = match self.precision {
            Precision::F32 => 0,
            Precision::Bf16 => 1,
            Precision::Tf32 => 2,
        };
        args.extend([firsts, Argument::from(rounded)]);
        args.extend(tokens);
        args.extend(of_sequence);
        let cap = call.masks.cap.map_or([0.0; 2], |cap| [scale / cap as f32, cap as f32 / scale]);
        args.extend(cap.map(Argument::from));
        let slopes = call.masks.slopes.map(|slopes| self.kept_f32(slopes)).transpose()?;
        args.extend([self.place_or_none(OP, slopes.as_ref())?, self.place_or_none(OP, call.masks.bias)?]);
        args.extend([reach.ahead.into(), self.place_or_none(OP, call.masks.lengths)?]);
        Ok(args)
    }

    /// `Σ_e dout_ie out_ie` of each row; on tensor cores of tensors in the type of the kernels as they are.
    fn dots(&self, call: &Call<'_>, [dout, out]: [&Buffer; 2]) -> Result<Buffer> {
        let AttentionShape { batch, seq, heads, head_dim } = call.shape.queries;
        let dots = self.scratch(DType::F32, batch * seq * heads)?;
        let rows = batch * seq * heads;
        if call.flash() && [dout.dtype(), out.dtype()] == [call.dtype; 2] {
            let lanes = (head_dim / 8).next_power_of_two();
            launch!(self, OP, "flash_dots", [lanes * rows, 0];
                &self.loaded(dout, call)?, &self.loaded(out, call)?, &dots, batch, seq, heads, head_dim
            )?;
        } else {
            launch!(self, OP, "attention_dots", [16 * rows, 0];
                &self.read_as(dout, DType::F32)?, &self.read_as(out, DType::F32)?, &dots, batch, seq, heads, head_dim
            )?;
        }
        Ok(dots)
    }

    /// The gradient of the output in the type of the kernels, and its dots with the output. Counts the operations.
    fn read_back(&self, call: &Call<'_>, [dout, out]: [&Buffer; 2]) -> Result<[Buffer; 2]> {
        self.meter().add_flops(Work::Attention, call.shape.backward_flops(&call.masks));
        let dots = self.dots(call, [dout, out])?;
        Ok([self.loaded(dout, call)?, dots])
    }

    /// Queries, and keys with values, in the type of the kernels, after the rotation of queries and keys.
    fn turned(&self, call: &Call<'_>, q: &Buffer, kv: &Buffer) -> Result<[Buffer; 2]> {
        let Some(rotary) = call.shape.rotary else {
            return Ok([self.loaded(q, call)?, self.loaded(kv, call)?]);
        };
        // They are rotated in 16 bits where tensor cores read them and they have them, and otherwise in f32.
        let of = if q.dtype() == call.dtype { q.dtype() } else { DType::F32 };
        let [q, kv] = [&self.read_as(q, of)?, &self.read_as(kv, of)?];
        let ([of_queries, of_keys], known) = (turned_rows(call), call.known());
        let (q, kv) = (self.rotated(rotary, known, q, &of_queries)?, self.rotated(rotary, known, kv, &of_keys)?);
        Ok([self.loaded(&q, call)?, self.loaded(&kv, call)?])
    }

    /// Kernels with `[items, width]` of their calls, for a run of queries: the name of each, or of the kernel for
    /// sm_90a that the table has in its place for bf16, and how it reads `heads` and `dout`.
    fn reading<'a, const N: usize>(
        &self,
        call: &Call<'_>,
        run: &Run,
        (heads, dout): (&'a Heads, Option<Address>),
        kernels: [(&'static str, [usize; 2]); N],
    ) -> Result<[(&'static str, Read<'a>); N]> {
        let of_bf16 = call.dtype == DType::Bf16;
        let replaced = kernels.map(|(name, sizes)| {
            let kernel = self.tuning.for_sm_90a(name, sizes.map(|size| size as u64)).filter(|_| of_bf16);
            (name, kernel.map(|kernel| kernel.name))
        });
        if replaced.iter().all(|(_, by)| by.is_none()) {
            return Ok(replaced.map(|(name, _)| (name, Read::Places(heads, dout))));
        }
        let GroupedShape { queries: AttentionShape { batch, seq, heads: count, head_dim }, keys, kv_heads, .. } =
            call.shape;
        let maps = self.scratch(DType::I64, MAPS)?;
        launch!(self, OP, "flash_maps", [1, 0];
            heads, dout.unwrap_or(Address::NULL), &maps, batch, run.tokens.len(), count, kv_heads, head_dim as i32, keys, seq
        )?;
        Ok(replaced.map(|(name, by)| match by {
            Some(by) => (by, Read::Maps(maps.clone())),
            None => (name, Read::Places(heads, dout)),
        }))
    }

    /// The result, in the type `dtype`, and the logarithm of the sum of each row.
    fn attend(&self, call: &Call<'_>, heads: &Heads, dtype: DType) -> Result<(Buffer, Buffer)> {
        let AttentionShape { batch, seq, heads: count, head_dim } = call.shape.queries;
        self.meter().add_flops(Work::Attention, call.shape.forward_flops(&call.masks));
        let lse = self.alloc(DType::F32, batch * count * seq)?;
        let out = self.room(call.dtype, dtype, batch * seq * count * head_dim)?;
        let kernel = call.kernel(forms!("forward"));
        let (out_at, lse_at) = (self.place(OP, &out)?, self.place(OP, &lse)?);
        for run in call.runs() {
            let out_at = out_at.offset(call.dtype.size() * call.skipped(&run));
            let (lse_at, heads) = (lse_at.offset(DType::F32.size() * run.row), heads.after(&run, call.dtype));
            let (ending, sizes) = (self.ending(call, &run, &heads)?, [batch * count, run.tokens.len()]);
            let [(kernel, read)] = self.reading(call, &run, (&heads, None), [(kernel, sizes)])?;
            launch!(self, OP, kernel, sizes; &read, out_at, lse_at, ending)?;
        }
        Ok((self.settled(out, dtype)?, lse))
    }

    /// Writes the gradients of the queries of a run, and of keys and values where `into` has them: on tensor cores
    /// summed over each group, else of each head of queries. `dout` has the type of the kernels.
    fn attend_back(
        &self,
        call: &Call<'_>,
        run: &Run,
        heads: &Heads,
        [dout, lse, dots]: [&Buffer; 3],
        into: &Heads,
    ) -> Result<()> {
        let AttentionShape { batch, heads: count, .. } = call.shape.queries;
        let dout = self.place(OP, dout)?.offset(call.dtype.size() * call.skipped(run));
        let [lse, dots] =
            [self.place(OP, lse)?, self.place(OP, dots)?].map(|at| at.offset(DType::F32.size() * run.row));
        let (heads, into) = (heads.after(run, call.dtype), into.after(run, call.dtype));
        let ending = self.ending(call, run, &heads)?;
        let items = batch * count / if call.flash() { heads.group } else { 1 };
        let (of_q, of_kv) = ([batch * count, run.tokens.len()], [items, call.shape.keys]);
        let kernels = [(call.kernel(forms!("backward_q")), of_q), (call.kernel(forms!("backward_kv")), of_kv)];
        let [(q, read_q), (kv, read_kv)] = self.reading(call, run, (&heads, Some(dout)), kernels)?;
        launch!(self, OP, q, of_q; &read_q, lse, dots, into.q, into.q_row, &ending[..])?;
        launch!(self, OP, kv, of_kv; &read_kv, lse, dots, into.k, into.v, into.kv_row, &ending[..])
    }

    /// The gradients of keys and values from the queries of a run; those of the queries are written to `q`. What of the
    /// heads of keys and values no head here reads is zero.
    fn gradients_of(
        &self,
        call: &Call<'_>,
        run: &Run,
        of: &Heads,
        saved: [&Buffer; 3],
        (q, dtype, count): (Address, DType, usize),
    ) -> Result<Buffer> {
        let GroupedShape { queries, keys, group, kv_heads, first_kv_head, rotary, .. } = call.shape;
        let AttentionShape { batch, heads, head_dim, .. } = queries;
        let (rows, width, kv_width) = (batch * keys, heads * head_dim, kv_heads * head_dim);
        let ([_, of_keys], known) = (turned_rows(call), call.known());
        let as_written = call.flash() && dtype == call.dtype;
        // The shares of several runs are added in f32 and rounded once, unless tensor cores write them.
        let in_f32 = !as_written && dtype.is_half() && call.runs().nth(1).is_some();
        // A share that is no result is not counted by the meter.
        let is_result = run.row == 0 && !in_f32;
        let room = |of| if is_result { self.room(of, dtype, count) } else { self.scratch(of, count) };
        if as_written {
            let mut dkv = room(dtype)?;
            self.zero(&mut dkv, 0..count)?;
            let into = Heads::grouped(q, self.place(OP, &dkv)?, call.shape, dtype);
            self.attend_back(call, run, of, saved, &into)?;
            if let Some(rotary) = rotary {
                self.turned_back(rotary, known, (into.k, dtype), &of_keys)?;
            }
            return Ok(dkv);
        }
        let mut dkv = room(DType::F32)?;
        // On tensor cores of each head of keys and values, else of each head of queries, before a group is summed.
        let (of_heads, of_group, first) = if call.flash() { (kv_heads, 1, 0) } else { (heads, group, first_kv_head) };
        let each = rows * of_heads * head_dim;
        let [mut dk, mut dv] = [self.scratch(DType::F32, each)?, self.scratch(DType::F32, each)?];
        if call.flash() {
            let mut half = self.scratch(call.dtype, 2 * each)?;
            self.zero(&mut half, 0..2 * each)?;
            let k = self.place(OP, &half)?;
            let v = k.offset(call.dtype.size() * each);
            self.attend_back(call, run, of, saved, &Heads { q, q_row: width, k, v, kv_row: kv_width, ..*of })?;
            self.cast_into(&half.slice(0..each)?, &mut dk, 0)?;
            self.cast_into(&half.slice(each..2 * each)?, &mut dv, 0)?;
        } else {
            let [k, v] = [self.place(OP, &dk)?, self.place(OP, &dv)?];
            self.attend_back(call, run, of, saved, &Heads { q, q_row: width, k, v, kv_row: width, ..*of })?;
        }
        if let Some(rotary) = rotary {
            let of_k = TurnedRows { row: of_heads * head_dim, heads: of_heads, ..of_keys };
            self.turned_back(rotary, known, (self.place(OP, &dk)?, DType::F32), &of_k)?;
        }
        self.zero(&mut dkv, 0..count)?;
        let to = self.place_mut(OP, &mut dkv)?;
        for (from, to) in [(&dk, to), (&dv, to.offset(4 * kv_width))] {
            launch!(self, OP, "attention_group_sum", [rows * of_heads / of_group * head_dim, 0];
                from, to, 2 * kv_width, rows, of_heads, of_group, first, head_dim
            )?;
        }
        match is_result {
            true => self.settled(dkv, dtype),
            false if in_f32 => Ok(dkv),
            false => self.read_as(&dkv, dtype),
        }
    }
}

/// On tensor cores operands in the type of the kernels are read, and results written, as they are; every other way is
/// through copies in that type.
impl Attention for CudaDevice {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        self.storage(OP, &[qkv])?;
        let all = GroupedShape::alone(shape);
        let packed = self.packed(all, masks)?;
        let call = self.call(all, masks, packed.as_ref(), &[qkv]);
        let read = self.loaded(qkv, &call)?;
        self.attend(&call, &Heads::fused(self.place(OP, &read)?, shape, call.dtype), qkv.dtype())
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
        self.storage(OP, &[dout, qkv, out])?;
        let all = GroupedShape::alone(shape);
        let packed = self.packed(all, masks)?;
        let call = self.call(all, masks, packed.as_ref(), &[dout, qkv]);
        let (read, dqkv) = (self.loaded(qkv, &call)?, self.room(call.dtype, qkv.dtype(), qkv.count())?);
        let [heads, into] =
            [self.place(OP, &read)?, self.place(OP, &dqkv)?].map(|at| Heads::fused(at, shape, call.dtype));
        let saved = self.read_back(&call, [dout, out])?;
        let whole = Run { row: 0, tokens: 0..shape.seq };
        self.attend_back(&call, &whole, &heads, [&saved[0], lse, &saved[1]], &into)?;
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
        let call = self.call(shape, masks, packed.as_ref(), &[q, kv]);
        let [read_q, read_kv] = self.turned(&call, q, kv)?;
        let heads = Heads::grouped(self.place(OP, &read_q)?, self.place(OP, &read_kv)?, shape, call.dtype);
        self.attend(&call, &heads, q.dtype())
    }

    fn turn(&self, of: TurnedHeads, x: &Buffer) -> Result<Buffer> {
        self.f32s(OP, &[x])?;
        let TurnedHeads { rotary, seq, first, all, heads, head_dim } = of;
        let row = all * head_dim;
        let (batch, runs) = (x.count() / (seq * row).max(1), std::iter::once(first..first + seq).collect());
        let rows = TurnedRows { row, heads, head_dim, batch, runs, positions: None };
        // More angles than are needed now, so that the table is not written for each token.
        self.rotated(rotary, (first + seq).next_power_of_two(), x, &rows)
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
        self.storage(OP, &[dout, q, kv, out])?;
        let (dtype, packed) = (q.dtype(), self.packed(shape, masks)?);
        let call = self.call(shape, masks, packed.as_ref(), &[dout, q, kv]);
        let [read_q, read_kv] = self.turned(&call, q, kv)?;
        let of = Heads::grouped(self.place(OP, &read_q)?, self.place(OP, &read_kv)?, shape, call.dtype);
        let saved = self.read_back(&call, [dout, out])?;
        let saved = [&saved[0], lse, &saved[1]];
        let of_kernels = self.room(call.dtype, dtype, q.count())?;
        let (at, mut sum) = (self.place(OP, &of_kernels)?, None);
        for run in call.runs() {
            let share = self.gradients_of(&call, &run, &of, saved, (at, dtype, kv.count()))?;
            sum = Some(match sum {
                None => share,
                Some(mut sum) => {
                    self.add_assign(&mut sum, 0, &share)?;
                    sum
                }
            });
        }
        // Gradients of queries turn back in f32, unless they have the type of the kernels.
        let wide = call.flash() && dtype != call.dtype;
        let mut dq = of_kernels;
        if wide {
            let halves = std::mem::replace(&mut dq, self.room(DType::F32, dtype, q.count())?);
            self.cast_into(&halves, &mut dq, 0)?;
        }
        if let Some(rotary) = shape.rotary {
            let of_type = dq.dtype();
            let at = self.place_mut(OP, &mut dq)?;
            self.turned_back(rotary, call.known(), (at, of_type), &turned_rows(&call)[0])?;
        }
        let dkv = sum.map_or_else(|| self.alloc(dtype, kv.count()), |sum| self.settled(sum, dtype))?;
        Ok((self.settled(dq, dtype)?, dkv))
    }

    fn pair_bias_grad(
        &self,
        shape: GroupedShape,
        dout: &Buffer,
        q: &Buffer,
        kv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        masks: AttentionMasks<'_>,
        into: TableGrad<'_>,
    ) -> Result<()> {
        self.storage(OP, &[dout, q, kv, out])?;
        let packed = self.packed(shape, masks)?;
        let call = Call { shape, masks, packed: packed.as_ref(), on: Kernels::Plain, dtype: DType::F32 };
        self.meter().add_flops(Work::Attention, shape.forward_flops(&masks));
        let [read_q, read_kv, read_dout] = [self.loaded(q, &call)?, self.loaded(kv, &call)?, self.loaded(dout, &call)?];
        let heads = Heads::grouped(self.place(OP, &read_q)?, self.place(OP, &read_kv)?, shape, DType::F32);
        let (dots, whole) = (self.dots(&call, [dout, out])?, Run { row: 0, tokens: shape.tokens() });
        let TableGrad { buffer, start, rows, width, accumulate, blocks } = into;
        let (to, ending) = (self.place_mut(OP, buffer)?.offset(4 * start), self.ending(&call, &whole, &heads)?);
        launch!(self, OP, "attention_bias_backward", [rows * width, 0];
            &heads, &read_dout, lse, &dots, to, shape.queries.batch, blocks.max(1), i32::from(accumulate), ending
        )
    }

    fn join(
        &self,
        shape: AttentionShape,
        out: &mut Buffer,
        lse: &mut Buffer,
        part: &Buffer,
        part_lse: &Buffer,
    ) -> Result<()> {
        self.f32s(OP, &[out, lse, part, part_lse])?;
        let (AttentionShape { seq, heads, head_dim, .. }, count, rows) = (shape, out.count(), lse.count());
        launch!(self, OP, "attention_join", [count, 0]; part, &*lse, part_lse, &mut *out, count, seq, heads, head_dim)?;
        launch!(self, OP, "attention_join_lse", [rows, 0]; part_lse, &mut *lse, rows)
    }
}
