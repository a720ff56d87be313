#![doc = include_str!("../README.md")]
//!
//! # How it works
//!
//! ```text
//! library ──▶ wire ──▶ port ──▶ endpoint ──▶ flight ──▶ plan ──▶ cells
//! any MPI     messages  ranks   a rank's     an opera-  who sends members of
//!             between   of this end of a     tion, its  what to   a group by
//!             processes process world        memory     whom      process
//!                                  └──▶ judge: the first fault, told to all
//! ```
//!
//! - **A rank that waits moves the messages of its process itself**, so that none is late; while all ranks compute, one
//!   thread does. Over TCP that thread sleeps until a connection has something, MPI has to be asked. The other ranks
//!   that wait sleep until something arrives for them: see the module `lookout`.
//! - **Every collective is our own, over messages between two processes**, whatever the library: sums are those of the
//!   balanced tree, and have the bits of [threads](meshwork_core::comm::thread). The first message of a member of a
//!   collective to another one says what it does, so ranks in different operations are found where they meet.
//! - **What ranks of a process have in common leaves it once**: they add up, and hand on, through memory.
//! - **Operations own their memory**: large messages are written into the output, and sent from the input, in place.
//!   Without MPI a process reads them from the memory of another one of its host: see the module `neighbour`.
//! - **Without MPI** connections over TCP carry the same messages: see [`Meeting`].
//! - **Faults** have the words of threads: see the module `judge`.
//!
//! Unsafe code: `library` calls MPI; `wire` keeps its requests' memory; `ground` hands out disjoint parts of a buffer.

mod block;
mod carrier;
mod cells;
mod communicator;
mod cores;
mod endpoint;
mod error;
mod flight;
mod ground;
mod judge;
mod library;
mod life;
mod lookout;
mod meeting;
mod native;
mod neighbour;
mod packet;
mod pause;
mod plan;
mod port;
mod runtime;
mod sockets;
mod stream;
mod watch;
mod wire;

pub use error::MpiError;
pub use library::{Kind, Library};
pub use meeting::Meeting;
pub use native::Reduction;
pub use runtime::{Options, Runtime, join};
