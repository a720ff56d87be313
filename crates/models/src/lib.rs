//! Models written over the mesh.
//!
//! Each is a [`meshwork_nn::Model`]. [`gpt2`] is a language model; [`resnet`] and [`vgg`] classify images and are a
//! [`network::Network`], any ordered list of layers. Model code reads as the paper's equations, and each collective is visible
//! at its call.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod gpt2;
pub mod language;
pub mod layers;
pub mod network;
pub mod resnet;
pub mod vgg;
