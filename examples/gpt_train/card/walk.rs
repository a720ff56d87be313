//! The time of one rank's step, from the calls that a dry run of it recorded.
//!
//! A rank has two queues, as a GPU has streams: operations follow each other in one, collectives in the other. A
//! collective starts when the operation before its call has ended and the collective before it is over; who waits for
//! it goes on when it is over. So what a program posts early is hidden behind the operations that follow. Messages
//! between stages belong to the [schedule](super), which has the times of all ranks.

use super::shares::Shares;
use meshwork::core::DType;
use meshwork::core::profile::{Class, Detail, Meeting, Span};
use meshwork::pipeline::{Action, ActionKind, Interval};
use meshwork::tensor::Precision;
use meshwork::train::config::Card;
use std::collections::{BTreeMap, HashMap};

/// A card, the shares of its peaks that are reached, and how numbers are stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates<'a> {
    pub(super) card: &'a Card,
    pub(super) shares: Shares,
    /// The precision of products and attention. Attention of f16 is always on tensor cores, as fast as that of bf16.
    pub(super) precision: Precision,
    /// Features of a head of attention.
    pub(super) head: usize,
    /// The type of tensors that are stored in 16 bits.
    pub(super) half: Option<DType>,
    /// Whether operations are launched as graphs.
    pub(super) graphs: bool,
}

/// Operations of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Of {
    /// How many.
    pub calls: usize,
    /// Their time in seconds.
    pub seconds: f64,
    /// Operations on numbers of products and attention.
    pub flops: u64,
}

/// The step of one rank, without waits for other stages.
#[derive(Clone, Debug, Default)]
pub(super) struct Walk {
    /// Each action of the schedule; the times count from the start of the step.
    pub(super) actions: Vec<Interval>,
    /// From the end of the last action to the end of the step.
    pub(super) tail: f64,
    /// All of it.
    pub(super) seconds: f64,
    /// Operations by class.
    pub(super) classes: BTreeMap<Class, Of>,
    /// Collectives: the time that they take, and the part of it in which the rank waits.
    pub(super) links: [f64; 2],
    /// Bytes of the largest message of an activation or its gradient to another stage.
    pub(super) message: u64,
}

impl Rates<'_> {
    /// Seconds of an operation: the longer of computing and moving bytes, and the launch.
    pub(super) fn operation(&self, span: &Span) -> f64 {
        let Shares { products, attention, memory, launch, .. } = self.shares;
        // On the device tensors in 16 bits are computed as they are; the dry run widens them around each operation.
        if self.half.is_some() && span.name == "cast" {
            return 0.0;
        }
        let halved = self.half.is_some()
            && span.dtype == Some(DType::F32)
            && !matches!(span.class, Class::Optimizer | Class::Memory | Class::Compression);
        let bytes = if halved { 0.5 } else { 1.0 } * span.bytes as f64;
        let of_attention = if self.half == Some(DType::F16) { Precision::Bf16 } else { self.precision };
        let rate = match span.class {
            Class::Attention => attention.rate(self.card, of_attention, self.head, span.name.ends_with("_grad")),
            _ => self.card.peak(self.precision) * products,
        };
        let computing = span.flops as f64 / rate;
        computing.max(bytes / (self.card.bandwidth * memory)) + launch[usize::from(self.graphs)]
    }

    /// Seconds of a collective of this name among ranks of these numbers, of whose buffers a rank reads and writes
    /// `bytes`.
    pub(super) fn collective(&self, name: &str, members: &[usize], bytes: u64) -> f64 {
        let count = members.len() as f64;
        if members.len() < 2 {
            return 0.0;
        }
        let (bytes, others) = (bytes as f64, (count - 1.0) / count);
        // What leaves each rank: of a full buffer of b bytes, a reduction in place counts 2b, a gather b + b/n.
        let sent = match name {
            "all_reduce" => bytes * others,
            "all_gather" | "reduce_scatter" => bytes * count / (count + 1.0) * others,
            "barrier" => 0.0,
            _ => bytes / 2.0 * others,
        };
        self.message(members, sent)
    }

    /// Seconds in which a rank sends bytes to others of a group.
    fn message(&self, members: &[usize], bytes: f64) -> f64 {
        let Card { link, on_machine, network, .. } = *self.card;
        let mut machines: HashMap<usize, usize> = HashMap::new();
        members.iter().for_each(|rank| *machines.entry(rank / on_machine).or_default() += 1);
        let rate = match machines.len() {
            0 | 1 => link,
            // A ring leaves a machine once; the bytes go over the network of all its members.
            _ => machines.values().map(|&of| network * of as f64).fold(link, f64::min),
        };
        bytes / (rate * self.shares.links) + self.shares.latency[usize::from(machines.len() > 1)]
    }

    /// Seconds of a message between two ranks.
    pub(super) fn between(&self, ranks: [usize; 2], bytes: u64) -> f64 {
        self.message(&ranks, bytes as f64)
    }

    /// The step of a rank. Spans of class [`Class::Action`] frame actions: one named [`BEGUN`](super::BEGUN), then one
    /// of the kind's name.
    pub(super) fn walk(&self, spans: &[Span]) -> Walk {
        let mut walk = Walk::default();
        let (mut now, mut free, mut begun) = (0.0_f64, 0.0_f64, 0.0);
        let mut flights: HashMap<&Meeting, f64> = HashMap::new();
        for span in spans {
            match (span.class, &span.detail) {
                (Class::Step, _) | (Class::Flight, _) => {}
                (Class::Action, Detail::Part { stage, micro }) => match super::kind(span.name) {
                    None => begun = now,
                    Some(kind) => {
                        let action = Action { kind, stage: *stage, micro: *micro };
                        walk.actions.push(Interval { action, start: begun, end: now });
                    }
                },
                (Class::Post, Detail::Meeting(meeting)) if meeting.message.is_some() => {
                    walk.message = walk.message.max(span.bytes);
                }
                (Class::Post, Detail::Meeting(meeting)) => {
                    let seconds = self.collective(span.name, &meeting.group.1, span.bytes);
                    free = now.max(free) + seconds;
                    walk.links[0] += seconds;
                    flights.insert(meeting, free);
                }
                (Class::Wait, Detail::Meeting(meeting)) => {
                    let over = flights.remove(meeting).unwrap_or(now);
                    walk.links[1] += (over - now).max(0.0);
                    now = now.max(over);
                }
                _ => {
                    let seconds = self.operation(span);
                    let of = walk.classes.entry(span.class).or_default();
                    of.calls += usize::from(seconds > 0.0);
                    of.seconds += seconds;
                    of.flops += span.flops;
                    now += seconds;
                }
            }
        }
        walk.seconds = now.max(free);
        walk.tail = walk.seconds - walk.actions.last().map_or(0.0, |last| last.end);
        walk
    }
}

impl Walk {
    /// Mean seconds of a stage's actions of these kinds, each kind weighed by its share.
    pub(super) fn mean(&self, stage: usize, kinds: &[(ActionKind, f64)]) -> Option<f64> {
        let (mut sum, mut count) = (0.0, 0.0);
        for Interval { action, start, end } in self.actions.iter().filter(|interval| interval.action.stage == stage) {
            if let Some((_, share)) = kinds.iter().find(|(kind, _)| *kind == action.kind) {
                sum += share * (end - start);
                count += 1.0;
            }
        }
        (count > 0.0).then(|| sum / count)
    }
}
