//! The model presets.

use super::words::{ModelKind, MoeRouter};
use meshwork_models::llama;

/// The keys of `[model]` that a preset fixes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preset {
    pub(crate) name: &'static str,
    pub(crate) kind: ModelKind,
    pub(crate) vocab_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) hidden_size: usize,
    pub(crate) num_heads: usize,
    pub(crate) seq_len: usize,
    /// The keys of `[model]` that only a Llama preset fixes.
    pub(crate) llama: Option<Llama>,
    /// The keys of `[moe]` that a preset with experts fixes.
    pub(crate) moe: Option<Moe>,
}

/// The keys of `[moe]` that a preset with experts fixes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moe {
    pub(crate) router: MoeRouter,
    pub(crate) num_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) capacity_factor: f64,
    pub(crate) aux_loss_coeff: f64,
    pub(crate) every_n_layers: usize,
    pub(crate) num_shared_experts: usize,
    pub(crate) expert_hidden_size: usize,
    /// Groups of experts, and how many of them a token chooses among.
    pub(crate) groups: [usize; 2],
    pub(crate) routed_scaling: f64,
}

/// The additional keys that a Llama preset fixes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Llama {
    pub(crate) num_kv_heads: usize,
    pub(crate) ffn_hidden_size: usize,
    pub(crate) rope_theta: f64,
}

/// The default `rope_theta`, if the preset has none.
pub(crate) const ROPE_THETA: f64 = 10_000.0;

/// Vocabulary, layers, width, heads and positions.
type Sizes = [usize; 5];

const fn gpt2(name: &'static str, sizes: Sizes) -> Preset {
    let [vocab_size, num_layers, hidden_size, num_heads, seq_len] = sizes;
    let kind = ModelKind::Gpt2;
    Preset { name, kind, vocab_size, num_layers, hidden_size, num_heads, seq_len, llama: None, moe: None }
}

const fn large(name: &'static str, sizes: Sizes, own: Llama) -> Preset {
    Preset { kind: ModelKind::Llama, llama: Some(own), ..gpt2(name, sizes) }
}

/// One of the Llama presets of `meshwork_models`.
const fn llama(at: usize) -> Preset {
    let (name, of) = llama::PRESETS[at];
    let rope_theta = if let Some(rotary) = of.rotary { rotary.theta } else { ROPE_THETA };
    let own = Llama { num_kv_heads: of.num_kv_heads, ffn_hidden_size: of.ffn_hidden_size, rope_theta };
    large(name, [of.vocab_size, of.num_layers, of.hidden_size, of.num_heads, of.seq_len], own)
}

/// A preset with experts in place of feed-forward layers.
const fn with_experts(name: &'static str, dense: Preset, moe: Moe) -> Preset {
    Preset { name, moe: Some(moe), ..dense }
}

/// Every layer has routed experts alone, which all tokens reach.
const PLAIN: Moe = Moe {
    router: MoeRouter::Topk,
    num_experts: 8,
    top_k: 2,
    capacity_factor: 0.0,
    aux_loss_coeff: 0.02,
    every_n_layers: 1,
    num_shared_experts: 0,
    expert_hidden_size: 0,
    groups: [1, 1],
    routed_scaling: 1.0,
};

/// No experts; the rest are the defaults of `[moe]`.
pub(crate) const DENSE: Moe = Moe { num_experts: 0, aux_loss_coeff: 0.01, ..PLAIN };

/// Every second layer of the small GPT-2, with the capacity and loss of Fedus et al.
const SWITCH_TINY: Moe = Moe {
    router: MoeRouter::Switch,
    top_k: 1,
    capacity_factor: 1.25,
    aux_loss_coeff: 0.01,
    every_n_layers: 2,
    expert_hidden_size: 512,
    ..PLAIN
};

const MIXTRAL_TINY: Moe = Moe { expert_hidden_size: 352, ..PLAIN };

const DEEPSEEK_TINY: Moe = Moe {
    router: MoeRouter::Bias,
    num_experts: 16,
    top_k: 4,
    aux_loss_coeff: 1e-4,
    num_shared_experts: 1,
    expert_hidden_size: 88,
    groups: [4, 2],
    ..PLAIN
};

/// Jiang et al., "Mixtral of Experts" (2024).
const MIXTRAL_8X7B: Moe = Moe { expert_hidden_size: 14336, ..PLAIN };

/// The experts of DeepSeek-V3 in every layer, where the first three of the published model are dense.
const DEEPSEEK_V3: Moe =
    Moe { num_experts: 256, top_k: 8, expert_hidden_size: 2048, groups: [8, 4], routed_scaling: 2.5, ..DEEPSEEK_TINY };

const MIXTRAL: Preset =
    large("", [32000, 32, 4096, 32, 32768], Llama { num_kv_heads: 8, ffn_hidden_size: 14336, rope_theta: 1e6 });
/// With plain attention of 128 heads, where the published model has multi-head latent attention.
const DEEPSEEK: Preset =
    large("", [129_280, 61, 7168, 128, 4096], Llama { num_kv_heads: 128, ffn_hidden_size: 18432, rope_theta: 1e4 });

const TINY: Preset = gpt2("tiny", [256, 4, 128, 4, 128]);

pub(crate) const PRESETS: [Preset; 13] = [
    TINY,
    gpt2("small", [256, 6, 384, 6, 256]),
    gpt2("medium", [50257, 6, 512, 8, 256]),
    gpt2("gpt2", [50257, 12, 768, 12, 512]),
    llama(0),
    llama(1),
    llama(2),
    llama(3),
    with_experts("switch-tiny", TINY, SWITCH_TINY),
    with_experts("mixtral-tiny", llama(0), MIXTRAL_TINY),
    with_experts("deepseek-tiny", llama(0), DEEPSEEK_TINY),
    with_experts("mixtral-8x7b", MIXTRAL, MIXTRAL_8X7B),
    with_experts("deepseek-v3", DEEPSEEK, DEEPSEEK_V3),
];

pub(crate) const NAMES: [&str; PRESETS.len()] = {
    let mut names = [""; PRESETS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = PRESETS[at].name;
        at += 1;
    }
    names
};

/// The preset of that name; the first one for a name that the table of keys has refused.
pub(crate) fn preset(name: &str) -> Preset {
    PRESETS.into_iter().find(|preset| preset.name == name).unwrap_or(PRESETS[0])
}

/// The width inside the feed-forward layer, if neither the user nor a preset gives one: 4 · hidden, or the rule of
/// "LLaMA: Open and Efficient Foundation Language Models" (2023) and its code, 8/3 · hidden rounded up to a multiple of
/// 256.
pub(crate) fn ffn_hidden_size(kind: ModelKind, hidden_size: usize) -> usize {
    match kind {
        ModelKind::Gpt2 => hidden_size.saturating_mul(4),
        // A product that saturates is too large for any machine, and is refused as such.
        ModelKind::Llama => (hidden_size.saturating_mul(8) / 3).checked_next_multiple_of(256).unwrap_or(usize::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_of_a_llama_is_the_published_one() {
        // LLaMA 7B, 13B, 33B and 65B.
        for (hidden, ffn) in [(4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016), (128, 512)] {
            assert_eq!(ffn_hidden_size(ModelKind::Llama, hidden), ffn);
        }
        assert_eq!(ffn_hidden_size(ModelKind::Gpt2, 768), 3072);
    }
}
