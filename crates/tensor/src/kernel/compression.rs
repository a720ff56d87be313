//! Lossy compression of f32 values, and the state of error feedback.

use super::table::*;
use crate::error::Error;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{CompressError, Compressor, Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::{Buffer, BufferError};

kernels! {
    /// Messages in the [wire format](meshwork_compress::wire), as bytes in buffers of the device, for schemes without a
    /// warm state; and the equations of [feedback](meshwork_compress::feedback). Every device gives the bits of
    /// `meshwork-compress`.
    pub trait Compression at compression {
        /// Writes the message of `x` to the first bytes of `message`, as many as
        /// [`wire_bytes`](meshwork_compress::wire_bytes).
        ///
        /// # Errors
        /// A shape that the scheme does not compress, or that `x` does not have; no room for the message.
        fn pack(&self, scheme: &Scheme, shape: Shape, draws: Draws, x: &Buffer, message: &mut Buffer) -> Result<()>
            | profile(Compression: x, message), halves(wide x), meta(nothing);

        /// Decodes a message into the first elements of `out`, or adds it to them. `message` has exactly its bytes: a
        /// [slice](Buffer::slice) of the received buffer.
        ///
        /// # Errors
        /// A message of another scheme or shape, or a malformed one.
        fn unpack(&self, scheme: &Scheme, shape: Shape, message: &Buffer, fold: Fold, out: &mut Buffer) -> Result<()>
            | profile(Compression: message, out), halves({
                  self.write(out, 0..shape.len(), fold == Fold::Add, |out, _| {
                      self.inner.compression()?.unpack(scheme, shape, message, fold, out)
                  })
              }), meta(nothing);

        /// The elements of `x`, of this shape, at `indices`: the [index bytes](Sparse::index_bytes) of a message of
        /// this scheme.
        ///
        /// # Errors
        /// Bytes that encode no indices.
        fn take(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, x: &Buffer) -> Result<Buffer>
            | profile(Compression: indices), halves(wide x), meta(F32 => sparse.count(shape));

        /// A tensor of this shape with `values` at `indices` and zeros elsewhere.
        ///
        /// # Errors
        /// As [`take`](Self::take).
        fn put(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, values: &Buffer) -> Result<Buffer>
            | profile(Compression: indices, values), halves(wide values), meta(F32 => shape.len());

        /// The value that is compressed instead of `x`: [`Feedback::outgoing`]. `first`: whether this is the first
        /// value of this sender.
        fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer>
            | profile(Compression: x, x), halves(wide x), meta(F32 => x.count());

        /// Updates the sender's state with the value sent for a target: [`Feedback::sent`].
        fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()>
            | profile(Compression: target, sent, target), halves(wide target, sent), meta(nothing);

        /// The first half of PowerSGD for a matrix `m` of this shape and its factors `[p, q]`, which have the elements
        /// of [`PowerSgd::factors`]: draws random values for the columns of `q` that are zero, and writes `p = m q`.
        fn left_factor(&self, of: PowerSgd, shape: Shape, draws: Draws, m: &Buffer, factors: [&mut Buffer; 2])
            -> Result<()>
            | profile(Compression: m, factors[1], factors[0]), halves(wide m), meta(nothing);

        /// The second half: makes the columns of `p` orthonormal, and writes `q = mᵀ p`.
        fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, factors: [&mut Buffer; 2]) -> Result<()>
            | profile(Compression: m, factors[0], factors[1]), halves(wide m), meta(nothing);

        /// Writes `p qᵀ / among` for the factors `[p, q]`.
        fn join(&self, of: PowerSgd, shape: Shape, factors: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()>
            | profile(= Traffic::compression("join", &[&factors[0], &factors[1], out])), halves(as_is), meta(nothing);
    }
}

/// The error of `op` that this refusal is.
pub fn compress_error(op: &'static str) -> impl Fn(CompressError) -> Error {
    move |source| Error::Compress { op, source: Box::new(source) }
}

/// Rejects memory whose length differs from the value's.
pub fn require_count(count: usize, wanted: usize) -> Result<()> {
    if count == wanted { Ok(()) } else { Err(BufferError::Range { start: 0, end: wanted, count }.into()) }
}

/// Rejects a matrix, or factors p and q, whose lengths do not match the shape.
pub fn require_factors(of: PowerSgd, shape: Shape, m: &Buffer, [p, q]: [&Buffer; 2]) -> Result<()> {
    of.check(shape).map_err(compress_error("powersgd"))?;
    let [of_p, of_q] = of.factors(shape);
    [(m, shape.len()), (p, of_p), (q, of_q)].into_iter().try_for_each(|(x, len)| require_count(x.count(), len))
}
