//! The command line of a classifier's training.

use super::{ClassifyError, Settings, schedules};
use crate::config::{ConfigError, Fault, choose_from};
use meshwork_models::network::Network;
use meshwork_models::resnet::ResNetConfig;
use meshwork_models::vgg::VggConfig;
use meshwork_optim::{Decay, LrSchedule};
use std::ffi::OsString;

/// A command line.
///
/// ```
/// use meshwork_train::classify::Options;
///
/// let options = Options::parse(["--model", "vgg", "--pp", "4", "--recompute"])?;
/// assert_eq!((&*options.model, options.pp, options.recompute), ("vgg", 4, true));
/// let error = Options::parse(["--modle", "vgg"]).unwrap_err().to_string();
/// assert!(error.starts_with("--modle: unknown argument; the nearest is --model; use one of --model, --pp,"), "{error}");
/// # Ok::<(), meshwork_train::config::ConfigError>(())
/// ```
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
        let Settings { dp, schedule, virtual_stages, micros, batch, recompute, epochs, seed, .. } = Settings::default();
        Self {
            model: MODELS[0].to_owned(),
            pp: 2,
            dp,
            schedule,
            virtual_stages,
            micros,
            batch,
            recompute,
            epochs,
            seed,
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
        let (settings, network) = (self.settings(self.batch), self.network());
        match settings.schedule().and_then(|schedule| settings.stages(&network, schedule.placement.len())) {
            Ok(_) => {}
            Err(ClassifyError::Stages { layers, stages }) => {
                let problem = format!("{} has {layers} layers, too few for {stages} stages", self.model);
                faults.push(Fault::new("--pp", self.pp, problem, format!("use {} at most", layers * self.pp / stages)));
            }
            Err(error) => {
                let valid = format!("use other numbers, or another --schedule than {}", self.schedule);
                faults.push(Fault::new("--micro", self.micros, error.to_string(), valid));
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

    /// How it is trained on so many images: as by default, the learning rate warming up over an epoch and falling along a cosine.
    pub fn settings(&self, images: usize) -> Settings {
        let (steps_of_epoch, default) = ((images / self.batch) as u64, Settings::default());
        let lr = LrSchedule {
            warmup_steps: steps_of_epoch,
            decay: Decay::Cosine,
            decay_steps: steps_of_epoch * self.epochs as u64,
            ..default.lr
        };
        Settings {
            pp: self.pp,
            dp: self.dp,
            schedule: self.schedule.clone(),
            virtual_stages: self.virtual_stages,
            batch: self.batch,
            micros: self.micros,
            recompute: self.recompute,
            epochs: self.epochs,
            seed: self.seed,
            lr,
            ..default
        }
    }
}

/// The largest count that a flag takes: threads and images are real.
const MOST: usize = 4096;
