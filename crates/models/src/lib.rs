//! Models written over the mesh.
//!
//! A model is cut into stages of layers. [`Stage`] is one of them; [`gpt2`] is the first model. Model code reads as the
//! paper's equations, and each collective is visible at its call.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod gpt2;
mod stage;

pub use stage::{Boundary, Part, Stage};
