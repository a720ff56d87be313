//! What a run would do, without doing it: one step of one rank on the meta device with recording communicators. The code that runs
//! is the code that will train.

use crate::config::Config;
use crate::data::Batch;
use crate::engine::{Blueprint, TrainError};
use crate::step::Trainer;
use meshwork_core::{Axis, Rank, Record};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::meta::Meta;
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
        self.records.iter().filter(|record| record.group == group).map(Record::bytes).sum()
    }
}

/// Predicts a step of the rank `world_rank` of the configuration's mesh.
pub fn predict(config: &Config, world_rank: usize) -> Result<Prediction, TrainError> {
    let blueprint = Blueprint::new(config)?;
    let rank = Arc::new(Rank::recording(blueprint.mesh(), world_rank)?);
    let device = Meta::device();
    let mut trainer = Trainer::new(config, rank, device.clone())?;
    let parameters = trainer.local_elements();
    let model_bytes = device.meter().live_bytes();
    let rows = trainer.rows().len();
    let tokens = vec![0; rows * config.model.seq_len];
    let batch = Batch { inputs: tokens.clone(), targets: tokens, rows, seq_len: config.model.seq_len };
    let report = trainer.step(&batch, |_| {})?;
    Ok(Prediction {
        parameters,
        model_bytes,
        peak_bytes: device.meter().peak_bytes(),
        flops: device.meter().total_flops(),
        records: report.records,
    })
}

/// The mesh, the model, and what a step takes on each rank, ranks that take the same together: what `--steps 0` prints.
pub fn report(config: &Config) -> Result<String, TrainError> {
    let blueprint = Blueprint::new(config)?;
    let mesh = blueprint.mesh();
    let parameters: usize = blueprint.parameters()?.iter().map(ParamSpec::global_elements).sum();
    let mut text = format!(
        "mesh {mesh}: {} ranks\n{} parameters\n{} sequences of {} tokens a step: {} micro-batches of {} on each dp rank\n\n",
        mesh.world_size(),
        grouped(parameters as u64),
        config.training.global_batch_size,
        config.model.seq_len,
        config.pipeline.num_microbatches,
        config.training.micro_batch_size,
    );
    let mut kinds: Vec<(Vec<usize>, usize, Prediction)> = Vec::new();
    for world_rank in 0..mesh.world_size() {
        let pp_rank = mesh.coords(world_rank).get(Axis::Pp);
        let prediction = predict(config, world_rank)?;
        match kinds.iter_mut().find(|(_, pp, other)| *pp == pp_rank && *other == prediction) {
            Some((ranks, ..)) => ranks.push(world_rank),
            None => kinds.push((vec![world_rank], pp_rank, prediction)),
        }
    }
    for (ranks, pp_rank, Prediction { parameters, model_bytes, peak_bytes, flops, records }) in &kinds {
        text += &format!(
            "ranks {} (pp rank {pp_rank}), each\n  parameters     {}\n  memory         {} of weights, gradients and optimizer states; \
             {} at the peak\n  computation    {:.3} GFLOP a step\n  communication ",
            spans(ranks),
            grouped(*parameters as u64),
            size(*model_bytes as f64),
            size(*peak_bytes as f64),
            *flops as f64 / 1e9,
        );
        let mut groups: Vec<&str> = records.iter().map(|record| record.group.as_str()).collect();
        groups.sort_unstable();
        groups.dedup();
        for group in &groups {
            let calls: Vec<_> = records.iter().filter(|record| record.group == *group).collect();
            let bytes = calls.iter().map(|record| record.bytes()).sum();
            text += &format!(" {group} {} in {} calls;", size(bytes), calls.len());
        }
        text += if groups.is_empty() { " none\n" } else { " a step\n" };
    }
    Ok(text)
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

/// 1234567 as `1,234,567`.
fn grouped(number: u64) -> String {
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
fn size(bytes: f64) -> String {
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
    }

    #[test]
    fn the_report_tells_ranks_apart_by_what_they_do() {
        let config = Config::from_toml("[parallelism]\ndp = 2\npp = 2").unwrap();
        let text = report(&config).unwrap();
        assert!(text.starts_with("mesh tp=1,dp=2,pp=2: 4 ranks\n842,496 parameters\n"), "{text}");
        assert!(text.contains("ranks 0-1 (pp rank 0), each") && text.contains("ranks 2-3 (pp rank 1), each"), "{text}");
    }
}
