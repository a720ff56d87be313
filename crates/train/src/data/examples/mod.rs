//! Examples to fine-tune on: an object of JSON becomes a text, and the parts of it that are answers.
//!
//! ```text
//! {"messages": [..]}                       the chat template writes the text; what it writes for the assistant is an answer
//! {"prompt": [..], "completion": [..]}     likewise, and only the assistant's messages of the completion are answers
//! {"prompt": "..", "completion": ".."}     one behind the other; the completion is the answer
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

/// How the examples of a run become texts.
#[derive(Debug)]
pub(super) struct Examples {
    template: Option<Box<dyn Template>>,
}

/// Why an object of JSON gives no text to learn.
#[derive(Debug, PartialEq)]
pub(super) enum Wrong {
    /// It has other fields.
    Fields(String),
    /// The chat template cannot write it.
    Template(String),
}

impl Examples {
    /// Examples as `[data]` has them, with its chat template or that of its tokenizer's folder.
    pub fn open(settings: &Settings) -> Result<Self, Fault> {
        Ok(Self { template: template(settings)? })
    }

    /// The text of an example.
    pub fn read(&self, value: Value) -> Result<DocumentPiece, Wrong> {
        let Value::Object(object) = value else { return Err(Wrong::Fields("is no object".to_owned())) };
        let field = |name: &str| object.get(name).filter(|value| !value.is_null());
        match [field("messages"), field("prompt"), field("completion")] {
            [Some(Value::Array(messages)), None, None] => self.chat(messages, 0, &object),
            [None, Some(Value::Array(prompt)), Some(Value::Array(completion))] => {
                self.chat(&[&prompt[..], completion].concat(), prompt.len(), &object)
            }
            [None, Some(Value::String(prompt)), Some(Value::String(completion))] => {
                let text = format!("{prompt}{completion}");
                let spans = iter::once(prompt.len()..text.len()).collect();
                Ok(DocumentPiece::example(text, Answers { spans, templated: false }))
            }
            _ => {
                let keys: Vec<String> = object.keys().take(8).map(|key| format!("{key:?}")).collect();
                let lacks = "has neither a list of messages, nor a prompt and a completion, both texts or both lists";
                Err(Wrong::Fields(format!("{lacks}; its keys are [{}]", keys.join(", "))))
            }
        }
    }

    /// The text of a conversation, in which the assistant's messages from `first` on are answers.
    fn chat(&self, messages: &[Value], first: usize, object: &Map<String, Value>) -> Result<DocumentPiece, Wrong> {
        let none = || "there is none: set data.chat_template, or data.tokenizer to a folder that has one beside its tokenizer.json";
        let template = self.template.as_deref().ok_or_else(|| Wrong::Template(none().to_owned()))?;
        let (text, spans) = answers::of(template, messages, first, object.get("tools")).map_err(Wrong::Template)?;
        Ok(DocumentPiece::example(text, Answers { spans, templated: true }))
    }

    /// What a run is told about its examples after they are read.
    pub fn notices(&self) -> Vec<String> {
        self.template.iter().flat_map(|template| template.notices()).collect()
    }
}

#[cfg(feature = "tokenizers")]
fn template(settings: &Settings) -> Result<Option<Box<dyn Template>>, Fault> {
    Ok(template::Jinja::open(settings)?.map(|jinja| Box::new(jinja) as Box<dyn Template>))
}

#[cfg(not(feature = "tokenizers"))]
fn template(settings: &Settings) -> Result<Option<Box<dyn Template>>, Fault> {
    let problem = "needs the feature tokenizers, which this build lacks";
    match &settings.chat_template {
        None => Ok(None),
        Some(path) => {
            Err(Fault::new("data.chat_template", format!("{path:?}"), problem, "build it with --features tokenizers"))
        }
    }
}

#[cfg(test)]
mod tests;
