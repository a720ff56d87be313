//! Which method costs the least time: sends the fewest bytes that computation does not hide, and shares out the work.

use crate::pass::{sees, steps};
use crate::{Method, parts_of_heads};
use meshwork_tensor::kernel::seen_pairs;

/// FLOPs of attention in the time in which one byte goes to another rank: about those of an H100 with NVLink (400
/// TFLOP/s, 450 GB/s).
const FLOPS_PER_BYTE: f64 = 1000.0;

/// The sizes of an attention whose sequence ranks cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Ranks that cut it.
    pub cp: usize,
    /// Heads of queries on each rank before the exchange.
    pub heads: usize,
    /// Heads of keys and values on each: all of them where there are fewer than ranks of tp.
    pub kv_heads: usize,
    /// Heads of queries that share those of keys and values.
    pub group: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Bytes of an element.
    pub bytes: usize,
    /// Keys that a query sees at most, if there is a sliding window.
    pub window: Option<usize>,
    /// Whether tokens lie in zigzag order where the method takes any order, and not in the order of the sequence.
    pub zigzag: bool,
    /// Whether tokens see their own document alone. Its length is not known before the data are, and no work counts.
    pub documents: bool,
}

/// Bytes that each rank sends for one sequence and layer, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// All of them.
    pub all: f64,
    /// As many as do not travel while attention computes.
    pub exposed: f64,
    /// As many as could travel while the fullest rank computes what it has more than the mean.
    pub idle: f64,
}

impl Sent {
    /// What [`Sizes::best`] compares.
    pub fn cost(&self) -> f64 {
        self.exposed + self.idle
    }
}

/// How often tokens at the places of a ring see each other.
struct Seen {
    /// Pairs of a query and a key, of the mean place and of the fullest.
    mean: f64,
    most: f64,
    /// Those of the mean place in all steps but the last.
    early: f64,
    /// Steps in which a block is read.
    steps: usize,
}

impl Sizes {
    /// The methods for which the heads fit.
    pub fn methods(&self) -> Vec<Method> {
        let parts: Vec<usize> = self.parts().collect();
        let all_to_all = parts.contains(&self.cp).then_some(Method::AllToAll);
        let between = parts.iter().rev().filter(|&&parts| parts > 1 && parts < self.cp);
        let hybrids = between.map(|parts| Method::Hybrid { ring_degree: self.cp / parts });
        all_to_all.into_iter().chain([Method::AllGather, Method::Ring]).chain(hybrids).collect()
    }

    /// The numbers of ranks that may share out the heads, from 1 on.
    pub fn parts(&self) -> impl DoubleEndedIterator<Item = usize> {
        let cp = self.cp.max(1);
        parts_of_heads(self.heads, self.group.max(1), cp).filter(move |parts| cp.is_multiple_of(*parts))
    }

    /// What the tokens at `places` places of a ring see.
    fn seen(&self, places: usize) -> Seen {
        let each = self.tokens.next_multiple_of(places * if self.zigzag { 2 } else { 1 }) / places;
        let part = |place: usize| match self.zigzag {
            true => [place, 2 * places - 1 - place].map(|chunk| chunk * each / 2..(chunk + 1) * each / 2).to_vec(),
            false => std::iter::once(place * each..(place + 1) * each).collect(),
        };
        let parts: Vec<_> = (0..places).map(part).collect();
        let (steps, last) = (steps(&parts, self.window), |step: usize| {
            (0..places).map(|place| sees(&parts, place, step, self.window)).sum::<u64>() as f64 / places as f64
        });
        let all = |place: usize| parts[place].iter().map(|run| seen_pairs(run.clone(), 0..places * each, self.window));
        let of_places: Vec<f64> = (0..places).map(|place| all(place).sum::<u64>() as f64).collect();
        let mean = of_places.iter().sum::<f64>() / places as f64;
        Seen { mean, most: of_places.into_iter().fold(0.0, f64::max), early: mean - last(steps - 1), steps }
    }

    /// What a method sends. A ring sends while attention computes, in all of its steps but the last.
    pub fn sent(&self, method: Method) -> Sent {
        let of = |x: usize| x as f64;
        let (n, bytes, here) = (of(self.cp), of(self.bytes), of(self.tokens) / of(self.cp));
        let (h, k) = (of(self.heads * self.head_dim), of(2 * self.kv_heads * self.head_dim));
        let ring = match method {
            Method::AllToAll => 1,
            Method::Hybrid { ring_degree } => ring_degree,
            Method::AllGather | Method::Ring => self.cp,
        };
        let (seen, parts) = (self.seen(ring), self.cp / ring.max(1));
        // Forward two products of pairs, backward five, of these heads.
        let flops = |pairs: f64| if self.documents { 0.0 } else { 14.0 * h / of(parts) * pairs };
        let idle = flops(seen.most - seen.mean) / FLOPS_PER_BYTE;
        if method == Method::AllGather && self.window.is_none() {
            let all = 2.0 * (n - 1.0) * here * k * bytes;
            return Sent { all, exposed: all, idle };
        }
        // Of keys and values each rank gets the heads that its queries read.
        let read = self.heads / self.group.clamp(1, self.heads.max(1));
        let to_each = of(2 * (read / parts).max(1) * self.head_dim);
        // The gradients of keys and values come from a ring in f32.
        let back = if ring > 1 { 4.0 } else { bytes };
        let exchanged = of(parts - 1) * here * (4.0 * h / of(parts) * bytes + to_each * (bytes + back));
        let passed = of(seen.steps - 1) * here * of(parts) * to_each * (2.0 * bytes + 4.0);
        let exposed = exchanged + (passed - flops(seen.early) / FLOPS_PER_BYTE).max(0.0);
        Sent { all: exchanged + passed, exposed, idle }
    }

    /// The method with the fewest bytes that attention does not hide, and that ranks wait; of equals the one that sends
    /// the fewest.
    pub fn best(&self) -> Method {
        let fewer = |a: &Method, b: &Method| {
            let [a, b] = [a, b].map(|method| self.sent(*method));
            a.cost().total_cmp(&b.cost()).then(a.all.total_cmp(&b.all))
        };
        self.methods().into_iter().min_by(fewer).unwrap_or(Method::AllGather)
    }
}
