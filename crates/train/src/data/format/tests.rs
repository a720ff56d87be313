use super::*;

fn named(name: &str, bytes: &[u8]) -> Format {
    recognise(Path::new(name), bytes, "text")
}

#[test]
fn what_is_no_text_is_known_by_its_bytes() {
    let tar = [&[b'a'; 257][..], b"ustar\x0000"].concat();
    let safetensors = [&10u64.to_le_bytes()[..], b"{\"a\":1}   "].concat();
    let utf16: Vec<u8> =
        "Quousque tandem abutere, Catilina, patientia?".encode_utf16().flat_map(u16::to_be_bytes).collect();
    for (bytes, name) in [
        (&b"PAR1\x15\x04"[..], "a Parquet file"),
        (b"ARROW1\0\0", "an Arrow file"),
        (b"\xff\xff\xff\xff\x10\0\0\0", "an Arrow stream"),
        (b"\x1f\x8b\x08\0", "compressed by gzip"),
        (b"\x28\xb5\x2f\xfd\x04", "compressed by zstd"),
        (b"BZh91AY&SY\x01", "compressed by bzip2"),
        (b"\xfd7zXZ\0\0", "compressed by xz"),
        (b"PK\x03\x04\x14", "a zip archive, as .zip, .npz, .docx and the files of torch.save are"),
        (&tar, "a tar archive"),
        (b"\x80\x02}q\0", "a pickle of Python, or other binary data"),
        (&safetensors, "a safetensors file"),
        (b"\x89HDF\r\n\x1a\n\0", "an HDF5 file"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"<!DOCTYPE html>\n<html>", "a web page"),
        (b"\xef\xbb\xbf<?xml version=\"1.0\"?>", "XML"),
        (b"\xff\xfeA\0", "UTF-16 text"),
        (b"\xfe\xff\0A", "UTF-16 text"),
        (b"\xff\xfe\0\0A\0\0\0", "UTF-32 text"),
        (&utf16, "UTF-16 text without a byte-order mark"),
        (b"\x93NUMPY\x01\0", "an array of NumPy"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer, not the file"),
    ] {
        // The name says nothing else: of a link, of a download, of standard input.
        for file in ["a.txt", "a.jsonl", "a"] {
            assert!(
                matches!(named(file, bytes), Format::Foreign(of) if of.name == name),
                "{name}: {:?}",
                named(file, bytes)
            );
        }
    }
}

#[test]
fn json_is_known_by_its_content_whatever_its_name() {
    let lines = b"{\"text\": \"a\"}\n\n{\"text\": \"b\"}\n";
    for name in ["a", "a.json", "a.txt", "a.ndjson", "stdin"] {
        assert_eq!(named(name, lines), Format::JsonLines, "{name}");
        assert_eq!(named(name, &[BYTE_ORDER_MARK, lines].concat()), Format::JsonLines, "{name}");
        assert_eq!(named(name, b" [\n{\"text\": \"a\"},\n{\"text\": \"b\"}]\n"), Format::JsonArray, "{name}");
        assert_eq!(named(name, b"[\"a\", \"b\"]"), Format::JsonArray, "{name}");
        assert_eq!(named(name, b"{\n  \"text\": \"a\"\n}\n"), Format::Foreign(DOCUMENT), "{name}");
    }
    // One damaged line is no reason to learn the markup of the others.
    assert_eq!(named("a", b"{\"text\": \"a\n{\"text\": \"b\"}\n{\"text\": \"c\"}\n"), Format::JsonLines);
    // Longer than what is looked at.
    let long = format!("{{\"text\": \"{}\"}}\n", "\u{fc}".repeat(HEAD));
    assert_eq!(named("a", &long.as_bytes()[..HEAD]), Format::JsonLines);
    assert_eq!(named("a", &format!("[{long}").as_bytes()[..HEAD]), Format::JsonArray);
    let pretty = format!("{{\n\"text\": \"{}\"}}\n", "a".repeat(HEAD));
    assert_eq!(named("a", &pretty.as_bytes()[..HEAD]), Format::Foreign(DOCUMENT));
}

#[test]
fn text_stays_text() {
    for text in [
        "",
        "\n\n",
        "Arma virumque cano",
        "{not json}",
        "{\n  int main() { return 0; }\n}",
        "[1] Introduction\n[2] Methods",
        "[Verse 1]\nla la",
        "\"Hello,\" he said.\n\"Good bye.\"\n",
        "Dear text, how are you?\nFine.",
        "text\nmore text, with commas",
        "ORCHESTRA and RIFF",
        "BZh, PAR1",
        "%PDF is a format",
    ] {
        assert_eq!(named("a", text.as_bytes()), Format::Text, "{text:?}");
        assert_eq!(named("a.txt", text.as_bytes()), Format::Text, "{text:?}");
    }
    // An extension decides where the content is open.
    assert_eq!(named("a.jsonl", b"plain"), Format::JsonLines);
    assert_eq!(named("a.csv", b"plain"), Format::Foreign(CSV));
}

#[test]
fn a_table_is_known_by_the_names_of_its_columns() {
    assert_eq!(named("a", b"id,text\n1,hello\n"), Format::Foreign(CSV));
    assert_eq!(named("a", b"\"text\",\"label\"\r\n\"hello\",1\r\n"), Format::Foreign(CSV));
    assert_eq!(named("a", b"label\ttext\n1\thello\n"), Format::Foreign(TSV));
}

#[test]
fn a_token_file_may_begin_with_any_two_ids() {
    let ids = |ids: &[u16]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    assert_eq!(foreign_to_tokens(&ids(&[0x8b1f, 0x0008, 3, 4])), None);
    assert_eq!(foreign_to_tokens(&ids(&[0xfeff, 1, 2])), None);
    assert_eq!(foreign_to_tokens(&ids(&[65535; 100])), None);
    assert_eq!(foreign_to_tokens(b"PK\x03\x04torch").unwrap().name, MAGIC[14].2.name);
    assert_eq!(foreign_to_tokens(&b"Arma virumque cano ".repeat(9)), Some(TEXT_IN_BIN));
}
