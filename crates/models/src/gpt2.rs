//! GPT-2 (Radford et al., 2019): pre-LN blocks, learned positions, GELU (tanh form), biases, an output head tied to the
//! token table or not. Weights start from N(0, 0.02), the projections into the residual stream scaled by 1/√(2·layers).
//!
//! ```text
//! x = W_tok[ids] + W_pos                     x ← x + Attn(LN(x))    x ← x + MLP(LN(x))   (layers times)
//! logits = LN(x) · W_headᵀ
//! ```
//!
//! Types, per axis: between blocks the hidden state is `Shard(0)` on dp (the batch), on tp `Invariant` or, sequence
//! parallel, `Shard(1)`, and on cp `Shard(1)` with context parallelism.

use crate::experts::{self, ExpertsConfig, FeedForward, FeedForwardSpec};
use crate::language::{self, Boundary, Frozen, HiddenModule, LanguageSpec, LanguageStage, Sequences};
use meshwork_context_parallel::ContextParallel;
use meshwork_core::Mesh;
use meshwork_moe::GroupedMlp;
use meshwork_nn::{Activation, Batch, Field, LayerNorm, Metric, Model, Positions, Stage, StageSpec};
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};
use meshwork_tensor_parallel::{ParallelAttention, ParallelMlp, VocabParallelEmbedding};
use std::ops::Range;

/// Standard deviation of initial weights.
const STD: f32 = 0.02;

/// Sizes of a GPT-2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpt2Config {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Attention heads; must divide `hidden_size`.
    pub num_heads: usize,
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
}

/// A GPT-2.
///
/// ```
/// use meshwork_models::gpt2::{Gpt2, Gpt2Config};
/// use meshwork_nn::Model;
///
/// let gpt2 = Gpt2::new(Gpt2Config::default());
/// assert_eq!((gpt2.num_layers(), gpt2.fields()[0].name, &gpt2.fields()[0].dims[..]), (4, "tokens", &[128][..]));
/// ```
#[derive(Clone, Debug)]
pub struct Gpt2 {
    config: Gpt2Config,
    language: LanguageSpec,
    experts: Option<ExpertsConfig>,
    frozen: Frozen,
}

#[derive(Clone, Debug)]
struct Embedding {
    tokens: VocabParallelEmbedding,
    positions: Positions,
    dropout: f32,
}

#[derive(Clone, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: ParallelAttention,
    ln_2: LayerNorm,
    mlp: FeedForward<ParallelMlp>,
    window: Option<usize>,
    dropout: f32,
}

impl Default for Gpt2Config {
    /// 0.8 M parameters over bytes: 4 layers of width 128, 128 tokens.
    fn default() -> Self {
        Self {
            vocab_size: 256,
            num_layers: 4,
            hidden_size: 128,
            num_heads: 4,
            ffn_hidden_size: 512,
            seq_len: 128,
            sliding_window: None,
            tie_embeddings: true,
            dropout: 0.0,
        }
    }
}

impl Gpt2 {
    /// A model of these sizes.
    pub fn new(config: Gpt2Config) -> Self {
        Self { config, language: LanguageSpec::default(), experts: None, frozen: Frozen::default() }
    }

    /// The same with experts in place of the MLPs of some layers, or of none.
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
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }
}

impl Model for Gpt2 {
    fn num_layers(&self) -> usize {
        self.config.num_layers
    }

    fn fields(&self) -> Vec<Field> {
        language::fields(self.config.seq_len, self.config.vocab_size, self.language.boundary)
    }

    /// If the embeddings are tied, the first stage declares `wte.weight` and the last one ties it: one logical
    /// parameter on two stages.
    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let Gpt2Config { vocab_size, hidden_size, seq_len, tie_embeddings, dropout, .. } = self.config;
        let init = Init::Normal { std: STD };
        let table = |params: &mut _, name| VocabParallelEmbedding::new(params, name, vocab_size, hidden_size, init);
        let stage = LanguageStage::declare(
            params,
            part,
            (self.language.clone(), &self.frozen),
            |params| {
                let tokens = table(params, "wte")?;
                let positions = Positions::new(params, "wpe", seq_len, hidden_size, STD)?;
                Ok(Embedding { tokens, positions, dropout })
            },
            |params, layer| Block::new(params, mesh, self, layer),
            |params| LayerNorm::new(params, "ln_f", hidden_size, true),
            |params| match tie_embeddings {
                true => VocabParallelEmbedding::tied(params, "wte", vocab_size, hidden_size, init),
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
    fn new(params: &mut Declarations, mesh: &Mesh, model: &Gpt2, layer: usize) -> Result<Self> {
        let (config, experts) = (model.config, model.experts);
        let (hidden, heads, ffn) = (config.hidden_size, config.num_heads, config.ffn_hidden_size);
        let spec = FeedForwardSpec { hidden, ffn, num_layers: config.num_layers, experts };
        let init = [STD, STD / (2.0 * config.num_layers as f32).sqrt()].map(|std| Init::Normal { std });
        let name = |part: &str| format!("h.{layer}.{part}");
        Ok(Self {
            ln_1: LayerNorm::new(params, &name("ln_1"), hidden, true)?,
            attn: ParallelAttention::new(params, mesh, &name("attn"), hidden, heads, true, init)?,
            ln_2: LayerNorm::new(params, &name("ln_2"), hidden, true)?,
            mlp: FeedForward::new(
                params,
                mesh,
                name("mlp"),
                (spec, layer, init[0]),
                |params, name, ffn| ParallelMlp::new(params, mesh, name, hidden, ffn, true, init),
                |params, name, shape| GroupedMlp::new(params, mesh, name, shape, true, init),
            )?,
            window: config.sliding_window,
            dropout: config.dropout,
        })
    }
}

impl HiddenModule for Embedding {
    fn forward(&self, tape: &Tape, ids: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let x = self.tokens.embed(tape, ids, sequences.region)?;
        let x = match sequences.positions {
            Some(positions) => self.positions.of(tape, &x, positions)?,
            None => self.positions.forward(tape, &x)?,
        };
        x.dropout(self.dropout, "embedding")
    }

    fn reads_positions(&self) -> bool {
        true
    }
}

impl HiddenModule for Block {
    fn forward(&self, tape: &Tape, x: &Var, sequences: Sequences<'_>) -> Result<Var> {
        let (Sequences { region, context, .. }, p, mask) = (sequences, self.dropout, sequences.mask(self.window));
        let normed = self.ln_1.operand(tape, x)?;
        let x = match context {
            None => self.attn.forward(tape, &normed, region, Some(x), mask, p)?,
            Some(context) => {
                let attend =
                    |q: &Var, kv: &Var, dropout: Option<(f32, &str)>| context.attend(q, kv, None, mask, dropout);
                self.attn.forward_by(tape, &normed, region, Some(x), attend, p)?
            }
        };
        self.mlp.forward(tape, &x, &self.ln_2, region, p)
    }
}
