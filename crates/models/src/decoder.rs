//! Decoders of language: a token table, blocks of attention and a feed-forward network behind a norm each, a norm, and
//! an output head that is the token table or not. What families such as [GPT-2](crate::gpt2) and
//! [Llama](crate::llama) differ in is data, their [`DecoderConfig`].
//!
//! ```text
//! x = W_tok[ids] (+ W_pos)           x ← x + Attn(norm(x))    x ← x + MLP(norm(x))   (layers times)
//! logits = norm(x) · W_headᵀ
//! ```
//!
//! Weights start from N(0, 0.02), the projections into the residual stream scaled by 1/√(2·layers).
//!
//! Types, per axis: between blocks the hidden state is `Shard(0)` on dp (the batch), on tp `Invariant` or, sequence
//! parallel, `Shard(1)`, and on cp `Shard(1)` with context parallelism.

use crate::experts::{self, ExpertsConfig, FeedForward, FeedForwardSpec, Norm};
use crate::language::{self, Boundary, Frozen, HiddenModule, LanguageSpec, LanguageStage, Sequences};
use meshwork_context_parallel::ContextParallel;
use meshwork_core::Mesh;
use meshwork_nn::{Activation, Batch, Field, LayerNorm, Metric, Model, Positions, RmsNorm, Stage, StageSpec};
use meshwork_tensor::op::{GroupedHeads, MlpKind};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{ParallelAttention, ParallelGroupedAttention, VocabParallelEmbedding};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Standard deviation of initial weights.
const STD: f32 = 0.02;

/// The sizes of a decoder, and what its family does in another way than others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Inner width of the feed-forward blocks.
    pub ffn_hidden_size: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// A sliding window: tokens that a query sees at most, its own and those before it.
    pub sliding_window: Option<usize>,
    /// Whether the output head is the token table.
    pub tie_embeddings: bool,
    /// Dropout probability of embeddings, attention weights and residual branches.
    pub dropout: f32,
    /// Whether products in blocks have biases.
    pub bias: bool,
    /// The norms.
    pub norm: NormKind,
    /// The attention.
    pub attention: AttentionKind,
    /// The feed-forward networks.
    pub mlp: MlpKind,
    /// The names of parameters.
    pub names: Names,
}

/// The norms of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// Layer norms with biases.
    Layer,
    /// Root mean square norms.
    Rms {
        /// Added to the mean square.
        eps: f64,
    },
}

/// The attention of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionKind {
    /// As many heads of queries, keys and values, which are one product.
    Fused {
        /// The number of heads; must divide the hidden size.
        heads: usize,
    },
    /// Groups of heads of queries share heads of keys and values.
    Grouped(GroupedHeads),
}

/// The names of a decoder's parameters, as checkpoints have them. In block `n` they begin with `{block}.{n}.`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The token table.
    pub tokens: &'static str,
    /// The table of learned positions, if there is one.
    pub positions: Option<&'static str>,
    /// The blocks.
    pub block: &'static str,
    /// The norms in front of attention and feed-forward network.
    pub norms: [&'static str; 2],
    /// The attention.
    pub attention: &'static str,
    /// The feed-forward network.
    pub mlp: &'static str,
    /// The norm in front of the head.
    pub last_norm: &'static str,
    /// The head, where it is not the token table.
    pub head: &'static str,
}

/// The sizes of a decoder as its family states them.
pub trait Family: Copy + Debug + Send + Sync + 'static {
    /// The decoder of these sizes.
    fn decoder(&self) -> DecoderConfig;
}

/// A decoder of a family.
#[derive(Clone, Debug)]
pub struct DecoderModel<F> {
    family: F,
    config: DecoderConfig,
    language: LanguageSpec,
    experts: Option<ExpertsConfig>,
    frozen: Frozen,
}

impl<F: Family> DecoderModel<F> {
    /// A model of these sizes.
    pub fn new(family: F) -> Self {
        let (config, language) = (family.decoder(), LanguageSpec::default());
        Self { family, config, language, experts: None, frozen: Frozen::default() }
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
    pub fn config(&self) -> &F {
        &self.family
    }
}

impl<F: Family> Model for DecoderModel<F> {
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
        match self.norm {
            NormKind::Layer => Ok(Norm::Layer(LayerNorm::new(params, name, self.hidden_size, true)?)),
            NormKind::Rms { eps } => Ok(Norm::Rms(RmsNorm::new(params, name, self.hidden_size, eps)?)),
        }
    }

    fn attention(&self, params: &mut Declarations, mesh: &Mesh, name: &str, init: [Init; 2]) -> Result<Attention> {
        let (hidden, bias) = (self.hidden_size, self.bias);
        Ok(match self.attention {
            AttentionKind::Fused { heads } => {
                Attention::Fused(ParallelAttention::new(params, mesh, name, hidden, heads, bias, init)?)
            }
            AttentionKind::Grouped(heads) => {
                Attention::Grouped(ParallelGroupedAttention::new(params, mesh, name, hidden, heads, bias, init)?)
            }
        })
    }
}

#[derive(Clone, Debug)]
struct Embedding {
    tokens: VocabParallelEmbedding,
    positions: Option<Positions>,
    dropout: f32,
}

impl Embedding {
    fn new(params: &mut Declarations, tokens: VocabParallelEmbedding, config: &DecoderConfig) -> Result<Self> {
        let &DecoderConfig { seq_len, hidden_size, dropout, names, .. } = config;
        let positions = names.positions.map(|name| Positions::new(params, name, seq_len, hidden_size, STD));
        Ok(Self { tokens, positions: positions.transpose()?, dropout })
    }
}

impl HiddenModule for Embedding {
    fn forward(&self, tape: &Tape, ids: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let x = self.tokens.embed(tape, ids, sequences.region)?;
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
    norms: [Norm; 2],
    attention: Attention,
    mlp: FeedForward,
    window: Option<usize>,
    dropout: f32,
}

#[derive(Clone, Debug)]
enum Attention {
    Fused(ParallelAttention),
    Grouped(ParallelGroupedAttention),
}

impl Block {
    fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        config: &DecoderConfig,
        experts: Option<ExpertsConfig>,
        layer: usize,
    ) -> Result<Self> {
        let &DecoderConfig { num_layers, hidden_size: hidden, ffn_hidden_size: ffn, mlp, bias, names, .. } = config;
        let spec = FeedForwardSpec { hidden, ffn, mlp, bias, num_layers, experts };
        let init = [STD, STD / (2.0 * num_layers as f32).sqrt()].map(|std| Init::Normal { std });
        let name = |part: &str| format!("{}.{layer}.{part}", names.block);
        let before_attention = config.norm(params, &name(names.norms[0]))?;
        let attention = config.attention(params, mesh, &name(names.attention), init)?;
        let norms = [before_attention, config.norm(params, &name(names.norms[1]))?];
        let mlp = FeedForward::new(params, mesh, name(names.mlp), spec, layer, init)?;
        Ok(Self { norms, attention, mlp, window: config.sliding_window, dropout: config.dropout })
    }
}

impl HiddenModule for Block {
    fn forward(&self, tape: &Tape, x: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let (Sequences { region, context, .. }, p, mask) = (sequences, self.dropout, sequences.mask(self.window));
        let (normed, residual) = (self.norms[0].operand(tape, x)?, Some(x));
        let x = match (&self.attention, context) {
            (Attention::Fused(fused), None) => fused.forward(tape, &normed, region, residual, mask, p)?,
            (Attention::Fused(fused), Some(context)) => {
                let attend =
                    |q: &Var, kv: &Var, dropout: Option<(f32, &str)>| context.attend(q, kv, None, mask, dropout);
                fused.forward_by(tape, &normed, region, residual, attend, p)?
            }
            (Attention::Grouped(grouped), None) => grouped.forward(tape, &normed, region, residual, mask, p)?,
            (Attention::Grouped(grouped), Some(context)) => {
                let attend = |q: &Var, kv: &Var, rotary, dropout: Option<(f32, &str)>| {
                    context.attend(q, kv, rotary, mask, dropout)
                };
                grouped.forward_by(tape, &normed, region, residual, attend, p)?
            }
        };
        self.mlp.forward(tape, &x, &self.norms[1], sequences, p)
    }
}
