//! Checks of `[moe]` and of the axis that shares out the experts.

use super::Config;
use super::batch::multiple;
use super::check::choose_degree;
use super::fault::Fault;
use super::settings::Settings;
use super::words::ModelKind;
use meshwork_core::tree;
use meshwork_models::experts::{AuxLossScope, MoeError, RouterKind};
use meshwork_models::huggingface::not_of_mixtral;
use meshwork_pipeline::by_name;

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

/// Appends what is wrong with the experts and with their ranks to the faults of `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let mut faults = Vec::new();
    let mut fail = |fault| faults.push(fault);
    let mesh = &config.parallelism;
    let (ep, dp, tp, etp) =
        ("parallelism.ep", "parallelism.dp", "parallelism.tp", "parallelism.expert_tensor_parallel");
    if settings.sound(&[ep, dp]) && !mesh.dp.is_multiple_of(mesh.ep) {
        let problem = format!("does not divide {dp} = {}: ranks of dp share out the experts", mesh.dp);
        fail(Fault::new(ep, mesh.ep, problem, format!("{} for {dp}, or another {ep}", multiple(mesh.dp, mesh.ep))));
    }
    if settings.sound(&[etp, tp]) && ![1, mesh.tp].contains(&mesh.expert_tensor_parallel) {
        let problem = format!("is neither 1 nor {tp} = {}", mesh.tp);
        fail(Fault::new(etp, mesh.expert_tensor_parallel, problem, format!("use 1 or {}", mesh.tp)));
    }
    let Some(experts) = config.experts().filter(|_| settings.sound(&["moe.num_experts"])) else {
        if settings.sound(&[ep, "moe.num_experts"]) && mesh.ep > 1 {
            fail(Fault::new(ep, mesh.ep, "there are no experts to share out", "set moe.num_experts, or use 1"));
        }
        settings.faults.extend(faults);
        return;
    };
    for error in experts.moe.check(mesh.ep).err().unwrap_or_default() {
        let (key, value, valid) = explain(&error, config);
        if settings.sound(&[&key]) {
            fail(Fault::new(key, value, error.to_string(), valid));
        }
    }
    let count = experts.moe.num_experts;
    if config.reduction_blocks().is_some()
        && settings.sound(&[ep])
        && count.is_multiple_of(mesh.ep)
        && !tree::fits(count, mesh.ep)
    {
        let problem = format!(
            "does not fit canonical numerics with moe.num_experts = {count}: each rank must have an equal share that is a power of two"
        );
        fail(Fault::new(ep, mesh.ep, problem, choose_degree(count, "moe.num_experts")));
    }
    let schedule = "pipeline.schedule";
    let asynchronous = by_name(&config.pipeline.schedule).is_ok_and(|schedule| !schedule.is_synchronous());
    if settings.sound(&[schedule]) && settings.given::<String>("pipeline.schedule_file").is_none() && asynchronous {
        let name = &config.pipeline.schedule;
        let problem = format!(
            "has no meaning with {schedule} = {name:?}, whose stages update at different times: the load of experts is that of a whole step"
        );
        fail(Fault::new("moe.num_experts", count, problem, "use a synchronous schedule, or no experts"));
    }
    let width = "moe.expert_hidden_size";
    if experts.over_tp && settings.sound(&[width, tp]) && !experts.expert_hidden_size.is_multiple_of(mesh.tp) {
        let problem = format!("is not divisible by {tp} = {} ({etp} cuts experts)", mesh.tp);
        fail(Fault::new(width, experts.expert_hidden_size, problem, multiple(experts.expert_hidden_size, mesh.tp)));
    }
    let (every, layers) = ("moe.every_n_layers", "model.num_layers");
    if settings.sound(&[every, layers]) && experts.count(config.model.num_layers) == 0 {
        let problem = format!("leaves no layer of {layers} = {} with experts", config.model.num_layers);
        fail(Fault::new(every, experts.every_n_layers, problem, format!("use {} or fewer", config.model.num_layers)));
    }
    if config.reduction_blocks().is_some() && experts.moe.aux_loss_scope == AuxLossScope::GlobalBatch {
        let problem = "depends on how the batch is cut, and training.numerics is canonical";
        fail(Fault::new("moe.aux_loss_scope", "\"global_batch\"", problem, "use \"sequence\""));
    }
    if let Some(folder) = &config.checkpoint.export {
        let problem = match (config.model.kind, not_of_mixtral(&experts)) {
            (ModelKind::Gpt2, _) => Some("a GPT2LMHeadModel has no experts".to_owned()),
            (ModelKind::Llama, others) if others.is_empty() => None,
            (ModelKind::Llama, others) => {
                Some(format!("a MixtralForCausalLM has other experts, not these: {}", others.join(", ")))
            }
        };
        let valid = "leave it out, or use the experts of a Mixtral (docs/huggingface.md)";
        faults.extend(problem.map(|problem| Fault::new("checkpoint.export", folder, problem, valid)));
    }
    settings.faults.extend(faults);
}

/// The key that an error is about, its value, and what would be valid.
fn explain(error: &MoeError, config: &Config) -> (String, String, String) {
    let moe = &config.moe;
    let (key, value, valid) = match error {
        MoeError::NoExperts | MoeError::Indivisible { .. } => {
            ("moe.num_experts", moe.num_experts.to_string(), multiple(moe.num_experts, config.parallelism.ep))
        }
        MoeError::TopK { valid, .. } => ("moe.top_k", moe.top_k.to_string(), format!("use {valid}")),
        MoeError::Groups { valid, .. } => ("moe.num_groups", moe.num_groups.to_string(), valid.clone()),
        MoeError::NothingOver => {
            ("moe.overflow", "\"reroute\"".to_owned(), "use \"drop\", or another router".to_owned())
        }
        MoeError::Range { key, value, valid } => {
            return (format!("moe.{key}"), value.to_string(), format!("use {valid}"));
        }
        MoeError::Unread { key, value, valid, .. } => {
            return (format!("moe.{key}"), value.to_string(), (*valid).to_owned());
        }
        _ => ("moe.num_experts", moe.num_experts.to_string(), "see docs/moe.md".to_owned()),
    };
    (key.to_owned(), value, valid)
}
