//! Token files: little-endian ids, with or without the header of llm.c.
//!
//! The header is 256 words of 32 bits: a magic number, a version, the number of tokens, and unused ones. The magic number gives the
//! type of the ids: u16 as llm.c writes them for GPT-2, u32 as for Llama 3. Without a header, ids are u16.

use super::error::{DataError, Problem};
use super::tokens::{Positioned, Tokens, Width};

/// Magic number, version and type.
const HEADERS: [(u32, u32, Width); 2] = [(20_240_520, 1, Width::U16), (20_240_801, 7, Width::U32)];
const HEADER_BYTES: u64 = 1024;

/// The tokens of a file. Only the header is read.
pub(super) fn open(file: Positioned) -> Result<Tokens, DataError> {
    let path = file.path().to_path_buf();
    if file.bytes() == 0 {
        return Err(Problem::Empty.of(&path));
    }
    let words: [u8; 12] = if file.bytes() >= HEADER_BYTES { file.array(0)? } else { [0; 12] };
    let [magic, version, told] =
        [0, 4, 8].map(|at| u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]));
    let header = HEADERS.into_iter().find(|(of, ..)| *of == magic);
    let (start, width) = header.map_or((0, Width::U16), |(.., width)| (HEADER_BYTES, width));
    let bytes = file.bytes() - start;
    if let Some((_, valid, _)) = header.filter(|(_, valid, _)| *valid != version) {
        return Err(Problem::HeaderVersion { found: version, valid }.of(&path));
    }
    if !bytes.is_multiple_of(width.bytes()) {
        return Err(Problem::PartOfAnId { bytes, width: width.bytes() }.of(&path));
    }
    let count = bytes / width.bytes();
    if header.is_some() && u64::from(told) != count {
        return Err(Problem::HeaderCount { found: count, header: u64::from(told) }.of(&path));
    }
    Ok(Tokens::File { file, start, count, width })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, header: &[u32], ids: &[u8]) -> Result<Vec<i32>, String> {
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(if header.is_empty() { 0 } else { HEADER_BYTES as usize }, 0);
        bytes.extend(ids);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let tokens = Positioned::open(&path).and_then(open).and_then(|tokens| tokens.read(0..tokens.len()));
        tokens.map_err(|error| error.problem.to_string())
    }

    fn u16s(ids: &[u16]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    fn u32s(ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }

    #[test]
    fn ids_are_read_with_and_without_a_header() {
        let ids = u16s(&[1, 0x0203, 65535]);
        assert_eq!(parse("a", &[], &ids).unwrap(), [1, 0x0203, 65535]);
        assert_eq!(parse("a", &[20_240_520, 1, 3], &ids).unwrap(), [1, 0x0203, 65535]);
        assert_eq!(parse("a", &[20_240_801, 7, 2], &u32s(&[128_000, 5])).unwrap(), [128_000, 5]);
        // Long and without the magic word: all ids.
        assert_eq!(parse("a", &[], &u16s(&[7; 600])).unwrap().len(), 600);
    }

    #[test]
    fn broken_files_are_refused() {
        let problem = |header: &[u32], ids: &[u8]| parse("a", header, ids).unwrap_err();
        assert_eq!(problem(&[], &[1, 2, 3]), "has 3 bytes of ids, of 2 bytes each");
        assert_eq!(problem(&[20_240_801, 7, 1], &[1, 2, 3, 4, 5, 6]), "has 6 bytes of ids, of 4 bytes each");
        assert_eq!(problem(&[20_240_520, 1, 4], &u16s(&[1, 2, 3])), "has 3 tokens, but its header says 4");
        assert_eq!(problem(&[20_240_520, 7, 3], &u16s(&[1, 2, 3])), "has an llm.c header of version 7");
        assert_eq!(problem(&[20_240_801, 1, 3], &u32s(&[1, 2, 3])), "has an llm.c header of version 1");
        assert_eq!(problem(&[20_240_801, 7, 2], &u32s(&[1, 1 << 31])), "token 1 is 2147483648");
        assert_eq!(problem(&[], &[]), "is empty");
    }
}
