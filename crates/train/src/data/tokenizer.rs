//! Text to token ids and back.

use std::path::Path;

use tiktoken_rs::{CoreBPE, r50k_base_singleton};

use crate::config::Fault;

/// How text becomes tokens: `data.tokenizer`.
#[derive(Clone)]
pub struct Tokenizer(Kind);

#[derive(Clone)]
enum Kind {
    Bytes,
    Gpt2(&'static CoreBPE),
    Json(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// One token per byte, ids 0 to 255.
    pub const BYTES: Self = Self(Kind::Bytes);

    /// The tokenizer called `name`: `bytes`, `gpt2`, or the path of a `tokenizer.json`.
    ///
    /// # Errors
    /// When it is a path and no tokenizer can be read from it.
    pub fn open(name: &str) -> Result<Self, Fault> {
        let fault = |problem: String, valid: &str| Fault::new("data.tokenizer", format!("{name:?}"), problem, valid);
        match name {
            "bytes" => Ok(Self::BYTES),
            "gpt2" => Ok(Self(Kind::Gpt2(r50k_base_singleton()))),
            path if !Path::new(path).is_file() => Err(fault(
                "is neither a known tokenizer nor a file".to_string(),
                "use bytes, gpt2 or the path of a tokenizer.json",
            )),
            path => match tokenizers::Tokenizer::from_file(path) {
                Ok(tokenizer) => Ok(Self(Kind::Json(Box::new(tokenizer)))),
                Err(error) => Err(fault(
                    format!("is not a tokenizer.json: {error}"),
                    "use bytes, gpt2 or a file of the Hugging Face tokenizers library",
                )),
            },
        }
    }

    /// One more than the largest id that it gives.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Bytes => 256,
            Kind::Gpt2(_) => 50257,
            // Ids may have gaps, so the largest counts, not their number.
            Kind::Json(json) => json.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1),
        }
    }

    /// The ids of `text`. No special tokens are added or recognised.
    ///
    /// # Errors
    /// When a `tokenizer.json` cannot encode it, in the words of its library.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(match &self.0 {
            Kind::Bytes => text.bytes().map(u32::from).collect(),
            Kind::Gpt2(bpe) => bpe.encode_ordinary(text),
            Kind::Json(json) => json.encode_fast(text, false).map_err(|error| error.to_string())?.get_ids().to_vec(),
        })
    }

    /// The text of `ids`, for showing: what is no text, or no id, comes out as the replacement character.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.0 {
            Kind::Bytes => {
                // A byte that is in no UTF-8 text stands for ids that are no bytes.
                let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::Gpt2(bpe) => {
                let bytes = ids.iter().flat_map(|&id| bpe.decode_bytes(&[id]).unwrap_or_else(|_| vec![0xff]));
                String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
            }
            Kind::Json(json) => json.decode(ids, false).unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.to_string()),
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &self.0 {
            Kind::Bytes => "bytes",
            Kind::Gpt2(_) => "gpt2",
            Kind::Json(_) => "tokenizer.json",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_the_round_trip() {
        for name in ["bytes", "gpt2"] {
            let tokenizer = Tokenizer::open(name).unwrap();
            let text = "Quousque tandem, Catilina? Ünïcödé 🦀";
            let ids = tokenizer.encode(text).unwrap();
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
            assert_eq!(tokenizer.decode(&ids), text, "{name}");
        }
    }

    #[test]
    fn gpt2_gives_the_published_ids() {
        // "Hello world" of OpenAI's encoder.
        assert_eq!(Tokenizer::open("gpt2").unwrap().encode("Hello world").unwrap(), [15496, 995]);
    }

    #[test]
    fn what_is_no_text_is_shown_all_the_same() {
        assert_eq!(Tokenizer::BYTES.decode(&[72, 105, 0xc3, 33, 5000]), "Hi\u{fffd}!\u{fffd}");
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
