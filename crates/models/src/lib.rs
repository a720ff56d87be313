//! Models written over the mesh.
//!
//! A model is cut into stages of layers. [`Stage`] is one of a language model, [`gpt2`] or [`llama`]; [`resnet`] and
//! [`vgg`] classify images and are a [`network::Network`], any ordered list of layers. Model code reads as the paper's
//! equations, and each collective is visible at its call.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod gpt2;
pub mod layers;
pub mod llama;
pub mod network;
pub mod resnet;
mod stage;
pub mod vgg;

pub use stage::{Boundary, Part, Stage};
