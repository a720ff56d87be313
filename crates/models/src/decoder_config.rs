//! What decoders differ in, as data: each field is a part of the [equation](crate::decoder) of a layer.

use meshwork_tensor::op::{MlpKind, Rotary};
use meshwork_tensor_parallel::{AttentionBias, LatentHeads, NormOver};

/// The sizes of a decoder, and what its family does in its own way: each field is a part of the
/// [equation](crate::decoder) of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values; must divide `num_heads`. Not read where queries, keys and values are one product.
    pub num_kv_heads: usize,
    /// Features of a head. `None`: `hidden_size / num_heads`.
    pub head_dim: Option<usize>,
    /// Inner width of the feed-forward blocks.
    pub ffn_hidden_size: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// A sliding window, as in Mistral 7B: tokens that a query sees at most, its own and those before it.
    pub sliding_window: Option<usize>,
    /// The layers that have the window.
    pub window_layers: Layers,
    /// Whether the output head is the token table.
    pub tie_embeddings: bool,
    /// Dropout probability of embeddings, attention weights and residual branches.
    pub dropout: f32,
    /// The norms.
    pub norm: NormKind,
    /// Added to the variance or mean square in norms.
    pub norm_eps: f64,
    /// Norms of queries and keys, if there are any.
    pub qk_norm: Option<NormOver>,
    /// Whether queries, keys and values are one product with as many heads each, which do not turn.
    pub fused_qkv: bool,
    /// Latent vectors from which queries, keys and values come, if they do, and the features of heads then.
    pub latent: Option<LatentHeads>,
    /// The biases of attention.
    pub attention_bias: AttentionBias,
    /// The biases of feed-forward networks.
    pub mlp_bias: bool,
    /// The rotary embedding of queries and keys, if they turn.
    pub rotary: Option<Rotary>,
    /// Another rotary embedding of the layers that have the window.
    pub window_rotary: Option<Rotary>,
    /// Whether files have the two features of a pair that turns next to each other, not in two halves of a head.
    pub interleaved: bool,
    /// The factor of scores. `None`: 1/√head_dim.
    pub score_scale: Option<f64>,
    /// The soft cap of scores: `cap · tanh(score / cap)`.
    pub score_cap: Option<f64>,
    /// The soft cap of logits.
    pub logit_cap: Option<f64>,
    /// The feed-forward networks.
    pub mlp: MlpKind,
    /// Whether attention and feed-forward network of a layer read the same hidden state.
    pub parallel: bool,
    /// The factor of embeddings.
    pub embedding_scale: f64,
    /// The factor of what a layer adds to the hidden state.
    pub residual_scale: f64,
    /// The names of parameters.
    pub names: Names,
}

/// Some of a model's layers, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// Every one.
    All,
    /// From this one on.
    From(usize),
    /// All but every so many, the last of them being left out first: with 6 not 5, 11, ..
    AllBut(usize),
}

impl Layers {
    /// Whether a layer is among them.
    pub fn has(self, layer: usize) -> bool {
        match self {
            Self::All => true,
            Self::From(first) => layer >= first,
            Self::AllBut(every) => !(layer + 1).is_multiple_of(every.max(1)),
        }
    }
}

/// The norms of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Layer norms with biases.
    Layer,
    /// Root mean square norms.
    Rms,
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
    /// The norms in front of attention and feed-forward network, where there are any.
    pub before: [Option<&'static str>; 2],
    /// The norms behind them.
    pub behind: [Option<&'static str>; 2],
    /// The attention.
    pub attention: &'static str,
    /// The feed-forward network.
    pub mlp: &'static str,
    /// The norm in front of the head.
    pub last_norm: &'static str,
    /// The head, where it is not the token table.
    pub head: &'static str,
}

impl Default for DecoderConfig {
    /// [`GPT2`].
    fn default() -> Self {
        GPT2
    }
}

/// A GPT-2 of 0.8 M parameters over bytes: 4 layers of width 128, 128 tokens.
pub const GPT2: DecoderConfig = DecoderConfig {
    vocab_size: 256,
    num_layers: 4,
    hidden_size: 128,
    num_heads: 4,
    num_kv_heads: 4,
    head_dim: None,
    ffn_hidden_size: 512,
    seq_len: 128,
    sliding_window: None,
    window_layers: Layers::All,
    tie_embeddings: true,
    dropout: 0.0,
    norm: NormKind::Layer,
    norm_eps: 1e-5,
    qk_norm: None,
    fused_qkv: true,
    latent: None,
    attention_bias: AttentionBias { input: true, output: true },
    mlp_bias: true,
    rotary: None,
    window_rotary: None,
    interleaved: false,
    score_scale: None,
    score_cap: None,
    logit_cap: None,
    mlp: MlpKind::Gelu,
    parallel: false,
    embedding_scale: 1.0,
    residual_scale: 1.0,
    names: Names {
        tokens: "wte",
        positions: Some("wpe"),
        block: "h",
        before: [Some("ln_1"), Some("ln_2")],
        behind: [None, None],
        attention: "attn",
        mlp: "mlp",
        last_norm: "ln_f",
        head: "lm_head",
    },
};

impl DecoderConfig {
    /// Features of a head.
    pub fn head_features(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_heads.max(1))
    }

    /// The window of a layer.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| self.window_layers.has(layer))
    }
}
