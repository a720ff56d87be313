//! The main job: a GPT that learns real text over a mesh.

use crate::example;
use crate::program::{SMALL, folder, lines, numbers, succeed};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn a_gpt_learns_latin_over_16_ranks() {
    let path = folder("learning").join("run.jsonl");
    let small = "--set model.hidden_size=64 --set model.num_layers=2 --set model.seq_len=32 --set optimizer.lr=0.005";
    let out = succeed(&format!("{small} --mesh dp=2,tp=4,pp=2 --steps 40 --metrics {}", path.display()));
    let losses = numbers(&lines(&path), "step", "loss");
    assert!((5.4..5.7).contains(&losses[0]), "an untrained model guesses one of 256 bytes: {}", losses[0]);
    assert!(losses[39] < 3.6, "{losses:?}");
    assert!(out.contains("\nA sample of the trained model:\nNon eram nescius"), "{out}");
}

#[test]
fn every_optimizer_and_schedule_of_the_rate_learns() {
    let folder = folder("optimizers");
    for settings in [
        "--set optimizer.name=sgd --set optimizer.lr=0.5 --set optimizer.momentum=0.9",
        "--set optimizer.lr=0.01 --set lr_scheduler.warmup_steps=5 --set lr_scheduler.decay=cosine",
        "--set optimizer.lr=0.01 --set lr_scheduler.decay=linear --set lr_scheduler.min_lr_factor=0.1",
        "--set optimizer.lr=0.01 --set model.tie_embeddings=false --set training.max_norm=0 --set model.dropout=0.1",
    ] {
        let run = crate::program::metrics(&folder, &format!("{SMALL} --mesh dp=2,tp=2 --steps 30 {settings}"));
        let losses = numbers(&run, "step", "loss");
        assert!(losses[29] < losses[0] - 1.0, "{settings}: {losses:?}");
    }
}

/// Runs the example of fine-tuning without data, and returns the folder of its run.
fn fine_tuned(name: &str, settings: &str) -> PathBuf {
    let folder = folder(name);
    let mut finetune = Command::new(example::program("finetune"));
    let ended = finetune.args(settings.split_whitespace()).current_dir(&folder).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    folder.join("target/finetune")
}

/// Its model had no token that ends an answer, and a generated one went on to the end of the sequence.
#[test]
fn the_model_of_the_example_of_fine_tuning_ends_its_answers() {
    let model = fine_tuned("finetune", "--steps 1 --set model.hidden_size=16").join("model");
    let of = |file: &str| fs::read_to_string(model.join(file)).unwrap();
    let number = |file: &str, key: &str| serde_json::from_str::<Value>(&of(file)).unwrap()[key].clone();
    assert_eq!(
        (number("generation_config.json", "eos_token_id"), number("config.json", "vocab_size")),
        (256.into(), 257.into())
    );
    assert!(of("tokenizer.json").contains("<|endoftext|>"), "the text of the token");
}

/// The example's earlier task was sums: its model learned their form, and answered 1 of 60.
#[test]
fn the_example_of_fine_tuning_answers_what_it_held_out() {
    let run = fine_tuned("answers", "--steps 400 --set model.hidden_size=64 --set model.num_layers=2");
    let held_out = lines(&run.join("capitals.jsonl")).split_off(590);
    let wrong = held_out.iter().filter_map(|example| {
        let [prompt, right] = ["prompt", "completion"].map(|key| example[key].as_str().unwrap());
        let mut generate = Command::new(example::program("generate"));
        generate.args(["--tokenizer", "bytes", "--temperature", "0", "--prompt", prompt, "--model"]);
        let answered = generate.arg(run.join("model")).output().unwrap();
        let text = String::from_utf8_lossy(&answered.stdout).trim_end().to_owned();
        (text != format!("{prompt}{right}")).then_some(text)
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(wrong.len() <= 2, "of the last {} examples: {wrong:?}", held_out.len());
}
