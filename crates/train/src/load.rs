//! From the command line to the configuration and data of a run, with all faults in one report.

use crate::checkpoint::export;
use crate::checkpoint::room::Room;
use crate::config::{Args, Config, ConfigError, Device, Fault, Settings, fault_of_base, resolve};
use crate::data::{self, Data};
use crate::machine::{Left, Machine};
use crate::numbers::size;
use crate::{devices, metrics, plan_memory, predict, processes, replay};
use meshwork_engine::offload::OffloadError;
use meshwork_engine::slow_build_warning;
use std::fs;
use std::path::{Path, PathBuf};

/// The configuration and the data of a command line, and a check that the metrics can be written.
///
/// # Errors
/// Every fault of the flags, the file, the data and the metrics path, all at once.
///
/// ```
/// use meshwork_train::{config::Args, load};
///
/// let (config, data) = load(&Args::parse(["--mesh", "dp=2", "--steps", "3"]))?;
/// let batch = data.batch(0, config.training.global_batch_size, 0..8).unwrap(); // the rows of dp rank 0
/// assert_eq!(batch.values::<i32>("tokens").unwrap().len(), 8 * 128);
///
/// let error = load(&Args::parse(["--mesh", "dp=0", "--data", "no/such/file"])).unwrap_err();
/// assert_eq!(error.faults.len(), 2);
/// # Ok::<(), meshwork_train::config::ConfigError>(())
/// ```
pub fn load(args: &Args) -> Result<(Config, Data), ConfigError> {
    let (mut config, mut settings) = resolve(args, Settings::default());
    let (metrics, profile) = (&config.metrics, config.metrics.profile);
    let pipeline = profile && config.parallelism.pp > 1;
    let of_profile = |key: &'static str, path: &str, written: bool| {
        (written && settings.sound(&[key])).then(|| (key, Path::new(path).to_owned()))
    };
    let written: Vec<(&str, PathBuf)> = [
        args.metrics.as_ref().map(|path| ("--metrics", path.clone())),
        of_profile("metrics.trace", &metrics.trace, profile),
        of_profile("metrics.schedule", &metrics.schedule, pipeline),
        metrics.layer_profile.as_ref().and_then(|path| of_profile("metrics.layer_profile", path, true)),
    ]
    .into_iter()
    .flatten()
    .collect();
    for (at, (key, path)) in written.iter().enumerate() {
        settings.faults.extend(metrics::check(key, path).err());
        settings.faults.extend(overwritten(key, path, args, &config));
        if let Some((other, _)) = written[..at].iter().find(|(_, other)| other == path) {
            settings.fault(key, path.display(), format!("is the file of {other} too"), "use another file");
        }
    }
    settings.faults.extend(folder_of_checkpoints(&config));
    settings.faults.extend(folder_of_offload(&config));
    settings.faults.extend(if settings.sound(&["model.init_from"]) { export::fault(&config) } else { None });
    processes::launch(&mut config, &mut settings);
    let data = if settings.sound(&DATA) { open(&config, &mut settings) } else { None };
    if let Some(data) = &data {
        count_samples(&mut config, data, &mut settings);
        settings.faults.extend(if settings.faults.is_empty() { export::fault_of_files(&config, data) } else { None });
    }
    settings.faults.extend(if settings.faults.is_empty() { fault_of_base(&config) } else { None });
    settings.faults.extend(if settings.faults.is_empty() { replay::fault(&config) } else { None });
    let trains = config.training.steps > 0 && !args.plan_memory;
    if trains && settings.faults.is_empty() {
        let checks: [fn(&Config) -> Option<Fault>; 4] =
            [too_large, plan_memory::too_large, devices::missing, devices::lacking];
        settings.faults.extend(checks.iter().find_map(|check| check(&config)));
    }
    if trains && settings.faults.is_empty() {
        match Room::from_config(&config).map(|room| room.map_or(Ok(None), |room| room.check(&config))) {
            Ok(Ok(notice)) => config.notices.extend(notice),
            Ok(Err(fault)) => settings.faults.push(fault),
            Err(_) => {} // the run says what does not fit, on the rank where
        }
    }
    match data {
        Some(data) if settings.faults.is_empty() => {
            config.notices.extend_from_slice(data.notices());
            let computes = trains && config.device == Device::Cpu;
            config.notices.extend(computes.then(slow_build_warning).flatten().map(str::to_owned));
            Ok((config, data))
        }
        _ => Err(ConfigError { faults: settings.faults }),
    }
}

/// The keys by which data is read.
const DATA: [&str; 15] = [
    "data.path",
    "data.sources",
    "data.format",
    "data.text_key",
    "data.skip_bad_lines",
    "data.token_type",
    "data.tokenizer",
    "data.end_of_text",
    "data.beginning_of_text",
    "data.documents",
    "data.cache_dir",
    "data.chat_template",
    "data.date",
    "data.overlong",
    "training.objective",
];

/// The fault of metrics or a timeline that would replace a file that the run reads.
fn overwritten(key: &str, written: &Path, args: &Args, config: &Config) -> Option<Fault> {
    let target = fs::canonicalize(written).ok().filter(|path| path.is_file())?;
    let read = [
        ("--config", args.config.as_deref()),
        ("data.path", config.data.path.as_deref().map(Path::new)),
        ("data.tokenizer", Some(Path::new(&config.data.tokenizer))),
    ];
    let sources = config.data.sources.iter().map(|entry| ("data.sources", Some(Path::new(data::split(entry).0))));
    // A file inside a folder of data is read as well.
    let reads = |path: Option<&Path>| {
        path.and_then(|path| fs::canonicalize(path).ok()).is_some_and(|path| target.starts_with(path))
    };
    let (reader, _) = read.into_iter().chain(sources).find(|(_, path)| reads(*path))?;
    let problem = format!("would replace what {reader} reads");
    Some(Fault::new(key, written.display(), problem, "use another file"))
}

/// The fault of a folder in which no file for offloaded tensors can be made.
fn folder_of_offload(config: &Config) -> Option<Fault> {
    let offload = config.memory.offload().filter(|_| config.training.steps > 0)?;
    let problem = match offload.to?.open(0).err()? {
        OffloadError::Open { source, .. } => format!("no file can be made there: {source}"),
        other => other.to_string(),
    };
    let dir = config.memory.offload_dir.as_deref().unwrap_or_default();
    Some(Fault::new("memory.offload_dir", dir, problem, "name a folder that exists and that this process may write"))
}

/// The fault of a folder of checkpoints that a run would mix its own into, or that cannot be read.
fn folder_of_checkpoints(config: &Config) -> Option<Fault> {
    let (key, dir) = ("checkpoint.dir", config.checkpoint.dir.as_deref()?);
    match meshwork_checkpoint::steps(Path::new(dir)) {
        Err(error) => Some(Fault::new(key, dir, format!("cannot be read: {error}"), "use a folder")),
        Ok(steps) if steps.is_empty() || config.checkpoint.resume => None,
        Ok(steps) => {
            let problem = format!("has checkpoints of another run, up to step {}", steps[0]);
            Some(Fault::new(key, dir, problem, "use checkpoint.resume = true to go on from them, or another folder"))
        }
    }
}

/// Bytes of a rank beside its tensors: its thread's stack, its plans and its ends of groups, as `benches/README.md`
/// measures them.
const RANK_BYTES: u128 = 384 << 10;
/// Bytes that each rank has of every other one: the report of a step on each rank's memory and input, sent and
/// received.
const PEER_BYTES: u128 = 192;
/// Address space of the stack of a thread, which takes memory only as far as it is used.
const STACK_BYTES: u128 = 2 << 20;

/// The fault of a run that needs more threads or memory than this process may take.
fn too_large(config: &Config) -> Option<Fault> {
    let mesh = &config.parallelism;
    let mesh = mesh.degrees();
    let fault = |problem: String, valid: &str| Some(Fault::new("parallelism", &mesh, problem, valid));
    let machine = Machine::here();
    let ranks = config.mesh().map_or(1, |mesh| mesh.world_size()) as u128;
    // Where checkpoints are written, each rank has a second thread for it.
    let here = config.ranks_here() as u128;
    let threads = here * if config.checkpoint.dir.is_some() { 2 } else { 1 };
    if let Some(Left { amount, whose }) = machine.threads().filter(|left| threads > left.amount) {
        let problem = format!("{here} ranks take {threads} threads, and {whose} {amount}");
        return fault(problem, "use fewer ranks, or raise the limit; --steps 0 reports on any mesh");
    }
    let tensors = match predict::world_bytes(config) {
        Ok(tensors) => tensors,
        Err(error) => return fault(format!("no such step: {error}"), "use another mesh"),
    };
    let on_host = !matches!(config.device, Device::Cuda(_) | Device::Card(_));
    let needed = (if on_host { tensors * here / ranks.max(1) } else { 0 })
        .saturating_add(here * RANK_BYTES)
        .saturating_add(here * ranks * PEER_BYTES);
    let space = needed.saturating_add(threads * STACK_BYTES);
    let memory = machine.memory().filter(|left| needed > left.amount).map(|left| (needed, left));
    let (needed, Left { amount, whose }) =
        memory.or_else(|| machine.address_space().filter(|left| space > left.amount).map(|left| (space, left)))?;
    let (needed, amount) = (size(needed as f64), size(amount as f64));
    let problem = format!("all ranks together need {needed}, {whose} {amount}");
    fault(problem, "use a smaller model or micro_batch_size, or fewer ranks; --steps 0 reports on any size")
}

/// Takes the number of samples from the data, and appends the notice of a run in which none comes again.
fn count_samples(config: &mut Config, data: &Data, settings: &mut Settings) {
    if !config.compress.aqsgd {
        return;
    }
    let (all, epoch) = (data.distinct_samples(), data.training_samples());
    let steps = config.training.steps;
    let taken = steps.saturating_mul(config.training.global_batch_size as u64);
    let key = "compress.aqsgd_samples";
    match settings.given::<usize>(key) {
        None => config.compress.aqsgd_samples = all,
        Some(given) if given < all => {
            settings.fault(key, given, format!("the data have {all} samples"), format!("use {all}"));
        }
        Some(_) => {}
    }
    // The samples may come again in a later part of the run.
    if steps > 0 && taken <= epoch as u64 {
        config.notices.push(format!(
            "compress.aqsgd: no sample comes again in this part of the run, so every activation is sent as without it: {steps} steps take \
             {taken} of {epoch} samples"
        ));
    }
}

/// Opens the data, and checks it against the model only if the keys that this reads are sound.
fn open(config: &Config, settings: &mut Settings) -> Option<Data> {
    let keys = ["model.vocab_size", "model.seq_len", "validation.every", "validation.fraction"];
    let data = data::read(config)
        .and_then(|sources| if settings.sound(&keys) { Data::new(sources, config).map(Some) } else { Ok(None) });
    data.unwrap_or_else(|mut faults| {
        settings.faults.append(&mut faults);
        None
    })
}
