#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod decoder;
mod decoder_config;
pub mod experts;
pub mod families;
pub mod huggingface;
pub mod language;
pub mod layers;
pub mod network;
pub mod resnet;
pub mod transformer;
pub mod vgg;

pub use families::{gpt2, llama};
