//! The model presets. All are GPT-2.

/// The keys of `[model]` that a preset fixes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Preset {
    pub(crate) name: &'static str,
    pub(crate) vocab_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) hidden_size: usize,
    pub(crate) num_heads: usize,
    pub(crate) seq_len: usize,
}

/// Keys that a preset fixes, by name.
pub(crate) const KEYS: [&str; 5] =
    ["model.vocab_size", "model.num_layers", "model.hidden_size", "model.num_heads", "model.seq_len"];

#[rustfmt::skip] // A table: one preset, one line.
pub(crate) static PRESETS: [Preset; 4] = [
    Preset { name: "tiny",   vocab_size: 256,   num_layers: 4,  hidden_size: 128, num_heads: 4,  seq_len: 128 },
    Preset { name: "small",  vocab_size: 256,   num_layers: 6,  hidden_size: 384, num_heads: 6,  seq_len: 256 },
    Preset { name: "medium", vocab_size: 50257, num_layers: 6,  hidden_size: 512, num_heads: 8,  seq_len: 256 },
    Preset { name: "gpt2",   vocab_size: 50257, num_layers: 12, hidden_size: 768, num_heads: 12, seq_len: 512 },
];

/// The preset of that name; `tiny` for a name that the key table has refused.
pub(crate) fn preset(name: &str) -> &'static Preset {
    PRESETS.iter().find(|preset| preset.name == name).unwrap_or(&PRESETS[0])
}
