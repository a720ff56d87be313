//! Which part of a conversation's text is an answer.
//!
//! A template may say so itself: `{% generation %} .. {% endgeneration %}` surround what the model is to write. Of
//! another template, the answer of a turn is what is added to the text of the turns before it, the beginning of an
//! answer (`add_generation_prompt`) included. That is right only if these texts are prefixes of the whole one. A
//! template that writes a turn in another way once more turns follow, as those that leave out earlier thoughts do, is
//! refused: the model would learn an answer to a text that generation never gives it.

use super::super::prelude::*;

/// What stands around an answer in what a template with `{% generation %}` writes: noncharacters of Unicode, with which
/// a message is refused.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// A chat template.
pub(super) trait Template: std::fmt::Debug + Send + Sync {
    /// Whether it marks answers itself.
    fn marks_answers(&self) -> bool;
    /// The text of some messages, with [`MARKS`] around answers if it [marks](Self::marks_answers) them; with `begins`,
    /// the beginning of an answer follows. The error is the template's message.
    fn render(&self, messages: &[Value], tools: Option<&Value>, begins: bool) -> Result<String, String>;
    /// What a run is told after all texts are written.
    fn notices(&self) -> Vec<String>;
}

/// The text of a conversation, and the bytes of it that are answers, of the assistant's messages from `first` on.
pub(super) fn of(
    template: &dyn Template,
    messages: &[Value],
    first: usize,
    tools: Option<&Value>,
) -> Result<(String, Vec<Range<usize>>), String> {
    if messages.iter().any(|message| message.to_string().contains(MARKS)) {
        return Err("cannot write U+FDD0 and U+FDD1, which Unicode keeps out of texts: a message has one".to_owned());
    }
    let render = |turns: usize, begins: bool| {
        template.render(&messages[..turns], tools, begins).map_err(|error| format!("fails: {error}"))
    };
    let (text, marked) = unmarked(&render(messages.len(), false)?);
    if text.trim().is_empty() {
        return Err("writes no text of them".to_owned());
    }
    let prefix = |turns: usize, begins: bool| {
        let (part, _) = unmarked(&render(turns, begins)?);
        if text.starts_with(&part) { Ok(part.len()) } else { Err(no_prefix(turns, begins)) }
    };
    if template.marks_answers() {
        let learnt = if first == 0 { 0 } else { prefix(first, false)? };
        return Ok((text, marked.into_iter().filter(|answer| answer.start >= learnt).collect()));
    }
    let is_answer = |turn: &usize| messages[*turn]["role"] == "assistant";
    let answer = |turn: usize| Ok(prefix(turn, true)?..prefix(turn + 1, false)?);
    let answers = (first..messages.len()).filter(is_answer).map(answer).collect::<Result<Vec<_>, String>>()?;
    Ok((text, answers))
}

fn no_prefix(turns: usize, begins: bool) -> String {
    let what = if begins { ", with the beginning of an answer" } else { "" };
    format!(
        "writes the first {turns} messages{what} otherwise than at the beginning of all messages, so that what it writes for the \
         assistant cannot be told: mark it in the template by {{% generation %}} and {{% endgeneration %}}"
    )
}

/// A text without its marks, and what they surround.
pub(super) fn unmarked(marked: &str) -> (String, Vec<Range<usize>>) {
    let (mut text, mut spans, mut begun) = (String::with_capacity(marked.len()), Vec::new(), 0);
    for part in marked.split_inclusive(MARKS) {
        let plain = part.trim_end_matches(MARKS);
        text.push_str(plain);
        match part[plain.len()..].chars().next() {
            Some(mark) if mark == MARKS[0] => begun = text.len(),
            Some(_) => spans.push(begun..text.len()),
            None => {}
        }
    }
    (text, spans)
}
