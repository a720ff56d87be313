//! The settings of the file and the command line, checked key by key against the [table](super::keys).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use toml::{Table, Value};

use super::cli::Args;
use super::fault::{Fault, choose_from, distance, nearest, quoted};
use super::keys::{self, Fallback, Key, Literal, ValueKind};
use super::setting::Setting;

/// The values that were given and are valid, and the faults of those that are not.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    given: BTreeMap<String, Value>,
    derived: BTreeMap<&'static str, Value>,
    unsound: BTreeSet<String>,
    pub(crate) faults: Vec<Fault>,
}

impl Settings {
    /// The settings of a command line.
    pub(crate) fn of(args: &Args) -> Self {
        let mut settings = Self::default();
        if let Some(path) = &args.config {
            settings.read_file(path);
        }
        for (key, raw, flag) in &args.assignments {
            settings.assign(key, raw, flag);
        }
        settings
    }

    /// Reads a TOML file.
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
        let words = matches!(kind, Some(ValueKind::Text | ValueKind::Choice { .. }));
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
            return self.fault(&path, shown, "unknown key", format!("the nearest is {}", similar(section, name)));
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
        let value = self.given.get(key).or_else(|| self.derived.get(key)).cloned().or_else(|| default(key));
        // The table of keys gives each a default of its own type; a test reads every key this way.
        T::read(value.as_ref()).unwrap_or_else(|| unreachable!("{key} has neither value nor default of its type"))
    }

    /// The value of `key`, if it was given.
    pub(crate) fn given<T: Setting>(&self, key: &str) -> Option<T> {
        T::read(Some(self.given.get(key)?))
    }
}

/// The default of `key`, if it has one.
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
    let wrong = |what: &str| format!("is {}, not {what}", type_of(&value));
    let value = match (key.kind, &value) {
        (ValueKind::Count(min), Value::Integer(count)) if *count >= min => value,
        (ValueKind::Count(min), Value::Integer(_)) => {
            return Err((format!("is below {min}"), format!("use a whole number of at least {min}")));
        }
        (ValueKind::Count(min), _) => {
            return Err((wrong("a whole number"), format!("use a whole number of at least {min}")));
        }
        (ValueKind::Number(interval) | ValueKind::Double(interval), Value::Integer(_) | Value::Float(_)) => {
            let number = value.as_float().or(value.as_integer().map(|n| n as f64)).unwrap_or(f64::NAN);
            if !interval.holds(number) {
                return Err(("is out of range".to_string(), format!("use a number {}", interval.words())));
            }
            if let (ValueKind::Number(_), Some(rounded)) = (key.kind, interval.lost(number)) {
                let problem = format!("is rounded to {rounded:e} in f32, in which ranks compute");
                let [least, most] = interval.of_f32();
                let valid = format!("use a number {} that f32 has: from {least:e} to {most:e}", interval.words());
                return Err((problem, valid));
            }
            Value::Float(number)
        }
        (ValueKind::Number(interval) | ValueKind::Double(interval), _) => {
            return Err((wrong("a number"), format!("use a number {}", interval.words())));
        }
        (ValueKind::Switch, Value::Boolean(_)) => value,
        (ValueKind::Switch, _) => return Err((wrong("a boolean"), "use true or false".to_string())),
        (ValueKind::Text, Value::String(_)) => value,
        (ValueKind::Text, _) => return Err((wrong("a string"), "use a string".to_string())),
        (ValueKind::Choice { landed, planned }, Value::String(word)) => {
            if planned.contains(&word.as_str()) {
                return Err(("has not landed yet".to_string(), format!("use {}", landed.join(" or "))));
            }
            if !landed.contains(&word.as_str()) {
                // The advice for a misspelt planned word names that word.
                let near = nearest(word, landed.iter().chain(planned).copied());
                return Err(match near.filter(|near| planned.contains(near)) {
                    Some(near) => (
                        format!("unknown; the nearest, {near}, has not landed yet"),
                        format!("use {}", landed.join(" or ")),
                    ),
                    None => ("unknown".to_string(), choose_from(word, landed)),
                });
            }
            value
        }
        (ValueKind::Choice { landed, .. }, _) => {
            return Err((wrong("a string"), format!("use {}", landed.join(" or "))));
        }
        (ValueKind::WordOrCount(known), Value::String(word)) if known.contains(&word.as_str()) => value,
        (ValueKind::WordOrCount(_), Value::Integer(count)) if *count >= 1 => value,
        (ValueKind::WordOrCount(known), _) => {
            let problem = match &value {
                Value::String(_) => "unknown".to_string(),
                Value::Integer(_) => "is below 1".to_string(),
                _ => wrong("a whole number"),
            };
            return Err((problem, format!("use {}, or a whole number of at least 1", quoted(known))));
        }
        (ValueKind::WordOrId(known), Value::String(word)) if known.contains(&word.as_str()) => value,
        (ValueKind::WordOrId(_), Value::Integer(id)) if i32::try_from(*id).is_ok_and(|id| id >= 0) => value,
        (ValueKind::WordOrId(known), _) => {
            let problem = match &value {
                Value::String(_) => "unknown".to_string(),
                Value::Integer(_) => "is no id".to_string(),
                _ => wrong("a whole number"),
            };
            return Err((problem, format!("use {}, or an id of at least 0", quoted(known))));
        }
        (ValueKind::Texts, Value::Array(list)) if !list.is_empty() && list.iter().all(Value::is_str) => value,
        (ValueKind::Texts, _) => {
            let problem = match &value {
                Value::Array(list) if list.is_empty() => "is empty".to_string(),
                Value::Array(_) => "holds what is no string".to_string(),
                _ => wrong("a list"),
            };
            return Err((problem, "use a list of strings, such as [\"a.jsonl:7\", \"b.bin:3\"]".to_string()));
        }
        (ValueKind::WordOrCounts(known), Value::String(word)) if known.contains(&word.as_str()) => value,
        (ValueKind::WordOrCounts(_), Value::Array(list)) if list.iter().all(is_count) => value,
        (ValueKind::WordOrCounts(known), _) => {
            let problem = match &value {
                Value::String(_) => "unknown".to_string(),
                Value::Array(_) => "holds what is no whole number of at least 0".to_string(),
                _ => wrong("a list"),
            };
            return Err((problem, format!("use {}, or a list of whole numbers, such as [3, 1]", quoted(known))));
        }
    };
    match (key.awaits, key.default) {
        (Some(feature), Fallback::Is(default)) if Value::from(default) != value => {
            Err((format!("{feature} has not landed yet"), format!("use {}", show_literal(default))))
        }
        (Some(feature), Fallback::Unset) => {
            Err((format!("{feature} has not landed yet"), "remove the key".to_string()))
        }
        _ => Ok(value),
    }
}

fn is_count(value: &Value) -> bool {
    value.as_integer().is_some_and(|count| count >= 0)
}

/// The known key most like `section.name`: the same name in the nearest section, else the fewest edits over both.
fn similar(section: &str, name: &str) -> String {
    let best = keys::all().min_by_key(|(of, key)| {
        let (sections, names) = (distance(section, of), distance(name, key.name));
        (if names == 0 { 0 } else { sections + names }, sections)
    });
    best.map_or_else(String::new, |(section, key)| format!("{section}.{}", key.name))
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
