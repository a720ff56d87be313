//! Checks across keys. Each check names the keys that it reads. It is skipped if one of them is at fault, because a
//! message about a default that the user did not choose would mislead.

use meshwork_core::tree;
use meshwork_pipeline::by_name;

use super::batch::multiple;
use super::device::Device;
use super::fault::Fault;
use super::partition;
use super::settings::Settings;
use super::words::{DecayName, ModelKind, OffloadWord};
use super::{Config, architecture, permit};

/// Adds the faults across keys to `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let mut faults = Vec::new();
    let mut fail = |fault| faults.push(fault);
    let (model, mesh) = (&config.model, &config.parallelism);

    // (key, value, must be a multiple of this key, its value, whether it must)
    let split = mesh.sequence_parallel && mesh.tp > 1;
    let canonical = config.reduction_blocks().is_some(); // fast numerics pad the last ranks
    let is_llama = model.kind == ModelKind::Llama;
    let divisions = [
        ("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads, true),
        ("model.num_heads", model.num_heads, "model.num_kv_heads", model.num_kv_heads, is_llama),
        ("model.hidden_size", model.hidden_size, "parallelism.tp", mesh.tp, true),
        ("model.num_heads", model.num_heads, "parallelism.tp", mesh.tp, true),
        ("model.ffn_hidden_size", model.ffn_hidden_size, "parallelism.tp", mesh.tp, canonical),
        ("model.seq_len", model.seq_len, "parallelism.tp", mesh.tp, split),
    ];
    for (key, value, by, divisor, applies) in divisions {
        if applies && settings.sound(&[key, by]) && !value.is_multiple_of(divisor) {
            let why = match key {
                "model.seq_len" => " (sequence_parallel is on)",
                "model.ffn_hidden_size" => " (training.numerics is canonical)",
                _ => "",
            };
            let problem = format!("is not divisible by {by} = {divisor}{why}");
            fail(Fault::new(key, value, problem, multiple(value, divisor)));
        }
    }

    architecture::check(model, mesh.tp, settings, &mut fail);

    let axes = ["parallelism.dp", "parallelism.tp", "parallelism.pp", "parallelism.cp"];
    if settings.sound(&axes) && mesh.world_size().is_none() {
        fail(Fault::new(
            "parallelism",
            format!("dp={},tp={},pp={},cp={}", mesh.dp, mesh.tp, mesh.pp, mesh.cp),
            "the number of ranks, dp · tp · pp · cp, overflows",
            "use as many ranks as you have",
        ));
    }

    let (key, dir) = ("memory.offload", "memory.offload_dir");
    let (offload, at_disk) = (config.memory.offload != OffloadWord::None, config.device == Device::Cpu);
    if settings.sound(&[key, dir]) && offload && at_disk && config.memory.offload_dir.is_none() {
        let valid = format!("name a folder on a disk by {dir}, or use none");
        fail(Fault::new(key, config.memory.offload.name(), format!("{dir} is not set"), valid));
    }

    let (key, layers) = ("pipeline.virtual_stages", "model.num_layers");
    let (chunks, uniform) = (config.pipeline.virtual_stages, partition::is_uniform(settings));
    let stages = chunks.saturating_mul(mesh.pp);
    if settings.sound(&[key, layers, "parallelism.pp", "pipeline.partition"])
        && chunks > 1
        && uniform
        && settings.given::<String>("pipeline.schedule_file").is_none()
        && model.num_layers >= stages
        && !model.num_layers.is_multiple_of(stages)
    {
        let problem =
            format!("gives pp · virtual_stages = {stages} stages, which do not divide {layers} = {}", model.num_layers);
        let more = multiple(model.num_layers, stages).replacen("use", "use layers that are", 1);
        fail(Fault::new(
            key,
            chunks,
            problem,
            format!("{more}, or partition them by cost or with a list in pipeline.partition"),
        ));
    }

    let key = "pipeline.schedule";
    if settings.sound(&[key]) && by_name(&config.pipeline.schedule).is_ok_and(|schedule| !schedule.is_synchronous()) {
        let name = &config.pipeline.schedule;
        let mut refuse = |other: &str, value: &dyn std::fmt::Display, problem: &str, valid: &str| {
            let problem = format!("has no meaning with {key} = {name:?}, {problem}");
            fail(Fault::new(other, value, problem, format!("use {valid}, or a synchronous schedule")));
        };
        let two_stages = !settings.sound(&["parallelism.pp"]) || mesh.pp > 1; // that the table would be on
        if settings.sound(&["model.tie_embeddings"]) && model.tie_embeddings && two_stages {
            let problem =
                "whose stages hold different versions of the weights: two uses of one table would not be one table";
            refuse("model.tie_embeddings", &true, problem, "model.tie_embeddings = false");
        }
        if settings.sound(&["training.max_norm"]) && config.training.max_norm > 0.0 {
            let problem = "whose stages update at different times, each before the others' gradients are there: no norm is that of one whole gradient";
            refuse("training.max_norm", &config.training.max_norm, problem, "training.max_norm = 0");
        }
        if settings.sound(&["training.numerics"]) && config.training.numerics == "canonical" {
            let problem = "whose result depends on the schedule by design: it is not the run of one rank";
            refuse("training.numerics", &"canonical", problem, "training.numerics = \"fast\"");
        }
    }

    let (numerics, key_of_blocks) = ("training.numerics", "numerics.reduction_blocks");
    if let (true, Some(count)) = (settings.sound(&[numerics, key_of_blocks]), config.reduction_blocks()) {
        if count > MAX_BLOCKS {
            let problem = "more blocks than any tp has use for: each costs time and memory";
            fail(Fault::new(key_of_blocks, count, problem, format!("use {MAX_BLOCKS} or fewer")));
        }
        let batch = "training.global_batch_size";
        let trees = [
            ("parallelism.tp", mesh.tp, key_of_blocks, count),
            ("parallelism.dp", mesh.dp, batch, config.training.global_batch_size),
        ];
        for (key, degree, by, blocks) in trees {
            if settings.sound(&[key, by]) && !tree::fits(blocks, degree) {
                let problem = format!(
                    "does not fit canonical numerics with {by} = {blocks}: each rank must have an equal share that is a power of two"
                );
                fail(Fault::new(key, degree, problem, choose_degree(blocks, by)));
            }
        }
    }

    let (key, checkpoint) = ("checkpoint.permit", &config.checkpoint);
    for (word, valid) in permit::unknown(&checkpoint.permit) {
        fail(Fault::new(key, word, "unknown", valid));
    }
    if settings.sound(&["checkpoint.dir", "checkpoint.resume"]) && checkpoint.resume && checkpoint.dir.is_none() {
        fail(Fault::new("checkpoint.resume", true, "there is no folder to resume from", "set checkpoint.dir"));
    }
    for (key, on, what) in [
        ("cuda.graphs", config.cuda.graphs, "has no graphs"),
        ("cuda.launch_blocking", config.cuda.launch_blocking, "waits for each kernel anyway"),
    ] {
        if settings.sound(&[key]) && on && config.device == Device::Cpu {
            let problem = format!("--device cpu {what}: its kernels are done when they return");
            fail(Fault::new(key, true, problem, "use --device cuda or cuda-emulated, or false"));
        }
    }
    if let (Some(table), Device::Cpu | Device::Card(_)) = (&config.cuda.tuning, config.device) {
        let problem = format!("--device {} runs no kernels of CUDA", config.device);
        fail(Fault::new("cuda.tuning", table, problem, "use --device cuda or cuda-emulated, or leave it out"));
    }

    let schedule = &config.lr_scheduler;
    let keys = ["lr_scheduler.decay", "lr_scheduler.decay_steps", "lr_scheduler.warmup_steps"];
    let explicit = settings.given::<u64>(keys[1]).is_some();
    if explicit
        && settings.sound(&keys)
        && schedule.decay != DecayName::None
        && schedule.decay_steps <= schedule.warmup_steps
    {
        let warmup = schedule.warmup_steps;
        let problem = format!("ends the decay within the warm-up: {} = {warmup}", keys[2]);
        fail(Fault::new(keys[1], schedule.decay_steps, problem, format!("use more than {warmup}")));
    }

    settings.faults.append(&mut faults);
}

/// More reduction blocks than this are a mistake.
const MAX_BLOCKS: usize = 4096;

/// The degrees that fit this number of blocks.
pub(super) fn choose_degree(blocks: usize, by: &str) -> String {
    let degrees: Vec<String> = tree::degrees(blocks).iter().map(usize::to_string).collect();
    format!("use {}, or another {by}", degrees.join(", "))
}
