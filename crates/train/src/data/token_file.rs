//! Token files: little-endian u16 ids, with or without the header of llm.c.

/// First word of an llm.c header.
const MAGIC: u32 = 20_240_520;
/// An llm.c header is 256 words of 32 bits: magic, version, number of tokens, and unused ones.
const HEADER_BYTES: usize = 1024;

/// Reads the ids of a token file. On refusal: the problem, and what would be valid.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<u32>, (String, String)> {
    let word = |index: usize| {
        let word = bytes.get(4 * index..4 * index + 4)?;
        word.try_into().ok().map(u32::from_le_bytes)
    };
    if !bytes.len().is_multiple_of(2) {
        return Err((
            format!("has {} bytes, an odd number: ids take 2 bytes each", bytes.len()),
            "use a file of little-endian u16 token ids".to_string(),
        ));
    }
    let header = bytes.len() >= HEADER_BYTES && word(0) == Some(MAGIC);
    let body = if header { &bytes[HEADER_BYTES..] } else { bytes };
    let count = body.len() / 2;
    if header && word(1) != Some(1) {
        return Err((
            format!("has an llm.c header of version {}", word(1).unwrap_or(0)),
            "use version 1 (u16 token ids)".to_string(),
        ));
    }
    if header && word(2).map(|told| told as usize) != Some(count) {
        return Err((
            format!("has {count} tokens, but its header says {}", word(2).unwrap_or(0)),
            "use a complete file".to_string(),
        ));
    }
    Ok(body.chunks_exact(2).map(|id| u32::from(u16::from_le_bytes([id[0], id[1]]))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &[u32], ids: &[u16]) -> Vec<u8> {
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(if header.is_empty() { 0 } else { HEADER_BYTES }, 0);
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes
    }

    #[test]
    fn ids_are_read_with_and_without_a_header() {
        let ids = [1, 0x0203, 65535];
        assert_eq!(parse(&file(&[], &ids)).unwrap(), [1, 0x0203, 65535]);
        assert_eq!(parse(&file(&[MAGIC, 1, 3], &ids)).unwrap(), [1, 0x0203, 65535]);
        // Long and without the magic word: all ids.
        assert_eq!(parse(&file(&[], &[7; 600])).unwrap().len(), 600);
    }

    #[test]
    fn broken_files_are_refused() {
        let problem = |bytes: &[u8]| parse(bytes).unwrap_err().0;
        assert_eq!(problem(&[1, 2, 3]), "has 3 bytes, an odd number: ids take 2 bytes each");
        assert_eq!(problem(&file(&[MAGIC, 1, 4], &[1, 2, 3])), "has 3 tokens, but its header says 4");
        assert_eq!(problem(&file(&[MAGIC, 7, 3], &[1, 2, 3])), "has an llm.c header of version 7");
    }
}
