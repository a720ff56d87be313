//! The settings of the file and the command line, checked key by key against the [table](super::keys).

use super::cli::Args;
use super::elsewhere::ours;
use super::fault::{Fault, choose_from, distance, quoted};
use super::keys::{self, Fallback, Key, Literal, ValueKind};
use super::setting::Setting;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use toml::{Table, Value};

/// The values that were given and are valid, and the faults of those that are not.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    given: BTreeMap<String, Value>,
    derived: BTreeMap<&'static str, Value>,
    unsound: BTreeSet<String>,
    pub(crate) faults: Vec<Fault>,
}

impl Settings {
    /// Reads the file and the assignments of a command line.
    pub(crate) fn read_args(&mut self, args: &Args) {
        if let Some(path) = &args.config {
            self.read_file(path);
        }
        for (key, raw, flag) in &args.assignments {
            self.assign(key, raw, flag);
        }
    }

    pub(crate) fn read_file(&mut self, path: &Path) {
        let source = path.display().to_string();
        let text = match fs::read(path).map(String::from_utf8) {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => {
                let at = error.utf8_error().valid_up_to();
                return self.bad_file(&source, format!("is not UTF-8 from byte {at} on"));
            }
            Err(error) => return self.bad_file(&source, format!("cannot be read: {error}")),
        };
        self.read_text(&source, &text);
    }

    /// Reads a TOML document that came from `source`.
    pub(crate) fn read_text(&mut self, source: &str, text: &str) {
        match text.parse::<Table>() {
            Ok(table) => self.read_table(table),
            Err(error) => {
                let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
                let line = before.matches('\n').count() + 1;
                self.bad_file(source, format!("line {line}: {}", error.message()));
            }
        }
    }

    fn bad_file(&mut self, source: &str, problem: String) {
        self.fault("--config", source, problem, "use a file in TOML");
    }

    /// Reads a TOML document.
    pub(crate) fn read_table(&mut self, table: Table) {
        for (section, value) in table {
            let known: Vec<_> = keys::SECTIONS.iter().map(|known| known.name).collect();
            match value {
                Value::Table(entries) if entries.is_empty() && !known.contains(&section.as_str()) => {
                    let valid = choose_from(&section, &known);
                    self.fault(&format!("[{section}]"), "", "unknown section", valid);
                }
                Value::Table(entries) => {
                    for (name, value) in entries {
                        self.insert(&section, &name, value, "");
                    }
                }
                value if known.contains(&section.as_str()) => {
                    let problem = format!("is {}, not a section", type_of(&value));
                    self.fault(&section, show(&value), problem, format!("use a table: [{section}]"));
                    for (_, key) in keys::all().filter(|(of, _)| *of == section) {
                        self.distrust(&format!("{section}.{}", key.name));
                    }
                }
                value => self.insert("", &section, value, ""),
            }
        }
    }

    /// Reads a value from the command line, after `flag`.
    pub(crate) fn assign(&mut self, path: &str, raw: &str, flag: &str) {
        let (section, name) = path.split_once('.').unwrap_or(("", path));
        let kind = keys::find(section, name).map(|(_, key)| key.kind);
        let words = matches!(kind, Some(ValueKind::Text | ValueKind::Choice(_)));
        if matches!(kind, Some(ValueKind::Count(_))) && raw.parse::<i64>().is_err() && raw.parse::<i128>().is_ok() {
            let valid = format!("use a whole number of at most {}", i64::MAX);
            return self.fault(path, format!("{raw} (from {flag})"), "is out of range", valid);
        }
        // Words need no quotes here, so that a path is never read as a number or a date.
        let value = match raw.parse::<Value>() {
            Ok(value) if !words || value.is_str() => value,
            _ => Value::String(raw.to_string()),
        };
        self.insert(section, name, value, &format!(" (from {flag})"));
    }

    /// Sets one value, replacing an earlier one of the same key. `origin` follows the value in a fault.
    pub(crate) fn insert(&mut self, section: &str, name: &str, value: Value, origin: &str) {
        let path = if section.is_empty() { name.to_string() } else { format!("{section}.{name}") };
        let shown = format!("{}{origin}", show(&value));
        let Some((_, key)) = keys::find(section, name) else {
            return self.fault(&path, shown, "unknown key", similar(section, name));
        };
        let path = format!("{section}.{}", key.name);
        match checked(key, value) {
            Ok(value) => {
                // A later valid value replaces an earlier invalid one.
                self.unsound.remove(&path);
                self.given.insert(path, value);
            }
            Err((problem, valid)) => self.fault(&path, shown, problem, valid),
        }
    }

    /// Records a fault; cross checks that read `key` are then skipped.
    pub(crate) fn fault(
        &mut self,
        key: &str,
        value: impl std::fmt::Display,
        problem: impl Into<String>,
        valid: impl Into<String>,
    ) {
        self.unsound.insert(key.to_string());
        self.faults.push(Fault::new(key, value, problem, valid));
    }

    /// Marks `key` as unsound, so that cross checks that read it are skipped.
    pub(crate) fn distrust(&mut self, key: &str) {
        self.unsound.insert(key.to_string());
    }

    /// Whether none of `keys` has a fault, so that a check across them is meaningful.
    pub(crate) fn sound(&self, keys: &[&str]) -> bool {
        keys.iter().all(|key| !self.unsound.contains(*key))
    }

    /// Records the fault of a rule that does not hold, unless one of the keys that the rule reads is at fault itself.
    pub(crate) fn require(&mut self, reads: &[&str], holds: bool, fault: impl FnOnce() -> Fault) {
        if !holds && self.sound(reads) {
            self.faults.push(fault());
        }
    }

    /// Sets the value of `key`, computed from the keys `from`, if none is given. If one of those is at fault, `key` is
    /// not sound either.
    pub(crate) fn derive(&mut self, key: &'static str, from: &[&str], value: impl Into<Value>) {
        if !self.sound(from) && !self.given.contains_key(key) {
            self.distrust(key);
        }
        self.derived.insert(key, value.into());
    }

    /// The value of `key`: as given, else as derived, else its default.
    pub(crate) fn get<T: Setting>(&self, key: &str) -> T {
        // The table of keys gives each a default of its own type; a test reads every key this way.
        T::read(self.value(key).as_ref())
            .unwrap_or_else(|| unreachable!("{key} has neither value nor default of its type"))
    }

    fn value(&self, key: &str) -> Option<Value> {
        self.given.get(key).or_else(|| self.derived.get(key)).cloned().or_else(|| default(key))
    }

    /// The value of `key`, if it was given.
    pub(crate) fn given<T: Setting>(&self, key: &str) -> Option<T> {
        T::read(Some(self.given.get(key)?))
    }
}

fn default(key: &str) -> Option<Value> {
    let (section, name) = key.split_once('.')?;
    match keys::find(section, name)?.1.default {
        Fallback::Is(literal) => Some(literal.into()),
        Fallback::Derived(_) | Fallback::Unset => None,
    }
}

impl From<Literal> for Value {
    fn from(literal: Literal) -> Self {
        match literal {
            Literal::Int(value) => Self::Integer(value),
            Literal::Float(value) => Self::Float(value),
            Literal::Bool(value) => Self::Boolean(value),
            Literal::Str(value) => Self::String(value.to_owned()),
        }
    }
}

/// Checks a value of `section.name` that a file of a model has: the problem, and what is valid.
pub(crate) fn check(path: &str, value: &Value) -> Result<(), (String, String)> {
    let key = path.split_once('.').and_then(|(section, name)| keys::find(section, name));
    key.map_or(Ok(()), |(_, key)| checked(key, value.clone()).map(|_| ()))
}

/// Checks a value against its key's type and range, and refuses features that are not implemented yet. On refusal: the
/// problem, and what is valid.
fn checked(key: &Key, value: Value) -> Result<Value, (String, String)> {
    misfit(key.kind, &value).map_or(Ok(()), Err)?;
    let value = match (key.kind, value) {
        (ValueKind::Number(_) | ValueKind::Double(_), Value::Integer(whole)) => Value::Float(whole as f64),
        (_, value) => value,
    };
    Ok(value)
}

/// The problem of a value that is none of this kind, and what is valid.
fn misfit(kind: ValueKind, value: &Value) -> Option<(String, String)> {
    let (integer, list) = (value.as_integer(), value.as_array());
    let wrong = |noun: &str| format!("is {}, not {noun}", type_of(value));
    // One of some words, or a value in their place: its noun, whether this one fits, and the problem if not.
    let or_word = |known: &[&str], noun: &str, fits: Option<bool>, bad: &str, or: &str| {
        let problem = match (value.as_str(), fits) {
            (Some(word), _) if known.contains(&word) => return None,
            (Some(_), _) => "unknown".to_owned(),
            (None, Some(true)) => return None,
            (None, Some(false)) => bad.to_owned(),
            (None, None) => wrong(noun),
        };
        Some((problem, format!("use {}, or {or}", quoted(known))))
    };
    let (problem, valid) = match kind {
        ValueKind::Count(min) => {
            let problem = match integer {
                Some(count) if count >= min => return None,
                Some(_) => format!("is below {min}"),
                None => wrong("a whole number"),
            };
            (problem, format!("use a whole number of at least {min}"))
        }
        ValueKind::Number(interval) | ValueKind::Double(interval) => {
            let valid = format!("use a number {}", interval.words());
            match value.as_float().or(integer.map(|whole| whole as f64)) {
                None => (wrong("a number"), valid),
                Some(number) if !interval.holds(number) => ("is out of range".to_owned(), valid),
                Some(number) => {
                    let rounded = interval.lost(number).filter(|_| matches!(kind, ValueKind::Number(_)))?;
                    let [least, most] = interval.of_f32();
                    let problem = format!("is rounded to {rounded:e} in f32, in which ranks compute");
                    (problem, format!("{valid} that f32 has: from {least:e} to {most:e}"))
                }
            }
        }
        ValueKind::Switch if value.is_bool() => return None,
        ValueKind::Switch => (wrong("a boolean"), "use true or false".to_owned()),
        ValueKind::Text if value.is_str() => return None,
        ValueKind::Text => (wrong("a string"), "use a string".to_owned()),
        ValueKind::Choice(words) => match value.as_str() {
            Some(word) if words.contains(&word) => return None,
            Some(word) => ("unknown".to_owned(), choose_from(word, words)),
            None => (wrong("a string"), format!("use {}", words.join(" or "))),
        },
        ValueKind::WordOrCount(known) => {
            let fits = integer.map(|count| count >= 1);
            return or_word(known, "a whole number", fits, "is below 1", "a whole number of at least 1");
        }
        ValueKind::WordOrId(known) => {
            let fits = integer.map(|id| i32::try_from(id).is_ok_and(|id| id >= 0));
            return or_word(known, "a whole number", fits, "is no id", "an id of at least 0");
        }
        ValueKind::WordOrCounts(known) => {
            let fits = list.map(|list| list.iter().all(|count| count.as_integer().is_some_and(|count| count >= 0)));
            let or = "a list of whole numbers, such as [3, 1]";
            return or_word(known, "a list", fits, "holds what is no whole number of at least 0", or);
        }
        ValueKind::Texts => {
            let problem = match list {
                Some(list) if list.is_empty() => "is empty".to_owned(),
                Some(list) if list.iter().all(Value::is_str) => return None,
                Some(_) => "holds what is no string".to_owned(),
                None => wrong("a list"),
            };
            (problem, "use a list of strings, such as [\"a.jsonl:7\", \"b.bin:3\"]".to_owned())
        }
    };
    Some((problem, valid))
}

/// Advice for an unknown key: the key of the same name in the nearest section; else the key that another trainer calls
/// so; else the key of the fewest edits, if these are at most half as many as the letters of `name`.
fn similar(section: &str, name: &str) -> String {
    let edits = |key: &Key| distance(name, key.name);
    let of_keys = keys::all().min_by_key(|(of, key)| {
        let sections = distance(section, of);
        (if edits(key) == 0 { 0 } else { sections + edits(key) }, sections)
    });
    let same = of_keys.filter(|(_, key)| edits(key) == 0);
    let near = of_keys.filter(|(_, key)| edits(key) <= name.len() / 2);
    let key = |(section, key): (&str, &Key)| format!("{section}.{}", key.name);
    match same.map(key).or_else(|| ours(name).map(str::to_owned)).or_else(|| near.map(key)) {
        Some(key) => format!("the nearest is {key}"),
        None => "none is near; use --help to see all".to_owned(),
    }
}

/// A value as a user would write it in TOML, on one line.
pub(crate) fn show(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    }
}

/// A default as a user would write it in TOML.
pub(crate) fn show_literal(literal: Literal) -> String {
    match literal {
        Literal::Int(value) => value.to_string(),
        Literal::Float(value) if value != 0.0 && value.abs() < 1e-3 => format!("{value:e}"),
        Literal::Float(value) => value.to_string(),
        Literal::Bool(value) => value.to_string(),
        Literal::Str(value) => format!("{value:?}"),
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number with a fraction",
        Value::Boolean(_) => "a boolean",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "an array",
        Value::Table(_) => "a table",
    }
}
