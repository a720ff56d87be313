//! The command line: the model, the prompt, the mesh, and the sampling of tokens.

use clap::{Arg, ArgAction, Command};
use meshwork::engine::AtCuts;
use meshwork::train::config::{self, Args, Fault};
use meshwork::train::generate::{BY_DEFAULT, PromptTokens, Sampling};
use std::ffi::OsString;
use std::path::PathBuf;

/// A command line, whose errors are reported together with the model's.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether `--help` was given.
    pub help: bool,
    /// The folder of the model.
    pub model: PathBuf,
    /// The text to continue.
    pub prompt: String,
    /// Whether it is a message of a conversation.
    pub chat: bool,
    /// The message of the system in front of it.
    pub system: Option<String>,
    /// The maximum number of tokens to generate.
    pub tokens: usize,
    /// The sampling of tokens.
    pub sampling: Sampling,
    /// A tokenizer other than the folder's.
    pub tokenizer: Option<String>,
    /// The special tokens of the prompt.
    pub special_tokens: PromptTokens,
    /// The treatment of cuts at which the model compressed activations in training.
    pub compression: AtCuts,
    /// Mesh and settings, as in gpt_train.
    pub settings: Args,
}

fn command() -> Command {
    let flag = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help).allow_negative_numbers(true)
    };
    Command::new("generate")
        .arg(flag("model", "DIR", "A folder of Hugging Face (GPT-2, Llama), a checkpoint, or a folder of checkpoints"))
        .arg(flag("prompt", "TEXT", "The text to continue"))
        .arg(
            Arg::new("chat")
                .long("chat")
                .help("The prompt is a message, which the chat template of the model writes; the answer alone is shown")
                .action(ArgAction::SetTrue),
        )
        .arg(flag("system", "TEXT", "With --chat: the message of the system in front of it"))
        .arg(flag("tokens", "N", "The most tokens to draw").default_value("100").value_parser(clap::value_parser!(u64)))
        .arg(flag("mesh", "tp=2,pp=2", "Degrees of tp, pp and cp; the tokens are the same on every mesh"))
        .arg(flag("device", "cpu|cuda[:N]|cuda-emulated[:SEED[:DEVICES]]", "Where the ranks compute, as gpt_train has it"))
        .arg(
            flag("temperature", "T", "Divides the logits; 0 takes the most likely token")
                .default_value("0.8")
                .value_parser(temperature),
        )
        .arg(flag("top-k", "K", "Draws among the K most likely tokens; 0: all").default_value("0").value_parser(clap::value_parser!(u64)))
        .arg(
            flag("top-p", "P", "Draws among the most likely tokens that reach this probability")
                .default_value("1")
                .value_parser(probability),
        )
        .arg(flag("seed", "N", "Seed of the draws").default_value("0").value_parser(clap::value_parser!(u64)))
        .arg(flag("tokenizer", "NAME", "bytes, gpt2 or a tokenizer.json; without it that of the folder"))
        .arg(
            flag("special-tokens", "none|add|parse", "Special tokens of the prompt: none, those that the tokenizer adds, also those it spells")
                .default_value("add")
                .value_parser(["none", "add", "parse"]),
        )
        .arg(
            flag("compression", "as_trained|off", "Whether activations are compressed where they were in training")
                .default_value("as_trained")
                .value_parser(["as_trained", "off"]),
        )
        .arg(flag("set", "section.key=value", "Overrides one setting, such as training.matmul_dtype=bf16").action(ArgAction::Append))
        .after_help(
            "Numbers are canonical, so that every mesh writes the same text; --set training.numerics=fast is for meshes that \
             canonical numerics refuse.\n\nExit code: 2 on bad input, 1 on a failure while running, else 0.",
        )
}

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    config::help(command(), program)
}

impl Options {
    /// Parses the arguments after the program's name.
    pub fn parse<T: Into<OsString>>(args: impl IntoIterator<Item = T>) -> Self {
        let (matches, mut faults) = config::parse_all(command(), args);
        let text = |name: &str| matches.get_one::<String>(name).cloned();
        let number = |name: &str| matches.get_one::<u64>(name).copied().unwrap_or_default();
        let count = |name: &str| usize::try_from(number(name)).unwrap_or(usize::MAX);
        for (flag, advice) in [("model", "give the folder of a model"), ("prompt", "give the text to continue")] {
            if text(flag).is_none_or(|value| value.is_empty()) {
                faults.push(Fault::new(format!("--{flag}"), "", "is missing", advice));
            }
        }
        if let Some(system) = text("system").filter(|_| !matches.get_flag("chat")) {
            faults.push(Fault::new("--system", system, "belongs to a conversation", "add --chat, or leave it out"));
        }
        let mut settings = Vec::new();
        for flag in ["mesh", "device", "set"] {
            let given = matches.get_many::<String>(flag).into_iter().flatten();
            settings.extend(given.map(|value| format!("--{flag}={value}")));
        }
        let mut settings = Args::parse(settings);
        settings.assignments.insert(0, ("training.numerics".to_owned(), "canonical".to_owned(), BY_DEFAULT));
        settings.faults.splice(0..0, faults);
        let sampling = Sampling {
            temperature: matches.get_one("temperature").copied().unwrap_or_default(),
            top_k: count("top-k"),
            top_p: matches.get_one("top-p").copied().unwrap_or(1.0),
            seed: number("seed"),
        };
        Self {
            help: matches.get_flag("help"),
            model: text("model").unwrap_or_default().into(),
            prompt: text("prompt").unwrap_or_default(),
            chat: matches.get_flag("chat"),
            system: text("system"),
            tokens: count("tokens"),
            sampling,
            tokenizer: text("tokenizer"),
            special_tokens: match text("special-tokens").as_deref() {
                Some("none") => PromptTokens::None,
                Some("parse") => PromptTokens::Parse,
                _ => PromptTokens::Add,
            },
            compression: if text("compression").as_deref() == Some("off") { AtCuts::Exact } else { AtCuts::AsTrained },
            settings,
        }
    }
}

fn temperature(value: &str) -> Result<f64, &'static str> {
    value.parse().ok().filter(|&value: &f64| value.is_finite() && value >= 0.0).ok_or("expected 0 or more")
}

fn probability(value: &str) -> Result<f64, &'static str> {
    value.parse().ok().filter(|&value: &f64| value > 0.0 && value <= 1.0).ok_or("expected more than 0 and at most 1")
}
