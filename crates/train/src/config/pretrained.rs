//! `model.init_from`: the sizes of a model in a Hugging Face folder become the defaults of `[model]` and `[moe]`, and
//! its tokenizer becomes the default of `data.tokenizer`.

use super::Config;
use super::settings::{Settings, check};
use super::words::ModelKind;
use meshwork_models::decoder::DecoderConfig;
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::families::{gpt2, llama};
use meshwork_models::huggingface::{Architecture, Pretrained};
use meshwork_tensor::op::RotaryScaling;
use std::fs::read_to_string;
use std::path::Path;
use toml::Value;

const KEY: &str = "model.init_from";
const CONFIG: &str = "model.config";

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

/// Takes the sizes of the folder or of the `config.json`, if one is given. A size that the user gave too must be the
/// same, or be [free](is_free).
pub(crate) fn derive(settings: &mut Settings) {
    let (key, from, of) = match (settings.given::<String>(KEY), settings.given::<String>(CONFIG)) {
        (None, None) => return,
        (None, Some(config)) => {
            // The run keeps the text, and so do its checkpoints.
            let path = Path::new(&config);
            let text = if config.trim_start().starts_with('{') { Ok(config.clone()) } else { read_to_string(path) };
            let of = text.map_err(|error| error.to_string()).and_then(|text| {
                let of = Architecture::read(&text).map_err(|error| error.to_string())?;
                settings.insert("model", "config", text.into(), "");
                Ok(of)
            });
            match of {
                Ok(of) => (CONFIG, config, of),
                Err(problem) => {
                    let valid = "use a config.json of Hugging Face, its path or its text (docs/families.md)";
                    return settings.fault(CONFIG, config, problem, valid);
                }
            }
        }
        (Some(folder), config) => {
            let pretrained = match Pretrained::open(Path::new(&folder)) {
                Ok(pretrained) => pretrained,
                Err(error) => {
                    let valid = "use a folder of Hugging Face with config.json and model.safetensors of a family in docs/families.md";
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
            let of = *pretrained.architecture();
            let text = serde_json::Value::Object(pretrained.settings().config.clone()).to_string();
            match config {
                Some(config) if config != text => {
                    let valid = format!("leave {CONFIG} out");
                    return settings.fault(CONFIG, config, format!("the model in {folder} has a config.json"), valid);
                }
                _ if !is_of_keys(&of) => settings.derive(CONFIG, &[KEY], text),
                _ => {}
            }
            (KEY, folder, of)
        }
    };
    let learned_positions = of.decoder.names.positions.is_some();
    for (name, value) in sizes(&of) {
        let misfit = |given: &Value| !same(given, &value) && !is_free(name, given, &value, learned_positions);
        match settings.given::<Value>(name).filter(misfit) {
            Some(given) => {
                let problem = format!("the model in {from} has {value}");
                let fewer = if name == "model.seq_len" { " or fewer" } else { "" };
                settings.fault(name, given, problem, format!("use {value}{fewer}, or leave the key out"));
            }
            None => {
                if let Err((problem, valid)) = check(name, &value) {
                    settings.fault(name, format!("{value} (from {key})"), problem, valid);
                }
                settings.derive(name, &[key], value);
            }
        }
    }
}

/// Whether the keys of `[model]` and `[moe]` alone say what a model is.
fn is_of_keys(of: &Architecture) -> bool {
    let DecoderConfig { rotary, head_dim, attention_bias, fused_qkv, mlp_bias, .. } = of.decoder;
    let scaling = rotary.and_then(|rotary| rotary.scaling);
    let plain = head_dim.is_none()
        && matches!(scaling, None | Some(RotaryScaling::Llama3 { .. }))
        && (fused_qkv || !(attention_bias.input || mlp_bias));
    let kinds = [&gpt2::FAMILY, &llama::FAMILY].map(|family| family.class);
    plain
        && (kinds.contains(&of.family.class) || ["MistralForCausalLM", "MixtralForCausalLM"].contains(&of.family.class))
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
fn sizes(of: &Architecture) -> Vec<(&'static str, Value)> {
    let DecoderConfig { num_heads, num_kv_heads, fused_qkv, rotary, .. } = of.decoder;
    let config = &of.decoder;
    let kind = if *of.family == gpt2::FAMILY { ModelKind::Gpt2 } else { ModelKind::Llama };
    let mut sizes = vec![
        ("model.kind", kind.name().into()),
        ("model.vocab_size", int(config.vocab_size)),
        ("model.num_layers", int(config.num_layers)),
        ("model.hidden_size", int(config.hidden_size)),
        ("model.num_heads", int(num_heads)),
        ("model.num_kv_heads", int(if fused_qkv { num_heads } else { num_kv_heads })),
        ("model.ffn_hidden_size", int(config.ffn_hidden_size)),
        ("model.seq_len", int(config.seq_len)),
        ("model.sliding_window", int(config.sliding_window.unwrap_or(0))),
        ("model.tie_embeddings", config.tie_embeddings.into()),
    ];
    match (kind, rotary) {
        (ModelKind::Llama, _) if !is_of_keys(of) => {}
        (ModelKind::Llama, Some(rotary)) => {
            sizes.extend([("model.norm_eps", config.norm_eps.into()), ("model.rope_theta", rotary.theta.into())]);
            sizes.extend(scaling(rotary.scaling));
        }
        _ => sizes.push(("model.dropout", f64::from(config.dropout).into())),
    }
    sizes.extend(of.experts.as_ref().map_or(vec![("moe.num_experts", int(0))], experts));
    sizes
}

fn scaling(of: Option<RotaryScaling>) -> Vec<(&'static str, Value)> {
    const FACTOR: &str = "model.rope_scaling_factor";
    match of {
        Some(RotaryScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_positions }) => {
            vec![
                (FACTOR, factor.into()),
                ("model.rope_scaling_low_freq_factor", low_frequency_factor.into()),
                ("model.rope_scaling_high_freq_factor", high_frequency_factor.into()),
                ("model.rope_scaling_original_seq_len", int(original_positions)),
            ]
        }
        _ => vec![(FACTOR, 1.0.into())],
    }
}

fn experts(of: &ExpertsConfig) -> Vec<(&'static str, Value)> {
    let ExpertsConfig { moe, every_n_layers, first_dense_layers, num_shared_experts, expert_hidden_size, .. } = of;
    vec![
        ("moe.num_experts", int(moe.num_experts)),
        ("moe.top_k", int(moe.top_k)),
        ("moe.router", moe.router.name().into()),
        ("moe.normalize_top_k", moe.normalise.into()),
        ("moe.capacity_factor", moe.capacity_factor.into()),
        ("moe.num_groups", int(moe.groups.groups)),
        ("moe.top_groups", int(moe.groups.top_groups)),
        ("moe.routed_scaling", moe.routed_scaling.into()),
        ("moe.every_n_layers", int(*every_n_layers)),
        ("moe.first_dense_layers", int(*first_dense_layers)),
        ("moe.num_shared_experts", int(*num_shared_experts)),
        ("moe.expert_hidden_size", int(*expert_hidden_size)),
    ]
}

impl Config {
    /// The model in the form in which Hugging Face folders describe it. GPT-2 has no experts there, which the checks
    /// refuse.
    pub fn architecture(&self) -> Architecture {
        let decoder = self.decoder();
        match (self.described(), self.model.kind, self.experts()) {
            (Some(of), _, experts) => Architecture { decoder, experts, ..of },
            (None, ModelKind::Gpt2, _) => Architecture::gpt2(decoder),
            (None, ModelKind::Llama, None) => Architecture::llama(decoder),
            (None, ModelKind::Llama, Some(experts)) => Architecture::mixtral(decoder, experts),
        }
    }

    /// The model of `model.config`, if there is one.
    pub(super) fn described(&self) -> Option<Architecture> {
        self.model.config.as_deref().and_then(|text| Architecture::read(text).ok())
    }
}
