//! Llama (Touvron et al., 2023; Grattafiori et al., 2024): root mean square norms in front of each block, rotary
//! positions, groups of heads that share keys and values, SwiGLU, no biases, an output head tied to the token table or
//! not.
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

use crate::decoder::{AttentionKind, DecoderConfig, DecoderModel, Family, Names, NormKind};
use meshwork_tensor::op::{GroupedHeads, MlpKind, Rotary};

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

/// A Llama. With [experts](DecoderModel::with_experts) in all layers it is a Mixtral.
pub type Llama = DecoderModel<LlamaConfig>;

impl Family for LlamaConfig {
    fn decoder(&self) -> DecoderConfig {
        DecoderConfig {
            vocab_size: self.vocab_size,
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            ffn_hidden_size: self.ffn_hidden_size,
            seq_len: self.seq_len,
            sliding_window: self.sliding_window,
            tie_embeddings: self.tie_embeddings,
            dropout: 0.0,
            bias: false,
            norm: NormKind::Rms { eps: self.norm_eps },
            attention: AttentionKind::Grouped(GroupedHeads {
                heads: self.num_heads,
                kv_heads: self.num_kv_heads,
                head_dim: self.hidden_size / self.num_heads,
                rotary: Some(self.rotary),
            }),
            mlp: MlpKind::SwiGlu,
            names: Names {
                tokens: "embed_tokens",
                positions: None,
                block: "layers",
                norms: ["input_layernorm", "post_attention_layernorm"],
                attention: "self_attn",
                mlp: "mlp",
                last_norm: "norm",
                head: "lm_head",
            },
        }
    }
}
