//! The special tokens of a tokenizer, as the files of a Hugging Face folder say: which token ends a document, which
//! begins it, at which generation stops.
//!
//! ```text
//! eos_token, bos_token   special_tokens_map.json where it counts, tokenizer_config.json, the default of the tokenizer's class
//! its id                 tokenizer.json, the added_tokens_decoder of tokenizer_config.json, added_tokens.json
//! eos_token_id           generation_config.json, config.json; the first of a list, where no eos_token is named
//! ```
//! This is the order of `transformers`. There, `special_tokens_map.json` goes before `tokenizer_config.json`, and
//! counts only where that has no `added_tokens_decoder`. A tokenizer without any of these files has the first of
//! [`KNOWN`] that it has, and a notice says so.

use super::format;
use super::prelude::*;
use serde_json::Map;

/// Names of tokens that end a document, for a `tokenizer.json` beside which no file says.
const KNOWN: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"];

/// The tokens of classes of tokenizers, where no file names them: a part of the class or of `model_type` in lower
/// case, the beginning and the end.
const CLASSES: [(&str, &str, &str); 3] =
    [("gpt2", "<|endoftext|>", "<|endoftext|>"), ("llama", "<s>", "</s>"), ("mixtral", "<s>", "</s>")];

/// A special token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// Its text, if a file says.
    pub text: Option<String>,
    /// The file that says it is one.
    pub file: &'static str,
}

/// The special tokens of a tokenizer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token that ends a document (`eos_token`).
    pub end: Option<SpecialToken>,
    /// The token that begins a document (`bos_token`). Not every tokenizer that has one puts it there.
    pub beginning: Option<SpecialToken>,
    /// The ids at which generation stops: `eos_token_id` of `generation_config.json`, or else of `config.json`, and the
    /// end of a document.
    pub stops: Vec<u32>,
    /// Gaps and contradictions of the files, for the user.
    pub notices: Vec<String>,
}

/// The special tokens of a tokenizer without any.
pub(super) static NONE: SpecialTokens =
    SpecialTokens { end: None, beginning: None, stops: Vec::new(), notices: Vec::new() };

impl SpecialTokens {
    /// Reads the files of a folder. Each of them may be missing.
    ///
    /// # Errors
    /// A file that cannot be read or is no JSON.
    pub fn of_folder(folder: &Path) -> Result<Self, DataError> {
        Self::of_tokenizer(&folder.join(TOKENIZER))
    }

    /// Reads a `tokenizer.json` of any name and the files beside it.
    ///
    /// # Errors
    /// As [`of_folder`](Self::of_folder).
    pub fn of_tokenizer(tokenizer: &Path) -> Result<Self, DataError> {
        let beside = |name: &str| json(&tokenizer.with_file_name(name));
        let vocabulary = Vocabulary {
            tokenizer: json(tokenizer)?,
            config: beside(TOKENIZER_CONFIG)?,
            added: beside("added_tokens.json")?,
        };
        let [map, generation, model] = [beside(SPECIAL_TOKENS_MAP)?, beside(GENERATION_CONFIG)?, beside(CONFIG)?];
        let mut notices = Vec::new();
        let mut named = |key: &str| named(key, &map, &vocabulary, &model, &mut notices);
        let (end, beginning) = (named("eos_token"), named("bos_token"));
        // A small model that was made from the settings of a large one may name an id that it does not have.
        let vocab_size = model.get("vocab_size").and_then(Value::as_u64).unwrap_or(u64::MAX);
        let mut within = |(file, settings)| {
            let (ids, beyond): (Vec<u32>, Vec<u32>) =
                ids(settings, "eos_token_id").into_iter().partition(|&id| u64::from(id) < vocab_size);
            if !beyond.is_empty() {
                notices.push(format!(
                    "{file} has the eos_token_id {beyond:?}, and the model {vocab_size} tokens: it is left out"
                ));
            }
            (file, ids)
        };
        let stops = [(GENERATION_CONFIG, &generation), (CONFIG, &model)].map(&mut within);
        let stops = stops.into_iter().find(|(_, ids)| !ids.is_empty());
        let by_id = stops.as_ref().map(|(file, ids)| SpecialToken { id: ids[0], text: vocabulary.text(ids[0]), file });
        let says_nothing = [&map, &vocabulary.config, &generation, &model].iter().all(|file| file.is_empty());
        let by_name = || {
            let found = KNOWN.iter().find_map(|text| Some((text, vocabulary.added_id(text)?)))?;
            Some(SpecialToken { id: found.1, text: Some((*found.0).to_owned()), file: TOKENIZER })
        };
        let end = end.or(by_id).or_else(|| by_name().filter(|_| says_nothing));
        if says_nothing && let Some(SpecialToken { text: Some(text), .. }) = &end {
            notices.push(format!(
                "no file beside {} says what ends a document: {text} is taken, by its name; data.end_of_text sets it",
                tokenizer.display()
            ));
        }
        let mut stops = stops.map_or_else(Vec::new, |(_, ids)| ids);
        if let Some(end) = end.as_ref().filter(|end| !stops.contains(&end.id)) {
            if !stops.is_empty() {
                let text = end.text.as_deref().unwrap_or_default();
                notices.push(format!(
                    "{}: {} says that {text} ({}) ends a text, eos_token_id says {stops:?}: documents end with {text}, and generation \
                     stops at all of them",
                    tokenizer.display(),
                    end.file,
                    end.id
                ));
            }
            stops.push(end.id);
        }
        Ok(Self { end, beginning, stops, notices })
    }
}

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const CONFIG: &str = "config.json";

/// The object in a file, empty if there is none.
fn json(path: &Path) -> Result<Map<String, Value>, DataError> {
    let bytes = match fs::read(path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Map::new());
        }
        read => read.map_err(|error| Problem::Unreadable(error).in_file(path))?,
    };
    if let Some(foreign) = format::foreign(&bytes) {
        return Err(Problem::Foreign(foreign).in_file(path));
    }
    let text = bytes.strip_prefix(format::BYTE_ORDER_MARK).unwrap_or(&bytes);
    serde_json::from_slice(text).map_err(|error| Problem::Json(error.to_string()).in_file(path))
}

/// The token that files name under a key, such as `eos_token`.
fn named(
    key: &str,
    map: &Map<String, Value>,
    vocabulary: &Vocabulary,
    model: &Map<String, Value>,
    notices: &mut Vec<String>,
) -> Option<SpecialToken> {
    let config = &vocabulary.config;
    let map_counts = !config.contains_key("added_tokens_decoder");
    let files = [(SPECIAL_TOKENS_MAP, map.get(key).filter(|_| map_counts)), (TOKENIZER_CONFIG, config.get(key))];
    let found = files.into_iter().find_map(|(file, value)| Some((file, value?)));
    if let Some((file, value)) = found {
        // A token is its text, or an object that has it as its content. Null says that there is none.
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        let id = vocabulary.id(text);
        if id.is_none() {
            notices.push(format!("{file} has the {key} {text:?}, which tokenizer.json does not have: it is left out"));
        }
        return Some(SpecialToken { id: id?, text: Some(text.to_owned()), file });
    }
    let (file, class) = match (config.get("tokenizer_class"), model.get("model_type")) {
        (Some(class), _) => (TOKENIZER_CONFIG, class),
        (None, Some(class)) => (CONFIG, class),
        (None, None) => return None,
    };
    let class = class.as_str()?.to_lowercase();
    let (_, beginning, end) = CLASSES.iter().find(|(of, ..)| class.contains(of))?;
    let text = if key == "eos_token" { end } else { beginning };
    Some(SpecialToken { id: vocabulary.id(text)?, text: Some((*text).to_owned()), file })
}

/// The ids under a key: one, or a list.
fn ids(settings: &Map<String, Value>, key: &str) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match settings.get(key) {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        one => one.and_then(id).into_iter().collect(),
    }
}

/// Where texts of tokens have their ids.
struct Vocabulary {
    tokenizer: Map<String, Value>,
    config: Map<String, Value>,
    /// `added_tokens.json`, of older folders.
    added: Map<String, Value>,
}

impl Vocabulary {
    fn id(&self, text: &str) -> Option<u32> {
        let in_model = || match self.tokenizer.get("model")?.get("vocab")? {
            Value::Object(ids) => ids.get(text)?.as_u64(),
            // A Unigram model has pairs of text and score.
            Value::Array(pairs) => pairs.iter().position(|pair| pair[0] == text).map(|id| id as u64),
            _ => None,
        };
        let in_config = || {
            let tokens = self.config.get("added_tokens_decoder")?.as_object()?;
            tokens.iter().find(|(_, token)| token["content"] == text)?.0.parse().ok()
        };
        let in_added = || self.added.get(text)?.as_u64();
        self.added_id(text).or_else(|| u32::try_from(in_model().or_else(in_config).or_else(in_added)?).ok())
    }

    /// The id of a token of the list `added_tokens` of `tokenizer.json`.
    fn added_id(&self, text: &str) -> Option<u32> {
        let token = self.added_tokens().find(|token| token["content"] == text)?;
        u32::try_from(token["id"].as_u64()?).ok()
    }

    fn text(&self, id: u32) -> Option<String> {
        self.added_tokens().find(|token| token["id"] == id)?["content"].as_str().map(str::to_owned)
    }

    fn added_tokens(&self) -> impl Iterator<Item = &Value> {
        self.tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten()
    }
}
