//! Tables of published runs: which configuration each row is, and what it measured.

use crate::cluster::Cluster;
use crate::count::Counter;
use crate::error::PlanError;
use crate::plan::Keys;
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

/// A column with whole numbers.
struct Column {
    /// The names that tables have for it. The first one is its name in errors, and counts where a table has several.
    names: &'static [&'static str],
    /// The key of a configuration that it sets; empty for a number that others follow from.
    key: &'static str,
}

const COLUMNS: [Column; 18] = [
    Column::new("", &["gpus", "cards", "num_gpus"]),
    Column::new("training.global_batch_size", &["global_batch", "gbs", "global_batch_size"]),
    Column::new("training.micro_batch_size", &["micro_batch", "mbs", "microbatch", "micro_batch_size"]),
    Column::new("", &["batch_per_dp"]),
    Column::new("", &["micro_batches", "microbatches", "num_microbatches", "grad_accum"]),
    Column::new("model.seq_len", &["seq", "seq_len"]),
    Column::new("model.hidden_size", &["hidden", "hidden_size", "d_model"]),
    Column::new("model.num_layers", &["layers", "num_layers", "n_layers"]),
    Column::new("model.num_heads", &["heads", "num_heads", "n_heads"]),
    Column::new("model.num_kv_heads", &["kv_heads", "num_kv_heads"]),
    Column::new("model.ffn_hidden_size", &["ffn", "ffn_hidden_size"]),
    Column::new("model.vocab_size", &["vocab", "vocab_size"]),
    Column::new("parallelism.dp", &["dp"]),
    Column::new("parallelism.tp", &["tp"]),
    Column::new("parallelism.pp", &["pp", "stages"]),
    Column::new("parallelism.cp", &["cp"]),
    Column::new("parallelism.ep", &["ep"]),
    Column::new("pipeline.virtual_stages", &["vp", "virtual_stages"]),
];

/// Columns that every row needs, in addition to the sizes of the model.
const NEEDED: [&str; 4] = ["gpus", "global_batch", "micro_batch", "seq"];

/// The sizes of the model. A table needs these columns unless it names the model.
const SIZES: [&str; 3] = ["hidden", "layers", "heads"];

const PRESET: &str = "model.preset";

impl Column {
    const fn new(key: &'static str, names: &'static [&'static str]) -> Self {
        Self { names, key }
    }

    fn of(name: &str) -> Option<&'static Self> {
        COLUMNS.iter().find(|column| column.names[0] == name)
    }
}

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

    /// The rows as a system runs them, with the keys of `given` where the table has no column for them. A row that
    /// cannot be predicted has the reason.
    ///
    /// # Errors
    /// A system without a cluster.
    pub fn rows(
        &self,
        name: &str,
        given: &Keys,
        system: &System,
        counter: &mut Counter,
    ) -> Result<Vec<Result<Row, PlanError>>, PlanError> {
        let cluster = system.cluster(&self.title)?;
        Ok((0..self.rows.len()).map(|at| self.row(name, at, given, system, &cluster, counter)).collect())
    }

    /// The value of a row in the column of this name, or of a synonym.
    fn cell(&self, at: usize, name: &str) -> Option<&toml::Value> {
        let names = Column::of(name).map_or(std::slice::from_ref(&name), |column| column.names);
        let place = names.iter().find_map(|name| self.columns.iter().position(|column| column == name))?;
        Some(&self.rows[at][place])
    }

    fn row(
        &self,
        name: &str,
        at: usize,
        given: &Keys,
        system: &System,
        cluster: &Cluster,
        counter: &mut Counter,
    ) -> Result<Row, PlanError> {
        let refuse = |problem: String| PlanError::Row { table: name.to_owned(), row: at, problem };
        let text = |column: &str| self.cell(at, column).and_then(toml::Value::as_str);
        if let Some(precision) = text("precision")
            && precision.to_ascii_lowercase().contains("fp8")
        {
            return Err(refuse(format!("precision = {precision:?}: only products in bf16 are predicted")));
        }
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        for column in &COLUMNS {
            let value = match self.cell(at, column.names[0]).filter(|value| value.as_str() != Some("na")) {
                None => given.get(column.key),
                value => value,
            };
            if let Some(value) = value {
                let number =
                    value.as_integer().and_then(|number| usize::try_from(number).ok()).filter(|&number| number > 0);
                let problem = || refuse(format!("{} = {value}: use a whole number of at least 1", column.names[0]));
                numbers.insert(column.names[0], number.ok_or_else(problem)?);
            }
        }
        numbers.retain(|name, number| *name != "vp" || *number > 1);
        let degree = |axis: &str| numbers.get(axis).copied().unwrap_or(1);
        let [tp, pp, cp] = ["tp", "pp", "cp"].map(degree);
        if let Some(&gpus) = numbers.get("gpus") {
            numbers.entry("dp").or_insert(gpus / (tp * pp * cp));
        }
        // A batch may be told by its parts.
        let part = |name: &str| numbers.get(name).copied();
        let parts = part("batch_per_dp").or_else(|| Some(part("micro_batches")? * part("micro_batch")?));
        if let Some(batch) = parts.zip(part("dp")).map(|(of_rank, dp)| of_rank * dp) {
            numbers.entry("global_batch").or_insert(batch);
        }
        let (preset, model) = (given.contains_key(PRESET), text("model"));
        let needed = NEEDED.iter().chain(if preset || model.is_some() { &[][..] } else { &SIZES });
        let lacking: Vec<&Column> =
            needed.filter(|name| !numbers.contains_key(*name)).filter_map(|name| Column::of(name)).collect();
        if !lacking.is_empty() {
            return Err(refuse(lacks(&lacking)));
        }
        // If the columns give all sizes, the model's name is not looked up.
        let told = preset || SIZES.iter().all(|size| numbers.contains_key(size));
        if let Some(model) = model.filter(|_| !told) {
            let (_, known) = MODELS.iter().find(|(known, _)| *known == model).ok_or_else(|| {
                let known: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
                let known = known.join(", ");
                refuse(format!("model = {model:?} is not known, nor are its {}; known: {known}", SIZES.join(", ")))
            })?;
            numbers.extend(SIZES.into_iter().zip(*known));
        }
        let [gpus, batch, micro, dp] =
            ["gpus", "global_batch", "micro_batch", "dp"].map(|name| numbers.get(name).copied().unwrap_or(1));
        if dp * tp * pp * cp != gpus {
            return Err(refuse(format!("dp={dp}, tp={tp}, pp={pp} and cp={cp} are not {gpus} cards")));
        }
        if !batch.is_multiple_of(dp * micro) {
            return Err(refuse(format!("a batch of {batch} is no multiple of dp={dp} micro-batches of {micro}")));
        }
        if !preset {
            let [vocabulary, multiple] = system.vocabulary;
            let padded = if tp > 1 { vocabulary.next_multiple_of(multiple * tp) } else { vocabulary };
            numbers.entry("vocab").or_insert(padded);
        }
        let mut keys: Keys = system.keys_of(dp * cp).into_iter().chain(given.clone()).collect();
        keys.insert("training.steps".into(), 0.into()); // nothing runs here, so any number of ranks will do
        for column in COLUMNS.iter().filter(|column| !column.key.is_empty()) {
            keys.extend(numbers.get(column.names[0]).map(|&number| (column.key.to_owned(), (number as i64).into())));
        }
        if numbers.contains_key("vp") {
            keys.entry("pipeline.schedule".into()).or_insert("interleaved_1f1b".into());
        }
        if let Some(sharding) = text("sharding") {
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
        let texts = [("kind", "model.kind"), ("recompute", "memory.recompute"), ("schedule", "pipeline.schedule")];
        for (column, key) in texts {
            keys.extend(self.cell(at, column).map(|value| (key.to_owned(), value.clone())));
        }
        if let Some(value) = self.cell(at, "activation_checkpointing") {
            let word = if value.as_bool() == Some(true) || value.as_str() == Some("True") { "full" } else { "none" };
            keys.insert("memory.recompute".into(), word.into());
        }
        let hosts = gpus.div_ceil(cluster.cards_per_host);
        let job = Job::new(configured(&keys)?, counter)?;
        let number = |column: &str| {
            self.cell(at, column).and_then(|value| value.as_float().or(value.as_integer().map(|whole| whole as f64)))
        };
        let tokens = (batch * job.config.model.seq_len) as f64;
        let measured = number("iteration_ms")
            .map(|ms| ms / 1e3)
            .or(number("iteration_s"))
            .or(number("tok_s_gpu").map(|speed| tokens / (speed * gpus as f64)))
            .or(number("samples_s_gpu").map(|speed| batch as f64 / (speed * gpus as f64)))
            .or(number("tflop_s_gpu").map(|speed| job.model_flops / (1e12 * speed * gpus as f64)));
        Ok(Row { job, cluster: Cluster { hosts, ..cluster.clone() }, measured })
    }
}

/// What a row lacks, with the names of the columns, and the keys that stand for them.
fn lacks(columns: &[&Column]) -> String {
    let named = columns.iter().map(|column| format!("{} (or {})", column.names[0], column.names[1..].join(", ")));
    let keys: Vec<String> = columns
        .iter()
        .filter(|column| !column.key.is_empty())
        .map(|column| format!("--set {}=N", column.key))
        .collect();
    let instead = if keys.is_empty() { String::new() } else { format!("; for all rows: {}", keys.join(" ")) };
    format!("no column says {}{instead}", named.collect::<Vec<_>>().join(", "))
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
