//! PipeDream's planner: the layers of each stage, and its number of replicas (Narayanan et al., SOSP 2019,
//! section 3.1).
//!
//! ```text
//! Profile ──States::new──▶ States ──plan(levels, options)──▶ Plan
//!   layers, edges:          where the model                   stages of each level of the topology,
//!   times and bytes         may be cut                        replication, time of a mini-batch
//! ```
//!
//! A profile is a text file in the format that PipeDream published, with the times of a mini-batch on one machine. The
//! planner searches all partitions by a dynamic programme, level by level of the topology, and returns the one whose
//! slowest stage is fastest.
//!
//! ```
//! use meshwork_pipeline::partition::{Level, Options, Profile, States, plan};
//!
//! // Two layers that compute, and one of which nearly all is weights.
//! let profile: Profile = "\
//! a -- Conv -- forward_compute_time=20.0, backward_compute_time=40.0, activation_size=1000, parameter_size=0
//! b -- Conv -- forward_compute_time=10.0, backward_compute_time=20.0, activation_size=1000, parameter_size=0
//! c -- Linear -- forward_compute_time=10.0, backward_compute_time=20.0, activation_size=10, parameter_size=4e8
//! \ta -- b
//! \tb -- c
//! ".parse()?;
//! let states = States::new(&profile)?;
//! let plan = plan(&states, &[Level { machines: 4, bytes_per_second: 1e9 }], &Options::default())?;
//!
//! // The convolutions on three machines, which have no weights to keep equal; the linear layer on one.
//! let stages: Vec<_> = plan.levels[0].iter().map(|stage| (stage.start..stage.end, stage.replication)).collect();
//! assert_eq!(stages, [(0..2, 3), (2..3, 1)]);
//! assert!((plan.time_per_stage_s - 0.03).abs() < 1e-9 && (plan.single_machine_s - 0.12).abs() < 1e-9);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod order;
mod plan;
mod profile;
mod states;

pub use error::{PlanError, ProfileError, ProfileFault};
pub use plan::{Level, Method, Options, Plan, PlannedStage, plan};
pub use profile::{Layer, Profile};
pub use states::{State, States};
