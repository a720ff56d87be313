//! Fine-tunes a model on questions and answers, over any mesh, ends when it gets no better, and keeps its best weights.
//!
//! ```text
//! cargo run --release --example finetune                              # a small Llama learns capitals, on one rank
//! cargo run --release --example finetune -- --mesh dp=2,tp=2 --dpo
//! cargo run --release --features tokenizers --example finetune -- --data chat.jsonl --set model.init_from=DIR \
//!     --set checkpoint.dir=CHECKPOINTS --set checkpoint.best=true --set checkpoint.export=OUT
//! ```
//! Without `--data` it writes examples of its own: questions about capitals. With `--dpo` an adapter learns to prefer
//! the chosen one of two answers. `docs/finetune.md` has the files, the settings, and what a run prints.

#[path = "../shared/output.rs"]
mod output;

use meshwork::train::config::{Args, usage};
use meshwork::train::{load, train};
use output::{BAD_INPUT, FAILED, fail, fail_together, show, show_fitted, tell};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::{fs, io};

/// The settings of this program. The command line comes behind them, and wins.
const SETTINGS: [&str; 10] = [
    "training.objective=sft",
    "training.steps=400",
    "training.patience=4",
    "validation.every=20",
    "validation.fraction=0.1",
    "optimizer.lr=3e-3",
    "optimizer.weight_decay=0",
    "lr_scheduler.warmup_steps=20",
    "lr_scheduler.decay=cosine",
    "metrics.sample_tokens=0",
];

/// The settings of `--dpo`.
const DPO: [&str; 2] = ["training.objective=dpo", "lora.rank=8"];

/// The folder of a run without data.
const FOLDER: &str = "target/finetune";

/// The settings of a run without data.
const DEMO: [&str; 8] = [
    "model.preset=llama-tiny",
    "model.vocab_size=257", // a byte, or the end of an answer
    "model.seq_len=128",
    "data.path=target/finetune/capitals.jsonl",
    "data.end_of_text=256",
    "checkpoint.dir=target/finetune/checkpoints",
    "checkpoint.best=true",
    "checkpoint.export=target/finetune/model",
];

/// What is asked for: a country and its capital a line.
const CAPITALS: &str = include_str!("capitals.txt");

/// What may stand in front of a question.
const BEGINNINGS: [&str; 4] = ["", "Question: ", "Tell me: ", "Please answer: "];

/// The questions about a country, one a line.
const QUESTIONS: &str = include_str!("questions.txt");

/// Each question about each country behind each beginning, shuffled, in lines such as
/// `{"prompt": "Italy has which capital? ", "completion": "Rome.", "chosen": "Rome.", "rejected": "Tokyo."}`.
fn questions() -> String {
    let capitals: Vec<_> = CAPITALS.lines().filter_map(|pair| pair.split_once(' ')).collect();
    let questions: Vec<_> = QUESTIONS.lines().collect();
    let lines = capitals.len() * questions.len() * BEGINNINGS.len();
    let line = |at: usize| {
        let ((country, right), (_, wrong)) = (capitals[at % capitals.len()], capitals[(at + 1) % capitals.len()]);
        let way = at / capitals.len();
        let (begin, question) = (BEGINNINGS[way % BEGINNINGS.len()], questions[way / BEGINNINGS.len()]);
        let prompt = format!("{begin}{} ", question.replace('_', country));
        format!(
            "{{\"prompt\": \"{prompt}\", \"completion\": \"{right}.\", \"chosen\": \"{right}.\", \"rejected\": \"{wrong}.\"}}\n"
        )
    };
    (0..lines).map(|at| line(at * 7919 % lines)).collect()
}

/// The words of the command line behind the settings of this program.
fn words() -> io::Result<Vec<String>> {
    let sets = |settings: &[&str]| settings.iter().map(|setting| format!("--set={setting}")).collect::<Vec<_>>();
    let words = std::env::args().skip(1);
    let given: Vec<String> = words.flat_map(|word| if word == "--dpo" { sets(&DPO) } else { vec![word] }).collect();
    let has_data = given.iter().any(|word| word.starts_with("--data") || word.contains("data."));
    if has_data || given.iter().any(|word| word == "--help") {
        return Ok([sets(&SETTINGS), given].concat());
    }
    _ = fs::remove_dir_all(FOLDER); // of the run before, if there was one
    fs::create_dir_all(FOLDER)?;
    fs::write(format!("{FOLDER}/capitals.jsonl"), questions())?;
    Ok([sets(&SETTINGS), sets(&DEMO), given].concat())
}

fn main() -> ExitCode {
    let args = match words() {
        Ok(words) => Args::parse(words),
        Err(error) => return fail(FAILED, &format_args!("{FOLDER}: {error}")),
    };
    if args.help {
        return show_fitted(&usage("cargo run --release --example finetune --"));
    }
    let (config, data) = match load(&args) {
        Ok(loaded) => loaded,
        Err(error) => return fail(BAD_INPUT, &error),
    };
    config.notices.iter().for_each(|notice| tell(&format_args!("note: {notice}")));
    match train(&config, &data, args.metrics.as_deref(), &AtomicBool::new(false)) {
        Err(error) => fail_together(&config, &error),
        Ok(outcome) => {
            let best = outcome.best.map_or(String::new(), |best| {
                format!("the lowest validation loss was {:.4}, after step {}\n", best.loss, best.step)
            });
            show(&best)
        }
    }
}
