//! The tokenizers of other crates: GPT-2's from `tiktoken-rs`, and `tokenizer.json` files by Hugging Face's
//! `tokenizers`.

use std::sync::Arc;

use meshwork_core::hash::hash;
use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use super::library::{Library, Opened};

/// The tokenizer of GPT-2.
pub(super) fn gpt2() -> Opened {
    Ok(Arc::new(Gpt2(r50k_base_singleton())))
}

/// The tokenizer in a `tokenizer.json`.
pub(super) fn json(path: &str) -> Opened {
    let open = || {
        let bytes = std::fs::read(path)?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes)?;
        // Text that spells a special token is text: it must not end a document.
        tokenizer.set_encode_special_tokens(true);
        // A document is encoded as a whole, whatever the file says of models of few positions.
        tokenizer.with_truncation(None)?.with_padding(None);
        Ok(Json { tokenizer, fingerprint: hash(&bytes) })
    };
    match open() {
        Ok(tokenizer) => Ok(Arc::new(tokenizer)),
        Err(error) => {
            let error: tokenizers::Error = error;
            let valid = "use bytes, gpt2 or a file of the Hugging Face tokenizers library";
            Err((format!("is not a tokenizer.json: {error}"), valid))
        }
    }
}

struct Gpt2(&'static CoreBPE);

impl Library for Gpt2 {
    fn vocab_size(&self) -> usize {
        50257
    }

    fn end_of_text(&self) -> Option<u32> {
        Some(50256)
    }

    fn byte_level(&self) -> Option<Vec<Vec<u8>>> {
        (0..50256).map(|id| self.0.decode_bytes(&[id]).ok()).collect()
    }

    fn fingerprint(&self) -> u64 {
        hash(b"gpt2")
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(self.0.encode_ordinary(text))
    }

    fn encode_prompt(&self, text: &str, spelled: bool) -> Result<Vec<u32>, String> {
        if spelled { Ok(self.0.encode_with_special_tokens(text)) } else { self.encode(text) }
    }

    fn decode(&self, ids: &[u32]) -> String {
        let bytes = ids.iter().flat_map(|&id| self.0.decode_bytes(&[id]).unwrap_or_else(|_| vec![0xff]));
        String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
    }
}

impl std::fmt::Debug for Gpt2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gpt2")
    }
}

#[derive(Debug)]
struct Json {
    tokenizer: tokenizers::Tokenizer,
    fingerprint: u64,
}

/// The names of tokens that end a document, in the order in which they are looked for.
const END_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"];

impl Library for Json {
    fn vocab_size(&self) -> usize {
        // Ids may have gaps, so the largest counts, not their number.
        self.tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    fn end_of_text(&self) -> Option<u32> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let id = |name: &&str| added.iter().find(|(_, token)| token.content == **name).map(|(id, _)| *id);
        END_OF_TEXT.iter().find_map(id)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(self.tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?.get_ids().to_vec())
    }

    fn encode_prompt(&self, text: &str, spelled: bool) -> Result<Vec<u32>, String> {
        let mut tokenizer = self.tokenizer.clone();
        tokenizer.set_encode_special_tokens(!spelled);
        Ok(tokenizer.encode_fast(text, true).map_err(|error| error.to_string())?.get_ids().to_vec())
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, false).unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.to_string())
    }
}

#[cfg(test)]
mod tests {
    use crate::data::Tokenizer;

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
        assert_eq!((other.end_of_text(), other.vocab_size()), (Some(4), 10));
        assert!(!other.encode("arma </s> cano").unwrap().contains(&4));
        assert_ne!(other.fingerprint(), tokenizer.fingerprint());
        std::fs::write(&path, "{").unwrap();
        let fault = Tokenizer::open(path.to_str().unwrap()).unwrap_err().to_string();
        assert!(fault.contains("is not a tokenizer.json: EOF"), "{fault}");
        std::fs::remove_file(&path).unwrap();
    }
}
