//! Documents packed into a sequence. If tokens attend only to their own document, each document is a separate sequence:
//! tiles between documents are not computed, and the bits of a document do not depend on its place or its neighbours.

use meshwork_tensor::kernel::Reach;
use std::ops::Range;
use std::slice;

/// Consecutive tokens of a sequence with consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Document {
    /// The first of them.
    pub(super) first: usize,
    /// Their number.
    pub(super) len: usize,
    /// The position of the first of them.
    pub(super) position: usize,
}

impl Document {
    /// Its tokens.
    pub(super) fn range(&self) -> Range<usize> {
        self.first..self.first + self.len
    }

    /// Those of its tokens that are among these.
    pub(super) fn among(&self, tokens: &Range<usize>) -> Option<Self> {
        let Range { start, end } = self.range();
        let (first, end) = (start.max(tokens.start), end.min(tokens.end));
        (first < end).then(|| Self { first, len: end - first, position: self.position + first - start })
    }
}

/// The documents of each sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    documents: Vec<Document>,
    /// The first document of each sample, then the total number.
    of_sample: Vec<usize>,
    /// Whether tokens attend only to their own document. Rotary embeddings follow the positions in either case.
    apart: bool,
}

/// A position that is neither its predecessor plus one nor the begin of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misplaced {
    /// The sample.
    pub sample: usize,
    /// The index in the sample.
    pub place: usize,
    /// The position.
    pub position: i32,
}

impl Packing {
    /// Builds the packing from the position of each token in its document, `[samples, seq]`: 0 begins a document, and
    /// each other position is its predecessor plus one. A sample may begin in the middle of a document, at any position
    /// below `seq`.
    pub fn new(positions: &[i32], [samples, seq]: [usize; 2], apart: bool) -> Result<Self, Misplaced> {
        let (mut documents, mut of_sample) = (Vec::<Document>::new(), vec![0]);
        for sample in 0..samples {
            for (place, &position) in positions[sample * seq..][..seq].iter().enumerate() {
                let refuse = Misplaced { sample, place, position };
                let at = usize::try_from(position).map_err(|_| refuse)?;
                match documents.last_mut().filter(|_| place > 0) {
                    Some(last) if at > 0 => {
                        if at != last.position + last.len {
                            return Err(refuse);
                        }
                        last.len += 1;
                    }
                    _ => documents.push(Document { first: place, len: 1, position: at }),
                }
                if at >= seq {
                    return Err(refuse);
                }
            }
            of_sample.push(documents.len());
        }
        Ok(Self { documents, of_sample, apart })
    }

    pub(super) fn samples(&self) -> usize {
        self.of_sample.len() - 1
    }

    fn documents(&self, sample: usize) -> &[Document] {
        &self.documents[self.of_sample[sample]..self.of_sample[sample + 1]]
    }

    /// The largest position plus one.
    pub(super) fn positions(&self) -> usize {
        self.documents.iter().map(|document| document.position + document.len).max().unwrap_or(0)
    }
}

/// The number of (query, key) pairs that the masks keep in one head, summed over the samples. `queries` and `keys` are
/// ranges of tokens.
pub fn pairs(
    samples: usize,
    packing: Option<&Packing>,
    [queries, keys]: [Range<usize>; 2],
    reach: Reach,
    lengths: Option<&[usize]>,
) -> u64 {
    let all = Document { first: 0, len: queries.end.max(keys.end), position: 0 };
    let of_sample = |sample: usize| {
        let end = lengths.map_or(keys.end, |lengths| lengths[sample].min(keys.end));
        let own = attending(packing, sample, &all).iter().filter_map(|document| {
            let keys = document.among(&(keys.start..end))?;
            Some(reach.pairs(document.among(&queries)?.range(), keys.range()))
        });
        own.sum::<u64>()
    };
    (0..samples).map(of_sample).sum()
}

/// The parts of a sample that attend to themselves; `whole` if its tokens see all documents.
pub(super) fn attending<'a>(packing: Option<&'a Packing>, sample: usize, whole: &'a Document) -> &'a [Document] {
    packing.filter(|packing| packing.apart).map_or(slice::from_ref(whole), |packing| packing.documents(sample))
}

/// The documents among the tokens of such a part.
pub(super) fn within<'a>(
    packing: Option<&'a Packing>,
    sample: usize,
    part: &'a Document,
) -> impl Iterator<Item = Document> + 'a {
    let all =
        packing.filter(|packing| !packing.apart).map_or(slice::from_ref(part), |packing| packing.documents(sample));
    all.iter().filter_map(|document| document.among(&part.range()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_begin_at_position_zero_and_with_a_sample() {
        let packing = Packing::new(&[2, 3, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5], [2, 6], true).unwrap();
        let of = |sample| -> Vec<[usize; 3]> {
            packing.documents(sample).iter().map(|d| [d.first, d.len, d.position]).collect()
        };
        assert_eq!(of(0), [[0, 2, 2], [2, 3, 0], [5, 1, 0]]);
        assert_eq!(of(1), [[0, 6, 0]]);
        let seen = |packing: &Packing, queries, keys, window| {
            pairs(2, Some(packing), [queries, keys], Reach { ahead: 0, window }, None)
        };
        assert_eq!((packing.samples(), packing.positions(), seen(&packing, 0..6, 0..6, None)), (2, 6, 3 + 6 + 1 + 21));
        assert_eq!(seen(&packing, 3..6, 0..6, None), (2 + 3 + 1) + (4 + 5 + 6));
        assert_eq!(seen(&packing, 0..3, 0..6, None), (1 + 2 + 1) + (1 + 2 + 3));
        // The last three queries over keys before them: two of the second document, and all of the other sample.
        assert_eq!(seen(&packing, 3..6, 0..3, None), (1 + 1) + 3 * 3);
        let open = Packing { apart: false, ..packing.clone() };
        assert_eq!([seen(&open, 0..6, 0..6, None), seen(&open, 3..5, 0..6, None)], [2 * 21, 2 * (4 + 5)]);
        assert_eq!([seen(&packing, 0..6, 0..6, Some(2)), seen(&open, 3..5, 0..6, Some(2))], [(3 + 5 + 1) + 11, 2 * 4]);
        // In both directions, of all documents and of the first keys of each sample.
        let all = Reach { ahead: 6, window: None };
        let seen = |lengths| pairs(2, Some(&packing), [0..6, 0..6], all, lengths);
        assert_eq!([seen(None), seen(Some(&[3, 0]))], [(4 + 9 + 1) + 36, 4 + 3]);
        assert_eq!(pairs(2, None, [0..6, 0..6], Reach { ahead: 1, window: Some(3) }, Some(&[2, 6])), (2 + 2 + 1) + 16);
    }

    #[test]
    fn positions_that_do_not_follow_are_refused() {
        for (positions, place, position) in
            [([0, 2, 3], 1, 2), ([0, 1, 1], 2, 1), ([0, 1, -1], 2, -1), ([3, 4, 5], 0, 3), ([2, 3, 0], 1, 3)]
        {
            let refused = Packing::new(&[[0, 1, 2], positions].concat(), [2, 3], true);
            assert_eq!(refused, Err(Misplaced { sample: 1, place, position }));
        }
    }
}
