//! The planner: PipeDream's published partitions, a search through all partitions as its oracle, and profiles that are none.

mod golden;
mod large;
mod oracle;
mod reader;
