//! The planner's command: a profile and a topology in, the best partition out. The planner itself is
//! [`meshwork_pipeline::partition`].

mod options;
mod report;

pub use options::{Options, PartitionError, usage};
pub use report::Report;
