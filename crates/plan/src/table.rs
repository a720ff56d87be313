//! Tables of published runs: which configuration each row is, and what it measured.

use crate::cluster::Cluster;
use crate::count::Counter;
use crate::error::PlanError;
use crate::predict::{Job, Prediction};
use crate::system::{System, ZERO_STAGE};
use meshwork_train::config::Config;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A table: rows under named columns.
#[derive(Clone, Debug, Deserialize)]
pub struct Table {
    /// What the table is called, where it has a title.
    #[serde(default)]
    pub title: String,
    columns: Vec<String>,
    rows: Vec<Vec<toml::Value>>,
}

/// A row that can be predicted.
#[derive(Clone, Debug)]
pub struct Row {
    /// The configuration.
    pub job: Job,
    /// Where it ran.
    pub cluster: Cluster,
    /// Seconds of a step, where the table has a time or a throughput.
    pub measured: Option<f64>,
}

/// Hidden size, layers and heads of the models that a table names: MPT's (scripts/train/yamls/pretrain of its source).
const MODELS: [(&str, [usize; 3]); 9] = [
    ("125m", [768, 12, 12]),
    ("350m", [1024, 24, 16]),
    ("760m", [1536, 24, 12]),
    ("1b", [2048, 24, 16]),
    ("3b", [2560, 32, 20]),
    ("7b", [4096, 32, 32]),
    ("13b", [5120, 40, 40]),
    ("30b", [7168, 48, 56]),
    ("70b", [8192, 80, 64]),
];

impl Table {
    /// Reads the table of this name from the text of a file.
    ///
    /// # Errors
    /// A text without it.
    pub fn from_toml(file: &str, text: &str, name: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct File {
            #[serde(default)]
            table: BTreeMap<String, toml::Value>,
        }
        let refuse = |problem: String, valid: String| PlanError::File { file: file.to_owned(), problem, valid };
        let read: File = toml::from_str(text)
            .map_err(|error| refuse(error.message().to_owned(), "use a TOML file with [table.NAME]".into()))?;
        let Some(table) = read.table.get(name) else {
            let known: Vec<&str> = read.table.keys().map(String::as_str).collect();
            return Err(refuse(format!("there is no table {name:?}"), format!("it has: {}", known.join(", "))));
        };
        let form = "a table has columns, and rows with a value for each".to_owned();
        let table: Self =
            table.clone().try_into().map_err(|error: toml::de::Error| refuse(error.message().to_owned(), form))?;
        match table.rows.iter().position(|row| row.len() != table.columns.len()) {
            Some(row) => Err(PlanError::Row {
                table: name.to_owned(),
                row,
                problem: format!("it has {} values for {} columns", table.rows[row].len(), table.columns.len()),
            }),
            None => Ok(table),
        }
    }

    /// The rows as a system runs them. A row that cannot be predicted has the reason.
    ///
    /// # Errors
    /// A system without a cluster.
    pub fn rows(
        &self,
        name: &str,
        system: &System,
        counter: &mut Counter,
    ) -> Result<Vec<Result<Row, PlanError>>, PlanError> {
        let cluster = system.cluster(&self.title)?;
        Ok(self.rows.iter().enumerate().map(|(at, _)| self.row(name, at, system, &cluster, counter)).collect())
    }

    fn row(
        &self,
        name: &str,
        at: usize,
        system: &System,
        cluster: &Cluster,
        counter: &mut Counter,
    ) -> Result<Row, PlanError> {
        let refuse = |problem: String| PlanError::Row { table: name.to_owned(), row: at, problem };
        let cells: BTreeMap<&str, &toml::Value> = self.columns.iter().map(String::as_str).zip(&self.rows[at]).collect();
        let whole = |column: &str| -> Result<Option<usize>, PlanError> {
            match cells.get(column) {
                None => Ok(None),
                Some(value) if value.as_str() == Some("na") => Ok(None),
                Some(value) => {
                    let number = value.as_integer().and_then(|number| usize::try_from(number).ok());
                    let number = number.filter(|&number| number > 0);
                    number
                        .map(Some)
                        .ok_or_else(|| refuse(format!("{column} = {value}: use a whole number of at least 1")))
                }
            }
        };
        let needed = |column: &str| whole(column)?.ok_or_else(|| refuse(format!("it lacks the column {column}")));
        let [hidden, layers, heads] = match cells.get("model").and_then(|model| model.as_str()) {
            Some(model) => {
                MODELS.iter().find(|(known, _)| *known == model).map(|(_, sizes)| *sizes).ok_or_else(|| {
                    let known: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
                    refuse(format!("model = {model:?} is not known; known: {}", known.join(", ")))
                })?
            }
            None => [needed("hidden")?, needed("layers")?, needed("heads")?],
        };
        let (gpus, batch, micro, seq) =
            (needed("gpus")?, needed("global_batch")?, needed("micro_batch")?, needed("seq")?);
        let [tp, pp, cp] = ["tp", "pp", "cp"].map(|axis| whole(axis).map(|degree| degree.unwrap_or(1)));
        let (tp, pp, cp) = (tp?, pp?, cp?);
        let dp = whole("dp")?.unwrap_or(gpus / (tp * pp * cp).max(1));
        if dp * tp * pp * cp != gpus {
            return Err(refuse(format!("dp={dp}, tp={tp}, pp={pp} and cp={cp} are not {gpus} cards")));
        }
        if !batch.is_multiple_of(dp * micro) {
            return Err(refuse(format!("a batch of {batch} is no multiple of dp={dp} micro-batches of {micro}")));
        }
        let [vocabulary, multiple] = system.vocabulary;
        let vocabulary = match whole("vocab")? {
            Some(given) => given,
            None if tp > 1 => vocabulary.next_multiple_of(multiple * tp),
            None => vocabulary,
        };
        let mut keys = system.keys_of(dp * cp);
        let mut set = |key: &str, value: usize| _ = keys.insert(key.to_owned(), toml::Value::Integer(value as i64));
        set("training.steps", 0); // nothing runs here, so any number of ranks will do
        set("model.vocab_size", vocabulary);
        set("model.num_layers", layers);
        set("model.hidden_size", hidden);
        set("model.num_heads", heads);
        set("model.seq_len", seq);
        set("parallelism.dp", dp);
        set("parallelism.tp", tp);
        set("parallelism.pp", pp);
        set("parallelism.cp", cp);
        set("training.global_batch_size", batch);
        set("training.micro_batch_size", micro);
        let chunks = whole("vp")?.unwrap_or(1);
        if chunks > 1 {
            set("pipeline.virtual_stages", chunks);
            keys.insert("pipeline.schedule".into(), "interleaved_1f1b".into());
        }
        if let Some(sharding) = cells.get("sharding").and_then(|value| value.as_str()) {
            let stage = match sharding {
                "FULL_SHARD" => 3,
                "SHARD_GRAD_OP" => 2,
                "NO_SHARD" => 0,
                other => {
                    return Err(refuse(format!("sharding = {other:?}: use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")));
                }
            };
            let stage = if dp * cp > 1 { stage } else { 0 };
            keys.insert(ZERO_STAGE.into(), toml::Value::Integer(stage));
        }
        for (column, key) in [("kv_heads", "model.num_kv_heads"), ("ffn", "model.ffn_hidden_size")] {
            keys.extend(whole(column)?.map(|value| (key.to_owned(), toml::Value::Integer(value as i64))));
        }
        let texts = [("kind", "model.kind"), ("recompute", "memory.recompute"), ("schedule", "pipeline.schedule")];
        for (column, key) in texts {
            keys.extend(cells.get(column).map(|&value| (key.to_owned(), value.clone())));
        }
        if let Some(value) = cells.get("activation_checkpointing") {
            let word = if value.as_bool() == Some(true) || value.as_str() == Some("True") { "full" } else { "none" };
            keys.insert("memory.recompute".into(), word.into());
        }
        if let Some(precision) = cells.get("precision").and_then(|value| value.as_str())
            && precision.to_ascii_lowercase().contains("fp8")
        {
            return Err(refuse(format!("precision = {precision:?}: only products in bf16 are predicted")));
        }
        let hosts = gpus.div_ceil(cluster.cards_per_host);
        let job = Job::new(configured(&keys)?, counter)?;
        let number = |column: &str| {
            cells.get(column).and_then(|value| value.as_float().or(value.as_integer().map(|whole| whole as f64)))
        };
        let tokens = (batch * seq) as f64;
        let measured = number("iteration_ms")
            .map(|ms| ms / 1e3)
            .or(number("iteration_s"))
            .or(number("tok_s_gpu").map(|speed| tokens / (speed * gpus as f64)))
            .or(number("samples_s_gpu").map(|speed| batch as f64 / (speed * gpus as f64)))
            .or(number("tflop_s_gpu").map(|speed| job.model_flops / (1e12 * speed * gpus as f64)));
        Ok(Row { job, cluster: Cluster { hosts, ..cluster.clone() }, measured })
    }
}

/// A configuration of keys such as `model.num_layers`.
///
/// # Errors
/// Every fault of the keys.
pub fn configured(keys: &BTreeMap<String, toml::Value>) -> Result<Config, PlanError> {
    let mut sections = toml::Table::new();
    for (key, value) in keys {
        let (section, key) = key.split_once('.').unwrap_or(("", key));
        let section = sections.entry(section).or_insert_with(|| toml::Table::new().into());
        if let toml::Value::Table(section) = section {
            section.insert(key.to_owned(), value.clone());
        }
    }
    Ok(Config::from_toml(&sections.to_string())?)
}

/// The line that `--json` prints of a row.
pub fn line(row: usize, predicted: &Result<Prediction, PlanError>) -> Value {
    match predicted {
        Ok(step) => json!({
            "row": row,
            "predicted_s": step.seconds,
            "memory_bytes": step.memory.round() as u64,
            "fits": step.fits,
            "mfu": step.mfu,
            "bubble_s": step.bubble,
            "exposed_s": step.exposed,
        }),
        Err(error) => json!({ "row": row, "error": error.to_string() }),
    }
}
