//! From settings to a whole configuration: presets, derived defaults, the mesh string.

use meshwork_core::pool;
use meshwork_pipeline::{Generator, by_name};
use serde::de::DeserializeOwned;
use std::ffi::OsString;
use toml::Value;

use super::Config;
use super::batch::Wish;
use super::check::check;
use super::cli::Args;
use super::fault::{Fault, choose_from};
use super::mesh::{AXES, parse_mesh};
use super::partition;
use super::preset::{self, preset};
use super::schedule;
use super::sections::*;
use super::settings::Settings;
use super::size;

/// The whole configuration, with every fault noted in the settings that come back. Where there is one, the
/// configuration must not be run; values at fault hold their defaults.
pub(crate) fn resolve(args: &Args, mut settings: Settings) -> (Config, Settings) {
    settings.faults.extend(args.faults.iter().cloned());
    if let Some(path) = &args.config {
        settings.read_file(path);
    }
    for (key, raw, flag) in &args.assignments {
        settings.assign(key, raw, flag);
    }
    if let Some(text) = &args.mesh {
        merge_mesh(&mut settings, text);
    }
    let device = device(&mut settings, args.device.as_deref());
    let mut config = typed(&settings, device);
    distrust_derived(&mut settings);
    check(&mut config, &mut settings);
    schedule::settle(&mut config, &mut settings);
    partition::deal(&mut config, &mut settings);
    cut_batch(&mut config, &mut settings);
    size::check(&config, &mut settings);
    settings.faults.extend(thread_fault(std::env::var_os(pool::THREADS_VARIABLE)));
    partition::weigh(&mut config, &mut settings);
    (config, settings)
}

/// What is wrong with the number of threads, which the environment gives.
fn thread_fault(value: Option<OsString>) -> Option<Fault> {
    let value = value?.to_string_lossy().into_owned();
    let sound = value.parse::<usize>().is_ok_and(|threads| threads > 0);
    (!sound).then(|| Fault::new(pool::THREADS_VARIABLE, value, "no number of threads", "a whole number of at least 1"))
}

/// What is worked out from a value at fault is not to be trusted either.
fn distrust_derived(settings: &mut Settings) {
    let by_preset = preset::KEYS.map(|key| ("model.preset", key));
    let others = [("model.hidden_size", "model.ffn_hidden_size"), ("model.num_heads", "model.num_kv_heads")];
    for (from, key) in by_preset.into_iter().chain(others) {
        if !settings.sound(&[from]) && settings.given::<Value>(key).is_none() {
            settings.distrust(key);
        }
    }
}

/// The mesh string is the whole mesh: axes that it does not name have degree 1.
fn merge_mesh(settings: &mut Settings, text: &str) {
    let degrees = match parse_mesh(text) {
        Ok(degrees) => degrees,
        Err(mut faults) => {
            AXES.iter().for_each(|axis| settings.distrust(&format!("parallelism.{axis}")));
            return settings.faults.append(&mut faults);
        }
    };
    for (axis, degree) in AXES.into_iter().zip(degrees) {
        let key = format!("parallelism.{axis}");
        match settings.given::<usize>(&key) {
            Some(other) if other != degree => {
                let unnamed = if degree == 1 { " (axes not named are 1)" } else { "" };
                settings.fault(
                    &key,
                    other,
                    format!("conflicts with --mesh {text}, where {axis} is {degree}{unnamed}"),
                    format!("use one of the two, or {axis} = {degree}"),
                );
            }
            _ => match i64::try_from(degree) {
                Ok(degree) => {
                    settings.insert("parallelism", axis, Value::Integer(degree), &format!(" (from --mesh {text})"));
                }
                Err(_) => {
                    settings.fault("--mesh", text, format!("{axis} is too large"), "use as many ranks as you have")
                }
            },
        }
    }
}

fn device(settings: &mut Settings, name: Option<&str>) -> Device {
    match name {
        None | Some("cpu") => {}
        Some("cuda") => settings.fault("--device", "cuda", "has not landed yet", "use cpu"),
        Some(other) => settings.fault("--device", other, "unknown device", choose_from(other, &["cpu"])),
    }
    Device::Cpu
}

/// The value of a key that has a fixed default.
fn fixed<T: DeserializeOwned>(settings: &Settings, key: &str) -> T {
    // The key table holds its own types to be right; a test reads every key this way.
    settings.get(key).unwrap_or_else(|| unreachable!("{key} has no default of its type in the key table"))
}

fn typed(settings: &Settings, device: Device) -> Config {
    // One macro so that each line below reads as the key that it is.
    macro_rules! get {
        ($key:literal) => {
            fixed(settings, $key)
        };
        ($key:literal, $derived:expr) => {
            settings.get($key).unwrap_or($derived)
        };
    }
    let name: String = get!("model.preset");
    let preset = preset(&name);
    let hidden_size = get!("model.hidden_size", preset.hidden_size);
    let num_heads = get!("model.num_heads", preset.num_heads);
    let steps = get!("training.steps");
    let schedule: String = get!("pipeline.schedule");
    Config {
        model: Model {
            preset: name,
            kind: get!("model.kind"),
            vocab_size: get!("model.vocab_size", preset.vocab_size),
            num_layers: get!("model.num_layers", preset.num_layers),
            hidden_size,
            num_heads,
            num_kv_heads: get!("model.num_kv_heads", num_heads),
            ffn_hidden_size: get!("model.ffn_hidden_size", hidden_size.saturating_mul(4)),
            seq_len: get!("model.seq_len", preset.seq_len),
            tie_embeddings: get!("model.tie_embeddings"),
            dropout: get!("model.dropout"),
            init_from: settings.get("model.init_from"),
        },
        parallelism: Parallelism {
            dp: get!("parallelism.dp"),
            tp: get!("parallelism.tp"),
            pp: get!("parallelism.pp"),
            cp: get!("parallelism.cp"),
            ep: get!("parallelism.ep"),
            sequence_parallel: get!("parallelism.sequence_parallel"),
            zero_stage: get!("parallelism.zero_stage"),
            context_parallel_method: get!("parallelism.context_parallel_method"),
            expert_tensor_parallel: get!("parallelism.expert_tensor_parallel"),
        },
        pipeline: Pipeline {
            virtual_stages: get!(
                "pipeline.virtual_stages",
                by_name(&schedule).map_or(1, Generator::default_virtual_stages)
            ),
            schedule,
            num_microbatches: get!("pipeline.num_microbatches", 1),
            partition: Vec::new(), // dealt once all else is known
            scatter_gather: get!("pipeline.scatter_gather"),
            vertical_sync: get!("pipeline.vertical_sync"),
            replication: settings.given("pipeline.replication").unwrap_or_default(),
            schedule_file: settings.get("pipeline.schedule_file"),
            own_schedule: None, // read once all else is known
        },
        training: Training {
            steps,
            global_batch_size: get!("training.global_batch_size"),
            micro_batch_size: get!("training.micro_batch_size", 1),
            seed: get!("training.seed"),
            dtype: get!("training.dtype"),
            max_norm: get!("training.max_norm"),
            numerics: get!("training.numerics"),
        },
        optimizer: Optimizer {
            name: get!("optimizer.name"),
            lr: get!("optimizer.lr"),
            beta1: get!("optimizer.beta1"),
            beta2: get!("optimizer.beta2"),
            eps: get!("optimizer.eps"),
            weight_decay: get!("optimizer.weight_decay"),
            momentum: get!("optimizer.momentum"),
        },
        lr_scheduler: LrScheduler {
            warmup_steps: get!("lr_scheduler.warmup_steps"),
            decay: get!("lr_scheduler.decay"),
            decay_steps: get!("lr_scheduler.decay_steps", steps),
            min_lr_factor: get!("lr_scheduler.min_lr_factor"),
        },
        data: Data {
            path: settings.get("data.path"),
            tokenizer: get!("data.tokenizer"),
            shuffle: get!("data.shuffle"),
        },
        validation: Validation {
            every: get!("validation.every"),
            steps: get!("validation.steps"),
            fraction: get!("validation.fraction"),
        },
        memory: Memory {
            recompute: get!("memory.recompute"),
            offload: get!("memory.offload"),
            limit_bytes: get!("memory.limit_bytes"),
        },
        checkpoint: Checkpoint {
            dir: settings.get("checkpoint.dir"),
            every: get!("checkpoint.every"),
            keep: get!("checkpoint.keep"),
            resume: get!("checkpoint.resume"),
            export: settings.get("checkpoint.export"),
        },
        metrics: Metrics {
            profile: get!("metrics.profile"),
            profile_steps: get!("metrics.profile_steps"),
            trace: get!("metrics.trace"),
            schedule: get!("metrics.schedule"),
            layer_profile: settings.get("metrics.layer_profile"),
        },
        comm: Comm { timeout_seconds: get!("comm.timeout_seconds") },
        numerics: Numerics { leaves: get!("numerics.leaves") },
        device,
        notices: Vec::new(),
    }
}

/// Works out the cut of the global batch, where all that it reads is sound.
fn cut_batch(config: &mut Config, settings: &mut Settings) {
    let keys = [
        "training.global_batch_size",
        "parallelism.dp",
        "parallelism.pp",
        "pipeline.schedule",
        "pipeline.virtual_stages",
        "pipeline.num_microbatches",
        "training.micro_batch_size",
    ];
    // A schedule for stages that got no layers dealt is no schedule, and may be absurdly long.
    if !settings.sound(&keys) || config.pipeline.partition.is_empty() {
        return;
    }
    let own = config.pipeline.own_schedule.as_ref().map(|own| own.micros);
    let schedule = match by_name(&config.pipeline.schedule) {
        // One of the user's own takes its number of micro-batches and no other, which is given below.
        _ if own.is_some() => Generator::Gpipe,
        Ok(schedule) => schedule,
        Err(error) => {
            let valid = format!("use {}", error.known.join(" or "));
            return settings.fault(keys[3], &error.name, error.to_string(), valid);
        }
    };
    let wish = Wish {
        global_batch_size: config.training.global_batch_size,
        dp: config.parallelism.dp,
        pp: config.parallelism.pp,
        schedule,
        virtual_stages: config.pipeline.virtual_stages,
        num_microbatches: own.or(settings.given(keys[5])),
        micro_batch_size: settings.given(keys[6]),
    };
    match wish.cut() {
        Ok(cut) => {
            config.pipeline.num_microbatches = cut.num_microbatches;
            config.training.micro_batch_size = cut.micro_batch_size;
            config.notices.extend(cut.notice);
            schedule::check_replicas(config, settings);
        }
        Err(mut faults) => settings.faults.append(&mut faults),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_threads_that_is_none_is_a_fault() {
        for sound in [None, Some("1"), Some("64")] {
            assert_eq!(thread_fault(sound.map(OsString::from)), None);
        }
        for wrong in ["0", "-1", "two", ""] {
            let fault = thread_fault(Some(wrong.into())).unwrap().to_string();
            assert!(fault.ends_with("no number of threads; a whole number of at least 1"), "{fault}");
        }
    }
}
