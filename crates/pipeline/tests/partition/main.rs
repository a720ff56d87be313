//! The planner: PipeDream's published partitions, and a search through all of them as the oracle.

mod golden;
