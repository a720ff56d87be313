#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod ddp;
mod gatherer;
mod parking;
mod plan;
mod reducer;
mod sum;
mod vectors;

pub use ddp::{Ddp, DdpError};
pub use gatherer::{GatherError, GatherEvent, GatherPass, Gatherer, Messages};
pub use parking::Parking;
pub use plan::{BucketPlan, Member, plan};
pub use reducer::{Bucket, BucketEvent, ReduceError, Reducer, cuts_batch, rounds};
pub use sum::Sum;
pub use vectors::{HostVectors, VectorError, Vectors};
