//! Draws configurations: a value, or none, for every key.
//!
//! More than 400 lines: one entry per key, to be read beside the table of keys.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;

use meshwork_pipeline::{Generator, Shape};
use meshwork_testkit::Rng;
use meshwork_train::config::keys::{self, Key, ValueKind};

/// Tokens of the `.bin` file, and characters of the text.
pub const TOKENS: usize = 1200;
/// Examples of the file of them, and pairs.
pub const EXAMPLES: usize = 300;
/// One more than the largest id of the `.bin` file, and of the one for models from a folder.
pub const IDS: usize = 61;
pub const FEW_IDS: usize = 29;

/// Models of Hugging Face in folders of this repository, with their sizes; a drawn configuration gives all of them.
const PRETRAINED: [(&str, &[(&str, &str)]); 2] = [
    (
        "gpt2",
        &[
            ("model.kind", "gpt2"),
            ("model.vocab_size", "29"),
            ("model.num_layers", "2"),
            ("model.hidden_size", "16"),
            ("model.num_heads", "4"),
            ("model.ffn_hidden_size", "20"),
            ("model.seq_len", "12"),
            ("model.tie_embeddings", "true"),
        ],
    ),
    (
        "llama_scaled",
        &[
            ("model.kind", "llama"),
            ("model.vocab_size", "29"),
            ("model.num_layers", "2"),
            ("model.hidden_size", "16"),
            ("model.num_heads", "4"),
            ("model.num_kv_heads", "2"),
            ("model.ffn_hidden_size", "20"),
            ("model.seq_len", "12"),
            ("model.tie_embeddings", "false"),
            ("model.rope_theta", "100.0"),
            ("model.rope_scaling_factor", "8.0"),
        ],
    ),
];

/// Other families in such folders, with the sizes of `llama_scaled`, and whether their embeddings are tied.
const FAMILIES: &[(&str, bool)] = &[
    ("mistral", false),
    ("qwen2", true),
    ("qwen3", false),
    ("gemma", true),
    ("gemma3", true),
    ("olmo2", false),
    ("phi3", false),
    ("gpt_neox", false),
];

/// A configuration: what is given, by key.
#[derive(Clone, Debug, Default)]
pub struct Case {
    pub keys: BTreeMap<String, String>,
    /// Whether some targets are masked, a number of them that differs from sample to sample.
    pub masked: bool,
}

/// What the values have to agree on, so that most configurations are valid.
struct Frame {
    dp: usize,
    tp: usize,
    pp: usize,
    llama: bool,
    schedule: Pipeline,
    chunks: usize,
    /// Ranks of each stage, where the schedule is replicated.
    replicas: Vec<usize>,
    layers: usize,
    heads: usize,
    micros: usize,
    batch: usize,
    canonical: bool,
    /// The type of storage.
    dtype: &'static str,
    data: Data,
    profile: bool,
    pretrained: Option<usize>,
    /// Ranks that share out the sequence.
    cp: usize,
    /// Ranks that share out the experts, and experts.
    ep: usize,
    experts: usize,
    router: &'static str,
    /// Whether something is compressed.
    lossy: bool,
    /// Whether ranks compress weights that they gather.
    gathers: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Pipeline {
    Named(Generator),
    /// A file with the schedule that this generator makes.
    File(Generator),
    Replicated,
}

#[derive(Clone, Copy, PartialEq)]
enum Data {
    Cicero,
    Text,
    Folder,
    Bin,
    Few,
    /// Megatron's format.
    Indexed,
    /// JSON lines.
    Lines,
    /// The text and the tokens, with weights.
    Mixed,
}

/// The folder of the files that configurations name.
pub fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("configurations");
        // Of an earlier call of the test: checkpoints of another run are refused.
        for kept in ["saves", "exported"] {
            _ = fs::remove_dir_all(folder.join(kept));
        }
        fs::create_dir_all(folder.join("texts")).expect("a folder for files");
        let mut rng = Rng::new(3);
        let mut tokens =
            |ids: usize| -> Vec<u8> { (0..TOKENS).flat_map(|_| (rng.below(ids) as u16).to_le_bytes()).collect() };
        let (few, tokens) = (tokens(FEW_IDS), tokens(IDS));
        let text: String = (0..TOKENS).map(|_| char::from(b'a' + rng.below(26) as u8)).collect();
        let (first, second) = text.split_at(TOKENS / 2);
        let line = |letters: &[u8]| format!("{{\"text\": \"{}\"}}\n", String::from_utf8_lossy(letters));
        let lines: String = text.as_bytes().chunks(13).map(line).collect();
        // Of 3 to 7 letters, so that they fit into each sequence; the two answers of a pair differ.
        let letters = |at: usize, most: usize| "abcdef"[at % 3..at % 3 + 1 + at % most].to_owned();
        let example =
            |at: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n", letters(at, 3), letters(at / 2, 4));
        let pair = |at: usize| {
            let (prompt, one, other) = (letters(at, 3), letters(at / 2, 3), letters(at / 3, 2));
            format!("{{\"prompt\": \"{prompt}\", \"chosen\": \"{one}\", \"rejected\": \"x{other}\"}}\n")
        };
        let [examples, pairs]: [String; 2] = [(0..EXAMPLES).map(example).collect(), (0..EXAMPLES).map(pair).collect()];
        // Documents of 10 tokens, as Megatron's preprocess_data.py writes them.
        let documents = TOKENS as i64 / 10;
        let mut index = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08".to_vec();
        index.extend([documents, documents + 1].into_iter().flat_map(i64::to_le_bytes));
        index.extend((0..documents).flat_map(|_| 10i32.to_le_bytes()));
        index.extend((0..documents).flat_map(|document| (20 * document).to_le_bytes()));
        index.extend((0..=documents).flat_map(i64::to_le_bytes));
        for (name, content) in [
            ("tokens.bin", &tokens[..]),
            ("few.bin", &few[..]),
            ("text.txt", text.as_bytes()),
            ("texts/a.md", first.as_bytes()),
            ("texts/b.txt", second.as_bytes()),
            ("lines.jsonl", lines.as_bytes()),
            ("examples.jsonl", examples.as_bytes()),
            ("pairs.jsonl", pairs.as_bytes()),
            ("indexed.bin", &tokens[..]),
            ("indexed.idx", &index[..]),
            ("chat.jinja", b"{% for message in messages %}{{ message.content }}{% endfor %}"),
        ] {
            fs::write(folder.join(name), content).expect("a file of tokens");
        }
        folder
    })
}

/// The path of a file of this crate.
fn of_crate(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

fn path(name: &str) -> String {
    folder().join(name).display().to_string()
}

impl Case {
    /// The configuration of a seed.
    pub fn draw(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let frame = Frame::draw(&mut rng);
        let mut case = Case { masked: rng.below(2) == 0, ..Case::default() };
        for (section, key) in keys::all() {
            let name = format!("{section}.{}", key.name);
            let value = match frame.pretrained {
                Some(at) if section == "model" => {
                    let given = PRETRAINED[at].1.iter().find(|(key, _)| *key == name);
                    let folder = || format!("../models/tests/fixtures/huggingface/{}", PRETRAINED[at].0);
                    match &*name {
                        "model.init_from" => Some(of_crate(&folder())),
                        "model.dropout" => frame.value(&mut rng, &name, key),
                        _ => given.map(|(_, value)| (*value).to_owned()),
                    }
                }
                _ => frame.value(&mut rng, &name, key),
            };
            if let Some(value) = value {
                case.keys.insert(name, value);
            }
        }
        // From numbers of its own, so that seeds keep what they drew before there was the key. 100: more tokens than
        // there are.
        let mut own = Rng::new(!seed);
        if frame.pretrained.is_none() && rarely(&mut own, 3) {
            let window = own.pick(&["0", "1", "3", "7", "100"]);
            case.keys.insert("model.sliding_window".to_owned(), window.to_owned());
        }
        // Another family of the same sizes.
        if frame.pretrained == Some(1) && !rarely(&mut own, 4) {
            let (name, tied) = own.pick(FAMILIES);
            case.keys.retain(|key, _| {
                !(key.starts_with("model.rope_") || name == "gpt_neox" && key == "model.num_kv_heads")
            });
            let folder = of_crate(&format!("../models/tests/fixtures/huggingface/{name}"));
            let of = [("model.init_from", folder), ("model.tie_embeddings", tied.to_string())];
            case.keys.extend(of.map(|(key, value)| (key.to_owned(), value)));
        } else if frame.pretrained.is_none() && rarely(&mut own, 200) {
            case.keys.insert("model.config".to_owned(), path("texts"));
        }
        // Adapters, which freeze all else.
        if rarely(&mut own, 5) {
            let some = |rng: &mut Rng, words: &[&str]| rng.pick(words).to_owned();
            let (rank, targets) =
                (some(&mut own, &["1", "2", "999"]), some(&mut own, &["all-linear", "all-linear", "nothing"]));
            // The rows of experts have no dropout.
            let dropout = some(&mut own, &["0", "0.2"]);
            let dropout = if frame.experts > 0 && !rarely(&mut own, 8) { "0".to_owned() } else { dropout };
            let rest = [("dropout", dropout), ("rslora", some(&mut own, &["true", "false"]))];
            let rank = if rank == "999" && !rarely(&mut own, 8) { "1".to_owned() } else { rank };
            // Adapters of rank 1 are vectors.
            let of_matrices = matches!(case.get("optimizer.name"), Some("muon" | "adam8bit"));
            let rank = if rank == "1" && of_matrices && !rarely(&mut own, 8) { "2".to_owned() } else { rank };
            let targets = if targets == "nothing" && !rarely(&mut own, 8) { "all-linear".to_owned() } else { targets };
            let keys = [("rank", rank), ("targets", targets)].into_iter().chain(rest);
            case.keys.extend(keys.map(|(key, value)| (format!("lora.{key}"), value)));
            let more = [
                ("alpha", one_of(&mut own, &["0.5", "16"])),
                ("export", one_of(&mut own, &["merged", "adapter"])),
                ("quantization", one_of(&mut own, &["bf16", "int8", "nf4"])),
                ("block_size", Some(if frame.tp > 1 { "1" } else { own.pick(&["5", "64"]) }.to_owned())),
                ("double_quantization", one_of(&mut own, &["true", "false"])),
                ("init_from", rarely(&mut own, 40).then(|| path("texts"))),
            ];
            case.keys.extend(more.into_iter().filter_map(|(key, value)| Some((format!("lora.{key}"), value?))));
            if !rarely(&mut own, 8) {
                case.keys.remove("model.freeze");
            }
        }
        // Experts on a part of the ranks of cp.
        if frame.experts > 0 && frame.dp * frame.tp * frame.pp <= 2 && rarely(&mut own, 2) {
            let experts = (2 * frame.experts).to_string();
            let keys = [("parallelism.cp", "4"), ("parallelism.ep", "2"), ("moe.num_experts", &*experts)];
            case.keys.extend(keys.map(|(key, value)| (key.to_owned(), value.to_owned())));
            if !case.keys.contains_key("parallelism.context_parallel_method") {
                case.keys.insert("parallelism.context_parallel_method".to_owned(), "ring".to_owned());
            }
        }
        if frame.pretrained.is_none() && rarely(&mut own, 8) {
            case.draw_examples(&mut own, !frame.asynchronous());
        }
        case
    }

    /// Examples in the place of other data, or pairs of answers for a model with adapters; rarely where the rest does
    /// not go with `pairs`.
    fn draw_examples(&mut self, rng: &mut Rng, pairs: bool) {
        let pairs = if pairs { !rarely(rng, 4) } else { rarely(rng, 32) };
        let (objective, file) = if pairs { ("dpo", "pairs.jsonl") } else { ("sft", "examples.jsonl") };
        let mut set = |key: &str, value: String| _ = self.keys.insert(key.to_owned(), value);
        set("training.objective", objective.to_owned());
        // Rarely a text, or examples of the other kind.
        set("data.path", path(if rarely(rng, 40) { rng.pick(&["text.txt", "examples.jsonl"]) } else { file }));
        set("model.vocab_size", rng.pick(&["256", "300"]).to_owned());
        if objective == "dpo" && !rarely(rng, 20) {
            set("lora.rank", "2".to_owned());
        }
        for (key, value) in
            [("dpo.beta", one_of(rng, &["0.1", "2"])), ("dpo.label_smoothing", one_of(rng, &["0", "0.2", "0.5"]))]
        {
            value.filter(|value| value != "0.5" || rarely(rng, 6)).into_iter().for_each(|value| set(key, value));
        }
        // Of what a text may have, most does not go with examples.
        let of_texts =
            ["sources", "format", "documents", "skip_bad_lines", "tokenizer", "end_of_text", "beginning_of_text"];
        let often = of_texts.map(|key| format!("data.{key}")).into_iter().chain(["validation.fraction".to_owned()]);
        for key in often.filter(|_| !rarely(rng, 24)) {
            self.keys.remove(&key);
        }
        if self.get("lora.rank").is_some() && !rarely(rng, 8) {
            self.keys.remove("model.freeze");
        }
    }

    /// The value of a key, if it is given.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    /// The same value, read.
    pub fn read<T: std::str::FromStr>(&self, key: &str) -> Option<T> {
        self.get(key).map(|value| value.parse().ok().unwrap_or_else(|| panic!("{key} = {value}")))
    }

    /// The numbers of a list, if one is given.
    pub fn list(&self, key: &str) -> Option<Vec<usize>> {
        let numbers = self.get(key)?.strip_prefix('[')?.strip_suffix(']')?;
        Some(numbers.split(',').filter(|number| !number.is_empty()).map(|it| it.trim().parse().unwrap()).collect())
    }

    /// The same configuration with other values; `None` leaves a key out.
    pub fn with(&self, values: &[(&str, Option<&str>)]) -> Case {
        let mut case = self.clone();
        for &(key, value) in values {
            case.keys.remove(key);
            case.keys.extend(value.map(|value| (key.to_owned(), value.to_owned())));
        }
        case
    }

    /// As command-line flags.
    pub fn flags(&self) -> Vec<String> {
        self.keys.iter().flat_map(|(key, value)| ["--set".to_owned(), format!("{key}={value}")]).collect()
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.flags().join(" "))?;
        if self.masked { f.write_str(" (masked)") } else { Ok(()) }
    }
}

/// One time in `many`.
fn rarely(rng: &mut Rng, many: usize) -> bool {
    rng.below(many) == 0
}

/// One of the values, or none.
fn one_of(rng: &mut Rng, values: &[&str]) -> Option<String> {
    Some(rng.below(values.len() + 1)).filter(|&at| at > 0).map(|at| values[at - 1].to_owned())
}

/// Numbers that add up to `sum`, `len` of them, each at least `least`.
fn parts(rng: &mut Rng, sum: usize, len: usize, least: usize) -> Vec<usize> {
    let mut parts = vec![least; len];
    for _ in 0..sum.saturating_sub(least * len) {
        parts[rng.below(len)] += 1;
    }
    parts
}

impl Frame {
    fn draw(rng: &mut Rng) -> Frame {
        let (dp, tp, pp) = loop {
            let degree = |rng: &mut Rng| rng.pick(&[1, 1, 1, 2, 2, 2, 3, 4]);
            let (dp, tp, pp) = (degree(rng), degree(rng), degree(rng));
            if dp * tp * pp <= 8 {
                break (dp, tp, pp);
            }
        };
        let generator = rng.pick(&Generator::ALL);
        let synchronous = if generator.is_synchronous() { generator } else { Generator::OneFOneB };
        let schedule = match rng.below(8) {
            0 => Pipeline::File(synchronous),
            1 if pp > 1 => Pipeline::Replicated,
            _ => Pipeline::Named(generator),
        };
        let generator = match schedule {
            Pipeline::Named(generator) | Pipeline::File(generator) => generator,
            Pipeline::Replicated => Generator::OneFOneB,
        };
        let chunks = match generator.chooses_virtual_stages() {
            true => 1 + rng.below(3),
            false => generator.default_virtual_stages(),
        };
        let replicas = {
            let (stages, off) = (1 + rng.below(pp), usize::from(rarely(rng, 20)));
            parts(rng, pp + off, stages, 1 - off)
        };
        let stages = if schedule == Pipeline::Replicated { replicas.len() } else { pp * chunks };
        let pretrained = rarely(rng, 12).then(|| rng.below(PRETRAINED.len()));
        let layers = if rarely(rng, 4) { 1 + rng.below(6) } else { stages * (1 + rng.below(2)) };
        let takes = generator.micros(pp);
        let micros = takes.min.next_multiple_of(takes.multiple_of) + takes.multiple_of * rng.below(3);
        let canonical = rng.below(3) == 0 && (generator.is_synchronous() || rarely(rng, 8));
        let mut batch = dp * micros * (1 + rng.below(2));
        if canonical && !rarely(rng, 8) {
            batch = dp * micros.next_power_of_two() * (1 + rng.below(2));
        }
        let experts = pretrained.is_none() && (generator.is_synchronous() || rarely(rng, 8)) && rarely(rng, 3);
        let ep = match experts {
            true => rng.pick(&[1, 2, dp]),
            false => {
                if rarely(rng, 60) {
                    2
                } else {
                    1
                }
            }
        };
        let ep = if dp % ep == 0 || rarely(rng, 8) { ep } else { 1 };
        let router = rng.pick(&["topk", "switch", "gshard", "expert_choice", "bias"]);
        let experts = if experts { ep * rng.pick(&[1, 2, 2, 4]) } else { 0 };
        let cp = rng.pick(&[1, 1, 1, 2, 2, 3]);
        let cp = if dp * tp * pp * cp <= 8 && (!canonical || cp == 2) || rarely(rng, 16) { cp } else { 1 };
        // Experts over all of cp too.
        let (ep, experts) =
            if experts > 0 && cp > 1 && rng.below(2) == 0 { (ep * cp, experts * cp) } else { (ep, experts) };
        let lossy = rarely(rng, if canonical { 8 } else { 4 });
        let half = rarely(rng, 3);
        Frame {
            dtype: if half || rarely(rng, 60) { rng.pick(&["bf16", "f16"]) } else { "f32" },
            cp,
            ep,
            experts: if experts == 1 { 2 } else { experts },
            router,
            dp,
            tp,
            pp,
            llama: rng.below(2) == 0,
            schedule,
            chunks,
            replicas,
            layers: if pretrained.is_some() { 2 } else { layers },
            heads: tp * (1 + rng.below(2)),
            micros,
            batch,
            canonical,
            data: match pretrained {
                Some(_) => Data::Few,
                None => rng.pick(&[
                    Data::Cicero,
                    Data::Text,
                    Data::Folder,
                    Data::Bin,
                    Data::Bin,
                    Data::Indexed,
                    Data::Lines,
                    Data::Mixed,
                ]),
            },
            profile: rarely(rng, 20),
            pretrained,
            lossy,
            gathers: lossy && !canonical && dp > 1 && rng.below(3) == 0,
        }
    }

    fn asynchronous(&self) -> bool {
        matches!(self.schedule, Pipeline::Named(generator) if !generator.is_synchronous())
    }

    fn stages(&self) -> usize {
        if self.schedule == Pipeline::Replicated { self.replicas.len() } else { self.pp * self.chunks }
    }

    /// A degree, left out where it is the default, or not.
    fn degree(rng: &mut Rng, degree: usize) -> Option<String> {
        (degree > 1 || rarely(rng, 3)).then(|| degree.to_string())
    }

    /// The value of a key, or none.
    fn value(&self, rng: &mut Rng, name: &str, key: &Key) -> Option<String> {
        let some = |value: &dyn fmt::Display| Some(value.to_string());
        match name {
            "model.preset" => {
                let ValueKind::Choice(words) = key.kind else { panic!("{name} is a choice") };
                if rarely(rng, 3) { some(&rng.pick(words)) } else { None }
            }
            "model.kind" => some(&if self.llama { "llama" } else { "gpt2" }).filter(|_| self.llama || !rarely(rng, 3)),
            "model.init_from" => rarely(rng, 200).then(|| path("texts")),
            "model.config" => None, // drawn at the end
            "model.vocab_size" => match self.data {
                Data::Bin | Data::Indexed => some(&rng.pick(&[IDS, 64, 100])),
                _ if rarely(rng, 40) => some(&200),
                _ => some(&rng.pick(&[256, 259])),
            },
            "model.num_layers" => some(&self.layers),
            "model.hidden_size" => match rng.below(30) {
                0 => some(&rng.pick(&[10, 12, 20, 25])),
                _ => some(&(self.heads * rng.pick(&[4, 6, 8]))),
            },
            "model.num_heads" => match rng.below(30) {
                0 => some(&(1 + rng.below(6))),
                _ => some(&self.heads),
            },
            "model.num_kv_heads" => match rng.below(6) {
                0 => some(&self.heads),
                1 | 2 if self.llama => some(&(1 + rng.below(self.heads))),
                3 if rarely(rng, 10) => some(&2),
                // A preset of llama gives 8 heads, or so.
                _ if self.llama => some(&rng.pick(&[1, self.heads])),
                _ => None,
            },
            "model.ffn_hidden_size" => match rng.below(4) {
                0 => None,
                1 if !self.canonical || rarely(rng, 20) => some(&(1 + rng.below(30))),
                _ => some(&(self.tp * rng.pick(&[8, 12]))),
            },
            "model.seq_len" => match rng.below(20) {
                0 => some(&rng.pick(&[9, 10, 14])),
                _ => some(&(self.tp * rng.pick(&[8, 4, 5]).max(8 / self.tp))),
            },
            "model.sliding_window" => None, // drawn behind the others
            "model.tie_embeddings" => match self.asynchronous() && !rarely(rng, 8) {
                true => some(&false),
                false => one_of(rng, &["true", "false"]),
            },
            "model.dropout" => one_of(rng, &["0", "0.1", "0.3"]),
            "model.norm_eps" => one_of(rng, &["1e-6", "1e-3"]),
            "model.rope_theta" => one_of(rng, &["100.0", "500000.0"]),
            "model.rope_scaling_factor" => one_of(rng, &["1", "8.0"]),
            "model.rope_scaling_low_freq_factor" => one_of(rng, &["1.0", "2.0"]).filter(|_| rng.below(2) == 0),
            "model.rope_scaling_high_freq_factor" => one_of(rng, &["4.0", "1.5"]).filter(|_| rng.below(2) == 0),
            "model.rope_scaling_original_seq_len" => one_of(rng, &["4", "16"]),
            // Of two layers one is left to train, and matrices of hidden layers with it.
            "model.freeze" => match (self.layers, rng.below(60)) {
                (_, 0) => some(&rng.pick(&["layer.0", "layers.99"])),
                (1, 1..20) => some(&"norm"),
                (_, 1..20) => some(&rng.pick(&["norm", "layers.0", "layers.0, norm"])),
                _ => None,
            },
            _ if name.starts_with("lora.") || name.starts_with("dpo.") => None, // drawn at the end
            "parallelism.dp" => Self::degree(rng, self.dp),
            "parallelism.tp" => Self::degree(rng, self.tp),
            "parallelism.pp" => Self::degree(rng, self.pp),
            "parallelism.ep" => Self::degree(rng, self.ep),
            "parallelism.cp" => Self::degree(rng, self.cp),
            "parallelism.context_parallel_method" => (self.cp > 1 && !rarely(rng, 16) || rarely(rng, 60))
                .then(|| rng.pick(&["all_gather", "all_to_all", "ring", "hybrid", "auto"]).to_owned()),
            "parallelism.ring_degree" if self.cp > 1 => rarely(rng, 6).then(|| rng.pick(&["1", "2", "4"]).to_owned()),
            "parallelism.ring_degree" => rarely(rng, 60).then(|| "2".to_owned()),
            "parallelism.context_parallel_order" if self.cp > 1 => {
                one_of(rng, &["zigzag", "contiguous", "contiguous", "by_document"])
            }
            "parallelism.context_parallel_order" => rarely(rng, 60).then(|| "zigzag".to_owned()),
            "parallelism.expert_tensor_parallel" => match rng.below(20) {
                0 => some(&2),
                1..8 if self.tp > 1 => some(&self.tp),
                _ => rarely(rng, 8).then(|| "1".to_owned()),
            },
            // Always given: a preset has its own.
            "moe.num_experts" => some(&self.experts),
            _ if name.starts_with("moe.") && self.experts == 0 => None,
            "moe.router" => some(&self.router),
            "moe.top_k" => match (self.router, rng.below(12)) {
                (_, 0) => some(&rng.pick(&[0, 1, 2, 9])),
                ("switch", _) => some(&1),
                ("gshard", _) => some(&2),
                _ => some(&(1 + rng.below(self.experts.min(3)))),
            },
            "moe.capacity_factor" => some(&rng.pick(&["0", "0", "0.5", "1.25"])),
            "moe.overflow" => match self.router {
                "expert_choice" if !rarely(rng, 8) => one_of(rng, &["drop"]),
                _ => one_of(rng, &["drop", "reroute"]),
            },
            "moe.aux_loss_coeff" => match self.router {
                "expert_choice" if !rarely(rng, 8) => some(&0),
                _ => some(&rng.pick(&["0", "0.01"])),
            },
            "moe.z_loss_coeff" => one_of(rng, &["0.001"]),
            "moe.every_n_layers" => some(&rng.pick(&[1, 1, 1, 2])),
            "moe.first_dense_layers" => some(&rng.pick(&[0, 0, 0, 1])),
            "moe.num_shared_experts" => some(&rng.pick(&[0, 0, 1, 2])),
            "moe.expert_hidden_size" => match rng.below(8) {
                0 => some(&(1 + rng.below(12))),
                _ => some(&(self.tp * rng.pick(&[4, 8]))),
            },
            "moe.bias_update_rate" => match self.router {
                "bias" => one_of(rng, &["0", "0.01"]),
                _ => rarely(rng, 60).then(|| "0.001".to_owned()),
            },
            // What all ranks compute at once is not what one rank does.
            "moe.aux_loss_scope" => match self.canonical && rarely(rng, 12) {
                true => some(&"global_batch"),
                false => one_of(rng, &["sequence"]),
            },
            "moe.jitter" => one_of(rng, &["0", "0.01"]),
            "moe.normalize_top_k" => one_of(rng, &["true", "false"]),
            "moe.num_groups" => some(&if rarely(rng, 6) { 2 } else { 1 }),
            "moe.top_groups" => some(&1),
            "moe.routed_scaling" => some(&rng.pick(&["1", "2.5"])),
            "parallelism.zero_stage" => match self.dp {
                1 => rarely(rng, 40).then(|| "1".to_owned()),
                _ if rarely(rng, 40) => some(&4),
                _ if self.gathers => some(&3),
                _ => one_of(rng, &["0", "1", "2", "3"]),
            },
            "parallelism.zero_group" => match self.dp {
                1 => rarely(rng, 40).then(|| "2".to_owned()),
                dp => rarely(rng, 12).then(|| (dp / 2).max(1).to_string()),
            },
            "parallelism.sequence_parallel" => one_of(rng, &["true", "false"]),
            "pipeline.schedule" => match self.schedule {
                Pipeline::Named(Generator::OneFOneB) if rarely(rng, 2) => None,
                Pipeline::Named(generator) => some(&generator.name()),
                Pipeline::File(generator) => rarely(rng, 20).then(|| generator.name().to_owned()),
                Pipeline::Replicated if rarely(rng, 12) => some(&"gpipe"),
                Pipeline::Replicated => one_of(rng, &["1f1b"]),
            },
            "pipeline.schedule_file" => match self.schedule {
                Pipeline::File(generator) => {
                    let (pp, chunks, micros) = (self.pp, self.chunks, self.micros);
                    let schedule =
                        generator.build(Shape { pp, virtual_stages: chunks, micros }).expect("a valid shape");
                    let file = path(&format!("{}-{pp}-{chunks}-{micros}.txt", generator.name()));
                    // Renamed into place: the other test of this program may be reading the file.
                    let written = format!("{file}.{:?}", thread::current().id());
                    fs::write(&written, schedule.to_string()).expect("a file for a schedule");
                    fs::rename(&written, &file).expect("a file for a schedule");
                    Some(file)
                }
                _ => None,
            },
            "pipeline.virtual_stages" => match self.schedule {
                Pipeline::Named(generator) if self.chunks != generator.default_virtual_stages() => some(&self.chunks),
                _ if rarely(rng, 60) => some(&(1 + rng.below(3))),
                _ => rarely(rng, 3).then(|| self.chunks.to_string()),
            },
            "pipeline.num_microbatches" => match rng.below(30) {
                0 => some(&(1 + rng.below(8))),
                1..20 => some(&self.micros),
                _ => None,
            },
            "pipeline.partition" => match rng.below(6) {
                0 => None,
                1 => some(&"uniform"),
                2 | 3 if !(self.lossy && self.canonical) => some(&"cost"), // which stages it leaves empty is not known here
                _ => {
                    let off = usize::from(rarely(rng, 20));
                    // Stages without layers have cuts behind one layer, of which other meshes have one.
                    let least = usize::from(self.lossy && self.canonical);
                    if least * self.stages() > self.layers {
                        return None;
                    }
                    some(&format!("{:?}", parts(rng, self.layers + off, self.stages(), least)))
                }
            },
            "pipeline.replication" => match self.schedule {
                Pipeline::Replicated => some(&format!("{:?}", self.replicas)),
                _ if rarely(rng, 100) => some(&format!("{:?}", vec![1; self.pp])),
                _ => rarely(rng, 8).then(|| "none".to_owned()),
            },
            "pipeline.vertical_sync" => match self.schedule {
                Pipeline::Named(Generator::PipeDream) => one_of(rng, &["true", "false"]),
                _ if rarely(rng, 60) => some(&true),
                _ => rarely(rng, 8).then(|| "false".to_owned()),
            },
            "pipeline.scatter_gather" => one_of(rng, &["true", "false"]),
            "training.objective" => one_of(rng, &["pretrain"]), // the others are drawn at the end
            "data.chat_template" => rarely(rng, 20).then(|| path("chat.jinja")),
            "data.date" => one_of(rng, &["2026-01-31"]),
            "data.overlong" => one_of(rng, &["truncate", "skip"]),
            // More validations than a run has.
            "training.patience" => one_of(rng, &["0", "9"]),
            "training.steps" => {
                some(&rng.pick(&["2", "2", "2", "3", "0"])).filter(|_| !rarely(rng, 10) || self.profile)
            }
            "training.global_batch_size" => match rng.below(40) {
                0 => some(&(1 + rng.below(32))),
                _ => some(&self.batch),
            },
            "training.micro_batch_size" => match rng.below(30) {
                0 => some(&(1 + rng.below(4))),
                1..10 => some(&(self.batch / (self.dp * self.micros))),
                _ => None,
            },
            "training.seed" => rarely(rng, 2).then(|| rng.below(1000).to_string()),
            "training.dtype" => match self.dtype {
                "f32" => one_of(rng, &["f32"]),
                half => some(&half),
            },
            "training.matmul_dtype" => match self.dtype {
                "f16" if !rarely(rng, 20) => one_of(rng, &["f32"]),
                "f32" => one_of(rng, &["f32", "f32", "tf32", "bf16"]),
                _ if rarely(rng, 20) => some(&"tf32"),
                _ => one_of(rng, &["f32", "f32", "bf16"]),
            },
            "training.reduce_dtype" => match rng.below(60) {
                0 => some(&"bf16"),
                _ if self.canonical => one_of(rng, &["f32"]),
                _ => one_of(rng, &["f32", self.dtype]),
            },
            "training.loss_scale" => match (self.dtype, rng.below(40)) {
                (_, 0) => some(&"dynamic"),
                ("f16", 1) => some(&1),
                ("f16", _) if self.asynchronous() => some(&1024),
                ("f16", _) => one_of(rng, &["dynamic", "1024"]),
                _ => one_of(rng, &["1", "1024"]),
            },
            "training.loss_scale_initial" => one_of(rng, &["1024", "65536"]),
            "training.loss_scale_growth_interval" => one_of(rng, &["1", "2000"]),
            "training.max_norm" => match self.asynchronous() && !rarely(rng, 8) {
                true => some(&0),
                false => one_of(rng, &["0", "0.05", "1", "100.0"]),
            },
            "training.numerics" => match self.canonical {
                true => some(&"canonical"),
                false => one_of(rng, &["fast"]),
            },
            "training.verify" => {
                one_of(rng, &["off", "first_step", "1", "2"]).map(|value| match value.parse::<u64>() {
                    Ok(_) => value,
                    Err(_) => format!("{value:?}"),
                })
            }
            "optimizer.name" => one_of(rng, &["adamw", "sgd", "lamb", "adafactor", "muon", "adam8bit"]),
            "optimizer.lr" => one_of(rng, &["0", "1e-3", "3e-3"]),
            "optimizer.beta1" => one_of(rng, &["0", "0.5"]),
            "optimizer.beta2" => one_of(rng, &["0.9", "0.999"]),
            "optimizer.eps" => one_of(rng, &["1e-6", "1e-3"]),
            "optimizer.weight_decay" => one_of(rng, &["0", "0.5"]),
            "optimizer.momentum" => one_of(rng, &["0", "0.9"]),
            "optimizer.muon_momentum" => one_of(rng, &["0", "0.9"]),
            "optimizer.relative_step" => one_of(rng, &["true", "false"]),
            "optimizer.decay_rate" => one_of(rng, &["0.5", "1"]),
            "optimizer.clip_threshold" => one_of(rng, &["0.5", "10"]),
            "optimizer.block_size" => one_of(rng, &["1", "7", "64"]),
            "lr_scheduler.warmup_steps" => one_of(rng, &["0", "1", "5"]),
            "lr_scheduler.decay" => one_of(rng, &["none", "linear", "cosine"]),
            "lr_scheduler.decay_steps" => match rng.below(60) {
                0 => some(&1), // often before the rate is warm
                _ => one_of(rng, &["6", "10"]).filter(|_| rng.below(2) == 0),
            },
            "lr_scheduler.min_lr_factor" => one_of(rng, &["0", "0.1", "1"]),
            "data.path" => match self.data {
                Data::Cicero => None,
                Data::Text => Some(path("text.txt")),
                Data::Folder => Some(path("texts")),
                Data::Bin => Some(path("tokens.bin")),
                Data::Few => Some(path("few.bin")),
                Data::Indexed => Some(path(rng.pick(&["indexed", "indexed.bin", "indexed.idx"]))),
                Data::Lines => Some(path("lines.jsonl")),
                Data::Mixed => rarely(rng, 30).then(|| path("text.txt")),
            },
            "data.sources" => match self.data {
                Data::Mixed => {
                    let weight = rng.pick(&["1", "0.25", "7"]);
                    let second = if rarely(rng, 20) { rng.pick(&["0", "-1", "1e-9"]) } else { "2" };
                    let names = [path("text.txt"), path("tokens.bin"), path("lines.jsonl")];
                    let [first, tokens, last] = names;
                    Some(format!("[\"{first}:{weight}\", \"{tokens}:{second}\", \"{last}\"]"))
                }
                _ => None,
            },
            "data.end_of_text" => match rng.below(12) {
                0 => some(&rng.pick(&[0, 5, 28])),
                1 => rarely(rng, 8).then(|| "5000".to_owned()),
                _ => one_of(rng, &["\"auto\"", "\"none\""]).filter(|_| rng.below(3) == 0),
            },
            "data.beginning_of_text" => match rng.below(12) {
                0 => some(&rng.pick(&[0, 5, 28])),
                1 => rarely(rng, 8).then(|| "5000".to_owned()),
                _ => one_of(rng, &["\"auto\"", "\"none\""]).filter(|_| rng.below(3) == 0),
            },
            "data.format" => one_of(rng, &["auto", "text"]).filter(|_| rng.below(4) == 0),
            "data.text_key" => some(&"text").filter(|_| rng.below(4) == 0),
            "data.skip_bad_lines" => one_of(rng, &["true", "false"]),
            "data.token_type" => one_of(rng, &["auto", "u16"]),
            // A file of tokens needs an id that ends a document.
            "data.documents" => match rng.below(3) {
                0 | 1 if matches!(self.data, Data::Bin | Data::Few | Data::Mixed) && !rarely(rng, 20) => None,
                0 | 1 => one_of(rng, &["stream", "loss", "positions", "attention"]),
                _ => None,
            },
            "data.cache_dir" => rarely(rng, 10).then(|| path("cache")),
            "data.tokenizer" => match rng.below(200) {
                0 => some(&"gpt2"),
                1..50 => some(&"bytes"),
                _ => None,
            },
            "data.shuffle" => one_of(rng, &["true", "false"]),
            "validation.every" => one_of(rng, &["0", "1", "2"]),
            "validation.steps" => one_of(rng, &["0", "1", "2"]),
            "validation.fraction" => match rng.below(30) {
                0 if self.data != Data::Cicero => some(&0.002),
                _ => one_of(rng, &["0", "0.1", "0.5"]),
            },
            "memory.recompute" => match rng.below(60) {
                0 => some(&99), // more layers than there are
                _ => one_of(rng, &["none", "selective", "full", "sqrt", "stage", "1"]),
            },
            "memory.loss_chunk" => one_of(rng, &["0", "1", "3", "100"]),
            "memory.sequence_block" => rarely(rng, 3).then(|| rng.pick(&["1", "3", "100"]).to_owned()),
            "memory.saved_encoding" => one_of(rng, &["dense", "sparse"]),
            "memory.saved_dtype" => one_of(rng, &["f32", "bf16", "f16"]),
            "memory.offload" => one_of(rng, &["none", "optimizer", "activations", "samples", "all"]),
            // Beside the data there is a folder; a file is none.
            "memory.offload_dir" => match rng.below(40) {
                0 => None,
                _ => Some(path("")),
            },
            "memory.limit_bytes" => rarely(rng, 8).then(|| (1_u64 << 40).to_string()),
            "metrics.profile" => match self.profile {
                true => some(&true),
                false => rarely(rng, 8).then(|| "false".to_owned()),
            },
            "metrics.profile_steps" => one_of(rng, &["1", "2"]),
            "metrics.trace" => match self.profile {
                true => Some(path("trace.json")),
                false => rarely(rng, 8).then(|| "nowhere.json".to_owned()),
            },
            "metrics.schedule" => match self.profile {
                true if rarely(rng, 8) => Some(path("trace.json")),
                true => Some(path("schedule.svg")),
                false => rarely(rng, 8).then(|| "nowhere.svg".to_owned()),
            },
            "metrics.layer_profile" => match self.profile && rng.below(2) == 0 {
                true => Some(path("layers.txt")),
                false => None,
            },
            "metrics.sample_tokens" => one_of(rng, &["0", "4"]),
            "metrics.tensorboard" => rarely(rng, 8).then(|| path("events")),
            // A folder of its own for each run: a folder with checkpoints of another one is refused, which
            // checkpoint.rs has.
            "checkpoint.dir" => {
                rarely(rng, 4).then(|| path(&format!("saves/{}-{}", rng.below(1 << 30), rng.below(1 << 30))))
            }
            "checkpoint.best" => one_of(rng, &["true", "false"]),
            "checkpoint.every" => one_of(rng, &["0", "1", "2"]),
            "checkpoint.keep" => one_of(rng, &["1", "3"]),
            "checkpoint.resume" => match rng.below(60) {
                0 => some(&true),
                1..15 => some(&false),
                _ => None,
            },
            "checkpoint.permit" => match rng.below(60) {
                0 => some(&"weights"),
                _ => one_of(rng, &["model", "optimizer,data", "seed, batch"]).filter(|_| rng.below(4) == 0),
            },
            // The signal is a matter of the program: tests/gpt_train/checkpoints.rs sends it.
            "checkpoint.on_sigterm" => one_of(rng, &["true", "false"]),
            "checkpoint.export" => {
                rarely(rng, 12).then(|| path(&format!("exported/{}-{}", rng.below(1 << 30), rng.below(1 << 30))))
            }
            "checkpoint.export_dtype" => one_of(rng, &["f32", "bf16", "f16"]),
            "checkpoint.export_overwrite" => one_of(rng, &["true", "false"]),
            "compress.activations" | "compress.activation_gradients" | "compress.gradients" => match rng.below(200) {
                0 => some(&"quant:9"),
                1 => some(&"powersgd:2"),
                2 => some(&"sign/row"), // also in canonical numerics
                _ if !self.lossy || self.canonical && name == "compress.gradients" => None,
                _ if self.canonical => some(&rng.pick(&["none", "bf16", "sign/row", "topk:0.5/row", "topk:0.5"])),
                _ => some(&rng.pick(&[
                    "none",
                    "bf16",
                    "quant:8",
                    "topk:0.5/row",
                    "topk:0.5",
                    "sign/row",
                    "randk:3",
                    "topk:0.5+fp8:e4m3",
                ])),
            },
            "compress.weights" => match rng.below(100) {
                0 => some(&rng.pick(&["quant:9", "topk:0.5", "randk:3", "powersgd:2"])),
                1 => some(&"quant:8"), // also where nobody gathers weights
                _ if self.gathers => some(&rng.pick(&["quant:8", "quant:8/block16/stochastic", "fp8:e4m3", "bf16"])),
                _ => None,
            },
            "compress.dispatch" | "compress.dispatch_gradients" => match rng.below(200) {
                0 => some(&rng.pick(&["quant:9", "randk:3", "powersgd:2"])),
                1 => some(&"quant:8/block997"), // wider than any token
                2 => some(&"quant:8"),          // also in canonical numerics
                _ if !self.lossy || self.canonical || self.experts == 0 => None,
                _ => {
                    some(&rng.pick(&["none", "quant:8", "fp8:e4m3/row", "sign", "topk:0.5+bf16", "quant:4/stochastic"]))
                }
            },
            "compress.share_indices" => match rng.below(100) {
                0 => some(&"true"), // seldom with two schemes that fit
                1 => some(&"false"),
                _ => None,
            },
            // Two steps of these batches take no sample of Cicero twice. config.rs has runs that do.
            "compress.aqsgd" => match rng.below(30) {
                0 if self.data == Data::Cicero => some(&"true"),
                1 => some(&"false"),
                _ => None,
            },
            "compress.aqsgd_samples" => rarely(rng, 30).then(|| "5000".to_owned()),
            "compress.virtual_cuts" => match rng.below(60) {
                0 => some(&rng.pick(&["[2, 1]", "[0, 77]"])),
                1 if !self.canonical => some(&"[1]"),
                1 => some(&"none"),
                2..60 if self.lossy && (self.canonical || rng.below(2) == 0) => {
                    some(&format!("{:?}", (0..=self.layers).collect::<Vec<_>>()))
                }
                _ => None,
            },
            "validation.compression" => one_of(rng, &["as_trained", "off", "both"]),
            "compress.feedback" => match rng.below(100) {
                0 => some(&rng.pick(&["ef22", "ef21m:2", "ef"])),
                1..40 if self.lossy => some(&rng.pick(&["none", "ef", "ef21", "ef21m:0.5"])),
                _ => None,
            },
            "compress.rounding" => one_of(rng, &["nearest", "stochastic"]),
            "compress.start_step" => one_of(rng, &["1", "2", "9"]),
            "cuda.tuning" => rarely(rng, 100).then(|| path("tuning.toml")), // refused on the CPU
            "cuda.graphs" | "cuda.launch_blocking" => match rng.below(100) {
                0 => some(&"true"), // refused on the CPU
                1..10 => some(&"false"),
                _ => None,
            },
            "comm.bandwidth" => one_of(rng, &["0", "1e9"]),
            "comm.timeout_seconds" => one_of(rng, &["30", "90.5"]),
            "comm.kind" => one_of(rng, &["auto", "threads"]),
            "comm.ranks_per_process" => one_of(rng, &["1", "2"]),
            "comm.reduction" if !self.canonical => one_of(rng, &["tree", "native"]),
            "comm.reduction" => rarely(rng, 200).then(|| "native".to_owned()),
            "comm.library" => rarely(rng, 20).then(|| "libmpi.so.40".to_owned()),
            "comm.log_dir" => rarely(rng, 20).then(|| path("logs")),
            "training.check_replicas_every" => one_of(rng, &["0", "1", "3"]),
            "training.replay_every" if self.canonical && self.dp * self.tp > 1 => one_of(rng, &["0", "1", "3"]),
            "training.replay_every" => rarely(rng, 200).then(|| "3".to_owned()),
            "training.replay_mesh" => rarely(rng, 200).then(|| "dp=977".to_owned()),
            "checkpoint.peer_every" => one_of(rng, &["0", "2"]),
            "parallelism.elastic" => rarely(rng, 8).then(|| "dp".to_owned()),
            "numerics.reduction_blocks" => match rng.below(20) {
                0 => some(&rng.pick(&[6, 12, 5000])),
                _ if self.tp == 3 => some(&rng.pick(&[12, 24])),
                _ => one_of(rng, &["4", "8", "16"]),
            },
            _ => panic!("no values are drawn for {name}: add the key to this list, and its constraints to rules.rs"),
        }
    }
}
