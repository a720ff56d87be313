//! The command line of the planner.

use crate::report::Report;
use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use meshwork::pipeline::partition::{self, Level, Method, Profile, States, plan};
use std::fs;
use std::path::PathBuf;

/// Finds the stages of a pipeline, and the machines of each, whose slowest stage is fastest.
#[derive(Parser)]
#[command(after_help = "Exit code: 2 on bad input, else 0.")]
pub struct Options {
    /// What each layer takes, in PipeDream's format; gpt_train writes one with --set metrics.layer_profile=FILE, digits
    /// with --layer-profile FILE
    #[arg(long, value_name = "FILE")]
    profile: PathBuf,
    /// Machines of each level of the topology, innermost first
    #[arg(long, value_name = "N,..", required = true, value_delimiter = ',', allow_hyphen_values = true, value_parser = machines)]
    machines: Vec<usize>,
    /// Bytes per second between the machines of each level, innermost first
    #[arg(long, value_name = "B,..", required = true, value_delimiter = ',', allow_hyphen_values = true, value_parser = bandwidth)]
    bandwidth: Vec<f64>,
    /// Cost of a stage: computation plus communication, as the published code has it, or the longer of the two, as the
    /// paper has it
    #[arg(long, default_value = "code", value_parser = PossibleValuesParser::new(["code", "paper"]).map(method))]
    method: Method,
    /// Compression ratio of the activations that are sent, 1 for none; without it, sending them costs nothing
    #[arg(long, value_name = "R", allow_hyphen_values = true, value_parser = ratio)]
    activation_compression_ratio: Option<f64>,
    /// Each stage on one machine
    #[arg(long)]
    straight: bool,
    /// One JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

impl Options {
    /// Reads the profile and plans. An error is the text to print.
    pub fn load(self) -> Result<Report, String> {
        let path = self.profile.display();
        if self.machines.len() != self.bandwidth.len() {
            let list = self.bandwidth.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
            let levels = [self.bandwidth.len(), self.machines.len()];
            return Err(format!(
                "--bandwidth {list}: for {} levels, and --machines has {}; give each level both",
                levels[0], levels[1]
            ));
        }
        let levels = self.machines.iter().zip(&self.bandwidth);
        let levels: Vec<Level> =
            levels.map(|(&machines, &bytes_per_second)| Level { machines, bytes_per_second }).collect();
        let text = fs::read_to_string(&self.profile).map_err(|error| {
            format!("--profile {path}: cannot be read: {error}; use a profile in PipeDream's format")
        })?;
        let profile: Profile = text.parse().map_err(|error| format!("--profile {path}, {error}"))?;
        let options = partition::Options {
            method: self.method,
            straight: self.straight,
            activation_compression_ratio: self.activation_compression_ratio,
        };
        let states = States::new(&profile).map_err(|error| error.to_string())?;
        let plan = plan(&states, &levels, &options).map_err(|error| error.to_string())?;
        Ok(Report { profile, states, levels, options, plan })
    }
}

fn machines(text: &str) -> Result<usize, &'static str> {
    let number = text.trim().parse().ok().filter(|&machines| machines > 0);
    number.ok_or("use whole numbers of at least 1, innermost level first, such as 4 or 4,2")
}

fn bandwidth(text: &str) -> Result<f64, &'static str> {
    let number = text.trim().parse().ok().filter(|bandwidth: &f64| bandwidth.is_finite() && *bandwidth >= 1.0);
    number.ok_or("use bytes per second of at least 1, innermost level first, such as 1e9 or 1e10,1.25e9")
}

fn ratio(text: &str) -> Result<f64, &'static str> {
    let number = text.trim().parse().ok().filter(|ratio: &f64| ratio.is_finite() && *ratio > 0.0);
    number.ok_or("use a number above 0, such as 1 for none")
}

/// The method with one of the two names that the parser accepts.
fn method(name: String) -> Method {
    if name == "paper" { Method::Paper } else { Method::Code }
}
