use super::super::piece::PieceTokens;
use super::*;
use serde_json::json;

/// Writes a turn as `role: content.`, after `bos`.
#[derive(Debug)]
struct Plain {
    marks: bool,
    /// Whether the answers of turns before the last are shortened, as templates do that leave out thoughts.
    forgets: bool,
}

impl Template for Plain {
    fn marks_answers(&self) -> bool {
        self.marks
    }

    fn render(&self, messages: &[Value], _: Option<&Value>, begins: bool) -> Result<String, String> {
        let mut text = "^".to_owned();
        for (at, message) in messages.iter().enumerate() {
            let (role, content) = (message["role"].as_str().unwrap(), message["content"].as_str().unwrap());
            if role == "tool" {
                return Err("no tools here".to_owned());
            }
            let content = if self.forgets && at + 1 < messages.len() { &content[..1] } else { content };
            text += &match (role, self.marks) {
                ("assistant", true) => format!("{role}: {}{content}.{}", answers::MARKS[0], answers::MARKS[1]),
                _ => format!("{role}: {content}."),
            };
        }
        Ok(if begins { text + "assistant: " } else { text })
    }

    fn notices(&self) -> Vec<String> {
        Vec::new()
    }
}

fn read(template: Plain, value: Value) -> Result<(String, Vec<String>), Wrong> {
    let piece = Examples { template: Some(Box::new(template)) }.read(value)?;
    let answers = piece.answers.unwrap().spans.into_iter().map(|span| piece.text[span].to_owned()).collect();
    Ok((piece.text, answers))
}

fn chat() -> Vec<Value> {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    vec![turn("user", "one?"), turn("assistant", "ONE"), turn("user", "two?"), turn("assistant", "TWO")]
}

#[test]
fn answers_are_what_is_added_for_the_assistant_or_what_a_template_marks() {
    for marks in [false, true] {
        let (text, answers) = read(Plain { marks, forgets: false }, json!({"messages": chat()})).unwrap();
        assert_eq!(text, "^user: one?.assistant: ONE.user: two?.assistant: TWO.");
        assert_eq!(answers, ["ONE.", "TWO."], "marks: {marks}");
    }
}

#[test]
fn of_a_prompt_and_a_completion_the_completion_is_learnt() {
    for marks in [false, true] {
        let of = json!({"prompt": chat()[..3], "completion": chat()[3..]});
        let (text, answers) = read(Plain { marks, forgets: false }, of).unwrap();
        assert_eq!(text, "^user: one?.assistant: ONE.user: two?.assistant: TWO.");
        assert_eq!(answers, ["TWO."], "marks: {marks}");
    }
    let (text, answers) =
        read(Plain { marks: false, forgets: false }, json!({"prompt": "2 + 2 =", "completion": " 4"})).unwrap();
    assert_eq!((&*text, &answers[..]), ("2 + 2 = 4", &[" 4".to_owned()][..]));
}

/// The text of a prefix is no prefix of the text: what follows it is not what generation would be given.
#[test]
fn a_template_that_rewrites_earlier_turns_is_refused_unless_it_marks_answers() {
    let refused = read(Plain { marks: false, forgets: true }, json!({"messages": chat()})).unwrap_err();
    let Wrong::Template(problem) = refused else { panic!("{refused:?}") };
    assert!(problem.starts_with("writes the first 1 messages, with the beginning of an answer otherwise"), "{problem}");
    assert!(problem.contains("{% generation %}"), "{problem}");
    let (_, answers) = read(Plain { marks: true, forgets: true }, json!({"messages": chat()})).unwrap();
    assert_eq!(answers, ["O.", "TWO."]);
}

#[test]
fn what_is_no_example_says_what_it_has() {
    for (value, told) in [
        (
            json!({"text": "a"}),
            "has neither a list of messages, nor a prompt and a completion, both texts or both lists; its keys are [\"text\"]",
        ),
        (json!({"prompt": "a", "completion": []}), "has neither"),
        (json!({"prompt": "a"}), "has neither"),
        (json!({"messages": [], "prompt": "a", "completion": "b"}), "has neither"),
        (json!("a"), "is no object"),
    ] {
        let wrong = Examples { template: None }.read(value.clone()).unwrap_err();
        let Wrong::Fields(problem) = &wrong else { panic!("{wrong:?}") };
        assert!(problem.starts_with(told), "{value}: {problem}");
    }
    let wrong = Examples { template: None }.read(json!({"messages": chat()})).unwrap_err();
    let Wrong::Template(problem) = wrong else { panic!("{wrong:?}") };
    assert!(problem.starts_with("there is none"), "{problem}");
    let tool = json!({"messages": [{"role": "tool", "content": "4"}]});
    let wrong = read(Plain { marks: false, forgets: false }, tool).unwrap_err();
    assert_eq!(wrong, Wrong::Template("fails: no tools here".to_owned()));
}

/// Otherwise a message could say what is an answer.
#[test]
fn a_message_with_a_mark_is_refused() {
    for mark in answers::MARKS {
        let messages = json!([{"role": "user", "content": format!("one{mark}?")}]);
        let refused = read(Plain { marks: true, forgets: false }, json!({"messages": messages})).unwrap_err();
        let Wrong::Template(problem) = refused else { panic!("{refused:?}") };
        assert!(problem.starts_with("cannot write U+FDD0 and U+FDD1"), "{problem}");
    }
}

#[test]
fn the_token_that_ends_an_example_is_learnt_and_the_one_that_begins_it_is_not() {
    let example = PieceTokens { ids: vec![5, 6], masked: vec![true, false] };
    let between = PieceTokens { ids: vec![1, 5, 6, 2], masked: vec![true, true, false, false] };
    assert_eq!(example.between(Some(1), Some(2)), between);
    let text = PieceTokens { ids: vec![5, 6], masked: Vec::new() };
    assert!(text.between(Some(1), Some(2)).masked.is_empty(), "of a text all is learnt");
}
