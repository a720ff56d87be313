//! From `[data]` to streams of tokens: which files, which format, which tokenizer.

use super::cache::{self, Tokenisation};
use super::examples::Examples;
use super::mixture::{LONGEST, Mixture};
use super::prelude::*;
use super::reading::Pieces;
use super::text::Texts;
use super::tokens::Positioned;
use super::{indexed, token_file};
use crate::config::sections::Data as Settings;
use crate::config::{Config, EndOfText, EndOfTextWord, Objective, TokenType};

/// The streams of `[data]`, before they are checked against a model.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(super) sources: Vec<Source>,
    pub(super) mixture: Mixture,
    pub(super) tokenizer: Tokenizer,
    pub(super) notices: Vec<String>,
}

/// A stream, and its name in messages.
#[derive(Debug)]
pub(super) struct Source {
    pub stream: Stream,
    /// The key that names it.
    pub key: &'static str,
    /// Its value.
    pub shown: String,
    /// Whether the tokens come from the tokenizer, and not from a token file.
    pub from_text: bool,
}

/// One of the files or folders to read: the key that names it, the value, the path and the weight.
#[derive(Debug)]
struct Request<'a> {
    key: &'static str,
    shown: String,
    path: Option<&'a Path>,
    weight: f64,
}

const SOURCES: &str = "data.sources";

/// The path and the weight of an entry of `data.sources`; without a weight, 1.
pub(crate) fn split(entry: &str) -> (&str, f64) {
    let split = entry.rsplit_once(':').and_then(|(path, weight)| Some((path, weight.trim().parse().ok()?)));
    split.unwrap_or((entry, 1.0))
}

fn requests(settings: &Settings) -> Result<(Vec<Request<'_>>, Mixture), Vec<Fault>> {
    if settings.sources.is_empty() {
        let shown = match &settings.path {
            Some(path) => format!("{path:?}"),
            None => "(unset: the built-in Cicero text)".to_string(),
        };
        let path = settings.path.as_deref().map(Path::new);
        return Ok((vec![Request { key: "data.path", shown, path, weight: 1.0 }], Mixture::alone()));
    }
    let mut faults = Vec::new();
    if let Some(path) = &settings.path {
        let valid = format!("use data.path or {SOURCES}");
        faults.push(Fault::new("data.path", format!("{path:?}"), format!("is given beside {SOURCES}"), valid));
    }
    let requests: Vec<Request<'_>> = settings
        .sources
        .iter()
        .map(|entry| {
            let (path, weight) = split(entry);
            Request { key: SOURCES, shown: format!("{entry:?}"), path: Some(Path::new(path)), weight }
        })
        .collect();
    for request in requests.iter().filter(|request| !(request.weight.is_finite() && request.weight > 0.0)) {
        let problem = format!("has the weight {}", request.weight);
        faults.push(Fault::new(SOURCES, &request.shown, problem, "use a number above 0 behind the last colon"));
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    let weights: Vec<f64> = requests.iter().map(|request| request.weight).collect();
    match Mixture::new(&weights) {
        Some(mixture) => Ok((requests, mixture)),
        None => {
            let problem = format!("the weights are in no proportion of whole numbers whose sum is at most {LONGEST}");
            Err(vec![Fault::new(SOURCES, format!("{weights:?}"), problem, "use weights of fewer digits, such as 0.7")])
        }
    }
}

/// Reads the streams of `[data]`: of texts, or of examples.
pub(crate) fn read(config: &Config) -> Result<Sources, Vec<Fault>> {
    let settings = &config.data;
    let requests = requests(settings);
    let (tokenizer, (requests, mixture)) = match (tokenizer(settings, requests.as_ref().ok()), requests) {
        (Ok(tokenizer), Ok(requests)) => (tokenizer, requests),
        (tokenizer, requests) => {
            // A missing file is a fault whatever the tokenizer.
            let missing = requests.as_ref().map(|(requests, _)| missing(requests)).unwrap_or_default();
            return Err(tokenizer.err().into_iter().chain(requests.err().unwrap_or_default()).chain(missing).collect());
        }
    };
    let (tokenizer, mut notices) = tokenizer;
    let mark = |setting, auto: Option<u32>| match setting {
        EndOfText::Word(EndOfTextWord::Auto) => auto,
        EndOfText::Word(EndOfTextWord::None) => None,
        EndOfText::Number(id) => Some(id),
    };
    let (takes, pairs) =
        (config.training.objective != Objective::Pretrain, config.training.objective == Objective::Dpo);
    let examples = takes.then(|| Examples::open(settings, pairs)).transpose().map_err(|fault| vec![fault])?;
    let reading = Reading {
        format: settings.format,
        text_key: &settings.text_key,
        skip_bad_lines: settings.skip_bad_lines,
        examples: examples.as_ref(),
        pieces: Pieces::default(),
    };
    let tokenisation = Tokenisation {
        tokenizer: &tokenizer,
        reading,
        beginning_of_text: mark(settings.beginning_of_text, tokenizer.beginning_of_text()),
        end_of_text: mark(settings.end_of_text, tokenizer.end_of_text()),
        folder: settings.cache_dir.as_deref().map(Path::new),
        own_folder: cache::own_folder(),
    };
    if requests.iter().any(|request| reads_text(request.path)) && !tokenizer.is_bytes() {
        notices.extend(tokenizer.special().notices.iter().cloned());
        notices.push(described(&tokenisation, settings));
    }
    let (mut sources, mut faults) = (Vec::new(), Vec::new());
    for Request { key, shown, path, .. } in requests {
        match open(path, &tokenisation, settings.token_type) {
            Ok((stream, from_text, told)) => {
                notices.extend(told);
                sources.push(Source { stream, key, shown, from_text });
            }
            Err(error) => faults.push(fault(key, shown, path, &error, settings)),
        }
    }
    notices.extend(examples.iter().flat_map(Examples::notices));
    if faults.is_empty() { Ok(Sources { sources, mixture, tokenizer, notices }) } else { Err(faults) }
}

/// The tokenizer, and a notice. A run that reads no text needs none: if one that was not asked for cannot be opened,
/// tokens are shown as bytes.
fn tokenizer(
    settings: &Settings,
    requests: Option<&(Vec<Request<'_>>, Mixture)>,
) -> Result<(Tokenizer, Vec<String>), Fault> {
    let needed = settings.tokenizer_given
        || requests.is_none_or(|(requests, _)| requests.iter().any(|request| reads_text(request.path)));
    match Tokenizer::open(&settings.tokenizer) {
        Ok(tokenizer) => Ok((tokenizer, Vec::new())),
        Err(fault) if needed => Err(fault),
        Err(fault) => {
            // The end of a text is known without the library that encodes.
            let special = SpecialTokens::of_tokenizer(Path::new(&settings.tokenizer)).unwrap_or_default();
            Ok((Tokenizer::unopened(special), vec![format!("tokens are shown as bytes: {fault}")]))
        }
    }
}

/// The notice of the tokenizer and of the marks of documents.
fn described(tokenisation: &Tokenisation<'_>, settings: &Settings) -> String {
    let tokenizer = tokenisation.tokenizer;
    let known = [&tokenizer.special().beginning, &tokenizer.special().end];
    let mark = |what: &str, id: Option<u32>| match (
        id,
        known.iter().find_map(|of| of.as_ref().filter(|of| Some(of.id) == id)),
    ) {
        (None, _) => format!("nothing {what} a document"),
        (Some(id), Some(token)) => {
            let text = token.text.as_deref().unwrap_or("a token without a name");
            format!("{text} ({id}, as {} says) {what} a document", token.file)
        }
        (Some(id), None) => format!("{id} {what} a document"),
    };
    format!(
        "tokenizer {}: {} ids; {}; {}",
        settings.tokenizer,
        tokenizer.vocab_size(),
        mark("begins", tokenisation.beginning_of_text),
        mark("ends", tokenisation.end_of_text)
    )
}

/// Whether a path is read as text, and not as tokens.
fn reads_text(path: Option<&Path>) -> bool {
    path.is_none_or(|path| indexed::paths(path).is_none() && !is_token_file(path))
}

fn is_token_file(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "bin")
}

/// The faults of sources that do not exist.
fn missing(requests: &[Request<'_>]) -> Vec<Fault> {
    let missing =
        |request: &&Request<'_>| request.path.is_some_and(|path| !path.exists() && indexed::paths(path).is_none());
    let fault = |request: &Request<'_>| {
        Fault::new(request.key, &request.shown, Problem::Missing.to_string(), Problem::Missing.valid())
    };
    requests.iter().filter(missing).map(fault).collect()
}

/// The fault of a source that cannot be read. It names the file, if that is not the path itself.
fn fault(key: &str, shown: String, path: Option<&Path>, error: &DataError, settings: &Settings) -> Fault {
    let inside = match path {
        Some(path) if path == error.path => String::new(),
        _ => format!("{} ", error.path.display()),
    };
    let (problem, valid) = (format!("{inside}{}", error.problem), error.problem.valid());
    match &error.problem {
        Problem::Encode(error) => {
            let problem = format!("cannot encode {shown}: {error}");
            Fault::new("data.tokenizer", format!("{:?}", settings.tokenizer), problem, valid)
        }
        Problem::Cache(_) => match &settings.cache_dir {
            Some(folder) => Fault::new("data.cache_dir", format!("{folder:?}"), problem, valid),
            None => Fault::new(key, shown, problem, valid),
        },
        _ => Fault::new(key, shown, problem, valid),
    }
}

/// The stream of a path, whether it comes from text, and notices.
fn open(
    path: Option<&Path>,
    tokenisation: &Tokenisation<'_>,
    token_type: TokenType,
) -> Result<(Stream, bool, Vec<String>), DataError> {
    let Some(path) = path else {
        let ids = tokenisation.tokenizer.encode(lipsum::LIBER_PRIMUS);
        let ids = ids.map_err(|error| Problem::Encode(error).in_file(Path::new("the built-in Cicero text")))?;
        let ids = tokenisation.beginning_of_text.into_iter().chain(ids).chain(tokenisation.end_of_text);
        let tokens: Vec<i32> = ids.map(|id| id as i32).collect();
        return Ok((Stream::new(Tokens::Memory(tokens.into()), Documents::Starts([0].into()))?, true, Vec::new()));
    };
    let tokens_alone = indexed::paths(path).is_some() || is_token_file(path);
    if tokens_alone && tokenisation.reading.examples.is_some() {
        return Err(Problem::NoExamples("tokens").in_file(path));
    }
    if let Some((index, tokens)) = indexed::paths(path) {
        let (tokens, index) = indexed::open(&index, &tokens)?;
        return Ok((Stream::new(tokens, Documents::Indexed(index))?, false, Vec::new()));
    }
    if !path.exists() {
        return Err(Problem::Missing.in_file(path));
    }
    if is_token_file(path) {
        let tokens = token_file::open(Positioned::open(path)?, token_type)?;
        let documents = match tokenisation.end_of_text {
            Some(id) => Documents::EndOfText(id as i32),
            None => Documents::Unmarked,
        };
        return Ok((Stream::new(tokens, documents)?, false, Vec::new()));
    }
    let (stream, notices) = tokenisation.stream(path, &Texts::find(path)?)?;
    Ok((stream, true, notices))
}
