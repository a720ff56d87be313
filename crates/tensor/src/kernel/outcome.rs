//! The buffers that a kernel returns.

use super::Selected;
use crate::error::Result;
use meshwork_core::Buffer;

/// The buffers that a kernel returns.
pub(crate) trait Outcome: Sized {
    /// Calls `visit` with each buffer. The first one is the value; the others accompany it: statistics, indices,
    /// gradients of gains.
    fn each(&self, visit: &mut dyn FnMut(&Buffer));

    /// Replaces each buffer by `f(buffer, first)`. `first`: whether the buffer is the value.
    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self>;
}

impl Outcome for () {
    fn each(&self, _visit: &mut dyn FnMut(&Buffer)) {}

    fn map(self, _f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        Ok(())
    }
}

impl Outcome for Buffer {
    fn each(&self, visit: &mut dyn FnMut(&Buffer)) {
        visit(self);
    }

    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        f(self, true)
    }
}

impl<T: Outcome> Outcome for Option<T> {
    fn each(&self, visit: &mut dyn FnMut(&Buffer)) {
        if let Some(some) = self {
            some.each(visit);
        }
    }

    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        self.map(|some| some.map(f)).transpose()
    }
}

/// Implements `Outcome` for a struct of buffers, or for a tuple or an array by index.
macro_rules! outcome {
    ($type:ty { $value:tt $(, $other:tt)* }) => {
        impl Outcome for $type {
            fn each(&self, visit: &mut dyn FnMut(&Buffer)) {
                visit(&self.$value);
                $(visit(&self.$other);)*
            }

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
    fn each(&self, visit: &mut dyn FnMut(&Buffer)) {
        self.iter().for_each(visit);
    }

    fn map(self, f: &mut dyn FnMut(Buffer, bool) -> Result<Buffer>) -> Result<Self> {
        let [value, other] = self;
        Ok([f(value, true)?, f(other, false)?])
    }
}
