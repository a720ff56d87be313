//! What a run would do, without doing it: one step of one rank on the meta device with recording communicators. The code that runs
//! is the code that will train.

use crate::config::sections::Pipeline;
use crate::config::{Config, Parallelism};
use crate::data::Batch;
use crate::engine::{Blueprint, TrainError, Watch};
use crate::step::Trainer;
use meshwork_core::{Axis, Mesh, Rank, Record};
use meshwork_pipeline::Generator;
use meshwork_pipeline::simulate;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::{Device, ParamSpec};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What one rank holds, computes and communicates in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Elements of the parameters on this rank, padding not counted.
    pub parameters: usize,
    /// Bytes of weights, gradients and optimizer states.
    pub model_bytes: u64,
    /// Most bytes alive at once: those and the activations.
    pub peak_bytes: u64,
    /// Floating point operations of matrix products and attention.
    pub flops: u64,
    /// Every communication, in order.
    pub records: Vec<Record>,
}

impl Prediction {
    /// Logical bytes per step on the groups of that name.
    pub fn bytes_on(&self, group: &str) -> f64 {
        self.records.iter().filter(|record| record.group == group).fold(0.0, |sum, record| sum + record.bytes())
    }
}

/// Predicts a step of the rank `world_rank` of the configuration's mesh.
pub fn predict(config: &Config, world_rank: usize) -> Result<Prediction, TrainError> {
    let blueprint = Blueprint::new(config)?;
    let rank = Arc::new(Rank::recording(blueprint.mesh(), world_rank)?);
    let device = blank_device(config);
    let mut trainer = Trainer::new(config, rank, device.clone())?;
    let parameters = trainer.local_elements();
    let model_bytes = device.meter().live_bytes();
    // A step as it is when those that overlap with it are under way.
    let batch = blank_batch(config, &trainer);
    let mut reports = Vec::new();
    let mut flops = 0;
    for _ in 0..=trainer.steps_ahead() {
        let before = device.meter().total_flops();
        reports.extend(trainer.advance(&batch, || false, |_| {})?);
        flops = device.meter().total_flops() - before;
    }
    reports.extend(trainer.settle(|_| {})?);
    let records = reports.pop().map_or(Vec::new(), |report| report.records);
    Ok(Prediction { parameters, model_bytes, peak_bytes: device.meter().peak_bytes(), flops, records })
}

/// What the parts of a model cost: floating point operations of matrix products and attention, forward and backward of one
/// sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// The embedding: lookups, which are no products.
    pub embedding: u64,
    /// Each layer.
    pub layer: u64,
    /// The head with the loss.
    pub head: u64,
}

/// Counts what the parts of a model cost, from its sizes alone, so that every rank of every mesh counts the same: a step of one
/// sequence through a pipeline of three stages, which are the embedding, one layer, and the head.
pub fn costs(config: &Config) -> Result<Costs, TrainError> {
    let parts = three_parts(config);
    let flops = |rank| predict(&parts, rank).map(|part| part.flops);
    Ok(Costs { embedding: flops(0)?, layer: flops(1)?, head: flops(2)? })
}

/// A model of one layer over three stages, each with one rank: the embedding, the layer, the head.
fn three_parts(config: &Config) -> Config {
    let mut parts = config.clone();
    parts.model.num_layers = 1;
    parts.model.tie_embeddings = false; // The same products, and no group for the tie.
    parts.parallelism = Parallelism { dp: 1, tp: 1, pp: 3, sequence_parallel: false, ..parts.parallelism };
    parts.pipeline = Pipeline::plain(Generator::Gpipe, 1, vec![0, 1, 0]);
    (parts.training.global_batch_size, parts.training.micro_batch_size) = (1, 1);
    parts
}

/// Shows every value of a step of the rank `world_rank` to `watch`: shapes and types, without contents.
pub(crate) fn rehearse(config: &Config, world_rank: usize, watch: Arc<dyn Watch>) -> Result<(), TrainError> {
    let blueprint = Blueprint::new(config)?;
    let rank = Arc::new(Rank::recording(blueprint.mesh(), world_rank)?);
    let mut trainer = Trainer::new(config, rank, blank_device(config))?;
    trainer.watch(watch);
    let batch = blank_batch(config, &trainer);
    trainer.step(&batch, |_| {})?;
    Ok(())
}

/// What stands in for the configuration's device.
fn blank_device(config: &Config) -> Arc<dyn Device> {
    Arc::new(Meta::new(config.training.dtype.precision()))
}

/// A rank's rows of a batch of the token 0.
fn blank_batch(config: &Config, trainer: &Trainer) -> Batch {
    let (rows, seq_len) = (trainer.rows().len(), config.model.seq_len);
    let tokens = vec![0; rows * seq_len];
    Batch { inputs: tokens.clone(), targets: tokens, rows, seq_len }
}

/// Ranks of one pp rank that do the same.
struct Kind {
    ranks: Vec<usize>,
    pp_rank: usize,
    each: Prediction,
}

/// What every rank does. Those that differ only along dp do the same, so that a thousand of them cost no more than one.
fn kinds(config: &Config, mesh: &Mesh) -> Result<Vec<Kind>, TrainError> {
    let mut kinds: Vec<Kind> = Vec::new();
    for first in (0..mesh.world_size()).filter(|&rank| mesh.coords(rank).get(Axis::Dp) == 0) {
        let pp_rank = mesh.coords(first).get(Axis::Pp);
        let each = predict(config, first)?;
        let ranks = mesh.group(first, &[Axis::Dp]);
        match kinds.iter_mut().find(|kind| kind.pp_rank == pp_rank && kind.each == each) {
            Some(kind) => kind.ranks.extend(ranks),
            None => kinds.push(Kind { ranks, pp_rank, each }),
        }
    }
    kinds.iter_mut().for_each(|kind| kind.ranks.sort_unstable());
    Ok(kinds)
}

/// Most bytes alive at once on all ranks together.
pub(crate) fn world_bytes(config: &Config) -> Result<u128, TrainError> {
    let kinds = kinds(config, Blueprint::new(config)?.mesh())?;
    Ok(kinds.iter().map(|kind| kind.ranks.len() as u128 * u128::from(kind.each.peak_bytes)).sum())
}

/// The mesh, the model, and what a step takes on each rank, ranks that take the same together: what `--steps 0` prints.
pub fn report(config: &Config) -> Result<String, TrainError> {
    let blueprint = Blueprint::new(config)?;
    let mesh = blueprint.mesh();
    let parameters: usize = blueprint.parameters()?.iter().map(ParamSpec::global_elements).sum();
    let mut text = format!(
        "mesh {mesh}: {}\n{}\n{}{}; products in {}\n{} of {} a step: {} of {} on each dp rank\n\n",
        count(mesh.world_size(), "rank"),
        count(parameters, "parameter"),
        count(config.model.num_layers, "layer"),
        by_stage(&config.pipeline.partition),
        config.training.dtype.name(),
        count(config.training.global_batch_size, "sequence"),
        count(config.model.seq_len, "token"),
        count(config.pipeline.num_microbatches, "micro-batch"),
        grouped(config.training.micro_batch_size as u64),
    );
    if mesh.degree(Axis::Pp) > 1 {
        let schedule = config.pipeline.build(mesh.degree(Axis::Pp))?;
        let timeline = simulate(&schedule, &meshwork_pipeline::Costs::per_rank(&schedule, 1.0, 1.0, 1.0))?;
        text.truncate(text.trim_end().len());
        text += &format!(
            "\nschedule {}: idle for {:.0}% of a step if forward and both gradients take equal times\n\n",
            schedule.name,
            100.0 * timeline.bubble_of_total()
        );
    }
    for Kind { ranks, pp_rank, each } in kinds(config, mesh)? {
        let Prediction { parameters, model_bytes, peak_bytes, flops, ref records } = each;
        let (ranks, comma) = match ranks[..] {
            [rank] => (format!("rank {rank}"), ""),
            _ => (format!("ranks {}", spans(&ranks)), ", each"),
        };
        text += &format!(
            "{ranks} (pp rank {pp_rank}){comma}\n  parameters     {}\n  memory         {} of weights, gradients and optimizer \
             states; {} at the peak\n  computation    {:.3} GFLOP a step\n",
            grouped(parameters as u64),
            size(model_bytes as f64),
            size(peak_bytes as f64),
            flops as f64 / 1e9,
        );
        let groups: BTreeSet<&str> = records.iter().map(|record| record.group.as_str()).collect();
        let calls = |group| records.iter().filter(move |record| record.group == group).count();
        let of_group = |group| format!("{group} {} in {}", size(each.bytes_on(group)), count(calls(group), "call"));
        let groups: Vec<String> = groups.into_iter().map(of_group).collect();
        let talk = if groups.is_empty() { "none".to_owned() } else { format!("{} a step", groups.join("; ")) };
        text += &format!("  communication  {talk}\n");
    }
    Ok(text)
}

/// `, 2 + 2 on the stages`; nothing where one stage has all layers.
fn by_stage(layers: &[usize]) -> String {
    match layers {
        [_] => String::new(),
        _ => format!(", {} on the stages", layers.iter().map(usize::to_string).collect::<Vec<_>>().join(" + ")),
    }
}

/// Ascending numbers as `0-3,8-11`.
fn spans(numbers: &[usize]) -> String {
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
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let scale = (0..units.len() - 1).find(|&unit| bytes < 1024f64.powi(unit as i32 + 1)).unwrap_or(units.len() - 1);
    let value = bytes / 1024f64.powi(scale as i32);
    if scale == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", units[scale]) }
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
    fn the_report_follows_the_partition() {
        let config = Config::from_toml("[parallelism]\npp = 2\n[pipeline]\npartition = [4, 0]").unwrap();
        let text = report(&config).unwrap();
        assert!(text.contains("\n4 layers, 4 + 0 on the stages; products in f32\n"), "{text}");
        // All of 842,496 but the last norm; that and the tied table, 256 · 128.
        assert!(text.contains("rank 0 (pp rank 0)\n  parameters     842,240\n"), "{text}");
        assert!(text.contains("rank 1 (pp rank 1)\n  parameters     33,024\n"), "{text}");
        let one = Config::from_toml("[training]\ndtype = 'bf16'").unwrap();
        assert!(report(&one).unwrap().contains("\n4 layers; products in bf16\n"));
    }

    #[test]
    fn costs_are_those_of_the_formulae() {
        let config = Config::from_toml("[model]\npreset = 'small'\n[parallelism]\ntp = 2\npp = 2").unwrap();
        let (v, h, s) = (256u64, 384, 256);
        // Backward is twice forward, but for attention, which computes its probabilities again: 4 and 10 for each pair and width.
        let products = 3 * 2 * s * (4 * h * h + 8 * h * h);
        let attention = 14 * h * (s * (s + 1) / 2);
        let costs = costs(&config).unwrap();
        assert_eq!(costs, Costs { embedding: 0, layer: products + attention, head: 3 * 2 * s * v * h });
    }

    #[test]
    fn ranks_that_differ_only_along_dp_do_the_same() {
        // 250 words over 4 tp ranks: the last one holds padding.
        let toml = "[model]\nvocab_size = 250\n[parallelism]\ndp = 2\ntp = 4\npp = 2\nsequence_parallel = true";
        let config = Config::from_toml(toml).unwrap();
        let mesh = Blueprint::new(&config).unwrap().mesh().clone();
        let kinds = kinds(&config, &mesh).unwrap();
        let kind = |rank: usize| kinds.iter().find(|kind| kind.ranks.contains(&rank)).unwrap();
        for rank in 0..mesh.world_size() {
            assert_eq!(kind(rank).each, predict(&config, rank).unwrap(), "rank {rank}");
        }
        assert_eq!(kinds.iter().map(|kind| kind.ranks.len()).sum::<usize>(), 16);
        let bytes = (0..16).map(|rank| u128::from(predict(&config, rank).unwrap().peak_bytes)).sum::<u128>();
        assert_eq!(world_bytes(&config).unwrap(), bytes);
    }
}
