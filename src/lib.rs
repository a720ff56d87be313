#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub use meshwork_checkpoint as checkpoint;
pub use meshwork_compress as compress;
pub use meshwork_context_parallel as context_parallel;
pub use meshwork_core as core;
pub use meshwork_cpu as cpu;
pub use meshwork_data_parallel as data_parallel;
#[cfg(feature = "diff")]
pub use meshwork_diff as diff;
pub use meshwork_engine as engine;
pub use meshwork_models as models;
pub use meshwork_moe as moe;
pub use meshwork_mpi as mpi;
pub use meshwork_nn as nn;
pub use meshwork_optim as optim;
pub use meshwork_pipeline as pipeline;
#[cfg(feature = "train")]
pub use meshwork_plan as plan;
pub use meshwork_tensor as tensor;
pub use meshwork_tensor_parallel as tensor_parallel;
#[cfg(feature = "testkit")]
pub use meshwork_testkit as testkit;
#[cfg(feature = "train")]
pub use meshwork_train as train;

/// The programs in the guides.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../docs/attention.md")]
    mod attention {}
    #[doc = include_str!("../docs/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../docs/clusters.md")]
    mod clusters {}
    #[cfg(feature = "diff")]
    #[doc = include_str!("../docs/mesh_diff.md")]
    mod mesh_diff {}
    #[doc = include_str!("../docs/operations.md")]
    mod operations {}
    #[doc = include_str!("../docs/partition.md")]
    mod partition {}
    #[doc = include_str!("../docs/profile.md")]
    mod profile {}
}

/// The items that most programs need. No name hides one of the standard library but `Result`, which is the standard one
/// unless its error is left out.
pub mod prelude {
    pub use meshwork_core::{Axis, Group, Mesh, Rank, ReduceOp, RunError, Ty, Types, World};
    pub use meshwork_cpu::Cpu;
    pub use meshwork_engine::{Numerics, Plan, ScheduleSpec, StepReport, TrainError, Trainer};
    pub use meshwork_nn::{Activation, Batch, BatchSource, Field, Model, Stage, StageSpec};
    pub use meshwork_nn::{LayerNorm, Positions, RmsNorm};
    pub use meshwork_tensor::meta::Meta;
    pub use meshwork_tensor::{
        Declarations, Device, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var,
    };
    pub use meshwork_tensor_parallel::Region;
    #[cfg(feature = "train")]
    pub use meshwork_train::Data;
    #[cfg(feature = "train")]
    pub use meshwork_train::config::{Args, Config};
}
