//! `config.json` and `generation_config.json` of an export. What the folder said that the model comes from is kept, but
//! for what the run changed.

use super::{Architecture, Dtype, config};
use crate::families::{gpt2, llama};
use serde_json::{Map, Value, json};

/// The settings of the folder that a model comes from: `config.json` and `generation_config.json`, as they are there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `config.json`.
    pub config: Map<String, Value>,
    /// `generation_config.json`, if the folder has one.
    pub generation: Option<Map<String, Value>>,
}

/// The key of the tokens that end a text.
const ENDS: &str = "eos_token_id";

/// The tokens that end a text, as `generation_config.json` says, or else `config.json`.
pub(super) fn ends_of_text(settings: &Settings) -> Vec<u32> {
    let said = [settings.generation.as_ref(), Some(&settings.config)].into_iter().flatten();
    said.map(config::ends_of_text).find(|ends| !ends.is_empty()).unwrap_or_default()
}

/// The settings of an export, whose weights are of this dtype. `from` are the settings of the folder that the model
/// comes from. The tokens in `ends` end a text beside those that `from` names.
pub(super) fn settings(architecture: &Architecture, dtype: Dtype, ends: &[u32], from: Option<&Settings>) -> Settings {
    let mut now = of_architecture(architecture);
    let Some(from) = from else {
        // Without these keys transformers takes ids of its own, which are other tokens here.
        let ends = one_or_all(ends);
        for key in ["bos_token_id", ENDS, "pad_token_id"] {
            now.insert(key.to_owned(), if key == ENDS { ends.clone() } else { Value::Null });
        }
        now.insert("torch_dtype".to_owned(), dtype.torch_name().into());
        let mut generation = Map::from_iter([("_from_model_config".to_owned(), true.into())]);
        if !ends.is_null() {
            generation.insert(ENDS.to_owned(), ends);
        }
        return Settings { config: now, generation: Some(generation) };
    };
    let Settings { mut config, mut generation } = from.clone();
    // The settings that we would write for the folder's own model: a key with another value now was changed by the run.
    let before =
        config::read(&Value::Object(config.clone())).map(|before| of_architecture(&before)).unwrap_or_default();
    let rotary = ["rope_theta", "rope_scaling"].into_iter().any(|key| before.get(key) != now.get(key));
    if rotary {
        config.remove("rope_parameters");
    }
    // Without its window a Mistral becomes a Llama, which has no such key.
    if before.contains_key("sliding_window") && !now.contains_key("sliding_window") {
        config.remove("sliding_window");
    }
    for (key, value) in now {
        // A folder of more positions than the run's sequences keeps them.
        let fewer = key == "max_position_embeddings" && before.get(&key).and_then(Value::as_u64) > value.as_u64();
        let rewritten = rotary && key.starts_with("rope_");
        // Training alone reads it, and a run does not take it from the folder.
        let kept = key == "router_aux_loss_coef" && config.contains_key(&key);
        if (before.get(&key) != Some(&value) || rewritten) && !fewer && !kept {
            config.insert(key, value);
        }
    }
    let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    config.retain(|name, _| name != "auto_map" && (name == key || !["dtype", "torch_dtype"].contains(&&**name)));
    config.insert(key.to_owned(), dtype.torch_name().into());

    let named = ends_of_text(from);
    let all: Vec<u32> = named.iter().copied().chain(ends.iter().copied().filter(|end| !named.contains(end))).collect();
    if all.len() > named.len() {
        config.insert(ENDS.to_owned(), one_or_all(&all));
        generation
            .get_or_insert_with(|| Map::from_iter([("_from_model_config".to_owned(), true.into())]))
            .insert(ENDS.to_owned(), one_or_all(&all));
    }
    Settings { config, generation }
}

/// One id as a number, several as a list, none as null.
fn one_or_all(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => json!(one),
        all => json!(all),
    }
}

/// The settings of an architecture in `config.json`.
fn of_architecture(of: &Architecture) -> Map<String, Value> {
    let common = if *of.family == gpt2::FAMILY { Value::Null } else { llama::write(&of.decoder) };
    let class = json!({"architectures": [of.family.class], "model_type": of.family.model_type});
    let mut all = Map::new();
    for settings in [class, common, (of.family.write)(&of.decoder, of.experts.as_ref())] {
        for (key, value) in settings.as_object().into_iter().flatten() {
            match value.is_null() && all.contains_key(key) {
                true => all.remove(key),
                false => all.insert(key.clone(), value.clone()),
            };
        }
    }
    all
}
