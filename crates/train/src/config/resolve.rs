//! From settings to a whole configuration: presets, derived defaults, the mesh string.

use super::batch::BatchRequest;
use super::check::check;
use super::cli::Args;
use super::device::Device;
use super::fault::Fault;
use super::mesh::{AXES, parse_mesh};
use super::preset::{self, Moe, preset};
use super::settings::Settings;
use super::words::{Dtype, ModelKind, MoeRouter, Objective};
use super::{Config, compress, conditions, context, experts, lora, mixed, partition, pretrained, schedule, size, zero};
use meshwork_core::{pool, simd};
use meshwork_pipeline::{Generator, by_name};
use std::ffi::OsString;
use std::path::Path;
use toml::Value;

/// The whole configuration. The returned settings have every fault. If there is one, the configuration must not be run;
/// values at fault have their defaults.
pub(crate) fn resolve(args: &Args, mut settings: Settings) -> (Config, Settings) {
    settings.faults.extend(args.faults.iter().cloned());
    settings.read_args(args);
    if let Some(text) = &args.mesh {
        merge_mesh(&mut settings, text);
    }
    let device = device(&mut settings, args.device.as_deref());
    derive(&mut settings);
    let mut config = Config::read(&settings, device);
    config.comm.ranks = args.ranks;
    // The file, also where its folder is given: other parts copy and compare it.
    let inside = Path::new(&config.data.tokenizer).join("tokenizer.json");
    if !["bytes", "gpt2"].contains(&&*config.data.tokenizer) && inside.is_file() {
        config.data.tokenizer = inside.display().to_string();
    }
    config.data.tokenizer_given = settings.given::<String>("data.tokenizer").is_some();
    context::resolve(&mut config, &settings);
    check(&config, &mut settings);
    experts::check(&config, &mut settings);
    lora::check(&config, &mut settings);
    zero::check(&config, &mut settings);
    compress::check(&config, &mut settings);
    mixed::check(&config, &mut settings);
    conditions::notice(&mut config, &settings);
    schedule::resolve(&mut config, &mut settings);
    partition::resolve(&mut config, &mut settings);
    split_batch(&mut config, &mut settings);
    size::check(&config, &mut settings);
    settings.faults.extend(thread_fault(std::env::var_os(pool::THREADS_VARIABLE)));
    settings.faults.extend(simd_fault(std::env::var_os(simd::SIMD_VARIABLE)));
    partition::resolve_by_cost(&mut config, &mut settings);
    partition::check_recompute(&config, &mut settings);
    compress::check_values(&config, &mut settings);
    (config, settings)
}

/// The fault of the number of threads, which is an environment variable.
fn thread_fault(value: Option<OsString>) -> Option<Fault> {
    let value = value?.to_string_lossy().into_owned();
    let sound = value.parse::<usize>().is_ok_and(|threads| threads > 0);
    (!sound).then(|| Fault::new(pool::THREADS_VARIABLE, value, "no number of threads", "a whole number of at least 1"))
}

/// The fault of the vector instructions to use, which is one too.
fn simd_fault(value: Option<OsString>) -> Option<Fault> {
    let value = simd::Level::named(value).err()?.value;
    let problem = "no vector instructions of that name";
    Some(Fault::new(simd::SIMD_VARIABLE, value.to_string_lossy(), problem, "use portable, avx2 or avx512"))
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
                let problem = format!("conflicts with --mesh {text}, where {axis} is {degree}{unnamed}");
                settings.fault(&key, other, problem, format!("use one of the two, or {axis} = {degree}"));
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
    let device = name.map_or(Ok(Device::Cpu), Device::parse);
    device.unwrap_or_else(|fault| {
        settings.faults.push(fault);
        Device::Cpu
    })
}

/// Computes the defaults that depend on other keys.
pub(super) fn derive(settings: &mut Settings) {
    const PRESET: &[&str] = &["model.preset"];
    let preset = preset(&settings.get::<String>("model.preset"));
    settings.derive("compress.aqsgd_samples", &[], int(1)); // until the data are read
    settings.derive("data.tokenizer", &[], "bytes");
    let packed = settings.get::<Objective>("training.objective") != Objective::Pretrain;
    settings.derive("data.documents", &["training.objective"], if packed { "attention" } else { "stream" });
    let method = if settings.get::<usize>("parallelism.cp") > 1 { "all_gather" } else { "none" };
    settings.derive("parallelism.context_parallel_method", &["parallelism.cp"], method);
    settings.derive("parallelism.ring_degree", &[], int(1)); // until the heads are known
    settings.derive("model.kind", PRESET, preset.kind.name());
    settings.derive("model.vocab_size", PRESET, int(preset.vocab_size));
    settings.derive("model.num_layers", PRESET, int(preset.num_layers));
    settings.derive("model.hidden_size", PRESET, int(preset.hidden_size));
    settings.derive("model.num_heads", PRESET, int(preset.num_heads));
    settings.derive("model.seq_len", PRESET, int(preset.seq_len));
    let [window, tokens, cp] =
        ["model.sliding_window", "model.seq_len", "parallelism.cp"].map(|key| settings.get::<usize>(key));
    let order = if window > 0 && window <= tokens / cp.max(1) { "contiguous" } else { "zigzag" };
    settings.derive("parallelism.context_parallel_order", &["model.sliding_window"], order);

    let kind: ModelKind = settings.get("model.kind");
    let (hidden_size, num_heads) = (settings.get("model.hidden_size"), settings.get("model.num_heads"));
    // From a preset of the other kind, only the sizes that both kinds have are used.
    let llama = preset.llama.filter(|_| kind == ModelKind::Llama);
    let kv_heads = llama.map_or(num_heads, |llama| llama.num_kv_heads);
    let ffn = match llama {
        Some(llama) if hidden_size == preset.hidden_size => llama.ffn_hidden_size,
        _ => preset::ffn_hidden_size(kind, hidden_size),
    };
    settings.derive("model.num_kv_heads", &["model.preset", "model.kind", "model.num_heads"], int(kv_heads));
    settings.derive("model.ffn_hidden_size", &["model.preset", "model.kind", "model.hidden_size"], int(ffn));
    settings.derive("model.tie_embeddings", &["model.kind"], kind == ModelKind::Gpt2);
    settings.derive("model.rope_theta", PRESET, llama.map_or(preset::ROPE_THETA, |llama| llama.rope_theta));

    derive_experts(settings, preset.moe);
    settings.derive("checkpoint.export_dtype", &[], Dtype::F32.name());
    pretrained::derive(settings);
    lora::derive(settings);
    mixed::derive(settings);

    let steps: Value = settings.get("training.steps");
    settings.derive("lr_scheduler.decay_steps", &["training.steps"], steps);
    let schedule = by_name(&settings.get::<String>("pipeline.schedule"));
    let virtual_stages = schedule.map_or(1, Generator::default_virtual_stages);
    settings.derive("pipeline.virtual_stages", &["pipeline.schedule"], int(virtual_stages));
    // `split_batch` computes these once everything else is known.
    settings.derive("pipeline.num_microbatches", &[], 1);
    settings.derive("training.micro_batch_size", &[], 1);
}

/// The keys of `[moe]`, by preset, router and width.
fn derive_experts(settings: &mut Settings, preset: Option<Moe>) {
    let by = |key| ["model.preset", key];
    let moe = preset.unwrap_or(preset::DENSE);
    settings.derive("moe.num_experts", &["model.preset"], int(moe.num_experts));
    settings.derive("moe.router", &["model.preset"], moe.router.name());
    let router: MoeRouter = settings.get("moe.router");
    let of_preset = preset.is_some() && router == moe.router;
    let by_router = by("moe.router");
    let top_k = match router {
        MoeRouter::Switch => 1,
        MoeRouter::Gshard => 2,
        _ => moe.top_k,
    };
    settings.derive("moe.top_k", &by_router, int(top_k));
    let aux_loss = match router {
        _ if of_preset => moe.aux_loss_coeff,
        MoeRouter::Bias | MoeRouter::ExpertChoice => 0.0,
        _ => 0.01,
    };
    settings.derive("moe.aux_loss_coeff", &by_router, aux_loss);
    settings.derive("moe.bias_update_rate", &by_router, if router == MoeRouter::Bias { 0.001 } else { 0.0 });
    settings.derive("moe.capacity_factor", &["model.preset"], moe.capacity_factor);
    settings.derive("moe.every_n_layers", &["model.preset"], int(moe.every_n_layers));
    settings.derive("moe.num_shared_experts", &["model.preset"], int(moe.num_shared_experts));
    let ffn: usize = settings.get("model.ffn_hidden_size");
    let width = preset.map_or(ffn, |moe| moe.expert_hidden_size);
    settings.derive("moe.expert_hidden_size", &by("model.ffn_hidden_size"), int(width));
    settings.derive("moe.num_groups", &["model.preset"], int(moe.groups[0]));
    let groups: usize = settings.get("moe.num_groups");
    let top_groups = if groups == moe.groups[0] { moe.groups[1] } else { groups };
    settings.derive("moe.top_groups", &by("moe.num_groups"), int(top_groups));
    settings.derive("moe.routed_scaling", &["model.preset"], moe.routed_scaling);
}

fn int(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Computes the split of the global batch, if all keys that it reads are valid.
fn split_batch(config: &mut Config, settings: &mut Settings) {
    let keys = [
        "training.global_batch_size",
        "parallelism.dp",
        "parallelism.pp",
        "pipeline.schedule",
        "pipeline.virtual_stages",
        "pipeline.num_microbatches",
        "training.micro_batch_size",
    ];
    // If the stages have no layers, the number of stages is at fault, and their schedule could be absurdly long.
    if !settings.sound(&keys) || config.pipeline.partition.is_empty() {
        return;
    }
    let own = config.pipeline.own_schedule.as_ref().map(|own| own.micros);
    let schedule = match by_name(&config.pipeline.schedule) {
        // A schedule of the user's own fixes its stages and the number of micro-batches, which is passed below.
        _ if own.is_some() => Generator::Gpipe,
        Ok(schedule) => schedule,
        Err(error) => {
            let valid = format!("use {}", error.known.join(" or "));
            return settings.fault(keys[3], &error.name, error.to_string(), valid);
        }
    };
    let request = BatchRequest {
        global_batch_size: config.training.global_batch_size,
        dp: config.parallelism.dp,
        pp: config.parallelism.pp,
        schedule,
        virtual_stages: if own.is_some() { 1 } else { config.pipeline.virtual_stages },
        num_microbatches: own.or(settings.given(keys[5])),
        micro_batch_size: settings.given(keys[6]),
    };
    match request.split() {
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

    #[test]
    fn vector_instructions_that_do_not_exist_are_a_fault() {
        for sound in [None, Some("portable"), Some("avx2"), Some("avx512")] {
            assert_eq!(simd_fault(sound.map(OsString::from)), None);
        }
        let fault = simd_fault(Some("sse".into())).unwrap().to_string();
        assert_eq!(fault, "MESHWORK_SIMD = sse: no vector instructions of that name; use portable, avx2 or avx512");
    }
}
