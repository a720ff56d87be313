//! Bucketed gradient reduction that overlaps with the backward pass.
//!
//! Gradients lie in flat buckets. As soon as the last gradient of a bucket is final, its reduction starts and runs while
//! backward goes on. [`plan`] decides which gradients share a bucket, [`rounds`] over which groups they are summed, and
//! [`Reducer`] runs the reductions. None of them knows tensors: a gradient is a range of a
//! [`Buffer`](meshwork_core::Buffer), so any framework can use them.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod plan;
mod reducer;

pub use plan::{BucketPlan, Member, plan};
pub use reducer::{Bucket, BucketEvent, ReduceError, Reducer, rounds};
