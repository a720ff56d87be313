//! Tests through the public interface. One program, because each costs a link.

mod common;
mod feedback;
mod laws;
mod malformed;
mod misuse;
mod published;
mod schemes;
mod sums;
mod tables;
