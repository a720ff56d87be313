//! The words that keys and flags take, and the types of other crates that sections and words stand for.

use std::sync::Arc;
use std::time::Duration;

use meshwork_core::{Axis, Mesh, MeshError};
use meshwork_optim::{AdamW, Decay, LrSchedule, Rule, Sgd};
use meshwork_tensor::cpu::{Cpu, Precision};
use serde::Serialize;
use toml::Value;

use super::sections::{Comm, LrScheduler, Optimizer, Parallelism};
use super::setting::{Setting, words};

words! {
    /// `model.kind`.
    ModelKind {
        /// GPT-2: LayerNorm, learned positions, GELU, biases.
        Gpt2 = "gpt2",
        /// Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.
        Llama = "llama",
    }

    /// `training.dtype`.
    Dtype {
        /// Single precision.
        F32 = "f32",
        /// Products of bf16, added up in f32.
        Bf16 = "bf16",
    }

    /// `optimizer.name`.
    OptimizerName {
        /// [`AdamW`].
        Adamw = "adamw",
        /// [`Sgd`].
        Sgd = "sgd",
    }

    /// `lr_scheduler.decay`.
    DecayName {
        /// [`Decay::None`].
        None = "none",
        /// [`Decay::Linear`].
        Linear = "linear",
        /// [`Decay::Cosine`].
        Cosine = "cosine",
    }

    /// Where the ranks compute: `--device`.
    Device {
        /// The threads of this process.
        Cpu = "cpu",
    }
}

impl Dtype {
    /// The corresponding precision of a device.
    #[must_use]
    pub const fn precision(self) -> Precision {
        match self {
            Self::F32 => Precision::F32,
            Self::Bf16 => Precision::Bf16,
        }
    }
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

impl Parallelism {
    /// The mesh, with every axis, as the mesh string gives it. (ep borrows its ranks from dp and cp.)
    ///
    /// # Errors
    /// Where a degree is 0 or the number of ranks overflows.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        Mesh::new([(Axis::Tp, self.tp), (Axis::Cp, self.cp), (Axis::Dp, self.dp), (Axis::Pp, self.pp)])
    }

    /// Number of ranks of the [mesh](Self::mesh), or `None` if it overflows.
    #[must_use]
    pub fn world_size(&self) -> Option<usize> {
        self.mesh().ok().map(|mesh| mesh.world_size())
    }
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

impl Comm {
    /// The timeout as a duration. A longer one is cut to a century, so that it can be added to a clock.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_seconds.min(3e9))
    }
}
