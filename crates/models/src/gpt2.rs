//! GPT-2 (Radford et al., 2019): layer norms in front of each block, learned positions, GELU (tanh form), biases, an
//! output head tied to the token table or not.

use crate::decoder::{AttentionKind, DecoderConfig, DecoderModel, Family, Names, NormKind};
use meshwork_tensor::op::MlpKind;

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
pub type Gpt2 = DecoderModel<Gpt2Config>;

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

impl Family for Gpt2Config {
    fn decoder(&self) -> DecoderConfig {
        DecoderConfig {
            vocab_size: self.vocab_size,
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            ffn_hidden_size: self.ffn_hidden_size,
            seq_len: self.seq_len,
            sliding_window: self.sliding_window,
            tie_embeddings: self.tie_embeddings,
            dropout: self.dropout,
            bias: true,
            norm: NormKind::Layer,
            attention: AttentionKind::Fused { heads: self.num_heads },
            mlp: MlpKind::Gelu,
            names: Names {
                tokens: "wte",
                positions: Some("wpe"),
                block: "h",
                norms: ["ln_1", "ln_2"],
                attention: "attn",
                mlp: "mlp",
                last_norm: "ln_f",
                head: "lm_head",
            },
        }
    }
}
