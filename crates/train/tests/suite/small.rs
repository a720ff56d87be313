//! A model that trains in milliseconds, for tests that compare whole runs.

#![allow(dead_code, reason = "each program uses its own part")]

use meshwork_train::Data;
use meshwork_train::config::{Args, Config};

/// Tokens of a sample.
pub const SEQ: usize = 8;
/// Samples of a step.
pub const BATCH: usize = 8;
/// Width of the residual stream.
pub const HIDDEN: usize = 16;

/// The model, with a vocabulary that no degree divides, on a mesh and with the flags that follow it.
pub fn config(mesh: &str) -> Config {
    let small = "--set model.vocab_size=61 --set model.num_layers=2 --set model.hidden_size=16 --set model.num_heads=4 \
                 --set model.seq_len=8 --set training.global_batch_size=8 --set optimizer.lr=1e-2 \
                 --set metrics.sample_tokens=0 --mesh";
    let words = small.split_whitespace().chain(mesh.split_whitespace());
    Config::from_args(&Args::parse(words)).unwrap_or_else(|error| panic!("{mesh}: {error}"))
}

/// Random tokens. The first targets of a row are masked, a number of them that differs from row to row.
pub fn data() -> Data {
    let mut rng = meshwork_testkit::Rng::new(3);
    let tokens = (0..8 * BATCH * SEQ + 1).map(|_| rng.below(61) as i32).collect();
    Data::from_tokens(tokens, SEQ).masked(|at| at % SEQ < at / SEQ % 5)
}
