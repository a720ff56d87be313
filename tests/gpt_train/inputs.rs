//! The inputs: flags, configuration files, data; and the reports without training.

use crate::program::{SMALL, UNSAMPLED, events, folder, metrics, numbers, run, succeed, unwrapped};
use std::collections::HashSet;
use std::fs;
use std::path::Path;

#[test]
fn help_names_every_flag_and_section() {
    let help = succeed("--help");
    for word in ["--config", "--mesh", "--data", "--steps", "--device", "--metrics", "--set", "[model]", "[comm]"] {
        assert!(help.contains(word), "{word} is missing in\n{help}");
    }
    assert_eq!(succeed("--mesh dp=0 --help"), help, "help is given whatever else is wrong");
}

#[test]
fn no_steps_report_the_mesh_without_training() {
    // (mesh, its first line, which ranks do the same)
    let cases = [
        ("dp=1", "mesh tp=1,dp=1,pp=1: 1 rank", &["rank 0 (pp rank 0)\n"][..]),
        ("dp=16", "mesh tp=1,dp=16,pp=1: 16 ranks", &["ranks 0-15 (pp rank 0), each\n"]),
        ("tp=4", "mesh tp=4,dp=1,pp=1: 4 ranks", &["ranks 0-3 (pp rank 0), each\n"]),
        (
            "pp=2,tp=4,dp=2",
            "mesh tp=4,dp=2,pp=2: 16 ranks",
            &["ranks 0-7 (pp rank 0), each\n", "ranks 8-15 (pp rank 1), each\n"],
        ),
        // No process has as many threads, and no machine the memory.
        (
            "dp=65536 --set training.global_batch_size=65536 --set model.preset=gpt2",
            "mesh tp=1,dp=65536,pp=1: 65,536 ranks",
            &["ranks 0-65535 (pp rank 0), each\n"],
        ),
    ];
    let folder = folder("report");
    for (mesh, first, ranks) in cases {
        let path = folder.join("never.jsonl");
        let report = succeed(&format!("--mesh {mesh} --steps 0 --metrics {}", path.display()));
        assert!(report.starts_with(&format!("{first}\n")), "{report}");
        let parameters = if mesh.contains("gpt2") { "124,046,592" } else { "842,496" };
        for part in ranks.iter().chain(&[&*format!("\n{parameters} parameters\n"), "  memory  ", "  communication  "]) {
            assert!(report.contains(part), "{part} is missing in\n{report}");
        }
        assert_eq!(report.matches("(pp rank ").count(), ranks.len(), "{report}");
        assert!(!report.contains("loss") && !path.exists(), "{report}");
    }
}

/// The mesh that it names is one of the cores, and the one that was the fastest.
#[test]
fn an_automatic_mesh_is_the_fastest_that_was_measured() {
    let ended = run(&format!("{SMALL} {UNSAMPLED} --mesh auto --steps 1"));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let note = unwrapped(&ended.err);
    let (_, told) = note.split_once("note: --mesh auto takes ").unwrap();
    let (mesh, reason) = told.split_once(": ").unwrap();
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores > 1 {
        let (_, fastest) = reason.strip_prefix("steps took ").unwrap().split_once(" ms with ").unwrap();
        let (fastest, others) = fastest.split_once(", ").unwrap();
        assert!(fastest == mesh && others.contains(" times as long with "), "{note}");
    }
    let ranks: usize = mesh.split(',').map(|axis| axis.split_once('=').unwrap().1.parse::<usize>().unwrap()).product();
    assert!(ranks <= cores, "{note}");
    let refused = run("--mesh auto --device cuda:h100 --steps 0");
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("--mesh auto measures the CPU"), "{}", refused.err);
}

#[test]
fn a_report_tells_what_is_communicated() {
    let cases =
        [("dp=1", &[][..]), ("dp=2", &["dp"]), ("tp=2", &["tp"]), ("dp=2,tp=2,pp=2", &["dp", "pp", "tied", "tp"])];
    for (mesh, expected) in cases {
        let report = unwrapped(&succeed(&format!("--mesh {mesh} --steps 0")));
        let (_, line) = report.split_once(" communication ").unwrap();
        let line = line.split_once(" a step").map_or("", |(line, _)| line); // of the first ranks, if not none
        let groups = line.split(';').filter_map(|part| part.trim().split_once(' ')).map(|(group, _)| group);
        assert_eq!(groups.filter(|&group| group != "world").collect::<Vec<_>>(), expected, "{report}");
    }
}

#[test]
fn all_spellings_of_a_setting_are_the_same() {
    let folder = folder("spellings");
    let text = folder.join("text.txt");
    fs::write(&text, "All men by nature desire to know. ".repeat(20)).unwrap();
    let text = text.display();
    let write = |name: &str, toml: &str| {
        let path = folder.join(name);
        fs::write(&path, toml).unwrap();
        path.display().to_string()
    };
    let mesh = "[parallelism]\ndp = 2\ntp = 2\n";
    let rest = format!("[training]\nsteps = 2\n[data]\npath = {:?}\n", text.to_string());
    let (whole, rest) = (write("whole.toml", &format!("{mesh}{rest}")), write("rest.toml", &rest));
    let same = [
        format!("--mesh dp=2,tp=2 --steps 2 --data {text} --device cpu"),
        format!("--mesh=tp=2,dp=2 --steps=2 --data={text} --device=cpu"),
        format!("--mesh pp=1,tp=2,dp=2 --steps 9 --set training.steps=2 --set=data.path={text}"),
        format!("--set parallelism.tp=2 --set parallelism.dp=2 --set training.steps=2 --set data.path=\"{text}\""),
        format!("--config {whole}"),
        format!("--config={whole} --mesh dp=2,tp=2"),
        format!("--mesh dp=2,tp=2 --config {rest}"),
        format!("--config {rest} --steps 2 --mesh tp=1 --mesh dp=2,tp=2"),
    ];
    let runs = same.map(|line| metrics(&folder, &format!("{line} {SMALL}")));
    assert_eq!(numbers(&runs[0], "step", "step"), [1.0, 2.0]);
    for run in &runs {
        assert_eq!(run[0], runs[0][0]);
        assert_eq!(numbers(run, "step", "loss"), numbers(&runs[0], "step", "loss"));
    }
}

#[test]
fn the_command_line_overrides_the_file() {
    let folder = folder("override");
    let path = folder.join("run.toml");
    fs::write(&path, "[training]\nsteps = 7\nseed = 5\n[optimizer]\nname = \"sgd\"\nlr = 1\n").unwrap();
    let line = format!("{SMALL} --config {} --steps 3 --set optimizer.lr=0.5 --set training.steps=2", path.display());
    let run = metrics(&folder, &line);
    let config = &run[0]["config"];
    assert_eq!((&config["training"]["steps"], &config["training"]["seed"]), (&2.into(), &5.into()));
    assert_eq!((&config["optimizer"]["name"], &config["optimizer"]["lr"]), (&"sgd".into(), &0.5.into()));
    assert_eq!(numbers(&run, "step", "lr"), [0.5, 0.5]);
}

#[test]
fn a_notice_does_not_end_the_run() {
    let notices = [
        ("--set optimizer.momentum=0.5", "note: optimizer.momentum = 0.5 has no effect"),
        ("--mesh pp=4 --set training.global_batch_size=4", "note: pipeline.num_microbatches = 4, the largest"),
    ];
    for (line, notice) in notices {
        let ended = run(&format!("{line} --steps 0"));
        assert_eq!((ended.code, ended.err.lines().count()), (Some(0), 1), "{}", ended.err);
        assert!(ended.err.starts_with(notice) && ended.out.starts_with("mesh "), "{ended:?}");
    }
}

const HEADER: [u32; 3] = [20_240_520, 1, 600];

fn token_file(path: &Path, header: bool, ids: impl Iterator<Item = u16>) {
    let mut bytes: Vec<u8> = HEADER.into_iter().flat_map(u32::to_le_bytes).collect();
    bytes.resize(1024, 0);
    bytes.truncate(if header { 1024 } else { 0 });
    bytes.extend(ids.flat_map(u16::to_le_bytes));
    fs::write(path, bytes).unwrap();
}

const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
    "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
    "model":{"type":"WordLevel","vocab":{"[UNK]":0,"arma":1,"virumque":2,"cano":3},"unk_token":"[UNK]"}}"#;

#[test]
fn data_of_every_kind_is_learned() {
    let folder = folder("data");
    let at = |name: &str| folder.join(name).display().to_string();
    fs::create_dir(folder.join("texts")).unwrap();
    fs::write(folder.join("texts/b.txt"), "virumque cano ".repeat(40)).unwrap();
    fs::write(folder.join("texts/a.txt"), "arma ".repeat(40)).unwrap();
    fs::write(folder.join("one.txt"), format!("{}{}", "arma ".repeat(40), "virumque cano ".repeat(40))).unwrap();
    fs::write(folder.join("words.json"), WORDS).unwrap();
    token_file(&folder.join("plain.bin"), false, (0..600).map(|id| id % 50));
    token_file(&folder.join("header.bin"), true, (0..600).map(|id| id % 50));

    let words = format!("--set data.tokenizer={} --set model.vocab_size=4", at("words.json"));
    let gpt2 = "--set data.tokenizer=gpt2 --set model.vocab_size=50257 --set model.seq_len=4";
    // (data, settings, the prompt of the sample)
    let mut cases = vec![
        (at("texts"), String::new(), "arma arma arma a"),
        (at("one.txt"), String::new(), "arma arma arma a"),
        (at("plain.bin"), "--set model.vocab_size=50".to_owned(), ""),
        (at("header.bin"), "--set model.vocab_size=50".to_owned(), ""),
    ];
    if cfg!(feature = "tokenizers") {
        cases.push((at("one.txt"), words, "arma arma arma"));
        cases.push((at("one.txt"), gpt2.to_owned(), "arma arma"));
    }
    let mut hashes = Vec::new();
    for (data, settings, prompt) in cases {
        let path = folder.join("metrics.jsonl");
        let line = format!("--mesh tp=2 --data {data} {SMALL} {settings} --steps 3 --set optimizer.lr=0.01");
        let ended = run(&format!("{line} --metrics {}", path.display()));
        // A tokenizer is said, with what begins and ends its documents.
        let said = ended.err.starts_with("note: tokenizer ") && ended.err.ends_with(" ends a document\n");
        let expected = if line.contains("data.tokenizer") { said } else { ended.err.is_empty() };
        assert!(ended.code == Some(0) && expected, "{}", ended.err);
        let out = ended.out;
        let run = crate::program::lines(&path);
        let losses = numbers(&run, "step", "loss");
        assert!(losses.len() == 3 && losses[2] < losses[0], "{line}: {losses:?}");
        let (_, sample) = out.split_once("\nA sample of the trained model:\n").unwrap();
        assert!(sample.starts_with(prompt), "{line}: {sample}");
        hashes.push(events(&run, "start")[0]["data_hash"].as_str().unwrap().to_owned());
    }
    // A folder is read as its files one after another; a header adds nothing; another tokenizer gives another stream.
    assert_eq!((&hashes[0], &hashes[2]), (&hashes[1], &hashes[3]));
    let different: HashSet<&String> = hashes[1..].iter().collect();
    assert_eq!(different.len(), hashes.len() - 2);
}

#[test]
fn files_that_are_no_text_are_skipped_and_counted() {
    let folder = folder("skipped");
    fs::write(folder.join("a.txt"), "arma virumque cano ".repeat(20)).unwrap();
    fs::write(folder.join("b.png"), [0x89, 0x50, 0xff, 0xfe]).unwrap();
    let ended = run(&format!("--data {} --steps 1 {SMALL}", folder.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert!(ended.err.contains("1 of 2 files skipped (1 no extension of text: .png 1)"), "{}", ended.err);
}

/// In every build: the card need not be there. More steps, and cards with more memory, say so.
#[test]
fn a_card_that_is_not_there_predicts_a_step() {
    let of = |line: &str| unwrapped(&succeed(&format!("--mesh dp=2,pp=2 --steps 0 {line}")));
    let report = of("--device cuda:h100");
    for part in
        [" on 4 × NVIDIA H100 SXM5 80 GB, predicted without one", " MFU ", " at the peak of ranks 0-1, of 74.5 GiB"]
    {
        assert!(report.contains(part), "{part}\n{report}");
    }
    assert!(!of("").contains("predicted"));
    let large = "--set model.preset=llama3-70b --device cuda:h200";
    assert!(of(large).contains(", of 131.3 GiB: more than it has"), "{}", of(large));
}
