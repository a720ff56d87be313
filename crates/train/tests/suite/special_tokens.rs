//! The special tokens of a tokenizer, as the files of a folder say.

use meshwork_train::data::SpecialTokens;
use serde_json::{Value, json};
use std::fs;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const CONFIG: &str = "config.json";

/// A folder of these files, of which a `tokenizer.json` has the added tokens `<s>` = 1, `</s>` = 2, `<|eot|>` = 3,
/// and the word `<w>` = 9.
fn read(files: &[(&str, Value)]) -> SpecialTokens {
    let folder = tempfile::tempdir().unwrap();
    let added = [("<s>", 1), ("</s>", 2), ("<|eot|>", 3)].map(|(content, id)| json!({"id": id, "content": content}));
    let tokenizer = json!({"added_tokens": added, "model": {"vocab": {"<w>": 9}}});
    fs::write(folder.path().join(TOKENIZER), tokenizer.to_string()).unwrap();
    files.iter().for_each(|(name, value)| fs::write(folder.path().join(name), value.to_string()).unwrap());
    SpecialTokens::of_folder(folder.path()).unwrap()
}

fn end(files: &[(&str, Value)]) -> Option<(u32, &'static str)> {
    read(files).end.map(|end| (end.id, end.file))
}

#[test]
fn files_are_asked_in_the_order_of_transformers() {
    let config = (TOKENIZER_CONFIG, json!({"eos_token": "<|eot|>"}));
    let decoder =
        (TOKENIZER_CONFIG, json!({"eos_token": "<|eot|>", "added_tokens_decoder": {"3": {"content": "<|eot|>"}}}));
    let map = (SPECIAL_TOKENS_MAP, json!({"eos_token": {"content": "<w>", "lstrip": false}}));
    let generation = (GENERATION_CONFIG, json!({"eos_token_id": [5, 6]}));
    let model = (CONFIG, json!({"eos_token_id": 7}));
    assert_eq!(end(std::slice::from_ref(&config)), Some((3, TOKENIZER_CONFIG)));
    assert_eq!(end(&[config.clone(), map.clone()]), Some((9, SPECIAL_TOKENS_MAP)));
    assert_eq!(end(&[decoder, map, generation.clone()]), Some((3, TOKENIZER_CONFIG)));
    assert_eq!(end(&[generation.clone(), model.clone()]), Some((5, GENERATION_CONFIG)));
    assert_eq!(end(std::slice::from_ref(&model)), Some((7, CONFIG)));
    // Null says that there is no such token; what the model was trained with still ends a text.
    assert_eq!(end(&[(TOKENIZER_CONFIG, json!({"eos_token": null})), model.clone()]), Some((7, CONFIG)));
    // The class of the tokenizer, and of a folder that names none, the model's.
    assert_eq!(
        end(&[(TOKENIZER_CONFIG, json!({"tokenizer_class": "LlamaTokenizerFast"}))]),
        Some((2, TOKENIZER_CONFIG))
    );
    assert_eq!(end(&[(CONFIG, json!({"model_type": "mixtral", "eos_token_id": 7}))]), Some((2, CONFIG)));
    assert_eq!(end(&[(TOKENIZER_CONFIG, json!({"tokenizer_class": "PreTrainedTokenizerFast"}))]), None);
    let begins = read(&[(TOKENIZER_CONFIG, json!({"bos_token": {"content": "<s>"}}))]).beginning.unwrap();
    assert_eq!((begins.id, begins.text.as_deref()), (1, Some("<s>")));
    assert_eq!(
        read(&[(TOKENIZER_CONFIG, json!({"bos_token": null})), (CONFIG, json!({"model_type": "llama"}))]).beginning,
        None
    );
}

#[test]
fn generation_stops_at_every_end_that_a_file_says() {
    let files =
        [(TOKENIZER_CONFIG, json!({"eos_token": "</s>"})), (GENERATION_CONFIG, json!({"eos_token_id": [3, 2]}))];
    let special = read(&files);
    assert_eq!((&special.stops[..], special.notices.len()), (&[3, 2][..], 0));
    let special = read(&[files[0].clone(), (CONFIG, json!({"eos_token_id": 3}))]);
    assert_eq!(special.stops, [3, 2]);
    assert!(special.notices[0].contains("says that </s> (2) ends a text, eos_token_id says [3]"), "{special:?}");
}

#[test]
fn what_is_guessed_or_cannot_be_found_is_said() {
    let alone = read(&[]);
    assert_eq!(alone.end.unwrap().id, 2);
    assert!(alone.notices[0].contains("</s> is taken, by its name"), "{:?}", alone.notices);
    let unknown = read(&[(TOKENIZER_CONFIG, json!({"eos_token": "<unknown>"}))]);
    assert_eq!(unknown.end, None);
    assert!(unknown.notices[0].contains("\"<unknown>\", which tokenizer.json does not have"), "{:?}", unknown.notices);
    // A small model with the settings of a large one.
    let small = read(&[(CONFIG, json!({"eos_token_id": 50256, "vocab_size": 10}))]);
    assert_eq!((small.end, &small.stops[..], small.notices.len()), (None, &[][..], 1));
    // Older folders list their added tokens beside.
    let files = [(TOKENIZER_CONFIG, json!({"eos_token": "<new>"})), ("added_tokens.json", json!({"<new>": 11}))];
    assert_eq!(end(&files), Some((11, TOKENIZER_CONFIG)));
}

#[test]
fn a_file_that_is_no_json_is_named() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(SpecialTokens::of_folder(folder.path()).unwrap(), SpecialTokens::default());
    for (text, told) in [
        ("{", "generation_config.json: is no JSON object: EOF"),
        ("[]", "generation_config.json: is no JSON object: invalid type"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer"),
    ] {
        fs::write(folder.path().join(GENERATION_CONFIG), text).unwrap();
        let error = SpecialTokens::of_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}
