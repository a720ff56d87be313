//! Text as tokens of bytes, and text for people: numbers, and lines that fit the terminal.

use meshwork_train::data::Tokenizer;
use meshwork_train::numbers::{count, grouped, size, spans};
use meshwork_train::terminal::{COLUMNS, columns, fit};

#[test]
fn bytes_survive_the_round_trip() {
    let text = "Quousque tandem, Catilina? Ünïcödé 🦀";
    let ids = Tokenizer::BYTES.encode(text).unwrap();
    assert!(ids.iter().all(|&id| (id as usize) < Tokenizer::BYTES.vocab_size()));
    assert_eq!(Tokenizer::BYTES.decode(&ids), text);
    assert_eq!(Tokenizer::BYTES.decode(&[72, 105, 0xc3, 33, 5000]), "Hi\u{fffd}!\u{fffd}");
}

#[test]
#[cfg(not(feature = "tokenizers"))]
fn what_needs_the_feature_says_how_to_get_it() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for name in ["gpt2", manifest] {
        let fault = Tokenizer::open(name).unwrap_err().to_string();
        let told =
            "needs the feature tokenizers, which this build lacks; build it with --features tokenizers, or use bytes";
        assert_eq!(fault, format!("data.tokenizer = {name:?}: {told}"));
    }
}

#[test]
fn numbers_read_well() {
    assert_eq!([grouped(0), grouped(999), grouped(1_234_567)], ["0", "999", "1,234,567"]);
    assert_eq!([size(30.0), size(1536.0), size(7.0 * 1024.0 * 1024.0)], ["30 B", "1.5 KiB", "7.0 MiB"]);
    assert_eq!(spans(&[0, 1, 2, 5, 8, 9]), "0-2,5,8-9");
    assert_eq!([count(1, "micro-batch"), count(2, "micro-batch")], ["1 micro-batch", "2 micro-batches"]);
    assert_eq!([count(0, "call"), count(1000, "call")], ["0 calls", "1,000 calls"]);
}

#[test]
fn long_lines_break_at_spaces_and_hang_below_their_second_column() {
    let long =
        "  name      one two three four\n    plain words in a longer row\nshort\nunbreakable-and-longer-than-all\n";
    let fitted = "  name      one two three\n            four\n    plain words in a\n      longer row\nshort\nunbreakable-and-longer-than-all\n";
    assert_eq!(fit(long, 26), fitted);
    assert_eq!(fit(long, 80), long);
    assert!(columns() >= COLUMNS);
}
