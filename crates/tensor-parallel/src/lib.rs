//! Tensor and sequence parallel layers (Shoeybi et al., 2019; Korthikanti et al., 2022).
//!
//! Each layer reads as its equation. Its collectives are named, differentiable operations of the tape, called where the
//! equation needs them; a call that is missing or wrong does not type-check. Every layer works for any degree, 1 included,
//! where the collectives are the identity.
//!
//! ```text
//!            Invariant ──copy──▶ Replicate ──column──▶ Shard ──gelu──▶ Shard ──row──▶ Partial ──all_reduce──▶ Invariant
//! sequence:  Shard(seq) ─all_gather─▶ Replicate ─────────── the same ───────────▶ Partial ─reduce_scatter─▶ Shard(seq)
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod attention;
mod linear;
mod mlp;
mod region;
mod vocab;

pub use attention::{ParallelAttention, ParallelGroupedAttention};
pub use linear::{ColumnLinear, RowLinear};
pub use mlp::{ParallelMlp, ParallelSwiGlu};
pub use region::Region;
pub use vocab::VocabParallelEmbedding;
