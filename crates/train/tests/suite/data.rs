//! The data: sources, samples, and errors of bad data.
//!
//! More than 400 lines: one test a format or property, with the files that it needs.

use meshwork_nn::Batch;
use meshwork_train::config::{Args, Config};
use meshwork_train::{Data, load};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

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
    let text = in_order.decode(tokens(&in_order.batch(0, 1, 0..1).unwrap()));
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
    assert_eq!(tokens(&open(&path, SHORT).unwrap().batch(0, 1, 0..1).unwrap()), [72, 101]);
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
    let gpt2 = "--set data.tokenizer=gpt2 --set model.vocab_size=50257 --set model.seq_len=1 --set data.shuffle=false";
    let data = open(&path, gpt2).unwrap();
    let batch = data.batch(0, 1, 0..1).unwrap();
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
    let batch = data.batch(0, 1, 0..1).unwrap();
    assert_eq!(data.decode(tokens(&batch)), "12345");
    assert_eq!(data.decode(targets(&batch)), "23456");
    assert_eq!(
        config.notices,
        [format!(
            "{}: 4 of 7 files skipped (3 no extension of text: .json 1, .svg 1, none 1; 1 not UTF-8)",
            path.display()
        )]
    );
}

#[test]
fn a_token_file_is_read() {
    let path = folder("tokens").join("a.bin");
    fs::write(&path, bin(&[3, 1, 4, 1, 5])).unwrap();
    let batch = open(&path, SHORT).unwrap().batch(0, 2, 0..2).unwrap();
    assert_eq!((tokens(&batch), targets(&batch)), (&[3, 1, 4, 1][..], &[1, 4, 1, 5][..]));
    // The tokenizer is not used, so a vocabulary below 256 is fine.
    assert!(open(&path, &format!("{SHORT} --set model.vocab_size=6")).is_ok());
}

#[test]
fn bad_data_is_refused() {
    const VALID: &str =
        "use a UTF-8 text, a .jsonl file, a .bin file of token ids, a Megatron dataset, or a folder of texts";
    const TEXTS: &str =
        "use a folder of UTF-8 files that end in .txt, .text, .md, .markdown, .rst, .tex, .org, .jsonl, .ndjson";
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
            "has 3 bytes of ids, of 2 bytes each; use a complete file".to_string(),
        ),
        (
            write("a.parquet", b"PAR1\x15\x04\x15"),
            "is a Parquet file; convert it to JSON lines, as docs/data.md shows".to_string(),
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
            "leaves 2 of 2 tokens for training, fewer than one sample of model.seq_len + 1 = 3 tokens; use more data, or \
             model.seq_len of at most 1"
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
             sample of model.seq_len + 1 = 5 tokens; use more data, or model.seq_len of at most 3\n\
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
    let batch = data.batch(1, 2, 0..2).unwrap(); // the third sample, and the first again
    assert_eq!((tokens(&batch), targets(&batch)), (&[4, 5, 0, 1][..], &[5, 6, 1, 2][..]));
    assert_eq!((batch.samples(), &batch.dims("tokens").unwrap()[..]), (2, &[2][..]));
    // One more token makes one more sample.
    assert_eq!(Data::from_tokens((0..9).collect(), 2).training_samples(), 4);
}

#[test]
fn ranks_together_take_the_global_batch() {
    let data = Data::from_tokens((0..100).collect(), 3).shuffled(1);
    for step in 0..20 {
        let whole = data.batch(step, 8, 0..8).unwrap();
        for dp in [1, 2, 4, 8] {
            let parts: Vec<i32> = (0..dp)
                .flat_map(|d| tokens(&data.batch(step, 8, d * 8 / dp..(d + 1) * 8 / dp).unwrap()).to_vec())
                .collect();
            assert_eq!(parts, tokens(&whole));
        }
    }
}

#[test]
fn each_epoch_takes_each_sample_once_in_an_order_of_its_own() {
    let data = Data::from_tokens((0..=60).collect(), 3).shuffled(1234); // 20 samples, 4 steps of 5
    let epoch = |epoch: u64| -> Vec<i32> {
        (4 * epoch..4 * epoch + 4)
            .flat_map(|step| tokens(&data.batch(step, 5, 0..5).unwrap()).to_vec())
            .step_by(3)
            .collect()
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
    assert_eq!(tokens(&data.validation_batch(0, 2, 0..2).unwrap()), [13, 14, 15, 16]);
    assert_eq!(targets(&data.validation_batch(1, 2, 0..2).unwrap()), [18, 19, 14, 15]); // wraps around
    assert_eq!(data.validation_batches(0, 2), 1);
    assert_eq!(data.validation_batches(0, 1), 3);
    assert_eq!(data.validation_batches(0, 50), 1);
    assert_eq!(data.validation_batches(7, 2), 7);
    let trained = (0..10).flat_map(|step| targets(&data.batch(step, 3, 0..3).unwrap()).to_vec());
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
    let batch = data.batch(0, 2, 0..2).unwrap();
    assert_eq!(tokens(&batch), [10, 11, 12, 13, 14, 15, 16, 17]);
    assert_eq!(targets(&batch), [11, -1, 13, 14, 15, 16, -1, -1]);
    assert_eq!(meshwork_models::language::unmasked(&batch, 0..batch.samples()).unwrap(), 5);
    assert_eq!(data.decode(targets(&batch)), "\u{b}\r\u{e}\u{f}\u{10}");
}

/// A Megatron dataset of u16 ids, byte by byte from the published format: `documents` are the tokens of each.
fn indexed(folder: &Path, documents: &[&[u16]]) {
    let (mut index, mut at) = (b"MMIDIDX\0\0".to_vec(), 0);
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend((documents.len() as u64).to_le_bytes());
    index.extend((documents.len() as u64 + 1).to_le_bytes());
    index.extend(documents.iter().flat_map(|ids| (ids.len() as i32).to_le_bytes()));
    for ids in documents {
        index.extend(i64::to_le_bytes(at));
        at += 2 * ids.len() as i64;
    }
    index.extend((0..=documents.len() as i64).flat_map(i64::to_le_bytes));
    fs::write(folder.join("corpus.idx"), index).unwrap();
    fs::write(folder.join("corpus.bin"), bin(&documents.concat())).unwrap();
}

#[test]
fn a_megatron_dataset_is_read_with_its_documents() {
    let folder = folder("megatron");
    indexed(&folder, &[&[1, 2, 3], &[], &[4], &[5, 6, 7, 8, 9]]);
    let flags = "--set model.seq_len=4 --set data.shuffle=false --set data.documents=loss";
    for name in ["corpus", "corpus.idx", "corpus.bin"] {
        let batch = open(&folder.join(name), flags).unwrap().batch(0, 2, 0..2).unwrap();
        assert_eq!(tokens(&batch), [1, 2, 3, 4, 5, 6, 7, 8], "{name}");
        // 4 and 5 are the first tokens of documents.
        assert_eq!(targets(&batch), [2, 3, -1, -1, 6, 7, 8, 9], "{name}");
    }
    let stream = open(&folder.join("corpus"), &flags.replace("loss", "stream")).unwrap();
    assert_eq!(targets(&stream.batch(0, 1, 0..1).unwrap()), [2, 3, 4, 5]);
    fs::write(folder.join("corpus.idx"), b"MMIDIDX\0\0\x02").unwrap();
    let error = open(&folder.join("corpus.bin"), flags).unwrap_err();
    let idx = folder.join("corpus.idx");
    assert_eq!(
        error,
        format!(
            "data.path = {:?}: {} does not begin with the magic bytes of a Megatron index; use an .idx file of Megatron's \
             preprocess_data.py",
            folder.join("corpus.bin"),
            idx.display()
        )
    );
}

#[test]
fn documents_end_with_an_id_and_are_no_context_of_the_next() {
    let folder = folder("documents");
    let (lines, ids) = (folder.join("a.jsonl"), folder.join("a.bin"));
    fs::write(&lines, "{\"text\": \"ab\"}\n{\"text\": \"cde\"}\n{\"text\": \"f\"}\n").unwrap();
    fs::write(&ids, bin(&[97, 98, 0, 99, 100, 101, 0, 102, 0])).unwrap();
    let flags = "--set model.seq_len=8 --set data.shuffle=false --set data.documents=loss --set data.end_of_text=0";
    for path in [&lines, &ids] {
        let batch = open(path, flags).unwrap().batch(0, 1, 0..1).unwrap();
        assert_eq!(tokens(&batch), [97, 98, 0, 99, 100, 101, 0, 102]);
        // Each end of text is a target; the first token behind it is none.
        assert_eq!(targets(&batch), [98, 0, -1, 100, 101, 0, -1, 0]);
    }
    // The positions begin anew behind each end of text; a sample that begins inside a document counts from its own
    // first token.
    for rule in ["positions", "attention"] {
        let flags = flags.replace("documents=loss", &format!("documents={rule}")).replace("seq_len=8", "seq_len=4");
        let batch = open(&lines, &flags).unwrap().batch(0, 2, 0..2).unwrap();
        assert_eq!(batch.values::<i32>("positions").unwrap(), [0, 1, 2, 0, 0, 1, 2, 0], "{rule}");
        assert_eq!(targets(&batch), [98, 0, -1, 100, 101, 0, -1, 0], "{rule}");
    }
    assert!(open(&lines, flags).unwrap().batch(0, 1, 0..1).unwrap().values::<i32>("positions").is_err());
    // The bytes have no end of text: documents follow each other, and are told apart all the same.
    let plain = "--set model.seq_len=5 --set data.shuffle=false --set data.documents=loss";
    let batch = open(&lines, plain).unwrap().batch(0, 1, 0..1).unwrap();
    assert_eq!((tokens(&batch), targets(&batch)), (&[97, 98, 99, 100, 101][..], &[98, -1, 100, 101, -1][..]));
    let ids = ids.display();
    for (flags, problem) in [
        (
            plain,
            format!(
                "data.documents = \"loss\": nothing marks the documents of data.path = \"{ids}\"; set data.end_of_text to the \
                 id that ends a document, or data.tokenizer to one that has it, or use stream"
            ),
        ),
        (
            "--set data.end_of_text=256 --set model.seq_len=5",
            "data.end_of_text = 256: is beyond model.vocab_size = 256; use an id below 256".to_owned(),
        ),
        (
            "--set data.end_of_text=-1 --set model.seq_len=5",
            "data.end_of_text = -1 (from --set): is no id; use \"auto\", \"none\", or an id of at least 0".to_owned(),
        ),
    ] {
        assert_eq!(open(Path::new(&ids.to_string()), flags).unwrap_err(), problem);
    }
}

/// A run reads what a file is, and not what its name says: of a link, and of standard input, which is read once.
#[test]
#[cfg(unix)]
fn json_lines_are_read_from_a_link_and_from_a_pipe() {
    let folder = folder("names");
    let file = folder.join("web.json");
    fs::write(&file, "{\"body\": \"abc\"}\n{\"body\": 7}\n{\"body\": \"de\"}\n").unwrap();
    let flags =
        "--set model.seq_len=4 --set data.shuffle=false --set data.text_key=body --set data.skip_bad_lines=true";
    let link = folder.join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let pipe = folder.join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    std::thread::scope(|scope| {
        scope.spawn(|| fs::copy(&file, &pipe).unwrap());
        for path in [&file, &link, &pipe] {
            let data = open(path, flags).unwrap();
            let batch = data.batch(0, 1, 0..1).unwrap();
            assert_eq!((data.decode(tokens(&batch)), data.decode(targets(&batch))), ("abcd".into(), "bcde".into()));
            assert!(data.notices()[0].contains("1 of 3 documents skipped"), "{:?}", data.notices());
        }
    });
    let error = open(&file, "--set data.text_key=body").unwrap_err();
    let told = format!("data.path = {file:?}: line 2 has no string \"body\": it is a number; set data.text_key to");
    assert!(error.starts_with(&told), "{error}");
    // As it is, if that is asked for.
    assert_eq!(open(&file, "--set data.format=text --set model.seq_len=5").unwrap().training_samples(), 8);
}

#[test]
fn ids_of_32_bits_are_refused_or_read_as_such() {
    let path = folder("wide").join("a.bin");
    let ids: Vec<u32> = (0..600).map(|id| id * 7 % 250).collect();
    fs::write(&path, ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    assert_eq!(
        open(&path, SHORT).unwrap_err(),
        format!(
            "data.path = {path:?}: looks like ids of 32 bits, not of 16: every second value of 16 bits is 0 or almost; set \
             data.token_type = \"u32\", or \"u16\" if its ids are of 16 bits"
        )
    );
    let batch = open(&path, &format!("{SHORT} --set data.token_type=u32")).unwrap().batch(0, 1, 0..1).unwrap();
    assert_eq!((tokens(&batch), targets(&batch)), (&[0, 7][..], &[7, 14][..]));
}

#[test]
fn what_marks_the_documents_of_a_token_file_is_part_of_its_hash() {
    let path = folder("marks").join("a.bin");
    fs::write(&path, bin(&[5, 0, 7, 1, 9, 3])).unwrap();
    let hash = |more: &str| open(&path, &format!("{SHORT} {more}")).unwrap().hash();
    let [zero, one] = [0, 1].map(|id| format!("--set data.documents=loss --set data.end_of_text={id}"));
    assert_ne!(hash(&zero), hash(&one));
    // Where boundaries mean nothing, it is not.
    assert_eq!(hash(""), hash("--set data.end_of_text=1"));
}

/// The resident memory of this process, in bytes, where the system says.
fn resident() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[test]
fn a_file_of_100_gb_takes_no_memory() {
    const BYTES: u64 = 100_000_000_000;
    let path = folder("sparse").join("huge.bin");
    fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
    let before = resident();
    let flags = "--set model.seq_len=2048 --set validation.every=1 --set data.documents=loss --set data.end_of_text=7";
    let data = open(&path, flags).unwrap();
    let (tokens, held_out) = (BYTES / 2, (BYTES as f64 / 2.0 * 0.05) as u64);
    assert_eq!(data.training_samples() as u64, (tokens - held_out - 1) / 2048);
    assert_eq!(data.validation_samples() as u64, (held_out - 1) / 2048);
    for step in [0, 1, 1 << 20, 1 << 40] {
        assert_eq!(targets(&data.batch(step, 16, 0..16).unwrap()), [0; 16 * 2048]);
        assert_eq!(targets(&data.validation_batch(step, 16, 4..8).unwrap()), [0; 4 * 2048]);
    }
    // The file would not fit into this.
    if let (Some(before), Some(after)) = (before, resident()) {
        assert!(after.saturating_sub(before) < 1 << 30, "{before} bytes became {after}");
    }
    let hash = data.hash();
    fs::File::options().write(true).open(&path).unwrap().set_len(BYTES + 2).unwrap();
    assert_ne!(open(&path, flags).unwrap().hash(), hash);
    fs::remove_file(path).unwrap();
}

#[test]
fn a_file_that_is_cut_short_under_a_run_is_an_error() {
    let path = folder("cut").join("a.bin");
    fs::write(&path, bin(&[5; 5000])).unwrap();
    let data = open(&path, "--set data.shuffle=false").unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    let error = data.batch(0, 1, 0..1).unwrap_err().to_string();
    let told =
        format!("{}: cannot be read at byte 0: failed to fill whole buffer; do not change data while", path.display());
    assert!(error.starts_with(&told), "{error}");
}

#[test]
fn sources_are_mixed_by_their_weights_whatever_the_mesh() {
    let folder = folder("mixture");
    let path = |name: &str| folder.join(name).display().to_string();
    fs::write(path("a.bin"), bin(&[1; 201])).unwrap();
    fs::write(path("b.bin"), bin(&(0..=100).map(|i| 100 + i).collect::<Vec<_>>())).unwrap();
    let open = |entries: &str, more: &str| {
        let sources = format!("data.sources=[{entries}]");
        let short = ["--set", "model.seq_len=2", "--set", &sources];
        load(&Args::parse(short.into_iter().chain(more.split_whitespace())))
            .map(|(_, data)| data)
            .map_err(|error| error.to_string())
    };
    let [a, b] = [path("a.bin"), path("b.bin")];
    let data = open(&format!("\"{a}:0.75\", \"{b}:0.25\""), "").unwrap();
    let (mut of_b, mut starts) = (0usize, Vec::new());
    for n in 0..400 {
        let sample = data.batch(n, 1, 0..1).unwrap();
        // The bytes of sample n do not depend on how a batch is cut.
        let step = data.batch(n / 8, 8, n as usize % 8..n as usize % 8 + 1).unwrap();
        assert_eq!(tokens(&sample), tokens(&step));
        if tokens(&sample)[0] != 1 {
            of_b += 1;
            starts.push(tokens(&sample)[0]);
        }
        assert!((4 * of_b).abs_diff(n as usize + 1) < 4, "{of_b} of {} samples", n + 1);
    }
    // 100 samples of the second source: each of its 50 twice, in an order of its own each time.
    let (first, second) = starts.split_at(50);
    let every: HashSet<i32> = (0..50).map(|sample| 100 + 2 * sample).collect();
    assert!([first, second].iter().all(|epoch| epoch.iter().copied().collect::<HashSet<_>>() == every));
    assert_ne!(first, second);
    // Three of four samples are of the first source, which has 100.
    assert!((132..=134).contains(&data.training_samples()), "{}", data.training_samples());
    // Of one source, the samples are those of its path alone; the weights are part of the hash.
    let alone = open(&format!("\"{b}\""), "").unwrap();
    assert_eq!(alone.hash(), self::open(Path::new(&b), "--set model.seq_len=2").unwrap().hash());
    assert_ne!(data.hash(), open(&format!("\"{a}:0.5\", \"{b}:0.5\""), "").unwrap().hash());
    let weight = |of: &str| {
        format!("data.sources = \"{a}:{of}\": has the weight {of}; use a number above 0 behind the last colon")
    };
    for (entries, problem) in [
        (format!("\"{a}:0\", \"{b}\""), weight("0")),
        (format!("\"{a}:-2\", \"{b}\""), weight("-2")),
        (format!("\"{a}:NaN\", \"{b}\""), weight("NaN")),
        (format!("\"{a}:inf\""), weight("inf")),
        (
            format!("\"{a}:1\", \"{b}:0.123456789\""),
            "data.sources = [1.0, 0.123456789]: the weights are in no proportion of whole numbers whose sum is at most 1048576; \
             use weights of fewer digits, such as 0.7"
                .to_owned(),
        ),
        (
            String::new(),
            "data.sources = [] (from --set): is empty; use a list of strings, such as [\"a.jsonl:7\", \"b.bin:3\"]".to_owned(),
        ),
        (
            format!("\"{a}:2\", \"{b}.x:1\""),
            format!(
                "data.sources = \"{b}.x:1\": does not exist; use a UTF-8 text, a .jsonl file, a .bin file of token ids, a Megatron \
                 dataset, or a folder of texts"
            ),
        ),
    ] {
        assert_eq!(open(&entries, "").unwrap_err(), problem);
    }
    let both = open(&format!("\"{a}\""), &format!("--data {b}")).unwrap_err();
    assert_eq!(both, format!("data.path = {b:?}: is given beside data.sources; use data.path or data.sources"));
}

/// The last loss of a short run over two sources with boundaries.
fn last_loss(folder: &Path, mesh: &str, more: &str) -> f64 {
    let sources = format!("data.sources=[\"{0}/a.jsonl:2\", \"{0}/corpus:1\"]", folder.display());
    let flags = format!(
        "--mesh {mesh} --set data.documents=attention --set training.numerics=canonical --set model.num_layers=2 \
         --set model.hidden_size=16 --set model.num_heads=4 --set model.seq_len=8 --set training.global_batch_size=8 {more}"
    );
    let args = flags.split_whitespace().chain(["--set", &sources]);
    let (config, data) = load(&Args::parse(args)).unwrap();
    let outcome = meshwork_train::train(&config, &data, None, &std::sync::atomic::AtomicBool::new(false)).unwrap();
    outcome.loss.unwrap()
}

#[test]
fn mixed_documents_give_the_same_bits_on_every_mesh_and_when_resumed() {
    let folder = folder("resumed");
    let line = |length: usize| format!("{{\"text\": \"{}\"}}\n", "O tempora, o mores! "[..1 + length % 19].to_owned());
    fs::write(folder.join("a.jsonl"), (0..60).map(line).collect::<String>()).unwrap();
    let documents: Vec<Vec<u16>> =
        (1..30u16).map(|length| (0..length % 7).map(|id| id * length % 256).collect()).collect();
    indexed(&folder, &documents.iter().map(|ids| &ids[..]).collect::<Vec<_>>());
    let alone = last_loss(&folder, "dp=1", "--steps 4");
    assert_eq!(alone, last_loss(&folder, "dp=2,tp=2,pp=2", "--steps 4"));
    // Two steps on one mesh, and two more on another.
    let saved = format!("--set checkpoint.dir={}", folder.join("saved").display());
    let half = last_loss(&folder, "dp=2", &format!("--steps 2 {saved}"));
    assert_ne!(half, alone);
    assert_eq!(alone, last_loss(&folder, "tp=2,pp=2", &format!("--steps 4 {saved} --set checkpoint.resume=true")));
    // Each rule has another loss.
    let rules = ["stream", "loss", "positions", "attention"];
    let losses =
        rules.map(|rule| last_loss(&folder, "dp=1", &format!("--steps 4 --set data.documents={rule}")).to_bits());
    assert_eq!((HashSet::from(losses).len(), losses[3]), (4, alone.to_bits()));
}

/// A step of the 8 billion parameters on a million tokens over cp=8 is planned without a text as long, and fits 80 GiB.
#[test]
fn a_million_tokens_are_planned_without_data() {
    let line = "--mesh cp=8 --set model.preset=llama3-8b --set model.seq_len=1000000 --set training.global_batch_size=1 \
                --set parallelism.context_parallel_method=ring --set training.dtype=bf16 --set parallelism.zero_stage=3 \
                --set memory.recompute=full --set memory.loss_chunk=1024 --set memory.sequence_block=4096";
    let told = |steps: &str| load(&Args::parse(format!("{line} --steps {steps}").split_whitespace()));
    let (config, _) = told("0").unwrap();
    let bytes = meshwork_train::plan::predict(&config, 7).unwrap().peak_bytes();
    assert!((60 << 30..80 << 30).contains(&bytes), "{bytes}");
    let refused = told("1").unwrap_err().to_string();
    assert!(refused.contains("fewer than one sample of model.seq_len + 1 = 1000001 tokens"), "{refused}");
}
