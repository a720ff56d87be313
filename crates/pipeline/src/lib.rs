#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

/// `Debug` of errors is their text, for `unwrap` and for a `main` that returns a `Box<dyn Error>`.
macro_rules! debug_as_display {
    ($error:ty) => {
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        }
    };
}

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
