//! Examples to fine-tune on: an object of JSON becomes a text, and the parts of it that are answers.
//!
//! ```text
//! {"messages": [..]}                       the chat template writes the text; what it writes for the assistant is an answer
//! {"prompt": [..], "completion": [..]}     likewise, and only the assistant's messages of the completion are answers
//! {"prompt": "..", "completion": ".."}     one behind the other; the completion is the answer
//! ```
//! Of a pair of answers, `chosen` and `rejected` stand in the place of the completion, and it becomes two texts:
//!
//! ```text
//! {"prompt": .., "chosen": .., "rejected": ..}    texts, or lists of messages
//! {"chosen": [..], "rejected": [..]}              conversations: the messages that both begin with are the prompt
//! ```
//! Only the tokens of answers are targets of the loss.

mod answers;
#[cfg(feature = "tokenizers")]
mod template;

use super::piece::Answers;
use super::prelude::*;
use crate::config::sections::Data as Settings;
use answers::Template;
use serde_json::Map;
use std::iter;

/// The key of the file of a chat template.
const KEY: &str = "data.chat_template";

/// How the examples of a run become texts.
#[derive(Debug)]
pub(super) struct Examples {
    template: Result<Box<dyn Template>, Lacks>,
    /// Whether they are pairs of answers.
    pairs: bool,
}

/// Why there is no chat template, which examples without messages do not need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lacks {
    /// What there is in each place where one was looked for.
    pub problem: String,
    /// The way to one.
    pub valid: String,
}

/// Why an object of JSON gives no text to learn.
#[derive(Debug, PartialEq)]
pub(super) enum Wrong {
    /// It has other fields.
    Fields(String),
    /// The chat template cannot write it.
    Template(String),
    /// It needs a chat template, and there is none.
    NoTemplate(Lacks),
}

impl Examples {
    /// Examples as `[data]` has them, or pairs of answers, with its chat template or that of its tokenizer's folder.
    pub fn open(settings: &Settings, pairs: bool) -> Result<Self, Fault> {
        Ok(Self { template: template(settings)?, pairs })
    }

    /// The text of an example; of a pair that of the chosen and that of the rejected answer, each behind the prompt.
    pub fn read(&self, value: Value) -> Result<Vec<DocumentPiece>, Wrong> {
        let Value::Object(object) = value else { return Err(Wrong::Fields("is no object".to_owned())) };
        if self.pairs { self.pair(&object) } else { Ok(vec![self.single(&object)?]) }
    }

    fn single(&self, object: &Map<String, Value>) -> Result<DocumentPiece, Wrong> {
        let field = |name: &str| object.get(name).filter(|value| !value.is_null());
        match [field("messages"), field("prompt"), field("completion")] {
            [Some(Value::Array(messages)), None, None] => self.chat(messages, 0, object),
            [None, Some(Value::Array(prompt)), Some(Value::Array(completion))] => {
                self.chat(&[&prompt[..], completion].concat(), prompt.len(), object)
            }
            [None, Some(Value::String(prompt)), Some(Value::String(completion))] => Ok(plain(prompt, completion)),
            _ => {
                let lacks = "has neither a list of messages, nor a prompt and a completion, both texts or both lists";
                Err(lacking(lacks, object))
            }
        }
    }

    fn pair(&self, object: &Map<String, Value>) -> Result<Vec<DocumentPiece>, Wrong> {
        let field = |name: &str| object.get(name).filter(|value| !value.is_null());
        let [prompt, chosen, rejected] = ["prompt", "chosen", "rejected"].map(field);
        if chosen.is_some() && chosen == rejected {
            return Err(Wrong::Fields("has the same chosen and rejected answer".to_owned()));
        }
        let pieces = match (prompt, chosen, rejected) {
            (Some(Value::String(prompt)), Some(Value::String(chosen)), Some(Value::String(rejected))) => {
                [chosen, rejected].map(|answer| Ok(plain(prompt, answer)))
            }
            (Some(Value::Array(prompt)), Some(Value::Array(chosen)), Some(Value::Array(rejected))) => {
                let chat = |answer: &[Value]| self.chat(&[&prompt[..], answer].concat(), prompt.len(), object);
                [chosen, rejected].map(|answer| chat(answer))
            }
            (None, Some(Value::Array(chosen)), Some(Value::Array(rejected))) => {
                let prompt = chosen.iter().zip(rejected).take_while(|(a, b)| a == b).count();
                [chosen, rejected].map(|messages| self.chat(messages, prompt, object))
            }
            _ => {
                let lacks = "has no chosen and rejected answer to a prompt, all texts or all lists of messages, and no \
                             chosen and rejected conversation";
                return Err(lacking(lacks, object));
            }
        };
        let pieces = pieces.into_iter().collect::<Result<Vec<_>, _>>()?;
        match pieces.iter().any(|piece| piece.answers.iter().all(Answers::are_empty)) {
            true => Err(Wrong::Fields("has a chosen or rejected answer without a text".to_owned())),
            false => Ok(pieces),
        }
    }

    /// The text of a conversation, in which the assistant's messages from `first` on are answers.
    fn chat(&self, messages: &[Value], first: usize, object: &Map<String, Value>) -> Result<DocumentPiece, Wrong> {
        let template = self.template.as_deref().map_err(|lacks| Wrong::NoTemplate(lacks.clone()))?;
        let (text, spans) = answers::of(template, messages, first, object.get("tools")).map_err(Wrong::Template)?;
        Ok(DocumentPiece::example(text, Answers { spans, templated: true }))
    }

    /// What a run is told about its examples after they are read.
    pub fn notices(&self) -> Vec<String> {
        self.template.iter().flat_map(|template| template.notices()).collect()
    }
}

/// A prompt, and the answer behind it.
fn plain(prompt: &str, answer: &str) -> DocumentPiece {
    let text = format!("{prompt}{answer}");
    let spans = iter::once(prompt.len()..text.len()).collect();
    DocumentPiece::example(text, Answers { spans, templated: false })
}

fn lacking(lacks: &str, object: &Map<String, Value>) -> Wrong {
    let keys: Vec<String> = object.keys().take(8).map(|key| format!("{key:?}")).collect();
    Wrong::Fields(format!("{lacks}; its keys are [{}]", keys.join(", ")))
}

/// The text of a conversation up to the beginning of the next answer, by the chat template that `settings` name.
///
/// # Errors
/// No template; messages that it cannot write.
pub(crate) fn conversation(settings: &Settings, messages: &[Value]) -> Result<String, Fault> {
    let given = settings.chat_template.as_ref().map_or_else(|| "(unset)".to_owned(), |path| format!("{path:?}"));
    let fault = |problem: String, valid: &str| Fault::new(KEY, given.clone(), problem, valid);
    let none = |Lacks { problem, valid }: Lacks| {
        fault(format!("there is no chat template: {problem}"), &format!("{valid}, or continue a text without one"))
    };
    let template = template(settings)?.map_err(none)?;
    let text = template.render(messages, None, true);
    let text = text.map_err(|error| fault(format!("fails: {error}"), "give messages that the template takes"))?;
    Ok(answers::unmarked(&text).0)
}

#[cfg(feature = "tokenizers")]
fn template(settings: &Settings) -> Result<Result<Box<dyn Template>, Lacks>, Fault> {
    Ok(template::Jinja::open(settings)?.map(|jinja| Box::new(jinja) as Box<dyn Template>))
}

#[cfg(not(feature = "tokenizers"))]
fn template(settings: &Settings) -> Result<Result<Box<dyn Template>, Lacks>, Fault> {
    let (problem, valid) =
        ("needs the feature tokenizers, which this build lacks", "build it with --features tokenizers");
    match &settings.chat_template {
        None => Ok(Err(Lacks { problem: format!("it {problem}"), valid: valid.to_owned() })),
        Some(path) => Err(Fault::new(KEY, format!("{path:?}"), problem, valid)),
    }
}

#[cfg(test)]
mod tests;
