//! Where documents begin in a stream.

use super::indexed::Index;
use super::prelude::*;

/// The marks of documents in a stream.
#[derive(Clone, Debug)]
pub(crate) enum Documents {
    /// Nothing.
    Unmarked,
    /// This id, with which each document ends.
    EndOfText(i32),
    /// The first token of each, ascending.
    Starts(Arc<[u64]>),
    Indexed(Index),
}

impl Documents {
    /// The tokens with which documents begin, in a window that holds `tokens`, but for its first token.
    pub fn starts(&self, window: Range<u64>, tokens: &[i32]) -> Result<Vec<u64>, DataError> {
        let inside = window.start + 1..window.end;
        Ok(match self {
            Self::Unmarked => Vec::new(),
            Self::EndOfText(id) => inside.zip(tokens).filter(|(_, before)| *before == id).map(|(at, _)| at).collect(),
            Self::Starts(starts) => {
                let first = starts.partition_point(|&start| start < inside.start);
                starts[first..].iter().copied().take_while(|&start| start < inside.end).collect()
            }
            Self::Indexed(index) => index.starts(inside)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_places_mark_the_same_documents() {
        // Documents of 3, 1 and 2 tokens, each with its end of text 0.
        let tokens = [7, 8, 0, 0, 9, 0];
        let by_id = Documents::EndOfText(0);
        let by_place = Documents::Starts([0, 3, 4].into());
        for (start, end, starts) in
            [(0, 6, &[3, 4][..]), (3, 6, &[4]), (2, 4, &[3]), (4, 6, &[]), (0, 3, &[]), (5, 6, &[])]
        {
            for documents in [&by_id, &by_place] {
                let found = documents.starts(start..end, &tokens[start as usize..end as usize]).unwrap();
                assert_eq!(found, starts, "{start}..{end} by {documents:?}");
            }
        }
        assert!(Documents::Unmarked.starts(0..6, &tokens).unwrap().is_empty());
    }
}
