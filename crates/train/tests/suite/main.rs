//! All tests of the crate in one program, because each program costs a build and a link. `processes` starts its own
//! program again, and stands apart.

#![allow(clippy::result_large_err, reason = "tests return the errors of ranks as they are")]

mod arguments;
mod checkpoint;
mod config;
mod configurations;
mod data;
mod diff;
mod dpo;
mod effects;
#[cfg(feature = "emulator")]
mod emulated;
mod faults;
mod generation;
mod huggingface;
mod images;
mod lora;
mod mesh;
mod metrics;
mod mutations;
mod peers;
mod plan;
mod profile;
mod reference;
mod replay;
mod sft;
mod slices;
mod small;
mod special_tokens;
mod tensorboard;
mod texts;
