//! The tokenizers of other crates: GPT-2's from `tiktoken-rs`, and `tokenizer.json` files by Hugging Face's
//! `tokenizers`.

use super::format;
use super::library::{Library, Opened};
use super::prelude::*;
use super::special_tokens::SpecialToken;
use meshwork_core::hash::hash;
use std::collections::HashSet;
use std::sync::{LazyLock, OnceLock};
use tiktoken_rs::{CoreBPE, r50k_base_singleton};

pub(super) fn gpt2() -> Opened {
    Ok(Arc::new(Gpt2(r50k_base_singleton())))
}

/// The tokenizer in a `tokenizer.json`, with the special tokens that the files beside it say.
pub(super) fn json(path: &Path) -> Opened {
    let valid = "use bytes, gpt2 or a file of the Hugging Face tokenizers library";
    let bytes = std::fs::read(path).map_err(|error| (format!("cannot be read: {error}"), valid))?;
    if let Some(foreign) = format::foreign(&bytes) {
        return Err((format!("{} is {}", path.display(), foreign.name), foreign.advice));
    }
    let open = || {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes)?;
        // Text that spells a special token is text: it must not end a document.
        tokenizer.set_encode_special_tokens(true);
        // A document is encoded as a whole, whatever the file says of models of few positions.
        tokenizer.with_truncation(None)?.with_padding(None);
        let neighbours = Neighbours::read(&serde_json::from_slice(&bytes)?, &tokenizer);
        Ok((tokenizer, neighbours))
    };
    let (tokenizer, neighbours) =
        open().map_err(|error: tokenizers::Error| (format!("is not a tokenizer.json: {error}"), valid))?;
    let special = SpecialTokens::of_tokenizer(path).map_err(|DataError { path, problem }| {
        let valid = "use the files that were written with the tokenizer, or remove them";
        (format!("has a file beside it that cannot be used: {} {problem}", path.display()), valid)
    })?;
    let beginning = beginning(&tokenizer, &special);
    Ok(Arc::new(Json {
        tokenizer,
        spelled: OnceLock::new(),
        special,
        beginning,
        neighbours,
        fingerprint: hash(&bytes),
    }))
}

/// The beginning of a text, if the tokenizer itself puts it before one.
fn beginning(tokenizer: &tokenizers::Tokenizer, special: &SpecialTokens) -> Option<u32> {
    let id = special.beginning.as_ref()?.id;
    let [with, without] = [true, false].map(|special| tokenizer.encode_fast("a", special));
    let (with, without) = (with.ok()?, without.ok()?);
    (with.get_ids().first() == Some(&id) && without.get_ids().first() != Some(&id)).then_some(id)
}

struct Gpt2(&'static CoreBPE);

static GPT2: LazyLock<SpecialTokens> = LazyLock::new(|| {
    let end = SpecialToken { id: 50256, text: Some("<|endoftext|>".to_owned()), file: "gpt2" };
    SpecialTokens { stops: vec![end.id], end: Some(end), ..SpecialTokens::default() }
});

impl Library for Gpt2 {
    fn vocab_size(&self) -> usize {
        50257
    }

    fn special(&self) -> &SpecialTokens {
        &GPT2
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

    fn encode_spelled(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, String> {
        let mut at = 0;
        let place = |id: u32| {
            let bytes = self.0.decode_bytes(&[id]).map_err(|error| error.to_string())?.len();
            at += bytes;
            Ok((id, at - bytes..at))
        };
        self.0.encode_with_special_tokens(text).into_iter().map(place).collect()
    }

    fn decode(&self, ids: &[u32]) -> String {
        let bytes = ids.iter().flat_map(|&id| self.0.decode_bytes(&[id]).unwrap_or_else(|_| vec![0xff]));
        String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
    }

    /// Its pattern makes words of letters with one space before them, and of a line break that stands alone.
    fn cut(&self, window: &str, at: usize) -> Option<[usize; 2]> {
        let (before, behind) = window.split_at_checked(at)?;
        let letter = |char: Option<char>| char.is_some_and(|char| char.is_ascii_alphabetic());
        let at_space = letter(before.chars().next_back()) && behind.starts_with(' ') && letter(behind.chars().nth(1));
        let word = |char: Option<char>| char.is_some_and(|char| !char.is_whitespace());
        let behind_line = before.ends_with('\n') && word(before.chars().nth_back(1)) && word(behind.chars().next());
        (at_space || behind_line).then(|| [before, behind].map(|part| self.0.encode_ordinary(part).len()))
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
    /// The same that takes special tokens where a text spells them, once examples ask for it.
    spelled: OnceLock<tokenizers::Tokenizer>,
    special: SpecialTokens,
    beginning: Option<u32>,
    neighbours: Option<Neighbours>,
    fingerprint: u64,
}

/// A boundary counts as one of words only if it is there wherever the text before it begins: at each of its first
/// characters, as many as this. Words that are counted off, as those of a fixed length, have none.
const BEGINNINGS: usize = 8;

impl Json {
    /// The number of tokens of `window` before the boundary at or behind byte `at`, and their number, if it is one that
    /// tokens never cross.
    fn boundary(&self, window: &str, at: usize) -> Option<[usize; 2]> {
        let encoding = self.tokenizer.encode(window, false).ok()?;
        let (offsets, words) = (encoding.get_offsets(), encoding.get_word_ids());
        let before = offsets.iter().take_while(|(_, end)| *end <= at).count();
        let whole = offsets[before..].iter().all(|(start, _)| *start >= at);
        if before == 0 || before == offsets.len() || !whole {
            return None;
        }
        // Words are encoded each by itself.
        let between_words = words[before - 1] != words[before];
        let apart = || self.neighbours.as_ref().is_some_and(|neighbours| neighbours.never(window, at));
        (between_words || apart()).then(|| [before, offsets.len() - before])
    }
}

impl Library for Json {
    fn vocab_size(&self) -> usize {
        // Ids may have gaps, so the largest counts, not their number.
        self.tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    fn vocab_size_of_text(&self) -> usize {
        let model = self.tokenizer.get_vocab(false).into_values();
        let added = self.tokenizer.get_added_tokens_decoder().into_iter().filter(|(_, token)| !token.special);
        model.chain(added.map(|(id, _)| id)).max().map_or(0, |id| id as usize + 1)
    }

    fn special(&self) -> &SpecialTokens {
        &self.special
    }

    fn beginning_of_text(&self) -> Option<u32> {
        self.beginning
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

    fn encode_spelled(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, String> {
        let spelled = self.spelled.get_or_init(|| {
            let mut tokenizer = self.tokenizer.clone();
            tokenizer.set_encode_special_tokens(false);
            tokenizer
        });
        let encoding = spelled.encode(text, false).map_err(|error| error.to_string())?;
        let bytes = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(bytes).collect())
    }

    fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, false).unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.to_string())
    }

    fn cut(&self, window: &str, at: usize) -> Option<[usize; 2]> {
        let whole = self.boundary(window, at)?;
        let mut beginnings = window.char_indices().map(|(start, _)| start).take(BEGINNINGS).skip(1);
        let everywhere = beginnings.all(|start| {
            let found = at.checked_sub(start).and_then(|at| self.boundary(&window[start..], at));
            found.is_some_and(|[_, behind]| behind == whole[1])
        });
        everywhere.then_some(whole)
    }
}

/// The characters that follow each other in a token of a vocabulary. Byte-pair encoding without words, as Llama 2 has
/// it, encodes a text as a whole; but between two characters that no token has side by side it never merges, so that
/// both sides are encoded by themselves.
#[derive(Debug)]
struct Neighbours {
    pairs: HashSet<[char; 2]>,
}

/// The stand-in for a space in such a vocabulary.
const SPACE: char = '\u{2581}';

impl Neighbours {
    /// For byte-pair encoding that changes nothing but spaces before it encodes; `None` for any other tokenizer.
    fn read(json: &Value, tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        fn only_spaces(part: &Value) -> bool {
            match part["type"].as_str() {
                None => part.is_null(),
                Some("Prepend") => part["prepend"] == "\u{2581}",
                Some("Replace") => part["pattern"]["String"] == " " && part["content"] == "\u{2581}",
                Some("Metaspace") => part["replacement"] == "\u{2581}",
                Some("Sequence") => part["normalizers"].as_array().is_some_and(|parts| parts.iter().all(only_spaces)),
                Some(_) => false,
            }
        }
        let model = &json["model"];
        let affixes =
            ["continuing_subword_prefix", "end_of_word_suffix"].map(|affix| model[affix].as_str().unwrap_or(""));
        // Older files leave the type out.
        let is_bpe = model["type"] == "BPE" || model["type"].is_null() && model["merges"].is_array();
        let known = is_bpe && affixes == ["", ""] && model["dropout"].as_f64().unwrap_or(0.0) == 0.0;
        if !known || !only_spaces(&json["normalizer"]) || !only_spaces(&json["pre_tokenizer"]) {
            return None;
        }
        let mut pairs = HashSet::new();
        for token in tokenizer.get_vocab(false).into_keys() {
            pairs.extend(token.chars().zip(token.chars().skip(1)).map(|(first, second)| [first, second]));
        }
        Some(Self { pairs })
    }

    /// Whether no token has the characters before and behind byte `at` side by side.
    fn never(&self, text: &str, at: usize) -> bool {
        let Some((before, behind)) = text.split_at_checked(at) else { return false };
        let (Some(before), Some(behind)) = (before.chars().next_back(), behind.chars().next()) else { return false };
        let as_space = |char| if char == ' ' { SPACE } else { char };
        [[before, behind], [before, behind].map(as_space)].iter().all(|pair| !self.pairs.contains(pair))
    }
}

#[cfg(test)]
mod tests;
