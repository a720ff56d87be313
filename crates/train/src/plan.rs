//! The cost of a run before it runs: the report of `--steps 0`.

use crate::checkpoint::room::Room;
use crate::checkpoint::save_plan;
use crate::config::{Config, Dtype};
use crate::cost;
use crate::error::RankError;
use crate::plan_compression;
use meshwork_core::{Axis, Mesh, Record};
pub use meshwork_engine::dry_run::Prediction;
use meshwork_engine::dry_run::{self, bytes_on};
use meshwork_engine::{ModelPlan, TrainError};
use meshwork_pipeline::simulate;
use meshwork_tensor::memory::Bytes;
use meshwork_tensor::{MemoryUse, ParamSpec};
use std::collections::BTreeSet;

/// Predicts a step of the rank `world_rank` of the configuration's mesh.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn predict(config: &Config, world_rank: usize) -> Result<Prediction, TrainError> {
    dry_run::predict(&config.model(), &config.plan()?, world_rank)
}

/// Ranks of one pp rank that do the same work.
pub(crate) struct Kind {
    pub(crate) ranks: Vec<usize>,
    pp_rank: usize,
    pub(crate) each: Prediction,
}

/// The work of every rank. Ranks that differ only along dp do the same, so a thousand of them need no more predictions
/// than one.
pub(crate) fn kinds(config: &Config, mesh: &Mesh) -> Result<Vec<Kind>, TrainError> {
    let mut kinds: Vec<Kind> = Vec::new();
    for first in (0..mesh.world_size()).filter(|&rank| mesh.data_rank(mesh.coords(rank)) == 0) {
        let pp_rank = mesh.coords(first).get(Axis::Pp);
        let each = predict(config, first)?;
        let ranks = mesh.group(first, &Axis::DATA);
        match kinds.iter_mut().find(|kind| kind.pp_rank == pp_rank && kind.each == each) {
            Some(kind) => kind.ranks.extend(ranks),
            None => kinds.push(Kind { ranks, pp_rank, each }),
        }
    }
    kinds.iter_mut().for_each(|kind| kind.ranks.sort_unstable());
    Ok(kinds)
}

/// What holds the memory of each rank when most bytes are alive.
///
/// # Errors
/// As [`dry_run::predict`].
pub fn memory(config: &Config) -> Result<Vec<MemoryUse>, TrainError> {
    let mesh = config.mesh()?;
    let mut memory = vec![MemoryUse::default(); mesh.world_size()];
    for Kind { ranks, each, .. } in kinds(config, &mesh)? {
        ranks.into_iter().for_each(|rank| memory[rank] = each.memory);
    }
    Ok(memory)
}

/// Most bytes alive at once on all ranks together.
pub(crate) fn world_bytes(config: &Config) -> Result<u128, TrainError> {
    let kinds = kinds(config, &config.mesh()?)?;
    Ok(kinds.iter().map(|kind| kind.ranks.len() as u128 * u128::from(kind.each.peak_bytes())).sum())
}

/// The text that `--steps 0` prints: the mesh, the model, and the cost of a step on each rank, with equal ranks
/// together.
pub fn report(config: &Config) -> Result<String, RankError> {
    let mut text = report_steps(config)?;
    text += &cost::report(config)?;
    text += &plan_compression::report(config)?;
    text.extend(config.warning().into_iter().flat_map(|warning| [warning, "\n"]));
    if config.checkpoint.dir.is_some() {
        let plan = config.plan()?;
        let files = save_plan(&config.model(), &plan)?;
        let bytes: Vec<u64> = (0..files.world()).map(|rank| files.bytes(rank)).collect();
        let (all, most) = (bytes.iter().sum::<u64>() as f64, bytes.iter().max().copied().unwrap_or(0) as f64);
        text += &format!("checkpoints of {}; to save one, up to {} of host memory on a rank\n", size(all), size(most));
        text.extend(Room::of(config)?.map(|room| room.report(config)));
    }
    Ok(text)
}

fn report_steps(config: &Config) -> Result<String, TrainError> {
    let plan = config.plan()?;
    let mesh = &plan.mesh;
    let specs = ModelPlan::new(config.model(), &plan)?.parameters()?;
    let parameters: usize = specs.iter().map(ParamSpec::global_elements).sum();
    let frozen: usize = match config.model.frozen().is_some() {
        true => specs.iter().filter(|spec| spec.group.frozen).map(ParamSpec::global_elements).sum(),
        false => 0,
    };
    let mut text = format!(
        "mesh {mesh}: {}\n{}{}\n{}{}; {}products in {}\n{} of {} a step: {} of {} on each dp rank\n\n",
        count(mesh.world_size(), "rank"),
        count(parameters, "parameter"),
        if frozen > 0 { format!(", of which {} are frozen", grouped(frozen as u64)) } else { String::new() },
        count(config.model.num_layers, "layer"),
        by_stage(&config.pipeline.partition),
        match config.training.dtype {
            Dtype::F32 => String::new(),
            dtype => format!("stored in {}, ", dtype.name()),
        },
        config.training.matmul_dtype.name(),
        count(config.training.global_batch_size, "sequence"),
        count(config.model.seq_len, "token"),
        count(config.pipeline.num_microbatches, "micro-batch"),
        grouped(config.training.micro_batch_size as u64),
    );
    if mesh.degree(Axis::Pp) > 1 {
        let schedule = plan.build_schedule()?;
        let timeline = simulate(&schedule, &meshwork_pipeline::Costs::per_rank(&schedule, 1.0, 1.0, 1.0))?;
        text.truncate(text.trim_end().len());
        text += &format!(
            "\nschedule {}: idle for {:.0}% of a step if forward and both gradients take equal times\n\n",
            schedule.name,
            100.0 * timeline.bubble_of_total()
        );
    }
    for Kind { ranks, pp_rank, each } in kinds(config, mesh)? {
        let Prediction { parameters, model_bytes, memory, flops, ref records, ref exact, offloaded } = each;
        let (ranks, comma) = match ranks[..] {
            [rank] => (format!("rank {rank}"), ""),
            _ => (format!("ranks {}", spans(&ranks)), ", each"),
        };
        text += &format!(
            "{ranks} (pp rank {pp_rank}){comma}\n  parameters     {}\n  memory         {} of weights, gradients and optimizer \
             states; {} at the peak\n  computation    {:.3} GFLOP a step\n",
            grouped(parameters as u64),
            size(model_bytes as f64),
            size(memory.total() as f64),
            flops as f64 / 1e9,
        );
        if offloaded.room > 0 {
            let [read, written, room] =
                [offloaded.read, offloaded.written, offloaded.room].map(|bytes| size(bytes as f64));
            text += &format!("  offload        {read} read and {written} written a step; {room} of room\n");
        }
        text += &format!("  communication  {}\n", communication(records));
        if let Some(exact) = exact {
            let when =
                if plan.compress.aqsgd.is_some() { "while samples are new" } else { "before compression starts" };
            text += &format!("  {when}: {}\n", communication(exact));
        }
    }
    Ok(text)
}

/// What a step sends on each group.
fn communication(records: &[Record]) -> String {
    let groups: BTreeSet<&str> = records.iter().map(|record| record.group.as_str()).collect();
    let calls = |group| records.iter().filter(move |record| record.group == group).count();
    let of_group = |group| format!("{group} {} in {}", size(bytes_on(records, group)), count(calls(group), "call"));
    let groups: Vec<String> = groups.into_iter().map(of_group).collect();
    if groups.is_empty() { "none".to_owned() } else { format!("{} a step", groups.join("; ")) }
}

/// `, 2 + 2 on the stages`; empty if one stage has all layers.
fn by_stage(layers: &[usize]) -> String {
    match layers {
        [_] => String::new(),
        _ => format!(", {} on the stages", layers.iter().map(usize::to_string).collect::<Vec<_>>().join(" + ")),
    }
}

/// Ascending numbers as `0-3,8-11`.
pub(crate) fn spans(numbers: &[usize]) -> String {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match spans.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => spans.push((number, number)),
        }
    }
    let text = |&(start, end): &(usize, usize)| if start == end { start.to_string() } else { format!("{start}-{end}") };
    spans.iter().map(text).collect::<Vec<_>>().join(",")
}

/// `1 rank`, `2,000 ranks`.
pub(crate) fn count(number: usize, of: &str) -> String {
    let ending = match number {
        1 => "",
        _ if of.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {of}{ending}", grouped(number as u64))
}

/// 1234567 as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in binary units.
pub(crate) fn size(bytes: f64) -> String {
    Bytes(bytes.round() as u64).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([grouped(0), grouped(999), grouped(1_234_567)], ["0", "999", "1,234,567"]);
        assert_eq!([size(30.0), size(1536.0), size(7.0 * 1024.0 * 1024.0)], ["30 B", "1.5 KiB", "7.0 MiB"]);
        assert_eq!(spans(&[0, 1, 2, 5, 8, 9]), "0-2,5,8-9");
        assert_eq!([count(1, "micro-batch"), count(2, "micro-batch")], ["1 micro-batch", "2 micro-batches"]);
        assert_eq!([count(0, "call"), count(1000, "call")], ["0 calls", "1,000 calls"]);
    }

    #[test]
    fn the_report_tells_ranks_apart_by_what_they_do() {
        let config = Config::from_toml("[parallelism]\ndp = 2\npp = 2").unwrap();
        let text = report(&config).unwrap();
        assert!(text.starts_with("mesh tp=1,dp=2,pp=2: 4 ranks\n842,496 parameters\n"), "{text}");
        assert!(text.contains("\n4 layers, 2 + 2 on the stages; products in f32\n"), "{text}");
        assert!(text.contains("ranks 0-1 (pp rank 0), each") && text.contains("ranks 2-3 (pp rank 1), each"), "{text}");
    }

    #[test]
    fn a_router_that_looks_ahead_is_told_of() {
        let of = |router: &str| {
            let toml = format!("[model]\nseq_len = 8\n[moe]\nnum_experts = 4\nrouter = '{router}'");
            report(&Config::from_toml(&toml).unwrap()).unwrap()
        };
        assert!(
            of("expert_choice").contains("\nwarning: moe.router = \"expert_choice\" compares a token with later ones")
        );
        assert!(!of("topk").contains("warning"));
    }

    #[test]
    fn the_report_follows_the_partition() {
        let config = Config::from_toml("[parallelism]\npp = 2\n[pipeline]\npartition = [4, 0]").unwrap();
        let text = report(&config).unwrap();
        assert!(text.contains("\n4 layers, 4 + 0 on the stages; products in f32\n"), "{text}");
        // The first has all of the 842,496 parameters but the last norm; the second has that norm and the tied table,
        // 256 · 128.
        assert!(text.contains("rank 0 (pp rank 0)\n  parameters     842,240\n"), "{text}");
        assert!(text.contains("rank 1 (pp rank 1)\n  parameters     33,024\n"), "{text}");
        let one = Config::from_toml("[training]\nmatmul_dtype = 'bf16'").unwrap();
        assert!(report(&one).unwrap().contains("\n4 layers; products in bf16\n"));
        let all = Config::from_toml("[training]\ndtype = 'bf16'").unwrap();
        assert!(report(&all).unwrap().contains("\n4 layers; stored in bf16, products in bf16\n"));
    }

    #[test]
    fn ranks_that_differ_only_along_dp_do_the_same() {
        // 250 words over 4 tp ranks: the last one holds padding.
        let toml = "[model]\nvocab_size = 250\n[parallelism]\ndp = 2\ntp = 4\npp = 2\nsequence_parallel = true";
        let config = Config::from_toml(toml).unwrap();
        let mesh = config.mesh().unwrap();
        let kinds = kinds(&config, &mesh).unwrap();
        let kind = |rank: usize| kinds.iter().find(|kind| kind.ranks.contains(&rank)).unwrap();
        for rank in 0..mesh.world_size() {
            assert_eq!(kind(rank).each, predict(&config, rank).unwrap(), "rank {rank}");
        }
        assert_eq!(kinds.iter().map(|kind| kind.ranks.len()).sum::<usize>(), 16);
        let bytes = (0..16).map(|rank| u128::from(predict(&config, rank).unwrap().peak_bytes())).sum::<u128>();
        assert_eq!(world_bytes(&config).unwrap(), bytes);
    }
}
