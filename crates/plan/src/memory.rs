//! What each rank holds, and the settings that hold less, with the planner's times: `--plan-memory`.
//!
//! Bytes are those of dry runs of whole steps. Times are predicted for the card that `--device` names, or for cores
//! whose rates are stated (`clusters/cores.toml`). Every rank has a card or a core of its own.

use crate::cluster::{Cluster, Cores};
use crate::count::Counter;
use crate::error::PlanError;
use crate::predict::Job;
use crate::system::System;
use meshwork_tensor::Category;
use meshwork_train::config::{Config, Device, OffloadWord, card};
use meshwork_train::numbers::{size, spans};
use meshwork_train::plan::predict_all;
use meshwork_train::plan_memory::{Candidate, candidates, choose};
use std::fmt::Write;

/// Where times are predicted for.
struct Machine {
    cluster: Cluster,
    system: System,
}

/// The card of `--device cuda`, of which nothing is asked here.
const USUAL: &str = "h100";

fn machine(config: &Config) -> Result<Machine, PlanError> {
    let ranks = config.parallelism.world_size().unwrap_or(1);
    let name = match config.device {
        Device::Cpu => {
            let cores = Some(Cores { count: ranks, help: 1.0, uneven: 0.0, processes: 1 });
            let cluster = Cluster { cards_per_host: ranks, cores, ..Cluster::known("cores")? };
            return Ok(Machine { cluster, system: System::known("meshwork-cpu")? });
        }
        Device::Card(name) => name,
        Device::Cuda(_) | Device::CudaEmulated { .. } => USUAL,
    };
    let (title, source, on_host) = card(name).map_or((name, "", 1), |card| (card.title, card.source, card.on_machine));
    let (hosts, each) = (ranks.div_ceil(on_host), on_host.min(ranks));
    let text = format!(
        "source = {source:?}\n[cluster]\nname = {title:?}\nhosts = {hosts}\ncards_per_host = {each}\n[card]\nname = {name:?}"
    );
    Ok(Machine { cluster: Cluster::from_toml(name, &text)?, system: System::known("meshwork")? })
}

/// Seconds of a step with these settings, with all that is offloaded on the way.
fn seconds(candidate: &Candidate, machine: &Machine, counter: &mut Counter) -> Result<f64, PlanError> {
    let mut config = candidate.config.clone();
    // A layer has the same counts wherever its states are, and under any limit.
    (config.memory.offload, config.memory.offload_dir, config.memory.limit_bytes) = (OffloadWord::None, None, 0);
    let job = Job::new(config, counter)?;
    let (system, cluster) = (&machine.system, &machine.cluster);
    let step = job.roughly(system, cluster, &job.passes(system, cluster)?);
    Ok(step.seconds + candidate.moved as f64 / cluster.host)
}

/// Columns of the ranks in the table, and the longest [`brief`] size.
const FIRST: usize = 8;
const BRIEF: usize = "1023 MiB".len();

/// Bytes in binary units, with three digits.
fn brief(bytes: u64) -> String {
    let text = size(bytes as f64);
    match text.split_once('.') {
        Some((whole, rest)) if whole.len() > 2 => {
            whole.to_owned() + rest.trim_start_matches(|c: char| c.is_ascii_digit())
        }
        _ => text,
    }
}

/// The text that `--plan-memory` prints.
///
/// # Errors
/// A step that has no dry run.
pub fn report(config: &Config) -> Result<String, PlanError> {
    let mut text = String::from("what a rank holds when it holds most, as predicted\n\n");
    let names: Vec<&str> = Category::ALL.iter().map(|category| category.name()).chain(["total"]).collect();
    let mut row = |first: &str, cells: [String; Category::ALL.len() + 1]| {
        let width = |at: usize| names[at].len().max(BRIEF) + 1;
        let cells: String = cells.iter().enumerate().map(|(at, cell)| format!("{cell:>0$}", width(at))).collect();
        // Many ranks have a line of their own.
        let first = if first.len() > FIRST { format!("{first}\n{:FIRST$}", "") } else { format!("{first:FIRST$}") };
        _ = writeln!(text, "{first}{cells}");
    };
    row("ranks", std::array::from_fn(|at| names[at].to_owned()));
    for equal in predict_all(config)? {
        let memory = equal.each.memory;
        let bytes: Vec<u64> = memory.iter().map(|(_, bytes)| bytes).chain([memory.total()]).collect();
        row(&spans(&equal.ranks), std::array::from_fn(|at| brief(bytes[at])));
    }
    let mut candidates = candidates(config);
    let machine = machine(config)?;
    // What the planner cannot simulate keeps the estimate by which all are then ordered.
    let times: Result<Vec<f64>, PlanError> = {
        let mut counter = Counter::default();
        candidates.iter().map(|candidate| seconds(candidate, &machine, &mut counter)).collect()
    };
    let by = match times {
        Ok(times) => {
            candidates.iter_mut().zip(times).for_each(|(candidate, time)| candidate.time = time);
            format!("Times are those of the planner, for {}: {}.", machine.cluster.name, machine.cluster.source)
        }
        Err(_) => {
            "Times are estimates: the FLOPs of a step, ten for each byte that a rank communicates, and a hundred \
                   for each that goes to a disk or comes from it."
                .to_owned()
        }
    };
    let base = candidates.first().map_or(1.0, |own| own.time.max(f64::MIN_POSITIVE));
    let line = |what: &str, candidate: &Candidate| {
        let (settings, most) = (candidate.settings(config), size(candidate.most.total() as f64));
        format!(
            "{what}: {settings}\n    {most} on the fullest rank, {:.2} of the time of a step\n",
            candidate.time / base
        )
    };
    text.push('\n');
    let (cheapest, least) = choose(&candidates, config.memory.limit().unwrap_or(u64::MAX));
    if let Some(limit) = config.memory.limit() {
        text += &match cheapest {
            Some(candidate) => line(&format!("cheapest settings below {}", size(limit as f64)), candidate),
            None => format!("no settings tried here fit {}\n", size(limit as f64)),
        };
    }
    text += &least.map_or(String::new(), |least| line("least memory", least));
    text += &format!(
        "\ntried: {} combinations of parallelism.zero_stage, memory.recompute, memory.loss_chunk, \
         memory.sequence_block, memory.offload and pipeline.num_microbatches. {by}\n",
        candidates.len()
    );
    Ok(text)
}
