//! A model in a folder continues a text: the same tokens on every mesh, from a checkpoint and from its export.

use meshwork_engine::AtCuts;
use meshwork_train::config::{Args, ConfigError};
#[cfg(feature = "tokenizers")]
use meshwork_train::generate::PromptTokens;
use meshwork_train::generate::{BY_DEFAULT, Continued, Sampling, TextStream, Trained, continue_text};
use meshwork_train::{load, train};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Positions of the models here.
const SEQ: usize = 16;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("generation").join(name)
}

/// Trains a small model for two steps: the folder of its checkpoints, and that of its export.
fn trained(test: &str, kind: &str) -> [PathBuf; 2] {
    trained_with(test, kind, "")
}

/// The same with more settings.
fn trained_with(test: &str, kind: &str, more: &str) -> [PathBuf; 2] {
    let folders = ["checkpoints", "export"].map(|what| folder(&format!("{test}-{kind}-{what}")));
    folders.iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
    let [dir, export] = folders.each_ref().map(|folder| folder.display());
    let set = format!(
        "model.kind={kind} model.hidden_size=16 model.num_heads=4 model.num_layers=2 model.seq_len={SEQ} model.ffn_hidden_size=32 \
         training.steps=2 training.global_batch_size=4 checkpoint.dir={dir} checkpoint.export={export} {more}"
    );
    let (config, data) = load(&Args::parse(set.split_whitespace().map(|set| format!("--set={set}")))).unwrap();
    train(&config, &data, None, &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{error}"));
    folders
}

fn open(folder: &Path, more: &str) -> Result<Trained, ConfigError> {
    let set = format!("--set=training.numerics=canonical {more}");
    Trained::open(folder, None, Args::parse(set.split_whitespace()))
}

fn tokens(trained: &Trained, prompt: &str, count: usize, sampling: Sampling) -> (Vec<u32>, Continued) {
    let (mut drawn, prompt) = (Vec::new(), trained.encode(prompt).unwrap());
    let each = |token| drawn.push(token);
    let done = continue_text(trained, &prompt, count, sampling, &AtomicBool::new(false), each);
    let done = done.unwrap_or_else(|error| panic!("{error}"));
    (drawn, done)
}

const SAMPLING: Sampling = Sampling { temperature: 1.5, top_k: 100, top_p: 0.95, seed: 7 };

/// Longer than the model's positions, with prompts shorter and longer than these.
#[test]
fn every_mesh_and_every_form_of_the_model_writes_the_same_text() {
    for kind in ["gpt2", "llama"] {
        let [checkpoints, export] = trained("meshes", kind);
        for prompt in ["ab", "a prompt of more than sixteen tokens"] {
            let (one, done) = tokens(&open(&checkpoints, "").unwrap(), prompt, 3 * SEQ, SAMPLING);
            assert_eq!((one.len(), done.drawn, done.prompt), (3 * SEQ, 3 * SEQ, prompt.len()));
            assert!(done.cache_bytes >= 2 * 2 * SEQ * 16 * 4 / if kind == "llama" { 4 } else { 1 }, "{done:?}");
            assert_ne!(one[..SEQ], one[SEQ..2 * SEQ]);
            for mesh in ["tp=2", "tp=4", "pp=2", "tp=2,pp=2"] {
                let there = open(&checkpoints, &format!("--mesh {mesh}")).unwrap();
                assert_eq!(tokens(&there, prompt, 3 * SEQ, SAMPLING).0, one, "{kind} on {mesh}");
            }
            assert_eq!(tokens(&open(&export, "").unwrap(), prompt, 3 * SEQ, SAMPLING).0, one, "{kind} exported");
            let step = checkpoints.join("step-00000002");
            assert_eq!(tokens(&open(&step, "").unwrap(), prompt, 3 * SEQ, SAMPLING).0, one, "{kind}, one checkpoint");
            let other = Sampling { seed: 8, ..SAMPLING };
            assert_ne!(tokens(&open(&checkpoints, "").unwrap(), prompt, 3 * SEQ, other).0, one);
        }
        text_ends(&checkpoints);
    }
}

/// At a token that ends a text, which is not shown, and where the caller asks.
fn text_ends(folder: &Path) {
    let mut trained = open(folder, "--mesh tp=2").unwrap();
    let (whole, _) = tokens(&trained, "ab", 20, SAMPLING);
    let end = whole[9];
    let first = whole.iter().position(|&token| token == end).unwrap();
    trained.ends_of_text = vec![end];
    assert_eq!(tokens(&trained, "ab", 20, SAMPLING).0, whole[..first]);

    trained.ends_of_text.clear();
    let (stop, drawn) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let prompt = trained.encode("ab").unwrap();
    let each = |token| {
        let mut drawn = drawn.lock().unwrap();
        drawn.push(token);
        stop.store(drawn.len() == 5, Ordering::Relaxed);
    };
    continue_text(&trained, &prompt, 20, SAMPLING, &stop, each).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(drawn.into_inner().unwrap(), whole[..5]);
}

/// What ended documents in training ends a text, from a checkpoint and from an export.
#[test]
fn a_text_ends_where_documents_ended_in_training() {
    let [checkpoints, export] = trained_with("ends", "llama", "data.end_of_text=105");
    let mut all = Vec::new();
    for folder in [&checkpoints, &export] {
        let mut trained = open(folder, "").unwrap();
        assert_eq!(trained.ends_of_text, [105], "{}", folder.display());
        // Of some seeds one draws it soon.
        let texts = |trained: &Trained| -> Vec<Vec<u32>> {
            let drawn = |seed| tokens(trained, "ab", 40, Sampling { seed, temperature: 3.0, top_k: 0, top_p: 1.0 }).0;
            (0..40).map(drawn).collect()
        };
        let ended = texts(&trained);
        trained.ends_of_text.clear();
        let whole = texts(&trained);
        assert!(whole.iter().any(|text| text.contains(&105)), "else this shows nothing");
        for (ended, whole) in ended.iter().zip(&whole) {
            let end = whole.iter().position(|&token| token == 105).unwrap_or(whole.len());
            assert_eq!(ended[..], whole[..end]);
        }
        all.push(ended);
    }
    assert_eq!(all[0], all[1]);
    // Two models in one folder: the export would be taken, however old it is.
    for entry in std::fs::read_dir(&export).unwrap().map(|entry| entry.unwrap()) {
        std::fs::copy(entry.path(), checkpoints.join(entry.file_name())).unwrap();
    }
    let both = open(&checkpoints, "").unwrap_err().to_string();
    assert!(
        both.contains("has a model of Hugging Face and checkpoints, which are two models; name one checkpoint"),
        "{both}"
    );
    assert!(open(&checkpoints.join("step-00000002"), "").is_ok());
}

/// A prompt begins as the tokenizer begins a text, and a special token that it spells is that token where this is asked
/// for.
#[test]
#[cfg(feature = "tokenizers")]
fn prompts_have_the_special_tokens_of_the_tokenizer() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/huggingface/llama_scaled");
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let added = |id: u32, text: &str| {
        serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "added_tokens": [added(1, "<s>"), added(2, "</s>"), added(3, "<|user|>")],
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "model": {"type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "<s>": 1, "</s>": 2, "<|user|>": 3, "arma": 4, "cano": 5, "user": 6}},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let trained = open(folder.path(), "").unwrap();
    assert_eq!(trained.ends_of_text, [2]);
    let prompt = "<|user|> arma cano";
    let encoded = |special| trained.encode_with(prompt, special).unwrap();
    assert_eq!(encoded(PromptTokens::None), [0, 6, 0, 4, 5]);
    assert_eq!(encoded(PromptTokens::Add), [1, 0, 6, 0, 4, 5]);
    assert_eq!(encoded(PromptTokens::Parse), [1, 3, 4, 5]);
    assert_eq!(trained.encode("cano").unwrap(), [1, 5]);
    // transformers takes what a pipeline is given likewise, and an empty prompt is then its beginning alone.
    assert_eq!(trained.encode("").unwrap(), [1]);

    // A conversation has the special tokens that its template writes.
    let refused = trained.encode_chat("arma cano", None).unwrap_err().to_string();
    let [file, config] = ["chat_template.jinja", "tokenizer_config.json"].map(|name| folder.path().join(name));
    let (file, config) = (file.display(), config.display());
    let nowhere = format!("there is no chat template: {file} does not exist, and {config}");
    assert!(refused.starts_with(&format!("data.chat_template = (unset): {nowhere}")), "{refused}");
    assert!(refused.ends_with(", or continue a text without one"), "{refused}");
    let template = "{% for message in messages %}{% if message.role == 'user' %}<|user|>{% endif %} {{ message.content }} \
                    {% endfor %}{% if add_generation_prompt %}</s>{% endif %}";
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("chat_template.jinja"), template).unwrap();
    assert_eq!(trained.encode_chat("arma cano", None).unwrap(), [3, 4, 5, 2]);
    assert_eq!(trained.encode_chat("arma", Some("cano")).unwrap(), [5, 3, 4, 2]);
    std::fs::write(file("other.jinja"), "<s>{{ messages[0].content }}{{ raise_exception('no') if messages[1] }}")
        .unwrap();
    let other = open(folder.path(), &format!("--set=data.chat_template={}", file("other.jinja").display())).unwrap();
    assert!(other.config.notices.is_empty(), "{:?}", other.config.notices);
    assert_eq!(other.encode_chat("cano", None).unwrap(), [1, 5]);
    let refused = other.encode_chat("cano", Some("arma")).unwrap_err().to_string();
    assert!(refused.contains("other.jinja\": fails: invalid operation: no"), "{refused}");
}

/// A checkpoint has the template of its run; another one may be named.
#[test]
#[cfg(feature = "tokenizers")]
fn a_checkpoint_has_the_chat_template_of_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let template = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        format!("data.chat_template={}", folder.path().join(name).display())
    };
    let of_run = template("of_run.jinja", "({{ messages[0].content }})");
    let [checkpoints, _] = trained_with("chat", "gpt2", &of_run);
    let asked = |set: &str| open(&checkpoints, set).unwrap().encode_chat("ab", None).unwrap();
    assert_eq!(asked(""), b"(ab)".map(u32::from));
    assert_eq!(
        asked(&format!("--set={}", template("other.jinja", "{{ messages[0].content }}?"))),
        b"ab?".map(u32::from)
    );
}

#[test]
fn characters_are_given_out_whole() {
    let [_, export] = trained("characters", "gpt2");
    let trained = open(&export, "").unwrap();
    let prompt = trained.encode("caf").unwrap();
    let mut stream = TextStream::new(&trained, &prompt);
    let pushed: Vec<String> = "é 🦀!".bytes().chain([0xc3]).map(|byte| stream.push(byte.into())).collect();
    assert_eq!(pushed, ["", "é", " ", "", "", "", "🦀", "!", ""]);
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn folders_prompts_and_meshes_that_do_not_fit_are_refused() {
    let [checkpoints, export] = trained("refused", "gpt2");
    let message = |folder: &Path, tokenizer: Option<&str>, args: &str| {
        Trained::open(folder, tokenizer, Args::parse(args.split_whitespace())).unwrap_err().to_string()
    };
    let nowhere = message(Path::new("no/such"), None, "--set no.key=1");
    assert!(nowhere.contains("no/such: is not a folder; give a folder of Hugging Face"), "{nowhere}");
    let empty = folder("empty");
    std::fs::create_dir_all(&empty).unwrap();
    assert!(message(&empty, None, "").contains("--model "), "{}", message(&empty, None, ""));
    let both = message(&checkpoints, None, "--mesh dp=2,tp=3");
    assert!(both.contains("dp=2: one text has nothing to split over dp; use tp, pp and cp"), "{both}");
    assert!(both.contains("model.num_heads = 4: is not divisible by parallelism.tp = 3"), "{both}");
    let tokenizer = message(&export, Some("no-such-tokenizer"), "");
    assert!(
        tokenizer.starts_with("--tokenizer = \"no-such-tokenizer\": is neither")
            || tokenizer.contains("neither a known"),
        "{tokenizer}"
    );
    assert!(open(&export, "").unwrap().encode("").unwrap_err().to_string().contains("has no tokens"));
}

/// The cache is cut along the text: each rank has the keys and values of a part of the positions.
#[test]
fn ranks_of_cp_cache_parts_of_the_text() {
    for (name, kind, more) in
        [("over_cp", "gpt2", ""), ("over_cp", "llama", ""), ("windowed_over_cp", "llama", "model.sliding_window=5")]
    {
        let [checkpoints, _] = trained_with(name, kind, more);
        let open = |numerics: &str, more: &str| {
            let set = format!("--set=training.numerics={numerics} {more}");
            Trained::open(&checkpoints, None, Args::parse(set.split_whitespace())).unwrap()
        };
        let prompts = ["ab", "a prompt of more than sixteen tokens"];
        for (prompt, numerics) in prompts.iter().flat_map(|prompt| [(prompt, "fast"), (prompt, "canonical")]) {
            let (one, whole) = tokens(&open(numerics, ""), prompt, 3 * SEQ, SAMPLING);
            for mesh in ["cp=2", "cp=3", "tp=2,cp=2", "pp=2,cp=2"] {
                if mesh == "cp=3" && numerics == "canonical" {
                    continue; // 16 tokens
                }
                let (there, part) = tokens(&open(numerics, &format!("--mesh {mesh}")), prompt, 3 * SEQ, SAMPLING);
                assert_eq!(there, one, "{kind} on {mesh}, {numerics}");
                let held = if mesh == "cp=3" { SEQ.div_ceil(3) } else { SEQ / 2 };
                let parts = if mesh.starts_with("cp") { 1 } else { 2 };
                assert_eq!(part.cache_bytes * parts * SEQ, whole.cache_bytes * held, "{kind} on {mesh}");
            }
        }
    }
}

/// What a run compressed between stages is in its checkpoints and exports: generation compresses at the same cuts,
/// which one rank simulates, or does not.
#[test]
fn a_model_compresses_where_it_did_in_training() {
    let run = "parallelism.pp=2 pipeline.num_microbatches=2 compress.activations=quant:1/row compress.gradients=none";
    let [checkpoints, export] = trained_with("compressed", "gpt2", run);
    let text = |folder: &Path, cuts, more: &str| {
        let args = Args::parse(format!("--set=training.numerics=canonical {more}").split_whitespace());
        tokens(&Trained::open_at(cuts, folder, None, args).unwrap(), "ab", SEQ, SAMPLING).0
    };
    let lost = text(&checkpoints, AtCuts::AsTrained, "");
    for (folder, mesh) in [(&checkpoints, "pp=2"), (&checkpoints, "tp=2"), (&export, "pp=1"), (&export, "tp=2,pp=2")] {
        assert_eq!(text(folder, AtCuts::AsTrained, &format!("--mesh {mesh}")), lost, "{} on {mesh}", folder.display());
    }
    let exact = text(&checkpoints, AtCuts::Exact, "");
    assert_ne!(exact, lost, "one bit loses much");
    assert_eq!(text(&export, AtCuts::Exact, "--mesh pp=2"), exact);
    assert_eq!(
        text(&checkpoints, AtCuts::AsTrained, "--set compress.activations=none"),
        exact,
        "what is asked for is taken first"
    );

    let weights = std::fs::read(export.join("model.safetensors")).unwrap();
    let header = String::from_utf8_lossy(&weights[8..8 + u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize]);
    let header: serde_json::Value = serde_json::from_str(&header).unwrap();
    let said: serde_json::Value = serde_json::from_str(header["__metadata__"]["meshwork"].as_str().unwrap()).unwrap();
    assert_eq!((&said["compress"]["activations"], &said["cuts"]), (&"quant:1/row".into(), &vec![1].into()));
    assert_eq!(header["__metadata__"]["format"], "pt");
    let [_, plain] = trained("uncompressed", "gpt2");
    let weights = std::fs::read(plain.join("model.safetensors")).unwrap();
    assert!(!String::from_utf8_lossy(&weights[..400]).contains("meshwork"), "nothing was compressed");
}

/// What is lost of the whole value goes with no canonical numerics: those that a program has by default give way, those
/// that were asked for are refused.
#[test]
fn canonical_numerics_by_default_give_way_to_what_a_run_compressed() {
    let run = "parallelism.pp=2 pipeline.num_microbatches=2 compress.activations=topk:0.5";
    let [checkpoints, export] = trained_with("whole", "llama", run);
    for folder in [&checkpoints, &export] {
        let numerics = |from| {
            let mut args = Args::parse(["--mesh", "pp=2"]);
            args.assignments.push(("training.numerics".to_owned(), "canonical".to_owned(), from));
            Trained::open(folder, None, args).map(|trained| trained.config.training.numerics.to_string())
        };
        assert_eq!(numerics(BY_DEFAULT).unwrap(), "fast");
        let refused = numerics("--set").unwrap_err().to_string();
        assert!(
            refused.contains("compress.activations = \"topk:0.5\": cut.1: canonical numerics promise"),
            "{refused}"
        );
    }
}

/// A tokenizer that changed since would read other words from the ids of the model.
#[test]
#[cfg(feature = "tokenizers")]
fn a_tokenizer_that_changed_since_the_run_is_refused() {
    std::fs::create_dir_all(folder("")).unwrap();
    let (tokenizer, text) = (folder("changed.json"), folder("changed.txt"));
    let write = |arma: u32, cano: u32| {
        let words = format!(r#"{{"[UNK]":0,"arma":{arma},"cano":{cano}}}"#);
        let model = format!(r#"{{"type":"WordLevel","unk_token":"[UNK]","vocab":{words}}}"#);
        let rest = r#""version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},"normalizer":null,"decoder":null"#;
        std::fs::write(&tokenizer, format!(r#"{{{rest},"post_processor":null,"model":{model}}}"#)).unwrap();
    };
    write(1, 2);
    std::fs::write(&text, "arma cano ".repeat(200)).unwrap();
    let data = format!("data.tokenizer={} data.path={} model.vocab_size=8", tokenizer.display(), text.display());
    let [checkpoints, _] = trained_with("changed", "llama", &data);
    assert_eq!(open(&checkpoints, "").unwrap().encode("arma cano").unwrap(), [1, 2]);
    write(2, 1);
    let error = open(&checkpoints, "").unwrap_err().to_string();
    assert!(error.starts_with("--tokenizer ") && error.contains("and the model was trained with one of"), "{error}");
}
