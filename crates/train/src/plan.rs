//! The cost of a run before it runs: the report of `--steps 0`.

use crate::checkpoint::room::Room;
use crate::checkpoint::save_plan;
use crate::config::{Config, Dtype, MoeRouter};
use crate::error::RankError;
use crate::numbers::{count, grouped, size, spans};
pub use crate::predict::{EqualRanks, memory, peak_bytes, predict, predict_all, world_bytes};
use crate::{peers, replay};
use meshwork_compress::{Scales, Shape, Values, wire_bytes};
use meshwork_core::{Axis, Record};
pub use meshwork_engine::dry_run::Prediction;
use meshwork_engine::dry_run::{self, bytes_on};
use meshwork_engine::{ModelPlan, TrainError};
use meshwork_pipeline::simulate;
use meshwork_tensor::ParamSpec;
use std::collections::BTreeSet;

/// Operations in words: of a large step in TFLOP.
fn computation(flops: u64) -> String {
    match flops {
        ..1_000_000_000_000_000 => format!("{:.3} GFLOP", flops as f64 / 1e9),
        _ => format!("{} TFLOP", grouped(flops / 1_000_000_000_000)),
    }
}

/// The text that `--steps 0` prints: the mesh, the model, and the cost of a step on each rank, with equal ranks
/// together.
pub fn report(config: &Config) -> Result<String, RankError> {
    let mut text = report_steps(config)?;
    text.extend(config.warning().into_iter().flat_map(|warning| [warning, "\n"]));
    text += &replay::report(config)?;
    text += &peers::report(config)?;
    if config.checkpoint.dir.is_some() {
        let plan = config.plan()?;
        let files = save_plan(&config.model(), &plan)?;
        let bytes: Vec<u64> = (0..files.world()).map(|rank| files.bytes(rank)).collect();
        let (all, most) = (bytes.iter().sum::<u64>() as f64, bytes.iter().max().copied().unwrap_or(0) as f64);
        text += &format!("checkpoints of {}; to save one, up to {} of host memory on a rank\n", size(all), size(most));
        text.extend(Room::from_config(config)?.map(|room| room.report(config)));
    }
    Ok(text)
}

fn report_steps(config: &Config) -> Result<String, TrainError> {
    let plan = config.plan()?;
    let mesh = &plan.mesh;
    let specs = ModelPlan::new(config.model(), &plan)?.parameters()?;
    let parameters: usize = specs.iter().map(ParamSpec::global_elements).sum();
    let frozen: usize = match config.model.frozen().is_some() || config.lora.rank > 0 {
        true => specs.iter().filter(|spec| spec.group.frozen).map(ParamSpec::global_elements).sum(),
        false => 0,
    };
    let mut text = format!(
        "mesh {mesh}: {}\n{}{}{}\n{}{}; {}products in {}\n{} of {} a step: {} of {} on each dp rank\n\n",
        count(mesh.world_size(), "rank"),
        count(parameters, "parameter"),
        if frozen > 0 { format!(", of which {} are frozen", grouped(frozen as u64)) } else { String::new() },
        base(&specs, if config.training.dtype == Dtype::F32 { 4 } else { 2 }),
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
    for EqualRanks { ranks, pp_rank, each } in predict_all(config)? {
        let Prediction { parameters, model_bytes, memory, flops, ref records, ref exact, offloaded } = each;
        let first = ranks[0];
        let (ranks, comma) = match ranks[..] {
            [rank] => (format!("rank {rank}"), ""),
            _ => (format!("ranks {}", spans(&ranks)), ", each"),
        };
        text += &format!(
            "{ranks} (pp rank {pp_rank}){comma}\n  parameters     {}\n  memory         {} of weights, gradients and optimizer \
             states; {} at the peak\n  computation    {} a step\n",
            grouped(parameters as u64),
            size(model_bytes as f64),
            size(memory.total() as f64),
            computation(flops),
        );
        if config.parallelism.ep > 1 && config.moe.router != MoeRouter::ExpertChoice {
            // How many rows the experts of a rank take depends on the data.
            let most = dry_run::crowded(&config.model(), &plan, first)?.total();
            text += &format!(
                "  experts        an even load is assumed; {} at the peak if all tokens choose experts of the rank\n",
                size(most as f64)
            );
        }
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

/// The line about quantised frozen weights: what they take, and what that saves against `bytes` bytes an element. Empty
/// if no weights are quantised.
fn base(specs: &[ParamSpec], bytes: usize) -> String {
    let of = |values: Values| -> usize {
        let shapes =
            specs.iter().filter(|spec| spec.packed.is_some()).map(|spec| Shape::vector(spec.global_elements()));
        shapes.filter_map(|shape| wire_bytes(&values, shape.ok()?).ok()).sum()
    };
    let packed = || specs.iter().filter(|spec| spec.packed.is_some());
    let Some(values) = packed().find_map(|spec| spec.packed) else { return String::new() };
    let (count, stored): (usize, _) = (packed().map(ParamSpec::global_elements).sum(), of(values));
    let scales = match values {
        Values::Nf4 { per, scales: Scales::E5M3 } => {
            let saved = of(Values::Nf4 { per, scales: Scales::F32 }) - stored;
            format!(" (scales of 8 bits save {} of it)", size(saved as f64))
        }
        _ => String::new(),
    };
    format!(
        "\n{} of them as {values}: {}, {:.2} bits each, {} less than as numbers{scales}",
        grouped(count as u64),
        size(stored as f64),
        8.0 * stored as f64 / count as f64,
        size((bytes * count).saturating_sub(stored) as f64),
    )
}

/// The bytes and calls of a step on each group.
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
