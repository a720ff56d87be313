//! Kernel traits: groups of operations that a device offers, as small object-safe traits over untyped buffers plus
//! plain numbers. Shapes have been checked and types inferred by the time they are called. Each kernel trait has one
//! file here, which states its methods once, and one sibling per device.
//!
//! An extent may be 0: a rank may have no samples of a batch, an expert no rows. Then a result without elements is not
//! written, and a sum without terms is zero.
//!
//! Tensors have f32 or f64. Where a trait says that it takes 16 bits, all values of a call may be bf16, or all f16. The
//! bits are those of the same call on f32 copies with results rounded once, as in [`Pointwise::cast`]. Statistics of
//! rows, gradients of biases, gains and tables, and losses are not values: they stay f32 and f64.

#[macro_use]
mod table;

mod attention;
mod channel_norm;
mod compression;
mod elementwise;
mod embedding;
mod grouped;
mod indexing;
mod layout;
mod loss;
mod matmul;
mod norm;
mod operand;
mod optim;
mod outcome;
mod permutation;
mod pointwise;
mod precision;
mod reduction;
mod rotary;
mod routing;
mod traffic;
mod windows;

pub use attention::{
    Attention, AttentionDropout, AttentionMasks, AttentionShape, DocumentPositions, GroupedShape, Pattern, Reach,
    TurnedHeads, seen_pairs,
};
pub use channel_norm::{ChannelNorm, Groups, MeanVariance, Statistics};
pub use compression::{Compression, compress_error, require_count, require_factors};
pub use elementwise::{Elementwise, HostFn, Map, Zip};
pub use embedding::{Embedding, TableGrad};
pub use grouped::{GroupBlocks, Grouped, GroupedGemm, GroupedGrad, block_rows};
pub use indexing::{Indexing, Picks};
pub use layout::{Layout, check_copy};
pub use loss::{Loss, PairLosses, PairNumber, Preference, VocabShard};
pub use matmul::{FEW_TERMS, Gemm, Matmul};
pub use norm::Norm;
pub use optim::{FlatParts, Measured, Optim, WholeOptim, WholePart, WholeVectors};
pub(crate) use outcome::Outcome;
pub use permutation::{Choices, Permutation};
pub use pointwise::{DropoutMask, Pointwise};
pub use precision::{Precision, tf32};
pub use reduction::Reduction;
pub use rotary::{Divisors, LongRope, Rotary, RotaryScaling, Yarn};
pub use routing::{Draw, Overflow, Pick, Routing, Selected, Selection};
pub(crate) use traffic::Traffic;
pub use windows::{Window, Windows};
