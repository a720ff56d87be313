//! `config.json`: from a Hugging Face model's settings to the sizes of ours. Settings that change the numbers of a
//! model and are not supported are refused; others are ignored.

use super::{Architecture, Error};
use crate::experts::{ExpertsConfig, MoeConfig, RouterKind};
use crate::families::{FAMILIES, Family, Settings, rotary};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// `eos_token_id`: one token, or several. None where it is not given.
pub(super) fn ends_of_text(settings: &Map<String, Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match settings.get("eos_token_id") {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        Some(one) => id(one).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Keys of models that are variants of these, with the values at which they change nothing.
fn neutral() -> Vec<(&'static str, Vec<Value>)> {
    let (off, one) = (vec![json!(false)], vec![json!(1)]);
    vec![
        ("pruned_heads", vec![json!({}), json!([])]),
        ("partial_rotary_factor", one.clone()),
        ("rotary_pct", one.clone()),
        ("rope_interleave", off.clone()),
        ("rope_local_base_freq", vec![]),
        ("sliding_window", vec![]),
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
    let mut settings = Settings::new(values);
    let quantized = ["quantization_config", "compression_config"].into_iter().find(|key| settings.value(key).is_some());
    settings.problems.extend(quantized.map(|key| quantization(key, &values[key])));
    let names: Vec<&str> =
        values.get("architectures").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let model_type = settings.value("model_type").and_then(Value::as_str);
    let supported = || {
        let classes: Vec<&str> = FAMILIES.iter().map(|family| family.class).collect();
        format!("{} are supported", classes.join(", "))
    };
    let family = match (names.first(), model_type) {
        (Some(&name), _) => Family::of_class(name),
        (None, model_type) => FAMILIES.iter().copied().find(|family| Some(family.model_type) == model_type),
    };
    let Some(family) = family else {
        settings.problems.push(match (names.first(), model_type) {
            (Some(name), _) => format!("architectures names {name:?}: {}{}", supported(), strange(values)),
            (None, Some(model_type)) => {
                format!(
                    "architectures is missing, and model_type is {model_type:?}: {}{}",
                    supported(),
                    strange(values)
                )
            }
            (None, None) => format!("it has neither architectures nor model_type: {}", supported()),
        });
        return Err(Error::Config(settings.problems));
    };
    // transformers goes by the type, others by the class.
    if let Some(other) = model_type.filter(|model_type| *model_type != family.model_type) {
        let (class, of_class) = (family.class, family.model_type);
        settings
            .problems
            .push(format!("model_type is {other:?}, and that of the architectures entry {class:?} is {of_class:?}"));
    }
    let (decoder, experts) = (family.read)(&mut settings);
    settings.problems.extend(rotary::misfit(&decoder));
    for (key, valid) in neutral() {
        settings.only(key, &valid);
    }
    let full =
        |layers: &Value| layers.as_array().is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention"));
    if let Some(layers) = settings.value("layer_types").filter(|_| !settings.taken.contains("layer_types"))
        && !full(layers)
    {
        settings.problems.push(format!("layer_types is {layers}: supported is \"full_attention\" for each"));
    }
    match settings.problems.is_empty() {
        true => Ok(Architecture { family, decoder, experts }),
        false => Err(Error::Config(settings.problems)),
    }
}

/// The keys of a family that is not supported which no supported one reads: what sets it apart.
fn strange(values: &Map<String, Value>) -> String {
    let read_by = |family: &&Family| {
        let mut settings = Settings::new(values);
        (family.read)(&mut settings);
        settings.asked.into_inner()
    };
    let read: BTreeSet<String> = FAMILIES.iter().flat_map(read_by).collect();
    let known = |key: &&String| {
        read.contains(*key)
            || COMMON.contains(&&***key)
            || neutral().iter().any(|(neutral, _)| neutral == key)
            || key.ends_with("token_id")
            || key.starts_with("summary_")
    };
    let others: Vec<&str> = values.keys().filter(|key| !known(key)).map(String::as_str).collect();
    if others.is_empty() {
        String::new()
    } else {
        format!("; of its settings these are not known: {}", others.join(", "))
    }
}

/// Keys that change nothing here.
const COMMON: [&str; 18] = [
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "compression_config",
    "dtype",
    "initializer_range",
    "model_type",
    "output_attentions",
    "output_router_logits",
    "pretraining_tp",
    "quantization_config",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

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
        (experts.first_dense_layers != 0, format!("no experts in the first {} layers", experts.first_dense_layers)),
        (experts.num_shared_experts > 0, format!("{} shared experts", experts.num_shared_experts)),
    ];
    rules.into_iter().filter_map(|(other, what)| other.then_some(what)).collect()
}
