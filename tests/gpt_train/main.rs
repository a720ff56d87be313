//! The program `gpt_train` as a user runs it: flags and files in; standard output, metrics and exit codes out.

#[path = "../../examples/gpt_train/card/mod.rs"]
#[allow(dead_code)] // The program calls it.
mod card;
mod checkpoints;
#[path = "../../examples/gpt_train/compression/mod.rs"]
#[allow(dead_code)] // The program calls it.
mod compression;
#[cfg(feature = "emulator")]
mod devices;
#[cfg(unix)]
mod ending;
#[path = "../example/mod.rs"]
mod example;
#[cfg(feature = "emulator")]
mod graphs;
mod inputs;
mod metrics;
#[cfg(all(unix, feature = "emulator"))]
mod nccl;
#[cfg(unix)]
mod processes;
mod program;
mod refusals;
mod terminal;
mod training;
#[cfg(feature = "emulator")]
mod tuning;
