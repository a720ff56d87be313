//! `model.init_from`: the sizes of a model in a Hugging Face folder become the defaults of `[model]` and `[moe]`, and
//! its tokenizer becomes the default of `data.tokenizer`.

use super::Config;
use super::settings::{Settings, check};
use super::words::ModelKind;
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::huggingface::{Architecture, Pretrained};
use meshwork_models::llama::LlamaConfig;
use meshwork_tensor::op::Rotary;
use std::path::Path;
use toml::Value;

const KEY: &str = "model.init_from";

/// Keys that the weights do not fix: they may differ from the folder.
const FREE: [&str; 8] = [
    "model.sliding_window",
    "model.dropout",
    "moe.capacity_factor",
    "model.rope_theta",
    "model.rope_scaling_factor",
    "model.rope_scaling_low_freq_factor",
    "model.rope_scaling_high_freq_factor",
    "model.rope_scaling_original_seq_len",
];

/// Whether a model may be given another value of a key than the one with which its weights were trained. The sequences
/// of a Llama may have any length; of the learned positions of a GPT-2 the first are taken.
pub(crate) fn is_free(key: &str, given: &Value, trained: &Value, learned_positions: bool) -> bool {
    let shorter = given.as_integer() <= trained.as_integer();
    FREE.contains(&key) || key == "model.seq_len" && (!learned_positions || shorter)
}

/// Takes the sizes of the folder, if one is given. A size that the user gave too must be the same, or be
/// [free](is_free).
pub(crate) fn derive(settings: &mut Settings) {
    let Some(folder) = settings.given::<String>(KEY) else { return };
    let pretrained = match Pretrained::open(Path::new(&folder)) {
        Ok(pretrained) => pretrained,
        Err(error) => {
            let valid = "use a folder of Hugging Face with config.json and model.safetensors of a GPT-2, Llama, Mistral or Mixtral";
            return settings.fault(KEY, &folder, error.to_string(), valid);
        }
    };
    if let Some(dtype) = pretrained.dtype() {
        settings.derive("checkpoint.export_dtype", &[KEY], dtype.name());
    }
    let tokenizer = Path::new(&folder).join("tokenizer.json");
    if tokenizer.is_file() {
        settings.derive("data.tokenizer", &[KEY], tokenizer.display().to_string());
    }
    for (key, value) in sizes(pretrained.architecture()) {
        let learned_positions = matches!(pretrained.architecture(), Architecture::Gpt2(_));
        let misfit = |given: &Value| !same(given, &value) && !is_free(key, given, &value, learned_positions);
        match settings.given::<Value>(key).filter(misfit) {
            Some(given) => {
                let problem = format!("the model in {folder} has {value}");
                let fewer = if key == "model.seq_len" { " or fewer" } else { "" };
                settings.fault(key, given, problem, format!("use {value}{fewer}, or leave the key out"));
            }
            None => {
                if let Err((problem, valid)) = check(key, &value) {
                    settings.fault(key, format!("{value} (from {KEY})"), problem, valid);
                }
                settings.derive(key, &[KEY], value);
            }
        }
    }
}

/// Whether a number or word as the user wrote it means a size: 1 is 1.0.
pub(crate) fn same(given: &Value, size: &Value) -> bool {
    let number = |value: &Value| value.as_float().or(value.as_integer().map(|number| number as f64));
    given == size || number(given).is_some_and(|given| number(size) == Some(given))
}

fn int(size: usize) -> Value {
    Value::Integer(i64::try_from(size).unwrap_or(i64::MAX))
}

/// The keys that an architecture fixes, with their values.
fn sizes(architecture: &Architecture) -> Vec<(&'static str, Value)> {
    match *architecture {
        Architecture::Gpt2(config) => vec![
            ("model.kind", ModelKind::Gpt2.name().into()),
            ("model.vocab_size", int(config.vocab_size)),
            ("model.num_layers", int(config.num_layers)),
            ("model.hidden_size", int(config.hidden_size)),
            ("model.num_heads", int(config.num_heads)),
            ("model.num_kv_heads", int(config.num_heads)),
            ("model.ffn_hidden_size", int(config.ffn_hidden_size)),
            ("model.seq_len", int(config.seq_len)),
            ("model.sliding_window", int(config.sliding_window.unwrap_or(0))),
            ("model.tie_embeddings", config.tie_embeddings.into()),
            ("model.dropout", f64::from(config.dropout).into()),
            ("moe.num_experts", int(0)),
        ],
        Architecture::Llama(config) => llama(&config).into_iter().chain([("moe.num_experts", int(0))]).collect(),
        Architecture::Mixtral(
            config,
            ExpertsConfig { moe, every_n_layers, num_shared_experts, expert_hidden_size, .. },
        ) => {
            let experts = [
                ("moe.num_experts", int(moe.num_experts)),
                ("moe.top_k", int(moe.top_k)),
                ("moe.router", moe.router.name().into()),
                ("moe.normalize_top_k", moe.normalise.into()),
                ("moe.capacity_factor", moe.capacity_factor.into()),
                ("moe.num_groups", int(moe.groups.groups)),
                ("moe.top_groups", int(moe.groups.top_groups)),
                ("moe.routed_scaling", moe.routed_scaling.into()),
                ("moe.every_n_layers", int(every_n_layers)),
                ("moe.num_shared_experts", int(num_shared_experts)),
                ("moe.expert_hidden_size", int(expert_hidden_size)),
            ];
            llama(&config).into_iter().chain(experts).collect()
        }
    }
}

fn llama(config: &LlamaConfig) -> Vec<(&'static str, Value)> {
    let Rotary { theta, scaling } = config.rotary;
    let mut sizes = vec![
        ("model.kind", ModelKind::Llama.name().into()),
        ("model.vocab_size", int(config.vocab_size)),
        ("model.num_layers", int(config.num_layers)),
        ("model.hidden_size", int(config.hidden_size)),
        ("model.num_heads", int(config.num_heads)),
        ("model.num_kv_heads", int(config.num_kv_heads)),
        ("model.ffn_hidden_size", int(config.ffn_hidden_size)),
        ("model.seq_len", int(config.seq_len)),
        ("model.sliding_window", int(config.sliding_window.unwrap_or(0))),
        ("model.tie_embeddings", config.tie_embeddings.into()),
        ("model.norm_eps", config.norm_eps.into()),
        ("model.rope_theta", theta.into()),
        ("model.rope_scaling_factor", scaling.map_or(1.0, |scaling| scaling.factor).into()),
    ];
    if let Some(scaling) = scaling {
        sizes.extend([
            ("model.rope_scaling_low_freq_factor", scaling.low_frequency_factor.into()),
            ("model.rope_scaling_high_freq_factor", scaling.high_frequency_factor.into()),
            ("model.rope_scaling_original_seq_len", int(scaling.original_positions)),
        ]);
    }
    sizes
}

impl Config {
    /// The model in the form in which Hugging Face folders describe it. GPT-2 has no experts there, which the checks
    /// refuse.
    pub fn architecture(&self) -> Architecture {
        match (self.model.kind, self.experts()) {
            (ModelKind::Gpt2, _) => Architecture::Gpt2(self.gpt2()),
            (ModelKind::Llama, None) => Architecture::Llama(self.llama()),
            (ModelKind::Llama, Some(experts)) => Architecture::Mixtral(self.llama(), experts),
        }
    }
}
