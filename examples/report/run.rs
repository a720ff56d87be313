//! A run, read from its metrics file.

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The metrics of a run, by step. A file with a resumed run counts as one run: if a step ran twice, the last one
/// counts.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Its name on the page.
    pub name: String,
    /// Version of meshwork that wrote the file.
    pub version: String,
    /// Degree of each axis of the mesh, at the last start.
    pub mesh: Vec<(String, u64)>,
    /// The first step after the last start.
    pub since: u64,
    /// The meshes of earlier starts that trained, each with its first step.
    pub before: Vec<(u64, String)>,
    /// Elements of all parameters.
    pub parameters: u64,
    /// Fingerprint of the data.
    pub data: String,
    /// Every key of the configuration, as `section.key`, with its value.
    pub config: BTreeMap<String, String>,
    /// Its steps, by number.
    pub steps: BTreeMap<u64, Step>,
    /// Validation loss after a step.
    pub validation: BTreeMap<u64, f64>,
    /// Wall time in seconds, if the run finished.
    pub seconds: Option<f64>,
}

/// The numbers of a step; NaN if JSON cannot represent a number.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Mean over the terms of the global batch.
    pub loss: f64,
    /// Norm of the whole gradient.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Milliseconds.
    pub step_ms: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Bytes communicated on each axis, averaged over ranks.
    pub comm_bytes: Vec<(String, f64)>,
    /// Peak memory of each rank.
    pub peak_bytes: Vec<f64>,
}

/// A metrics file that cannot be read.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunFileError {
    /// The file cannot be opened.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: std::io::Error,
    },
    /// A line that is not an event.
    #[error("{}, line {line}: {problem}; use a file that --metrics wrote", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem.
        problem: String,
    },
    /// A file without a start or without a step.
    #[error("{}: {problem}; use a file that --metrics wrote", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The missing part.
        problem: &'static str,
    },
}

meshwork::core::debug_as_display!(RunFileError);

impl Run {
    /// Reads a metrics file. The last line may be cut off, if the run was killed.
    ///
    /// # Errors
    /// A file that cannot be read, or is not the metrics of a run.
    pub fn read(path: &Path) -> Result<Self, RunFileError> {
        let text = fs::read_to_string(path).map_err(|source| RunFileError::Read { path: path.to_owned(), source })?;
        let name =
            path.file_stem().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
        let mut run = Self { name, ..Self::default() };
        let lines: Vec<&str> = text.lines().collect();
        let mut started = false;
        for (at, line) in lines.iter().enumerate() {
            let refuse = |problem: String| RunFileError::Line { path: path.to_owned(), line: at + 1, problem };
            let event: Value = match serde_json::from_str(line) {
                Ok(event) => event,
                Err(_) if at + 1 == lines.len() && !text.ends_with('\n') => break,
                Err(error) => {
                    // The line number is the file's.
                    let told = error.to_string();
                    let problem = told.split(" at line ").next().unwrap_or(&told);
                    return Err(refuse(format!("{problem}, column {}", error.column())));
                }
            };
            let whole = |key: &str| event[key].as_u64().ok_or_else(|| refuse(format!("there is no number {key:?}")));
            match event["event"].as_str() {
                Some("start") => {
                    if run.since > 0 {
                        run.before.push((run.since, run.mesh_text()));
                    }
                    (started, run.since) = (true, 0);
                    run.start(&event);
                }
                Some("step") => {
                    let step = whole("step")?;
                    if run.since == 0 {
                        run.since = step;
                        // The run continues from this step; later steps of earlier starts no longer count.
                        run.before.retain(|(first, _)| *first < step);
                        run.steps.retain(|trained, _| *trained < step);
                    }
                    run.steps.insert(step, Step::of(&event));
                }
                Some("validation") => _ = run.validation.insert(whole("step")?, number(&event["loss"])),
                Some("end") => run.seconds = Some(run.seconds.unwrap_or(0.0) + number(&event["seconds"])),
                // A later version may have more kinds of events.
                Some(_) => {}
                None => return Err(refuse("there is no \"event\"".to_owned())),
            }
        }
        let refuse = |problem| Err(RunFileError::Empty { path: path.to_owned(), problem });
        match (started, run.steps.is_empty()) {
            (false, _) => refuse("it has no start"),
            (_, true) => refuse("it has no step"),
            _ => Ok(run),
        }
    }

    fn start(&mut self, event: &Value) {
        let text = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        (self.version, self.data) = (text("version"), text("data_hash"));
        self.parameters = event["parameters"].as_u64().unwrap_or_default();
        self.mesh = pairs(&event["mesh"]).map(|(axis, degree)| (axis.clone(), degree.as_u64().unwrap_or(1))).collect();
        self.config.clear();
        for (section, keys) in pairs(&event["config"]) {
            match keys.as_object() {
                Some(keys) => {
                    self.config.extend(keys.iter().map(|(key, value)| (format!("{section}.{key}"), value.to_string())))
                }
                None => _ = self.config.insert(section.clone(), keys.to_string()),
            }
        }
    }

    /// The mesh in the form of `--mesh`, axes of degree 1 left out.
    pub fn mesh_text(&self) -> String {
        let axes = self.mesh.iter().filter(|(_, degree)| *degree > 1).map(|(axis, degree)| format!("{axis}={degree}"));
        let text = axes.collect::<Vec<_>>().join(",");
        if text.is_empty() { "one rank".to_owned() } else { text }
    }

    /// The steps of the last start, on [`mesh`](Self::mesh).
    pub fn on_mesh(&self) -> impl Iterator<Item = &Step> {
        let since = if self.since > 0 { self.since } else { u64::MAX };
        self.steps.range(since..).map(|(_, step)| step)
    }

    /// Whether it trained on another mesh earlier.
    pub fn moved(&self) -> bool {
        self.before.iter().any(|(_, mesh)| *mesh != self.mesh_text())
    }

    /// The degree of an axis.
    pub fn degree(&self, axis: &str) -> u64 {
        self.mesh.iter().find(|(name, _)| name == axis).map_or(1, |(_, degree)| *degree)
    }
}

impl Step {
    fn of(event: &Value) -> Self {
        Self {
            loss: number(&event["loss"]),
            grad_norm: number(&event["grad_norm"]),
            lr: number(&event["lr"]),
            step_ms: number(&event["step_ms"]),
            tokens_per_s: number(&event["tokens_per_s"]),
            comm_bytes: pairs(&event["comm_bytes"]).map(|(axis, bytes)| (axis.clone(), number(bytes))).collect(),
            peak_bytes: event["peak_bytes"].as_array().into_iter().flatten().map(number).collect(),
        }
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

fn pairs(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}
