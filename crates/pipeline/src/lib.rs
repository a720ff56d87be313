//! Pipeline schedules as plain data, and one interpreter that runs them.
//!
//! A pipeline cuts a model into *stages*, puts them on *ranks*, and feeds them *micro-batches*. Who does what
//! when is a [`Schedule`]: per rank, a list of [`Action`]s. It is data, so that it can be printed, proved and
//! tested as a table that a person reads; nothing of it is hidden in control flow.
//!
//! ```text
//! Generator::build ──▶ Schedule ──lower──▶ Lowered ──run──▶ your StageRunner, your Transport
//!  or a text file         │                   ▲
//!                         ├─ check ───────────┘  proves it: all parts, in order, no deadlock; what it holds at once
//!                         └─ simulate ──▶ Timeline ──▶ text_grid, svg, chrome_trace: as the papers draw it
//! ```
//!
//! ```
//! use meshwork_pipeline::{Shape, by_name, lower, render};
//!
//! let schedule = by_name("1f1b")?.build(Shape { pp: 2, virtual_stages: 1, micros: 3 })?;
//! assert_eq!(
//!     render(&schedule)?,
//!     "rank 0 | F0 F1       B0--- F2 B1---    B2---\n\
//!      rank 1 |    F0 B0--- F1 B1--- F2 B2---\n"
//! );
//! let lowered = lower(&schedule)?; // with its sends and receives, and proved again
//! assert_eq!(lowered.peaks(), [2, 1]); // micro-batches whose activations live at once, per rank
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The crate has no dependency and no feature. It knows no tensors: the interpreter is generic over [`StageRunner`]
//! and [`Transport`], two small traits.
#![forbid(unsafe_code)]

pub mod partition;
mod runtime;
mod schedule;

#[cfg(feature = "channel")]
pub use runtime::{ChannelError, ChannelTransport, channels};
pub use runtime::{Event, Interpreter, Phase, RunError, StageRunner, Transport, run};
pub use schedule::{
    Action, ActionKind, CheckError, Costs, DefaultMicros, Direction, Fault, Generator, Interval, Lowered, MicroCounts,
    ParseActionError, ParseScheduleError, Report, Schedule, Shape, ShapeError, Tag, TextFault, Timeline,
    UnknownSchedule, Weights, breadth_first, by_name, check, chrome_trace, default_micros, dualpipe_v, forward_only,
    forward_only_replicated, gpipe, interleaved_1f1b, lower, one_f_one_b, one_f_one_b_replicated, parse_actions,
    pipedream, pipedream_2bw, render, simulate, svg, text_grid, zb_h1, zb_h2, zb_v,
};
