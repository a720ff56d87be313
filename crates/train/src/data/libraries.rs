//! The tokenizers of other crates: GPT-2's from `tiktoken-rs`, and `tokenizer.json` files by Hugging Face's
//! `tokenizers`.

use std::sync::Arc;

use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use super::library::{Library, Opened};

/// The tokenizer of GPT-2.
pub(super) fn gpt2() -> Opened {
    Ok(Arc::new(Gpt2(r50k_base_singleton())))
}

/// The tokenizer in a `tokenizer.json`.
pub(super) fn json(path: &str) -> Opened {
    match tokenizers::Tokenizer::from_file(path) {
        Ok(tokenizer) => Ok(Arc::new(Json(tokenizer))),
        Err(error) => Err((
            format!("is not a tokenizer.json: {error}"),
            "use bytes, gpt2 or a file of the Hugging Face tokenizers library",
        )),
    }
}

struct Gpt2(&'static CoreBPE);

impl Library for Gpt2 {
    fn vocab_size(&self) -> usize {
        50257
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(self.0.encode_ordinary(text))
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
struct Json(tokenizers::Tokenizer);

impl Library for Json {
    fn vocab_size(&self) -> usize {
        // Ids may have gaps, so the largest counts, not their number.
        self.0.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(self.0.encode_fast(text, false).map_err(|error| error.to_string())?.get_ids().to_vec())
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.0.decode(ids, false).unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.to_string())
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
        std::fs::write(&path, "{").unwrap();
        let fault = Tokenizer::open(path.to_str().unwrap()).unwrap_err().to_string();
        assert!(fault.contains("is not a tokenizer.json: EOF"), "{fault}");
        std::fs::remove_file(&path).unwrap();
    }
}
