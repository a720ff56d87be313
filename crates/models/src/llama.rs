//! Llama (Touvron et al., 2023; Grattafiori et al., 2024): root mean square norms in front of each block, rotary
//! positions, groups of heads that share keys and values, SwiGLU, no biases, an output head tied to the token table or
//! not. Weights start from N(0, 0.02), the projections into the residual stream scaled by 1/√(2·layers).
//!
//! ```text
//! x = W_tok[ids]                     x ← x + Attn(RMS(x))    x ← x + SwiGLU(RMS(x))   (layers times)
//! logits = RMS(x) · W_headᵀ
//! ```
//!
//! Types, per axis: between blocks the hidden state is `Shard(0)` on dp (the batch), on tp `Invariant` or, sequence
//! parallel, `Shard(1)`, and on cp `Shard(1)` with context parallelism.
//!
//! # Parameters
//!
//! The parameters here and in the Hugging Face format. Weights are `[out.., in]` in both.
//!
//! | here, `layers.{n}.` | dims | there, `model.layers.{n}.` |
//! |---|---|---|
//! | `self_attn.q.weight` | `[heads, head_dim, hidden]` | `self_attn.q_proj.weight` |
//! | `self_attn.kv.weight` | `[2, kv_heads · head_dim, hidden]` | `self_attn.k_proj.weight`, then `self_attn.v_proj.weight` |
//! | `self_attn.out.weight` | `[hidden, heads, head_dim]` | `self_attn.o_proj.weight` |
//! | `mlp.gate_up.weight` | `[ffn, 2, hidden]` | `mlp.gate_proj.weight` and `mlp.up_proj.weight`, row by row |
//! | `mlp.down.weight` | `[hidden, ffn]` | `mlp.down_proj.weight` |
//! | `input_layernorm.weight`, `post_attention_layernorm.weight` | `[hidden]` | the same |
//!
//! `embed_tokens.weight`, `norm.weight` and `lm_head.weight` are the same in both.

use crate::experts::{self, ExpertsConfig, FeedForward, FeedForwardSpec};
use crate::language::{self, Boundary, Frozen, HiddenModule, LanguageSpec, LanguageStage, Sequences};
use meshwork_context_parallel::ContextParallel;
use meshwork_core::Mesh;
use meshwork_moe::GroupedSwiGlu;
use meshwork_nn::{Activation, Batch, Field, Metric, Model, RmsNorm, Stage, StageSpec};
use meshwork_tensor::op::{GroupedHeads, Rotary};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{ParallelGroupedAttention, ParallelSwiGlu, VocabParallelEmbedding};
use std::ops::Range;

/// Standard deviation of initial weights.
const STD: f32 = 0.02;

/// Sizes of a Llama.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Heads of queries; must divide `hidden_size`.
    pub num_heads: usize,
    /// Heads of keys and values; must divide `num_heads`.
    pub num_kv_heads: usize,
    /// Inner width of the feed-forward blocks.
    pub ffn_hidden_size: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// A sliding window, as in Mistral 7B: tokens that a query sees at most, its own and those before it.
    pub sliding_window: Option<usize>,
    /// The rotary embedding of queries and keys.
    pub rotary: Rotary,
    /// Added to the mean square in norms.
    pub norm_eps: f64,
    /// Whether the output head is the token table.
    pub tie_embeddings: bool,
}

/// Presets by name: a tiny one for trials, and published shapes for planning. Rotary frequencies are not scaled here;
/// Llama 3.1, which has the largest shape, scales them by [`LLAMA_3_1`](meshwork_tensor::op::RotaryScaling::LLAMA_3_1).
///
/// ```
/// let presets = meshwork_models::llama::PRESETS;
/// assert!(presets.iter().any(|(name, config)| *name == "llama3-8b" && config.num_kv_heads == 8));
/// ```
pub const PRESETS: [(&str, LlamaConfig); 4] = [
    (
        "llama-tiny",
        LlamaConfig {
            vocab_size: 256,
            seq_len: 128,
            rotary: Rotary { theta: 10_000.0, scaling: None },
            ..llama3(4, 128, [4, 2], 512)
        },
    ),
    ("llama3-8b", llama3(32, 4096, [32, 8], 14_336)),
    ("llama3-70b", llama3(80, 8192, [64, 8], 28_672)),
    ("llama3-405b", llama3(126, 16_384, [128, 8], 53_248)),
];

/// The values that all sizes of Llama 3 share.
const fn llama3(
    num_layers: usize,
    hidden_size: usize,
    [num_heads, num_kv_heads]: [usize; 2],
    ffn_hidden_size: usize,
) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 128_256,
        num_layers,
        hidden_size,
        num_heads,
        num_kv_heads,
        ffn_hidden_size,
        seq_len: 8192,
        sliding_window: None,
        rotary: Rotary { theta: 500_000.0, scaling: None },
        norm_eps: 1e-5,
        tie_embeddings: false,
    }
}

/// A Llama.
#[derive(Clone, Debug)]
pub struct Llama {
    config: LlamaConfig,
    language: LanguageSpec,
    experts: Option<ExpertsConfig>,
    frozen: Frozen,
}

#[derive(Clone, Debug)]
struct Block {
    attn_norm: RmsNorm,
    attn: ParallelGroupedAttention,
    mlp_norm: RmsNorm,
    mlp: FeedForward<ParallelSwiGlu>,
    window: Option<usize>,
}

impl Llama {
    /// A model of these sizes.
    pub fn new(config: LlamaConfig) -> Self {
        Self { config, language: LanguageSpec::default(), experts: None, frozen: Frozen::default() }
    }

    /// The same with experts in place of the MLPs of some layers, or of none: in all of them, it is a Mixtral.
    pub fn with_experts(self, experts: Option<ExpertsConfig>) -> Self {
        Self { experts, ..self }
    }

    /// The same with the sequence cut over tp between tensor-parallel blocks, or not.
    pub fn sequence_parallel(self, on: bool) -> Self {
        Self { language: self.language.sequence_parallel(on), ..self }
    }

    /// The same with the sequence cut over cp, or not.
    pub fn context_parallel(self, context: Option<ContextParallel>) -> Self {
        Self { language: self.language.context_parallel(context), ..self }
    }

    /// The same with this rule for the documents of a sequence.
    pub fn documents(self, boundary: Boundary) -> Self {
        Self { language: LanguageSpec { boundary, ..self.language }, ..self }
    }

    /// The same with the logits of at most this many tokens of a sequence at a time in training
    /// ([`linear_cross_entropy`](Var::linear_cross_entropy)); 0: those of all.
    pub fn loss_chunk(self, loss_chunk: usize) -> Self {
        Self { language: LanguageSpec { loss_chunk, ..self.language }, ..self }
    }

    /// The same with these parts frozen. With tied embeddings the head is the token table, and frozen with it.
    pub fn freeze(self, frozen: Frozen) -> Self {
        let head = frozen.head || self.config.tie_embeddings && frozen.embedding;
        Self { frozen: Frozen { head, ..frozen }, ..self }
    }

    /// Its sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }
}

impl Model for Llama {
    fn num_layers(&self) -> usize {
        self.config.num_layers
    }

    fn fields(&self) -> Vec<Field> {
        language::fields(self.config.seq_len, self.config.vocab_size, self.language.boundary)
    }

    /// If the embeddings are tied, the first stage declares `embed_tokens.weight` and the last one ties it: one logical
    /// parameter on two stages.
    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let LlamaConfig { vocab_size, hidden_size, norm_eps, tie_embeddings, .. } = self.config;
        let init = Init::Normal { std: STD };
        let table = |params: &mut _, name| VocabParallelEmbedding::new(params, name, vocab_size, hidden_size, init);
        let stage = LanguageStage::declare(
            params,
            part,
            (self.language.clone(), &self.frozen),
            |params| table(params, "embed_tokens"),
            |params, layer| Block::new(params, mesh, self, layer),
            |params| RmsNorm::new(params, "norm", hidden_size, norm_eps),
            |params| match tie_embeddings {
                true => VocabParallelEmbedding::tied(params, "embed_tokens", vocab_size, hidden_size, init),
                false => table(params, "lm_head"),
            },
        )?;
        Ok(Box::new(stage))
    }

    fn activation(&self, mesh: &Mesh, _at: usize, batch: &Batch) -> Result<Activation> {
        self.language.hidden(mesh, self.config.hidden_size, batch)
    }

    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        language::unmasked(batch, samples)
    }

    /// Those of routers, if there are experts.
    fn metrics(&self) -> Vec<Metric> {
        experts::metrics(self.experts.as_ref())
    }
}

impl Block {
    fn new(params: &mut Declarations, mesh: &Mesh, model: &Llama, layer: usize) -> Result<Self> {
        let (config, experts) = (model.config, model.experts);
        let (hidden, ffn, eps) = (config.hidden_size, config.ffn_hidden_size, config.norm_eps);
        let spec = FeedForwardSpec { hidden, ffn, num_layers: config.num_layers, experts };
        let heads = GroupedHeads {
            heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: hidden / config.num_heads,
            rotary: Some(config.rotary),
        };
        let init = [STD, STD / (2.0 * config.num_layers as f32).sqrt()].map(|std| Init::Normal { std });
        let name = |part: &str| format!("layers.{layer}.{part}");
        Ok(Self {
            attn_norm: RmsNorm::new(params, &name("input_layernorm"), hidden, eps)?,
            attn: ParallelGroupedAttention::new(params, mesh, &name("self_attn"), hidden, heads, false, init)?,
            mlp_norm: RmsNorm::new(params, &name("post_attention_layernorm"), hidden, eps)?,
            mlp: FeedForward::new(
                params,
                mesh,
                name("mlp"),
                (spec, layer, init[0]),
                |params, name, ffn| ParallelSwiGlu::new(params, mesh, name, hidden, ffn, false, init),
                |params, name, shape| GroupedSwiGlu::new(params, mesh, name, shape, init),
            )?,
            window: config.sliding_window,
        })
    }
}

impl HiddenModule for Block {
    fn forward(&self, tape: &Tape, x: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let (Sequences { region, context, .. }, mask) = (sequences, sequences.mask(self.window));
        let normed = self.attn_norm.operand(tape, x)?;
        let x = match context {
            None => self.attn.forward(tape, &normed, region, Some(x), mask, 0.0)?,
            Some(context) => {
                let attend = |q: &Var, kv: &Var, rotary, dropout: Option<(f32, &str)>| {
                    context.attend(q, kv, rotary, mask, dropout)
                };
                self.attn.forward_by(tape, &normed, region, Some(x), attend, 0.0)?
            }
        };
        self.mlp.forward(tape, &x, &self.mlp_norm, region, 0.0)
    }
}
