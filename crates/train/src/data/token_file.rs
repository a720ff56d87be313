//! Token files: little-endian ids, with or without the header of llm.c.
//!
//! The header is 256 words of 32 bits: a magic number, a version, the number of tokens, and unused ones. The magic
//! number gives the type of the ids: u16 as llm.c writes them for GPT-2, u32 as for Llama 3. Without a header,
//! `data.token_type` gives it; by itself it is u16, and ids that are wider by all signs are refused.

use super::format;
use super::prelude::*;
use super::tokens::{Positioned, Width};
use crate::config::TokenType;

/// Magic number, version and type.
const HEADERS: [(u32, u32, Width); 2] = [(20_240_520, 1, Width::U16), (20_240_801, 7, Width::U32)];
const HEADER_BYTES: u64 = 1024;

/// The tokens of a file, of the type that is asked for. Only the header is read, and a few blocks of ids where the type
/// is not known.
pub(super) fn open(file: Positioned, asked: TokenType) -> Result<Tokens, DataError> {
    let path = file.path().to_path_buf();
    if file.bytes() == 0 {
        return Err(Problem::Empty.in_file(&path));
    }
    let words: [u8; 12] = if file.bytes() >= HEADER_BYTES { file.array(0)? } else { [0; 12] };
    let [magic, version, told] =
        [0, 4, 8].map(|at| u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]));
    let header = HEADERS.into_iter().find(|(of, ..)| *of == magic);
    let width_asked = match asked {
        TokenType::Auto => None,
        TokenType::U8 => Some(Width::U8),
        TokenType::U16 => Some(Width::U16),
        TokenType::U32 => Some(Width::U32),
        TokenType::I32 => Some(Width::I32),
        TokenType::U64 | TokenType::I64 => Some(Width::I64),
    };
    let (start, width) = match (header, width_asked) {
        (Some((.., width)), _) => (HEADER_BYTES, width),
        (None, width) => (0, width.unwrap_or(Width::U16)),
    };
    if let (Some((.., header)), Some(width)) = (header, width_asked)
        && header.bytes() != width.bytes()
    {
        let header = if header == Width::U16 { "u16" } else { "u32" };
        return Err(Problem::HeaderType { header, asked: asked.name() }.in_file(&path));
    }
    let bytes = file.bytes() - start;
    if let Some((_, valid, _)) = header.filter(|(_, valid, _)| *valid != version) {
        return Err(Problem::HeaderVersion { found: version, valid }.in_file(&path));
    }
    if !bytes.is_multiple_of(width.bytes()) {
        return Err(Problem::PartOfAnId { bytes, width: width.bytes() }.in_file(&path));
    }
    let count = bytes / width.bytes();
    if header.is_some() && u64::from(told) != count {
        return Err(Problem::HeaderCount { found: count, header: u64::from(told) }.in_file(&path));
    }
    if header.is_none() && asked == TokenType::Auto {
        check_content(&file)?;
    }
    Ok(Tokens::File { file, start, count, width })
}

/// Bytes by which the type of ids is recognised, at each of so many places.
const SEEN: u64 = 1 << 14;
const PLACES: u64 = 5;
/// No vocabulary has 16 times 65,536 ids: the upper half of an id of 32 bits is smaller than this.
const UPPER: u16 = 16;

/// Refuses a file without a header that is of another format, or whose ids are wider than 16 bits by all signs: of each
/// 2 or 4 values the upper ones are as small as the upper halves of ids are, and the others are not.
fn check_content(file: &Positioned) -> Result<(), DataError> {
    let length = SEEN.min(file.bytes() / 8 * 8);
    // Whole ids of 64 bits, spread evenly.
    let place = |at: u64| (u128::from(file.bytes() - length) * u128::from(at) / u128::from(PLACES - 1)) as u64 / 8 * 8;
    let (mut bytes, mut values) = (vec![0; length as usize], Vec::new());
    for at in 0..PLACES {
        file.read(place(at), &mut bytes)?;
        let foreign = if at == 0 { format::foreign_to_tokens(&bytes) } else { None };
        if let Some(foreign) = foreign {
            return Err(Problem::Foreign(foreign).in_file(file.path()));
        }
        values.extend(bytes.as_chunks().0.iter().map(|&value| u16::from_le_bytes(value)));
    }
    let largest = |nth: usize, of: usize| values.iter().skip(nth).step_by(of).copied().max().unwrap_or(0);
    let low = largest(0, 2);
    // A few ids prove nothing.
    if file.bytes() < 64 || low < UPPER || !file.bytes().is_multiple_of(4) {
        return Ok(());
    }
    let [second, third, fourth] = [1, 2, 3].map(|nth| largest(nth, 4));
    let (bits, sign) =
        if file.bytes().is_multiple_of(8) && third == 0 && fourth == 0 && second < UPPER && largest(0, 4) >= UPPER {
            (64, "of every 4 values of 16 bits, the last 2 are 0")
        } else if second.max(fourth) < UPPER {
            (32, "every second value of 16 bits is 0 or almost")
        } else {
            return Ok(());
        };
    Err(Problem::OtherWidth { bits, sign: sign.to_owned() }.in_file(file.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, header: &[u32], ids: &[u8]) -> Result<Vec<i32>, String> {
        parse_as(TokenType::Auto, name, header, ids)
    }

    fn parse_as(asked: TokenType, name: &str, header: &[u32], ids: &[u8]) -> Result<Vec<i32>, String> {
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(if header.is_empty() { 0 } else { HEADER_BYTES as usize }, 0);
        bytes.extend(ids);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let tokens =
            Positioned::open(&path).and_then(|file| open(file, asked)).and_then(|tokens| tokens.read(0..tokens.len()));
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
    fn ids_of_other_types_are_refused_or_read_as_is_asked() {
        let wide: Vec<u32> = (0..100).map(|id| id * 977 % 50_257).collect();
        let larger: Vec<u32> = (0..100).map(|id| id * 9973 % 128_256).collect();
        for ids in [&wide, &larger] {
            let as_ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
            let [four, eight]: [Vec<u8>; 2] =
                [u32s(ids), ids.iter().flat_map(|&id| u64::from(id).to_le_bytes()).collect()];
            let told = "looks like ids of 32 bits, not of 16: every second value of 16 bits is 0 or almost";
            assert_eq!(parse("a", &[], &four).unwrap_err(), told);
            let told = "looks like ids of 64 bits, not of 16: of every 4 values of 16 bits, the last 2 are 0";
            assert_eq!(parse("a", &[], &eight).unwrap_err(), told);
            for (asked, bytes) in
                [(TokenType::U32, &four), (TokenType::I32, &four), (TokenType::I64, &eight), (TokenType::U64, &eight)]
            {
                assert_eq!(parse_as(asked, "a", &[], bytes).unwrap(), as_ids);
            }
            assert_eq!(parse_as(TokenType::U16, "a", &[], &four).unwrap().len(), 200);
        }
        assert_eq!(parse_as(TokenType::U8, "a", &[], &[1, 200, 3]).unwrap(), [1, 200, 3]);
        // Ids of 16 bits, also where they are small, few, all the same, or 0 now and then.
        for ids in [
            vec![0; 500],
            [3, 0].repeat(200),
            vec![300, 0, 7, 5],
            (0..500).map(|id| id % 20).collect(),
            [500, 0, 0, 17].repeat(99),
        ] {
            assert_eq!(parse("a", &[], &u16s(&ids)).unwrap().len(), ids.len());
        }
        let header = parse_as(TokenType::U32, "a", &[20_240_520, 1, 1], &u16s(&[1])).unwrap_err();
        assert_eq!(header, "has an llm.c header that says u16, and data.token_type = \"u32\"");
    }

    #[test]
    fn what_is_no_tokens_is_refused_by_its_name() {
        let torch = [&b"PK\x03\x04"[..], &[0; 60]].concat();
        assert!(parse("a", &[], &torch).unwrap_err().starts_with("is a zip archive"));
        let text = b"Arma virumque cano, Troiae qui primus ab oris Italiam fato profugus.";
        assert_eq!(parse("a", &[], text).unwrap_err(), "is text, although its name ends in .bin");
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
