//! The device's [`Compression`]: messages and feedback with the CPU's bytes.

use super::prelude::*;
use meshwork_compress::feedback::Sender;
use meshwork_compress::wire::HEADER;
use meshwork_compress::{
    Choice, CompressError, Compressor, Draws, Feedback, Fold, Fp8Format, MessageError, Packed, PowerSgd, Rounding,
    Scales, Scheme, Shape, Sparse, Values, header, wire_bytes,
};
use meshwork_tensor::kernel::{
    Compression, Layout, Optim, Pointwise, compress_error as failed, require_count, require_factors,
};

const POWERSGD: &str = "powersgd";

/// Bytes from which indices are drawn: the words of the key, and the first counter.
const DRAWS: usize = 16;

/// Rejects memory of another type.
fn require_dtype(x: &Buffer, asked: DType) -> Result<()> {
    if x.dtype() == asked { Ok(()) } else { Err(BufferError::DType { actual: x.dtype(), asked }.into()) }
}

/// 16 bytes as kernel arguments.
fn words(bytes: [u8; 16]) -> [u64; 2] {
    [0, 8].map(|first| u64::from_le_bytes(std::array::from_fn(|byte| bytes[first + byte])))
}

/// Elements that are read or written, with their shape.
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
        let (parts, unit, x) = (per.parts(x.shape), per.unit(x.shape), x.at);
        let (sizes, of_parts) = ([count, 0], [parts, 1]);
        match values {
            Values::F32 => launch!(self, OP, "f32_pack", sizes; x, to, count),
            Values::Bf16 => launch!(self, OP, "bf16_pack", sizes; x, to, count),
            Values::Fp8 { format, .. } => {
                let e5m2 = format == Fp8Format::E5M2;
                launch!(self, OP, "fp8_scales", of_parts; x, count, unit, e5m2, to)?;
                launch!(self, OP, "fp8_pack", sizes; x, to, unit, e5m2, to.offset(4 * parts), count)
            }
            Values::Quantize { bits, rounding, .. } => {
                let codes = self.scratch(DType::U8, count)?;
                // The largest code with this number of bits.
                let levels = ((1_u32 << bits) - 1) as f32;
                launch!(self, OP, "quant_pairs", of_parts; x, count, unit, levels, to)?;
                let stochastic = rounding == Rounding::Stochastic;
                launch!(self, OP, "quant_codes", sizes;
                    x, to, unit, levels, stochastic, draws.key.words(), draws.start, &codes, count
                )?;
                self.pack_planes(&codes, bits, to.offset(8 * parts))
            }
            Values::Int8 { .. } => {
                launch!(self, OP, "absmax_scales", of_parts; x, count, unit, to)?;
                launch!(self, OP, "int8_pack", sizes; x, to, unit, to.offset(4 * parts), count)
            }
            Values::Nf4 { scales: Scales::E5M3, .. } => {
                let (codes, scales) = (self.scratch(DType::U8, count)?, self.scratch(DType::U8, 4 * parts)?);
                launch!(self, OP, "absmax_scales", of_parts; x, count, unit, &scales)?;
                launch!(self, OP, "e5m3_pack", [parts, 0]; &scales, to, parts)?;
                launch!(self, OP, "nf4_codes", sizes; x, &scales, unit, &codes, count)?;
                self.pack_planes(&codes, 4, to.offset(parts))
            }
            Values::Nf4 { .. } => {
                let codes = self.scratch(DType::U8, count)?;
                launch!(self, OP, "absmax_scales", of_parts; x, count, unit, to)?;
                launch!(self, OP, "nf4_codes", sizes; x, to, unit, &codes, count)?;
                self.pack_planes(&codes, 4, to.offset(4 * parts))
            }
            Values::Sign { .. } => {
                let codes = self.scratch(DType::U8, count)?;
                launch!(self, OP, "sign_scales", [16 * parts, 0]; x, count, unit, to, parts)?;
                launch!(self, OP, "sign_codes", sizes; x, &codes, count)?;
                self.pack_planes(&codes, 1, to.offset(4 * parts))
            }
        }
    }

    /// Writes the bit planes of codes at `to`.
    fn pack_planes(&self, codes: &Buffer, bits: u8, to: Address) -> Result<()> {
        let (bits, count) = (usize::from(bits), codes.count());
        let bytes = bits * count.div_ceil(8);
        launch!(self, "pack", "planes_pack", [bytes, 0]; codes, bits, to, bytes, count)
    }

    /// Restores the body of values at `from`.
    fn unpack_values(&self, values: Values, from: Address, fold: Fold, to: Elements) -> Result<()> {
        const OP: &str = "unpack";
        let (count, per, add) = (to.shape.len(), values.per(), fold == Fold::Add);
        let (parts, unit, to, sizes) = (per.parts(to.shape), per.unit(to.shape), to.at, [count, 0]);
        let (behind_scales, behind_pairs) = (from.offset(4 * parts), from.offset(8 * parts));
        match values {
            Values::F32 => launch!(self, OP, "f32_unpack", sizes; from, to, add, count),
            Values::Bf16 => launch!(self, OP, "bf16_unpack", sizes; from, to, add, count),
            Values::Fp8 { format, .. } => {
                let e5m2 = format == Fp8Format::E5M2;
                launch!(self, OP, "fp8_unpack", sizes; behind_scales, from, unit, e5m2, to, add, count)
            }
            Values::Quantize { bits, .. } => {
                let bits = usize::from(bits);
                launch!(self, OP, "quant_unpack", sizes; behind_pairs, from, bits, unit, to, add, count)
            }
            Values::Int8 { .. } => launch!(self, OP, "int8_unpack", sizes; behind_scales, from, unit, to, add, count),
            Values::Nf4 { scales: Scales::E5M3, .. } => {
                let scales = self.scratch(DType::U8, 4 * parts)?;
                launch!(self, OP, "e5m3_unpack", [parts, 0]; from, &scales, parts)?;
                launch!(self, OP, "nf4_unpack", sizes; from.offset(parts), &scales, unit, to, add, count)
            }
            Values::Nf4 { .. } => launch!(self, OP, "nf4_unpack", sizes; behind_scales, from, unit, to, add, count),
            Values::Sign { .. } => launch!(self, OP, "sign_unpack", sizes; behind_scales, from, unit, to, add, count),
        }
    }

    /// The indices of the elements in a message; `draws`: the address of the 16 bytes from which they are drawn.
    fn choose(&self, sparse: &Sparse, x: Elements, draws: Address) -> Result<Buffer> {
        const OP: &str = "pack";
        let (count, len) = (sparse.count(x.shape), x.shape.len());
        let Choice::Largest(per) = sparse.choice else { return self.drawn(OP, count, len, draws) };
        let indices = self.scratch(DType::I32, count)?;
        let unit = per.unit(x.shape);
        let (keep, last) =
            (sparse.keep.count(unit.min(len)), if len % unit > 0 { sparse.keep.count(len % unit) } else { 0 });
        launch!(self, OP, "topk_choose", [per.parts(x.shape), 1]; x.at, len, unit, keep, last, &indices)?;
        Ok(indices)
    }

    /// `count` indices below `below`, drawn from 16 bytes on the device.
    fn drawn(&self, op: &'static str, count: usize, below: usize, draws: Address) -> Result<Buffer> {
        let mut taken = self.scratch(DType::I64, below.div_ceil(64))?;
        let words = taken.count();
        self.zero(&mut taken, 0..words)?;
        launch!(self, op, "draw_indices", [1, 0]; draws, count, below, &taken)?;
        self.decoded_indices(op, self.place(op, &taken)?, below.div_ceil(8), [count, below], None)
    }

    /// `count` indices below `below` from `bytes` bytes: a bitmap, or packed differences.
    fn decoded_indices(
        &self,
        op: &'static str,
        from: Address,
        bytes: usize,
        [count, below]: [usize; 2],
        packed: Option<Packed>,
    ) -> Result<Buffer> {
        let indices = self.scratch(DType::I32, count)?;
        let Packed { width, low_bytes } = packed.unwrap_or(Packed { width: 0, low_bytes: 0 });
        launch!(self, op, "indices_read", [1, 1];
            from, from.offset(low_bytes), bytes - low_bytes, count, below, width as i32, packed.is_some(), &indices,
            self.fault_of(Checked::Message)
        )?;
        Ok(indices)
    }

    /// The indices in the bytes of a message.
    fn read_indices(&self, op: &'static str, sparse: &Sparse, shape: Shape, from: Address) -> Result<Buffer> {
        let (count, below, bytes) = (sparse.count(shape), shape.len(), sparse.index_bytes(shape).len());
        match sparse.choice {
            Choice::Random { .. } => self.drawn(op, count, below, from),
            Choice::Largest(_) => self.decoded_indices(op, from, bytes, [count, below], sparse.packed(shape)),
        }
    }

    /// Writes indices in their coding.
    fn write_indices(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, to: Address) -> Result<()> {
        const OP: &str = "pack";
        let (count, packed) = (indices.count(), sparse.packed(shape));
        let Packed { width, low_bytes } = packed.unwrap_or(Packed { width: 0, low_bytes: 0 });
        if packed.is_some() {
            launch!(self, OP, "indices_low", [low_bytes, 0]; indices, count, width as usize, to, low_bytes)?;
        }
        let bytes = sparse.index_bytes(shape).len() - low_bytes;
        launch!(self, OP, "indices_bits", [bytes, 0];
            indices, count, width as i32, packed.is_some(), to.offset(low_bytes), bytes
        )
    }

    /// The elements at the indices, as in a message.
    fn taken(&self, op: &'static str, sparse: &Sparse, x: Elements, indices: &Buffer, to: &Buffer) -> Result<()> {
        let (count, factor) = (indices.count(), sparse.factor(x.shape));
        launch!(self, op, "take_values", [count, 0]; x.at, indices, factor, to, count)
    }

    /// Writes or adds values at the indices.
    fn put_at(&self, op: &'static str, values: &Buffer, indices: &Buffer, fold: Fold, to: Address) -> Result<()> {
        let count = values.count();
        launch!(self, op, "put_values", [count, 0]; values, indices, to, fold == Fold::Add, count)
    }
}

impl Compression for CudaDevice {
    fn pack(&self, scheme: &Scheme, shape: Shape, draws: Draws, x: &Buffer, message: &mut Buffer) -> Result<()> {
        const OP: &str = "pack";
        let bytes = wire_bytes(scheme, shape).map_err(failed(OP))?;
        self.f32s(OP, &[x])?;
        require_count(x.count(), shape.len())?;
        require_dtype(message, DType::U8)?;
        message.slice(0..bytes)?;
        let to = self.place_mut(OP, message)?;
        launch!(self, OP, "message_words", [HEADER, 0]; to, words(header(scheme, shape)))?;
        let (x, body) = (Elements { at: self.place(OP, x)?, shape }, to.offset(HEADER));
        match scheme {
            Scheme::Values(values) => self.pack_values(*values, x, draws, body),
            Scheme::Sparse(sparse) => {
                let indices_end = bytes - HEADER - sparse.values.body_bytes(sparse.taken(shape));
                if let Choice::Random { .. } = sparse.choice {
                    let [key0, key1] = draws.key.words().map(u64::from);
                    launch!(self, OP, "message_words", [DRAWS, 0]; body, key0 | key1 << 32, draws.start)?;
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

    fn unpack(&self, scheme: &Scheme, shape: Shape, message: &Buffer, fold: Fold, out: &mut Buffer) -> Result<()> {
        const OP: &str = "unpack";
        let wanted = wire_bytes(scheme, shape).map_err(failed(OP))?;
        require_dtype(message, DType::U8)?;
        if message.count() != wanted {
            return Err(failed(OP)(MessageError::Bytes { bytes: message.count(), wanted }.into()));
        }
        self.f32s(OP, &[out])?;
        out.slice(0..shape.len())?;
        let (from, to) = (self.place(OP, message)?, self.place_mut(OP, out)?);
        let (words, found) = (words(header(scheme, shape)), self.fault_of(Checked::Message));
        launch!(self, OP, "message_check", [HEADER, 0]; from, words, found)?;
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
                    self.zero(out, 0..shape.len())?;
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
        require_count(values.count(), sparse.count(shape))?;
        require_count(indices.count(), sparse.index_bytes(shape).len())?;
        let indices = self.read_indices(OP, sparse, shape, self.place(OP, indices)?)?;
        let out = self.zeros(DType::F32, shape.len())?;
        self.put_at(OP, values, &indices, Fold::Replace, self.place(OP, &out)?)?;
        Ok(out)
    }

    fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer> {
        const OP: &str = "feedback";
        let (count, mut out) = (x.count(), self.alloc(DType::F32, x.count())?);
        let sizes = [count, 0];
        for (state, _) in sender.all().into_iter().zip(feedback.keeps()).filter(|(_, kept)| *kept) {
            require_count(state.count(), count)?;
        }
        let Sender { residual, estimate, momentum } = sender;
        match feedback {
            Feedback::None => self.copy_into(x, 0..count, &mut out, 0)?,
            Feedback::Ef => launch!(self, OP, "feedback_residual", sizes; x, &*residual, &out, count)?,
            Feedback::Ef21 => launch!(self, OP, "feedback_difference", sizes; x, &*estimate, &out, count)?,
            Feedback::Ef21Momentum { eta } => launch!(self, OP, "feedback_momentum", sizes;
                x, &*estimate, momentum, first, eta, 1.0 - eta, &out, count
            )?,
        }
        Ok(out)
    }

    fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()> {
        const OP: &str = "feedback";
        let [residual, estimate, _] = feedback.keeps();
        let count = sent.count();
        if residual {
            require_count(target.count(), count)?;
            require_count(sender.residual.count(), count)?;
            launch!(self, OP, "feedback_kept", [count, 0]; target, sent, &mut sender.residual, count)?;
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
        [p, q]: [&mut Buffer; 2],
    ) -> Result<()> {
        require_factors(of, shape, m, [p, q])?;
        if shape.is_empty() {
            return Ok(());
        }
        let (cols, count) = (shape.cols(), shape.rows() * of.rank);
        launch!(self, POWERSGD, "low_rank_start", [of.rank, 1]; &mut *q, cols, draws.key.words(), draws.start)?;
        launch!(self, POWERSGD, "low_rank_times", [16 * count, 0]; m, &*q, p, cols, of.rank, count)
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, [p, q]: [&mut Buffer; 2]) -> Result<()> {
        require_factors(of, shape, m, [p, q])?;
        if shape.is_empty() {
            return Ok(());
        }
        let (lengths, rows, cols) = (self.scratch(DType::F64, of.rank)?, shape.rows(), shape.cols());
        launch!(self, POWERSGD, "low_rank_orthonormal", [1, 0]; &mut *p, rows, of.rank, &lengths)?;
        launch!(self, POWERSGD, "low_rank_transposed", [of.rank * cols, 0]; m, &*p, q, rows, cols, of.rank)
    }

    fn join(&self, of: PowerSgd, shape: Shape, [p, q]: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()> {
        require_factors(of, shape, out, [p, q])?;
        let (count, cols) = (shape.len(), shape.cols());
        launch!(self, POWERSGD, "low_rank_join", [count, 0]; p, q, out, cols, of.rank, among as f32, count)
    }
}
