//! Equal work for packed documents: an order of tokens for each micro-batch, from where its documents begin.

use meshwork_tensor::op::Order;
use meshwork_tensor::{Error, Result};
use std::fmt::Debug;

/// Chooses the order in which the tokens of a micro-batch lie before ranks cut its sequences. The ranks of a world, and
/// all stages of a pipeline, have the same documents, and so the same order: it is data, and nothing is communicated.
pub trait Balance: Debug + Send + Sync {
    /// The number of chunks in an order for `ranks` ranks: a multiple of `ranks`.
    fn chunks(&self, ranks: usize) -> usize;

    /// The order of these chunks. `reads[t]` is the number of keys that token t reads, summed over the sequences of the
    /// micro-batch.
    ///
    /// # Errors
    /// Tokens that the chunks do not divide.
    fn order(&self, reads: &[u64], ranks: usize) -> Result<Order>;
}

/// Counts the keys that the queries of each chunk read, and gives each rank as many chunks with as equal a sum as it
/// finds: the heaviest first, each to the rank that has the least; then chunks of the fullest rank are swapped as long
/// as that helps. Neighbouring chunks stay together where the sums are equal to a hundredth nevertheless: longer runs
/// are fewer calls of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByDocument {
    /// Chunks of each rank, if fewer and longer ones do not have equal sums.
    pub chunks_of_rank: usize,
}

impl Default for ByDocument {
    /// Eight chunks a rank.
    fn default() -> Self {
        Self { chunks_of_rank: 8 }
    }
}

impl Balance for ByDocument {
    fn chunks(&self, ranks: usize) -> usize {
        ranks * self.chunks_of_rank.max(1)
    }

    fn order(&self, reads: &[u64], ranks: usize) -> Result<Order> {
        let (count, room) = (self.chunks(ranks), self.chunks_of_rank.max(1));
        if reads.is_empty() || !reads.len().is_multiple_of(count) {
            let problem = format!("{} tokens in {count} equal chunks", reads.len());
            return Err(Error::Shape { op: "balance", problem, shapes: Vec::new() });
        }
        let work: Vec<u64> = reads.chunks_exact(reads.len() / count).map(|chunk| chunk.iter().sum()).collect();
        // In the longest pieces with which the fullest rank has a hundredth more than the mean at most.
        let all = work.iter().map(|&of| u128::from(of)).sum::<u128>();
        for pieces in (1..=room).filter(|&pieces| room.is_multiple_of(pieces)) {
            let chunks = room / pieces;
            let of_pieces: Vec<u64> = work.chunks_exact(chunks).map(|piece| piece.iter().sum()).collect();
            let mut shares = shared_out(&of_pieces, ranks, pieces);
            let most = shares.iter().map(|(sum, _)| *sum).max().unwrap_or_default();
            if pieces < room && 100 * u128::from(most) * ranks as u128 > 101 * all {
                continue;
            }
            for (_, pieces) in &mut shares {
                pieces.sort_unstable(); // neighbours are one run
            }
            shares.sort_by_key(|(_, pieces)| pieces.first().copied());
            let pieces = shares.into_iter().flat_map(|(_, pieces)| pieces);
            return Order::new(pieces.flat_map(|piece| piece * chunks..(piece + 1) * chunks).collect());
        }
        Ok(Order::default())
    }
}

/// The sum of each rank and its pieces, of which it has `room`.
fn shared_out(work: &[u64], ranks: usize, room: usize) -> Vec<(u64, Vec<usize>)> {
    let mut heaviest: Vec<usize> = (0..work.len()).collect();
    heaviest.sort_by_key(|&piece| std::cmp::Reverse(work[piece]));
    let mut ranks: Vec<(u64, Vec<usize>)> = vec![(0, Vec::new()); ranks];
    for piece in heaviest {
        let free = ranks.iter_mut().filter(|(_, pieces)| pieces.len() < room);
        if let Some((sum, pieces)) = free.min_by_key(|(sum, _)| *sum) {
            *sum += work[piece];
            pieces.push(piece);
        }
    }
    while let Some((full, a, other, b)) = better(&ranks, work) {
        let (x, y) = (ranks[full].1[a], ranks[other].1[b]);
        (ranks[full].1[a], ranks[other].1[b]) = (y, x);
        ranks[full].0 = ranks[full].0 + work[y] - work[x];
        ranks[other].0 = ranks[other].0 + work[x] - work[y];
    }
    ranks
}

/// The swap of a chunk of the fullest rank with a chunk of another one that leaves the smallest larger sum of both.
fn better(ranks: &[(u64, Vec<usize>)], work: &[u64]) -> Option<(usize, usize, usize, usize)> {
    let full = (0..ranks.len()).max_by_key(|&rank| ranks[rank].0)?;
    let (most, held) = &ranks[full];
    let mut best: Option<(u64, (usize, usize, usize, usize))> = None;
    for (other, (sum, chunks)) in ranks.iter().enumerate().filter(|&(other, _)| other != full) {
        for (a, &x) in held.iter().enumerate() {
            for (b, &y) in chunks.iter().enumerate().filter(|&(_, &y)| work[y] < work[x]) {
                let larger = (most + work[y] - work[x]).max(sum + work[x] - work[y]);
                if larger < *most && best.is_none_or(|(least, _)| larger < least) {
                    best = Some((larger, (full, a, other, b)));
                }
            }
        }
    }
    best.map(|(_, swap)| swap)
}
