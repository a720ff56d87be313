//! Tests through the public interface. One program, because each costs a link.

mod activations;
mod adapters;
mod canonical;
mod common;
mod opaque;
mod own_layers;
mod parity;
mod spmd_misuse;
