//! The buffers that a kernel returns.

use super::Selected;
use crate::error::Result;
use meshwork_core::Buffer;

/// The buffers that a kernel returns.
pub(crate) trait Outcome: Sized {
    /// Replaces each buffer by `f(buffer, first)`. `first`: whether the buffer is the value; the others accompany it:
    /// statistics, indices, gradients of gains.
    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self>;
}

impl Outcome for () {
    fn map(self, _f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        Ok(())
    }
}

impl Outcome for Buffer {
    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        f(self, true)
    }
}

impl<T: Outcome> Outcome for Option<T> {
    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        self.map(|some| some.map(f)).transpose()
    }
}

/// Implements `Outcome` for a struct of buffers, or for a tuple or an array by index.
macro_rules! outcome {
    ($type:ty { $value:tt $(, $other:tt)* }) => {
        impl Outcome for $type {
            fn map(mut self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
                self.$value = f(self.$value, true)?;
                $(self.$other = f(self.$other, false)?;)*
                Ok(self)
            }
        }
    };
}

outcome!((Buffer, Buffer) { 0, 1 });
outcome!((Buffer, Buffer, Buffer) { 0, 1, 2 });
outcome!(Selected { weights, chosen, routed, kept });

impl Outcome for [Buffer; 2] {
    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        let [value, other] = self;
        Ok([f(value, true)?, f(other, false)?])
    }
}
