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
pub use crate::plan::{Keys, Loss, Plan, mesh_text};
use crate::predict::Job;
use crate::system::{System, ZERO_STAGE};
use crate::table::configured;
use meshwork_pipeline::{Generator, Shape};
use meshwork_train::config::{Config, OffloadWord};
use meshwork_train::plan_memory::tokens_at_a_time;
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

/// Chunks of a rank, at most.
const MOST_CHUNKS: usize = 8;

/// A rank of cp has at least this many tokens of a sequence: with fewer, attention waits for keys and values.
const LEAST_TOKENS: usize = 1024;

/// A stage may have this much more than an even share of the layers.
const UNEVEN: f64 = 1.25;

/// The number of smallest plans that are dry-run if no plan fits.
const SMALLEST: usize = 4;

/// A configuration with everything but its schedule, and the seconds and bytes that none of its plans goes below.
struct Layout {
    mesh: [usize; 5],
    keys: Keys,
    job: Job,
    bound: (f64, f64),
}

/// Searches the plans of the model that `given` describes, with a batch of `samples` sequences, on all cards of a
/// cluster. A key in `given`, such as `memory.recompute`, keeps its value. `count` meshes are found at most; with as
/// many as there are, nothing is left out. `progress` hears what is done, how many, and of how many.
///
/// # Errors
/// A model that no configuration describes; a batch without sequences.
pub fn search(
    given: &Keys,
    samples: usize,
    system: &System,
    cluster: &Cluster,
    count: usize,
    counter: &mut Counter,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<Found, PlanError> {
    let layouts = layouts(given, samples, system, cluster, counter, progress)?;
    let (plans, beaten) = simulated(layouts, system, cluster, count, progress)?;
    let points = plans.iter().map(|plan| [plan.step.seconds, plan.step.memory]).collect();
    let mut front: Vec<Plan> = Vec::new();
    for plan in &plans {
        if front.last().is_none_or(|last| plan.step.memory < last.step.memory) {
            front.push(plan.clone());
        }
    }
    let too_large = plans.first().filter(|plan| !plan.step.fits).cloned();
    let (best, mut refused) = best_of(&plans, system, cluster, count, counter, progress);
    if best.is_empty() {
        refused.extend(front.iter().rev().take(SMALLEST).filter_map(|plan| checked(plan, system, cluster, counter)));
    }
    let smaller = |a: &&Plan, b: &&Plan| a.step.memory.total_cmp(&b.step.memory);
    let smallest = refused.iter().filter(|_| best.is_empty()).min_by(smaller).or(front.last()).cloned();
    Ok(Found { best, front, points, too_large, smallest, plans: plans.len() + beaten, layers: counter.layers() })
}

/// The fastest plan that fits, and nothing of those that do not: layouts that cannot fit are not simulated, and no
/// plan that does not fit is dry-run to say by how much.
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
    let mut layouts = layouts(given, samples, system, cluster, counter, progress)?;
    layouts.retain(|layout| layout.bound.1 <= cluster.card.memory);
    let (plans, _) = simulated(layouts, system, cluster, 1, progress)?;
    Ok(best_of(&plans, system, cluster, 1, counter, progress).0.pop())
}

/// The plans of all layouts that are not behind, the fastest first, and how many layouts are.
fn simulated(
    mut layouts: Vec<Layout>,
    system: &System,
    cluster: &Cluster,
    count: usize,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<(Vec<Plan>, usize), PlanError> {
    layouts.sort_by(|a, b| a.bound.0.total_cmp(&b.bound.0).then(a.bound.1.total_cmp(&b.bound.1)));
    let mut plans: Vec<Plan> = Vec::new();
    let mut beaten = 0;
    for (at, layout) in layouts.iter().enumerate() {
        progress("simulating layouts", at, layouts.len());
        if behind(layout, &plans, count) {
            beaten += 1;
        } else {
            plans.extend(layout.plans(system, cluster)?);
        }
    }
    progress("simulating layouts", layouts.len(), layouts.len());
    plans.sort_by(Plan::order);
    Ok((plans, beaten))
}

/// A plan with the bytes of a dry run of its whole step; none if the loader, which has the last word, refuses it.
fn checked(plan: &Plan, system: &System, cluster: &Cluster, counter: &mut Counter) -> Option<Plan> {
    let step = loaded(&plan.keys).and_then(|config| Job::new(config, counter)?.predict(system, cluster));
    step.ok().map(|step| Plan { step, ..plan.clone() })
}

/// The best plan of each of `count` meshes that fit by a dry run, and the plans that do not.
fn best_of(
    plans: &[Plan],
    system: &System,
    cluster: &Cluster,
    count: usize,
    counter: &mut Counter,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> (Vec<Plan>, Vec<Plan>) {
    let (mut best, mut refused): (Vec<Plan>, Vec<Plan>) = (Vec::new(), Vec::new());
    for plan in plans.iter().filter(|plan| plan.step.fits) {
        if best.len() < count && best.iter().all(|other| other.mesh != plan.mesh) {
            progress("dry runs of the best", best.len(), count);
            match checked(plan, system, cluster, counter) {
                Some(dry) if dry.step.fits => best.push(dry),
                dry => refused.extend(dry),
            }
        }
    }
    progress("dry runs of the best", count, count);
    best.sort_by(Plan::order);
    (best, refused)
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

/// The configuration of these keys, as the loader takes it.
fn loaded(keys: &Keys) -> Result<Config, PlanError> {
    let mut keys = keys.clone();
    keys.insert("training.steps".into(), 0.into()); // nothing runs here, so any number of ranks will do
    if keys.contains_key("memory.offload") {
        keys.entry("memory.offload_dir".into()).or_insert(".".into()); // on a card this is its host's memory
    }
    configured(&keys)
}

/// The values that a key is tried with: those given, or the one that it already has.
fn tried(given: &Keys, key: &str, values: Vec<usize>) -> Vec<usize> {
    match given.get(key).and_then(toml::Value::as_integer) {
        Some(value) => vec![value as usize],
        None => values,
    }
}

fn divisors(of: usize) -> Vec<usize> {
    (1..=of).filter(|&part| of.is_multiple_of(part)).collect()
}

fn powers(most: usize) -> Vec<usize> {
    std::iter::successors(Some(1), |power| Some(power * 2)).take_while(|&power| power <= most).collect()
}

/// Every layout that the configuration's loader takes.
fn layouts(
    given: &Keys,
    samples: usize,
    system: &System,
    cluster: &Cluster,
    counter: &mut Counter,
    progress: &mut dyn FnMut(&str, usize, usize),
) -> Result<Vec<Layout>, PlanError> {
    let config = model(given)?;
    let (model, experts) = (&config.model, config.moe.num_experts.max(1));
    let cards = cluster.cards();
    let mut keys: Vec<Keys> = Vec::new();
    for tp in tried(given, "parallelism.tp", divisors(cluster.cards_per_host)) {
        for cp in tried(given, "parallelism.cp", powers((model.seq_len / LEAST_TOKENS).max(1))) {
            for pp in tried(given, "parallelism.pp", (1..=model.num_layers).collect()) {
                let (rest, uneven) = (tp * cp * pp, model.num_layers.div_ceil(pp) * pp);
                let dp = cards / rest.max(1);
                if dp * rest != cards || uneven as f64 > UNEVEN * model.num_layers as f64 || !samples.is_multiple_of(dp)
                {
                    continue;
                }
                let ep: Vec<usize> = divisors(experts).into_iter().filter(|ep| dp.is_multiple_of(*ep)).collect();
                for ep in tried(given, "parallelism.ep", ep) {
                    for micro in tried(given, "training.micro_batch_size", powers(MOST_SAMPLES)) {
                        if (samples / dp).is_multiple_of(micro.max(1)) {
                            let mut own: Keys = system.keys_of(dp * cp).into_iter().chain(given.clone()).collect();
                            let mut set =
                                |key: &str, value: usize| _ = own.insert(key.to_owned(), (value as i64).into());
                            for (axis, degree) in ["dp", "tp", "pp", "cp", "ep"].into_iter().zip([dp, tp, pp, cp, ep]) {
                                set(&format!("parallelism.{axis}"), degree);
                            }
                            set("training.micro_batch_size", micro);
                            set("training.global_batch_size", samples);
                            keys.push(own);
                        }
                    }
                }
            }
        }
    }
    let mut all = Vec::new();
    for (at, own) in keys.iter().enumerate() {
        progress("counting layers", at, keys.len());
        for recompute in RECOMPUTE.iter().take(if own.contains_key("memory.recompute") { 1 } else { RECOMPUTE.len() }) {
            let mut keys = own.clone();
            keys.entry("memory.recompute".into()).or_insert_with(|| (*recompute).into());
            if own["parallelism.tp"].as_integer() > Some(1) {
                keys.entry(SEQUENCE.into()).or_insert(true.into());
            }
            all.extend(Layout::each(&keys, system, cluster, counter));
        }
    }
    progress("counting layers", keys.len(), keys.len());
    Ok(all)
}

const SEQUENCE: &str = "parallelism.sequence_parallel";

/// Tokens whose logits, and tokens whose inner features, exist at a time.
const AT_A_TIME: [&str; 2] = ["memory.loss_chunk", "memory.sequence_block"];

/// The kinds of recomputation that are tried.
const RECOMPUTE: [&str; 3] = ["none", "selective", "full"];

impl Layout {
    /// The layouts of these keys, with logits and inner features of all tokens or of some at a time: those that
    /// `--plan-memory` tries.
    fn each(keys: &Keys, system: &System, cluster: &Cluster, counter: &mut Counter) -> Vec<Self> {
        let mut unscheduled = keys.clone();
        // A layer is the same in all schedules; the first one that takes any number of micro-batches stands for them.
        unscheduled.insert("pipeline.schedule".into(), Generator::OneFOneB.name().into());
        unscheduled.remove("pipeline.virtual_stages");
        let Ok(config) = loaded(&unscheduled) else { return Vec::new() };
        let mut all = Vec::new();
        for tokens in tokens_at_a_time(&config) {
            let chosen = AT_A_TIME.into_iter().zip(tokens).filter(|(_, tokens)| *tokens > 0);
            let chosen: Keys = chosen.map(|(key, tokens)| (key.to_owned(), (tokens as i64).into())).collect();
            // A key that is given keeps its value.
            if chosen.iter().all(|(key, value)| keys.get(key).is_none_or(|given| given == value)) {
                let with = |keys: &Keys| keys.clone().into_iter().chain(chosen.clone()).collect::<Keys>();
                let job = loaded(&with(&unscheduled)).and_then(|config| Job::new(config, counter));
                all.extend(job.map_or(Vec::new(), |job| Self::of(&with(keys), &job, system, cluster)));
            }
        }
        all
    }

    /// The layout of these keys in each stage of ZeRO.
    fn of(keys: &Keys, job: &Job, system: &System, cluster: &Cluster) -> Vec<Self> {
        let parallel = &job.config.parallelism;
        let replicas = parallel.dp * parallel.cp;
        let mesh = [parallel.dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep];
        let stages = tried(keys, ZERO_STAGE, if replicas > 1 { vec![0, 1, 2, 3] } else { vec![0] });
        let of = |stage: usize| {
            let job = job.with_config(|config| config.parallelism.zero_stage = stage);
            let offloaded = job.with_config(|config| config.memory.offload = OffloadWord::Optimizer);
            let mut keys = keys.clone();
            keys.insert(ZERO_STAGE.into(), (stage as i64).into());
            let bound = (job.bound(system, cluster).0, offloaded.bound(system, cluster).1);
            Self { mesh, keys, bound, job }
        };
        stages.into_iter().filter(|&stage| stage == 0 || replicas > 1).map(of).collect()
    }

    /// Its plans: every schedule with its chunks, states of the optimizer on the card and in the host's memory.
    fn plans(&self, system: &System, cluster: &Cluster) -> Result<Vec<Plan>, PlanError> {
        let mut all = Vec::new();
        let config = &self.job.config;
        let (pp, layers, micros) = (config.parallelism.pp, config.model.num_layers, config.pipeline.num_microbatches);
        let offloads: &[OffloadWord] = if self.keys.contains_key("memory.offload") {
            &[config.memory.offload]
        } else {
            &[OffloadWord::None, OffloadWord::Optimizer]
        };
        for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
            let named = self.keys.get("pipeline.schedule").and_then(toml::Value::as_str);
            let skipped = if pp == 1 { generator != Generator::OneFOneB } else { generator == Generator::Gpipe };
            if named.map_or(skipped, |name| name != generator.name()) {
                continue; // GPipe takes the time of 1F1B and more memory
            }
            let chunks = match generator.chooses_virtual_stages() {
                true => tried(&self.keys, "pipeline.virtual_stages", (2..=MOST_CHUNKS).collect()),
                false => vec![generator.default_virtual_stages()],
            };
            for virtual_stages in chunks {
                let whole = virtual_stages == 1 || layers.is_multiple_of(pp * virtual_stages);
                if !whole || generator.takes(Shape { pp, virtual_stages, micros }).is_err() {
                    continue;
                }
                let job = self.job.with_config(|config| {
                    generator.name().clone_into(&mut config.pipeline.schedule);
                    config.pipeline.virtual_stages = virtual_stages;
                    if virtual_stages > 1 {
                        config.pipeline.partition = vec![layers / (pp * virtual_stages); pp * virtual_stages];
                    }
                });
                let passed = job.passes(system, cluster)?;
                for &offload in offloads {
                    let job = job.with_config(|config| config.memory.offload = offload);
                    let mut keys = self.keys.clone();
                    if pp > 1 {
                        keys.insert("pipeline.schedule".into(), generator.name().into());
                        if generator.chooses_virtual_stages() {
                            keys.insert("pipeline.virtual_stages".into(), (virtual_stages as i64).into());
                        }
                    }
                    if offload != OffloadWord::None {
                        keys.insert("memory.offload".into(), offload.name().into());
                    }
                    all.push(Plan { mesh: self.mesh, keys, step: job.roughly(system, cluster, &passed) });
                }
            }
        }
        Ok(all)
    }
}
