//! Checks of the axis that cuts sequences.

use super::Config;
use super::fault::Fault;
use super::settings::Settings;
use super::words::{ContextMethod, ModelKind};
use meshwork_core::tree;

const CP: &str = "parallelism.cp";

/// Tells what is wrong with a sequence over cp.
pub(super) fn check(config: &Config, settings: &mut Settings) {
    let (model, mesh) = (&config.model, &config.parallelism);
    let (cp, seq_len) = (mesh.cp, model.seq_len);
    let method = "parallelism.context_parallel_method";
    if !settings.sound(&[CP, method]) || mesh.context_parallel_method == ContextMethod::None && cp == 1 {
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
        format!("use as many ranks as there are tokens, or fewer: a longer {length}"),
    );
    refuse(
        settings,
        &[length, tp, "model.dropout"],
        model.dropout > 0.0 && !seq_len.is_multiple_of(parts),
        format!(
            "does not divide {length} = {seq_len} into {parts} equal parts, and model.dropout draws for each place"
        ),
        format!("use {length} = {}, or model.dropout = 0", seq_len.next_multiple_of(parts)),
    );
    refuse(
        settings,
        &[],
        mesh.context_parallel_method == ContextMethod::None,
        format!("cuts sequences, and {method} is none"),
        "use 1, or all_gather or all_to_all".to_owned(),
    );
    if settings.sound(&[tp, heads, "model.num_kv_heads"])
        && mesh.context_parallel_method == ContextMethod::AllToAll
        && model.num_heads.is_multiple_of(mesh.tp)
    {
        let held = model.num_heads / mesh.tp;
        let fits = |cp: usize| {
            let (each, group) = (held / cp, model.num_heads / model.num_kv_heads.max(1));
            held.is_multiple_of(cp)
                && (model.kind != ModelKind::Llama || each.is_multiple_of(group) || group.is_multiple_of(each))
        };
        let most = (1..=cp).rev().find(|&degree| fits(degree)).unwrap_or(1);
        refuse(
            settings,
            &[],
            !fits(cp),
            format!("does not share out the {held} heads of queries on each rank of tp in equal parts of groups"),
            format!("use {most}, or {method} = \"all_gather\""),
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
