//! A compressed value.

use crate::error::require_count;
use crate::planes::TILE;
use crate::wire::{HEADER, VERSION};
use crate::{Compressor, Draws, Fold, MessageError, Result, Shape, Values};
use meshwork_core::hash::hash;

/// Bytes of a message, header included. They depend only on the scheme and shape.
///
/// # Errors
/// A shape that the scheme does not support.
pub fn wire_bytes(compressor: &(impl Compressor + ?Sized), shape: Shape) -> Result<usize> {
    compressor.check(shape)?;
    Ok(HEADER + compressor.body_bytes(shape))
}

/// A compressed value, as sent.
///
/// Messages cannot be added, because the bytes of most methods are not numbers: restore them, or use
/// [`sum`](crate::sum()).
///
/// ```compile_fail,E0369
/// fn sum(a: meshwork_compress::Message, b: meshwork_compress::Message) {
///     let _ = a + b;
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message(Vec<u8>);

impl Message {
    /// Compresses `x`. `warm` is the state of [`Compressor::warm_len`] elements, empty for most methods.
    ///
    /// # Errors
    /// A shape that the scheme does not support, or slices of the wrong length.
    pub fn compress(
        compressor: &(impl Compressor + ?Sized),
        x: &[f32],
        shape: Shape,
        draws: Draws,
        warm: &mut [f32],
    ) -> Result<Message> {
        let mut bytes = vec![0; wire_bytes(compressor, shape)?];
        compress_into(compressor, x, shape, draws, warm, &mut bytes)?;
        Ok(Message(bytes))
    }

    /// Wraps a received message. Its bytes are checked when it is restored.
    pub fn received(bytes: Vec<u8>) -> Message {
        Message(bytes)
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes to send.
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    /// Restores the value into `out`, or adds it to the old contents.
    ///
    /// # Errors
    /// A malformed message, or a message of another scheme or shape. In that case `out` may be partly overwritten.
    pub fn restore(
        &self,
        compressor: &(impl Compressor + ?Sized),
        shape: Shape,
        fold: Fold,
        out: &mut [f32],
    ) -> Result<()> {
        restore(&self.0, compressor, shape, fold, out)
    }
}

/// As [`Message::compress`], into the caller's memory of [`wire_bytes`] bytes.
///
/// # Errors
/// A shape that the scheme does not support, or slices of the wrong length.
pub fn compress_into(
    compressor: &(impl Compressor + ?Sized),
    x: &[f32],
    shape: Shape,
    draws: Draws,
    warm: &mut [f32],
    bytes: &mut [u8],
) -> Result<()> {
    require_count("the message", bytes.len(), wire_bytes(compressor, shape)?)?;
    require_count("the value", x.len(), shape.len())?;
    require_count("the warm state", warm.len(), compressor.warm_len(shape))?;
    let (front, body) = bytes.split_at_mut(HEADER);
    front.copy_from_slice(&header(compressor, shape));
    // Methods expect zeros, as a new message has.
    body.fill(0);
    compressor.write(x, shape, draws, warm, body);
    Ok(())
}

/// As [`Message::restore`], from borrowed bytes.
///
/// # Errors
/// A malformed message, or a message of another scheme or shape. In that case `out` may be partly overwritten.
pub fn restore(
    bytes: &[u8],
    compressor: &(impl Compressor + ?Sized),
    shape: Shape,
    fold: Fold,
    out: &mut [f32],
) -> Result<()> {
    compressor.check(shape)?;
    require_count("the restored value", out.len(), shape.len())?;
    Ok(compressor.read(body(bytes, compressor, shape)?, shape, fold, out)?)
}

/// As [`restore`] of a dense method, of the [tiles](TILE) from `first` on whose elements `out` has: so several threads
/// share a message.
///
/// # Errors
/// As [`restore`]; `out` that is no run of tiles.
pub fn restore_tiles(
    bytes: &[u8],
    values: Values,
    shape: Shape,
    fold: Fold,
    first: usize,
    out: &mut [f32],
) -> Result<()> {
    values.check(shape)?;
    let rest = shape.len().saturating_sub(first.saturating_mul(TILE));
    let whole = if out.len() < rest { out.len() / TILE * TILE } else { rest };
    require_count("the restored tiles", out.len(), whole)?;
    Ok(values.read_tiles(body(bytes, &values, shape)?, shape, fold, first, out)?)
}

/// The header of a message.
pub fn header(compressor: &(impl Compressor + ?Sized), shape: Shape) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = VERSION;
    header[1] = compressor.method() as u8;
    let fingerprint = hash(format!("{} {shape}", compressor.name()).as_bytes()) as u32;
    header[4..8].copy_from_slice(&fingerprint.to_le_bytes());
    header[8..].copy_from_slice(&(shape.len() as u64).to_le_bytes());
    header
}

/// The body of a message, if it is one of this compressor and shape.
fn body<'a>(bytes: &'a [u8], compressor: &(impl Compressor + ?Sized), shape: Shape) -> Result<&'a [u8], MessageError> {
    let wanted = HEADER + compressor.body_bytes(shape);
    let Some((found, body)) = bytes.split_at_checked(HEADER) else {
        return Err(MessageError::Bytes { bytes: bytes.len(), wanted });
    };
    let expected = header(compressor, shape);
    if found[0] != VERSION {
        return Err(MessageError::Version(found[0]));
    }
    if found[1] != expected[1] {
        return Err(MessageError::Method { found: found[1], wanted: compressor.method() });
    }
    if found[2..4] != [0; 2] {
        return Err(MessageError::Padding);
    }
    if found != expected {
        return Err(MessageError::Fingerprint { scheme: compressor.name(), shape });
    }
    if bytes.len() == wanted { Ok(body) } else { Err(MessageError::Bytes { bytes: bytes.len(), wanted }) }
}
