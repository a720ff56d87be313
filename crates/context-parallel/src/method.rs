//! The methods by which ranks of cp share out attention.

use meshwork_core::debug_as_display;
use std::fmt;
use std::str::FromStr;

/// What ranks of cp exchange around an attention. A rank has `s/cp` tokens of width `h`, with keys and values of width
/// `k` together; in elements for each sequence, rank and layer, forward:
///
/// | method | sends | receives | needs |
/// |---|---|---|---|
/// | all-gather | `(cp-1) · s/cp · k` | the same | memory for `s · k` |
/// | all-to-all | `(cp-1)/cp · s/cp · (2h + k)` | the same | heads of queries on each rank divisible by cp |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Keys and values of all tokens come to every rank (Llama 3, section 3.3.2).
    AllGather,
    /// Each rank gets all tokens of some of the heads (DeepSpeed-Ulysses, arXiv:2309.14509).
    AllToAll,
}

/// A word that names no method.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is no method of context parallelism: use {}", .0, Method::WORDS.map(|(word, _)| word).join(" or "))]
pub struct MethodError(pub String);

debug_as_display!(MethodError);

impl Method {
    /// Each method and its word.
    pub const WORDS: [(&'static str, Self); 2] = [("all_gather", Self::AllGather), ("all_to_all", Self::AllToAll)];
}

impl FromStr for Method {
    type Err = MethodError;

    fn from_str(text: &str) -> Result<Self, MethodError> {
        let found = Self::WORDS.into_iter().find(|(word, _)| *word == text);
        found.map(|(_, method)| method).ok_or_else(|| MethodError(text.to_owned()))
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::WORDS.iter().find(|(_, method)| method == self).map_or("", |(word, _)| word))
    }
}
