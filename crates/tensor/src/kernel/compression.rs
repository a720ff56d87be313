//! Lossy compression of f32 values, and the state of error feedback.

use super::table::*;
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::Buffer;

kernels! {
    /// Messages in the [wire format](meshwork_compress::wire), as bytes in buffers of the device, for schemes without a
    /// warm state; and the equations of [feedback](meshwork_compress::feedback). Every device gives the bits of
    /// `meshwork-compress`.
    pub trait Compression at compression {
        /// Writes the message of `x` to `message`, from byte `at` on: [`wire_bytes`](meshwork_compress::wire_bytes)
        /// bytes.
        ///
        /// # Errors
        /// A shape that the scheme does not compress, or that `x` does not have; no room for the message.
        fn pack(
            &self,
            scheme: &Scheme,
            shape: Shape,
            draws: Draws,
            x: &Buffer,
            message: &mut Buffer,
            at: usize,
        ) -> Result<()>
            | profile(Compression: x, message), halves(wide x), meta(nothing);

        /// Decodes a message into the elements of `out` from `at` on, or adds it to them. `message` has exactly its
        /// bytes: a [slice](Buffer::slice) of the received buffer.
        ///
        /// # Errors
        /// A message of another scheme or shape, or a malformed one.
        fn unpack(
            &self,
            scheme: &Scheme,
            shape: Shape,
            message: &Buffer,
            fold: Fold,
            out: &mut Buffer,
            at: usize,
        ) -> Result<()>
            | profile(Compression: message, out), halves({
                  self.write(out, at..at + shape.rows() * shape.cols(), fold == Fold::Add, |out, at| {
                      self.inner.compression()?.unpack(scheme, shape, message, fold, out, at)
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

        /// The first half of PowerSGD for a matrix `m` of this shape: draws random values for the columns of `q` that
        /// are zero, and writes `p = m q`. `p` and `q` have the elements of [`PowerSgd::factors`].
        fn left_factor(
            &self,
            of: PowerSgd,
            shape: Shape,
            draws: Draws,
            m: &Buffer,
            q: &mut Buffer,
            p: &mut Buffer,
        ) -> Result<()>
            | profile(Compression: m, q, p), halves(wide m), meta(nothing);

        /// The second half: makes the columns of `p` orthonormal, and writes `q = mᵀ p`.
        fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, p: &mut Buffer, q: &mut Buffer) -> Result<()>
            | profile(Compression: m, p, q), halves(wide m), meta(nothing);

        /// Writes `p qᵀ / among` for the factors `[p, q]`.
        fn join(&self, of: PowerSgd, shape: Shape, factors: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()>
            | profile(= Traffic::compression("join", &[&factors[0], &factors[1], out])), halves(as_is), meta(nothing);
    }
}
