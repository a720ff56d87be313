//! Tokenizers of every kind: published ids, and cuts that change no token.

use crate::config::TextFormat;
use crate::data::Tokenizer;
use crate::data::piece::DocumentPiece;
use crate::data::reading::{Pieces, Reading};
use crate::data::text::Texts;
use meshwork_testkit::Sampled;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn text_survives_the_round_trip() {
    let tokenizer = Tokenizer::open("gpt2").unwrap();
    let text = "Quousque tandem, Catilina? Ünïcödé 🦀";
    let ids = tokenizer.encode(text).unwrap();
    assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
    assert_eq!(tokenizer.decode(&ids), text);
}

#[test]
fn gpt2_gives_the_published_ids() {
    // "Hello world" of OpenAI's encoder.
    assert_eq!(Tokenizer::open("gpt2").unwrap().encode("Hello world").unwrap(), [15496, 995]);
}

#[test]
fn what_is_no_text_is_shown_all_the_same() {
    assert_eq!(Tokenizer::open("gpt2").unwrap().decode(&[15496, 60000]), "Hello\u{fffd}");
}

#[test]
fn a_tokenizer_json_is_read() {
    let path = std::env::temp_dir().join(format!("meshwork-tokenizer-{}.json", std::process::id()));
    let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
        "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"[UNK]":0,"arma":1,"virumque":2,"cano":9},"unk_token":"[UNK]"}}"#;
    std::fs::write(&path, json).unwrap();
    let tokenizer = Tokenizer::open(path.to_str().unwrap()).unwrap();
    assert_eq!(tokenizer.encode("arma virumque cano Troiae").unwrap(), [1, 2, 9, 0]);
    assert_eq!(tokenizer.vocab_size(), 10);
    assert_eq!(tokenizer.decode(&[1, 9]), "arma cano");
    assert_eq!(tokenizer.end_of_text(), None);
    // Text that spells a special token does not become that token.
    let special = r#""added_tokens":[{"id":4,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,
        "normalized":false,"special":true}]"#;
    std::fs::write(&path, json.replace(r#""added_tokens":[]"#, special)).unwrap();
    let other = Tokenizer::open(path.to_str().unwrap()).unwrap();
    assert_eq!((other.end_of_text(), other.vocab_size(), other.vocab_size_of_text()), (Some(4), 10, 10));
    assert!(!other.encode("arma </s> cano").unwrap().contains(&4));
    assert_ne!(other.fingerprint(), tokenizer.fingerprint());
    std::fs::write(&path, "{").unwrap();
    let fault = Tokenizer::open(path.to_str().unwrap()).unwrap_err().to_string();
    assert!(fault.contains("is not a tokenizer.json: EOF"), "{fault}");
    std::fs::remove_file(&path).unwrap();
}

/// Byte-pair encoding with the merges that make these tokens, letter by letter, and a token for each of `letters`.
fn bpe(letters: impl IntoIterator<Item = char>, tokens: &[&str], more: Value) -> Value {
    let (mut vocab, mut merges) = (BTreeMap::new(), Vec::new());
    let mut add = |token: String| {
        let id = vocab.len();
        *vocab.entry(token).or_insert(id)
    };
    add("<unk>".to_owned());
    (0..=255u8).for_each(|byte| _ = add(format!("<0x{byte:02X}>")));
    letters.into_iter().for_each(|letter| _ = add(letter.to_string()));
    for token in tokens {
        let mut made = String::new();
        for letter in token.chars() {
            add(letter.to_string());
            let longer = format!("{made}{letter}");
            if !made.is_empty() {
                let merge = json!([made, letter.to_string()]);
                merges.extend((!merges.contains(&merge)).then_some(merge));
            }
            add(longer.clone());
            made = longer;
        }
    }
    let mut model = json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab, "merges": merges});
    more.as_object().unwrap().iter().for_each(|(key, value)| model[key] = value.clone());
    model
}

fn tokenizer_json(normalizer: Value, pre_tokenizer: Value, post_processor: Value, model: Value) -> Value {
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": null, "model": model})
}

/// Words of the texts, with what stands for a space before them.
fn words(space: &str) -> Vec<String> {
    let words =
        ["arma", "virum", "que", "cano", "123", "don", "'t", "xx", "xxxx", "ab", "abab", "ababa", ",", "中文", "文中"];
    words
        .iter()
        .flat_map(|word| [(*word).to_owned(), format!("{space}{word}")])
        .chain([space.repeat(2), space.repeat(4)])
        .collect()
}

/// The letters by which bytes are written in byte-level vocabularies.
fn byte_letters() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let shifted = (0..256).filter(|byte| !printable(*byte)).zip(256..).map(|(_, letter)| letter);
    (0..256).filter(|byte| printable(*byte)).chain(shifted).filter_map(char::from_u32).collect()
}

/// Tokenizers by kind, and whether a text of words is cut by them.
fn kinds() -> Vec<(&'static str, bool, Value)> {
    let none = Value::Null;
    let byte_words = words("\u{120}");
    let byte_words: Vec<&str> =
        byte_words.iter().filter(|word| !word.contains('中') && !word.contains('文')).map(|word| &**word).collect();
    let bytes = || bpe(byte_letters(), &byte_words, json!({"byte_fallback": false, "fuse_unk": false}));
    let byte_level = |prefix: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex});
    let space_words = words("\u{2581}");
    let space_words: Vec<&str> = space_words.iter().map(|word| &**word).collect();
    let pieces = || bpe(('a'..='z').chain(['\u{2581}', '.']), &space_words, json!({}));
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": split});
    let spaces = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]});
    let unigram = {
        let letters = ('a'..='z').chain("\u{2581}.,123'中文".chars()).map(|letter| json!([letter, -9.5]));
        let words = space_words.iter().enumerate().map(|(at, word)| json!([word, -3.0 - at as f64 / 7.0]));
        let vocab: Vec<Value> = [json!(["<unk>", 0.0])].into_iter().chain(letters).chain(words).collect();
        json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false})
    };
    let one_space = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "});
    let word_piece = {
        let letters = ('a'..='z')
            .chain("0123456789.,'中文".chars())
            .flat_map(|letter| [letter.to_string(), format!("##{letter}")]);
        let all = ["[UNK]".to_owned()].into_iter().chain(letters).chain(words("##"));
        let (mut vocab, mut next) = (BTreeMap::new(), 0..);
        all.for_each(|word| _ = vocab.entry(word).or_insert_with(|| next.next().unwrap()));
        json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab})
    };
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    let llama3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let then_bytes = |first: Value| json!({"type": "Sequence", "pretokenizers": [first, byte_level(false, false)]});
    let crossing = bpe(
        ('a'..='z').chain([' ', '\n', '.']),
        &["arma virum", "o a", "que\n", "\narma", "ab", "xx"],
        json!({"byte_fallback": true}),
    );
    let mut added = tokenizer_json(none.clone(), byte_level(false, true), none.clone(), bytes());
    added["added_tokens"] = json!([{"id": 9000, "content": "cano arma", "single_word": false, "lstrip": true, "rstrip": true,
        "normalized": false, "special": false}]);
    let plain = |normalizer, pre_tokenizer, model| tokenizer_json(normalizer, pre_tokenizer, none.clone(), model);
    let split_by = |pre_tokenizer, model| plain(none.clone(), pre_tokenizer, model);
    let with_space = tokenizer_json(none.clone(), byte_level(true, true), byte_level(true, true), bytes());
    vec![
        ("byte-level BPE, as GPT-2", true, split_by(byte_level(false, true), bytes())),
        ("with a space before the text", true, with_space),
        ("a pattern, as Llama 3", true, split_by(then_bytes(split(llama3)), bytes())),
        ("spaces by a normalizer, as Llama 2", true, plain(spaces, none.clone(), pieces())),
        ("spaces in one word, as newer Llama 2", true, split_by(metaspace("first", false), pieces())),
        ("Metaspace always", true, split_by(metaspace("always", true), pieces())),
        ("Metaspace first", true, split_by(metaspace("first", true), pieces())),
        ("Metaspace never", true, split_by(metaspace("never", true), pieces())),
        ("Unigram, as T5", true, plain(one_space, metaspace("always", true), unigram)),
        ("WordPiece, as BERT", true, plain(bert, json!({"type": "BertPreTokenizer"}), word_piece)),
        ("an added token with its spaces", true, added),
        ("tokens across spaces and lines", true, split_by(none.clone(), crossing)),
        ("words of five letters", false, split_by(then_bytes(split("(?s).{1,5}")), bytes())),
    ]
}

/// Texts that are hard to cut: long runs without spaces, of spaces, of digits; scripts without spaces; line ends of
/// every kind.
fn texts() -> Vec<String> {
    let plain = "arma virumque cano, don't xxxx 123 ababa. cano arma virum\n".repeat(40);
    let lines = "arma\nvirum\n\ncano\r\nque\r\n\r\n  xx\n\t\tab \n \n12345678\nabab\u{a0}xx\u{2003}que\n".repeat(30);
    let runs = ["x", " ", "\n", "7", "中文", "ab", " \n", "\u{1f980}", "e\u{301}", "..,", "'t", "\t"];
    let runs = |length: usize| {
        runs.iter()
            .map(|run| format!("cano {} arma{}virum", run.repeat(length), run.repeat(length)))
            .collect::<String>()
    };
    let no_spaces = "中文文中,中文。\n文中文中".repeat(100);
    vec![
        plain,
        lines,
        runs(3),
        runs(40),
        runs(200),
        no_spaces,
        "x".repeat(3000),
        " ".repeat(3000),
        "ab".repeat(900) + " " + &"12".repeat(900),
    ]
}

#[test]
fn no_cut_of_a_text_changes_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("tokenizer.json"), folder.path().join("text"));
    for (kind, cuts, json) in kinds() {
        fs::write(&path, json.to_string()).unwrap();
        let tokenizer = Tokenizer::open(path.to_str().unwrap()).unwrap_or_else(|fault| panic!("{kind}: {fault}"));
        no_cut_changes_a_token(kind, cuts, &tokenizer, &file);
    }
    no_cut_changes_a_token("gpt2", true, &Tokenizer::open("gpt2").unwrap(), &file);
    no_cut_changes_a_token("bytes", true, &Tokenizer::BYTES, &file);
}

fn no_cut_changes_a_token(kind: &str, cuts: bool, tokenizer: &Tokenizer, file: &Path) {
    for (at, text) in texts().iter().enumerate() {
        fs::write(file, text).unwrap();
        let whole = tokenizer.encode(text).unwrap();
        // The first text in each of these ways, the others in one, and in all of them in a sweep.
        let ways = [(150, 32), (211, 64), (1000, 128)];
        for (bytes, margin) in ways.into_iter().sampled_in_turn(if at == 0 { 1 } else { 3 }, at + kind.len()) {
            let pieces = Pieces { bytes, margin };
            let reading =
                Reading { format: TextFormat::Text, text_key: "text", skip_bad_lines: false, examples: None, pieces };
            let (mut ids, mut count) = (Vec::new(), 0);
            let see = |piece: DocumentPiece| {
                count += 1;
                ids.extend(tokenizer.encode_piece(&piece).unwrap().ids);
                Ok(())
            };
            Texts::find(file).unwrap().read(&reading, tokenizer, see).unwrap();
            let differs = ids.iter().zip(&whole).position(|(piece, whole)| piece != whole);
            assert!(
                ids == whole,
                "{kind}, text {at}, pieces of {bytes}: token {differs:?} differs, {} of {}",
                ids.len(),
                whole.len()
            );
            if at == 0 {
                assert_eq!(count > 1, cuts, "{kind} makes {count} pieces of {bytes}");
            }
        }
    }
}

#[test]
fn a_tokenizer_that_is_a_pointer_or_has_damaged_files_beside_it_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let open = || Tokenizer::open(folder.path().to_str().unwrap()).unwrap_err().to_string();
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n").unwrap();
    assert!(
        open().ends_with("tokenizer.json is a Git LFS pointer, not the file; fetch the file: git lfs pull"),
        "{}",
        open()
    );
    fs::write(&path, kinds()[0].2.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    assert!(open().contains("tokenizer_config.json is no JSON object"), "{}", open());
}

#[test]
fn only_a_tokenizer_that_puts_the_beginning_there_by_itself_begins_documents() {
    let folder = tempfile::tempdir().unwrap();
    let mut json = kinds()[0].2.clone();
    let id = json["model"]["vocab"].as_object().unwrap().len();
    json["added_tokens"] = json!([{"id": id, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true}]);
    fs::write(folder.path().join("tokenizer_config.json"), json!({"bos_token": "<s>"}).to_string()).unwrap();
    let open = |json: &Value| {
        fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::open(folder.path().to_str().unwrap()).unwrap()
    };
    let without = open(&json);
    assert_eq!(
        (without.special().beginning.as_ref().map(|of| of.id as usize), without.beginning_of_text()),
        (Some(id), None)
    );
    assert_eq!((without.vocab_size(), without.vocab_size_of_text()), (id + 1, id));
    let token = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    json["post_processor"] = json!({"type": "TemplateProcessing", "single": [token("<s>"), {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}}});
    assert_eq!(open(&json).beginning_of_text(), Some(id as u32));
}
