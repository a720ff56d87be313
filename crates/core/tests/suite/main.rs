//! Tests through the public interface. The model checker has a program of its own, `schedules`. One program, because
//! each costs a link.

mod agreement;
mod callers;
mod conformance;
mod faults;
mod group;
mod hash;
mod launcher;
mod mesh;
mod mesh_arithmetic;
mod ops;
mod pending;
mod spmd_reshapes;
mod spmd_rules;
mod spmd_types;
mod tree;
mod world;
