//! Metrics: one JSON object per line, in full precision.
//!
//! ```text
//! {"event":"start","version":"0.1.0","mesh":{"dp":2,..},"parameters":820736,"data_hash":"..","memory_predicted":[{"parameters":..,..},..],"config":{..}}
//! {"event":"step","step":1,"loss":5.54,"grad_norm":..,"lr":..,"step_ms":..,"tokens_per_s":..,"comm_bytes":{..},"offload":{"read":..,"written":..,"wait_ms":..},"peak_bytes":[..],"compute_ms":[..],"wait_ms":[..]}
//! {"event":"validation","step":..,"loss":..}
//! {"event":"end","steps":..,"loss":..,"seconds":..,"memory_measured":[{"parameters":..,..},..],"launches":{"first_step":{"asked":..,..},"last_step":{..}}}
//! ```
//! JSON has no infinities and no NaN: such a number is written as `null`.

use crate::config::{AXES, Config, Fault};
use crate::error::OutputError;
pub use crate::rewards::Rewards;
use meshwork_engine::{Offloaded, ReportedStatistic};
use meshwork_models::experts::{TOKENS, imbalance};
use meshwork_tensor::{Launches, MemoryUse};
use serde::de::IgnoredAny;
use serde::{Serialize, Serializer};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

const WHAT: &str = "metrics";

/// The content of a line.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event<'a> {
    /// The first line: the configuration of the run.
    Start(Start<'a>),
    /// One training step.
    Step(Step),
    /// One validation.
    Validation {
        /// The last step before it.
        step: u64,
        /// Mean over all unmasked tokens.
        loss: f64,
        /// The loss with uncompressed activations between stages, with `validation.compression = "both"`.
        #[serde(skip_serializing_if = "Option::is_none")]
        loss_uncompressed: Option<f64>,
        /// The rewards of held-out pairs of answers.
        #[serde(skip_serializing_if = "Option::is_none")]
        dpo: Option<Rewards>,
    },
    /// The last line: how the run ended.
    End {
        /// Steps that were trained.
        steps: u64,
        /// Loss of the last step that had one.
        loss: Option<f64>,
        /// Steps of this part of the run that were skipped because every target of their batch is masked.
        #[serde(skip_serializing_if = "is_zero")]
        masked_steps: u64,
        /// Wall time from start to end.
        seconds: f64,
        /// The holders of each world rank's memory when most bytes were alive.
        #[serde(serialize_with = "by_category")]
        memory_measured: Vec<MemoryUse>,
        /// How rank 0 queued work, with `cuda.graphs`.
        #[serde(skip_serializing_if = "Option::is_none")]
        launches: Option<StepLaunches>,
    },
}

/// How the device of rank 0 queued work in two steps of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepLaunches {
    /// The first step: nothing was seen before.
    #[serde(serialize_with = "by_name")]
    pub first_step: Launches,
    /// The last one.
    #[serde(serialize_with = "by_name")]
    pub last_step: Launches,
}

impl StepLaunches {
    /// After one more step, in which `last_step` was queued.
    pub fn next(before: Option<Self>, last_step: Launches) -> Self {
        Self { first_step: before.map_or(last_step, |before| before.first_step), last_step }
    }
}

impl fmt::Display for StepLaunches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launches { asked, launches, graphs, changed, new, short, refused, .. } = self.last_step;
        write!(
            f,
            "rank 0 queued the last step by {launches} launches for {asked}: {graphs} graphs ({changed} of their kernels with new numbers), "
        )?;
        write!(f, "{new} not seen before, {short} too few between two waits, {refused} not captured")
    }
}

/// The configuration of a run.
#[derive(Debug, Serialize)]
pub struct Start<'a> {
    version: &'static str,
    /// Degree of each axis.
    #[serde(serialize_with = "map")]
    mesh: Vec<(&'static str, u64)>,
    /// Number of elements of all parameters, each counted once whatever the mesh.
    parameters: u64,
    /// Fingerprint of the token stream.
    data_hash: String,
    /// The predicted holders of each world rank's memory when most bytes are alive.
    #[serde(serialize_with = "by_category")]
    memory_predicted: Vec<MemoryUse>,
    /// Every key, resolved.
    config: &'a Config,
    /// The steps that were complete, where the run goes on from a checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    resumed: Option<u64>,
}

impl<'a> Start<'a> {
    /// The start of a run of `config` on data of this [hash](crate::Data::hash), and the memory that it is
    /// [predicted](crate::plan::memory) to take.
    pub fn new(config: &'a Config, parameters: u64, data_hash: String, memory_predicted: Vec<MemoryUse>) -> Self {
        let mesh = &config.parallelism;
        let degrees = [mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep];
        let mesh = AXES.into_iter().zip(degrees.map(|degree| degree as u64)).collect();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            mesh,
            parameters,
            data_hash,
            memory_predicted,
            config,
            resumed: None,
        }
    }

    /// The start of a run that goes on after `step` steps.
    #[must_use]
    pub fn resumed(self, step: Option<u64>) -> Self {
        Self { resumed: step, ..self }
    }
}

/// One training step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean over all unmasked tokens of the global batch.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Wall time of the step in milliseconds.
    pub step_ms: f64,
    /// Tokens of the global batch per second.
    pub tokens_per_s: f64,
    /// Bytes communicated per axis, averaged over ranks.
    #[serde(serialize_with = "map")]
    pub comm_bytes: Vec<(String, u64)>,
    /// Bytes to and from offload, where anything is offloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadTraffic>,
    /// Peak memory of each world rank.
    pub peak_bytes: Vec<u64>,
    /// Milliseconds in which each world rank did its own work, since its report before.
    pub compute_ms: Vec<f64>,
    /// Milliseconds in which it waited for communications.
    pub wait_ms: Vec<f64>,
    /// The factor of the loss before backward, where that is not 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Whether the step changed no weight: a gradient overflowed at this scale, or it is `masked`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Whether every target of the batch is masked, so that the loss has no mean.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub masked: bool,
    /// The report of the routers of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moe: Option<Experts>,
    /// The rewards of pairs of answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dpo: Option<Rewards>,
}

/// Bytes that the offload of a rank moved in one step, averaged over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OffloadTraffic {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Milliseconds in which a rank stood still until its files were read and written.
    pub wait_ms: f64,
}

impl OffloadTraffic {
    /// From the report of a step.
    pub fn from_report(Offloaded { read, written, waited }: Offloaded) -> Self {
        Self { read: read.round() as u64, written: written.round() as u64, wait_ms: waited * 1e3 }
    }
}

/// The report of the routers of experts of one step, over its global batch.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Experts {
    /// The largest number of tokens of an expert over the mean of all experts, as a mean over layers: 1 where they are
    /// even.
    pub load_imbalance: f64,
    /// The metrics of routers, without the prefix `moe_`: losses, summed over layers, and means over layers and tokens.
    #[serde(flatten, serialize_with = "map")]
    pub metrics: Vec<(&'static str, f64)>,
    /// The tokens of each expert, before any are dropped, by the name of the layer's router.
    #[serde(serialize_with = "by_layer")]
    pub tokens: Vec<(String, Vec<f64>)>,
}

impl Experts {
    /// From the report of a step; `None` of a model without experts.
    pub fn from_report(metrics: &[(&'static str, f64)], statistics: &[ReportedStatistic]) -> Option<Self> {
        let layer = |buffer: &str| buffer.rsplit_once('.').map_or(buffer, |(layer, _)| layer).to_owned();
        let loads = statistics.iter().filter(|statistic| statistic.name == TOKENS);
        let tokens: Vec<_> = loads.map(|load| (layer(&load.buffer), load.sums.clone())).collect();
        let metrics = metrics.iter().filter_map(|&(name, value)| Some((name.strip_prefix("moe_")?, value))).collect();
        let imbalances = tokens.iter().map(|(_, tokens)| imbalance(tokens)).sum::<f64>();
        (!tokens.is_empty()).then(|| Self { load_imbalance: imbalances / tokens.len() as f64, metrics, tokens })
    }
}

impl Step {
    /// Its numbers by the tags under which TensorBoard shows them.
    pub fn scalars(&self) -> Vec<(String, f64)> {
        let mut scalars = Vec::new();
        let mut add = |section: &str, name: &str, value: f64| scalars.push((format!("{section}/{name}"), value));
        if !self.masked {
            add("train", "loss", self.loss);
            add("train", "gradient_norm", self.grad_norm);
        }
        add("train", "learning_rate", self.lr);
        add("speed", "step_ms", self.step_ms);
        add("speed", "tokens_per_s", self.tokens_per_s);
        self.comm_bytes.iter().for_each(|(axis, bytes)| add("communication", axis, *bytes as f64));
        self.peak_bytes
            .iter()
            .enumerate()
            .for_each(|(rank, &bytes)| add("memory", &format!("rank {rank}"), bytes as f64));
        if let Some(moe) = &self.moe {
            add("moe", "load_imbalance", moe.load_imbalance);
            moe.metrics.iter().for_each(|&(name, value)| add("moe", name, value));
        }
        for (name, value) in self.dpo.into_iter().flat_map(Rewards::scalars) {
            add("rewards", name, value);
        }
        self.loss_scale.iter().for_each(|&scale| add("train", "loss_scale", scale));
        if let Some(OffloadTraffic { read, written, wait_ms }) = self.offload {
            add("offload", "read", read as f64);
            add("offload", "written", written as f64);
            add("offload", "wait_ms", wait_ms);
        }
        scalars
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn map<S: Serializer, K: Serialize, T: Serialize>(pairs: &[(K, T)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

/// Counts by their names.
fn by_name<S: Serializer>(of: &Launches, serializer: S) -> Result<S::Ok, S::Error> {
    map(&of.by_name(), serializer)
}

/// The memory of each rank, by category.
fn by_category<S: Serializer>(ranks: &[MemoryUse], serializer: S) -> Result<S::Ok, S::Error> {
    struct OfRank<'a>(&'a MemoryUse);
    impl Serialize for OfRank<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_map(self.0.iter().map(|(category, bytes)| (category.name(), bytes)))
        }
    }
    serializer.collect_seq(ranks.iter().map(OfRank))
}

/// Whole numbers by layer.
fn by_layer<S: Serializer>(layers: &[(String, Vec<f64>)], serializer: S) -> Result<S::Ok, S::Error> {
    let whole = |counts: &[f64]| counts.iter().map(|&count| count as u64).collect::<Vec<_>>();
    serializer.collect_map(layers.iter().map(|(layer, counts)| (layer, whole(counts))))
}

/// Writes events to a file, each line at once, so that a run that dies leaves all lines up to then.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// A new file at `path`, in the place of any old one.
    pub fn create(path: &Path) -> Result<Self, OutputError> {
        let file = File::create(path).map_err(OutputError::writing(WHAT, path))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// The file at `path`, to go on after its last line; a new one if there is none. The rest of a line that was
    /// cut short is removed.
    pub fn append(path: &Path) -> Result<Self, OutputError> {
        // Opening a pipe would wait for its reader.
        if path.is_file() {
            end_line(path).map_err(OutputError::writing(WHAT, path))?;
        }
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(OutputError::writing(WHAT, path))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Writes one line.
    pub fn write(&mut self, event: &Event<'_>) -> Result<(), OutputError> {
        let line = serde_json::to_vec(event).map_err(io::Error::from).map(|mut line| {
            line.push(b'\n');
            line
        });
        // The file is not buffered, so one write is one line on its way to the system.
        line.and_then(|line| self.file.write_all(&line)).map_err(OutputError::writing(WHAT, &self.path))
    }
}

/// Makes a file end with a whole line, where its last one was cut short by a disk that was full.
fn end_line(path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).append(true).open(path)?;
    let (mut lines, mut line) = (BufReader::new(&file), Vec::new());
    let mut end = 0;
    while lines.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
        end += line.len() as u64;
        line.clear();
    }
    let cut = line.starts_with(b"{") && serde_json::from_slice::<IgnoredAny>(&line).is_err();
    match line.is_empty() {
        true => Ok(()),
        false if cut => file.set_len(end),
        false => file.write_all(b"\n"),
    }
}

/// Checks that the output of `key`, a setting or a flag, can be written to `path`, without changing the file.
///
/// # Errors
/// A folder, a file without permission to write, a file in a folder that does not exist.
pub fn check(key: &str, path: &Path) -> Result<(), Fault> {
    let fault = |problem: String| Err(Fault::new(key, path.display(), problem, "use a file that can be written"));
    if path.is_dir() {
        return fault("is a folder".to_string());
    }
    if path.exists() {
        // Opening a pipe would wait for its reader, so only files are tried.
        return match OpenOptions::new().append(true).open(path) {
            Err(error) if path.is_file() => fault(format!("cannot be written: {error}")),
            _ => Ok(()),
        };
    }
    match File::create_new(path) {
        // Another process may have removed it first: the result is the same.
        Ok(_) => Ok(_ = fs::remove_file(path)),
        // Another run has just created it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => fault("its folder does not exist".to_string()),
        Err(error) => fault(format!("cannot be written: {error}")),
    }
}
