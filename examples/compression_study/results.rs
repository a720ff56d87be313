//! The results of runs: a file with a line of JSON per run, from which an interrupted study continues.

use crate::tasks::Scores;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The key of a run: task, setting and seed.
pub type Key = (String, String, u64);

/// The scores of runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results(pub BTreeMap<Key, Scores>);

impl Results {
    /// Reads a file of results. A missing file has no results.
    ///
    /// # Errors
    /// A file that cannot be read, or a line that is not a result. An incomplete last line is ignored.
    pub fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("{}: {error}", path.display()).into()),
        };
        Self::parse(&text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    /// Reads lines of results.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for (at, line) in whole.lines().enumerate() {
            let refuse = |problem: String| format!("line {}: {problem}", at + 1);
            let run: Value = serde_json::from_str(line).map_err(|error| refuse(error.to_string()))?;
            let text = |key: &str| run[key].as_str().map(str::to_owned).ok_or_else(|| refuse(format!("no {key:?}")));
            let seed = run["seed"].as_u64().ok_or_else(|| refuse("no \"seed\"".to_owned()))?;
            let scores = Scores { on: run["on"].as_f64(), off: run["off"].as_f64() };
            all.insert((text("task")?, text("setting")?, seed), scores);
        }
        Ok(Self(all))
    }

    /// The scores of a setting, one for each seed.
    pub fn of<'a>(&'a self, task: &'a str, setting: &'a str) -> impl Iterator<Item = (u64, Scores)> + 'a {
        let runs = self.0.iter().filter(move |((of, name, _), _)| of == task && name == setting);
        runs.map(|((.., seed), scores)| (*seed, *scores))
    }

    /// Appends a run to a file, and removes an incomplete line of an interrupted study.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn append(path: &Path, (task, setting, seed): &Key, scores: Scores) -> Result<(), Box<dyn Error>> {
        let mut file: File = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        let text = fs::read_to_string(path)?;
        file.set_len(text.rfind('\n').map_or(0, |end| end + 1) as u64)?;
        let line = json!({"task": task, "setting": setting, "seed": seed, "on": scores.on, "off": scores.off});
        Ok(writeln!(file, "{line}")?)
    }
}
