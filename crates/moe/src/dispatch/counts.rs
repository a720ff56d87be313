//! The counts that the host reads: of this rank's choices, and as announced by other ranks.

use super::Chosen;
use meshwork_core::{Axes, Buffer, DType, Group};
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::{Device, Result, Tape};
use std::ops::Range;

/// Counts for every sample: rows for each expert, and tokens for each rank.
pub(super) struct Counts {
    num_experts: usize,
    num_ranks: usize,
    /// `[samples, experts]`
    pub experts: Vec<usize>,
    /// `[samples, ranks]`
    pub ranks: Vec<usize>,
}

impl Counts {
    /// Those of `[samples, ranks]`, where this rank is number `rank`.
    pub fn read(
        device: &dyn Device,
        chosen: &Chosen,
        once: &Buffer,
        [samples, ranks, rank]: [usize; 3],
    ) -> Result<Self> {
        let (permutation, layout) = (device.permutation()?, device.layout()?);
        let Chosen { num_experts, capacity, top_k, .. } = *chosen;
        let experts = permutation.counts(chosen.experts.buffer(), samples, 0..num_experts)?;
        let tokens = permutation.counts(once, samples, 0..ranks)?;
        // One download, because the host waits for each download.
        let mut both = device.alloc(DType::I32, experts.count() + tokens.count())?;
        layout.copy_into(&experts, 0..experts.count(), &mut both, 0)?;
        layout.copy_into(&tokens, 0..tokens.count(), &mut both, experts.count())?;
        let both = device.download(&both)?;
        let mut numbers = both.as_slice::<i32>()?.iter().map(|&count| count as usize);
        let experts = numbers.by_ref().take(samples * num_experts).collect();
        let read = Self { num_experts, num_ranks: ranks, experts, ranks: numbers.collect() };
        if device.has_values() {
            return Ok(read);
        }
        let (seq, held) = (chosen.experts.shape()[1], num_experts / ranks);
        let (experts, tokens): (Vec<usize>, _) = match device.takes_all().then_some(rank) {
            None => (even(seq * top_k, num_experts).collect(), vec![spread(seq, top_k, num_experts, held); ranks]),
            Some(rank) => {
                let [here, there] = [top_k.min(held), top_k.saturating_sub(held)];
                let others = num_experts - held;
                let mut experts: Vec<usize> = even(seq * there, others).collect();
                experts.splice(rank * held..rank * held, even(seq * here, held));
                let mut tokens: Vec<usize> = even(seq * there.min(ranks - 1), ranks - 1).collect();
                tokens.insert(rank, seq);
                (experts, tokens)
            }
        };
        let taken = |count: usize| capacity.map_or(count, |capacity| count.min(capacity));
        let experts: Vec<usize> = experts.into_iter().map(taken).collect();
        Ok(Self { experts: experts.repeat(samples), ranks: tokens.repeat(samples), ..read })
    }

    /// The counts of some samples.
    pub fn of_samples(&self, samples: &Range<usize>) -> Self {
        let part = |counts: &[usize], each: usize| counts[samples.start * each..samples.end * each].to_vec();
        Self { experts: part(&self.experts, self.num_experts), ranks: part(&self.ranks, self.num_ranks), ..*self }
    }

    /// The rows of each sample, for every expert.
    pub fn by_expert(&self) -> Vec<Vec<usize>> {
        (0..self.num_experts)
            .map(|expert| self.experts.iter().skip(expert).step_by(self.num_experts).copied().collect())
            .collect()
    }

    /// Tokens for each rank.
    pub fn tokens_to_ranks(&self) -> Vec<usize> {
        (0..self.num_ranks).map(|rank| self.ranks.iter().skip(rank).step_by(self.num_ranks).sum()).collect()
    }

    /// Rows for each rank's experts.
    pub fn rows_of_ranks(&self) -> Vec<usize> {
        let held = self.num_experts / self.num_ranks;
        let of = |rank: usize| self.experts.chunks(self.num_experts).flat_map(|row| &row[rank * held..][..held]).sum();
        (0..self.num_ranks).map(of).collect()
    }
}

/// `count` split as evenly as possible into `parts` parts, the larger ones first.
fn even(count: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |part| count / parts + usize::from(part < count % parts))
}

/// The mean number, of `tokens` tokens that each choose k of `experts` experts, with at least one expert among `held`
/// of them: a token has none there with probability `C(experts - held, k) / C(experts, k)`.
fn spread(tokens: usize, k: usize, experts: usize, held: usize) -> usize {
    let none: f64 = (0..k).map(|i| (experts - held).saturating_sub(i) as f64 / (experts - i) as f64).product();
    (tokens as f64 * (1.0 - none)).round() as usize
}

/// The announcements of all ranks to this one: numbers of tokens and rows for its experts.
pub(super) struct Announced {
    /// The first sample of each rank.
    first: Vec<u64>,
    /// Ranks one after the other that have slices of the same samples.
    slices: usize,
    /// Samples of each rank.
    samples: usize,
    /// Experts on this rank.
    held: usize,
    /// `[ranks, samples]`
    tokens: Vec<usize>,
    /// `[ranks, samples, experts here]`
    rows: Vec<usize>,
}

impl Announced {
    pub fn exchange(
        tape: &Tape,
        device: &dyn Device,
        group: &Group,
        counts: &Counts,
        [samples, held, slices]: [usize; 3],
    ) -> Result<Self> {
        let (ranks, me, experts) = (group.size(), group.rank(), held * group.size());
        let first = tape.first_sample();
        // For each rank: the index of the first sample; then, for every sample, the tokens and the rows of each expert.
        let size = 1 + samples * (1 + held);
        let mut message = Vec::with_capacity(ranks * size);
        for rank in 0..ranks {
            message.push(first as i32);
            for sample in 0..samples {
                message.push(counts.ranks[sample * ranks + rank] as i32);
                let rows = &counts.experts[sample * experts + rank * held..][..held];
                message.extend(rows.iter().map(|&count| count as i32));
            }
        }
        let each = vec![size; ranks];
        let room = device.alloc(DType::I32, ranks * size)?;
        let received = group.all_to_all(device.upload(&Buffer::from_vec(message.clone()))?, room, &each, &each)?;
        let received = device.download(&received)?;
        // Without values, every rank is assumed to announce, for its own samples, the same as this rank announces to
        // itself.
        let apart = match tape.rank_samples() {
            0 => samples as u64,
            apart => apart,
        };
        let own = message[me * size..][..size].repeat(ranks);
        let read = if device.has_values() { received.as_slice::<i32>()? } else { &own };
        let mut of = Self { first: Vec::new(), slices, samples, held, tokens: Vec::new(), rows: Vec::new() };
        for (rank, announced) in read.chunks_exact(size).enumerate() {
            of.first.push(match device.has_values() {
                true => announced[0] as u64,
                false => (first + (rank / slices) as u64 * apart).saturating_sub((me / slices) as u64 * apart),
            });
            let of_samples = announced[1..].chunks_exact(1 + held);
            of.tokens.extend(of_samples.clone().map(|of| of[0] as usize));
            of.rows.extend(of_samples.flat_map(|of| of[1..].iter().map(|&count| count as usize)));
        }
        Ok(of)
    }

    /// The announcements for these samples of each rank.
    pub fn of_samples(&self, samples: &Range<usize>) -> Self {
        let part = |counts: &[usize], each: usize| -> Vec<usize> {
            let of_ranks = counts.chunks_exact(self.samples * each);
            of_ranks.flat_map(|of| &of[samples.start * each..samples.end * each]).copied().collect()
        };
        Self {
            first: self.first.iter().map(|first| first + samples.start as u64).collect(),
            slices: self.slices,
            samples: samples.len(),
            held: self.held,
            tokens: part(&self.tokens, 1),
            rows: part(&self.rows, self.held),
        }
    }

    /// The rows of each expert: ranks have consecutive samples, so the order of ranks is the order of samples. Of one
    /// sample the slices that ranks have follow each other.
    pub fn groups(&self, axes: Axes) -> RowGroups {
        let joined = if self.samples == 1 { self.slices } else { 1 };
        let of = |expert| {
            let rows: Vec<usize> = self.rows.iter().skip(expert).step_by(self.held).copied().collect();
            rows.chunks(joined).map(|slices| slices.iter().sum()).collect()
        };
        let runs = self.first.iter().step_by(joined).map(|&first| first..first + self.samples as u64).collect();
        RowGroups::new(axes, runs, (0..self.held).map(of).collect())
    }

    /// Tokens from each rank.
    pub fn tokens_by_rank(&self) -> Vec<usize> {
        self.tokens.chunks(self.samples).map(|tokens| tokens.iter().sum()).collect()
    }

    /// Rows of the tokens from each rank.
    pub fn rows_by_rank(&self) -> Vec<usize> {
        self.rows.chunks(self.samples * self.held).map(|rows| rows.iter().sum()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_counts_and_the_mean_of_all_choices() {
        assert!(even(10, 4).eq([3, 3, 2, 2]));
        assert_eq!(spread(100, 2, 8, 8), 100, "one rank is sent every token once");
        assert_eq!(spread(100, 1, 8, 2), 25);
        // Of the 28 pairs of 8 experts, 15 lie among the 6 experts of other ranks.
        assert_eq!(spread(2800, 2, 8, 2), 1300);
        assert_eq!(spread(100, 3, 4, 2), 100, "some expert of three is always here");
    }
}
