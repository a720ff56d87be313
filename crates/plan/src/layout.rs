//! A layout: a configuration with everything but its schedule. Its plans have schedules, chunks and offload.

use crate::cluster::Cluster;
use crate::count::Counter;
use crate::error::PlanError;
use crate::plan::{Keys, Plan};
use crate::predict::Job;
use crate::system::{System, ZERO_STAGE};
use crate::table::configured;
use meshwork_pipeline::{Generator, Shape};
use meshwork_train::config::{Config, OffloadWord};
use meshwork_train::plan_memory::tokens_at_a_time;

/// Chunks of a rank, at most.
const MOST_CHUNKS: usize = 8;

/// Tokens whose logits, and tokens whose inner features, exist at a time.
const AT_A_TIME: [&str; 2] = ["memory.loss_chunk", "memory.sequence_block"];

/// A configuration with everything but its schedule, and the seconds and bytes that none of its plans goes below.
pub(crate) struct Layout {
    mesh: [usize; 5],
    keys: Keys,
    job: Job,
    pub(crate) bound: (f64, f64),
}

/// The configuration of these keys, as the loader takes it.
pub(crate) fn loaded(keys: &Keys) -> Result<Config, PlanError> {
    let mut keys = keys.clone();
    keys.insert("training.steps".into(), 0.into()); // nothing runs here, so any number of ranks will do
    if keys.contains_key("memory.offload") {
        keys.entry("memory.offload_dir".into()).or_insert(".".into()); // on a card this is its host's memory
    }
    configured(&keys)
}

/// The values that a key is tried with: those given, or the one that it already has.
pub(crate) fn tried(given: &Keys, key: &str, values: Vec<usize>) -> Vec<usize> {
    match given.get(key).and_then(toml::Value::as_integer) {
        Some(value) => vec![value as usize],
        None => values,
    }
}

impl Layout {
    /// The layouts of these keys, with logits and inner features of all tokens or of some at a time: those that
    /// `--plan-memory` tries.
    pub(crate) fn each(
        keys: &Keys,
        system: &System,
        cluster: &Cluster,
        counter: &mut Counter,
    ) -> Result<Vec<Self>, PlanError> {
        let mut unscheduled = keys.clone();
        // A layer is the same in all schedules; the first one that takes any number of micro-batches stands for them.
        unscheduled.insert("pipeline.schedule".into(), Generator::OneFOneB.name().into());
        unscheduled.remove("pipeline.virtual_stages");
        let config = loaded(&unscheduled)?;
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
        Ok(all)
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
    pub(crate) fn plans(&self, system: &System, cluster: &Cluster) -> Result<Vec<Plan>, PlanError> {
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
