//! Documents in JSON: an object a line, or an array of objects or strings.

use super::error::of_line;
use super::examples::{Lacks, Wrong};
use super::format::BYTE_ORDER_MARK;
use super::piece::See;
use super::prelude::*;
use serde::Deserializer as _;
use serde::de::{Error as _, SeqAccess, Visitor};
use std::io::BufRead;

/// The documents of JSON that were left out.
#[derive(Debug, Default)]
pub(super) struct Bad {
    count: u64,
    /// The error of the first.
    pub first: Option<DataError>,
    documents: u64,
}

impl Bad {
    /// Leaves a document out, if that is permitted. A template that is not there is no fault of a document.
    fn leave_out(&mut self, error: DataError, reading: &Reading<'_>) -> Result<(), DataError> {
        if !reading.skip_bad_lines || matches!(error.problem, Problem::NoTemplate { .. }) {
            return Err(error);
        }
        self.count += 1;
        self.first.get_or_insert(error);
        Ok(())
    }

    /// How many there are, for the user.
    pub fn told(&self, path: &Path) -> Option<String> {
        let DataError { path: file, problem } = self.first.as_ref()?;
        let (count, all) = (self.count, self.count + self.documents);
        Some(format!("{}: {count} of {all} documents skipped; the first: {} {problem}", path.display(), file.display()))
    }
}

/// The documents of one file of JSON, on their way to the receiver of pieces.
pub(super) struct JsonDocuments<'a, 'see> {
    pub path: &'a Path,
    pub reading: &'a Reading<'a>,
    pub bad: &'a mut Bad,
    pub see: &'a mut See<'see>,
}

impl JsonDocuments<'_, '_> {
    /// Gives the documents of an object, or leaves them out.
    fn give(&mut self, documents: Result<Vec<DocumentPiece>, Problem>) -> Result<(), DataError> {
        match documents {
            Ok(documents) => {
                self.bad.documents += u64::from(documents.iter().any(|document| !document.text.is_empty()));
                documents.into_iter().filter(|document| !document.text.is_empty()).try_for_each(&mut *self.see)
            }
            Err(problem) => self.bad.leave_out(problem.in_file(self.path), self.reading),
        }
    }

    /// The documents of JSON lines: the text of each. Blank lines and empty texts are no documents.
    pub fn read_lines(mut self, mut from: impl BufRead) -> Result<(), DataError> {
        let (mut bytes, mut at) = (Vec::new(), 0);
        for line in 1.. {
            bytes.clear();
            let read = from.read_until(b'\n', &mut bytes);
            let read = read.map_err(|error| Problem::Read { at, error }.in_file(self.path))?;
            if read == 0 {
                break;
            }
            let mark = if line == 1 && bytes.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
            let start = at + mark as u64;
            at += read as u64;
            let documents = std::str::from_utf8(&bytes[mark..])
                .map_err(|error| Problem::NotUtf8 { at: start + error.valid_up_to() as u64 })
                .and_then(|text| self.documents_of_line(line, text.trim()));
            self.give(documents)?;
        }
        Ok(())
    }

    fn documents_of_line(&self, line: u64, text: &str) -> Result<Vec<DocumentPiece>, Problem> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        match serde_json::from_str::<Value>(text) {
            Err(error) => Err(Problem::NotJson { line, error: of_line(&error) }),
            Ok(value) if !text.starts_with('{') => {
                Err(Problem::NotJson { line, error: format!("it is {}", kind(&value)) })
            }
            Ok(value) => documents_of(value, || format!("line {line}"), self.reading),
        }
    }

    /// The documents of a JSON array: strings, or the texts of objects. One is in memory at a time.
    pub fn read_array(self, mut from: impl BufRead) -> Result<(), DataError> {
        if from.fill_buf().is_ok_and(|begin| begin.starts_with(BYTE_ORDER_MARK)) {
            from.consume(BYTE_ORDER_MARK.len());
        }
        let (path, mut parser, mut failed) = (self.path, serde_json::Deserializer::from_reader(from), None);
        let read = parser.deserialize_seq(Elements(self, &mut failed)).and_then(|()| parser.end());
        match (failed, read) {
            (Some(error), _) => Err(error),
            (None, read) => read.map_err(|error| Problem::NotArray(error.to_string()).in_file(path)),
        }
    }
}

/// The elements of an array as they are read, and the error of a receiver that takes no more of them.
struct Elements<'a, 'b, 'see>(JsonDocuments<'a, 'see>, &'b mut Option<DataError>);

impl<'de> Visitor<'de> for Elements<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let Self(mut documents, failed) = self;
        for at in 0u64.. {
            let found = match elements.next_element()? {
                None => break,
                Some(Value::String(text)) if documents.reading.examples.is_none() => {
                    Ok(vec![DocumentPiece::whole(text)])
                }
                Some(value) => documents_of(value, || format!("element {at}"), documents.reading),
            };
            if let Err(error) = documents.give(found) {
                *failed = Some(error);
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The documents of a value: an example, both answers of a pair, or a text.
fn documents_of(
    value: Value,
    place: impl Fn() -> String,
    reading: &Reading<'_>,
) -> Result<Vec<DocumentPiece>, Problem> {
    let Some(examples) = reading.examples else {
        return Ok(vec![DocumentPiece::whole(text_of(value, place, reading)?)]);
    };
    examples.read(value).map_err(|wrong| match wrong {
        Wrong::Fields(problem) => Problem::NoExample { place: place(), problem },
        Wrong::Template(problem) => Problem::Template { place: place(), problem },
        Wrong::NoTemplate(Lacks { problem, valid }) => Problem::NoTemplate { place: place(), problem, valid },
    })
}

/// The text of a document: of an object the string under `data.text_key`.
fn text_of(value: Value, place: impl Fn() -> String, reading: &Reading<'_>) -> Result<String, Problem> {
    let key = reading.text_key;
    let instead = match value {
        Value::Object(mut object) => match object.remove(key) {
            Some(Value::String(text)) => return Ok(text),
            Some(other) => format!(": it is {}", kind(&other)),
            None => {
                let strings = object.into_iter().filter(|(_, value)| value.is_string());
                let strings: Vec<String> = strings.map(|(key, _)| format!("{key:?}")).take(8).collect();
                if strings.is_empty() { String::new() } else { format!(": its strings are {}", strings.join(", ")) }
            }
        },
        other => format!(": it is {}", kind(&other)),
    };
    Err(Problem::NoTextField { place: place(), key: key.to_owned(), instead })
}
