//! The command line: flags in, a network and a plan out.

use meshwork::core::{Axis, Mesh};
use meshwork::engine::{Plan, PlanError, Recompute, ScheduleSpec};
use meshwork::models::network::Network;
use meshwork::models::resnet::ResNetConfig;
use meshwork::models::vgg::VggConfig;
use meshwork::optim::{Decay, LrSchedule, Sgd};
use meshwork::pipeline::{Generator, by_name};
use meshwork::train::config::{ConfigError, Fault, choose_from};
use std::ffi::OsString;

/// A command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// `--model`: `resnet` or `vgg`.
    pub model: String,
    /// `--pp`: degree of the pipeline.
    pub pp: usize,
    /// `--dp`: degree of data parallelism.
    pub dp: usize,
    /// `--schedule`.
    pub schedule: String,
    /// `--virtual`: chunks per rank, where the schedule leaves a choice.
    pub virtual_stages: Option<usize>,
    /// `--micro`: micro-batches of each dp rank.
    pub micros: usize,
    /// `--batch`: images of a mini-batch.
    pub batch: usize,
    /// `--recompute`: re-materialisation.
    pub recompute: bool,
    /// `--epochs`.
    pub epochs: usize,
    /// `--seed`.
    pub seed: u64,
    /// Whether `--help` was asked for.
    pub help: bool,
}

const MODELS: [&str; 2] = ["resnet", "vgg"];

const FLAGS: [&str; 11] = [
    "--model",
    "--pp",
    "--dp",
    "--schedule",
    "--virtual",
    "--micro",
    "--batch",
    "--recompute",
    "--epochs",
    "--seed",
    "--help",
];

impl Default for Options {
    fn default() -> Self {
        Self {
            model: MODELS[0].to_owned(),
            pp: 2,
            dp: 1,
            schedule: Generator::Gpipe.name().to_owned(),
            virtual_stages: None,
            micros: 4,
            batch: 64,
            recompute: false,
            epochs: 8,
            seed: 0,
            help: false,
        }
    }
}

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    let Options { model, pp, dp, schedule, micros, batch, epochs, seed, .. } = Options::default();
    let (models, schedules) = (MODELS.join(" or "), schedules().join(", "));
    format!(
        "Usage: {program} [--model NAME] [--pp N] [--dp N] [--schedule NAME] [--virtual N] [--micro N]\n    \
         [--batch N] [--recompute] [--epochs N] [--seed N] [--help]\n\n\
         Trains a classifier of images through the pipeline, every rank a thread.\n\n\
         --model      {models}. Default: {model}\n\
         --pp         stages of the pipeline. Default: {pp}\n\
         --dp         pipelines side by side, each with its share of the images. Default: {dp}\n\
         --schedule   one of {schedules}. Default: {schedule}\n\
         --virtual    stages of each rank, for interleaved_1f1b and breadth_first. Default: 2\n\
         --micro      micro-batches of each pipeline in a step. Default: {micros}\n\
         --batch      images of a step. Default: {batch}\n\
         --recompute  keep the inputs of stages alone, and run each forward again before its backward\n\
         --epochs     times that all images are seen. Default: {epochs}\n\
         --seed       of initial weights and of the order of images. Default: {seed}\n\n\
         Exit code: 1 if the run fails, 2 on bad input, else 0.\n"
    )
}

impl Options {
    /// Reads the arguments after the program's name.
    ///
    /// # Errors
    /// Every fault of the command line, together: unknown flags and values, and what does not go together.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Result<Self, ConfigError> {
        let (mut options, mut faults) = (Self::default(), Vec::new());
        let mut args = args.into_iter().map(|arg| arg.into().to_string_lossy().into_owned()).peekable();
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(value.to_owned())),
                _ => (&*arg, None),
            };
            match FLAGS.into_iter().find(|flag| *flag == name) {
                None => {
                    faults.push(Fault::new(name, "", "unknown argument", choose_from(name, &FLAGS)));
                    if name.starts_with('-') && inline.is_none() {
                        args.next_if(|next| !next.starts_with('-'));
                    }
                }
                Some(flag @ ("--help" | "--recompute")) => match inline {
                    Some(value) => faults.push(Fault::new(flag, value, "takes no value", format!("use {flag} alone"))),
                    None if flag == "--help" => options.help = true,
                    None => options.recompute = true,
                },
                Some(flag) => match inline.or_else(|| args.next_if(|next| !next.starts_with("--"))) {
                    Some(value) => options.take(flag, value, &mut faults),
                    None => {
                        faults.push(Fault::new(flag, "", "no value", format!("use {flag} VALUE or {flag}=VALUE")));
                    }
                },
            }
        }
        if faults.is_empty() && !options.help {
            options.require_fit(&mut faults);
        }
        if faults.is_empty() { Ok(options) } else { Err(ConfigError { faults }) }
    }

    fn take(&mut self, flag: &'static str, value: String, faults: &mut Vec<Fault>) {
        let number = match flag {
            "--model" | "--schedule" => {
                let (known, to) = match flag {
                    "--model" => (MODELS.to_vec(), &mut self.model),
                    _ => (schedules(), &mut self.schedule),
                };
                match known.contains(&&*value) {
                    true => *to = value,
                    false => faults.push(Fault::new(flag, &value, "unknown", choose_from(&value, &known))),
                }
                return;
            }
            "--seed" => match value.parse() {
                Ok(seed) => return self.seed = seed,
                Err(_) => return faults.push(Fault::new(flag, value, "no seed", format!("use 0 to {}", u64::MAX))),
            },
            "--virtual" => self.virtual_stages.insert(0),
            "--pp" => &mut self.pp,
            "--dp" => &mut self.dp,
            "--micro" => &mut self.micros,
            "--batch" => &mut self.batch,
            _ => &mut self.epochs,
        };
        match value.parse() {
            Ok(count) if (1..=MOST).contains(&count) => *number = count,
            _ => faults.push(Fault::new(flag, value, "no such number", format!("use 1 to {MOST}"))),
        }
    }

    /// Refuses what does not go together, as the run would.
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

    /// How it is trained on so many images: SGD with momentum, the learning rate warming up over an epoch and falling along a cosine.
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

/// Names of the schedules: the synchronous ones, as the networks have running statistics.
fn schedules() -> Vec<&'static str> {
    Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()).map(Generator::name).collect()
}

/// The largest count that a flag takes: threads and images are real.
const MOST: usize = 4096;
