//! The command line: flags in, a network and a plan out.

use clap::builder::PossibleValuesParser;
use clap::{CommandFactory, FromArgMatches, Parser};
use meshwork::core::{Axis, Mesh, MeshError};
use meshwork::engine::{Plan, PlanError, Recompute, ScheduleSpec};
use meshwork::models::network::Network;
use meshwork::models::resnet::ResNetConfig;
use meshwork::models::vgg::VggConfig;
use meshwork::optim::{Decay, LrSchedule, Sgd};
use meshwork::pipeline::{Generator, by_name};
use meshwork::tensor::tape::{Encoding, HalfType};
use meshwork::train::config::{self, ConfigError, Fault};
use meshwork::train::metrics;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// The files of `--profile`: the timeline of every rank, and a picture of the pipeline.
pub const TRACE: &str = "trace.json";
pub const SCHEDULE: &str = "schedule.svg";

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
    /// What forward keeps for backward. selective: all but the outputs of norms and ReLU, which are run again; all:
    /// these too; the others keep all as Gist does: sparse without its zeros, bf16 rounded, both rounded and without
    /// its zeros
    #[arg(long, value_name = "WHAT", default_value = "selective", value_parser = ["selective", "all", "sparse", "bf16", "both"])]
    pub saved: String,
    /// Passes over all images
    #[arg(long, value_name = "N", default_value = "8", allow_negative_numbers = true, value_parser = count)]
    pub epochs: usize,
    /// Seed of initial weights and of the order of images
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true)]
    pub seed: u64,
    /// Norm of the whole gradient above which it is scaled down; 0 = off
    #[arg(long, value_name = "X", default_value = "0", allow_negative_numbers = true, value_parser = norm)]
    pub max_norm: f64,
    /// Print where the time of three steps went; write their timeline to trace.json and, with several ranks in the
    /// pipeline, its picture to schedule.svg
    #[arg(long)]
    pub profile: bool,
    /// Time each layer before training, and write the result for the planner: cargo run --example partition --
    /// --profile FILE
    #[arg(long, value_name = "FILE")]
    pub layer_profile: Option<PathBuf>,
    /// Do not train: take two steps on the mesh of --dp and --pp and on this one (dp=2,pp=2) with the same
    /// micro-batches, and print how far their values are apart, as docs/mesh_diff.md explains
    #[arg(long, value_name = "MESH", value_parser = mesh)]
    pub compare: Option<Mesh>,
}

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    config::help(Options::command(), program)
}

impl Options {
    /// Parses the arguments after the program's name. `None` if `--help` was given.
    ///
    /// # Errors
    /// All errors of the command line: unknown flags and values, and values that do not fit together.
    pub fn read<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Result<Option<Self>, ConfigError> {
        let (matches, mut faults) = config::parse_all(Self::command(), args);
        if faults.is_empty() && matches.get_flag("help") {
            return Ok(None);
        }
        match Self::from_arg_matches(&matches) {
            Ok(options) => {
                if faults.is_empty() {
                    options.require_fit(&mut faults);
                    options.require_files(&mut faults);
                }
                if faults.is_empty() { Ok(Some(options)) } else { Err(ConfigError { faults }) }
            }
            Err(error) => {
                faults.push(Fault::new("", "", error.to_string(), "--help lists the flags"));
                Err(ConfigError { faults })
            }
        }
    }

    /// Rejects values that do not fit together, as the run would.
    fn require_fit(&self, faults: &mut Vec<Fault>) {
        let plan = match self.plan(self.batch) {
            Ok(plan) => plan,
            Err(error) => return faults.push(Fault::new("", "", error.to_string(), "--help lists the flags")),
        };
        match self.fits(&plan) {
            Ok(()) => {}
            Err(PlanError::Stages { layers, stages }) => {
                let problem = format!("{} has {layers} layers, too few for {stages} stages", self.model);
                faults.push(Fault::new("--pp", self.pp, problem, format!("use {} at most", layers * self.pp / stages)));
            }
            Err(error) => {
                let valid = format!("use other numbers, or another --schedule than {}", self.schedule);
                faults.push(Fault::new("--micro", self.micros, error.to_string(), valid));
            }
        }
        let Some(other) = self.other(&plan) else { return };
        for (flag, given) in [("--profile", self.profile), ("--layer-profile", self.layer_profile.is_some())] {
            if given {
                faults.push(Fault::new(flag, "", "--compare does not train", format!("use {flag} or --compare")));
            }
        }
        let (dp, micros) = (other.mesh.degree(Axis::Dp), self.dp * self.micros);
        if !micros.is_multiple_of(dp) {
            let problem = format!("a step has {micros} micro-batches, which dp={dp} cannot share evenly");
            faults.push(Fault::new("--compare", &other.mesh, problem, format!("use a dp that divides {micros}")));
        } else if let Err(error) = self.fits(&other) {
            faults.push(Fault::new("--compare", &other.mesh, error.to_string(), "use another mesh"));
        }
    }

    fn fits(&self, plan: &Plan) -> Result<(), PlanError> {
        plan.stages(&self.network())?;
        plan.build_schedule().map(drop)
    }

    /// Rejects files that cannot be written, before any time is spent on their contents.
    fn require_files(&self, faults: &mut Vec<Fault>) {
        let pictures = [(self.profile, TRACE), (self.profile && self.pp > 1, SCHEDULE)];
        let pictures = pictures.iter().filter(|(written, _)| *written).map(|(_, path)| ("--profile", Path::new(path)));
        let layers = self.layer_profile.iter().map(|path| ("--layer-profile", path.as_path()));
        faults.extend(pictures.chain(layers).filter_map(|(flag, path)| metrics::check(flag, path).err()));
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
            recompute: match &*self.saved {
                _ if self.recompute => Recompute::Stage,
                "selective" => Recompute::Selective,
                _ => Recompute::None,
            },
            saved: match &*self.saved {
                "sparse" => vec![Encoding::Sparse],
                "bf16" => vec![Encoding::Half(HalfType::Bf16)],
                "both" => vec![Encoding::Half(HalfType::Bf16), Encoding::Sparse],
                _ => Vec::new(),
            },
            optimizer: Sgd { momentum: 0.9, weight_decay: 5e-4 }.into(),
            lr: LrSchedule {
                base: 0.05,
                warmup_steps: steps_of_epoch,
                decay: Decay::Cosine,
                decay_steps: steps_of_epoch * self.epochs as u64,
                min_lr_factor: 0.01,
            },
            max_norm: self.max_norm,
            seed: self.seed,
            ..Plan::default()
        })
    }

    /// The plan to compare with, if any: the same plan over another mesh, with the same micro-batches, because batch
    /// norm depends on them.
    pub fn other(&self, plan: &Plan) -> Option<Plan> {
        let mesh = self.compare.clone()?;
        let micros = self.dp * self.micros / mesh.degree(Axis::Dp);
        Some(Plan { mesh, num_microbatches: Some(micros), ..plan.clone() })
    }
}

/// A summary of the training, for the first line of the output.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { schedule, pp, dp, micros, max_norm, .. } = self;
        write!(f, "{schedule}, pp={pp} dp={dp}, {micros} micro-batches")?;
        if self.recompute {
            f.write_str(", activations recomputed")?;
        }
        if self.saved != "selective" {
            write!(f, ", saved: {}", self.saved)?;
        }
        if *max_norm > 0.0 { write!(f, ", gradients clipped to norm {max_norm}") } else { Ok(()) }
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

fn norm(value: &str) -> Result<f64, &'static str> {
    let number = value.parse().ok().filter(|norm: &f64| norm.is_finite() && *norm >= 0.0);
    number.ok_or("expected a number of at least 0")
}

fn mesh(value: &str) -> Result<Mesh, String> {
    let mesh: Mesh = value.parse().map_err(|error: MeshError| error.to_string())?;
    match mesh.degree(Axis::Cp) {
        1 if mesh.world_size() <= MOST => Ok(mesh),
        1 => Err(format!("expected {MOST} ranks at most")),
        _ => Err("expected degrees of dp, tp and pp".to_owned()),
    }
}
