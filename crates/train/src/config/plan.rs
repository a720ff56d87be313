//! From the configuration to the engine's input: a model and a plan.

use super::sections::Pipeline;
use super::{Config, ModelKind};
use meshwork_core::{Mesh, MeshError};
use meshwork_engine::{Numerics, Plan, Recompute, ScheduleSpec};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::llama::{Llama, LlamaConfig};
use meshwork_nn::Model;
use meshwork_pipeline::{UnknownSchedule, by_name};
use meshwork_tensor::op::{Rotary, RotaryScaling};
use std::sync::Arc;

impl Config {
    /// The mesh.
    ///
    /// # Errors
    /// Degrees whose product overflows.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        self.parallelism.mesh()
    }

    /// The model.
    pub fn model(&self) -> Arc<dyn Model> {
        let (model, cut) = (&self.model, self.parallelism.sequence_parallel);
        match model.kind {
            ModelKind::Gpt2 => Arc::new(Gpt2::new(self.gpt2()).sequence_parallel(cut)),
            ModelKind::Llama => Arc::new(Llama::new(self.llama()).sequence_parallel(cut)),
        }
    }

    fn gpt2(&self) -> Gpt2Config {
        let model = &self.model;
        Gpt2Config {
            vocab_size: model.vocab_size,
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            ffn_hidden_size: model.ffn_hidden_size,
            seq_len: model.seq_len,
            tie_embeddings: model.tie_embeddings,
            dropout: model.dropout as f32,
        }
    }

    fn llama(&self) -> LlamaConfig {
        let model = &self.model;
        let scaling = (model.rope_scaling_factor != 1.0).then_some(RotaryScaling {
            factor: model.rope_scaling_factor,
            low_frequency_factor: model.rope_scaling_low_freq_factor,
            high_frequency_factor: model.rope_scaling_high_freq_factor,
            original_positions: model.rope_scaling_original_seq_len,
        });
        LlamaConfig {
            vocab_size: model.vocab_size,
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            num_kv_heads: model.num_kv_heads,
            ffn_hidden_size: model.ffn_hidden_size,
            seq_len: model.seq_len,
            rotary: Rotary { theta: model.rope_theta, scaling },
            norm_eps: model.norm_eps,
            tie_embeddings: model.tie_embeddings,
        }
    }

    /// How the model is trained.
    ///
    /// # Errors
    /// As [`mesh`](Self::mesh); a schedule of an unknown name.
    pub fn plan(&self) -> Result<Plan, meshwork_engine::TrainError> {
        Ok(Plan {
            mesh: self.mesh()?,
            schedule: self.pipeline.spec()?,
            partition: self.pipeline.partition.clone(),
            global_batch_size: self.training.global_batch_size,
            num_microbatches: Some(self.pipeline.num_microbatches),
            numerics: self.numerics(),
            precision: self.training.dtype.precision(),
            recompute: if self.memory.recompute == "selective" { Recompute::Selective } else { Recompute::None },
            optimizer: self.optimizer.rule(),
            lr: self.lr_scheduler.schedule(self.optimizer.lr),
            max_norm: self.training.max_norm,
            seed: self.training.seed,
            scatter_gather: self.pipeline.scatter_gather,
        })
    }

    fn numerics(&self) -> Numerics {
        match self.reduction_blocks() {
            Some(blocks) => Numerics::Canonical { blocks },
            None => Numerics::Fast,
        }
    }
}

impl Pipeline {
    /// The schedule that the section asks for.
    ///
    /// # Errors
    /// An unknown name.
    pub fn spec(&self) -> Result<ScheduleSpec, UnknownSchedule> {
        Ok(match (&self.own_schedule, &self.replication[..]) {
            (Some(own), _) => ScheduleSpec::Own(own.clone()),
            (None, []) => ScheduleSpec::Named {
                generator: by_name(&self.schedule)?,
                virtual_stages: Some(self.virtual_stages),
                vertical_sync: self.vertical_sync,
            },
            (None, replicas) => ScheduleSpec::Replicated(replicas.to_vec()),
        })
    }
}
