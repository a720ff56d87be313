//! Chat templates of Hugging Face: Jinja, with the functions that `transformers` gives them.

use super::super::prelude::*;
use super::answers::{MARKS, Template};
use super::{KEY, Lacks, Settings};
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
    ///
    /// # Errors
    /// A template that is named and is none; settings of a tokenizer that cannot be read.
    pub fn open(settings: &Settings) -> Result<Result<Self, Lacks>, Fault> {
        let valid = "use a chat template of Hugging Face (docs/finetune.md)";
        let fault = |path: &Path, problem: String| Fault::new(KEY, format!("{:?}", path.display()), problem, valid);
        let folder = folder(settings);
        let beside = folder.map(|folder| folder.join(CONFIG));
        let config = beside.map(|path| config(&path).map_err(|problem| fault(&path, problem))).transpose()?.flatten();
        let (path, source) = match &settings.chat_template {
            Some(given) => named(given)?,
            None => match of_folder(folder, config.as_ref()) {
                Ok(found) => found,
                Err(lacks) => return Ok(Err(lacks)),
            },
        };
        let day = settings.date.as_deref().map(day).transpose()?;
        let jinja = Self::new(&source, tokens(&config.unwrap_or_default(), settings), day);
        jinja.map(Ok).map_err(|error| fault(&path, format!("is no template: {error}")))
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

/// The folder with the files of the tokenizer; `None` of those that are built in.
fn folder(settings: &Settings) -> Option<&Path> {
    let is_file = !["bytes", "gpt2"].contains(&&*settings.tokenizer);
    is_file.then(|| Path::new(&settings.tokenizer).parent().unwrap_or(Path::new("")))
}

/// The settings of a tokenizer, if there is the file.
fn config(path: &Path) -> Result<Option<Map<String, Value>>, String> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| error.to_string()),
    }
}

/// The file of `data.chat_template`, and the template in it.
fn named(given: &str) -> Result<(PathBuf, String), Fault> {
    let path = PathBuf::from(given);
    let valid = "name a file with a chat template of Hugging Face (docs/finetune.md), or leave the key out for the template of \
                 the tokenizer's folder";
    let fault = |problem: &str| Fault::new(KEY, format!("{given:?}"), problem, valid);
    if given.trim().is_empty() {
        return Err(fault("names no file"));
    }
    if path.is_dir() {
        return Err(fault("is a folder"));
    }
    match fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(fault("does not exist")),
        Err(error) => Err(fault(&format!("cannot be read: {error}"))),
        Ok(source) if source.trim().is_empty() => Err(fault("is an empty file")),
        Ok(source) => Ok((path, source)),
    }
}

/// The template of a tokenizer's folder and its place: a file, or that of the tokenizer's settings. As in
/// `transformers`, the file counts if there are both.
fn of_folder(folder: Option<&Path>, config: Option<&Map<String, Value>>) -> Result<(PathBuf, String), Lacks> {
    let lacks = |problem: String, valid: &str| Err(Lacks { problem, valid: valid.to_owned() });
    let name =
        "name a file with one in data.chat_template, or the folder of a tokenizer that has one in data.tokenizer";
    let Some(folder) = folder else { return lacks("the tokenizer is built in, and has none".to_owned(), name) };
    let (file, beside) = (folder.join(FILE), folder.join(CONFIG));
    if file.is_file() {
        return match fs::read_to_string(&file) {
            Err(error) => lacks(format!("{} cannot be read: {error}", file.display()), name),
            Ok(source) if source.trim().is_empty() => lacks(format!("{} is empty", file.display()), name),
            Ok(source) => Ok((file, source)),
        };
    }
    let no_file = format!("{} does not exist, and {}", file.display(), beside.display());
    match config.map(|config| config.get("chat_template").unwrap_or(&Value::Null)) {
        None => lacks(format!("{no_file} does not exist either"), name),
        Some(Value::Null) => lacks(format!("{no_file} has none"), name),
        Some(Value::String(source)) if source.trim().is_empty() => lacks(format!("{no_file} has an empty one"), name),
        Some(Value::String(source)) => Ok((beside, source.clone())),
        Some(Value::Array(all)) => match all.iter().find(|of| of["name"] == "default") {
            Some(Value::Object(default)) => match default.get("template").and_then(Value::as_str) {
                Some(source) if !source.trim().is_empty() => Ok((beside, source.to_owned())),
                _ => lacks(format!("{no_file} has no text in the one called default"), name),
            },
            _ => {
                let names: Vec<&str> = all.iter().filter_map(|of| of["name"].as_str()).collect();
                let problem = format!("{no_file} has [{}], and none that is called default", names.join(", "));
                lacks(problem, "copy one of them into a file, and name that in data.chat_template")
            }
        },
        Some(_) => lacks(format!("{no_file} has one that is no text"), name),
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
