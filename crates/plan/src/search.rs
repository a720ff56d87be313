//! Which mesh? Every plan of a model on a cluster, the fastest first.
//!
//! ```text
//! layouts: mesh, micro-batch, recomputation, tokens at a time, ZeRO ─ bound: no bubble ─▶ sorted
//!   ─ each: schedules, chunks, offload ─ simulated, unless plans found so far beat its bound ─▶ plans
//!   ─ the best of each mesh ─ dry run of the whole step ─▶ the ten best
//! ```
//!
//! Layouts that differ only in schedule or depth have the same counts of a layer, which are counted once. A layout
//! whose bound is behind ten meshes in time, and behind one plan in time and memory, is not simulated. Nothing here
//! depends on a clock or on threads, so the same input gives the same plans.

use crate::cluster::Cluster;
use crate::count::Counter;
use crate::error::PlanError;
use crate::layout::{Layout, loaded, tried};
pub use crate::plan::{Keys, Loss, Plan, mesh_text};
use crate::predict::Job;
use crate::system::{Memory, System};
use crate::table::configured;
use meshwork_train::config::Config;
use std::collections::BTreeSet;

/// What a search found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The best plan of each mesh that fits, the fastest first: at most as many as asked for.
    pub best: Vec<Plan>,
    /// Of all plans that were simulated, the fastest for its memory, from fast to small: the Pareto front.
    pub front: Vec<Plan>,
    /// Seconds and bytes of every plan that was simulated.
    pub points: Vec<[f64; 2]>,
    /// The fastest plan that does not fit, where it is faster than the best.
    pub too_large: Option<Plan>,
    /// The plan that takes the least memory: where nothing fits, of those that were dry-run.
    pub smallest: Option<Plan>,
    /// Plans that were compared: simulated, or behind by their bounds.
    pub plans: usize,
    /// Layers that were counted.
    pub layers: usize,
}

/// Micro-batches of up to this many samples, in powers of two.
const MOST_SAMPLES: usize = 16;

/// A rank of cp has at least this many tokens of a sequence: with fewer, attention waits for keys and values.
const LEAST_TOKENS: usize = 1024;

/// A stage may have this much more than an even share of the layers.
const UNEVEN: f64 = 1.25;

/// The number of smallest plans that are dry-run if no plan fits.
const SMALLEST: usize = 4;

/// Searches the plans of the model that `given` describes, with a batch of `samples` sequences, on all cards of a
/// cluster. A key in `given`, such as `memory.recompute`, keeps its value. `count` meshes are found at most; with as
/// many as there are, nothing is left out. `progress` hears what is done, how many, and of how many.
///
/// # Errors
/// A model that no configuration describes; a key that no configuration has; a batch without sequences.
pub fn search(
    given: &Keys,
    samples: usize,
    system: &System,
    cluster: &Cluster,
    count: usize,
    counter: &mut Counter,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<Found, PlanError> {
    let mut search = Search { given, samples, system, cluster, counter, progress };
    let layouts = search.layouts()?;
    let (plans, beaten) = search.simulated(layouts, count)?;
    let points = plans.iter().map(|plan| [plan.step.seconds, plan.step.memory]).collect();
    let mut front: Vec<Plan> = Vec::new();
    for plan in &plans {
        if front.last().is_none_or(|last| plan.step.memory < last.step.memory) {
            front.push(plan.clone());
        }
    }
    let too_large = plans.first().filter(|plan| !plan.step.fits).cloned();
    let best = search.best(&plans, count);
    let mut smallest = front.last().cloned();
    if best.is_empty() {
        let tried = plans.iter().filter(|plan| plan.step.fits).chain(front.iter().rev().take(SMALLEST));
        let dry = tried.filter_map(|plan| search.checked(plan, f64::INFINITY));
        smallest = dry.min_by(|a, b| a.step.memory.total_cmp(&b.step.memory)).or(smallest);
    }
    Ok(Found { best, front, points, too_large, smallest, plans: plans.len() + beaten, layers: counter.layers() })
}

/// The fastest plan that fits, and nothing of those that do not: layouts that cannot fit are not simulated.
///
/// # Errors
/// As [`search`].
pub fn fastest(
    given: &Keys,
    samples: usize,
    system: &System,
    cluster: &Cluster,
    counter: &mut Counter,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<Option<Plan>, PlanError> {
    let mut search = Search { given, samples, system, cluster, counter, progress };
    let mut layouts = search.layouts()?;
    layouts.retain(|layout| layout.bound.1 <= cluster.card.memory);
    let (plans, _) = search.simulated(layouts, 1)?;
    Ok(search.best(&plans, 1).pop())
}

/// What is searched, and what the parts of a search share.
struct Search<'a> {
    given: &'a Keys,
    samples: usize,
    system: &'a System,
    cluster: &'a Cluster,
    counter: &'a mut Counter,
    progress: &'a mut dyn FnMut(&str, usize, usize),
}

impl Search<'_> {
    /// The plans of all layouts that are not behind, the fastest first, and how many layouts are.
    fn simulated(&mut self, mut layouts: Vec<Layout>, count: usize) -> Result<(Vec<Plan>, usize), PlanError> {
        layouts.sort_by(|a, b| a.bound.0.total_cmp(&b.bound.0).then(a.bound.1.total_cmp(&b.bound.1)));
        let mut plans: Vec<Plan> = Vec::new();
        let mut beaten = 0;
        for (at, layout) in layouts.iter().enumerate() {
            (self.progress)("simulating layouts", at, layouts.len());
            if behind(layout, &plans, count) {
                beaten += 1;
            } else {
                plans.extend(layout.plans(self.system, self.cluster)?);
            }
        }
        (self.progress)("simulating layouts", layouts.len(), layouts.len());
        plans.sort_by(Plan::order);
        Ok((plans, beaten))
    }

    /// A plan with the bytes of a dry run; none if the loader, which has the last word, refuses it, or where a rank has
    /// more than `most` bytes.
    fn checked(&mut self, plan: &Plan, most: f64) -> Option<Plan> {
        let job = loaded(&plan.keys).and_then(|config| Job::new(config, self.counter)).ok()?;
        if self.system.memory == Memory::DryRun && job.dry_memory_up_to(most).ok()? > most {
            return None;
        }
        Some(Plan { step: job.predict(self.system, self.cluster).ok()?, ..plan.clone() })
    }

    /// The best plan of each of `count` meshes that fit by a dry run, which ends with the first rank that does not fit.
    fn best(&mut self, plans: &[Plan], count: usize) -> Vec<Plan> {
        let mut best: Vec<Plan> = Vec::new();
        for plan in plans.iter().filter(|plan| plan.step.fits) {
            if best.len() < count && best.iter().all(|other| other.mesh != plan.mesh) {
                (self.progress)("dry runs of the best", best.len(), count);
                best.extend(self.checked(plan, self.cluster.card.memory).filter(|dry| dry.step.fits));
            }
        }
        (self.progress)("dry runs of the best", count, count);
        best.sort_by(Plan::order);
        best
    }

    /// Degrees of dp, tp, pp, cp and ep of all cards.
    fn meshes(&self, config: &Config) -> Vec<[usize; 5]> {
        let (model, experts, cards) = (&config.model, config.moe.num_experts.max(1), self.cluster.cards());
        let mut all = Vec::new();
        for tp in tried(self.given, "parallelism.tp", divisors(self.cluster.cards_per_host)) {
            for cp in tried(self.given, "parallelism.cp", powers((model.seq_len / LEAST_TOKENS).max(1))) {
                for pp in tried(self.given, "parallelism.pp", (1..=model.num_layers).collect()) {
                    let (rest, uneven) = (tp * cp * pp, model.num_layers.div_ceil(pp) * pp);
                    let dp = cards / rest.max(1);
                    let even = uneven as f64 <= UNEVEN * model.num_layers as f64;
                    if dp * rest == cards && even && self.samples.is_multiple_of(dp) {
                        let ep = divisors(experts).into_iter().filter(|ep| dp.is_multiple_of(*ep)).collect();
                        let ep = tried(self.given, "parallelism.ep", ep).into_iter();
                        all.extend(ep.map(|ep| [dp, tp, pp, cp, ep]));
                    }
                }
            }
        }
        all
    }

    /// Every layout that the configuration's loader takes. Where it takes none, its first error says why.
    fn layouts(&mut self) -> Result<Vec<Layout>, PlanError> {
        let mut keys: Vec<Keys> = Vec::new();
        for mesh in self.meshes(&model(self.given)?) {
            let [dp, _, _, cp, _] = mesh;
            for micro in tried(self.given, "training.micro_batch_size", powers(MOST_SAMPLES)) {
                if (self.samples / dp).is_multiple_of(micro.max(1)) {
                    let mut own: Keys = self.system.keys_of(dp * cp).into_iter().chain(self.given.clone()).collect();
                    let axes = ["dp", "tp", "pp", "cp", "ep"].map(|axis| format!("parallelism.{axis}"));
                    let batch = [("training.micro_batch_size", micro), ("training.global_batch_size", self.samples)];
                    let batch = batch.map(|(key, value)| (key.to_owned(), value));
                    let set = axes.into_iter().zip(mesh).chain(batch);
                    own.extend(set.map(|(key, value)| (key, (value as i64).into())));
                    keys.push(own);
                }
            }
        }
        let (mut all, mut refused) = (Vec::new(), None);
        for (at, own) in keys.iter().enumerate() {
            (self.progress)("counting layers", at, keys.len());
            let kinds = if own.contains_key("memory.recompute") { 1 } else { RECOMPUTE.len() };
            for recompute in &RECOMPUTE[..kinds] {
                let mut keys = own.clone();
                keys.entry("memory.recompute".into()).or_insert_with(|| (*recompute).into());
                if own["parallelism.tp"].as_integer() > Some(1) {
                    keys.entry(SEQUENCE.into()).or_insert(true.into());
                }
                match Layout::each(&keys, self.system, self.cluster, self.counter) {
                    Ok(found) => all.extend(found),
                    Err(error) => refused = refused.or(Some(error)),
                }
            }
        }
        (self.progress)("counting layers", keys.len(), keys.len());
        match refused.filter(|_| all.is_empty()) {
            Some(error) => Err(error),
            None => Ok(all),
        }
    }
}

/// Whether the plans found so far beat every plan of a layout: as many meshes are faster as are asked for, and one plan
/// is faster and smaller.
fn behind(layout: &Layout, plans: &[Plan], count: usize) -> bool {
    let (seconds, bytes) = layout.bound;
    let faster = || plans.iter().filter(|plan| plan.step.seconds <= seconds);
    let meshes: BTreeSet<[usize; 5]> = faster().filter(|plan| plan.step.fits).map(|plan| plan.mesh).collect();
    meshes.len() >= count && faster().any(|plan| plan.step.memory <= bytes)
}

/// A key and its value, as `section.key=value`. A value that is no TOML is a text.
///
/// ```
/// use meshwork_plan::search::assigned;
///
/// assert_eq!(assigned("parallelism.tp=8")?.1.as_integer(), Some(8));
/// assert_eq!(assigned("memory.recompute=full")?.1.as_str(), Some("full"));
/// assert!(assigned("memory.recompute").is_err());
/// # Ok::<(), meshwork_plan::PlanError>(())
/// ```
///
/// # Errors
/// A text without `=`.
pub fn assigned(text: &str) -> Result<(String, toml::Value), PlanError> {
    let (key, value) = text.split_once('=').ok_or_else(|| PlanError::File {
        file: format!("--set {text}"),
        problem: "no value".into(),
        valid: "use section.key=value".into(),
    })?;
    let parsed = toml::from_str::<toml::Table>(&format!("value = {value}"));
    let value = parsed.ok().and_then(|mut table| table.remove("value")).unwrap_or_else(|| value.into());
    Ok((key.trim().to_owned(), value))
}

/// A configuration of the model alone that these keys describe, without the mesh and the batch.
///
/// # Errors
/// Every fault of the keys of the model.
pub fn model(given: &Keys) -> Result<Config, PlanError> {
    let mut keys = given.clone();
    keys.retain(|key, _| ["model.", "moe.", "lora."].iter().any(|section| key.starts_with(section)));
    keys.insert("training.steps".into(), 0.into());
    configured(&keys)
}

fn divisors(of: usize) -> Vec<usize> {
    (1..=of).filter(|&part| of.is_multiple_of(part)).collect()
}

fn powers(most: usize) -> Vec<usize> {
    std::iter::successors(Some(1), |power| Some(power * 2)).take_while(|&power| power <= most).collect()
}

const SEQUENCE: &str = "parallelism.sequence_parallel";

/// The kinds of recomputation that are tried.
const RECOMPUTE: [&str; 3] = ["none", "selective", "full"];
