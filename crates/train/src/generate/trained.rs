//! A trained model in a folder: one of Hugging Face, or a checkpoint of a run.

use super::compression::Compressed;
use crate::checkpoint::read_weights;
use crate::checkpoint::run::{ENDS_OF_TEXT, TOKENIZER_HASH};
use crate::config::keys::{self, Effect, Key};
use crate::config::sections::Data as DataSettings;
use crate::config::{Args, Config, ConfigError, Fault, ModelKind, Settings, is_free, resolve, same};
use crate::data::{PromptTokens, Tokenizer, conversation};
use crate::{devices, processes};
use meshwork_checkpoint::{Checkpoint, folder_name, steps};
use meshwork_engine::AtCuts;
use meshwork_models::huggingface::Pretrained;
use meshwork_tensor::ParamSpec;
use meshwork_tensor::param::LocalSlice;
use serde_json::Value;
use std::path::Path;

/// A model with its weights, still in their files, and its tokenizer.
#[derive(Debug)]
pub struct Trained {
    /// The sizes of the model, on the mesh that was asked for.
    pub config: Config,
    /// How its text becomes tokens.
    pub tokenizer: Tokenizer,
    /// The tokens that end a text, as far as the folder says.
    pub ends_of_text: Vec<u32>,
    weights: Weights,
    /// The settings of its chat template and its tokenizer.
    data: DataSettings,
}

#[derive(Debug)]
enum Weights {
    HuggingFace(Box<Pretrained>),
    Checkpoint(Box<Checkpoint>),
}

const MODEL: &str = "--model";

/// Where an assignment of [`Args`] comes from that a program makes by itself: [`Trained::open`] takes back
/// `training.numerics` if the model needs it.
pub const BY_DEFAULT: &str = "by default";

impl Trained {
    /// Opens `folder` for the mesh and the settings in `args`. Activations are compressed as the run did. Without a
    /// tokenizer by name, that of the folder is taken: its `tokenizer.json`, that of the run, or `bytes` for a
    /// vocabulary of 256.
    ///
    /// # Errors
    /// A folder that has no model, a tokenizer that does not fit it, a mesh on which it does not fit: all faults at
    /// once.
    pub fn open(folder: &Path, tokenizer: Option<&str>, args: Args) -> Result<Self, ConfigError> {
        Self::open_at(AtCuts::AsTrained, folder, tokenizer, args)
    }

    /// As [`open`](Self::open), with a choice of what happens where the run compressed activations between stages: the
    /// same, which one rank simulates, or nothing. Settings of `[compress]` in `args` are taken first.
    pub fn open_at(cuts: AtCuts, folder: &Path, tokenizer: Option<&str>, mut args: Args) -> Result<Self, ConfigError> {
        let earlier = args.faults.clone();
        let one = |fault| ConfigError { faults: earlier.iter().cloned().chain([fault]).collect() };
        let refuse = |problem: &str, valid: &str| one(Fault::new(MODEL, folder.display(), problem, valid));
        let given: Vec<String> = args.assignments.iter().map(|(key, ..)| key.clone()).collect();
        let (mut asked, mut misfits, mut unread) = (Settings::default(), Vec::new(), Vec::new());
        asked.read_args(&args);
        for (section, key) in keys::all() {
            let name = format!("{section}.{}", key.name);
            let by_default = args.assignments.iter().any(|(of, _, from)| *of == name && *from == BY_DEFAULT);
            let read = by_default || is_of_forward(&name, key);
            if let Some(value) = asked.given::<toml::Value>(&name).filter(|_| !read) {
                unread.push(format!("{name} = {value} has no effect on generation"));
            }
        }
        let mut set = |key: String, value: String| args.assignments.push((key, value, MODEL));
        let checkpoints = steps(folder).is_ok_and(|steps| !steps.is_empty());
        if checkpoints && folder.join("config.json").is_file() {
            let valid = format!("name one checkpoint, as {}/step-00000010, or move one of them", folder.display());
            return Err(refuse("has a model of Hugging Face and checkpoints, which are two models", &valid));
        }
        // The reader of models explains adapters.
        let of_hugging_face = ["config.json", "adapter_config.json"].iter().any(|name| folder.join(name).is_file());
        let (weights, of_run, features) = if of_hugging_face || folder.is_file() {
            let pretrained = Pretrained::open(folder);
            let pretrained = pretrained.map_err(|error| refuse(&error.to_string(), "give a folder with a model"))?;
            set("model.init_from".to_owned(), folder.display().to_string());
            let features = pretrained.architecture().decoder.hidden_size;
            (Weights::HuggingFace(Box::new(pretrained)), None, features)
        } else {
            let checkpoint = newest(folder).map_err(one)?;
            let run = checkpoint.index().metadata.get("run").and_then(|run| run.get("config")).cloned();
            let section = |name| run.as_ref().and_then(|run| run.get(name)).and_then(Value::as_object);
            if section("model").is_none() {
                let problem = "is a checkpoint of another program: it does not say what its model is";
                return Err(refuse(problem, "give a checkpoint of gpt_train"));
            }
            let learned_positions =
                section("model").and_then(|model| model.get("kind")?.as_str()) == Some(ModelKind::Gpt2.name());
            for name in ["model", "moe"] {
                let keys = section(name).into_iter().flatten();
                for (key, value) in keys.filter(|(key, value)| *key != "init_from" && !value.is_null()) {
                    let (name, trained) = (format!("{name}.{key}"), toml::Value::try_from(value).ok());
                    let asked = asked.given::<toml::Value>(&name).zip(trained);
                    if let Some((asked, trained)) = asked.filter(|(asked, trained)| !same(asked, trained)) {
                        if is_free(&name, &asked, &trained, learned_positions) {
                            continue;
                        }
                        let problem = format!("the model in {} has {trained}", folder.display());
                        let valid = format!("use {trained}, or leave the key out");
                        misfits.push(Fault::new(&*name, asked, problem, valid));
                    }
                    set(name, value.as_str().map_or_else(|| value.to_string(), str::to_owned));
                }
            }
            if let Some(template) = run.as_ref().and_then(|run| run["data"]["chat_template"].as_str())
                && asked.given::<toml::Value>("data.chat_template").is_none()
            {
                set("data.chat_template".to_owned(), template.to_owned());
            }
            let tokenizer = run.as_ref().and_then(|run| run["data"]["tokenizer"].as_str()).map(str::to_owned);
            let features = section("model").and_then(|model| model.get("hidden_size")?.as_u64()).unwrap_or(1);
            (Weights::Checkpoint(Box::new(checkpoint)), tokenizer, features as usize)
        };
        let compressed = match &weights {
            Weights::HuggingFace(pretrained) => Compressed::of_export(pretrained),
            Weights::Checkpoint(checkpoint) => Compressed::of_checkpoint(checkpoint.index()),
        };
        if let Some(compressed) = compressed.filter(|_| cuts == AtCuts::AsTrained) {
            let settings = compressed.settings().into_iter().filter(|(key, _)| !given.iter().any(|given| given == key));
            settings.for_each(|(key, value)| set(key.to_owned(), value));
            let numerics =
                args.assignments.iter_mut().find(|(key, _, from)| key == "training.numerics" && *from == BY_DEFAULT);
            if let Some((_, numerics, _)) = numerics.filter(|_| !compressed.is_canonical(features)) {
                "fast".clone_into(numerics);
            }
        }
        let (mut config, mut settings) = resolve(&args, Settings::default());
        let by_default =
            |(key, _, from): &&mut (String, String, &str)| key == "training.numerics" && *from == BY_DEFAULT;
        if let Some((_, numerics, _)) =
            args.assignments.iter_mut().find(by_default).filter(|_| config.parallelism.cp > 1)
        {
            "fast".clone_into(numerics);
            (config, settings) = resolve(&args, Settings::default());
        }
        settings.faults.extend(misfits);
        config.notices = unread;
        processes::launch(&mut config, &mut settings);
        let dp = config.parallelism.dp;
        if dp > 1 {
            settings.fault("--mesh", format!("dp={dp}"), "one text has nothing to split over dp", "use tp, pp and cp");
        }
        let ep = config.parallelism.ep;
        if dp == 1 && ep > 1 {
            settings.fault(
                "--mesh",
                format!("ep={ep}"),
                "one text has no other tokens for other ranks",
                "use tp, pp and cp",
            );
        }
        if settings.faults.is_empty() {
            settings.faults.extend(devices::missing(&config));
        }
        let of_folder = tokenizer_of(folder, tokenizer, of_run, &config);
        let tokenizer = match tokenizer {
            Some(_) => of_folder,
            None => of_folder.and_then(|(name, of)| Ok((name, same_as_in_training(of, &weights)?))),
        };
        match tokenizer.map_err(|fault| settings.faults.push(fault)) {
            Ok((name, tokenizer)) if settings.faults.is_empty() => {
                let ends_of_text = ends_of_text(&weights, &tokenizer);
                let data = DataSettings { tokenizer: name, ..config.data.clone() };
                Ok(Self { config, tokenizer, ends_of_text, weights, data })
            }
            _ => Err(ConfigError { faults: settings.faults }),
        }
    }

    /// The tokens of a prompt, with those that the tokenizer adds.
    ///
    /// # Errors
    /// A text without tokens, or a text that the tokenizer cannot encode.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, Fault> {
        self.encode_with(prompt, PromptTokens::Add)
    }

    /// As [`encode`](Self::encode), with a choice of special tokens.
    pub fn encode_with(&self, prompt: &str, special: PromptTokens) -> Result<Vec<u32>, Fault> {
        let fault = |problem: String| Fault::new("--prompt", format!("{prompt:?}"), problem, "give a text to continue");
        match self.tokenizer.encode_prompt(prompt, special).map_err(fault)? {
            tokens if tokens.is_empty() => Err(fault("has no tokens".to_owned())),
            tokens => Ok(tokens),
        }
    }

    /// The tokens of a user's message, behind one of the system where there is one, as the chat template of the model
    /// writes them, up to the beginning of the answer: `data.chat_template`, or the template of the tokenizer's folder.
    ///
    /// # Errors
    /// No template, or one that cannot write this; a text that the tokenizer cannot encode.
    pub fn encode_chat(&self, message: &str, system: Option<&str>) -> Result<Vec<u32>, Fault> {
        let turn = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        let mut messages: Vec<Value> = system.map(|system| turn("system", system)).into_iter().collect();
        messages.push(turn("user", message));
        let text = conversation(&self.data, &messages)?;
        let fault = |problem: String| Fault::new("--prompt", format!("{message:?}"), problem, "give another message");
        match self.tokenizer.encode_conversation(&text).map_err(fault)? {
            tokens if tokens.is_empty() => Err(fault("has no tokens".to_owned())),
            tokens => Ok(tokens),
        }
    }

    /// The elements of a parameter that a rank holds. Only their bytes are read.
    pub(crate) fn read(&self, spec: &ParamSpec, slice: &LocalSlice) -> Result<Vec<f32>, String> {
        let values = match &self.weights {
            Weights::HuggingFace(pretrained) => pretrained.read(spec, slice).map_err(|error| error.to_string()),
            Weights::Checkpoint(checkpoint) => read_weights(checkpoint, spec, slice).map_err(|error| error.to_string()),
        }?;
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => Err(format!("{} has elements that are not finite", spec.name)),
        }
    }
}

/// The tokens that end a text: as the folder and its tokenizer say, or the run of a checkpoint; of an older one, as its
/// tokenizer says.
fn ends_of_text(weights: &Weights, tokenizer: &Tokenizer) -> Vec<u32> {
    match weights {
        Weights::HuggingFace(pretrained) => {
            let mut ends = pretrained.ends_of_text().to_vec();
            ends.extend(tokenizer.special().stops.iter().filter(|end| !pretrained.ends_of_text().contains(end)));
            ends
        }
        Weights::Checkpoint(checkpoint) => {
            let said = checkpoint.index().metadata.get("run").and_then(|run| run.get(ENDS_OF_TEXT)?.as_array());
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let said = said.map(|said| said.iter().filter_map(id).collect());
            said.unwrap_or_else(|| tokenizer.special().stops.clone())
        }
    }
}

/// Whether generation reads a key: which model it is, on which mesh and in which numerics it runs, what it compresses,
/// and how a conversation is written.
fn is_of_forward(name: &str, key: &Key) -> bool {
    const SECTIONS: [&str; 6] = ["parallelism", "pipeline", "numerics", "compress", "comm", "cuda"];
    const KEYS: [&str; 6] = [
        "training.numerics",
        "training.dtype",
        "training.matmul_dtype",
        "memory.limit_bytes",
        "data.chat_template",
        "data.date",
    ];
    let section = name.split('.').next().unwrap_or_default();
    key.effect == Effect::Model || SECTIONS.contains(&section) || KEYS.contains(&name)
}

/// The checkpoint in a folder, or the newest one of a run.
fn newest(folder: &Path) -> Result<Checkpoint, Fault> {
    let fault = |problem: String| {
        let valid = "give a folder of Hugging Face (config.json, model.safetensors), a checkpoint (DIR/step-00000010) or a folder that \
                     holds some";
        Fault::new(MODEL, folder.display(), problem, valid)
    };
    if !folder.is_dir() {
        return Err(fault("is not a folder".to_owned()));
    }
    let found = steps(folder).map_err(|error| fault(format!("cannot be read: {error}")))?;
    let path = found.first().map_or_else(|| folder.to_path_buf(), |&step| folder.join(folder_name(step)));
    Checkpoint::open(&path).map_err(|damage| fault(damage.to_string()))
}

/// The tokenizer of a folder, unless its run says that the model was trained with another.
fn same_as_in_training(tokenizer: Tokenizer, weights: &Weights) -> Result<Tokenizer, Fault> {
    let Weights::Checkpoint(checkpoint) = weights else { return Ok(tokenizer) };
    let run = checkpoint.index().metadata.get("run");
    let said = run.and_then(|run| run.get(TOKENIZER_HASH)?.as_str());
    match (said, tokenizer.hash()) {
        (Some(said), Some(hash)) if said != hash => {
            let name = run.and_then(|run| run["config"]["data"]["tokenizer"].as_str()).unwrap_or_default();
            let problem = format!("has the hash {hash}, and the model was trained with one of {said}");
            let valid = "name the tokenizer that the model was trained with";
            Err(Fault::new(TOKENIZER, format!("{name:?}"), problem, valid))
        }
        _ => Ok(tokenizer),
    }
}

const TOKENIZER: &str = "--tokenizer";

fn tokenizer_of(
    folder: &Path,
    asked: Option<&str>,
    of_run: Option<String>,
    config: &Config,
) -> Result<(String, Tokenizer), Fault> {
    let vocab = config.model.vocab_size;
    let file = folder.join("tokenizer.json");
    let name = match (asked, of_run) {
        (Some(asked), _) => asked.to_owned(),
        (None, Some(of_run)) => of_run,
        (None, None) if file.is_file() => file.display().to_string(),
        (None, None) if vocab == 256 => "bytes".to_owned(),
        (None, None) => {
            let problem = format!("the folder has no tokenizer.json, and its model {vocab} tokens");
            return Err(Fault::new(TOKENIZER, "", problem, "name one: bytes, gpt2 or a tokenizer.json"));
        }
    };
    let tokenizer = Tokenizer::open(&name).map_err(|fault| Fault { key: TOKENIZER.to_owned(), ..fault })?;
    match tokenizer.vocab_size() {
        ids if ids > vocab => {
            let problem = format!("has {ids} tokens, and the model {vocab}");
            Err(Fault::new(TOKENIZER, name, problem, "use the tokenizer that the model was trained with"))
        }
        _ => Ok((name, tokenizer)),
    }
}
