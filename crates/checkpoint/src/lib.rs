#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

/// `Debug` of errors prints their text, for `unwrap` and for a `main` that returns a `Box<dyn Error>`.
macro_rules! debug_as_display {
    ($error:ty) => {
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

mod checksum;
mod diff;
mod exchange;
mod folder;
mod index;
mod latest;
mod lock;
mod piece_file;
mod plan;
mod reader;
mod room;
mod slice;
mod snapshot;
mod summary;
mod tensor;
mod unread;
mod verify;
mod writer;

pub use checksum::Checksum;
pub use diff::{Difference, JsonDifference, TensorDifference, diff, json_differences};
pub use exchange::{Alone, Exchange, ExchangeError, ThreadExchange, threads};
pub use folder::{folder_name, steps};
pub use index::{File, Index, StoredPiece, StoredTensor};
pub use latest::{Latest, PassedOver, latest_complete};
pub use lock::{Lock, LockError};
pub use plan::{Held, PlanError, PlannedPiece, SavePlan};
pub use reader::{Checkpoint, ReadError};
pub use room::{free_bytes, stored_bytes};
pub use slice::{Block, Slice, copy};
pub use snapshot::{Snapshot, SnapshotError};
pub use summary::Summary;
pub use tensor::{Dtype, Tensor, TensorKind};
pub use unread::{Damage, FORMAT, Unread, Unreadable};
pub use verify::{Unit, share};
pub use writer::{SaveError, Saved, Writer};
