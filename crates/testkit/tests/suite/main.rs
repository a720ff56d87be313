//! Tests through the public interface. One program, because each costs a link.

#[cfg(feature = "device")]
mod check;
mod gradcheck;
mod parity;
mod throttled;
