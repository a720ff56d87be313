//! Checks of the axis that cuts sequences.

use super::Config;
use super::batch::closest;
use super::fault::Fault;
use super::settings::Settings;
use super::words::{ContextMethod, ContextOrder, Dtype, ModelKind};
use meshwork_context_parallel::{Method, Sizes, parts_of_heads};
use meshwork_core::tree;

const CP: &str = "parallelism.cp";
const METHOD: &str = "parallelism.context_parallel_method";
const RING: &str = "parallelism.ring_degree";

impl Config {
    /// The attention of a rank, as the rule of `auto` counts it.
    pub(super) fn context_sizes(&self) -> Sizes {
        let (model, mesh) = (&self.model, &self.parallelism);
        let heads = (model.num_heads / mesh.tp.max(1)).max(1);
        let kv_heads = if model.kind == ModelKind::Llama { model.num_kv_heads } else { model.num_heads };
        let group = if model.kind == ModelKind::Llama { model.num_heads / model.num_kv_heads.max(1) } else { 1 };
        Sizes {
            tokens: model.seq_len,
            group,
            cp: mesh.cp.max(1),
            heads,
            kv_heads: if kv_heads.is_multiple_of(mesh.tp.max(1)) { kv_heads / mesh.tp.max(1) } else { kv_heads },
            head_dim: self.decoder().head_features(),
            bytes: if self.training.dtype == Dtype::F32 { 4 } else { 2 },
            window: Some(model.sliding_window).filter(|&window| window > 0),
            zigzag: mesh.context_parallel_order != ContextOrder::Contiguous
                && self.training.numerics == "fast"
                && self.dropout().is_none(),
            documents: self.data.documents == "attention",
        }
    }
}

impl Config {
    /// The key of a dropout of activations, if there is one. Its draws are functions of the place in the sequence.
    pub(super) fn dropout(&self) -> Option<&'static str> {
        let of_adapters = self.lora.rank > 0 && self.lora.dropout > 0.0;
        [(self.model.dropout > 0.0, "model.dropout"), (of_adapters, "lora.dropout")]
            .into_iter()
            .find_map(|(drops, key)| drops.then_some(key))
    }
}

/// Resolves `auto`, and the degree of a ring that is not given.
pub(super) fn resolve(config: &mut Config, settings: &Settings) {
    let sizes = config.context_sizes();
    let canonical = config.training.numerics == "canonical";
    let mesh = &mut config.parallelism;
    if mesh.context_parallel_method == ContextMethod::Auto && sizes.cp > sizes.tokens {
        mesh.context_parallel_method = ContextMethod::AllGather; // a fault, whatever the method
    } else if mesh.context_parallel_method == ContextMethod::Auto {
        let method = match canonical {
            // Every other method computes all of the attention on every rank.
            true if sizes.methods().contains(&Method::AllToAll) => Method::AllToAll,
            true => Method::AllGather,
            false => sizes.best(),
        };
        (mesh.context_parallel_method, mesh.ring_degree) = match method {
            _ if mesh.cp == 1 && !canonical => (ContextMethod::None, 1),
            Method::AllGather => (ContextMethod::AllGather, 1),
            Method::AllToAll => (ContextMethod::AllToAll, 1),
            Method::Ring => (ContextMethod::Ring, 1),
            Method::Hybrid { ring_degree } => (ContextMethod::Hybrid, ring_degree),
        };
        let all = sizes.methods().into_iter().map(|method| format!("{method} {:.0}", sizes.sent(method).cost()));
        let why = match (mesh.cp, canonical) {
            (1, _) => "no rank has a part of a sequence".to_owned(),
            (_, true) => "in canonical numerics it alone divides the work of attention, where heads fit".to_owned(),
            _ => {
                let window = sizes.window.map(|window| format!(", within a window of {window} tokens"));
                let documents =
                    sizes.documents.then_some("; within documents, whose lengths are unknown, it hides none");
                format!(
                    "bytes of each rank for a sequence and layer{} that attention does not hide, or that could go while it \
                     waits for the fullest rank{}: {}",
                    window.unwrap_or_default(),
                    documents.unwrap_or_default(),
                    all.collect::<Vec<_>>().join(", ")
                )
            }
        };
        let chosen = if mesh.cp == 1 && !canonical { "none".to_owned() } else { method.to_string() };
        config.notices.push(format!("{METHOD} = auto: {chosen}; {why}"));
    } else if mesh.context_parallel_method == ContextMethod::Hybrid && settings.given::<usize>(RING).is_none() {
        mesh.ring_degree = sizes.cp / sizes.parts().next_back().unwrap_or(1);
    }
}

/// Tells what is wrong with a sequence over cp.
pub(super) fn check(config: &Config, settings: &mut Settings) {
    let (model, mesh) = (&config.model, &config.parallelism);
    let (cp, seq_len) = (mesh.cp, model.seq_len);
    if !settings.sound(&[CP, METHOD]) || mesh.context_parallel_method == ContextMethod::None && cp == 1 {
        return;
    }
    let refuse = |settings: &mut Settings, keys: &[&str], wrong: bool, problem: String, valid: String| {
        settings.require(keys, !wrong, || Fault::new(CP, cp, problem, valid));
    };
    let (tp, length, heads) = ("parallelism.tp", "model.seq_len", "model.num_heads");
    let parts = if mesh.sequence_parallel { cp.saturating_mul(mesh.tp) } else { cp };
    refuse(
        settings,
        &[tp, length],
        parts > seq_len,
        format!("cuts {length} = {seq_len} into {parts} parts"),
        format!("use at most {}, or {length} of {parts} or more", (seq_len * cp / parts.max(1)).max(1)),
    );
    let dropout = config.dropout().filter(|_| !seq_len.is_multiple_of(parts));
    let key = dropout.unwrap_or("model.dropout");
    refuse(
        settings,
        &[length, tp, key],
        dropout.is_some(),
        format!("does not divide {length} = {seq_len} into {parts} equal parts, and {key} draws for each place"),
        format!("use {length} = {}, or {key} = 0", seq_len.next_multiple_of(parts)),
    );
    refuse(
        settings,
        &[],
        mesh.context_parallel_method == ContextMethod::None,
        format!("cuts sequences, and {METHOD} is none"),
        "use 1, or all_gather, all_to_all, ring, hybrid or auto".to_owned(),
    );
    if mesh.context_parallel_method == ContextMethod::Hybrid {
        check_ring(config, settings);
    }
    if settings.sound(&[tp, heads, "model.num_kv_heads"])
        && mesh.context_parallel_method == ContextMethod::AllToAll
        && model.num_heads.is_multiple_of(mesh.tp)
    {
        let sizes = config.context_sizes();
        let held = sizes.heads;
        let most = parts_of_heads(held, sizes.group.max(1), cp).next_back().unwrap_or(1);
        refuse(
            settings,
            &[],
            most != cp,
            format!("does not share out the {held} heads of queries on each rank of tp in equal parts of groups"),
            format!("use {most}, or {METHOD} = \"all_gather\""),
        );
    }
    let Some(blocks) = config.reduction_blocks() else { return };
    let key = "numerics.reduction_blocks";
    let degrees: Vec<String> = tree::degrees(blocks).iter().map(usize::to_string).collect();
    refuse(
        settings,
        &[key, tp],
        !tree::fits(blocks, parts),
        format!(
            "does not fit canonical numerics with {key} = {blocks}: each of {parts} parts of a sequence must be a power of two"
        ),
        format!("use {}, or another {key}", degrees.join(", ")),
    );
    refuse(
        settings,
        &[length, tp],
        !seq_len.is_multiple_of(parts),
        format!("does not divide {length} = {seq_len} into {parts} equal parts (training.numerics is canonical)"),
        format!("use {length} = {}, or training.numerics = \"fast\"", seq_len.next_multiple_of(parts)),
    );
}

/// Tells what is wrong with the ring of `hybrid`.
fn check_ring(config: &Config, settings: &mut Settings) {
    let (sizes, ring) = (config.context_sizes(), config.parallelism.ring_degree);
    let (cp, heads) = (sizes.cp, sizes.heads);
    let valid: Vec<usize> = sizes.parts().rev().map(|parts| cp / parts).collect();
    let problem = match cp.is_multiple_of(ring) {
        true => format!(
            "leaves {} ranks to share out the {heads} heads of queries on each rank of tp, which are no equal parts of groups",
            cp / ring
        ),
        false => format!("does not divide {CP} = {cp}"),
    };
    let reads = [CP, RING, "parallelism.tp", "model.num_heads", "model.num_kv_heads"];
    let nearest = closest(valid.iter().copied(), ring);
    let fits = valid.contains(&ring) || !config.model.num_heads.is_multiple_of(config.parallelism.tp.max(1));
    settings.require(&reads, fits, || Fault::new(RING, ring, problem, format!("use {nearest}")));
}
