//! The data: sources, samples, and errors of bad data.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use meshwork_nn::Batch;
use meshwork_train::config::{Args, Config};
use meshwork_train::{Data, load};

/// An empty folder of that name.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).unwrap();
    path
}

fn bin(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn open(path: &Path, more: &str) -> Result<Data, String> {
    let line = format!("--data {} {more}", path.display());
    load(&Args::parse(line.split_whitespace())).map(|(_, data)| data).map_err(|error| error.to_string())
}

const SHORT: &str = "--set model.seq_len=2 --set data.shuffle=false";

fn tokens(batch: &Batch) -> &[i32] {
    batch.values("tokens").unwrap()
}

fn targets(batch: &Batch) -> &[i32] {
    batch.values("targets").unwrap()
}

#[test]
fn a_fresh_checkout_reads_cicero() {
    let data = Data::open(&Config::from_toml("").unwrap()).unwrap();
    assert_eq!(data.training_samples(), (49068 - 1) / 128);
    let in_order = Data::open(&Config::from_toml("[data]\nshuffle = false").unwrap()).unwrap();
    let text = in_order.decode(tokens(&in_order.batch(0, 1, 0..1)));
    assert!(text.starts_with("Non eram nescius, Brute"), "{text}");
    // The stream must never change, or runs are no longer comparable with older ones.
    assert_eq!(data.hash(), PINNED);
}

const PINNED: &str = "9077de3e4cc85b18";

#[test]
fn the_hash_is_fnv_1a_over_ids() {
    assert_eq!(Data::from_tokens(vec![], 1).hash(), "cbf29ce484222325");
    // FNV-1a of the bytes 61 00 00 00, computed by hand from the published offset and prime.
    let by_hand = [0x61u8, 0, 0, 0]
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    assert_eq!(Data::from_tokens(vec![0x61], 1).hash(), format!("{by_hand:016x}"));
}

#[test]
fn a_file_is_read_as_bytes_or_by_a_tokenizer() {
    let path = folder("file").join("text.txt");
    fs::write(&path, "Hello world").unwrap();
    assert_eq!(tokens(&open(&path, SHORT).unwrap().batch(0, 1, 0..1)), [72, 101]);
    assert_eq!(
        open(&path, "--set data.tokenizer=gtp2").unwrap_err(),
        "data.tokenizer = \"gtp2\": is neither a known tokenizer nor a file; use bytes, gpt2 or the path of a tokenizer.json"
    );
}

#[test]
#[cfg(feature = "tokenizers")]
fn a_file_is_read_as_the_tokens_of_gpt2() {
    let path = folder("gpt2").join("text.txt");
    fs::write(&path, "Hello world").unwrap();
    let gpt2 = "--set data.tokenizer=gpt2 --set model.vocab_size=50257 --set model.seq_len=1";
    let data = open(&path, gpt2).unwrap();
    let batch = data.batch(0, 1, 0..1);
    assert_eq!((tokens(&batch), targets(&batch)), (&[15496][..], &[995][..]));
    assert_eq!(data.decode(&[15496, 995]), "Hello world");
    assert_eq!(
        open(&path, "--set data.tokenizer=gpt2 --set model.seq_len=1").unwrap_err(),
        "data.tokenizer = \"gpt2\": has 50257 ids, more than model.vocab_size = 256; use model.vocab_size = 50257 or more, \
         or another tokenizer"
    );
}

#[test]
fn a_folder_is_read_in_the_order_of_its_paths() {
    let path = folder("folder");
    fs::create_dir(path.join("b")).unwrap();
    for (name, bytes) in [
        ("c.txt", &b"56"[..]),
        ("b/z.MD", b"34"),
        ("a.txt", b"12"),
        ("b/image", b"\xff\xfe"),
        ("b/latin1.txt", b"caf\xe9"),
        // UTF-8, but not text to learn.
        ("a.svg", b"<svg/>"),
        ("b/tokenizer.json", b"{}"),
    ] {
        fs::write(path.join(name), bytes).unwrap();
    }
    let line = format!("--data {} --set model.seq_len=5 --set data.shuffle=false", path.display());
    let (config, data) = load(&Args::parse(line.split_whitespace())).unwrap();
    let batch = data.batch(0, 1, 0..1);
    assert_eq!(data.decode(tokens(&batch)), "12345");
    assert_eq!(data.decode(targets(&batch)), "23456");
    assert_eq!(
        config.notices,
        [format!("data.path = {path:?}: 4 of 7 files skipped (3 no extension of text, 1 not UTF-8)")]
    );
}

#[test]
fn a_token_file_is_read() {
    let path = folder("tokens").join("a.bin");
    fs::write(&path, bin(&[3, 1, 4, 1, 5])).unwrap();
    let batch = open(&path, SHORT).unwrap().batch(0, 2, 0..2);
    assert_eq!((tokens(&batch), targets(&batch)), (&[3, 1, 4, 1][..], &[1, 4, 1, 5][..]));
    // The tokenizer is not used, so a vocabulary below 256 is fine.
    assert!(open(&path, &format!("{SHORT} --set model.vocab_size=6")).is_ok());
}

#[test]
fn bad_data_is_refused() {
    const VALID: &str = "use a UTF-8 file, a folder of texts, or a .bin file of little-endian u16 token ids";
    const TEXTS: &str = "use a folder of UTF-8 files that end in .txt, .text, .md, .markdown, .rst, .tex, .org, .jsonl";
    let folder = folder("bad");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    fs::create_dir(folder.join("empty")).unwrap();
    let long_header: Vec<u8> =
        [20_240_520u32, 1, 9].into_iter().chain([0; 253]).flat_map(u32::to_le_bytes).chain([0; 6]).collect();
    for (path, problem) in [
        (folder.join("missing"), format!("does not exist; {VALID}")),
        (write("empty.txt", b""), format!("is empty; {VALID}")),
        (write("empty.bin", b""), format!("is empty; {VALID}")),
        (folder.join("empty"), format!("holds no text: 0 files, all empty; {TEXTS}")),
        (write("latin1", b"caf\xe9!"), format!("is not UTF-8 from byte 3 on; {VALID}")),
        (
            write("odd.bin", &[1, 2, 3]),
            "has 3 bytes, an odd number: ids take 2 bytes each; use a file of little-endian u16 token ids".to_string(),
        ),
        (
            write("count.bin", &long_header),
            "has 3 tokens, but its header says 9; use a complete file".to_string(),
        ),
        (
            write("ids.bin", &bin(&[1, 255, 256, 7, 300])),
            "token 2 is 256, beyond model.vocab_size = 256; use model.vocab_size = 301 or more".to_string(),
        ),
        (
            write("short.txt", b"ab"),
            "leaves 2 of 2 tokens for training, fewer than one sample of model.seq_len + 1 = 3 tokens; use more data or a \
             smaller model.seq_len"
                .to_string(),
        ),
    ] {
        let expected = format!("data.path = {path:?}: {problem}");
        assert_eq!(open(&path, SHORT).unwrap_err(), expected);
    }
    // Faults of source and tokenizer, and of both parts of the stream, are reported together.
    let both = open(&folder.join("missing"), "--set data.tokenizer=x").unwrap_err();
    assert_eq!(both.lines().count(), 2);
    let parts = "--set model.seq_len=4 --set validation.every=1 --set validation.fraction=0.5";
    assert_eq!(
        open(&write("eight.txt", b"12345678"), parts).unwrap_err(),
        format!(
            "data.path = {path:?}: leaves 4 of 8 tokens for training after 4 are held out for validation, fewer than one \
             sample of model.seq_len + 1 = 5 tokens; use more data or a smaller model.seq_len\n\
             validation.fraction = 0.5: holds out 4 of 8 tokens of data.path = {path:?}, fewer than one sample of \
             model.seq_len + 1 = 5 tokens; use a larger fraction, more data or a smaller model.seq_len",
            path = folder.join("eight.txt")
        )
    );
}

#[test]
fn samples_in_order_overlap_by_one_and_wrap_around() {
    let data = Data::from_tokens((0..8).collect(), 2); // samples 0-2, 2-4, 4-6; 7 is left over
    assert_eq!(data.training_samples(), 3);
    let batch = data.batch(1, 2, 0..2); // the third sample, and the first again
    assert_eq!((tokens(&batch), targets(&batch)), (&[4, 5, 0, 1][..], &[5, 6, 1, 2][..]));
    assert_eq!((batch.samples(), &batch.dims("tokens").unwrap()[..]), (2, &[2][..]));
    // One more token makes one more sample.
    assert_eq!(Data::from_tokens((0..9).collect(), 2).training_samples(), 4);
}

#[test]
fn ranks_together_take_the_global_batch() {
    let data = Data::from_tokens((0..100).collect(), 3).shuffled(1);
    for step in 0..20 {
        let whole = data.batch(step, 8, 0..8);
        for dp in [1, 2, 4, 8] {
            let parts: Vec<i32> =
                (0..dp).flat_map(|d| tokens(&data.batch(step, 8, d * 8 / dp..(d + 1) * 8 / dp)).to_vec()).collect();
            assert_eq!(parts, tokens(&whole));
        }
    }
}

#[test]
fn each_epoch_takes_each_sample_once_in_an_order_of_its_own() {
    let data = Data::from_tokens((0..=60).collect(), 3).shuffled(1234); // 20 samples, 4 steps of 5
    let epoch = |epoch: u64| -> Vec<i32> {
        (4 * epoch..4 * epoch + 4).flat_map(|step| tokens(&data.batch(step, 5, 0..5)).to_vec()).step_by(3).collect()
    };
    let every: HashSet<i32> = (0..20).map(|sample| 3 * sample).collect();
    for n in 0..3 {
        assert_eq!(epoch(n).into_iter().collect::<HashSet<_>>(), every);
        assert_ne!(epoch(n), epoch(n + 1));
    }
}

#[test]
fn the_last_part_is_held_out_in_order() {
    let data = Data::from_tokens((0..20).collect(), 2).hold_out(0.35).shuffled(9); // tokens 13 to 19
    assert_eq!((data.training_samples(), data.validation_samples()), (6, 3));
    assert_eq!(tokens(&data.validation_batch(0, 2, 0..2)), [13, 14, 15, 16]);
    assert_eq!(targets(&data.validation_batch(1, 2, 0..2)), [18, 19, 14, 15]); // wraps around
    assert_eq!(data.validation_batches(0, 2), 1);
    assert_eq!(data.validation_batches(0, 1), 3);
    assert_eq!(data.validation_batches(0, 50), 1);
    assert_eq!(data.validation_batches(7, 2), 7);
    let trained = (0..10).flat_map(|step| targets(&data.batch(step, 3, 0..3)).to_vec());
    assert_eq!(trained.max(), Some(12));
}

#[test]
fn nothing_is_held_out_without_validation() {
    let samples = |toml: &str| Data::open(&Config::from_toml(toml).unwrap()).unwrap().training_samples();
    assert_eq!(samples("[validation]\nfraction = 0.5"), 383);
    assert_eq!(samples("[validation]\nfraction = 0.5\nevery = 10"), 191);
}

#[test]
fn masked_targets_are_negative() {
    let data = Data::from_tokens((10..19).collect(), 4).masked(|at| at == 2 || at >= 7);
    let batch = data.batch(0, 2, 0..2);
    assert_eq!(tokens(&batch), [10, 11, 12, 13, 14, 15, 16, 17]);
    assert_eq!(targets(&batch), [11, -1, 13, 14, 15, 16, -1, -1]);
    assert_eq!(meshwork_models::language::unmasked(&batch, 0..batch.samples()).unwrap(), 5);
    assert_eq!(data.decode(targets(&batch)), "\u{b}\r\u{e}\u{f}\u{10}");
}
