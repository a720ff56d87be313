//! `config.json`: from a Hugging Face model's settings to the sizes of ours, and back.

use super::{Architecture, Error};
use crate::experts::{ExpertsConfig, MoeConfig, RouterKind};
use crate::gpt2::Gpt2Config;
use crate::llama::LlamaConfig;
use meshwork_tensor::op::{Rotary, RotaryScaling};
use serde_json::{Map, Value, json};

/// `eos_token_id`: one token, or several. None where it is not given.
pub(super) fn ends_of_text(text: &str) -> Vec<u32> {
    let settings: Value = serde_json::from_str(text).unwrap_or_default();
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match &settings["eos_token_id"] {
        Value::Array(ids) => ids.iter().filter_map(id).collect(),
        one => id(one).into_iter().collect(),
    }
}

/// Reads settings, and collects what is wrong with them.
struct Settings<'a> {
    values: &'a Map<String, Value>,
    problems: Vec<String>,
}

impl Settings<'_> {
    fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// A number above zero that must be there.
    fn size(&mut self, key: &str) -> usize {
        match self.value(key).map(Value::as_u64) {
            Some(Some(size)) if size > 0 => usize::try_from(size).unwrap_or(usize::MAX),
            Some(_) => self.refuse(key, "a whole number above 0"),
            None => {
                self.problems.push(format!("{key} is missing"));
                1
            }
        }
    }

    /// The same, with a default.
    fn size_or(&mut self, key: &str, default: usize) -> usize {
        if self.value(key).is_some() { self.size(key) } else { default }
    }

    fn number_or(&mut self, key: &str, default: f64) -> f64 {
        match self.value(key).map(Value::as_f64) {
            None => default,
            Some(Some(number)) => number,
            Some(None) => {
                self.refuse(key, "a number");
                default
            }
        }
    }

    fn flag_or(&mut self, key: &str, default: bool) -> bool {
        match self.value(key).map(Value::as_bool) {
            None => default,
            Some(Some(flag)) => flag,
            Some(None) => {
                self.refuse(key, "true or false");
                default
            }
        }
    }

    fn refuse(&mut self, key: &str, wanted: &str) -> usize {
        let value = self.values.get(key).cloned().unwrap_or_default();
        self.problems.push(format!("{key} is {value}: it must be {wanted}"));
        1
    }

    /// A setting that this library has in one form only. A missing one has that form.
    fn only(&mut self, key: &str, valid: &[Value]) {
        if let Some(value) = self.value(key).filter(|value| !valid.contains(value)) {
            let valid: Vec<String> = valid.iter().map(Value::to_string).collect();
            let valid = if valid.is_empty() { "none".to_owned() } else { valid.join(" or ") };
            self.problems.push(format!("{key} is {value}: supported is {valid}"));
        }
    }
}

/// The architecture that a `config.json` describes.
///
/// # Errors
/// Everything that is missing, misshapen or not supported, together.
pub(super) fn read(text: &str) -> Result<Architecture, Error> {
    let value: Value = serde_json::from_str(text).map_err(|error| problem(format!("it is not JSON: {error}")))?;
    let values = value.as_object().ok_or_else(|| problem("it is not an object".to_owned()))?;
    let mut settings = Settings { values, problems: Vec::new() };
    let names: Vec<&str> =
        values.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let kind =
        names.first().copied().or_else(|| settings.value("model_type").and_then(Value::as_str)).unwrap_or_default();
    let architecture = match kind {
        "GPT2LMHeadModel" | "gpt2" => Architecture::Gpt2(gpt2(&mut settings)),
        "LlamaForCausalLM" | "llama" => Architecture::Llama(llama(&mut settings)),
        "MixtralForCausalLM" | "mixtral" => mixtral(&mut settings),
        other => {
            let valid = "GPT2LMHeadModel, LlamaForCausalLM and MixtralForCausalLM are supported";
            return Err(problem(format!("architectures names {other:?}: {valid}")));
        }
    };
    match settings.problems.is_empty() {
        true => Ok(architecture),
        false => Err(Error::Config(settings.problems)),
    }
}

fn problem(problem: String) -> Error {
    Error::Config(vec![problem])
}

fn gpt2(settings: &mut Settings<'_>) -> Gpt2Config {
    let hidden_size = settings.size("n_embd");
    let num_heads = settings.size("n_head");
    // Ours has one probability for embeddings, attention weights and residual branches.
    let dropout = settings.number_or("resid_pdrop", 0.1);
    for key in ["embd_pdrop", "attn_pdrop"] {
        let other = settings.number_or(key, 0.1);
        if other != dropout {
            settings
                .problems
                .push(format!("{key} is {other} and resid_pdrop {dropout}: supported is one probability for all"));
        }
    }
    settings.only("activation_function", &["gelu_new".into(), "gelu_pytorch_tanh".into(), "gelu_fast".into()]);
    settings.only("layer_norm_epsilon", &[json!(1e-5)]);
    settings.only("scale_attn_weights", &[true.into()]);
    settings.only("scale_attn_by_inverse_layer_idx", &[false.into()]);
    settings.only("reorder_and_upcast_attn", &[false.into(), true.into()]);
    settings.only("add_cross_attention", &[false.into()]);
    heads_divide(settings, hidden_size, num_heads, "n_embd", "n_head");
    Gpt2Config {
        vocab_size: settings.size("vocab_size"),
        num_layers: settings.size("n_layer"),
        hidden_size,
        num_heads,
        ffn_hidden_size: settings.size_or("n_inner", 4 * hidden_size),
        seq_len: settings.size_or("n_positions", 1024),
        tie_embeddings: settings.flag_or("tie_word_embeddings", true),
        dropout: dropout as f32,
    }
}

fn llama(settings: &mut Settings<'_>) -> LlamaConfig {
    let hidden_size = settings.size("hidden_size");
    let num_heads = settings.size("num_attention_heads");
    let num_kv_heads = settings.size_or("num_key_value_heads", num_heads);
    heads_divide(settings, hidden_size, num_heads, "hidden_size", "num_attention_heads");
    if !num_heads.is_multiple_of(num_kv_heads) {
        let problem = format!("num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}");
        settings.problems.push(problem);
    }
    settings.only("head_dim", &[json!(hidden_size / num_heads)]);
    settings.only("hidden_act", &["silu".into()]);
    settings.only("attention_bias", &[false.into()]);
    settings.only("mlp_bias", &[false.into()]);
    settings.only("attention_dropout", &[json!(0), json!(0.0)]);
    settings.only("sliding_window", &[]);
    let rotary = rotary(settings);
    LlamaConfig {
        vocab_size: settings.size("vocab_size"),
        num_layers: settings.size("num_hidden_layers"),
        hidden_size,
        num_heads,
        num_kv_heads,
        ffn_hidden_size: settings.size("intermediate_size"),
        seq_len: settings.size_or("max_position_embeddings", 2048),
        rotary,
        norm_eps: settings.number_or("rms_norm_eps", 1e-6),
        tie_embeddings: settings.flag_or("tie_word_embeddings", false),
    }
}

/// A Llama whose experts are as wide as its `intermediate_size`. Whether its `config.json` asks for the losses of routers
/// (`output_router_logits`) does not matter here: a run sets their factors.
fn mixtral(settings: &mut Settings<'_>) -> Architecture {
    // There it multiplies the input of the experts too.
    settings.only("router_jitter_noise", &[json!(0), json!(0.0)]);
    let llama = llama(settings);
    let (num_experts, top_k) = (settings.size_or("num_local_experts", 8), settings.size_or("num_experts_per_tok", 2));
    if top_k > num_experts {
        let problem = format!("num_experts_per_tok is {top_k}: it must be at most num_local_experts, {num_experts}");
        settings.problems.push(problem);
    }
    Architecture::Mixtral(llama, experts(llama.ffn_hidden_size, num_experts, top_k))
}

/// The experts of a Mixtral: the best of a softmax, with weights that add up to 1, in every layer and without a capacity.
pub(super) fn experts(width: usize, num_experts: usize, top_k: usize) -> ExpertsConfig {
    ExpertsConfig {
        moe: MoeConfig { num_experts, top_k, ..MoeConfig::default() },
        every_n_layers: 1,
        num_shared_experts: 0,
        expert_hidden_size: width,
        over_tp: false,
    }
}

/// What these experts have that those of a `MixtralForCausalLM` do not. What training alone reads is not looked at: factors of losses, jitter.
pub fn not_of_mixtral(experts: &ExpertsConfig) -> Vec<String> {
    let MoeConfig { router, capacity_factor, normalise, routed_scaling, groups, .. } = experts.moe;
    let rules = [
        (router != RouterKind::TopK, format!("router {router}")),
        (!normalise, "weights that do not add up to 1".to_owned()),
        (capacity_factor != 0.0, format!("a capacity, of factor {capacity_factor}")),
        (groups.groups > 1, format!("{} groups of experts", groups.groups)),
        (routed_scaling != 1.0, format!("weights times {routed_scaling}")),
        (experts.every_n_layers != 1, format!("experts in one of {} layers", experts.every_n_layers)),
        (experts.num_shared_experts > 0, format!("{} shared experts", experts.num_shared_experts)),
    ];
    rules.into_iter().filter_map(|(other, what)| other.then_some(what)).collect()
}

fn heads_divide(settings: &mut Settings<'_>, hidden: usize, heads: usize, hidden_key: &str, heads_key: &str) {
    if settings.problems.is_empty() && !hidden.is_multiple_of(heads) {
        settings.problems.push(format!("{heads_key} {heads} does not divide {hidden_key} {hidden}"));
    }
}

/// The rotary embedding: `rope_theta` and `rope_scaling`, or both in `rope_parameters` of newer files.
fn rotary(settings: &mut Settings<'_>) -> Rotary {
    let key = if settings.value("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let empty = Map::new();
    let given = settings.value(key).cloned().unwrap_or_default();
    let scaling = given.as_object().unwrap_or(&empty);
    let mut inner = Settings { values: scaling, problems: Vec::new() };
    let theta = settings.number_or("rope_theta", 10_000.0);
    let theta = inner.number_or("rope_theta", theta);
    let kind = inner.value("rope_type").or(inner.value("type")).and_then(Value::as_str).unwrap_or("default").to_owned();
    let scaling = match &*kind {
        "default" => None,
        "llama3" => Some(RotaryScaling {
            factor: inner.number_or("factor", 8.0),
            low_frequency_factor: inner.number_or("low_freq_factor", 1.0),
            high_frequency_factor: inner.number_or("high_freq_factor", 4.0),
            original_positions: inner.size_or("original_max_position_embeddings", 8192),
        }),
        other => {
            inner.problems.push(format!("rope_type is {other:?}: supported is \"default\" or \"llama3\""));
            None
        }
    };
    settings.problems.extend(inner.problems.into_iter().map(|problem| format!("{key}: {problem}")));
    Rotary { theta, scaling }
}

/// The `config.json` of an architecture, whose weights are of this dtype.
pub(super) fn write(architecture: &Architecture, dtype: &str) -> Value {
    match architecture {
        Architecture::Gpt2(config) => json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_positions": config.seq_len,
            "n_ctx": config.seq_len,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.ffn_hidden_size,
            "activation_function": "gelu_new",
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": config.tie_embeddings,
            "torch_dtype": dtype,
        }),
        Architecture::Llama(config) => write_llama(config, "LlamaForCausalLM", "llama", dtype),
        Architecture::Mixtral(config, experts) => {
            let mut settings = write_llama(config, "MixtralForCausalLM", "mixtral", dtype);
            settings["intermediate_size"] = json!(experts.expert_hidden_size);
            settings["num_local_experts"] = json!(experts.moe.num_experts);
            settings["num_experts_per_tok"] = json!(experts.moe.top_k);
            settings["router_jitter_noise"] = json!(0.0);
            settings["sliding_window"] = Value::Null;
            // There the loss counts every one of a token's experts, here their mean.
            settings["router_aux_loss_coef"] = json!(experts.moe.aux_loss_coeff / experts.moe.top_k as f64);
            settings
        }
    }
}

fn write_llama(config: &LlamaConfig, architecture: &str, model_type: &str, dtype: &str) -> Value {
    let rope = match config.rotary.scaling {
        None => Value::Null,
        Some(scaling) => json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }),
    };
    json!({
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.seq_len,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size / config.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary.theta,
        "rope_scaling": rope,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
    })
}
