use super::super::{Examples, Wrong};
use super::*;
use serde_json::json;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

fn fixtures() -> Value {
    serde_json::from_str(&fs::read_to_string(Path::new(FIXTURES).join("chat.json")).unwrap()).unwrap()
}

fn jinja(source: &str, tokens: &Value) -> Jinja {
    let tokens = serde_json::from_value(tokens.clone()).unwrap();
    Jinja::new(source, tokens, Some("2024-07-26".parse().unwrap())).unwrap()
}

/// Texts, tokens and the tokens that the assistant wrote are those of `transformers` (`make_chat_fixtures.py`).
#[test]
fn templates_write_what_transformers_writes() {
    let all = fixtures();
    let tokenizer = Tokenizer::open(&format!("{FIXTURES}/chat_tokenizer.json")).unwrap();
    for case in all["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let what = format!("{name}, {}", case["what"]);
        let template = jinja(all["templates"][name].as_str().unwrap(), &all["tokens"]);
        let (messages, tools) = (case["messages"].as_array().unwrap(), case.get("tools"));
        if let Some(error) = case.get("error") {
            let failed = template.render(messages, tools, false).unwrap_err();
            assert!(failed.contains(error.as_str().unwrap()), "{what}: {failed}");
            continue;
        }
        let without_marks = |begins: bool| template.render(messages, tools, begins).unwrap().replace(MARKS, "");
        assert_eq!(without_marks(false), case["text"], "{what}");
        assert_eq!(without_marks(true), case["begins"], "{what}");
        let Some(assistant) = case.get("assistant") else { continue };
        let examples = Examples { template: Ok(Box::new(template)), pairs: false };
        let piece = examples.read(json!({"messages": messages, "tools": tools})).unwrap().remove(0);
        let tokens = tokenizer.encode_piece(&piece).unwrap();
        assert_eq!(json!(tokens.ids), case["ids"], "{what}");
        let learnt: Vec<u8> = tokens.masked.iter().map(|&masked| u8::from(!masked)).collect();
        assert_eq!(json!(learnt), *assistant, "{what}");
    }
}

/// Without its marks, the answers of a template are found by prefixes: the same ones, and what it writes behind them.
#[test]
fn prefixes_find_the_answers_that_a_template_marks() {
    let all = fixtures();
    let source = all["templates"]["marked turns"].as_str().unwrap();
    let bare = source.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}");
    let mut compared = 0;
    for case in all["cases"].as_array().unwrap().iter().filter(|case| case["template"] == "marked turns") {
        let answers = |source: &str| {
            let examples = Examples { template: Ok(Box::new(jinja(source, &all["tokens"]))), pairs: false };
            let piece = examples.read(json!({"messages": case["messages"]})).unwrap().remove(0);
            let spans = piece.answers.unwrap().spans;
            spans.into_iter().map(|span| piece.text[span].to_owned()).collect::<Vec<_>>()
        };
        let marked = answers(source);
        let behind: Vec<String> = marked.iter().map(|answer| format!("{answer}\n")).collect();
        assert_eq!(answers(&bare), behind, "{}", case["what"]);
        compared += marked.len();
    }
    assert_eq!(compared, 7);
}

#[test]
fn a_template_that_leaves_thoughts_out_is_refused_without_marks() {
    let all = fixtures();
    let source = all["templates"]["thoughts"].as_str().unwrap();
    let bare = source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "");
    let examples = Examples { template: Ok(Box::new(jinja(&bare, &all["tokens"]))), pairs: false };
    let case = all["cases"].as_array().unwrap().iter().find(|case| case["what"] == "thoughts").unwrap();
    let wrong = examples.read(json!({"messages": case["messages"]})).unwrap_err();
    let Wrong::Template(problem) = wrong else { panic!("{wrong:?}") };
    assert!(problem.starts_with("writes the first 2 messages otherwise"), "{problem}");
}

#[test]
fn the_template_of_a_folder_is_its_file_or_that_of_its_settings() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let settings = |given: Option<&str>| Settings {
        tokenizer: dir.path().join("tokenizer.json").display().to_string(),
        chat_template: given.map(|name| dir.path().join(name).display().to_string()),
        ..crate::config::Config::from_toml("").unwrap().data
    };
    let written = |given| {
        let template = Jinja::open(&settings(given)).map_err(|fault| fault.to_string());
        template.map(|of| of.ok().map(|of| of.render(&[], None, false).unwrap()))
    };
    assert_eq!(written(None), Ok(None));
    write("tokenizer_config.json", r#"{"chat_template": "one {{ pad_token }}", "pad_token": {"content": "<pad>"}}"#);
    assert_eq!(written(None), Ok(Some("one <pad>".to_owned())));
    let named = r#"{"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "two"}]}"#;
    write("tokenizer_config.json", named);
    assert_eq!(written(None), Ok(Some("two".to_owned())));
    write("chat_template.jinja", "three");
    assert_eq!(written(None), Ok(Some("three".to_owned())));
    write("other.jinja", "four");
    assert_eq!(written(Some("other.jinja")), Ok(Some("four".to_owned())));
    write("other.jinja", "{% if %}");
    let fault = written(Some("other.jinja")).unwrap_err();
    assert!(fault.contains("other.jinja\": is no template: syntax error"), "{fault}");
}

/// Each place where a template was looked for is named, with what is there.
#[test]
fn a_folder_without_a_template_says_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let lacks = |tokenizer: &str| {
        let tokenizer = tokenizer.to_owned();
        let settings = Settings { tokenizer, ..crate::config::Config::from_toml("").unwrap().data };
        Jinja::open(&settings).unwrap().unwrap_err()
    };
    let name =
        "name a file with one in data.chat_template, or the folder of a tokenizer that has one in data.tokenizer";
    for built_in in ["bytes", "gpt2"] {
        let Lacks { problem, valid } = lacks(built_in);
        assert_eq!((&*problem, &*valid), ("the tokenizer is built in, and has none", name));
    }
    let file = format!("{} does not exist, and {}", at(FILE).display(), at(CONFIG).display());
    let copy = "copy one of them into a file, and name that in data.chat_template";
    for (config, told, wanted) in [
        (None, "does not exist either", name),
        (Some("{}"), "has none", name),
        (Some(r#"{"chat_template": null}"#), "has none", name),
        (Some(r#"{"chat_template": " \n"}"#), "has an empty one", name),
        (Some(r#"{"chat_template": 4}"#), "has one that is no text", name),
        (
            Some(r#"{"chat_template": [{"name": "default", "template": ""}]}"#),
            "has no text in the one called default",
            name,
        ),
        (
            Some(r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}]}"#),
            "has [rag, tool_use], and none that is called default",
            copy,
        ),
    ] {
        config.iter().for_each(|text| fs::write(at(CONFIG), text).unwrap());
        let Lacks { problem, valid } = lacks(&at("tokenizer.json").display().to_string());
        assert_eq!((problem, &*valid), (format!("{file} {told}"), wanted));
    }
    // The file counts if there are both.
    fs::write(at(CONFIG), r#"{"chat_template": "one"}"#).unwrap();
    fs::write(at(FILE), "\n").unwrap();
    let Lacks { problem, valid } = lacks(&at("tokenizer.json").display().to_string());
    assert_eq!((problem, &*valid), (format!("{} is empty", at(FILE).display()), name));
}

#[test]
fn a_template_that_is_named_and_is_none_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::write(at("empty.jinja"), " \n").unwrap();
    for (given, told) in [
        (String::new(), "names no file"),
        (at(""), "is a folder"),
        (at("missing.jinja"), "does not exist"),
        (at("empty.jinja"), "is an empty file"),
    ] {
        let template = Some(given.clone());
        let settings = Settings { chat_template: template, ..crate::config::Config::from_toml("").unwrap().data };
        let refused = Jinja::open(&settings).unwrap_err().to_string();
        let valid = "name a file with a chat template of Hugging Face (docs/finetune.md), or leave the key out for the template \
                     of the tokenizer's folder";
        assert_eq!(refused, format!("data.chat_template = {given:?}: {told}; {valid}"));
    }
}

#[test]
fn a_template_that_tells_todays_day_says_so() {
    let unset = Jinja::new("{{ strftime_now('%Y') }}", BTreeMap::new(), None).unwrap();
    assert!(unset.notices().is_empty(), "it has told nothing yet");
    let year = unset.render(&[], None, false).unwrap();
    assert!(year.parse::<u32>().unwrap() > 2024, "{year}");
    assert!(unset.notices()[0].contains(&format!("set data.date = \"{year}-")), "{:?}", unset.notices());
    let fixed =
        Jinja::new("{{ strftime_now('%d %B') }}", BTreeMap::new(), Some("2026-01-31".parse().unwrap())).unwrap();
    assert_eq!((fixed.render(&[], None, false).unwrap().as_str(), fixed.notices().len()), ("31 January", 0));
    assert!(day("31.1.2026").unwrap_err().to_string().contains("use one such as 2026-01-31"));
}
