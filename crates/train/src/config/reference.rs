//! The reference of all keys, generated from the table.

use super::arguments::help;
use super::cli::command;
use super::elsewhere;
use super::keys::{Fallback, Key, SECTIONS, ValueKind};
use super::settings::show_literal;
use std::fmt::Write;

/// All keys as Markdown: a section each, with default, valid values, effect and meaning.
pub fn reference() -> String {
    let mut out = String::new();
    for section in SECTIONS {
        // Writing to a string cannot fail.
        let head = "| key | default | values | changes | meaning |\n|---|---|---|---|---|";
        _ = writeln!(out, "## `[{}]`\n\n{head}", section.name);
        for key in section.keys {
            let (default, values, effect, doc) = (default(key), values(key), key.effect.name(), meaning(key));
            _ = writeln!(out, "| `{}` | {default} | {values} | {effect} | {doc} |", key.name);
        }
        out.push('\n');
    }
    out + &elsewhere::table()
}

/// The text that `--help` prints.
pub fn usage(program: &str) -> String {
    let mut keys = String::from("All settings have a key in a section:\n");
    for section in SECTIONS {
        _ = writeln!(keys, "\n[{}]", section.name);
        for key in section.keys {
            let (default, doc) = (default(key), meaning(key));
            let effect = key.effect.name();
            _ = writeln!(keys, "  {:<29}  {doc} Default: {default}; {}. Changes: {effect}.", key.name, values(key));
        }
    }
    help(command().after_help(keys), program)
}

fn default(key: &Key) -> String {
    match key.default {
        Fallback::Is(literal) => show_literal(literal),
        Fallback::Derived(words) => words.to_string(),
        Fallback::Unset => "unset".to_string(),
    }
}

fn values(key: &Key) -> String {
    match key.kind {
        ValueKind::Count(min) => format!("whole number of at least {min}"),
        ValueKind::Number(interval) | ValueKind::Double(interval) => format!("number {}", interval.words()),
        ValueKind::Switch => "true or false".to_string(),
        ValueKind::Text => "text".to_string(),
        ValueKind::Choice(words) => words.join(", "),
        ValueKind::WordOrCount(words) => format!("{}, or a whole number of at least 1", words.join(", ")),
        ValueKind::WordOrId(words) => format!("{}, or an id", words.join(", ")),
        ValueKind::Texts => "list of texts".to_string(),
        ValueKind::WordOrCounts(words) => format!("{}, or a list such as [3, 1]", words.join(", ")),
    }
}

fn meaning(key: &Key) -> String {
    let mut doc = key.doc.to_owned();
    if !key.conditions.is_empty() {
        let with: Vec<&str> = key.conditions.iter().map(|condition| condition.with).collect();
        _ = write!(doc, " Only with {}.", with.join(", and "));
    }
    doc
}
