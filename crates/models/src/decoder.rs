//! Decoders of language: a token table, blocks of attention and a feed-forward network, a norm, and an output head that
//! is the token table or not. In what the [families](crate::families) differ is data, a [`DecoderConfig`]:
//!
//! ```text
//! x = e · W_tok[ids] (+ W_pos)
//! x ← x + r · behind₁(Attn(before₁(x)))    x ← x + r · behind₂(MLP(before₂(x)))        once a layer; or, parallel,
//! x ← x + r · behind₁(Attn(before₁(x))) + r · behind₂(MLP(before₂(x)))
//! logits = cap(norm(x) · W_headᵀ)
//!
//! Attn(x) = softmax(mask(cap(s · turn(n_q(x Wqᵀ + b_q)) · turn(n_k(x Wkᵀ + b_k))ᵀ))) (x Wvᵀ + b_v) · Woᵀ + b_o
//!           with latent vectors norm(x Wdqᵀ) in place of x in queries, norm(x Wdkvᵀ) in keys and values
//! MLP(x)  = f(x Wupᵀ + b_up) · Wdownᵀ + b_down,  gated  (f(x Wgateᵀ) · (x Wupᵀ)) · Wdownᵀ,  or experts
//! ```
//!
//! Weights start from N(0, 0.02), the projections into the residual stream scaled by 1/√(2·layers).
//!
//! Types, per axis: between blocks the hidden state is `Shard(0)` on dp (the batch), on tp `Invariant` or, sequence
//! parallel, `Shard(1)`, and on cp `Shard(1)` with context parallelism.

pub use crate::decoder_config::{DecoderConfig, Layers, Names, NormKind};
use crate::experts::{self, Branch, ExpertsConfig, FeedForward, FeedForwardSpec, Norm, scaled};
use crate::language::{self, Boundary, Frozen, HiddenModule, LanguageSpec, LanguageStage, Sequences};
use meshwork_context_parallel::ContextParallel;
use meshwork_core::Mesh;
use meshwork_nn::{Activation, Batch, Field, LayerNorm, Metric, Model, Positions, RmsNorm, Stage, StageSpec};
use meshwork_tensor::op::{GroupedHeads, Mask};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{
    ParallelAttention, ParallelGroupedAttention, ParallelLatentAttention, VocabParallelEmbedding,
};
use std::ops::Range;
use std::sync::Arc;

/// Standard deviation of initial weights.
const STD: f32 = 0.02;

/// A decoder.
///
/// ```
/// use meshwork_models::decoder::{DecoderConfig, DecoderModel};
/// use meshwork_nn::Model;
///
/// let gpt2 = DecoderModel::new(DecoderConfig::default());
/// assert_eq!((gpt2.num_layers(), gpt2.fields()[0].name, &gpt2.fields()[0].dims[..]), (4, "tokens", &[128][..]));
/// ```
#[derive(Clone, Debug)]
pub struct DecoderModel {
    config: DecoderConfig,
    language: LanguageSpec,
    experts: Option<ExpertsConfig>,
    frozen: Frozen,
}

impl DecoderModel {
    /// A model of these sizes.
    pub fn new(config: DecoderConfig) -> Self {
        let language = LanguageSpec { logit_cap: config.logit_cap, ..LanguageSpec::default() };
        Self { config, language, experts: None, frozen: Frozen::default() }
    }

    /// The same with experts in place of the MLPs of some layers, or of none: a Llama with experts in all of them is a
    /// Mixtral.
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
    /// ([`linear_cross_entropy`](Var::linear_cross_entropy)); 0: the logits of all.
    pub fn loss_chunk(self, loss_chunk: usize) -> Self {
        Self { language: LanguageSpec { loss_chunk, ..self.language }, ..self }
    }

    /// The same with the inner features of dense feed-forward networks of at most this many tokens of a sequence at a
    /// time; 0: those of all.
    pub fn sequence_block(self, sequence_block: usize) -> Self {
        Self { language: LanguageSpec { sequence_block, ..self.language }, ..self }
    }

    /// The same with these parts frozen. With tied embeddings the head is the token table, and frozen with it.
    pub fn freeze(self, frozen: Frozen) -> Self {
        let head = frozen.head || self.config.tie_embeddings && frozen.embedding;
        Self { frozen: Frozen { head, ..frozen }, ..self }
    }

    /// Its sizes.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }
}

impl Model for DecoderModel {
    fn num_layers(&self) -> usize {
        self.config.num_layers
    }

    fn fields(&self) -> Vec<Field> {
        language::fields(self.config.seq_len, self.config.vocab_size, self.language.boundary)
    }

    /// If the embeddings are tied, the first stage declares the token table and the last one ties it: one logical
    /// parameter on two stages.
    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let DecoderConfig { vocab_size, hidden_size, tie_embeddings, names, .. } = self.config;
        let init = Init::Normal { std: STD };
        let table = |params: &mut _, name| VocabParallelEmbedding::new(params, name, vocab_size, hidden_size, init);
        let stage = LanguageStage::declare(
            params,
            part,
            (self.language.clone(), &self.frozen),
            |params| table(params, names.tokens).and_then(|table| Embedding::new(params, table, &self.config)),
            |params, layer| Block::new(params, mesh, &self.config, self.experts, layer),
            |params| self.config.norm(params, names.last_norm),
            |params| match tie_embeddings {
                true => VocabParallelEmbedding::tied(params, names.tokens, vocab_size, hidden_size, init),
                false => table(params, names.head),
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

    /// The model of whole sequences: decoding cuts its cache of keys and values, not the tokens.
    fn decoding(&self) -> Option<Arc<dyn Model>> {
        let context = self.language.context.is_some();
        context.then(|| Arc::new(self.clone().context_parallel(None)) as _)
    }

    /// The metrics of routers, if there are experts.
    fn metrics(&self) -> Vec<Metric> {
        experts::metrics(self.experts.as_ref())
    }
}

impl DecoderConfig {
    fn norm(&self, params: &mut Declarations, name: &str) -> Result<Norm> {
        Ok(match self.norm {
            NormKind::Layer => {
                Norm::Layer(LayerNorm::new(params, name, self.hidden_size, true)?.with_eps(self.norm_eps))
            }
            NormKind::Rms => Norm::Rms(RmsNorm::new(params, name, self.hidden_size, self.norm_eps)?),
        })
    }

    fn attention(
        &self,
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        layer: usize,
        init: [Init; 2],
    ) -> Result<Attention> {
        let (hidden, heads, bias) = (self.hidden_size, self.num_heads, self.attention_bias);
        if self.fused_qkv {
            let fused = ParallelAttention::new(params, mesh, name, hidden, heads, bias.input, init)?;
            return Ok(Attention::Fused(Box::new(fused)));
        }
        let rotary = self.window_rotary.filter(|_| self.window(layer).is_some()).or(self.rotary);
        let rotary = rotary.map(|rotary| rotary.of_length(self.seq_len));
        if let Some(of) = self.latent {
            let turned = (rotary, self.score_scale);
            let latent = ParallelLatentAttention::new(params, mesh, name, hidden, of, turned, init)?;
            return Ok(Attention::Latent(Box::new(latent)));
        }
        let of = GroupedHeads { heads, kv_heads: self.num_kv_heads, head_dim: self.head_features(), rotary };
        let mut attention = ParallelGroupedAttention::new(params, mesh, name, hidden, of, bias, init)?;
        if let Some(over) = self.qk_norm {
            attention = attention.with_norms(params, over, self.norm_eps)?;
        }
        Ok(Attention::Grouped(Box::new(match self.score_scale {
            Some(scale) => attention.with_scale(scale),
            None => attention,
        })))
    }
}

#[derive(Clone, Debug)]
struct Embedding {
    tokens: VocabParallelEmbedding,
    positions: Option<Positions>,
    scale: f64,
    dropout: f32,
}

impl Embedding {
    fn new(params: &mut Declarations, tokens: VocabParallelEmbedding, config: &DecoderConfig) -> Result<Self> {
        let &DecoderConfig { seq_len, hidden_size, embedding_scale: scale, dropout, names, .. } = config;
        let positions = names.positions.map(|name| Positions::new(params, name, seq_len, hidden_size, STD));
        Ok(Self { tokens, positions: positions.transpose()?, scale, dropout })
    }
}

impl HiddenModule for Embedding {
    fn forward(&self, tape: &Tape, ids: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let x = scaled(self.tokens.embed(tape, ids, sequences.region)?, self.scale)?;
        let x = match (&self.positions, sequences.positions) {
            (None, _) => x,
            (Some(table), Some(positions)) => table.at(tape, &x, positions)?,
            (Some(table), None) => table.forward(tape, &x)?,
        };
        x.dropout(self.dropout, "embedding")
    }

    fn reads_positions(&self) -> bool {
        self.positions.is_some()
    }
}

#[derive(Clone, Debug)]
struct Block {
    branches: [Branch; 2],
    attention: Attention,
    mlp: FeedForward,
    parallel: bool,
    window: Option<usize>,
    cap: Option<f64>,
    dropout: f32,
}

#[derive(Clone, Debug)]
enum Attention {
    Fused(Box<ParallelAttention>),
    Grouped(Box<ParallelGroupedAttention>),
    Latent(Box<ParallelLatentAttention>),
}

impl Block {
    fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        config: &DecoderConfig,
        experts: Option<ExpertsConfig>,
        layer: usize,
    ) -> Result<Self> {
        let &DecoderConfig { num_layers, hidden_size: hidden, ffn_hidden_size: ffn, mlp, names, .. } = config;
        let spec = FeedForwardSpec { hidden, ffn, mlp, bias: config.mlp_bias, num_layers, experts };
        let init = [STD, STD / (2.0 * num_layers as f32).sqrt()].map(|std| Init::Normal { std });
        let name = |part: &str| format!("{}.{layer}.{part}", names.block);
        let branch = |params: &mut Declarations, at: usize| -> Result<Branch> {
            let mut norm = |part: Option<&str>| part.map(|part| config.norm(params, &name(part))).transpose();
            Ok(Branch {
                before: norm(names.before[at])?,
                behind: norm(names.behind[at])?,
                scale: config.residual_scale,
            })
        };
        let of_attention = branch(params, 0)?;
        let attention = config.attention(params, mesh, &name(names.attention), layer, init)?;
        let branches = [of_attention, branch(params, 1)?];
        let mlp = FeedForward::new(params, mesh, name(names.mlp), spec, layer, init)?;
        let &DecoderConfig { parallel, score_cap: cap, dropout, .. } = config;
        Ok(Self { branches, attention, mlp, parallel, window: config.window(layer), cap, dropout })
    }

    fn attend(&self, tape: &Tape, normed: &Var, residual: Option<&Var>, sequences: Sequences<'_>) -> Result<Var> {
        let (Sequences { region, context, .. }, p) = (sequences, self.dropout);
        let mask = Mask { cap: self.cap, ..sequences.mask(self.window) };
        let attend = |q: &Var, kv: &Var, rotary, dropout: Option<(f32, &str)>| match context {
            None => q.grouped_attention(kv, rotary, mask, dropout),
            Some(context) => context.attend(q, kv, rotary, mask, dropout),
        };
        match (&self.attention, context) {
            (Attention::Fused(fused), None) => fused.forward(tape, normed, region, residual, mask, p),
            (Attention::Fused(fused), Some(_)) => {
                let attend = |q: &Var, kv: &Var, dropout: Option<(f32, &str)>| attend(q, kv, None, dropout);
                fused.forward_by(tape, normed, region, residual, attend, p)
            }
            (Attention::Grouped(grouped), _) => grouped.forward_by(tape, normed, region, residual, attend, p),
            (Attention::Latent(latent), _) => latent.forward_by(tape, normed, region, residual, attend, p),
        }
    }
}

impl HiddenModule for Block {
    fn forward(&self, tape: &Tape, x: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let [of_attention, of_mlp] = &self.branches;
        let attended =
            of_attention.forward(tape, x, x, |normed, residual| self.attend(tape, normed, residual, sequences))?;
        let (x, beside) = if self.parallel { (x, Some(&attended)) } else { (&attended, None) };
        self.mlp.forward(tape, x, beside, of_mlp, sequences, self.dropout)
    }
}
