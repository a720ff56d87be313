//! `config.json`: from a Hugging Face model's settings to the sizes of ours. Settings that change the numbers of a
//! model and are not supported are refused; others are ignored.
//!
//! More than 400 lines: the settings of four classes, each with its defaults.

use super::{Architecture, Error};
use crate::experts::{ExpertsConfig, MoeConfig, RouterKind};
use crate::gpt2::Gpt2Config;
use crate::llama::LlamaConfig;
use meshwork_tensor::op::{Rotary, RotaryScaling};
use serde_json::{Map, Value, json};

/// `eos_token_id`: one token, or several. None where it is not given.
pub(super) fn ends_of_text(settings: &Map<String, Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match settings.get("eos_token_id") {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
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

    /// A number that must be there.
    fn number(&mut self, key: &str) -> f64 {
        if self.value(key).is_none() {
            self.problems.push(format!("{key} is missing"));
        }
        self.number_or(key, 1.0)
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
        if let Some(value) = self.value(key).filter(|value| !valid.iter().any(|valid| same(valid, value))) {
            let valid: Vec<String> = valid.iter().map(Value::to_string).collect();
            let valid = if valid.is_empty() { "none".to_owned() } else { valid.join(" or ") };
            self.problems.push(format!("{key} is {value}: supported is {valid}"));
        }
    }
}

/// Whether two values are equal: 1 is 1.0.
fn same(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

/// A supported class of `transformers`, with the `model_type` that it has.
const CLASSES: [(&str, &str); 4] = [
    ("GPT2LMHeadModel", "gpt2"),
    ("LlamaForCausalLM", "llama"),
    ("MistralForCausalLM", MISTRAL),
    ("MixtralForCausalLM", "mixtral"),
];

/// The type of a Llama with a sliding window.
pub(super) const MISTRAL: &str = "mistral";

/// Keys of models that are variants of these, with the values at which they change nothing.
fn neutral() -> Vec<(&'static str, Vec<Value>)> {
    let (off, one) = (vec![json!(false)], vec![json!(1)]);
    vec![
        ("pruned_heads", vec![json!({}), json!([])]),
        ("partial_rotary_factor", one.clone()),
        ("rotary_pct", one.clone()),
        ("rope_interleave", off.clone()),
        ("rope_local_base_freq", vec![]),
        ("no_rope_layers", vec![json!([])]),
        ("alibi", off.clone()),
        ("position_embedding_type", vec![json!("absolute"), json!("rope"), json!("rotary")]),
        ("use_sliding_window", off.clone()),
        ("attention_multiplier", vec![]),
        ("embedding_multiplier", one.clone()),
        ("residual_multiplier", one.clone()),
        ("logits_scaling", one.clone()),
        ("logit_scale", one.clone()),
        ("scale_emb", one.clone()),
        ("scale_depth", one),
        ("dim_model_base", vec![]),
        ("query_pre_attn_scalar", vec![]),
        ("attn_logit_softcapping", vec![]),
        ("final_logit_softcapping", vec![]),
        ("clip_qkv", vec![]),
        ("qk_layernorm", off.clone()),
        ("use_qk_norm", off.clone()),
        ("qk_norm", off.clone()),
        ("qkv_bias", off.clone()),
        ("bias", off.clone()),
        ("parallel_attn", off.clone()),
        ("use_parallel_residual", off.clone()),
        ("n_shared_experts", vec![json!(0)]),
        ("is_encoder_decoder", off),
        ("is_causal", vec![json!(true)]),
    ]
}

/// The architecture that a `config.json` describes.
///
/// # Errors
/// Everything that is missing, misshapen or not supported, together.
pub(super) fn read(value: &Value) -> Result<Architecture, Error> {
    let values = value.as_object().ok_or_else(|| problem("it is not an object".to_owned()))?;
    let mut settings = Settings { values, problems: Vec::new() };
    let quantized = ["quantization_config", "compression_config"].into_iter().find(|key| settings.value(key).is_some());
    settings.problems.extend(quantized.map(|key| quantization(key, &values[key])));
    let names: Vec<&str> =
        values.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let model_type = settings.value("model_type").and_then(Value::as_str);
    let supported = || {
        let classes: Vec<&str> = CLASSES.iter().map(|(class, _)| *class).collect();
        format!("{} are supported", classes.join(", "))
    };
    let class = match (names.first(), model_type) {
        (Some(&name), _) => CLASSES.iter().find(|(class, _)| *class == name),
        (None, model_type) => CLASSES.iter().find(|(_, of)| Some(*of) == model_type),
    };
    let Some(&(class, of_class)) = class else {
        settings.problems.push(match (names.first(), model_type) {
            (Some(name), _) => format!("architectures names {name:?}: {}", supported()),
            (None, Some(model_type)) => {
                format!("architectures is missing, and model_type is {model_type:?}: {}", supported())
            }
            (None, None) => format!("it has neither architectures nor model_type: {}", supported()),
        });
        return Err(Error::Config(settings.problems));
    };
    // transformers goes by the type, others by the class.
    if let Some(other) = model_type.filter(|model_type| *model_type != of_class) {
        settings
            .problems
            .push(format!("model_type is {other:?}, and that of the architectures entry {class:?} is {of_class:?}"));
    }
    for (key, valid) in neutral() {
        settings.only(key, &valid);
    }
    if let Some(layers) = settings
        .value("layer_types")
        .filter(|layers| !layers.as_array().is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention")))
    {
        settings.problems.push(format!("layer_types is {layers}: supported is \"full_attention\" for each"));
    }
    let architecture = match of_class {
        "gpt2" => Architecture::Gpt2(gpt2(&mut settings)),
        "llama" | MISTRAL => Architecture::Llama(llama(&mut settings, of_class)),
        _ => mixtral(&mut settings, of_class),
    };
    if settings.problems.is_empty() { Ok(architecture) } else { Err(Error::Config(settings.problems)) }
}

/// The problem of a folder with quantized weights.
fn quantization(key: &str, config: &Value) -> String {
    let text = |key: &str| config[key].as_str();
    let bits = ["bits", "w_bit"].into_iter().find_map(|key| config[key].as_u64());
    let bits = match (config["load_in_4bit"].as_bool(), config["load_in_8bit"].as_bool()) {
        (Some(true), _) => Some(4),
        (_, Some(true)) => Some(8),
        _ => bits,
    };
    let method = text("quant_method").or(text("quant_algo")).or(text("format")).unwrap_or("unknown");
    let bits = bits.map_or_else(String::new, |bits| format!(" of {bits} bits"));
    format!(
        "{key} names the method {method:?}{bits}: quantized weights are not supported; use the folder in f32, bf16 or f16 that they were made \
         from, or `dequantize()` the model in transformers and `save_pretrained` it"
    )
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
        sliding_window: window(settings, "gpt2"),
        tie_embeddings: settings.flag_or("tie_word_embeddings", true),
        dropout: dropout as f32,
    }
}

/// The sliding window of a class, which a Llama does not have. Of one that is not given, `transformers` has a default.
fn window(settings: &mut Settings<'_>, class: &str) -> Option<usize> {
    const KEY: &str = "sliding_window";
    if !matches!(class, MISTRAL | "mixtral") {
        settings.only(KEY, &[]);
        return None;
    }
    match settings.values.get(KEY) {
        None => (class == MISTRAL).then_some(4096),
        Some(Value::Null) => None,
        Some(_) => Some(settings.size(KEY)),
    }
}

fn llama(settings: &mut Settings<'_>, class: &str) -> LlamaConfig {
    let hidden_size = settings.size("hidden_size");
    let num_heads = settings.size("num_attention_heads");
    let num_kv_heads = settings.size_or("num_key_value_heads", if class == MISTRAL { 8 } else { num_heads });
    heads_divide(settings, hidden_size, num_heads, "hidden_size", "num_attention_heads");
    if !num_heads.is_multiple_of(num_kv_heads) {
        let problem = format!("num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}");
        settings.problems.push(problem);
    }
    settings.only("head_dim", &[json!(hidden_size / num_heads)]);
    settings.only("hidden_act", &["silu".into()]);
    settings.only("attention_bias", &[false.into()]);
    settings.only("mlp_bias", &[false.into()]);
    settings.only("attention_dropout", &[json!(0)]);
    let sliding_window = window(settings, class);
    let rotary = rotary(settings);
    LlamaConfig {
        vocab_size: settings.size("vocab_size"),
        num_layers: settings.size("num_hidden_layers"),
        hidden_size,
        num_heads,
        num_kv_heads,
        ffn_hidden_size: settings.size("intermediate_size"),
        seq_len: settings.size_or("max_position_embeddings", 2048),
        sliding_window,
        rotary,
        norm_eps: settings.number_or("rms_norm_eps", 1e-6),
        tie_embeddings: settings.flag_or("tie_word_embeddings", false),
    }
}

/// A Llama whose experts are as wide as its `intermediate_size`. Whether its `config.json` asks for the losses of
/// routers (`output_router_logits`) does not matter here: a run sets their factors.
fn mixtral(settings: &mut Settings<'_>, class: &str) -> Architecture {
    // There it multiplies the input of the experts too.
    settings.only("router_jitter_noise", &[json!(0)]);
    let llama = llama(settings, class);
    let (num_experts, top_k) = (settings.size_or("num_local_experts", 8), settings.size_or("num_experts_per_tok", 2));
    if top_k > num_experts {
        let problem = format!("num_experts_per_tok is {top_k}: it must be at most num_local_experts, {num_experts}");
        settings.problems.push(problem);
    }
    Architecture::Mixtral(llama, experts(llama.ffn_hidden_size, num_experts, top_k))
}

/// The experts of a Mixtral: the best of a softmax, with weights that add up to 1, in every layer and without a
/// capacity.
pub(super) fn experts(width: usize, num_experts: usize, top_k: usize) -> ExpertsConfig {
    ExpertsConfig {
        moe: MoeConfig { num_experts, top_k, ..MoeConfig::default() },
        every_n_layers: 1,
        num_shared_experts: 0,
        expert_hidden_size: width,
        over_tp: false,
    }
}

/// Properties of these experts that a `MixtralForCausalLM` does not have. Settings of training alone, such as factors
/// of losses and jitter, are ignored.
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
    let given: Vec<&str> =
        ["rope_parameters", "rope_scaling"].into_iter().filter(|key| settings.value(key).is_some()).collect();
    let theta = settings.number_or("rope_theta", 10_000.0);
    let mut read = given.iter().map(|key| (*key, rotary_of(settings, key, theta))).collect::<Vec<_>>().into_iter();
    let (first, second) = (read.next(), read.next());
    if let (Some((key, one)), Some((other_key, other))) = (&first, &second)
        && one != other
    {
        settings.problems.push(format!("{key} and {other_key} say different things: keep one of them"));
    }
    first.map_or(Rotary { theta, scaling: None }, |(_, rotary)| rotary)
}

fn rotary_of(settings: &mut Settings<'_>, key: &str, theta: f64) -> Rotary {
    let given = settings.value(key).cloned().unwrap_or_default();
    let Some(scaling) = given.as_object() else {
        settings.refuse(key, "an object");
        return Rotary { theta, scaling: None };
    };
    let mut inner = Settings { values: scaling, problems: Vec::new() };
    let theta = inner.number_or("rope_theta", theta);
    let kinds: Vec<&Value> = ["rope_type", "type"].into_iter().filter_map(|key| inner.value(key)).collect();
    let kind = match &*kinds {
        [one, other] if one != other => {
            inner.problems.push(format!("rope_type is {one} and type {other}: keep one of them"));
            "default".to_owned()
        }
        [] if inner.value("factor").is_some() => {
            inner.problems.push("it has a factor and no rope_type: supported is \"default\" or \"llama3\"".to_owned());
            "default".to_owned()
        }
        [] if scaling.values().any(Value::is_object) => {
            inner.problems.push("it has settings for each kind of layer: supported is one for all".to_owned());
            "default".to_owned()
        }
        [] => "default".to_owned(),
        [kind, ..] => kind.as_str().map_or_else(|| kind.to_string(), str::to_owned),
    };
    inner.only("partial_rotary_factor", &[json!(1)]);
    let scaling = match &*kind {
        "default" => None,
        "llama3" => Some(RotaryScaling {
            factor: inner.number("factor"),
            low_frequency_factor: inner.number("low_freq_factor"),
            high_frequency_factor: inner.number("high_freq_factor"),
            original_positions: inner.size("original_max_position_embeddings"),
        }),
        other => {
            inner.problems.push(format!("rope_type is {other:?}: supported is \"default\" or \"llama3\""));
            None
        }
    };
    settings.problems.extend(inner.problems.into_iter().map(|problem| format!("{key}: {problem}")));
    Rotary { theta, scaling }
}
