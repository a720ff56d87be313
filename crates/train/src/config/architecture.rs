//! Checks across the keys of `[model]`, by the kind of model.

use super::Config;
use super::batch::multiple;
use super::fault::Fault;
use super::sections::Model;
use super::settings::Settings;
use super::words::ModelKind;
use meshwork_models::language::{Frozen, FrozenError};

const HIDDEN: &str = "model.hidden_size";
const HEADS: &str = "model.num_heads";
const KV_HEADS: &str = "model.num_kv_heads";

/// Adds the faults of sizes that no model of this kind can have, or that cannot be split over tp, to `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let (model, decoder) = (&config.model, config.decoder());
    match model.kind {
        ModelKind::Gpt2 => check_gpt2(model, settings),
        ModelKind::Llama => check_llama(model, decoder.head_dim, config.parallelism.tp, settings),
    }
    let (key, chunk) = ("memory.loss_chunk", config.memory.loss_chunk);
    settings.require(&[key, "model.config"], chunk == 0 || decoder.logit_cap.is_none(), || {
        let problem = "the logits of this model are capped, and a loss of some tokens at a time takes them as they are";
        Fault::new(key, chunk, problem, "use 0")
    });
    if let Some((problem, valid)) = frozen_fault(model, settings) {
        settings.faults.push(Fault::new("model.freeze", &model.freeze, problem, valid));
    }
}

/// The problem of `model.freeze`, and what would be valid.
fn frozen_fault(model: &Model, settings: &Settings) -> Option<(String, String)> {
    let (layers, tied) = ("model.num_layers", "model.tie_embeddings");
    let frozen = match model.freeze.parse::<Frozen>() {
        Ok(frozen) => frozen,
        Err(FrozenError(word)) => {
            let valid = "use embedding, layers.N, layers.A-B, norm or head, with commas";
            return Some((format!("{word:?} is no part of a model"), valid.to_owned()));
        }
    };
    if !settings.sound(&["model.freeze", layers, tied, "model.kind"]) || !frozen.is_some() {
        return None;
    }
    if let Some(layer) = frozen.layers.iter().map(|layers| *layers.end()).find(|&layer| layer >= model.num_layers) {
        let problem = format!("there is no layer {layer}: {layers} is {}", model.num_layers);
        return Some((problem, format!("use 0 to {}", model.num_layers - 1)));
    }
    if model.tie_embeddings && frozen.head && !frozen.embedding {
        let problem = format!("the head is the token table, because {tied} is true, and the embedding would train it");
        return Some((problem, format!("freeze embedding, which includes the head, or use {tied} = false")));
    }
    let head = frozen.head || model.tie_embeddings;
    let all = (Frozen { head, ..frozen }).is_all(model.num_layers);
    all.then(|| ("nothing is left to train".to_owned(), "leave a part out".to_owned()))
}

fn check_gpt2(model: &Model, settings: &mut Settings) {
    let (heads, kv_heads) = (model.num_heads, model.num_kv_heads);
    settings.require(&["model.kind", HEADS, KV_HEADS], kv_heads == heads, || {
        let problem = "gpt2 has a key and value head for each head: only llama groups them";
        Fault::new(KV_HEADS, kv_heads, problem, format!("use {heads}, as {HEADS}, or model.kind = \"llama\""))
    });
}

fn check_llama(model: &Model, head_dim: Option<usize>, tp: usize, settings: &mut Settings) {
    let (hidden, heads, kv_heads) = (model.hidden_size, model.num_heads, model.num_kv_heads);
    // Checked elsewhere where it is no whole number.
    let width = head_dim.or(hidden.is_multiple_of(heads).then_some(hidden / heads));
    settings.require(&["model.kind", HIDDEN, HEADS], width.is_none_or(|width| width.is_multiple_of(2)), || {
        let width = head_dim.unwrap_or(hidden / heads);
        let problem = format!("gives each of {HEADS} = {heads} a width of {width}: rotary embeddings need an even one");
        Fault::new(HIDDEN, hidden, problem, multiple(hidden, heads.saturating_mul(2)))
    });
    let even = !heads.is_multiple_of(tp) || kv_heads.is_multiple_of(tp) || tp.is_multiple_of(kv_heads);
    settings.require(&["model.kind", HEADS, KV_HEADS, "parallelism.tp"], even, || {
        let problem = format!("can be neither split nor replicated evenly over parallelism.tp = {tp}");
        Fault::new(KV_HEADS, kv_heads, problem, format!("use a multiple or a divisor of {tp}"))
    });
    // Ranks that share a key and value head hold a part of its weights each.
    let sharing = if tp.is_multiple_of(kv_heads) { tp / kv_heads } else { 1 };
    let keys = ["model.kind", HIDDEN, HEADS, KV_HEADS, "parallelism.tp"];
    settings.require(&keys, width.is_none_or(|width| width.is_multiple_of(sharing)), || {
        let problem = format!(
            "makes {sharing} ranks of parallelism.tp = {tp} share each key and value head, whose width of {} they cannot split evenly",
            head_dim.unwrap_or(hidden / heads)
        );
        let valid = format!("use more {KV_HEADS}, or heads whose width is a multiple of {sharing}");
        Fault::new(KV_HEADS, kv_heads, problem, valid)
    });
    let (low, high) = ("model.rope_scaling_low_freq_factor", "model.rope_scaling_high_freq_factor");
    let (least, most) = (model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor);
    let keys = ["model.kind", low, high, "model.rope_scaling_factor"];
    settings.require(&keys, model.rope_scaling_factor == 1.0 || most > least, || {
        let problem = format!("is not above {low} = {least}: no frequencies lie between");
        Fault::new(high, most, problem, format!("use more than {least}"))
    });
}
