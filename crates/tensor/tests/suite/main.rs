//! Tests through the public interface. One program, because each costs a link.

mod collectives;
mod common;
mod copies;
mod devices;
mod downstream_op;
mod dropout;
mod encoded;
mod everyday;
mod everyday_canonical;
mod everyday_ops;
mod gradients;
mod heads;
mod hooks;
mod ids;
mod images;
mod opaque;
mod operands;
mod optimizers;
mod own_ops;
mod padded;
mod recipes;
mod reduction_blocks;
mod swiglu;
mod unchecked;
mod vocab_parallel;
mod widened;
