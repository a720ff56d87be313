use super::*;
use std::fs;

/// An index, byte by byte from the published format.
fn index(version: u64, dtype: u8, sizes: &[i32], pointers: &[i64], documents: &[i64]) -> Vec<u8> {
    let mut bytes = vec![b'M', b'M', b'I', b'D', b'I', b'D', b'X', 0, 0];
    bytes.extend(version.to_le_bytes());
    bytes.push(dtype);
    bytes.extend((sizes.len() as u64).to_le_bytes());
    bytes.extend((documents.len() as u64).to_le_bytes());
    bytes.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
    bytes.extend(pointers.iter().flat_map(|pointer| pointer.to_le_bytes()));
    bytes.extend(documents.iter().flat_map(|document| document.to_le_bytes()));
    bytes
}

/// Three documents of 2 + 1, 0 and 3 tokens.
fn sound() -> Vec<u8> {
    index(1, 8, &[2, 1, 3], &[0, 4, 6], &[0, 2, 2, 3])
}

const TOKENS: [u8; 12] = [5, 0, 6, 0, 7, 0, 8, 0, 9, 0, 0, 1];

fn opened(index: &[u8], tokens: &[u8]) -> Result<(Tokens, Index), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("a.idx"), index).unwrap();
    fs::write(path("a.bin"), tokens).unwrap();
    open(&path("a.idx"), &path("a.bin"))
}

#[test]
fn a_file_of_the_published_format_is_read() {
    let (tokens, index) = opened(&sound(), &TOKENS).unwrap();
    assert_eq!(tokens.read(0..6).unwrap(), [5, 6, 7, 8, 9, 256]);
    assert_eq!(tokens.read(2..4).unwrap(), [7, 8]);
    assert_eq!(index.documents(), 3);
    assert_eq!(index.starts(0..6).unwrap(), [0, 3]);
    assert!(index.starts(1..3).unwrap().is_empty());
    assert_eq!(index.starts(3..4).unwrap(), [3]);
}

#[test]
fn every_type_of_ids_is_read() {
    let ids: [i64; 3] = [1, 2, 100];
    for (code, bytes) in [
        (1, ids.iter().map(|&id| id as u8).collect::<Vec<_>>()),
        (2, ids.iter().map(|&id| id as u8).collect()),
        (3, ids.iter().flat_map(|&id| (id as i16).to_le_bytes()).collect()),
        (4, ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect()),
        (5, ids.iter().flat_map(|&id| id.to_le_bytes()).collect()),
        (8, ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect()),
    ] {
        let (tokens, _) = opened(&index(1, code, &[3], &[0], &[0, 1]), &bytes).unwrap();
        assert_eq!(tokens.read(0..3).unwrap(), [1, 2, 100], "type {code}");
    }
    let (tokens, _) = opened(&index(1, 4, &[1], &[0], &[0, 1]), &(-7i32).to_le_bytes()).unwrap();
    assert_eq!(tokens.read(0..1).unwrap_err().problem.to_string(), "token 0 is -7");
}

#[test]
fn modes_of_a_multimodal_dataset_may_follow() {
    assert!(opened(&[sound(), vec![0, 1, 0]].concat(), &TOKENS).is_ok());
}

#[test]
fn a_wrong_index_is_refused_with_the_place() {
    let mut magic = sound();
    magic[3] = b'X';
    let cut = sound()[..90].to_vec();
    for (index, problem) in [
        (b"MMIDIDX".to_vec(), "does not begin with the magic bytes of a Megatron index"),
        (magic, "does not begin with the magic bytes of a Megatron index"),
        (index(2, 8, &[6], &[0], &[0, 1]), "is a Megatron index of version 2"),
        (index(1, 6, &[6], &[0], &[0, 1]), "says that ids are of type 6"),
        (cut, "has 90 bytes: an index of 3 sequences and 4 document indices has 102"),
        (index(1, 8, &[2, -1, 5], &[0, 4, 2], &[0, 3]), "sequence 1 has -1 tokens"),
        (index(1, 8, &[2, 1, 3], &[2, 4, 6], &[0, 3]), "sequence 0 begins at byte 2, not at byte 0 of the tokens"),
        (index(1, 8, &[2, 2, 3], &[0, 4, 6], &[0, 3]), "sequence 1 ends at byte 8, not at byte 6 of the tokens"),
        (index(1, 8, &[2, 1, 4], &[0, 4, 6], &[0, 3]), "sequence 2 ends at byte 14, not at byte 12 of the tokens"),
        (index(1, 8, &[2, 1, 3], &[0, 4, 6], &[1, 3]), "document index 0 is 1: documents begin with sequence 0"),
        (
            index(1, 8, &[2, 1, 3], &[0, 4, 6], &[0, 2]),
            "document index 1 is 2: the last one is the number of sequences",
        ),
        (index(1, 8, &[2, 1, 3], &[0, 4, 6], &[0, 9, 3]), "document index 1 is 9: there is no such sequence"),
        (index(1, 8, &[2, 1, 3], &[0, 4, 6], &[]), "document index 0 is -1: documents begin with sequence 0"),
    ] {
        let error = opened(&index, &TOKENS).unwrap_err();
        assert_eq!(error.problem.to_string(), problem);
        assert!(error.path.ends_with("a.idx"), "{}", error.path.display());
    }
    // A number of sequences that overflows is no reason to panic.
    let mut huge = sound();
    huge[18..26].fill(0xff);
    assert!(opened(&huge, &TOKENS).unwrap_err().problem.to_string().starts_with("has 102 bytes: an index of 18446744"));
    let error = opened(&sound(), &TOKENS[..11]).unwrap_err();
    assert_eq!(error.problem.to_string(), "has 11 bytes of ids, of 2 bytes each");
}

#[test]
fn an_index_needs_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.idx");
    fs::write(&path, sound()).unwrap();
    let error = open(&path, &path.with_extension("bin")).unwrap_err();
    assert!(error.problem.to_string().ends_with("a.bin beside it"), "{error}");
}

#[test]
fn a_dataset_is_found_by_either_file_or_their_common_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for name in ["corpus.v1.idx", "corpus.v1.bin", "alone.bin"] {
        fs::write(path(name), []).unwrap();
    }
    let both = Some((path("corpus.v1.idx"), path("corpus.v1.bin")));
    for name in ["corpus.v1", "corpus.v1.bin", "corpus.v1.idx"] {
        assert_eq!(paths(&path(name)), both, "{name}");
    }
    assert_eq!(paths(&path("alone.bin")), None);
}

#[test]
fn what_is_written_is_the_published_format() {
    let folder = tempfile::tempdir().unwrap();
    let [idx, bin] = ["a.idx", "a.bin"].map(|name| folder.path().join(name));
    let mut writer = Writer::create(&idx, &bin, 1 << 16).unwrap();
    for (ids, ends) in [(&[5, 6][..], false), (&[7], true), (&[], false), (&[8, 9, 256], true)] {
        writer.add(ids).unwrap();
        if ends {
            writer.end_document().unwrap();
        }
    }
    writer.finish().unwrap();
    assert_eq!(fs::read(&bin).unwrap(), TOKENS);
    assert_eq!(fs::read(&idx).unwrap(), index(1, 8, &[2, 1, 0, 3], &[0, 4, 6, 6], &[0, 2, 4]));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    let mut writer = Writer::create(&idx, &bin, (1 << 16) + 1).unwrap();
    writer.add(&[1 << 16]).unwrap();
    writer.end_document().unwrap();
    writer.finish().unwrap();
    let (tokens, index) = open(&idx, &bin).unwrap();
    assert_eq!((tokens.read(0..1).unwrap(), index.documents()), (vec![1 << 16], 1));
}
