//! Checks of `[moe]` and of the axis that shares out the experts.

use super::Config;
use super::batch::{closest, multiple};
use super::check::no_subtree;
use super::fault::Fault;
use super::settings::Settings;
use super::words::ModelKind;
use meshwork_core::tree;
use meshwork_models::experts::{AuxLossScope, MoeError, RouterKind};
use meshwork_models::huggingface::not_of_mixtral;

impl Config {
    /// A warning before a run, although nothing is wrong.
    pub fn warning(&self) -> Option<&'static str> {
        let looks_ahead = self.experts().is_some_and(|experts| experts.moe.router == RouterKind::ExpertChoice);
        looks_ahead.then_some(
            "warning: moe.router = \"expert_choice\" compares a token with later ones of its sequence: a causal model sees the future \
             through it, and generates worse than it was trained",
        )
    }
}

/// Adds the faults of the experts and of their ranks to `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let (mesh, layers) = (&config.parallelism, config.model.num_layers);
    let (ep, dp, tp, etp) =
        ("parallelism.ep", "parallelism.dp", "parallelism.tp", "parallelism.expert_tensor_parallel");
    let cp = "parallelism.cp";
    let ranks = mesh.dp.saturating_mul(mesh.cp);
    settings.require(&[ep, dp, cp], ranks.is_multiple_of(mesh.ep), || match mesh.cp {
        1 => Fault::new(
            ep,
            mesh.ep,
            format!("does not divide {dp} = {}: ranks of dp share out the experts", mesh.dp),
            format!("{} for {dp}, or another {ep}", multiple(mesh.dp, mesh.ep)),
        ),
        _ => Fault::new(
            ep,
            mesh.ep,
            format!("does not divide {dp} · {cp} = {ranks}: ranks of dp and cp share out the experts"),
            format!("use {}", closest((1..=ranks).filter(|of| ranks.is_multiple_of(*of)), mesh.ep)),
        ),
    });
    settings.require(&[etp, tp], [1, mesh.tp].contains(&mesh.expert_tensor_parallel), || {
        let problem = format!("is neither 1 nor {tp} = {}", mesh.tp);
        Fault::new(etp, mesh.expert_tensor_parallel, problem, format!("use 1 or {}", mesh.tp))
    });
    let Some(experts) = config.experts().filter(|_| settings.sound(&["moe.num_experts"])) else {
        settings.require(&[ep, "moe.num_experts"], mesh.ep == 1, || {
            Fault::new(ep, mesh.ep, "there are no experts to share out", "set moe.num_experts, or use 1")
        });
        return;
    };
    for error in experts.moe.check(mesh.ep).err().unwrap_or_default() {
        let (key, value, valid) = explain(&error, config);
        settings.require(&[&key], false, || Fault::new(&*key, value, error.to_string(), valid));
    }
    let (count, canonical) = (experts.moe.num_experts, config.reduction_blocks().is_some());
    let fits = !canonical || !count.is_multiple_of(mesh.ep) || tree::fits(count, mesh.ep);
    settings.require(&[ep], fits, || no_subtree(ep, mesh.ep, "moe.num_experts", count));
    let schedule = "pipeline.schedule";
    settings.require(&[schedule], !config.is_asynchronous(), || {
        let problem = format!(
            "has no meaning with {schedule} = {:?}, whose stages update at different times: the load of experts is that of a whole step",
            config.pipeline.schedule
        );
        Fault::new("moe.num_experts", count, problem, "use a synchronous schedule, or no experts")
    });
    let (width, key) = (experts.expert_hidden_size, "moe.expert_hidden_size");
    settings.require(&[key, tp], !experts.over_tp || width.is_multiple_of(mesh.tp), || {
        let problem = format!("is not divisible by {tp} = {} ({etp} cuts experts)", mesh.tp);
        Fault::new(key, width, problem, multiple(width, mesh.tp))
    });
    let (every, first) = ("moe.every_n_layers", "moe.first_dense_layers");
    settings.require(&[every, first, "model.num_layers"], experts.count(layers) > 0, || {
        let problem = format!("leaves no layer of model.num_layers = {layers} with experts");
        match experts.first_dense_layers {
            0 => Fault::new(every, experts.every_n_layers, problem, format!("use {layers} or fewer")),
            dense => Fault::new(first, dense, problem, format!("use fewer than {layers}, and a smaller {every}")),
        }
    });
    settings.require(&[], !canonical || experts.moe.aux_loss_scope != AuxLossScope::GlobalBatch, || {
        let problem = "depends on how the batch is cut, and training.numerics is canonical";
        Fault::new("moe.aux_loss_scope", "\"global_batch\"", problem, "use \"sequence\"")
    });
    let Some(folder) = &config.checkpoint.export else { return };
    let problem = match (config.model.kind, not_of_mixtral(&experts)) {
        (_, others) if config.described().is_some() => {
            let capacity = others.into_iter().find(|other| other.starts_with("a capacity"));
            let Some(capacity) = capacity else { return };
            format!("a {:?} has no {}", config.architecture().family, capacity.trim_start_matches("a "))
        }
        (ModelKind::Gpt2, _) => "a GPT2LMHeadModel has no experts".to_owned(),
        (ModelKind::Llama, others) if others.is_empty() => return,
        (ModelKind::Llama, others) => {
            format!("a MixtralForCausalLM has other experts, not these: {}", others.join(", "))
        }
    };
    let valid = "leave it out, or use the experts of a Mixtral (docs/huggingface.md)";
    settings.faults.push(Fault::new("checkpoint.export", folder, problem, valid));
}

/// The key that an error is about, its value, and what would be valid.
fn explain(error: &MoeError, config: &Config) -> (String, String, String) {
    let moe = &config.moe;
    let (key, value, valid) = match error {
        MoeError::NoExperts | MoeError::Indivisible { .. } => {
            ("num_experts", moe.num_experts.to_string(), multiple(moe.num_experts, config.parallelism.ep))
        }
        MoeError::TopK { valid, .. } => ("top_k", moe.top_k.to_string(), format!("use {valid}")),
        MoeError::Groups { valid, .. } => ("num_groups", moe.num_groups.to_string(), valid.clone()),
        MoeError::NothingOver => ("overflow", "\"reroute\"".to_owned(), "use \"drop\", or another router".to_owned()),
        MoeError::Range { key, value, valid } => (*key, value.to_string(), format!("use {valid}")),
        MoeError::Unread { key, value, valid, .. } => (*key, value.to_string(), (*valid).to_owned()),
        _ => ("num_experts", moe.num_experts.to_string(), "see docs/moe.md".to_owned()),
    };
    (format!("moe.{key}"), value, valid)
}
