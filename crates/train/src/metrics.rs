//! Metrics: one JSON object per line, in full precision.
//!
//! ```text
//! {"event":"start","version":"0.1.0","mesh":{"dp":2,..},"parameters":820736,"data_hash":"..","config":{..}}
//! {"event":"step","step":1,"loss":5.54,"grad_norm":..,"lr":..,"step_ms":..,"tokens_per_s":..,"comm_bytes":{..},"peak_bytes":[..]}
//! {"event":"validation","step":..,"loss":..}
//! {"event":"end","steps":..,"loss":..,"seconds":..}
//! ```
//! JSON has no infinities and no NaN: such a number is written as `null`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};
use thiserror::Error;

use crate::config::{AXES, Config, Fault};

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
    },
    /// The last line: how the run ended.
    End {
        /// Steps that were trained.
        steps: u64,
        /// Loss of the last step, if there was one.
        loss: Option<f64>,
        /// Wall time from start to end.
        seconds: f64,
    },
}

/// The configuration of a run.
#[derive(Debug, Serialize)]
pub struct Start<'a> {
    /// Version of meshwork.
    version: &'static str,
    /// Degree of each axis.
    #[serde(serialize_with = "map")]
    mesh: Vec<(&'static str, u64)>,
    /// Number of elements of all parameters, each counted once whatever the mesh.
    parameters: u64,
    /// Fingerprint of the token stream.
    data_hash: String,
    /// Every key, resolved.
    config: &'a Config,
}

impl<'a> Start<'a> {
    /// The start of a run of `config` on data of this [hash](crate::Data::hash).
    #[must_use]
    pub fn new(config: &'a Config, parameters: u64, data_hash: String) -> Self {
        let mesh = &config.parallelism;
        let degrees = [mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep];
        let mesh = AXES.into_iter().zip(degrees.map(|degree| degree as u64)).collect();
        Self { version: env!("CARGO_PKG_VERSION"), mesh, parameters, data_hash, config }
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
    pub comm_bytes: Vec<(&'static str, u64)>,
    /// Peak memory of each world rank.
    pub peak_bytes: Vec<u64>,
}

fn map<S: Serializer>(pairs: &[(&'static str, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}

/// Writes events to a file, each line at once, so that a run that dies leaves all lines up to then.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

/// Metrics that could not be written.
#[derive(Debug, Error)]
#[error("cannot write metrics to {}: {source}", path.display())]
pub struct MetricsError {
    /// The file.
    pub path: PathBuf,
    /// The error of the system.
    pub source: io::Error,
}

impl Metrics {
    /// A new file at `path`, in the place of any old one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        let path = path.to_path_buf();
        match File::create(&path) {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(MetricsError { path, source }),
        }
    }

    /// Writes one line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&mut self, event: &Event<'_>) -> Result<(), MetricsError> {
        let line = serde_json::to_vec(event).map_err(io::Error::from).map(|mut line| {
            line.push(b'\n');
            line
        });
        // The file is not buffered, so one write is one line on its way to the system.
        line.and_then(|line| self.file.write_all(&line))
            .map_err(|source| MetricsError { path: self.path.clone(), source })
    }
}

/// Checks that the output of `key` could be written to `path`, without changing the file.
pub(crate) fn check(key: &str, path: &Path) -> Result<(), Fault> {
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
