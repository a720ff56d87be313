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

/// An error or a kind of fault: each variant with its fields, and with its message, which names them.
macro_rules! messages {
    ($(#[$meta:meta])* pub enum $name:ident { $(
        $(#[$doc:meta])* $variant:ident $({ $($field:ident: $type:ty),+ })? => $text:literal $(, $value:expr)*;
    )+ }) => {
        $(#[$meta])*
        #[non_exhaustive]
        #[allow(missing_docs, reason = "fields are named as in the message")]
        pub enum $name {
            $($(#[$doc])* $variant $({ $($field: $type),+ })?,)+
        }

        impl std::fmt::Display for $name {
            #[allow(unused_variables, reason = "some messages read all fields through one of them")]
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$variant $({ $($field),+ })? => write!(f, $text $(, $value)*),)+
                }
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
