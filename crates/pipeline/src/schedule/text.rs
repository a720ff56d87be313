//! Schedules as text, to save, to load, and to write by hand.

use super::{ParseActionError, Schedule, Weights};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::str::FromStr;

/// Writes the text form: a line per field, then a line per rank. It parses back to the same schedule.
///
/// ```
/// use meshwork_pipeline::{Schedule, gpipe};
///
/// let text = gpipe(2, 2).to_string();
/// assert_eq!(
///     text,
///     "name: gpipe\n\
///      ranks: 2\n\
///      placement: 0 1\n\
///      micros: 2\n\
///      steps: 1\n\
///      weights: flush\n\
///      rank 0: 0F0 0F1 0B0 0B1\n\
///      rank 1: 1F0 1F1 1B0 1B1\n"
/// );
/// assert_eq!(text.parse::<Schedule>()?, gpipe(2, 2));
/// # Ok::<(), meshwork_pipeline::ParseScheduleError>(())
/// ```
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A name of several lines would end the field.
        let name: Vec<&str> = self.name.split_whitespace().collect();
        writeln!(f, "name: {}", name.join(" "))?;
        writeln!(f, "ranks: {}", self.ranks)?;
        writeln!(f, "placement:{}", Spaced(&self.placement))?;
        if self.replicas.iter().any(|&replicas| replicas != 1) {
            writeln!(f, "replicas:{}", Spaced(&self.replicas))?;
        }
        writeln!(f, "micros: {}", self.micros)?;
        writeln!(f, "steps: {}", self.steps)?;
        writeln!(f, "weights: {}", self.weights.name())?;
        for (rank, row) in self.actions.iter().enumerate() {
            writeln!(f, "rank {rank}:{}", Spaced(row))?;
        }
        Ok(())
    }
}

/// Items with a space before each.
struct Spaced<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for Spaced<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|item| write!(f, " {item}"))
    }
}

/// A text that is not a schedule.
#[derive(Clone, PartialEq, Eq)]
pub struct ParseScheduleError {
    /// The line, counted from 1; `None` if something is missing from the whole text.
    pub line: Option<usize>,
    /// The mistake.
    pub fault: TextFault,
}

debug_as_display!(ParseScheduleError);

messages! {
    /// A mistake in the text of a schedule.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum TextFault {
        /// A line that is neither `key: value` nor empty nor a comment.
        NoField { text: String }
            => "{text:?} is no field: expected key: value, as in micros: 8 or rank 0: 0F0 0B0";
        /// A key that no field has.
        UnknownKey { key: String }
            => "{key:?} is no key: expected name, ranks, placement, replicas, micros, steps, weights, or rank and its \
                number";
        /// A key that occurs twice.
        Repeated { key: String } => "{key:?} is given a second time; once is enough";
        /// A required key that is missing.
        Missing { key: String } => "{key:?} is missing; a schedule needs it";
        /// A value that the key cannot have.
        Value { key: String, token: String, expected: String } => "{key}: {token:?} is not valid: expected {expected}";
        /// An invalid action.
        Action { item: usize, source: ParseActionError } => "item {item}: {source}";
        /// Actions of a rank that does not exist.
        NoSuchRank { rank: usize, ranks: usize } => "rank {rank}: there are {}", match ranks {
            0 => "no ranks".to_owned(),
            _ => format!("only ranks 0 to {}", ranks - 1),
        };
    }
}

impl fmt::Display for ParseScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        write!(f, "{}", self.fault)
    }
}

impl Error for ParseScheduleError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        if let TextFault::Action { source, .. } = &self.fault { source.source() } else { None }
    }
}

/// Reads the text form. `replicas`, `steps` and `weights` may be left out: one rank per stage,
/// one step, flushed. Lines that start with `#` are comments.
///
/// The result is a list of actions; [`check`](crate::check) tells whether it is a valid schedule.
///
/// ```
/// use meshwork_pipeline::Schedule;
///
/// let error = "name: mine\nranks: 1\nplacement: 0\nmicros: 1\nrank 0: 0F0 0X0".parse::<Schedule>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "line 5: item 2: \"0X0\" is no action: expected stage, kind (F, B, I, W, U, SF, RF, SB, RB) and micro-batch, as in \
///      2F0 or 2SF0"
/// );
/// ```
impl FromStr for Schedule {
    type Err = ParseScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fields = Fields::read(text)?;
        let ranks = fields.number("ranks")?;
        let mut actions = Vec::new();
        for (&rank, &(line, row)) in &fields.rows {
            let at = |fault| ParseScheduleError { line: Some(line), fault };
            if rank >= ranks {
                return Err(at(TextFault::NoSuchRank { rank, ranks }));
            }
            if rank > actions.len() {
                break;
            }
            let parse = |(index, token): (usize, &str)| {
                token.parse().map_err(|source| at(TextFault::Action { item: index + 1, source }))
            };
            actions.push(row.split_whitespace().enumerate().map(parse).collect::<Result<Vec<_>, _>>()?);
        }
        if actions.len() < ranks {
            return Err(fields.missing(format!("rank {}", actions.len())));
        }
        let name = fields.required("name")?.1.to_string();
        let placement = fields.numbers("placement", "the rank of each stage, as in 0 1 1 0")?;
        let replicas = match fields.values.contains_key("replicas") {
            true => fields.numbers("replicas", "how many ranks hold each stage, as in 3 1")?,
            false => vec![1; placement.len()],
        };
        Ok(Self {
            name,
            ranks,
            placement,
            replicas,
            micros: fields.number("micros")?,
            steps: if fields.values.contains_key("steps") { fields.number("steps")? } else { 1 },
            weights: fields.weights()?,
            actions,
        })
    }
}

const KEYS: [&str; 7] = ["name", "ranks", "placement", "replicas", "micros", "steps", "weights"];

/// The fields of a text: the line and the value of each.
struct Fields<'a> {
    values: BTreeMap<&'a str, (usize, &'a str)>,
    rows: BTreeMap<usize, (usize, &'a str)>,
}

impl<'a> Fields<'a> {
    fn read(text: &'a str) -> Result<Self, ParseScheduleError> {
        let mut fields = Self { values: BTreeMap::new(), rows: BTreeMap::new() };
        for (index, line) in text.lines().enumerate() {
            let at = |fault| ParseScheduleError { line: Some(index + 1), fault };
            let content = line.trim();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let Some((key, value)) = content.split_once(':') else {
                return Err(at(TextFault::NoField { text: content.to_string() }));
            };
            let (key, value) = (key.trim(), (index + 1, value.trim()));
            let before = match key.strip_prefix("rank ").map(|rank| rank.trim().parse()) {
                Some(Ok(rank)) => fields.rows.insert(rank, value),
                None if KEYS.contains(&key) => fields.values.insert(key, value),
                _ => return Err(at(TextFault::UnknownKey { key: key.to_string() })),
            };
            if before.is_some() {
                return Err(at(TextFault::Repeated { key: key.to_string() }));
            }
        }
        Ok(fields)
    }

    fn missing(&self, key: impl Into<String>) -> ParseScheduleError {
        ParseScheduleError { line: None, fault: TextFault::Missing { key: key.into() } }
    }

    fn required(&self, key: &str) -> Result<(usize, &'a str), ParseScheduleError> {
        self.values.get(key).copied().ok_or_else(|| self.missing(key))
    }

    fn number(&self, key: &str) -> Result<usize, ParseScheduleError> {
        let (line, value) = self.required(key)?;
        value.parse().map_err(|_| not_valid(line, key, value, "a whole number".to_string()))
    }

    fn numbers(&self, key: &str, expected: &str) -> Result<Vec<usize>, ParseScheduleError> {
        let (line, value) = self.required(key)?;
        let number = |token: &str| token.parse().map_err(|_| not_valid(line, key, token, expected.to_string()));
        value.split_whitespace().map(number).collect()
    }

    fn weights(&self) -> Result<Weights, ParseScheduleError> {
        let Some(&(line, value)) = self.values.get("weights") else {
            return Ok(Weights::Flush);
        };
        let found = Weights::ALL.into_iter().find(|weights| weights.name() == value);
        found.ok_or_else(|| not_valid(line, "weights", value, Weights::ALL.map(Weights::name).join(", ")))
    }
}

fn not_valid(line: usize, key: &str, token: &str, expected: String) -> ParseScheduleError {
    let fault = TextFault::Value { key: key.to_string(), token: token.to_string(), expected };
    ParseScheduleError { line: Some(line), fault }
}
