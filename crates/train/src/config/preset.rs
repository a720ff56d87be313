//! The model presets.

use super::words::ModelKind;
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

const GPT2: ModelKind = ModelKind::Gpt2;

/// One of the Llama presets of `meshwork_models`.
const fn llama(at: usize) -> Preset {
    let (name, config) = llama::PRESETS[at];
    let own = Llama {
        num_kv_heads: config.num_kv_heads,
        ffn_hidden_size: config.ffn_hidden_size,
        rope_theta: config.rotary.theta,
    };
    Preset {
        name,
        kind: ModelKind::Llama,
        vocab_size: config.vocab_size,
        num_layers: config.num_layers,
        hidden_size: config.hidden_size,
        num_heads: config.num_heads,
        seq_len: config.seq_len,
        llama: Some(own),
    }
}

/// All presets.
#[rustfmt::skip] // A table: one preset, one line.
pub(crate) const PRESETS: [Preset; 8] = [
    Preset { name: "tiny",   kind: GPT2, vocab_size: 256,   num_layers: 4,  hidden_size: 128, num_heads: 4,  seq_len: 128, llama: None },
    Preset { name: "small",  kind: GPT2, vocab_size: 256,   num_layers: 6,  hidden_size: 384, num_heads: 6,  seq_len: 256, llama: None },
    Preset { name: "medium", kind: GPT2, vocab_size: 50257, num_layers: 6,  hidden_size: 512, num_heads: 8,  seq_len: 256, llama: None },
    Preset { name: "gpt2",   kind: GPT2, vocab_size: 50257, num_layers: 12, hidden_size: 768, num_heads: 12, seq_len: 512, llama: None },
    llama(0), llama(1), llama(2), llama(3),
];

/// Their names.
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
