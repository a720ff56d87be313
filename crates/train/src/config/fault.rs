//! Faults of a configuration, all reported together.

use std::fmt;
use thiserror::Error;

/// One fault, and what would be valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The key or flag: `model.num_heads`, `--mesh`.
    pub key: String,
    /// The value as the user wrote it; empty where there is none.
    pub value: String,
    /// The problem.
    pub problem: String,
    /// A valid value, or the way to one.
    pub valid: String,
}

impl Fault {
    /// A fault of `key` with the value `value`.
    pub fn new(
        key: impl Into<String>,
        value: impl fmt::Display,
        problem: impl Into<String>,
        valid: impl Into<String>,
    ) -> Self {
        Self { key: key.into(), value: value.to_string(), problem: problem.into(), valid: valid.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, problem, valid } = self;
        let equals = match (value.is_empty(), key.starts_with("--")) {
            (true, _) => "",
            (false, true) => " ",
            (false, false) => " = ",
        };
        let line = format!("{key}{equals}{value}: {problem}; {valid}");
        // One line per fault, whatever a value holds.
        f.write_str(&line.replace('\r', "\\r").replace('\n', "\\n"))
    }
}

/// A configuration that cannot be run: every fault that was found. Displayed as one line per fault.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{}", faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    /// The faults, in the order in which they were found; never empty.
    pub faults: Vec<Fault>,
}

meshwork_core::debug_as_display!(ConfigError);

/// The candidate that takes the fewest edits to reach from `word`; the first of equals.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates.into_iter().min_by_key(|candidate| distance(word, candidate))
}

/// The advice for an unknown word: the nearest known word, and all known words.
pub fn choose_from(word: &str, known: &[&str]) -> String {
    let all = known.join(", ");
    match nearest(word, known.iter().copied()) {
        Some(near) if known.len() > 1 => format!("the nearest is {near}; use one of {all}"),
        _ => format!("use {all}"),
    }
}

/// `"uniform", "cost"`
pub(super) fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(", ")
}

/// Edit distance (Levenshtein), except that a word contained in the other is one edit away, so that `heads` is near
/// `num_heads`.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let inside = a.len().min(b.len()) >= 3 && (a.contains(b) || b.contains(a));
    if inside && a != b { 1 } else { strsim::levenshtein(a, b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in
            [("", "", 0), ("dp", "pp", 1), ("lr", "", 2), ("kitten", "sitting", 3), ("heads", "num_heads", 1)]
        {
            assert_eq!((distance(a, b), distance(b, a)), (expected, expected), "{a} {b}");
        }
    }

    #[test]
    fn a_fault_is_one_line() {
        let fault = Fault::new("data.path", "a\nb", "does not exist", "use a file");
        assert_eq!(fault.to_string(), "data.path = a\\nb: does not exist; use a file");
        assert_eq!(Fault::new("--mesh", "dp", "no degree", "use dp=2").to_string(), "--mesh dp: no degree; use dp=2");
        assert_eq!(Fault::new("[moe]", "", "not yet", "remove it").to_string(), "[moe]: not yet; remove it");
    }
}
