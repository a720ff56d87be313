//! From the configuration to the engine's input: a model, a plan and the parts of a plan.

use super::sections::{Comm, Dpo, LrScheduler, Memory, Model, Optimizer, Parallelism, Pipeline, Validation};
use super::words::{ContextMethod, ContextOrder, MoeRouter, Objective, OffloadWord};
use super::{Config, ModelKind, OptimizerName, conditions};
use meshwork_context_parallel::{ByDocument, ContextParallel, Method};
use meshwork_core::comm::thread::Options;
use meshwork_core::{Mesh, MeshError, World};
use meshwork_engine::offload::{Backing, Folder, Offload};
use meshwork_engine::{Numerics, Plan, Samples, ScheduleSpec, Zero, ZeroStage};
use meshwork_models::decoder::{DecoderConfig, DecoderModel};
use meshwork_models::experts::{ExpertGroups, ExpertsConfig, MoeConfig};
use meshwork_models::families::{GPT2, LLAMA};
use meshwork_models::language::{self, Boundary, Frozen};
use meshwork_nn::{Adapted, Model as AnyModel, Preferring};
use meshwork_optim::{Adafactor, Adam8bit, AdamW, Lamb, LrSchedule, Muon, Rule, Sgd};
use meshwork_pipeline::{UnknownSchedule, by_name};
use meshwork_tensor::op::{Order, Preference, Rotary, RotaryScaling};
use meshwork_tensor::tape::Encoding;
use std::sync::Arc;
use std::time::Duration;

impl Config {
    /// The mesh.
    ///
    /// # Errors
    /// Degrees whose product overflows.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        self.parallelism.mesh()
    }

    /// Where its ranks are: threads of this process. Of a mesh that cannot be it is one rank, which says why.
    pub fn world(&self) -> World {
        World::Threads(self.mesh().map_or(1, |mesh| mesh.world_size()))
    }

    /// The model.
    pub fn model(&self) -> Arc<dyn AnyModel> {
        let (cut, boundary, chunk) = (self.parallelism.sequence_parallel, self.boundary(), self.memory.loss_chunk);
        let (frozen, context) = (self.model.frozen(), self.context());
        let block = self.memory.sequence_block;
        let model =
            DecoderModel::new(self.decoder()).with_experts(self.experts()).freeze(frozen).context_parallel(context);
        let model = model.sequence_parallel(cut).documents(boundary).loss_chunk(chunk).sequence_block(block);
        let model = match self.adapters() {
            Some(adapters) => Adapted::new(Arc::new(model), adapters),
            None => return Arc::new(model),
        };
        match self.training.objective {
            Objective::Dpo => {
                let answers = language::answers(self.model.seq_len);
                Arc::new(Preferring::new(model, answers, self.dpo.preference()))
            }
            Objective::Pretrain | Objective::Sft => Arc::new(model),
        }
    }

    /// How cp cuts the sequences of the model, if it does.
    #[must_use]
    pub fn context(&self) -> Option<ContextParallel> {
        let Parallelism { cp, tp, sequence_parallel, ring_degree, context_parallel_order, .. } = self.parallelism;
        let method = match self.parallelism.context_parallel_method {
            ContextMethod::None => return None,
            ContextMethod::AllGather => Method::AllGather,
            ContextMethod::AllToAll => Method::AllToAll,
            ContextMethod::Ring => Method::Ring,
            ContextMethod::Hybrid => Method::Hybrid { ring_degree },
            ContextMethod::Auto => self.context_sizes().best(),
        };
        let ordered = context_parallel_order != ContextOrder::Contiguous && (conditions::ORDERED.holds)(self);
        let places = if let Method::Hybrid { ring_degree } = method { ring_degree } else { cp };
        let order = if ordered { Order::zigzag(places) } else { Order::default() };
        let parts = if sequence_parallel { cp * tp } else { cp };
        let context = ContextParallel::new(method, order, parts);
        Some(match ordered && context_parallel_order == ContextOrder::ByDocument {
            true => context.balanced(Arc::new(ByDocument::default()), cp),
            false => context,
        })
    }

    /// The rule of `data.documents` for the model.
    pub fn boundary(&self) -> Boundary {
        match &*self.data.documents {
            "positions" => Boundary::Positions,
            "attention" => Boundary::Attention,
            _ => Boundary::Ignored,
        }
    }

    /// Section `[moe]`: the experts of the model, if it has any.
    pub fn experts(&self) -> Option<ExpertsConfig> {
        let moe = &self.moe;
        let best = if moe.router == MoeRouter::Bias { 2 } else { 1 };
        let group = moe.num_experts / moe.num_groups.max(1);
        (moe.num_experts > 0).then(|| ExpertsConfig {
            moe: MoeConfig {
                num_experts: moe.num_experts,
                top_k: moe.top_k,
                router: moe.router.into(),
                capacity_factor: moe.capacity_factor,
                overflow: moe.overflow.into(),
                aux_loss_coeff: moe.aux_loss_coeff,
                z_loss_coeff: moe.z_loss_coeff,
                aux_loss_scope: moe.aux_loss_scope.into(),
                bias_update_rate: moe.bias_update_rate,
                jitter: moe.jitter,
                normalise: moe.normalize_top_k,
                routed_scaling: moe.routed_scaling,
                // The two best of a group make its score, as in DeepSeek-V3, or the best.
                groups: ExpertGroups {
                    groups: moe.num_groups,
                    top_groups: moe.top_groups,
                    best: best.min(group.max(1)),
                },
                layers: 1,
            },
            every_n_layers: moe.every_n_layers,
            first_dense_layers: moe.first_dense_layers,
            num_shared_experts: moe.num_shared_experts,
            expert_hidden_size: moe.expert_hidden_size,
            over_tp: self.parallelism.expert_tensor_parallel > 1,
        })
    }

    /// The sizes of the model, and the fields of its family.
    fn sized(&self, family: DecoderConfig) -> DecoderConfig {
        let model = &self.model;
        DecoderConfig {
            vocab_size: model.vocab_size,
            num_layers: model.num_layers,
            hidden_size: model.hidden_size,
            num_heads: model.num_heads,
            num_kv_heads: model.num_kv_heads,
            ffn_hidden_size: model.ffn_hidden_size,
            seq_len: model.seq_len,
            sliding_window: Some(model.sliding_window).filter(|&window| window > 0),
            tie_embeddings: model.tie_embeddings,
            ..family
        }
    }

    /// The decoder of the model.
    pub fn decoder(&self) -> DecoderConfig {
        match (self.model.kind, self.described()) {
            (_, Some(of)) => self.sized(of.decoder),
            (ModelKind::Gpt2, None) => DecoderConfig { dropout: self.model.dropout as f32, ..self.sized(GPT2) },
            (ModelKind::Llama, None) => self.llama(),
        }
    }

    fn llama(&self) -> DecoderConfig {
        let model = &self.model;
        let scaling = (model.rope_scaling_factor != 1.0).then_some(RotaryScaling::Llama3 {
            factor: model.rope_scaling_factor,
            low_frequency_factor: model.rope_scaling_low_freq_factor,
            high_frequency_factor: model.rope_scaling_high_freq_factor,
            original_positions: model.rope_scaling_original_seq_len,
        });
        let rotary = Some(Rotary { scaling, ..Rotary::new(model.rope_theta) });
        DecoderConfig { rotary, norm_eps: model.norm_eps, ..self.sized(LLAMA) }
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
            precision: self.training.matmul_dtype.precision(),
            mixed: self.training.mixed(),
            recompute: self.memory.recompute.into(),
            saved: self.memory.encodings(),
            optimizer: self.optimizer.rule(),
            lr: self.lr_scheduler.schedule(self.optimizer.lr),
            max_norm: self.training.max_norm,
            seed: self.training.seed,
            scatter_gather: self.pipeline.scatter_gather,
            verify: self.training.verify.into(),
            // Data reads each rank's part of the batch by the place of the rank, and a small corpus repeats.
            samples: Samples::MayRepeat,
            zero: self.parallelism.zero(),
            offload: self.memory.offload(),
            virtual_cuts: self.compress.virtual_cuts.clone(),
            compress: self.compress.plan().map_err(|error| meshwork_engine::PlanError::Scheme(error.to_string()))?,
        })
    }

    /// Whether the checkpoint of the best validation stays.
    pub fn keeps_best(&self) -> bool {
        self.checkpoint.best && self.validation.every > 0
    }

    fn numerics(&self) -> Numerics {
        if let Some(blocks) = self.reduction_blocks() { Numerics::Canonical { blocks } } else { Numerics::Fast }
    }
}

impl Model {
    /// The parts that are not trained. With tied embeddings the head is the table.
    pub fn frozen(&self) -> Frozen {
        self.freeze.parse().unwrap_or_default() // checked
    }
}

impl Dpo {
    /// The loss that the section describes.
    pub fn preference(&self) -> Preference {
        Preference { beta: self.beta, label_smoothing: self.label_smoothing }
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

impl Parallelism {
    /// The mesh, with every axis, as the mesh string gives it. (ep borrows its ranks from dp and cp.)
    ///
    /// # Errors
    /// Where a degree is 0 or the number of ranks overflows.
    pub fn mesh(&self) -> Result<Mesh, MeshError> {
        Mesh::of_degrees([self.tp, self.cp, self.ep, self.dp, self.pp])
    }

    /// The ZeRO stage and group.
    pub fn zero(&self) -> Zero {
        let stage = ZeroStage::ALL.get(self.zero_stage).copied().unwrap_or_default();
        Zero { stage, group: Some(self.zero_group).filter(|&group| group > 0) }
    }

    /// Number of ranks of the [mesh](Self::mesh), or `None` if it overflows.
    pub fn world_size(&self) -> Option<usize> {
        [self.dp, self.tp, self.pp, self.cp].into_iter().try_fold(1usize, usize::checked_mul)
    }

    /// The degrees as they are given, for an error about them; cp and ep at 1 are left out, as few meshes use them.
    pub(crate) fn degrees(&self) -> String {
        let seldom = [("cp", self.cp), ("ep", self.ep)].into_iter().filter(|(_, degree)| *degree > 1);
        let seldom = seldom.map(|(axis, degree)| format!(",{axis}={degree}"));
        format!("dp={},tp={},pp={}{}", self.dp, self.tp, self.pp, seldom.collect::<String>())
    }
}

impl Memory {
    /// The encodings of activations that forward keeps for backward.
    pub fn encodings(&self) -> Vec<Encoding> {
        let encodings: [Option<Encoding>; 2] = [self.saved_dtype.into(), self.saved_encoding.into()];
        encodings.into_iter().flatten().collect()
    }

    /// The bytes that a rank may have at once, if they are limited.
    pub fn limit(&self) -> Option<u64> {
        Some(self.limit_bytes).filter(|&bytes| bytes > 0)
    }

    /// The offload, if anything leaves memory.
    pub fn offload(&self) -> Option<Offload> {
        if self.offload == OffloadWord::None {
            return None;
        }
        let all = self.offload == OffloadWord::All;
        let [optimizer, activations, samples] =
            [OffloadWord::Optimizer, OffloadWord::Activations, OffloadWord::Samples]
                .map(|of| all || self.offload == of);
        let to = self.offload_dir.as_ref().map(|dir| Arc::new(Folder(dir.into())) as Arc<dyn Backing>);
        Some(Offload { optimizer, gradients: all, activations, samples, to })
    }
}

impl Optimizer {
    /// The update rule that the section describes.
    pub fn rule(&self) -> Rule {
        let &Self { beta1, beta2, eps, weight_decay, momentum, relative_step, decay_rate, clip_threshold, .. } = self;
        let adamw = AdamW { beta1, beta2, eps, weight_decay };
        match self.name {
            OptimizerName::Adamw => adamw.into(),
            OptimizerName::Sgd => Sgd { momentum, weight_decay }.into(),
            OptimizerName::Lamb => Lamb { beta1, beta2, eps, weight_decay }.into(),
            OptimizerName::Adafactor => {
                Adafactor { relative_step, decay_rate, clip_threshold, weight_decay, ..Adafactor::default() }.into()
            }
            OptimizerName::Adam8bit => Rule::with_adam8bit(Adam8bit { adamw, block: self.block_size }),
            OptimizerName::Muon => Rule::with_muon(Muon { momentum: self.muon_momentum, weight_decay }, adamw),
        }
    }
}

impl LrScheduler {
    /// The schedule that the section describes, for a full learning rate of `base`.
    pub fn schedule(&self, base: f64) -> LrSchedule {
        let &Self { warmup_steps, decay_steps, min_lr_factor, .. } = self;
        LrSchedule { base, warmup_steps, decay: self.decay.into(), decay_steps, min_lr_factor }
    }
}

impl Validation {
    /// Share of each stream that is held out: none without validation.
    pub fn held_out(&self) -> f64 {
        if self.every > 0 { self.fraction } else { 0.0 }
    }
}

impl Comm {
    /// The timeout as a duration. A longer one is cut to a century, so that it can be added to a clock.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_seconds.min(3e9))
    }

    /// The settings of ranks that are threads.
    pub fn options(&self) -> Options {
        Options { timeout: self.timeout() }
    }
}
