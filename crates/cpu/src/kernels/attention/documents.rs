//! Documents packed into a sequence. If tokens attend only to their own document, each document is a separate sequence:
//! tiles between documents are not computed, and the bits of a document do not depend on its place or its neighbours.

use meshwork_tensor::kernel::seen_pairs;
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

    /// Pairs of one of these queries and one of these keys that count in one head, over all samples.
    pub fn pairs(&self, queries: Range<usize>, keys: Range<usize>, window: Option<usize>) -> u64 {
        if !self.apart {
            return self.samples() as u64 * seen_pairs(queries, keys, window);
        }
        let own = self.documents.iter().filter_map(|document| {
            let among = |tokens| document.among(tokens).map(|own| own.range());
            Some(seen_pairs(among(&queries)?, among(&keys)?, window))
        });
        own.sum()
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
        assert_eq!((packing.samples(), packing.positions(), packing.pairs(0..6, 0..6, None)), (2, 6, 3 + 6 + 1 + 21));
        assert_eq!(packing.pairs(3..6, 0..6, None), (2 + 3 + 1) + (4 + 5 + 6));
        assert_eq!(packing.pairs(0..3, 0..6, None), (1 + 2 + 1) + (1 + 2 + 3));
        // The last three queries over keys before them: two of the second document, and all of the other sample.
        assert_eq!(packing.pairs(3..6, 0..3, None), (1 + 1) + 3 * 3);
        let open = Packing { apart: false, ..packing.clone() };
        assert_eq!([open.pairs(0..6, 0..6, None), open.pairs(3..5, 0..6, None)], [2 * 21, 2 * (4 + 5)]);
        assert_eq!([packing.pairs(0..6, 0..6, Some(2)), open.pairs(3..5, 0..6, Some(2))], [(3 + 5 + 1) + 11, 2 * 4]);
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
