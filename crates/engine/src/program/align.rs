//! Which operations of two programs are the same.
//!
//! A model computes the same values in the same order on every mesh. Only operations that lay a value out anew come and
//! go: ranks of tp that share heads of keys and values gather them, experts under sequence parallelism gather whole
//! sequences, experts that are cut over tp sum over it. All other operations are paired in their order, and so are such
//! *layouts* between them, as far as both sides have them.
//!
//! Two programs *part* where an operation has no counterpart. Nothing of that layer corresponds then, and they go on
//! together at the next layer whose parameters both read.

use super::{Op, Program};

/// Operations whose result is their input, laid out over the ranks in another way or stored in another type.
const LAYOUTS: [&str; 9] =
    ["copy", "all_gather", "all_reduce", "reduce_scatter", "split", "slice", "all_to_all", "order", "cast"];

/// Operations of one kind produce the same value, cut over the ranks differently: region boundaries with and without
/// sequence parallelism. So do the exchanges of attention over parts of a sequence.
fn kind(op: &'static str) -> &'static str {
    match op {
        "ring_attention" | "hybrid_attention" | "all_to_all_attention" => "grouped_attention",
        "all_gather" => "copy",
        "reduce_scatter" => "all_reduce",
        other => other,
    }
}

/// Whether one operation adds the learned positions of tokens in their order, and the other looks up those of tokens
/// in another order, to be added next.
fn is_lookup(positions: &Op, lookup: &Op) -> bool {
    positions.name == "positions" && lookup.name == "embedding" && positions.params == lookup.params
}

impl Op {
    /// Whether it lays its input out anew.
    pub fn is_layout(&self) -> bool {
        LAYOUTS.contains(&self.name)
    }

    /// Its layer, or the layer that it comes after.
    fn of_layer(&self) -> &str {
        self.layer.strip_prefix("after ").unwrap_or(&self.layer)
    }
}

/// The operations that correspond.
#[derive(Debug)]
pub struct Pairs<'a> {
    /// Both programs.
    pub programs: [&'a Program; 2],
    /// Per side and operation: the corresponding operation of the other side.
    pub like: [Vec<Option<usize>>; 2],
    /// The operations of both, in the order of forward.
    pub order: Vec<[Option<usize>; 2]>,
    /// The first operations at which the programs parted: `None` on a side where there are no more.
    pub parted: Option<[Option<usize>; 2]>,
}

impl<'a> Pairs<'a> {
    /// Pairs the operations of two programs.
    pub fn new(programs: [&'a Program; 2]) -> Self {
        let like = programs.map(|program| vec![None; program.ops.len()]);
        let mut pairs = Self { programs, like, order: Vec::new(), parted: None };
        let mut at = [0, 0];
        loop {
            let layouts = [0, 1].map(|side| {
                let from = at[side]..programs[side].ops.len();
                from.take_while(|&op| programs[side].ops[op].is_layout()).collect::<Vec<_>>()
            });
            pairs.pair_layouts(&layouts);
            at = [0, 1].map(|side| at[side] + layouts[side].len());
            match [0, 1].map(|side| programs[side].ops.get(at[side])) {
                [None, None] => return pairs,
                [Some(a), Some(b)] if kind(a.name) == kind(b.name) && a.layer == b.layer => {
                    pairs.pair(at);
                    at = at.map(|at| at + 1);
                }
                [Some(a), Some(b)] if is_lookup(a, b) => at = pairs.pair_lookup(at, 1),
                [Some(a), Some(b)] if is_lookup(b, a) => at = pairs.pair_lookup(at, 0),
                ops => {
                    pairs.parted.get_or_insert([0, 1].map(|side| ops[side].map(|_| at[side])));
                    if let Some(next) = pairs.part(at) { at = next } else { return pairs }
                }
            }
        }
    }

    fn pair(&mut self, ops: [usize; 2]) {
        for side in [0, 1] {
            self.like[side][ops[side]] = Some(ops[1 - side]);
        }
        self.order.push(ops.map(Some));
    }

    /// Pairs learned positions with the sum behind the lookup of `side`, and returns the operations behind both.
    fn pair_lookup(&mut self, mut at: [usize; 2], side: usize) -> [usize; 2] {
        let mut alone = [None, None];
        alone[side] = Some(at[side]);
        self.order.push(alone);
        at[side] += 1;
        self.pair(at);
        at.map(|at| at + 1)
    }

    /// Undoes the pairs of the layers in which the programs part, and finds the next operations that read the same
    /// parameters of another layer.
    fn part(&mut self, at: [usize; 2]) -> Option<[usize; 2]> {
        let [a, b] = self.programs;
        let layers = [a.ops.get(at[0]), b.ops.get(at[1])].map(|op| op.map(Op::of_layer));
        let parts = |op: &Op| layers.contains(&Some(op.of_layer()));
        while let Some(&last) = self.order.last() {
            let of = [last[0].map(|op| &a.ops[op]), last[1].map(|op| &b.ops[op])];
            if !of.into_iter().flatten().all(parts) {
                break;
            }
            self.order.pop();
            (0..2).for_each(|side| last[side].into_iter().for_each(|op| self.like[side][op] = None));
        }
        let reads = |op: &&Op| !op.params.is_empty() && !parts(op);
        a.ops.iter().enumerate().skip(at[0]).filter(|(_, op)| reads(op)).find_map(|(first, op)| {
            let same = |other: &Op| kind(other.name) == kind(op.name) && other.params == op.params;
            let second = b.ops.iter().skip(at[1]).position(same)?;
            Some([first, at[1] + second])
        })
    }

    /// Pairs layouts between two other operations, in their order, where they are of one kind and of the same value.
    fn pair_layouts(&mut self, layouts: &[Vec<usize>; 2]) {
        let mut rest = &layouts[1][..];
        for &a in &layouts[0] {
            let of_a = self.origin(0, a);
            let same = |&b: &usize| {
                let [x, y] = [&self.programs[0].ops[a], &self.programs[1].ops[b]];
                let values = (of_a.map(|of_a| self.like[0][of_a]), self.origin(1, b));
                kind(x.name) == kind(y.name) && (values.0.is_none() || values.1.is_none() || values.0 == Some(values.1))
            };
            match rest.iter().position(same) {
                None => self.order.push([Some(a), None]),
                Some(place) => {
                    self.order.extend(rest[..place].iter().map(|&b| [None, Some(b)]));
                    self.pair([a, rest[place]]);
                    rest = &rest[place + 1..];
                }
            }
        }
        self.order.extend(rest.iter().map(|&b| [None, Some(b)]));
    }

    /// The operation with a like that made the value which a layout lays out anew.
    pub fn origin(&self, side: usize, layout: usize) -> Option<usize> {
        let mut op = self.programs[side].ops[layout].makers.first().copied().flatten()?;
        while self.like[side][op].is_none() {
            op = self.programs[side].ops[op].makers.first().copied().flatten()?;
        }
        Some(op)
    }
}
