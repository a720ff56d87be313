//! Which method sends the fewest bytes that computation does not hide.

use crate::{Method, parts_of_heads};

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
    /// Heads of keys and values on each.
    pub kv_heads: usize,
    /// Heads of queries that share those of keys and values.
    pub group: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Bytes of an element.
    pub bytes: usize,
}

/// Bytes that each rank sends for one sequence and layer, forward and backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// All of them.
    pub all: f64,
    /// As many as do not travel while attention computes.
    pub exposed: f64,
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

    /// What a method sends. A ring sends while attention computes, in all of its steps but the last.
    pub fn sent(&self, method: Method) -> Sent {
        let of = |x: usize| x as f64;
        let (n, bytes, here) = (of(self.cp), of(self.bytes), of(self.tokens) / of(self.cp));
        let (h, k) = (of(self.heads * self.head_dim), of(2 * self.kv_heads * self.head_dim));
        let ring = match method {
            Method::AllGather => {
                let all = 2.0 * (n - 1.0) * here * k * bytes;
                return Sent { all, exposed: all };
            }
            Method::AllToAll => 1.0,
            Method::Ring => n,
            Method::Hybrid { ring_degree } => of(ring_degree),
        };
        let parts = n / ring;
        let gathered = !self.kv_heads.is_multiple_of(parts as usize);
        // Of keys and values each rank gets a part of the heads, or all.
        let to_each = if gathered { k } else { k / parts };
        let exchanged = 2.0 * (parts - 1.0) * here * (2.0 * h / parts + to_each) * bytes;
        let passed = (ring - 1.0) * here * parts * to_each * (2.0 * bytes + 4.0);
        let flops = 7.0 * h * of(self.tokens) * here * (ring - 1.0) / ring;
        let exposed = exchanged + (passed - flops / FLOPS_PER_BYTE).max(0.0);
        Sent { all: exchanged + passed, exposed }
    }

    /// The method that exposes the fewest bytes; of equals the one that sends the fewest.
    pub fn best(&self) -> Method {
        let fewer = |a: &Method, b: &Method| {
            let [a, b] = [a, b].map(|method| self.sent(*method));
            a.exposed.total_cmp(&b.exposed).then(a.all.total_cmp(&b.all))
        };
        self.methods().into_iter().min_by(fewer).unwrap_or(Method::AllGather)
    }
}
