//! What one rank runs: its stages, their tapes, the pipeline's messages, and the way of its gradients.

mod blueprint;
mod chunk;
mod error;
mod gradients;
mod layout;
mod learner;
mod trace;
mod transport;
mod watch;

pub use blueprint::{Blueprint, RankModel, Tie};
pub use chunk::{Chunk, Live, Message, Pass, Purpose, Running};
pub use error::TrainError;
pub use gradients::{Gradients, Trees};
pub use layout::{Counted, Key, TIES, buckets, counted, join_ties, reducer};
pub use learner::Learner;
pub use trace::{Trace, trace};
pub use transport::PipeTransport;
pub use watch::{At, Watch};
