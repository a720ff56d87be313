//! Checks across keys. Each check names the keys that it reads. It is skipped if one of them is at fault, because a
//! message about a default that the user did not choose would mislead.

use meshwork_core::tree;

use super::batch::multiple;
use super::device::Device;
use super::fault::Fault;
use super::settings::Settings;
use super::words::{DecayName, ModelKind, Objective, OffloadWord, ReductionName};
use super::{Config, architecture, context, partition, permit};

/// Adds the faults across keys to `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    divisions(config, settings);
    architecture::check(config, settings);
    context::check(config, settings);
    check_ranks(config, settings);
    if config.names_asynchronous() {
        check_asynchronous(config, settings);
    }
    check_canonical(config, settings);
    check_checkpoints(config, settings);
    check_export(config, settings);
    check_examples(config, settings);
    check_pairs(config, settings);
    check_device(config, settings);
    let (schedule, keys) =
        (&config.lr_scheduler, ["lr_scheduler.decay", "lr_scheduler.decay_steps", "lr_scheduler.warmup_steps"]);
    let (decays, warmup) = (schedule.decay != DecayName::None, schedule.warmup_steps);
    let explicit = settings.given::<u64>(keys[1]).is_some();
    settings.require(&keys, !explicit || !decays || schedule.decay_steps > warmup, || {
        let problem = format!("ends the decay within the warm-up: {} = {warmup}", keys[2]);
        Fault::new(keys[1], schedule.decay_steps, problem, format!("use more than {warmup}"))
    });
}

/// Sizes that must be multiples of others.
fn divisions(config: &Config, settings: &mut Settings) {
    let (model, mesh) = (&config.model, &config.parallelism);
    let (is_llama, of_width) = (model.kind == ModelKind::Llama, config.decoder().head_dim.is_none());
    let split = mesh.sequence_parallel && mesh.tp > 1;
    let canonical = config.reduction_blocks().is_some(); // fast numerics pad the last ranks
    // (key, value, must be a multiple of this key, its value, whether it must, the reason if it need not always)
    let divisions = [
        ("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads, of_width, ""),
        ("model.num_heads", model.num_heads, "model.num_kv_heads", model.num_kv_heads, is_llama, ""),
        ("model.hidden_size", model.hidden_size, "parallelism.tp", mesh.tp, true, ""),
        ("model.num_heads", model.num_heads, "parallelism.tp", mesh.tp, true, ""),
        ("model.ffn_hidden_size", model.ffn_hidden_size, "parallelism.tp", mesh.tp, canonical, CANONICAL),
        ("model.seq_len", model.seq_len, "parallelism.tp", mesh.tp, split, " (sequence_parallel is on)"),
    ];
    for (key, value, by, divisor, applies, why) in divisions {
        settings.require(&[key, by], !applies || value.is_multiple_of(divisor), || {
            Fault::new(key, value, format!("is not divisible by {by} = {divisor}{why}"), multiple(value, divisor))
        });
    }
}

const CANONICAL: &str = " (training.numerics is canonical)";

/// The number of ranks, and the stages that they have.
fn check_ranks(config: &Config, settings: &mut Settings) {
    let (layers, mesh) = (config.model.num_layers, &config.parallelism);
    let axes = ["parallelism.dp", "parallelism.tp", "parallelism.pp", "parallelism.cp"];
    settings.require(&axes, mesh.world_size().is_some(), || {
        let mesh = mesh.degrees();
        let problem = "the number of ranks, dp · tp · pp · cp, overflows";
        Fault::new("parallelism", mesh, problem, "use as many ranks as you have")
    });
    let (key, dir) = ("memory.offload", "memory.offload_dir");
    let to_disk = config.memory.offload != OffloadWord::None && config.device == Device::Cpu;
    settings.require(&[key, dir], !to_disk || config.memory.offload_dir.is_some(), || {
        let valid = format!("name a folder on a disk by {dir}, or use none");
        Fault::new(key, config.memory.offload.name(), format!("{dir} is not set"), valid)
    });
    let key = "pipeline.virtual_stages";
    let chunks = config.pipeline.virtual_stages;
    let stages = chunks.saturating_mul(mesh.pp);
    let divided = chunks > 1
        && partition::is_uniform(settings)
        && settings.given::<String>("pipeline.schedule_file").is_none()
        && layers >= stages;
    let keys = [key, "model.num_layers", "parallelism.pp", "pipeline.partition"];
    settings.require(&keys, !divided || layers.is_multiple_of(stages), || {
        let problem =
            format!("gives pp · virtual_stages = {stages} stages, which do not divide {} = {layers}", keys[1]);
        let more = multiple(layers, stages).replacen("use", "use layers that are", 1);
        let valid = format!("{more}, or partition them by cost or with a list in pipeline.partition");
        Fault::new(key, chunks, problem, valid)
    });
}

/// Settings without a meaning where stages update at different times.
fn check_asynchronous(config: &Config, settings: &mut Settings) {
    let schedule = "pipeline.schedule";
    let name = &config.pipeline.schedule;
    let max_norm = config.training.max_norm;
    // Two stages that the table would be on.
    let tied = config.model.tie_embeddings && (!settings.sound(&["parallelism.pp"]) || config.parallelism.pp > 1);
    let mut refuse = |key: &str, is_set: bool, value: &dyn std::fmt::Display, problem: &str, valid: &str| {
        settings.require(&[schedule, key], !is_set, || {
            let problem = format!("has no meaning with {schedule} = {name:?}, {problem}");
            Fault::new(key, value, problem, format!("use {valid}, or a synchronous schedule"))
        });
    };
    let problem = "whose stages hold different versions of the weights: two uses of one table would not be one table";
    refuse("model.tie_embeddings", tied, &true, problem, "model.tie_embeddings = false");
    let problem = "whose stages update at different times, each before the others' gradients are there: no norm is that of one whole gradient";
    refuse("training.max_norm", max_norm > 0.0, &max_norm, problem, "training.max_norm = 0");
    let canonical = config.training.numerics == "canonical";
    let problem = "whose result depends on the schedule by design: it is not the run of one rank";
    refuse("training.numerics", canonical, &"canonical", problem, "training.numerics = \"fast\"");
}

/// Sums that a mesh must cut into whole subtrees.
fn check_canonical(config: &Config, settings: &mut Settings) {
    let (numerics, key) = ("training.numerics", "numerics.reduction_blocks");
    let Some(count) = config.reduction_blocks().filter(|_| settings.sound(&[numerics, key])) else { return };
    settings.require(&[], count <= MAX_BLOCKS, || {
        let problem = "more blocks than any tp has use for: each costs time and memory";
        Fault::new(key, count, problem, format!("use {MAX_BLOCKS} or fewer"))
    });
    let (reduction, by) = ("comm.reduction", config.comm.reduction);
    settings.require(&[reduction], by == ReductionName::Tree, || {
        let problem =
            "the library adds up in an order of its own, and training.numerics = \"canonical\" promises that of the tree";
        Fault::new(reduction, by.name(), problem, "use tree, or training.numerics = \"fast\"")
    });
    let (mesh, batch) = (&config.parallelism, config.training.global_batch_size);
    let trees =
        [("parallelism.tp", mesh.tp, key, count), ("parallelism.dp", mesh.dp, "training.global_batch_size", batch)];
    for (key, degree, by, blocks) in trees {
        settings.require(&[key, by], tree::fits(blocks, degree), || no_subtree(key, degree, by, blocks));
    }
}

/// More reduction blocks than this are a mistake.
const MAX_BLOCKS: usize = 4096;

/// The fault of a degree that does not give each rank a whole subtree of canonical sums.
pub(super) fn no_subtree(key: &str, degree: usize, by: &str, blocks: usize) -> Fault {
    let degrees: Vec<String> = tree::degrees(blocks).iter().map(usize::to_string).collect();
    let problem = format!(
        "does not fit canonical numerics with {by} = {blocks}: each rank must have an equal share that is a power of two"
    );
    Fault::new(key, degree, problem, format!("use {}, or another {by}", degrees.join(", ")))
}

fn check_checkpoints(config: &Config, settings: &mut Settings) {
    let checkpoint = &config.checkpoint;
    for (word, valid) in permit::unknown(&checkpoint.permit) {
        settings.faults.push(Fault::new("checkpoint.permit", word, "unknown", valid));
    }
    let keys = ["checkpoint.dir", "checkpoint.resume"];
    settings.require(&keys, !checkpoint.resume || checkpoint.dir.is_some(), || {
        Fault::new(keys[1], true, "there is no folder to resume from", "set checkpoint.dir")
    });
}

/// Examples to fine-tune on: they are packed, and must not see each other.
fn check_examples(config: &Config, settings: &mut Settings) {
    let (objective, documents) = ("training.objective", "data.documents");
    let packed = config.training.objective != Objective::Pretrain;
    settings.require(&[objective, documents], !packed || config.data.documents == "attention", || {
        let problem = format!(
            "lets examples that share a sequence see each other, or learn across their boundary ({objective} = {})",
            config.training.objective
        );
        Fault::new(documents, &config.data.documents, problem, "use attention, or leave it out")
    });
}

/// Pairs of answers: what a model that learns from them must have, and must not.
fn check_pairs(config: &Config, settings: &mut Settings) {
    if config.training.objective != Objective::Dpo {
        return;
    }
    let (objective, smoothing) = ("training.objective", config.dpo.label_smoothing);
    settings.require(&[objective, "lora.rank"], config.lora.rank > 0, || {
        let problem =
            "compares the model with its frozen weights, and without adapters nothing is frozen (lora.rank = 0)";
        Fault::new(objective, "dpo", problem, "set lora.rank, such as 8")
    });
    settings.require(&[objective, "dpo.label_smoothing"], smoothing < 0.5, || {
        let problem = "takes more pairs to be the wrong way round than not";
        Fault::new("dpo.label_smoothing", smoothing, problem, "use a share below 0.5")
    });
    let schedule = "pipeline.schedule";
    settings.require(&[objective, schedule], !config.names_asynchronous(), || {
        let problem = "never empties its pipeline, and each step of training.objective = dpo begins with a pass of the frozen model";
        Fault::new(schedule, &config.pipeline.schedule, problem, "use a synchronous schedule")
    });
}

/// A sliding window of a class of `transformers` that has none.
fn check_export(config: &Config, settings: &mut Settings) {
    let Some(folder) = &config.checkpoint.export else { return };
    let keys = ["model.kind", "model.sliding_window"];
    settings.require(&keys, config.model.kind == ModelKind::Llama || config.model.sliding_window == 0, || {
        let problem = "a GPT2LMHeadModel has no sliding window".to_owned();
        Fault::new("checkpoint.export", folder, problem, "leave it out, or use model.sliding_window = 0")
    });
}

/// Settings of CUDA without such a device.
fn check_device(config: &Config, settings: &mut Settings) {
    let (device, cuda) = (config.device, &config.cuda);
    for (key, on, why) in [
        ("cuda.graphs", cuda.graphs, "has no graphs"),
        ("cuda.launch_blocking", cuda.launch_blocking, "waits for each kernel anyway"),
    ] {
        settings.require(&[key], !on || device != Device::Cpu, || {
            let problem = format!("--device cpu {why}: its kernels are done when they return");
            Fault::new(key, true, problem, "use --device cuda or cuda-emulated, or false")
        });
    }
    if let (Some(table), Device::Cpu | Device::Card(_)) = (&cuda.tuning, device) {
        let problem = format!("--device {device} runs no kernels of CUDA");
        let valid = "use --device cuda or cuda-emulated, or leave it out";
        settings.faults.push(Fault::new("cuda.tuning", table, problem, valid));
    }
}
