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
    Ok(read_as(template, value, false)?.remove(0))
}

/// The texts of an example, and their answers.
fn read_as(template: Plain, value: Value, pairs: bool) -> Result<Vec<(String, Vec<String>)>, Wrong> {
    let pieces = Examples { template: Ok(Box::new(template)), pairs }.read(value)?.into_iter();
    let read = pieces.map(|piece| {
        let answers = piece.answers.unwrap().spans.into_iter().map(|span| piece.text[span].to_owned()).collect();
        (piece.text, answers)
    });
    Ok(read.collect())
}

#[test]
fn a_pair_becomes_two_texts_with_one_prompt() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let (prompt, yes, no) = (turn("user", "one?"), turn("assistant", "YES"), turn("assistant", "NO"));
    let own = |text: &str, answer: &str| (text.to_owned(), vec![answer.to_owned()]);
    let pair = [own("^user: one?.assistant: YES.", "YES."), own("^user: one?.assistant: NO.", "NO.")];
    for marks in [false, true] {
        for lines in [
            json!({"prompt": [prompt], "chosen": [yes], "rejected": [no]}),
            json!({"chosen": [prompt, yes], "rejected": [prompt, no], "prompt": null}),
        ] {
            assert_eq!(read_as(Plain { marks, forgets: false }, lines, true).unwrap(), pair);
        }
    }
    // An answer that both conversations have is none of either.
    let both = [prompt.clone(), yes.clone(), turn("user", "two?")];
    let conversation = |last: &Value| [&both[..], std::slice::from_ref(last)].concat();
    let lines = json!({"chosen": conversation(&yes), "rejected": conversation(&no)});
    let read = read_as(Plain { marks: true, forgets: false }, lines, true).unwrap();
    assert_eq!(read.into_iter().map(|(_, answers)| answers).collect::<Vec<_>>(), [["YES."], ["NO."]]);
    let texts = json!({"prompt": "q", "chosen": "yes", "rejected": "no"});
    let read = read_as(Plain { marks: false, forgets: false }, texts, true).unwrap();
    assert_eq!(read, [own("qyes", "yes"), own("qno", "no")]);
}

#[test]
fn what_is_no_pair_is_refused() {
    for (value, told) in [
        (json!({"prompt": "q", "chosen": "yes"}), "has no chosen and rejected answer to a prompt"),
        (json!({"prompt": "q", "completion": "yes"}), "; its keys are ["),
        (json!({"prompt": "q", "chosen": "yes", "rejected": ["no"]}), "all texts or all lists of messages"),
        (json!({"chosen": "yes", "rejected": "no"}), "all texts or all lists of messages"),
        (json!({"prompt": "q", "chosen": "yes", "rejected": "yes"}), "has the same chosen and rejected answer"),
        (json!({"prompt": "q", "chosen": "yes", "rejected": ""}), "has a chosen or rejected answer without a text"),
    ] {
        let Err(Wrong::Fields(refused)) = read_as(Plain { marks: false, forgets: false }, value.clone(), true) else {
            panic!("{value} is taken");
        };
        assert!(refused.contains(told), "{value}: {refused}");
    }
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

/// A template of a tokenizer's folder that writes nothing, as an empty one does.
#[derive(Debug)]
struct Silent;

impl Template for Silent {
    fn marks_answers(&self) -> bool {
        false
    }

    fn render(&self, _: &[Value], _: Option<&Value>, _: bool) -> Result<String, String> {
        Ok("\n".to_owned())
    }

    fn notices(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Such examples were empty texts, which are no documents, and nobody was told.
#[test]
fn a_template_that_writes_nothing_is_refused() {
    let wrong = Examples { template: Ok(Box::new(Silent)), pairs: false }.read(json!({"messages": chat()}));
    assert_eq!(wrong.unwrap_err(), Wrong::Template("writes no text of them".to_owned()));
}

#[test]
fn what_is_no_example_says_what_it_has() {
    let lacks = Lacks { problem: "it was lost".to_owned(), valid: "look for it".to_owned() };
    let without = || Examples { template: Err(lacks.clone()), pairs: false };
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
        let wrong = without().read(value.clone()).unwrap_err();
        let Wrong::Fields(problem) = &wrong else { panic!("{wrong:?}") };
        assert!(problem.starts_with(told), "{value}: {problem}");
    }
    let wrong = without().read(json!({"messages": chat()})).unwrap_err();
    assert_eq!(wrong, Wrong::NoTemplate(lacks));
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
