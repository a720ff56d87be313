use super::super::reading::Pieces;
use super::super::special_tokens::{NONE, SpecialTokens};
use super::*;
use crate::config::TextFormat;
use std::collections::BTreeMap;

const READING: Reading<'_> = Reading {
    format: TextFormat::Auto,
    text_key: "text",
    skip_bad_lines: false,
    examples: None,
    pieces: Pieces { bytes: 4 << 20, margin: 1 << 10 },
};

/// Words of one letter, as a tokenizer that is not bytes.
#[derive(Debug)]
struct Letters;

impl super::super::library::Library for Letters {
    fn vocab_size(&self) -> usize {
        300
    }

    fn special(&self) -> &SpecialTokens {
        &NONE
    }

    fn fingerprint(&self) -> u64 {
        7
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(text.chars().map(|letter| u32::from(letter) & 0xff).collect())
    }

    fn encode_spelled(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, String> {
        Ok(text.char_indices().map(|(at, letter)| (u32::from(letter) & 0xff, at..at + letter.len_utf8())).collect())
    }

    fn decode(&self, _: &[u32]) -> String {
        String::new()
    }

    fn cut(&self, _: &str, _: usize) -> Option<[usize; 2]> {
        None
    }
}

struct Fixture {
    folder: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Fixture {
    /// JSON lines that are long enough for a cache: documents of 1 to 1000 letters.
    fn new() -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap(), tokenizer: Tokenizer::with_library(Letters) };
        let line =
            |length: usize| format!("{{\"text\": \"{}\"}}\n", "abcdefghij".repeat(100)[..1 + length % 1000].to_owned());
        fs::write(fixture.text(), (0..2500).map(line).collect::<String>()).unwrap();
        fixture
    }

    fn text(&self) -> PathBuf {
        self.folder.path().join("a.jsonl")
    }

    fn tokenisation(&self) -> Tokenisation<'_> {
        Tokenisation {
            tokenizer: &self.tokenizer,
            reading: READING,
            beginning_of_text: None,
            end_of_text: Some(299),
            folder: None,
            own_folder: Some(self.folder.path().join("own")),
        }
    }

    fn open(&self) -> (Stream, Vec<String>) {
        self.tokenisation().stream(&self.text(), &Texts::find(&self.text()).unwrap()).unwrap()
    }

    fn cache(&self, extension: &str) -> PathBuf {
        let files = fs::read_dir(self.folder.path().join("a.jsonl.tokens")).unwrap();
        let is = |path: &PathBuf| path.extension().is_some_and(|of| of == extension);
        files.map(|entry| entry.unwrap().path()).find(is).unwrap()
    }

    /// The files of the cache with their contents, and the times of their last changes.
    fn files(&self) -> BTreeMap<PathBuf, (Vec<u8>, std::time::SystemTime)> {
        let files = fs::read_dir(self.folder.path().join("a.jsonl.tokens")).unwrap();
        let read = |path: PathBuf| (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
        files.map(|entry| entry.unwrap().path()).map(|path| (path.clone(), read(path))).collect()
    }
}

#[test]
fn a_long_text_is_tokenised_once() {
    let fixture = Fixture::new();
    let (stream, notices) = fixture.open();
    assert_eq!(notices.len(), 1);
    // Lengths of 1 to 1000 twice, of 1 to 500 once, and an end of text each.
    let tokens = 2 * 500_500 + 125_250 + 2500;
    assert_eq!(stream.tokens.len(), tokens);
    assert!(notices[0].contains(&format!("into {tokens} tokens")), "{notices:?}");
    let files = fixture.files();
    assert_eq!(files.len(), 4, "{:?}", files.keys());
    let (again, notices) = fixture.open();
    assert_eq!((again.hash, notices), (stream.hash, vec![]));
    assert_eq!(fixture.files(), files);
    // The same tokens and documents as without a cache.
    let texts = Texts::find(&fixture.text()).unwrap();
    let (memory, _) = fixture.tokenisation().in_memory(&fixture.text(), &texts).unwrap();
    assert_eq!((memory.hash, memory.tokens.len()), (stream.hash, stream.tokens.len()));
    for window in [0..900, 123_456..130_000, stream.tokens.len() - 5000..stream.tokens.len()] {
        let tokens = stream.tokens.read(window.clone()).unwrap();
        assert_eq!(tokens, memory.tokens.read(window.clone()).unwrap());
        let starts = stream.documents.starts(window.clone(), &tokens).unwrap();
        assert_eq!(starts, memory.documents.starts(window.clone(), &tokens).unwrap());
        // Documents end with the end of text.
        assert_eq!(starts, Documents::EndOfText(299).starts(window, &tokens).unwrap());
        assert!(!starts.is_empty());
    }
}

/// The extension of a file, what happens to it, and what is said of it.
type Damage<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);

#[test]
fn a_damaged_or_foreign_cache_is_written_anew() {
    let fixture = Fixture::new();
    let (stream, _) = fixture.open();
    let damages: [Damage<'_>; 5] = [
        (
            "bin",
            &|path| {
                let mut bytes = fs::read(path).unwrap();
                bytes[100_000] ^= 1;
                fs::write(path, bytes).unwrap();
            },
            "its tokens have the hash",
        ),
        (
            "bin",
            &|path| File::options().write(true).open(path).unwrap().set_len(1000).unwrap(),
            "not at byte 1000 of the tokens",
        ),
        ("idx", &|path| fs::remove_file(path).unwrap(), "has no "),
        ("json", &|path| fs::write(path, "{").unwrap(), "its .json is damaged"),
        (
            "json",
            &|path| {
                let text = fs::read_to_string(path).unwrap();
                fs::write(path, text.replace("\"format\": 2", "\"format\": 0")).unwrap();
            },
            "its .json is of format 0",
        ),
    ];
    for (extension, damage, told) in damages {
        damage(&fixture.cache(extension));
        let (mended, notices) = fixture.open();
        assert!(notices[0].contains("was written anew") && notices[0].contains(told), "{notices:?}");
        assert_eq!(mended.hash, stream.hash);
        assert!(fixture.open().1.is_empty());
    }
    // A write that was cut short leaves a cache without its .json: no cache, and no damage.
    fs::remove_file(fixture.cache("json")).unwrap();
    let (_, notices) = fixture.open();
    assert!(notices.len() == 1 && notices[0].starts_with("tokenised"), "{notices:?}");
}

#[test]
fn documents_begin_with_the_id_that_begins_them() {
    let fixture = Fixture::new();
    let texts = Texts::find(&fixture.text()).unwrap();
    let begun = Tokenisation { beginning_of_text: Some(7), ..fixture.tokenisation() };
    let (stream, _) = begun.stream(&fixture.text(), &texts).unwrap();
    assert_eq!(stream.tokens.read(0..8).unwrap(), [7, 97, 299, 7, 97, 98, 299, 7]);
}

#[test]
fn another_text_or_tokenisation_has_another_cache() {
    let fixture = Fixture::new();
    fixture.open();
    let count = || fixture.files().keys().filter(|path| path.extension().is_some_and(|of| of == "json")).count();
    let texts = Texts::find(&fixture.text()).unwrap();
    for other in [
        Tokenisation { end_of_text: None, ..fixture.tokenisation() },
        Tokenisation { beginning_of_text: Some(1), ..fixture.tokenisation() },
        Tokenisation { reading: Reading { skip_bad_lines: true, ..READING }, ..fixture.tokenisation() },
    ] {
        other.stream(&fixture.text(), &texts).unwrap();
    }
    assert_eq!(count(), 4);
    let mut text = fs::read(fixture.text()).unwrap();
    text[10] = b'z'; // the letter of the first document
    fs::write(fixture.text(), text).unwrap();
    fixture.open();
    assert_eq!(count(), 5);
}

#[test]
fn a_cache_lies_where_it_is_told() {
    let fixture = Fixture::new();
    let folder = fixture.folder.path().join("deep/cache");
    let texts = Texts::find(&fixture.text()).unwrap();
    let told = Tokenisation { folder: Some(&folder), ..fixture.tokenisation() };
    told.stream(&fixture.text(), &texts).unwrap();
    assert!(folder.join("a.jsonl.tokens").is_dir() && !fixture.folder.path().join("a.jsonl.tokens").exists());
    // A file is no folder.
    let file = fixture.text();
    let told = Tokenisation { folder: Some(&file), ..fixture.tokenisation() };
    let error = told.stream(&file, &texts).unwrap_err().to_string();
    assert!(error.contains("the token cache cannot be written"), "{error}");
}

#[test]
fn where_the_folder_of_the_text_cannot_be_written_the_cache_is_the_users_own() {
    let fixture = Fixture::new();
    // What stands in the way of the cache's folder, also for root.
    fs::write(fixture.folder.path().join("a.jsonl.tokens"), "").unwrap();
    let (stream, notices) = fixture.open();
    assert!(notices[0].contains("cannot be written") && notices[0].contains("data.cache_dir"), "{notices:?}");
    assert!(fixture.folder.path().join("own/a.jsonl.tokens").is_dir());
    let (again, notices) = fixture.open();
    assert_eq!((again.hash, notices), (stream.hash, Vec::new()));
    // Where that cannot be written either, both are named.
    let texts = Texts::find(&fixture.text()).unwrap();
    let nowhere = Tokenisation { own_folder: Some(fixture.text()), ..fixture.tokenisation() };
    let error = nowhere.stream(&fixture.text(), &texts).unwrap_err().to_string();
    assert!(error.contains("a.jsonl.tokens: the token cache cannot be written"), "{error}");
    assert!(error.contains("; nor can ") && error.contains("data.cache_dir"), "{error}");
}

#[test]
fn a_whole_cache_that_another_user_wrote_is_read_without_its_lock() {
    let fixture = Fixture::new();
    let (stream, _) = fixture.open();
    // A lock that this process can neither open nor make, also as root.
    let lock = fixture.cache("lock");
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    let (again, notices) = fixture.open();
    assert_eq!((again.hash, notices), (stream.hash, Vec::new()));
    assert!(!fixture.folder.path().join("own").exists());
    // A damaged one cannot be mended there: the user's own takes its place, and is found from then on.
    fs::write(fixture.cache("json"), "{").unwrap();
    let (own, notices) = fixture.open();
    assert_eq!(own.hash, stream.hash);
    assert!(notices[0].contains("own/a.jsonl.tokens") && notices[0].contains("cannot be written"), "{notices:?}");
    assert!(fixture.open().1.is_empty());
}

#[test]
fn a_cache_on_read_only_media_is_read() {
    let fixture = Fixture::new();
    let (stream, _) = fixture.open();
    let folder = fixture.folder.path().join("a.jsonl.tokens");
    fs::remove_file(fixture.cache("lock")).unwrap();
    let writable = fs::metadata(&folder).unwrap().permissions();
    let mut read_only = writable.clone();
    read_only.set_readonly(true);
    fs::set_permissions(&folder, read_only).unwrap();
    let (again, notices) = fixture.open();
    let files = fs::read_dir(&folder).unwrap().count();
    fs::set_permissions(&folder, writable).unwrap();
    assert_eq!((again.hash, notices, files), (stream.hash, Vec::new(), 3), "nothing is written to read");
}

#[test]
fn two_writers_at_once_give_one_whole_cache() {
    let fixture = Fixture::new();
    let hashes: Vec<u64> = thread::scope(|scope| {
        let open: Vec<_> = (0..3).map(|_| scope.spawn(|| fixture.open())).collect();
        open.into_iter().map(|open| open.join().unwrap().0.hash).collect()
    });
    assert!(hashes.iter().all(|hash| *hash == hashes[0]));
    assert_eq!(fixture.files().len(), 4);
}
