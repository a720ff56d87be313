#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod decoder;
pub mod experts;
pub mod gpt2;
pub mod huggingface;
pub mod language;
pub mod layers;
pub mod llama;
pub mod network;
pub mod resnet;
pub mod vgg;
