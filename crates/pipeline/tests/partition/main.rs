//! The planner: PipeDream's published partitions, a search through all partitions as its oracle, and invalid profiles.

mod golden;
mod large;
mod oracle;
mod reader;
