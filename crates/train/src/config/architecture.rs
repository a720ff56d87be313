//! Checks across the keys of `[model]`, by the kind of model.

use super::batch::multiple;
use super::fault::Fault;
use super::sections::Model;
use super::settings::Settings;
use super::words::ModelKind;
use meshwork_models::language::{Frozen, FrozenError};

/// Reports to `fail` what no model of this kind can have, and what cannot be split over `tp`.
pub(crate) fn check(model: &Model, tp: usize, settings: &Settings, fail: &mut impl FnMut(Fault)) {
    match model.kind {
        ModelKind::Gpt2 => check_gpt2(model, settings, fail),
        ModelKind::Llama => check_llama(model, tp, settings, fail),
    }
    check_frozen(model, settings, fail);
}

fn check_frozen(model: &Model, settings: &Settings, fail: &mut impl FnMut(Fault)) {
    let (key, layers, tied) = ("model.freeze", "model.num_layers", "model.tie_embeddings");
    let mut refuse = |problem: String, valid: String| fail(Fault::new(key, &model.freeze, problem, valid));
    let frozen = match model.freeze.parse::<Frozen>() {
        Ok(frozen) => frozen,
        Err(FrozenError(word)) => {
            let valid = "use embedding, layers.N, layers.A-B, norm or head, with commas";
            return refuse(format!("{word:?} is no part of a model"), valid.to_owned());
        }
    };
    if !settings.sound(&[key, layers, tied, "model.kind"]) || !frozen.is_some() {
        return;
    }
    if let Some(layer) = frozen.layers.iter().map(|layers| *layers.end()).find(|&layer| layer >= model.num_layers) {
        let last = model.num_layers - 1;
        return refuse(
            format!("there is no layer {layer}: {layers} is {}", model.num_layers),
            format!("use 0 to {last}"),
        );
    }
    if model.tie_embeddings && frozen.head && !frozen.embedding {
        let problem = format!("the head is the token table, because {tied} is true, and the embedding would train it");
        return refuse(problem, format!("freeze embedding, which includes the head, or use {tied} = false"));
    }
    let head = frozen.head || model.tie_embeddings;
    if (Frozen { head, ..frozen }).is_all(model.num_layers) {
        refuse("nothing is left to train".to_owned(), "leave a part out".to_owned());
    }
}

fn check_gpt2(model: &Model, settings: &Settings, fail: &mut impl FnMut(Fault)) {
    let keys = ["model.kind", "model.num_heads", "model.num_kv_heads"];
    if settings.sound(&keys) && model.num_kv_heads != model.num_heads {
        let problem = "gpt2 has a key and value head for each head: only llama groups them";
        let valid = format!("use {}, as {}, or model.kind = \"llama\"", model.num_heads, keys[1]);
        fail(Fault::new(keys[2], model.num_kv_heads, problem, valid));
    }
}

fn check_llama(model: &Model, tp: usize, settings: &Settings, fail: &mut impl FnMut(Fault)) {
    let (hidden, heads, kv_heads) = ("model.hidden_size", "model.num_heads", "model.num_kv_heads");
    let (low, high) = ("model.rope_scaling_low_freq_factor", "model.rope_scaling_high_freq_factor");
    if settings.sound(&["model.kind", hidden, heads])
        && model.hidden_size.is_multiple_of(model.num_heads)
        && !(model.hidden_size / model.num_heads).is_multiple_of(2)
    {
        let width = model.hidden_size / model.num_heads;
        let problem = format!(
            "gives each of {heads} = {} a width of {width}: rotary embeddings need an even one",
            model.num_heads
        );
        fail(Fault::new(
            hidden,
            model.hidden_size,
            problem,
            multiple(model.hidden_size, model.num_heads.saturating_mul(2)),
        ));
    }
    if settings.sound(&["model.kind", heads, kv_heads, "parallelism.tp"])
        && model.num_heads.is_multiple_of(tp)
        && !model.num_kv_heads.is_multiple_of(tp)
        && !tp.is_multiple_of(model.num_kv_heads)
    {
        let problem = format!("can be neither split nor replicated evenly over parallelism.tp = {tp}");
        fail(Fault::new(kv_heads, model.num_kv_heads, problem, format!("use a multiple or a divisor of {tp}")));
    }
    // Ranks that share a key and value head hold a part of its weights each.
    if settings.sound(&["model.kind", hidden, heads, kv_heads, "parallelism.tp"])
        && model.hidden_size.is_multiple_of(model.num_heads)
        && tp.is_multiple_of(model.num_kv_heads)
        && !(model.hidden_size / model.num_heads).is_multiple_of(tp / model.num_kv_heads)
    {
        let (width, sharing) = (model.hidden_size / model.num_heads, tp / model.num_kv_heads);
        let problem = format!(
            "makes {sharing} ranks of parallelism.tp = {tp} share each key and value head, whose width of {width} they cannot split evenly"
        );
        let valid = format!("use more {kv_heads}, or heads whose width is a multiple of {sharing}");
        fail(Fault::new(kv_heads, model.num_kv_heads, problem, valid));
    }
    if settings.sound(&["model.kind", low, high, "model.rope_scaling_factor"])
        && model.rope_scaling_factor != 1.0
        && model.rope_scaling_high_freq_factor <= model.rope_scaling_low_freq_factor
    {
        let least = model.rope_scaling_low_freq_factor;
        let problem = format!("is not above {low} = {least}: no frequencies lie between");
        fail(Fault::new(high, model.rope_scaling_high_freq_factor, problem, format!("use more than {least}")));
    }
}
