use super::*;
use crate::config::TextFormat;

fn reading() -> Reading<'static> {
    Reading {
        format: TextFormat::Auto,
        text_key: "text",
        skip_bad_lines: false,
        examples: None,
        pieces: Pieces::default(),
    }
}

/// The texts of a file of that name and content, and what is said of it.
fn read(name: &str, bytes: &[u8], reading: &Reading<'_>) -> Result<(Vec<String>, Vec<String>), String> {
    let folder = tempfile::tempdir().unwrap();
    let (path, mut found) = (folder.path().join(name), Vec::new());
    fs::write(&path, bytes).unwrap();
    let see = |piece: DocumentPiece| {
        assert!(piece.last);
        found.push(piece.text);
        Ok(())
    };
    let read = Texts::find(&path).unwrap().read(reading, &Tokenizer::BYTES, see);
    let told = |text: String| text.replace(&format!("{}/", folder.path().display()), "");
    match read {
        Ok(notices) => Ok((found, notices.into_iter().map(told).collect())),
        Err(error) => Err(told(error.to_string())),
    }
}

fn texts(name: &str, bytes: &[u8]) -> Result<Vec<String>, String> {
    read(name, bytes, &reading()).map(|(texts, _)| texts)
}

#[test]
fn json_gives_its_texts_whatever_the_name_of_the_file() {
    let two = b"{\"id\": 1, \"text\": \"a\\n\\u00fc\"}\r\n\n{\"text\":\"\"}\n {\"text\": \"b\"}";
    let array = b"[{\"id\": 1, \"text\": \"a\\n\\u00fc\"},\n \"\", \"b\"]";
    for name in ["a.jsonl", "a.json", "a.ndjson", "a.txt", "a"] {
        for bytes in [&two[..], array] {
            assert_eq!(texts(name, bytes).unwrap(), ["a\nü", "b"], "{name}");
            assert_eq!(texts(name, &[BYTE_ORDER_MARK, bytes].concat()).unwrap(), ["a\nü", "b"], "{name}");
        }
    }
    let as_text = Reading { format: TextFormat::Text, ..reading() };
    assert_eq!(read("a.jsonl", array, &as_text).unwrap().0, [std::str::from_utf8(array).unwrap()]);
    let key = Reading { text_key: "content", ..reading() };
    assert_eq!(read("a", b"{\"content\": \"c\", \"text\": \"t\"}", &key).unwrap().0, ["c"]);
    let lines = Reading { format: TextFormat::JsonLines, ..reading() };
    assert!(read("a.txt", b"plain", &lines).unwrap_err().contains("line 1 is no JSON object"));
}

#[test]
fn a_byte_order_mark_is_no_text() {
    assert_eq!(texts("a.txt", b"\xef\xbb\xbfArma").unwrap(), ["Arma"]);
    assert!(texts("a.txt", b"\xef\xbb\xbf").unwrap_err().contains("is empty"));
    assert!(texts("a.txt", b"\xef\xbb\xbfcaf\xe9!").unwrap_err().contains("is not UTF-8 from byte 6 on"));
}

#[test]
fn wrong_lines_are_named_once() {
    let object = "use one JSON object a line, such as {\"text\": \"Arma virumque cano\"}, or leave such lines out with \
                  data.skip_bad_lines = true";
    let field = "set data.text_key to the key of the text, or leave such documents out with data.skip_bad_lines = true";
    for (bytes, problem, valid) in [
        (&b"{\"text\": \"a\"}\n{\"txt\": \"b\"}"[..], "line 2 has no string \"text\": its strings are \"txt\"", field),
        (b"\n{\"text\": null}", "line 2 has no string \"text\": it is null", field),
        (b"{\"text\": 5}", "line 1 has no string \"text\": it is a number", field),
        (b"[\"a\"]\n[\"b\"]", "line 1 is no JSON object: it is an array", object),
        (b"{\"text\": \"a\"", "line 1 is no JSON object: EOF while parsing an object at column 12", object),
        (b"plain text", "line 1 is no JSON object: expected value at column 1", object),
    ] {
        assert_eq!(texts("a.jsonl", bytes).unwrap_err(), format!("a.jsonl: {problem}; {valid}"));
    }
    let error = texts("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"caf\xe9\"}").unwrap_err();
    assert!(error.starts_with("a.jsonl: is not UTF-8 from byte 27 on"), "{error}");
    for (bytes, problem) in [
        (
            &b"[{\"text\": \"a\"}, {\"txt\": \"b\"}]"[..],
            "element 1 has no string \"text\": its strings are \"txt\"; set",
        ),
        (b"[1, 2]", "element 0 has no string \"text\": it is a number; set"),
    ] {
        let error = texts("a.json", bytes).unwrap_err();
        assert!(error.starts_with(&format!("a.json: {problem}")), "{error}");
    }
    // What the first bytes cannot show.
    let broken = format!("[\"{}\",\n\"b\"\n\"c\"]", "a".repeat(HEAD));
    let error = texts("a.json", broken.as_bytes()).unwrap_err();
    assert!(
        error.starts_with("a.json: is no JSON array: expected `,` or `]` at line 3 column 1; use a complete"),
        "{error}"
    );
}

#[test]
fn bad_lines_are_left_out_where_that_is_asked_for_and_counted() {
    let skipping = Reading { skip_bad_lines: true, ..reading() };
    let lines = b"{\"text\": \"a\"}\n{\"text\": \n\xff\n{\"txt\": 1}\n{\"text\": \"b\"}\n{\"text\": \"c\"}\n{\"text\": \"d\"}\n";
    let (texts, notices) = read("a.jsonl", lines, &skipping).unwrap();
    assert_eq!(texts, ["a", "b", "c", "d"]);
    assert_eq!(
        notices,
        [
            "a.jsonl: 3 of 7 documents skipped; the first: a.jsonl line 2 is no JSON object: EOF while parsing a value at column 8"
        ]
    );
    let (texts, notices) = read("a.json", b"[{\"text\": \"a\"}, 5]", &skipping).unwrap();
    assert_eq!((texts.len(), notices.len()), (1, 1));
    // Nothing but bad lines is not a text without lines.
    assert!(read("a.jsonl", b"{\"txt\": \"b\"}\n", &skipping).unwrap_err().contains("line 1 has no string"));
}

#[test]
fn what_is_no_text_is_refused_by_its_name() {
    for (bytes, told) in [
        (&b"a\0b"[..], "has a NUL byte at byte 1: it is binary; use a UTF-8 text"),
        (b"\x1f\x8b\x08\0", "is compressed by gzip; unpack it"),
        (b"PAR1\x15\x04", "is a Parquet file; convert it to JSON lines"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer, not the file; fetch the file: git lfs pull",
        ),
        (b"{\n \"text\": \"a\"\n}", "is one JSON object over several lines; use JSON lines"),
        (b"", "is empty; use"),
    ] {
        for name in ["a.txt", "a"] {
            let error = texts(name, bytes).unwrap_err();
            assert!(error.starts_with(&format!("{name}: {told}")), "{error}");
        }
    }
}

#[test]
fn of_a_folder_what_is_skipped_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    write("README.md", b"about");
    write("a.parquet", b"PAR1\x15");
    write("b.parquet", b"PAR1\x15");
    write("c", b"?");
    write("d.txt", b"\x1f\x8b\x08");
    write("e.txt", b"a\0");
    write("f.ndjson", b"{\"text\": \"f\"}");
    let read = || {
        let mut found = Vec::new();
        let see = |piece: DocumentPiece| {
            found.push(piece.text);
            Ok(())
        };
        let told = Texts::find(folder.path()).unwrap().read(&reading(), &Tokenizer::BYTES, see);
        told.map(|told| (found, told)).map_err(|error| error.to_string())
    };
    let (found, told) = read().unwrap();
    assert_eq!(found, ["about", "f"]);
    let skipped =
        "5 of 7 files skipped (3 no extension of text: .parquet 2, none 1; 1 compressed by gzip; 1 not UTF-8)";
    assert_eq!(told, [format!("{}: {skipped}", folder.path().display())]);
    // A pointer stands for text that is to be learnt.
    write("g.jsonl", b"version https://git-lfs.github.com/spec/v1\n");
    assert!(read().unwrap_err().contains("g.jsonl: is a Git LFS pointer"));
}

#[test]
fn a_plain_file_is_one_document_in_pieces() {
    let reading = Reading { pieces: Pieces { bytes: 1000, margin: 16 }, ..reading() };
    let pieces = |bytes: &[u8]| {
        let mut pieces = Vec::new();
        let read = plain(Path::new("a"), bytes, &reading, &Tokenizer::BYTES, &mut |piece| {
            pieces.push(piece);
            Ok(())
        });
        read.map(|()| pieces).map_err(|error| error.to_string())
    };
    let text = "aüb\n\ncé d\n".repeat(500);
    let found = pieces(text.as_bytes()).unwrap();
    assert!(found.len() > 5);
    assert_eq!(found.iter().map(|piece| &*piece.text).collect::<String>(), text);
    assert!(found.iter().rev().skip(1).all(|piece| !piece.last) && found[found.len() - 1].last);
    let wrong = [text.as_bytes(), b"\xff"].concat();
    let error = pieces(&wrong).unwrap_err();
    assert!(error.starts_with(&format!("a: is not UTF-8 from byte {} on", text.len())), "{error}");
    let error = pieces(&[text.as_bytes(), b"\0"].concat()).unwrap_err();
    assert!(error.starts_with(&format!("a: has a NUL byte at byte {}", text.len())), "{error}");
}

#[test]
fn a_changed_file_has_another_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.md"));
    let print = || Texts::find(folder.path()).unwrap().fingerprint().unwrap();
    fs::write(&a, "one").unwrap();
    let one = print();
    assert_eq!(one, print());
    fs::write(&a, "owe").unwrap();
    let owe = print();
    assert_ne!(one, owe);
    fs::write(&b, "").unwrap();
    assert_ne!(owe, print());
    fs::remove_file(&b).unwrap();
    fs::rename(&a, folder.path().join("c.txt")).unwrap();
    assert_ne!(owe, print());
    // A sparse file is longer than what is hashed as a whole.
    File::create(&a).unwrap().set_len(1 << 40).unwrap();
    let sparse = print();
    File::options().write(true).open(&a).unwrap().set_len((1 << 40) + 1).unwrap();
    assert_ne!(sparse, print());
}
