//! Compression of rows that a layer exchanges between ranks, such as the tokens of experts: each row by itself, so that
//! what is lost of a token depends neither on the others nor on how many ranks share them out.

use super::prelude::*;
use crate::device::Device;
use crate::memory::Category;
use meshwork_compress::{CompressError, Draws, Fold, Scheme, Shape, wire_bytes};

/// The compression of rows that a layer exchanges between ranks, in forward and in backward; `None` sends them as they
/// are. A scheme for a whole value, such as `quant:8`, applies to each row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowSchemes {
    /// Rows of values.
    pub forward: Option<Scheme>,
    /// Rows of their gradients.
    pub backward: Option<Scheme>,
}

/// The direction of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFlow {
    /// Values.
    Forward,
    /// Their gradients.
    Backward,
}

/// Codes the rows that one operation exchanges.
#[derive(Clone, Debug)]
pub struct RowCodec {
    schemes: RowSchemes,
    device: Arc<dyn Device>,
    seed: u64,
    step: u64,
    /// The name of the random stream: the operation and its first sample.
    name: String,
}

impl Tape {
    /// Sets the compression of the rows that layers exchange between ranks from now on.
    pub fn compress_rows(&self, schemes: RowSchemes) {
        self.inner.rows.set(schemes);
    }

    /// The codec of the rows that the next operation exchanges; a forward that is recomputed has the same.
    pub fn row_codec(&self) -> RowCodec {
        let (position, stage) = (self.inner.position, self.rank().coords().get(Axis::Pp));
        let tokens = self.block().map_or_else(String::new, |block| format!(", tokens {:?}", block.runs()));
        RowCodec {
            schemes: self.inner.rows.get(),
            device: self.device().clone(),
            seed: position.seed,
            step: position.step,
            name: format!(
                "rows of operation {} of rank {stage}, sample {}{tokens}",
                self.applied(),
                position.first_sample
            ),
        }
    }
}

/// How rows of one width that go one way become messages.
#[derive(Clone, Debug)]
pub struct RowPacking {
    codec: RowCodec,
    flow: RowFlow,
    scheme: Scheme,
    width: usize,
    dtype: DType,
}

impl RowCodec {
    /// How rows of `width` elements of a type become messages, if they are compressed.
    ///
    /// # Errors
    /// A scheme that does not compress each row by itself.
    pub fn packing(&self, flow: RowFlow, width: usize, dtype: DType) -> Result<Option<RowPacking>> {
        let of = match flow {
            RowFlow::Forward => self.schemes.forward,
            RowFlow::Backward => self.schemes.backward,
        };
        let Some(scheme) = of.map(|scheme| scheme.of_each_row(width)) else { return Ok(None) };
        match scheme.takes_rows_apart(Shape::matrix(1, width).map_err(failed)?) {
            true => Ok(Some(RowPacking { codec: self.clone(), flow, scheme, width, dtype })),
            false => Err(Error::Shape {
                op: "compress rows",
                problem: format!("{scheme} does not compress each row of {width} elements by itself"),
                shapes: Vec::new(),
            }),
        }
    }
}

impl RowPacking {
    /// Bytes of the messages of runs of these numbers of rows: none of a run without rows.
    ///
    /// # Errors
    /// More elements than a message may have.
    pub fn bytes(&self, runs: &[usize]) -> Result<Vec<usize>> {
        let bytes = |&rows: &usize| match rows {
            0 => Ok(0),
            rows => wire_bytes(&self.scheme, Shape::matrix(rows, self.width)?),
        };
        runs.iter().map(bytes).collect::<std::result::Result<_, CompressError>>().map_err(failed)
    }

    /// The runs with rows: their shapes, the first element of each, and the bytes of their messages.
    fn parts(&self, runs: &[usize]) -> Result<Vec<(Shape, usize, Range<usize>)>> {
        let (mut row, mut at, mut parts) = (0, 0, Vec::new());
        for (&run, bytes) in runs.iter().zip(self.bytes(runs)?).filter(|(run, _)| **run > 0) {
            parts.push((Shape::matrix(run, self.width).map_err(failed)?, row * self.width, at..at + bytes));
            (row, at) = (row + run, at + bytes);
        }
        Ok(parts)
    }

    /// The messages of runs of rows, one after the other. `what` tells apart the exchanges of one operation.
    ///
    /// # Errors
    /// No memory, or rows of another number.
    pub fn pack(&self, what: &str, rows: &Buffer, runs: &[usize]) -> Result<Buffer> {
        let (parts, RowCodec { device, seed, step, name, .. }) = (self.parts(runs)?, &self.codec);
        let _buffers = device.meter().enter(Category::Buffers);
        let mut messages = device.alloc(DType::U8, parts.last().map_or(0, |(.., bytes)| bytes.end))?;
        let draws = Draws::new(*seed, &format!("{name}: {what}, {:?}", self.flow), *step);
        for (shape, first, bytes) in parts {
            let (part, draws) = (rows.slice(first..first + shape.len())?, draws.skip(first));
            let mut message = messages.window(bytes)?;
            device.compression()?.pack(&self.scheme, shape, draws, &part, &mut message)?;
        }
        Ok(messages)
    }

    /// The rows that the messages of runs restore to, in the type that they had.
    ///
    /// # Errors
    /// No memory; a message that is malformed, or of other rows.
    pub fn unpack(&self, messages: &Buffer, runs: &[usize]) -> Result<Buffer> {
        let device = &self.codec.device;
        let mut rows = device.alloc(DType::F32, runs.iter().sum::<usize>() * self.width)?;
        for (shape, first, bytes) in self.parts(runs)? {
            let (message, mut to) = (messages.slice(bytes)?, rows.window(first..first + shape.len())?);
            device.compression()?.unpack(&self.scheme, shape, &message, Fold::Replace, &mut to)?;
        }
        if self.dtype == DType::F32 { Ok(rows) } else { device.pointwise()?.cast(&rows, self.dtype) }
    }
}

fn failed(source: CompressError) -> Error {
    Error::Compress { op: "compress rows", source: Box::new(source) }
}
