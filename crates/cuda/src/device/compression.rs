//! The device's [`Compression`]: messages and feedback with the CPU's bytes.
//!
//! More than 400 lines: every format of the wire, packed and unpacked side by side.

use super::CudaDevice;
use super::checked::Checked;
use crate::driver::{Address, Argument};
use meshwork_compress::feedback::Sender;
use meshwork_compress::wire::{HEADER, header};
use meshwork_compress::{
    Choice, CompressError, Compressor, Draws, Feedback, Fold, Fp8Format, MessageError, PowerSgd, Rounding, Scheme,
    Shape, Sparse, Values, wire_bytes,
};
use meshwork_core::{Buffer, BufferError, DType};
use meshwork_tensor::kernel::{Compression, Layout, Optim, Pointwise};
use meshwork_tensor::{Device, Error, Result};

/// Bytes of what draws indices: the words of the key, and the first counter.
const DRAWS: usize = 16;

fn failed(op: &'static str) -> impl Fn(CompressError) -> Error {
    move |source| Error::Compress { op, source: Box::new(source) }
}

/// Refuses memory of another length than a value has.
fn require_count(count: usize, wanted: usize) -> Result<()> {
    match count == wanted {
        true => Ok(()),
        false => Err(BufferError::Range { start: 0, end: wanted, count }.into()),
    }
}

/// Refuses memory of another type.
fn require_dtype(x: &Buffer, asked: DType) -> Result<()> {
    match x.dtype() == asked {
        true => Ok(()),
        false => Err(BufferError::DType { actual: x.dtype(), asked }.into()),
    }
}

/// Whether a format of 8 bits is e5m2, as kernels take it.
fn e5m2(format: Fp8Format) -> Argument {
    i32::from(format == Fp8Format::E5M2).into()
}

/// The largest code that this number of bits has.
fn levels(bits: u8) -> Argument {
    (((1_u32 << bits) - 1) as f32).into()
}

/// 16 bytes as kernels take them.
fn words(bytes: [u8; 16]) -> [Argument; 2] {
    [0, 8].map(|first| u64::from_le_bytes(std::array::from_fn(|byte| bytes[first + byte])).into())
}

/// Elements that are read or written: where, and how many they are and in which parts.
#[derive(Clone, Copy)]
struct Elements {
    at: Address,
    shape: Shape,
}

impl CudaDevice {
    /// Writes the body of values at `to`.
    fn pack_values(&self, values: Values, x: Elements, draws: Draws, to: Address) -> Result<()> {
        const OP: &str = "pack";
        let (count, per) = (x.shape.len(), values.per());
        let (parts, unit): (usize, Argument) = (per.parts(x.shape), per.unit(x.shape).into());
        let (x, len): (Argument, Argument) = (x.at.into(), count.into());
        let (sizes, of_parts) = ([count, 0], [parts, 1]);
        match values {
            Values::F32 => self.launch(OP, "f32_pack", sizes, &[x, to.into(), len]),
            Values::Bf16 => self.launch(OP, "bf16_pack", sizes, &[x, to.into(), len]),
            Values::Fp8 { format, .. } => {
                let (scales, codes) = (to.into(), to.offset(4 * parts).into());
                self.launch(OP, "fp8_scales", of_parts, &[x, len, unit, e5m2(format), scales])?;
                self.launch(OP, "fp8_pack", sizes, &[x, scales, unit, e5m2(format), codes, len])
            }
            Values::Quantize { bits, rounding, .. } => {
                let codes = self.scratch(DType::U8, count)?;
                let (pairs, at) = (to.into(), self.place(OP, &codes)?);
                self.launch(OP, "quant_pairs", of_parts, &[x, len, unit, levels(bits), pairs])?;
                let [key0, key1] = draws.key.words();
                let stochastic = i32::from(rounding == Rounding::Stochastic);
                let drawn = [stochastic.into(), key0.into(), key1.into(), draws.start.into(), at.into(), len];
                let args = [&[x, pairs, unit, levels(bits)][..], &drawn].concat();
                self.launch(OP, "quant_codes", sizes, &args)?;
                self.pack_planes(at, bits, to.offset(8 * parts), count)
            }
            Values::Sign { .. } => {
                let codes = self.scratch(DType::U8, count)?;
                let at = self.place(OP, &codes)?;
                self.launch(OP, "sign_scales", [16 * parts, 0], &[x, len, unit, to.into(), parts.into()])?;
                self.launch(OP, "sign_codes", sizes, &[x, at.into(), len])?;
                self.pack_planes(at, 1, to.offset(4 * parts), count)
            }
        }
    }

    fn pack_planes(&self, codes: Address, bits: u8, to: Address, count: usize) -> Result<()> {
        let (bits, bytes) = (usize::from(bits), usize::from(bits) * count.div_ceil(8));
        let args = [codes.into(), bits.into(), to.into(), bytes.into(), count.into()];
        self.launch("pack", "planes_pack", [bytes, 0], &args)
    }

    /// Restores the body of values at `from`.
    fn unpack_values(&self, values: Values, from: Address, fold: Fold, to: Elements) -> Result<()> {
        const OP: &str = "unpack";
        let (count, per) = (to.shape.len(), values.per());
        let (parts, unit): (usize, Argument) = (per.parts(to.shape), per.unit(to.shape).into());
        let end: [Argument; 3] = [to.at.into(), i32::from(fold == Fold::Add).into(), count.into()];
        let (kernel, args) = match values {
            Values::F32 => ("f32_unpack", vec![from.into()]),
            Values::Bf16 => ("bf16_unpack", vec![from.into()]),
            Values::Fp8 { format, .. } => {
                ("fp8_unpack", vec![from.offset(4 * parts).into(), from.into(), unit, e5m2(format)])
            }
            Values::Quantize { bits, .. } => {
                let bits = usize::from(bits).into();
                ("quant_unpack", vec![from.offset(8 * parts).into(), from.into(), bits, unit])
            }
            Values::Sign { .. } => ("sign_unpack", vec![from.offset(4 * parts).into(), from.into(), unit]),
        };
        self.launch(OP, kernel, [count, 0], &[&args[..], &end].concat())
    }

    /// The indices of the elements that a message has; `draws`: where the 16 bytes are that draw them.
    fn choose(&self, sparse: &Sparse, x: Elements, draws: Address) -> Result<Buffer> {
        const OP: &str = "pack";
        let (count, len) = (sparse.count(x.shape), x.shape.len());
        let Choice::Largest(per) = sparse.choice else { return self.drawn(OP, count, len, draws) };
        let indices = self.scratch(DType::I32, count)?;
        let unit = per.unit(x.shape);
        let (keep, last) = (sparse.keep.of(unit.min(len)), if len % unit > 0 { sparse.keep.of(len % unit) } else { 0 });
        let to = self.place(OP, &indices)?;
        let args = [x.at.into(), len.into(), unit.into(), keep.into(), last.into(), to.into()];
        self.launch(OP, "topk_choose", [per.parts(x.shape), 1], &args)?;
        Ok(indices)
    }

    /// `count` indices below `below`, as 16 bytes on the device draw them.
    fn drawn(&self, op: &'static str, count: usize, below: usize, draws: Address) -> Result<Buffer> {
        let mut taken = self.scratch(DType::I64, below.div_ceil(64))?;
        let words = taken.count();
        self.zero(&mut taken, 0..words)?;
        let at = self.place(op, &taken)?;
        self.launch(op, "draw_indices", [1, 0], &[draws.into(), count.into(), below.into(), at.into()])?;
        self.decoded_indices(op, (at, 0), below.div_ceil(8), [count, below], None)
    }

    /// The indices that bits say: a bitmap, or packed differences with `width` low bits each.
    fn decoded_indices(
        &self,
        op: &'static str,
        (from, low_bytes): (Address, usize),
        high_bytes: usize,
        [count, below]: [usize; 2],
        width: Option<u32>,
    ) -> Result<Buffer> {
        let indices = self.scratch(DType::I32, count)?;
        let args = [
            from.into(),
            from.offset(low_bytes).into(),
            high_bytes.into(),
            count.into(),
            below.into(),
            (width.unwrap_or(0) as i32).into(),
            i32::from(width.is_some()).into(),
            self.place(op, &indices)?.into(),
            self.fault_of(Checked::Message).into(),
        ];
        self.launch(op, "indices_read", [1, 1], &args)?;
        Ok(indices)
    }

    /// The indices in the bytes of a message.
    fn read_indices(&self, op: &'static str, sparse: &Sparse, shape: Shape, from: Address) -> Result<Buffer> {
        let (count, below) = (sparse.count(shape), shape.len());
        if let Choice::Random { .. } = sparse.choice {
            return self.drawn(op, count, below, from);
        }
        let bytes = sparse.index_bytes(shape).len();
        let packed = sparse.packed(shape);
        let low = packed.map_or(0, |packed| packed.low_bytes);
        self.decoded_indices(op, (from, low), bytes - low, [count, below], packed.map(|packed| packed.width))
    }

    /// Writes indices in their coding.
    fn write_indices(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, to: Address) -> Result<()> {
        const OP: &str = "pack";
        let (from, count): (Argument, Argument) = (self.place(OP, indices)?.into(), indices.count().into());
        let bytes = sparse.index_bytes(shape).len();
        let (mut low, mut width) = (0, 0);
        if let Some(packed) = sparse.packed(shape) {
            (low, width) = (packed.low_bytes, packed.width);
            let args = [from, count, (width as usize).into(), to.into(), low.into()];
            self.launch(OP, "indices_low", [low, 0], &args)?;
        }
        let (spread, bytes) = (i32::from(sparse.packed(shape).is_some()), bytes - low);
        let args = [from, count, (width as i32).into(), spread.into(), to.offset(low).into(), bytes.into()];
        self.launch(OP, "indices_bits", [bytes, 0], &args)
    }

    /// The elements that indices name, as a message has them.
    fn taken(&self, op: &'static str, sparse: &Sparse, x: Elements, indices: &Buffer, to: &Buffer) -> Result<()> {
        let args = [
            x.at.into(),
            self.place(op, indices)?.into(),
            sparse.factor(x.shape).into(),
            self.place(op, to)?.into(),
            indices.count().into(),
        ];
        self.launch(op, "take_values", [indices.count(), 0], &args)
    }

    /// Writes or adds values where indices say.
    fn put_at(&self, op: &'static str, values: &Buffer, indices: &Buffer, fold: Fold, to: Address) -> Result<()> {
        let add = i32::from(fold == Fold::Add).into();
        let args =
            [self.place(op, values)?.into(), self.place(op, indices)?.into(), to.into(), add, values.count().into()];
        self.launch(op, "put_values", [values.count(), 0], &args)
    }

    /// The places of a matrix and its factors p and q, whose lengths are checked.
    fn factors_of(&self, of: PowerSgd, shape: Shape, m: &Buffer, [p, q]: [&Buffer; 2]) -> Result<[Argument; 3]> {
        const OP: &str = "powersgd";
        of.check(shape).map_err(failed(OP))?;
        let [of_p, of_q] = of.factors(shape);
        for (buffer, len) in [(m, shape.len()), (p, of_p), (q, of_q)] {
            require_count(buffer.count(), len)?;
        }
        self.f32s(OP, &[m, p, q])?;
        Ok([self.place(OP, m)?.into(), self.place(OP, p)?.into(), self.place(OP, q)?.into()])
    }
}

impl Compression for CudaDevice {
    fn pack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        draws: Draws,
        x: &Buffer,
        message: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        const OP: &str = "pack";
        let bytes = wire_bytes(scheme, shape).map_err(failed(OP))?;
        self.f32s(OP, &[x])?;
        require_count(x.count(), shape.len())?;
        require_dtype(message, DType::U8)?;
        message.slice(at..at.saturating_add(bytes))?;
        let to = self.place_mut(OP, message)?.offset(at);
        let [first, second] = words(header(scheme, shape));
        self.launch(OP, "message_words", [HEADER, 0], &[to.into(), first, second])?;
        let (x, body) = (Elements { at: self.place(OP, x)?, shape }, to.offset(HEADER));
        match scheme {
            Scheme::Values(values) => self.pack_values(*values, x, draws, body),
            Scheme::Sparse(sparse) => {
                let indices_end = bytes - HEADER - sparse.values.body_bytes(sparse.taken(shape));
                if let Choice::Random { .. } = sparse.choice {
                    let [key0, key1] = draws.key.words().map(u64::from);
                    let [first, second] = [key0 | key1 << 32, draws.start].map(Argument::from);
                    self.launch(OP, "message_words", [DRAWS, 0], &[body.into(), first, second])?;
                }
                let indices = self.choose(sparse, x, body)?;
                if let Choice::Largest(_) = sparse.choice {
                    self.write_indices(sparse, shape, &indices, body)?;
                }
                let taken = self.scratch(DType::F32, indices.count())?;
                self.taken(OP, sparse, x, &indices, &taken)?;
                let of = Elements { at: self.place(OP, &taken)?, shape: sparse.taken(shape) };
                self.pack_values(sparse.values, of, draws, body.offset(indices_end))
            }
            Scheme::PowerSgd(low_rank) => {
                let (what, wanted) = ("the warm state", low_rank.warm_len(shape));
                Err(failed(OP)(CompressError::Count { what, count: 0, wanted }))
            }
        }
    }

    fn unpack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        message: &Buffer,
        fold: Fold,
        out: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        const OP: &str = "unpack";
        let wanted = wire_bytes(scheme, shape).map_err(failed(OP))?;
        require_dtype(message, DType::U8)?;
        if message.count() != wanted {
            return Err(failed(OP)(MessageError::Bytes { bytes: message.count(), wanted }.into()));
        }
        self.f32s(OP, &[out])?;
        out.slice(at..at.saturating_add(shape.len()))?;
        let (from, to) = (self.place(OP, message)?, self.place_mut(OP, out)?.offset(4 * at));
        let [first, second] = words(header(scheme, shape));
        let found = self.fault_of(Checked::Message).into();
        self.launch(OP, "message_check", [HEADER, 0], &[from.into(), first, second, found])?;
        let body = from.offset(HEADER);
        match scheme {
            Scheme::Values(values) => self.unpack_values(*values, body, fold, Elements { at: to, shape }),
            Scheme::Sparse(sparse) => {
                let values = wanted - HEADER - sparse.values.body_bytes(sparse.taken(shape));
                let indices = self.read_indices(OP, sparse, shape, body)?;
                let restored = self.scratch(DType::F32, indices.count())?;
                let of = Elements { at: self.place(OP, &restored)?, shape: sparse.taken(shape) };
                self.unpack_values(sparse.values, body.offset(values), Fold::Replace, of)?;
                if fold == Fold::Replace {
                    self.zero(out, at..at + shape.len())?;
                }
                self.put_at(OP, &restored, &indices, fold, to)
            }
            Scheme::PowerSgd(_) => Err(self.lacks("unpack of powersgd", DType::F32)),
        }
    }

    fn take(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, x: &Buffer) -> Result<Buffer> {
        const OP: &str = "take";
        self.f32s(OP, &[x])?;
        require_count(x.count(), shape.len())?;
        require_count(indices.count(), sparse.index_bytes(shape).len())?;
        let indices = self.read_indices(OP, sparse, shape, self.place(OP, indices)?)?;
        let out = self.alloc(DType::F32, indices.count())?;
        self.taken(OP, sparse, Elements { at: self.place(OP, x)?, shape }, &indices, &out)?;
        Ok(out)
    }

    fn put(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, values: &Buffer) -> Result<Buffer> {
        const OP: &str = "put";
        self.f32s(OP, &[values])?;
        require_count(values.count(), sparse.count(shape))?;
        require_count(indices.count(), sparse.index_bytes(shape).len())?;
        let indices = self.read_indices(OP, sparse, shape, self.place(OP, indices)?)?;
        let out = self.zeros(DType::F32, shape.len())?;
        self.put_at(OP, values, &indices, Fold::Replace, self.place(OP, &out)?)?;
        Ok(out)
    }

    fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer> {
        const OP: &str = "feedback";
        self.f32s(OP, &[x])?;
        let (count, mut out) = (x.count(), self.alloc(DType::F32, x.count())?);
        let from: Argument = self.place(OP, x)?.into();
        let kept = |state: &Buffer| {
            require_count(state.count(), count)?;
            self.f32s(OP, &[state])?;
            Ok::<Argument, Error>(self.place(OP, state)?.into())
        };
        let to = self.place(OP, &out)?.into();
        match feedback {
            Feedback::None => self.copy_into(x, 0..count, &mut out, 0)?,
            Feedback::Ef => {
                let args = [from, kept(&sender.residual)?, to, count.into()];
                self.launch(OP, "feedback_residual", [count, 0], &args)?;
            }
            Feedback::Ef21 => {
                let args = [from, kept(&sender.estimate)?, to, count.into()];
                self.launch(OP, "feedback_difference", [count, 0], &args)?;
            }
            Feedback::Ef21Momentum { eta } => {
                let estimate = kept(&sender.estimate)?;
                kept(&sender.momentum)?;
                let momentum = self.place_mut(OP, &mut sender.momentum)?.into();
                let factors = [i32::from(first).into(), eta.into(), (1.0 - eta).into(), to, count.into()];
                let args = [&[from, estimate, momentum][..], &factors].concat();
                self.launch(OP, "feedback_momentum", [count, 0], &args)?;
            }
        }
        Ok(out)
    }

    fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()> {
        const OP: &str = "feedback";
        let [residual, estimate, _] = feedback.keeps();
        let count = sent.count();
        if residual {
            self.f32s(OP, &[target, sent, &sender.residual])?;
            require_count(target.count(), count)?;
            require_count(sender.residual.count(), count)?;
            let to = self.place_mut(OP, &mut sender.residual)?;
            let args = [self.place(OP, target)?.into(), self.place(OP, sent)?.into(), to.into(), count.into()];
            self.launch(OP, "feedback_kept", [count, 0], &args)?;
        }
        if estimate {
            self.add_assign(&mut sender.estimate, 0, sent)?;
        }
        Ok(())
    }

    fn left_factor(
        &self,
        of: PowerSgd,
        shape: Shape,
        draws: Draws,
        m: &Buffer,
        q: &mut Buffer,
        p: &mut Buffer,
    ) -> Result<()> {
        const OP: &str = "powersgd";
        let [from, to, _] = self.factors_of(of, shape, m, [p, q])?;
        if shape.is_empty() {
            return Ok(());
        }
        self.place_mut(OP, p)?;
        let at: Argument = self.place_mut(OP, q)?.into();
        let ([key0, key1], cols) = (draws.key.words(), shape.cols().into());
        let args = [at, cols, key0.into(), key1.into(), draws.start.into()];
        self.launch(OP, "low_rank_start", [of.rank, 1], &args)?;
        let count = shape.rows() * of.rank;
        let args = [from, at, to, cols, of.rank.into(), count.into()];
        self.launch(OP, "low_rank_times", [16 * count, 0], &args)
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, p: &mut Buffer, q: &mut Buffer) -> Result<()> {
        const OP: &str = "powersgd";
        let [from, ..] = self.factors_of(of, shape, m, [p, q])?;
        if shape.is_empty() {
            return Ok(());
        }
        let lengths = self.scratch(DType::F64, of.rank)?;
        let (p, q): (Argument, Argument) = (self.place_mut(OP, p)?.into(), self.place_mut(OP, q)?.into());
        let sizes = [shape.rows(), shape.cols(), of.rank].map(Argument::from);
        let args = [p, sizes[0], sizes[2], self.place(OP, &lengths)?.into()];
        self.launch(OP, "low_rank_orthonormal", [1, 0], &args)?;
        let args = [&[from, p, q][..], &sizes].concat();
        self.launch(OP, "low_rank_transposed", [of.rank * shape.cols(), 0], &args)
    }

    fn join(&self, of: PowerSgd, shape: Shape, [p, q]: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()> {
        const OP: &str = "powersgd";
        let [_, p, q] = self.factors_of(of, shape, out, [p, q])?;
        let to = self.place_mut(OP, out)?.into();
        let args = [p, q, to, shape.cols().into(), of.rank.into(), (among as f32).into(), shape.len().into()];
        self.launch(OP, "low_rank_join", [shape.len(), 0], &args)
    }
}
