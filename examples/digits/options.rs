//! The command line: flags in, a network and a plan out.

use clap::builder::PossibleValuesParser;
use clap::{CommandFactory, FromArgMatches, Parser};
use meshwork::core::{Axis, Mesh};
use meshwork::engine::{Plan, PlanError, Recompute, ScheduleSpec};
use meshwork::models::network::Network;
use meshwork::models::resnet::ResNetConfig;
use meshwork::models::vgg::VggConfig;
use meshwork::optim::{Decay, LrSchedule, Sgd};
use meshwork::pipeline::{Generator, by_name};
use meshwork::train::config::{self, ConfigError, Fault};
use std::ffi::OsString;

/// A command line.
#[derive(Clone, Debug, Parser)]
#[command(after_help = "Trains a classifier of images through the pipeline, every rank a thread.\n\n\
                        Exit code: 1 if the run fails, 2 on bad input, else 0.")]
pub struct Options {
    /// The network
    #[arg(long, value_name = "NAME", default_value = "resnet", value_parser = ["resnet", "vgg"])]
    pub model: String,
    /// Stages of the pipeline
    #[arg(long, value_name = "N", default_value = "2", allow_negative_numbers = true, value_parser = count)]
    pub pp: usize,
    /// Parallel pipelines, each with its share of the images
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true, value_parser = count)]
    pub dp: usize,
    /// The order of forward and backward passes
    #[arg(long, value_name = "NAME", default_value = "gpipe", value_parser = schedules())]
    pub schedule: String,
    /// Stages of each rank, for interleaved_1f1b and breadth_first [default: 2]
    #[arg(long = "virtual", value_name = "N", allow_negative_numbers = true, value_parser = count)]
    pub virtual_stages: Option<usize>,
    /// Micro-batches of each pipeline in a step
    #[arg(long = "micro", value_name = "N", default_value = "4", allow_negative_numbers = true, value_parser = count)]
    pub micros: usize,
    /// Images of a step
    #[arg(long, value_name = "N", default_value = "64", allow_negative_numbers = true, value_parser = count)]
    pub batch: usize,
    /// Keep only the inputs of stages, and run each forward again before its backward
    #[arg(long)]
    pub recompute: bool,
    /// Passes over all images
    #[arg(long, value_name = "N", default_value = "8", allow_negative_numbers = true, value_parser = count)]
    pub epochs: usize,
    /// Seed of initial weights and of the order of images
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    pub seed: u64,
}

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    config::help(Options::command(), program)
}

impl Options {
    /// Reads the arguments after the program's name. `None` if `--help` was given.
    ///
    /// # Errors
    /// All faults of the command line: unknown flags and values, and values that do not fit together.
    pub fn read<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Result<Option<Self>, ConfigError> {
        let (matches, mut faults) = config::parse_all(Self::command(), args);
        if faults.is_empty() && matches.get_flag("help") {
            return Ok(None);
        }
        match Self::from_arg_matches(&matches) {
            Ok(options) => {
                if faults.is_empty() {
                    options.require_fit(&mut faults);
                }
                if faults.is_empty() { Ok(Some(options)) } else { Err(ConfigError { faults }) }
            }
            Err(error) => {
                faults.push(Fault::new("", "", error.to_string(), "--help lists the flags"));
                Err(ConfigError { faults })
            }
        }
    }

    /// Refuses values that do not fit together, as the run would.
    fn require_fit(&self, faults: &mut Vec<Fault>) {
        let wrong = self.plan(self.batch).map_err(|error| error.to_string()).and_then(|plan| {
            let fits = plan.stages(&self.network()).and_then(|_| plan.build_schedule());
            match fits {
                Ok(_) => Ok(None),
                Err(PlanError::Stages { layers, stages }) => Ok(Some((layers, stages))),
                Err(error) => Err(error.to_string()),
            }
        });
        match wrong {
            Ok(None) => {}
            Ok(Some((layers, stages))) => {
                let problem = format!("{} has {layers} layers, too few for {stages} stages", self.model);
                faults.push(Fault::new("--pp", self.pp, problem, format!("use {} at most", layers * self.pp / stages)));
            }
            Err(error) => {
                let valid = format!("use other numbers, or another --schedule than {}", self.schedule);
                faults.push(Fault::new("--micro", self.micros, error, valid));
            }
        }
    }

    /// The network.
    pub fn network(&self) -> Network {
        match &*self.model {
            "vgg" => VggConfig::digits().network(),
            _ => ResNetConfig::digits().network(),
        }
    }

    /// The plan of training on `images` images: SGD with momentum; the learning rate warms up over an epoch and falls
    /// along a cosine.
    pub fn plan(&self, images: usize) -> Result<Plan, Box<dyn std::error::Error>> {
        let steps_of_epoch = (images / self.batch) as u64;
        let generator = by_name(&self.schedule)?;
        Ok(Plan {
            mesh: Mesh::new([(Axis::Dp, self.dp), (Axis::Tp, 1), (Axis::Pp, self.pp)])?,
            schedule: ScheduleSpec::Named { generator, virtual_stages: self.virtual_stages, vertical_sync: false },
            global_batch_size: self.batch,
            num_microbatches: Some(self.micros),
            recompute: if self.recompute { Recompute::Stage } else { Recompute::Selective },
            optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
            lr: LrSchedule {
                base: 0.05,
                warmup_steps: steps_of_epoch,
                decay: Decay::Cosine,
                decay_steps: steps_of_epoch * self.epochs as u64,
                min_lr_factor: 0.01,
            },
            max_norm: 0.0,
            seed: self.seed,
            ..Plan::default()
        })
    }
}

/// Names of the schedules: only the synchronous ones, because the networks have running statistics.
fn schedules() -> PossibleValuesParser {
    PossibleValuesParser::new(
        Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()).map(Generator::name),
    )
}

/// The largest count that a flag takes, because threads and images take memory.
const MOST: usize = 4096;

fn count(value: &str) -> Result<usize, String> {
    value.parse().ok().filter(|count| (1..=MOST).contains(count)).ok_or_else(|| format!("expected 1 to {MOST}"))
}
