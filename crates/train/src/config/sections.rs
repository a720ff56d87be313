//! The resolved configuration, one struct per section: every value is known and has been checked.
//!
//! What the keys mean stands in the [table](super::keys); here are only their types.
#![allow(missing_docs)] // One text per key is enough, and the table's is the one that users read.

use std::sync::Arc;
use std::time::Duration;

use meshwork_core::{Axis, Mesh, MeshError};
use meshwork_optim::{AdamW, Decay, LrSchedule, Rule, Sgd};
use meshwork_pipeline::Schedule;
use meshwork_tensor::cpu::{Cpu, Precision};
use serde::{Deserialize, Serialize};

/// Section `[model]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Model {
    pub preset: String,
    pub kind: String,
    pub vocab_size: usize,
    pub num_layers: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub ffn_hidden_size: usize,
    pub seq_len: usize,
    pub tie_embeddings: bool,
    pub dropout: f64,
    pub init_from: Option<String>,
}

/// Section `[parallelism]`, with the mesh string merged in.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Parallelism {
    pub dp: usize,
    pub tp: usize,
    pub pp: usize,
    pub cp: usize,
    pub ep: usize,
    pub sequence_parallel: bool,
    pub zero_stage: usize,
    pub context_parallel_method: String,
    pub expert_tensor_parallel: usize,
}

impl Parallelism {
    /// The mesh, with every axis, as the mesh string gives it. (ep borrows its ranks from dp and cp.)
    ///
    /// # Errors
    /// Where a degree is 0 or the number of ranks overflows.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        Mesh::new([(Axis::Tp, self.tp), (Axis::Cp, self.cp), (Axis::Dp, self.dp), (Axis::Pp, self.pp)])
    }

    /// Number of ranks of the [mesh](Self::mesh), or nothing where it overflows.
    #[must_use]
    pub fn world_size(&self) -> Option<usize> {
        self.mesh().ok().map(|mesh| mesh.world_size())
    }
}

/// Section `[pipeline]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pipeline {
    pub schedule: String,
    pub virtual_stages: usize,
    pub num_microbatches: usize,
    /// Layers of each stage, `uniform` and `cost` worked out.
    pub partition: Vec<usize>,
    pub scatter_gather: bool,
    pub vertical_sync: bool,
    /// Ranks of each stage; none where each has one.
    pub replication: Vec<usize>,
    pub schedule_file: Option<String>,
    /// What it holds.
    #[serde(skip)]
    pub own_schedule: Option<Schedule>,
}

/// Section `[training]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Training {
    pub steps: u64,
    pub global_batch_size: usize,
    pub micro_batch_size: usize,
    pub seed: u64,
    pub dtype: Dtype,
    pub max_norm: f64,
    pub numerics: String,
}

/// `training.dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    F32,
    Bf16,
}

impl Dtype {
    /// As in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    /// As devices know it.
    #[must_use]
    pub const fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::F32,
            Self::Bf16 => Precision::Bf16,
        }
    }
}

/// `optimizer.name`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    Adamw,
    Sgd,
}

/// Section `[optimizer]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Optimizer {
    pub name: OptimizerName,
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
}

impl Optimizer {
    /// The update rule that the section describes.
    #[must_use]
    pub fn rule(&self) -> Rule {
        let &Self { beta1, beta2, eps, weight_decay, momentum, .. } = self;
        match self.name {
            OptimizerName::Adamw => AdamW { beta1, beta2, eps, weight_decay }.into(),
            OptimizerName::Sgd => Sgd { momentum, weight_decay }.into(),
        }
    }
}

/// `lr_scheduler.decay`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecayName {
    None,
    Linear,
    Cosine,
}

/// Section `[lr_scheduler]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LrScheduler {
    pub warmup_steps: u64,
    pub decay: DecayName,
    pub decay_steps: u64,
    pub min_lr_factor: f64,
}

impl LrScheduler {
    /// The schedule that the section describes, for a full learning rate of `base`.
    #[must_use]
    pub fn schedule(&self, base: f64) -> LrSchedule {
        let &Self { warmup_steps, decay_steps, min_lr_factor, .. } = self;
        let decay = match self.decay {
            DecayName::None => Decay::None,
            DecayName::Linear => Decay::Linear,
            DecayName::Cosine => Decay::Cosine,
        };
        LrSchedule { base, warmup_steps, decay, decay_steps, min_lr_factor }
    }
}

/// Section `[data]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Data {
    pub path: Option<String>,
    pub tokenizer: String,
    pub shuffle: bool,
}

/// Section `[validation]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Validation {
    pub every: u64,
    pub steps: u64,
    pub fraction: f64,
}

/// Section `[memory]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Memory {
    pub recompute: String,
    pub offload: String,
    pub limit_bytes: u64,
}

/// Section `[checkpoint]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Checkpoint {
    pub dir: Option<String>,
    pub every: u64,
    pub keep: u64,
    pub resume: bool,
    pub export: Option<String>,
}

/// Section `[metrics]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    pub profile: bool,
    pub profile_steps: u64,
    pub trace: String,
    pub schedule: String,
    pub layer_profile: Option<String>,
}

/// Section `[comm]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comm {
    pub timeout_seconds: f64,
}

impl Comm {
    /// The timeout as a duration. A century stands for anything longer, so that it can be added to a clock.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_seconds.min(3e9))
    }
}

/// Section `[numerics]`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Numerics {
    pub leaves: usize,
}

/// Where the ranks compute: `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Cpu,
}

impl Device {
    /// A device for one rank, which computes products in `dtype`.
    #[must_use]
    pub fn open(self, dtype: Dtype) -> Arc<dyn meshwork_tensor::Device> {
        match self {
            Self::Cpu => Arc::new(Cpu::new(dtype.precision())),
        }
    }
}
