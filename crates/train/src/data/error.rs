//! Why data cannot be read.

use super::format::Foreign;
use super::prelude::*;
use meshwork_engine::TrainError;

/// A file of data and its problem.
#[derive(thiserror::Error)]
#[error("{}: {problem}; {}", path.display(), problem.valid())]
pub struct DataError {
    /// The file or folder.
    pub path: PathBuf,
    /// The problem.
    pub problem: Problem,
}

meshwork_core::debug_as_display!(DataError);

/// A problem of a file of data. Lines are counted from 1, everything else from 0.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum Problem {
    /// No file or folder of this name.
    #[error("does not exist")]
    Missing,
    /// A file without content.
    #[error("is empty")]
    Empty,
    /// A folder without text: why.
    #[error("holds no text: {0}")]
    NoText(String),
    /// A file that the system does not give.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    /// Bytes that the system does not give: the file was cut short after it was opened, or the disk fails.
    #[error("cannot be read at byte {at}: {error}")]
    Read { at: u64, error: io::Error },
    /// Text that is not UTF-8.
    #[error("is not UTF-8 from byte {at} on")]
    NotUtf8 { at: u64 },
    /// Text with a byte that no text has.
    #[error("has a NUL byte at byte {at}: it is binary")]
    Nul { at: u64 },
    /// A file of another format.
    #[error("is {}", .0.name)]
    Foreign(Foreign),
    /// A line of JSON lines that is no JSON object.
    #[error("line {line} is no JSON object: {error}")]
    NotJson { line: u64, error: String },
    /// A document of JSON without its text.
    #[error("{place} has no string {key:?}{instead}")]
    NoTextField { place: String, key: String, instead: String },
    /// An object of JSON that is no example.
    #[error("{place} is no example: it {problem}")]
    NoExample { place: String, problem: String },
    /// Messages of which the chat template makes no text.
    #[error("{place} has messages, and the chat template {problem}")]
    Template { place: String, problem: String },
    /// Messages, and no chat template: what there is where one was looked for, and how there can be one.
    #[error("{place} has messages, and there is no chat template: {problem}")]
    NoTemplate { place: String, problem: String, valid: String },
    /// A file of another kind than JSON, where examples are read.
    #[error("is {0}, and no examples")]
    NoExamples(&'static str),
    /// Examples none of which has an answer that fits.
    #[error("has nothing to learn: {0}")]
    NoAnswers(String),
    /// An array that is no JSON.
    #[error("is no JSON array: {0}")]
    NotArray(String),
    /// A file of settings that is no JSON object.
    #[error("is no JSON object: {0}")]
    Json(String),
    /// Token ids that are of another type by all signs.
    #[error("looks like ids of {bits} bits, not of 16: {sign}")]
    OtherWidth { bits: u32, sign: String },
    /// A header of llm.c, which says another type than `data.token_type`.
    #[error("has an llm.c header that says {header}, and data.token_type = {asked:?}")]
    HeaderType { header: &'static str, asked: &'static str },
    /// Bytes that are no whole number of ids.
    #[error("has {bytes} bytes of ids, of {width} bytes each")]
    PartOfAnId { bytes: u64, width: u64 },
    /// A header of llm.c of another version.
    #[error("has an llm.c header of version {found}")]
    HeaderVersion { found: u32, valid: u32 },
    /// Another number of tokens than the header of llm.c says.
    #[error("has {found} tokens, but its header says {header}")]
    HeaderCount { found: u64, header: u64 },
    /// An index that does not begin as Megatron's.
    #[error("does not begin with the magic bytes of a Megatron index")]
    IndexMagic,
    /// An index of another version.
    #[error("is a Megatron index of version {0}")]
    IndexVersion(u64),
    /// An index of elements that are no ids.
    #[error("says that ids are of type {0}")]
    IndexDtype(u8),
    /// An index of another length than its header says.
    #[error("has {found} bytes: an index of {sequences} sequences and {documents} document indices has {wanted}")]
    IndexLength { found: u64, sequences: u64, documents: u64, wanted: u128 },
    /// A sequence of negative length.
    #[error("sequence {sequence} has {size} tokens")]
    IndexSize { sequence: u64, size: i64 },
    /// A sequence that does not begin where the one before ends, or that ends beyond the tokens.
    #[error("{what} {found}, not at byte {wanted} of the tokens")]
    IndexPointer { what: String, found: i64, wanted: i64 },
    /// A document index that does not fit its neighbours or the sequences.
    #[error("document index {at} is {found}: {why}")]
    IndexDocument { at: u64, found: i64, why: &'static str },
    /// An index without its tokens, or the reverse.
    #[error("has no {} beside it", .0.display())]
    NoPartner(PathBuf),
    /// An id that no vocabulary has.
    #[error("token {at} is {id}")]
    Id { at: u64, id: i64 },
    /// Text that the tokenizer does not take.
    #[error("cannot be encoded by the tokenizer: {0}")]
    Encode(String),
    /// A cache of tokens that cannot be written.
    #[error("the token cache cannot be written: {0}")]
    Cache(io::Error),
}

meshwork_core::debug_as_display!(Problem);

/// The message of a parser without the line, which is always 1 where it parses a line.
pub(super) fn of_line(error: &serde_json::Error) -> String {
    let (told, at) = (error.to_string(), format!(" at line {} column {}", error.line(), error.column()));
    if let Some(told) = told.strip_suffix(&at) { format!("{told} at column {}", error.column()) } else { told }
}

impl Problem {
    /// A valid value, or the way to one.
    pub fn valid(&self) -> String {
        match self {
            Self::Missing | Self::Empty | Self::Unreadable(_) | Self::NotUtf8 { .. } | Self::Nul { .. } => {
                "use a UTF-8 text, a .jsonl file, a .bin file of token ids, a Megatron dataset, or a folder of texts"
                    .to_owned()
            }
            Self::NoText(_) => {
                let texts: Vec<String> = super::format::EXTENSIONS.iter().map(|of| format!(".{of}")).collect();
                format!("use a folder of UTF-8 files that end in {}", texts.join(", "))
            }
            Self::Read { .. } => "do not change data while a run reads it".to_owned(),
            Self::NotJson { .. } => {
                "use one JSON object a line, such as {\"text\": \"Arma virumque cano\"}, or leave such lines out with \
                 data.skip_bad_lines = true"
                    .to_owned()
            }
            Self::NoTextField { .. } => {
                "set data.text_key to the key of the text, or leave such documents out with data.skip_bad_lines = true"
                    .to_owned()
            }
            Self::NoExample { .. } | Self::NoExamples(_) => {
                "use one JSON object a line with messages, or with prompt and completion (docs/finetune.md)".to_owned()
            }
            Self::NoAnswers(_) => "use more examples, or a larger model.seq_len".to_owned(),
            Self::Template { .. } => {
                "use messages that the template takes, or another template in data.chat_template, or leave such examples \
                 out with data.skip_bad_lines = true"
                    .to_owned()
            }
            Self::NoTemplate { valid, .. } => format!("{valid}, or use texts: prompt and completion (docs/finetune.md)"),
            Self::NotArray(_) => {
                "use a complete JSON array of objects or strings, or set data.format = \"text\" to learn it as it is"
                    .to_owned()
            }
            Self::Foreign(foreign) => foreign.advice.to_owned(),
            Self::Json(_) => "use the file that was written with the tokenizer, or remove it".to_owned(),
            Self::OtherWidth { bits, .. } => {
                format!("set data.token_type = \"u{bits}\", or \"u16\" if its ids are of 16 bits")
            }
            Self::HeaderType { header, .. } => format!("set data.token_type = {header:?}, or \"auto\""),
            Self::PartOfAnId { .. } | Self::HeaderCount { .. } => "use a complete file".to_owned(),
            Self::HeaderVersion { valid, .. } => format!("use version {valid}"),
            Self::IndexMagic => "use an .idx file of Megatron's preprocess_data.py".to_owned(),
            Self::IndexVersion(_) => "use version 1".to_owned(),
            Self::IndexDtype(_) => "use 1 (u8), 2 (i8), 3 (i16), 4 (i32), 5 (i64) or 8 (u16)".to_owned(),
            Self::IndexLength { .. }
            | Self::IndexSize { .. }
            | Self::IndexPointer { .. }
            | Self::IndexDocument { .. }
            | Self::NoPartner(_) => "use a complete .idx with the .bin that was written with it".to_owned(),
            Self::Id { .. } => format!("use ids from 0 to {}", i32::MAX),
            Self::Encode(_) => "use a tokenizer that knows every word, or has an unknown token".to_owned(),
            Self::Cache(_) => "name a folder that this process may write in data.cache_dir".to_owned(),
        }
    }

    pub(crate) fn in_file(self, path: &Path) -> DataError {
        DataError { path: path.to_path_buf(), problem: self }
    }
}

impl From<DataError> for meshwork_tensor::Error {
    /// The error of a [`BatchSource`](meshwork_nn::BatchSource) whose samples cannot be read.
    fn from(error: DataError) -> Self {
        Self::Shape { op: "batch", problem: error.to_string(), shapes: Vec::new() }
    }
}

meshwork_core::from!(TrainError: Tensor(DataError));
