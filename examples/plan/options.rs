//! The command line.

use clap::Parser;
use meshwork::plan::PlanError;
use meshwork::plan::search::{Keys, assigned};
use std::path::PathBuf;

/// Predicts training: which mesh is the fastest on a cluster, what published runs take, how often to save.
#[derive(Parser)]
#[command(after_help = "Exit code: 2 on bad input and where no plan fits, else 0.")]
pub struct Options {
    /// Search the fastest plans on this cluster: a TOML file, or the name of one that is built in
    #[arg(long, value_name = "FILE|NAME", conflicts_with_all = ["table", "errors", "fit", "goodput"],
          required_unless_present_any = ["table", "errors", "fit", "goodput", "measure"])]
    pub cluster: Option<String>,
    /// Measure this machine for a few seconds, and write it as a cluster to FILE: each core is a card. Processes that
    /// mpirun started, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT number, measure the links between them instead,
    /// and add these to FILE
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "table", "errors", "fit", "goodput"])]
    pub measure: Option<PathBuf>,
    /// Predict one configuration on the cluster, given by --set, instead of a search
    #[arg(long, requires = "cluster")]
    pub one: bool,
    /// Cards in the search, in whole hosts [default: those of the cluster]
    #[arg(long, value_name = "N", requires = "cluster")]
    pub cards: Option<usize>,
    /// On a cluster of cores: the ranks are shared out over N processes, as `mpirun -n N` starts them
    #[arg(long, value_name = "N", requires = "cluster")]
    pub processes: Option<usize>,
    /// Short for --set model.preset=NAME
    #[arg(long, value_name = "NAME", conflicts_with_all = ["measure", "errors", "fit", "goodput"])]
    pub preset: Option<String>,
    /// Tokens of a step: a number, or with K (1024) or M (1024²). Sequences are whole
    #[arg(long, value_name = "TOKENS", requires = "cluster", default_value = "4M")]
    pub tokens_per_batch: String,
    /// A key of the configuration that the search keeps, such as memory.recompute=full or parallelism.tp=8; with
    /// --table one that all rows have where no column says it
    #[arg(long, value_name = "section.key=value", conflicts_with_all = ["measure", "errors", "fit", "goodput"])]
    pub set: Vec<String>,
    /// Write a picture of a search or of --goodput to FILE.html, and FILE.svg beside it
    #[arg(long, value_name = "FILE.html", conflicts_with_all = ["table", "errors", "fit"])]
    pub picture: Option<PathBuf>,
    /// A TOML file with tables of runs: a row is a configuration
    #[arg(long, value_name = "FILE", requires = "name")]
    pub table: Option<PathBuf>,
    /// The table of that file
    #[arg(long, value_name = "TABLE")]
    pub name: Option<String>,
    /// The system that trains: meshwork, meshwork-cpu, megatron-deepspeed-a100, fsdp-h100, fsdp-a100 or megatron-h100
    /// [default: meshwork; on a cluster of cores, meshwork-cpu]
    #[arg(long, value_name = "NAME")]
    pub system: Option<String>,
    /// A line of JSON for each row or plan instead of a table
    #[arg(long)]
    pub json: bool,
    /// How far all systems are off on their published runs: the table of docs/planner.md
    #[arg(long, conflicts_with_all = ["table", "fit", "system"])]
    pub errors: bool,
    /// How often to save, and the share of time that trains, for 8 to 100,000 cards
    #[arg(long, conflicts_with_all = ["table", "errors", "fit"])]
    pub goodput: bool,
    /// With --goodput: hours of a card in which it fails once [default: by the number of cards, as published]
    #[arg(long, value_name = "HOURS", requires = "goodput", value_parser = above_zero)]
    pub card_hours: Option<f64>,
    /// With --goodput: seconds for which a checkpoint stops training
    #[arg(long, value_name = "S", default_value = "5", value_parser = above_zero)]
    pub save: f64,
    /// With --goodput: seconds until a checkpoint is written, behind training
    #[arg(long, value_name = "S", default_value = "60", value_parser = above_zero)]
    pub write: f64,
    /// With --goodput: seconds from a failure until training goes on [default: three published ways]
    #[arg(long, value_name = "S", requires = "goodput", value_parser = above_zero)]
    pub recover: Option<f64>,
    /// Fit the constants of --system to the even rows of its published runs, and print them and the errors
    #[arg(long, conflicts_with = "table")]
    pub fit: bool,
}

impl Options {
    /// The system that trains, where no cluster says which.
    pub fn system(&self) -> &str {
        self.system.as_deref().unwrap_or("meshwork")
    }

    /// The keys of --preset and --set.
    pub fn keys(&self) -> Result<Keys, PlanError> {
        let preset = self.preset.iter().map(|name| format!("model.preset={name}"));
        preset.chain(self.set.iter().cloned()).map(|text| assigned(&text)).collect()
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|number: &f64| *number > 0.0 && number.is_finite())
        .ok_or("use a number above 0".to_owned())
}
