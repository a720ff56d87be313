//! Chat templates of Hugging Face: Jinja, with the functions that `transformers` gives them.

use super::super::prelude::*;
use super::Settings;
use super::answers::{MARKS, Template};
use jiff::Timestamp;
use jiff::civil::{Date, DateTime};
use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, context, escape_formatter};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::Map;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

const KEY: &str = "data.chat_template";
const FILE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";

/// A template of Jinja.
#[derive(Debug)]
pub(super) struct Jinja {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and others of the tokenizer.
    tokens: BTreeMap<String, String>,
    marks_answers: bool,
    /// The day that it tells, where the configuration names none, and whether it has told it.
    today: Option<(Date, Arc<AtomicBool>)>,
}

impl Jinja {
    /// The template that `data.chat_template` names, else that of the tokenizer's folder, if there is one.
    pub fn open(settings: &Settings) -> Result<Option<Self>, Fault> {
        let tokenizer = Path::new(&settings.tokenizer);
        let beside = tokenizer.with_file_name(CONFIG);
        let config = || -> Result<Map<String, Value>, String> {
            match fs::read(&beside) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Map::new()),
                Err(error) => Err(error.to_string()),
                Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            }
        };
        let valid = "use a chat template of Hugging Face (docs/finetune.md)";
        let fault = |path: &Path, problem: String| Fault::new(KEY, format!("{:?}", path.display()), problem, valid);
        let config = config().map_err(|problem| fault(&beside, problem))?;
        let file = tokenizer.with_file_name(FILE);
        let given = settings.chat_template.as_ref().map(PathBuf::from).or_else(|| file.is_file().then_some(file));
        let (path, source) = match given {
            Some(path) => {
                let source = fs::read_to_string(&path).map_err(|error| fault(&path, error.to_string()))?;
                (path, source)
            }
            None => match of_config(&config) {
                Some(source) => (beside, source),
                None => return Ok(None),
            },
        };
        let day = settings.date.as_deref().map(day).transpose()?;
        let jinja = Self::new(&source, tokens(&config, settings), day);
        jinja.map(Some).map_err(|error| fault(&path, format!("is no template: {error}")))
    }

    /// A template, with the special tokens of a tokenizer. Without a day it tells today's.
    pub fn new(source: &str, tokens: BTreeMap<String, String>, day: Option<Date>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.set_formatter(as_python);
        environment.add_filter("tojson", to_json);
        environment.add_filter("generation", |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let told = Arc::new(AtomicBool::new(false));
        let today = day.is_none().then(|| (Timestamp::now().to_zoned(TimeZone::UTC).date(), told.clone()));
        let now = day.or(today.as_ref().map(|(day, _)| *day)).unwrap_or_default();
        environment.add_function("strftime_now", move |format: String| {
            told.store(true, Ordering::Relaxed);
            let failed = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
            strtime::format(&format, DateTime::from(now)).map_err(failed)
        });
        let filtered = generation_as_filter(source);
        let marks_answers = filtered != source;
        environment.add_template_owned("chat", filtered)?;
        Ok(Self { environment, tokens, marks_answers, today })
    }
}

impl Template for Jinja {
    fn marks_answers(&self) -> bool {
        self.marks_answers
    }

    fn render(&self, messages: &[Value], tools: Option<&Value>, begins: bool) -> Result<String, String> {
        let of_tokens = minijinja::Value::from_serialize(&self.tokens);
        let context = context! { messages, tools, documents => (), add_generation_prompt => begins, ..of_tokens };
        let written = self.environment.get_template("chat").and_then(|template| template.render(context));
        written.map_err(|error| error.to_string())
    }

    fn notices(&self) -> Vec<String> {
        let told = self.today.iter().filter(|(_, told)| told.load(Ordering::Relaxed));
        told.map(|(day, _)| {
            format!("the chat template tells the day, {day}: set data.date = \"{day}\" so that another start has the same data")
        })
        .collect()
    }
}

fn day(text: &str) -> Result<Date, Fault> {
    text.parse().map_err(|error: jiff::Error| {
        Fault::new("data.date", format!("{text:?}"), format!("is no day: {error}"), "use one such as 2026-01-31")
    })
}

/// The template of `tokenizer_config.json`: one, or a list of named ones, of which `default` is taken.
fn of_config(config: &Map<String, Value>) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|of| of["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// The special tokens by the names that templates know them by.
fn tokens(config: &Map<String, Value>, settings: &Settings) -> BTreeMap<String, String> {
    let special = SpecialTokens::of_tokenizer(Path::new(&settings.tokenizer)).unwrap_or_default();
    let text = |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
    let named = config.iter().filter(|(key, _)| key.ends_with("_token"));
    let mut tokens: BTreeMap<String, String> =
        named.filter_map(|(key, value)| Some((key.clone(), text(value)?))).collect();
    for (key, token) in [("bos_token", special.beginning), ("eos_token", special.end)] {
        if let Some(text) = token.and_then(|token| token.text) {
            tokens.insert(key.to_owned(), text);
        }
    }
    tokens
}

/// The tag `generation` as the block of a filter: `{% generation %}` becomes `{% filter generation %}`.
fn generation_as_filter(source: &str) -> String {
    let (mut written, mut rest) = (String::with_capacity(source.len()), source);
    while let Some((before, from)) = rest.find("{%").map(|at| rest.split_at(at)) {
        let (tag, after) = from.split_at(from.find("%}").unwrap_or(from.len()));
        let word = tag[2..].trim_matches(|char: char| char.is_whitespace() || matches!(char, '-' | '+'));
        written.push_str(before);
        match word {
            "generation" => written.push_str(&tag.replace(word, "filter generation")),
            "endgeneration" => written.push_str(&tag.replace(word, "endfilter")),
            _ => written.push_str(tag),
        }
        rest = after;
    }
    written + rest
}

/// Values as Python writes them: `True`, `False` and `None`.
fn as_python(output: &mut Output<'_>, state: &State<'_, '_>, value: &minijinja::Value) -> Result<(), Error> {
    let word = match value.kind() {
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        ValueKind::None => "None",
        _ => return escape_formatter(output, state, value),
    };
    output.write_str(word).map_err(Error::from)
}

/// JSON as `json.dumps` of Python writes it, with `ensure_ascii=False` and the indentation asked for.
fn to_json(value: minijinja::Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = vec![b' '; width];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
    };
    let failed = |error: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"));
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(bytes).map_err(|error| failed(error.to_string()))
}

/// One line with a space behind each comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
