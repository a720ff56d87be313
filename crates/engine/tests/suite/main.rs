//! Tests of whole trainers through the public interface. The fuzzer has a program of its own, `fuzz`. One program,
//! because each costs a link.

mod calls;
mod compress;
mod decoder;
mod documents;
mod dry_run;
mod experts;
mod families;
mod huggingface;
mod images;
mod llama;
mod loads;
mod micro_batches;
mod model;
mod noise;
mod offload;
mod one_rank;
mod runs;
mod sequence;
mod split;
mod state;
mod tower;
mod verify;
