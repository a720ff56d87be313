//! A tokenizer of byte strings as a `tokenizer.json`, so that other programs have the tokens of an exported model.
//!
//! Such a file writes a byte as a character: printable ones as themselves, the others from U+0100 on, in GPT-2's order.

use super::prelude::*;
use serde_json::{Map, json};
use std::collections::BTreeMap;

/// The text of the token that ends a document.
pub(crate) const END: &str = "<|endoftext|>";

/// The character of each byte.
fn characters() -> [char; 256] {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    std::array::from_fn(|byte| match byte as u32 {
        byte if printable(byte) => char::from_u32(byte),
        _ => others.next().and_then(char::from_u32),
    })
    .map(Option::unwrap_or_default)
}

/// The `tokenizer.json` of these tokens, by id: the bytes first, then the results of merging pairs of earlier tokens.
/// With more than the bytes, text is cut into words as GPT-2 does. `end` is the id of [`END`].
pub(crate) fn byte_level(tokens: &[Vec<u8>], end: Option<u32>) -> String {
    let characters = characters();
    let text = |bytes: &[u8]| bytes.iter().map(|&byte| characters[usize::from(byte)]).collect::<String>();
    let mut vocab: Map<String, Value> = tokens.iter().zip(0..).map(|(token, id)| (text(token), json!(id))).collect();
    let end = end.filter(|&end| end as usize >= tokens.len());
    vocab.extend(end.map(|end| (END.to_owned(), json!(end))));
    let added = end.map(|id| {
        json!({"id": id, "content": END, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    let ranks: BTreeMap<&[u8], usize> = tokens.iter().zip(0..).map(|(token, rank)| (&**token, rank)).collect();
    let merges = tokens.iter().zip(0..).filter_map(|(token, rank)| match &*parts(token, rank, &ranks) {
        [one, other] => Some(json!([text(one), text(other)])),
        _ => None,
    });
    let level = |use_regex| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let value = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.into_iter().collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": level(tokens.len() > 256),
        "post_processor": null,
        "decoder": level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": merges.collect::<Vec<_>>(),
        },
    });
    format!("{value:#}\n")
}

/// The parts that a token is merged from by the tokens of lower ranks.
fn parts<'a>(token: &'a [u8], rank: usize, ranks: &BTreeMap<&[u8], usize>) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = (0..=token.len()).collect();
    loop {
        let pairs = ends.windows(3).enumerate();
        let known = pairs.filter_map(|(at, pair)| Some((*ranks.get(&token[pair[0]..pair[2]])?, at)));
        match known.filter(|(of, _)| *of < rank).min() {
            Some((_, at)) => ends.remove(at + 1),
            None => return ends.windows(2).map(|part| &token[part[0]..part[1]]).collect(),
        };
    }
}

/// The bytes as tokens, by id.
pub(crate) fn bytes() -> Vec<Vec<u8>> {
    (0..=255).map(|byte| vec![byte]).collect()
}

/// Whether a `tokenizer.json` is one of bytes that an export has written: every build reads it.
pub(super) fn is_of_bytes(path: &Path) -> bool {
    // It has about 7 KB; others have up to some MB.
    let small = path.metadata().is_ok_and(|file| file.len() < 1 << 14);
    let Some(text) = small.then(|| std::fs::read_to_string(path).ok()).flatten() else { return false };
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    let end = value["added_tokens"][0]["id"].as_u64().and_then(|id| u32::try_from(id).ok());
    text == byte_level(&bytes(), end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_of_bytes_is_known_again() {
        let path = std::env::temp_dir().join(format!("meshwork-bytes-{}.json", std::process::id()));
        for end in [None, Some(256), Some(300)] {
            std::fs::write(&path, byte_level(&bytes(), end)).unwrap();
            assert!(is_of_bytes(&path), "{end:?}");
        }
        std::fs::write(&path, byte_level(&bytes(), None).replace("\"!\": 33", "\"!\": 34")).unwrap();
        assert!(!is_of_bytes(&path));
        std::fs::remove_file(&path).unwrap();
    }

    /// The library reads the same tokens from the file as from the tokenizer that it was made of.
    #[test]
    #[cfg(feature = "tokenizers")]
    fn the_file_has_the_tokens_of_the_tokenizer() {
        use super::super::Tokenizer;
        let text = "Quousque tandem, Catilina? Ünïcödé 🦀  \n\n\tI'll don't 12345 \u{0}\u{7f}\u{ad}<|endoftext|>";
        for name in ["bytes", "gpt2"] {
            let tokenizer = Tokenizer::open(name).unwrap();
            let json = byte_level(&tokenizer.byte_level().unwrap(), tokenizer.end_of_text());
            let library: tokenizers::Tokenizer = json.parse().unwrap();
            let mut library = library;
            library.set_encode_special_tokens(true);
            let ids = library.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(ids, tokenizer.encode(text).unwrap(), "{name}");
            assert_eq!(library.decode(&ids, false).unwrap(), text, "{name}");
            library.set_encode_special_tokens(false);
            let last = library.encode(text, false).unwrap().get_ids().last().copied();
            assert_eq!(last == Some(50256), name == "gpt2");
        }
    }
}
