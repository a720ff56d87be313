//! Tests through the public interface. The model checker has a program of its own, `schedules`. One program, because
//! each costs a link.

mod agreement;
mod buffer;
mod callers;
mod conformance;
mod exact;
mod faults;
mod group;
mod hash;
mod launcher;
mod memory;
mod mesh;
mod mesh_arithmetic;
mod ops;
mod pending;
mod random;
mod spmd_reshapes;
mod spmd_rules;
mod spmd_types;
mod tree;
mod world;
