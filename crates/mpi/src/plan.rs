//! Who sends what to whom in an operation: ranges of bytes, as data.
//!
//! Every collective has at most two stages, in each of which a member sends a range to each other member, or nothing. A
//! reduction sends each member its segment, adds the segments of all in the balanced tree, and sends the sum to all:
//! 2(n-1)/n of the bytes, as a ring does, in two messages for each pair. So members meet in pairs, and two that
//! disagree find it where they meet. A small reduction sends everything at once instead.
//!
//! Large reductions are cut into lanes, which go through the stages by themselves, so that sums are taken while other
//! lanes are under way.

use std::ops::Range;

use meshwork_core::{Call, Op, ReduceOp};

use crate::wire::EAGER;

/// Bytes of a segment that go through the stages together.
const LANE: usize = 1 << 20;

/// Bytes up to which every member of a reduction sends all of its elements to all others.
const AT_ONCE: usize = 64 << 10;

/// What to do with bytes that arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dest {
    /// They say that the sender is here; there are none.
    Nothing,
    /// They belong into this range of the output.
    Output(Range<usize>),
    /// They are added up with those of the others.
    Sum,
}

#[derive(Clone, Debug)]
enum Shape {
    Barrier,
    Gather,
    /// Where the part of each member begins in the input and in the output, in elements, and the end.
    AllToAll {
        send: Vec<usize>,
        recv: Vec<usize>,
    },
    Scatter,
    ReduceAtOnce,
    ReduceSegments,
    BroadcastWhole {
        root: usize,
    },
    BroadcastSegments {
        root: usize,
    },
    Send,
    Recv,
}

/// The plan of one member of an operation. Members are numbered as in the group; of a message the sender is 0 and the
/// receiver 1.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    shape: Shape,
    pub(crate) members: usize,
    pub(crate) me: usize,
    element: usize,
    /// Elements of the full buffer.
    elements: usize,
    pub(crate) lanes: usize,
    /// How parts are added up, if they are.
    pub(crate) reduce: Option<ReduceOp>,
}

impl Plan {
    /// The plan of a checked call of member `me` of `members`.
    pub(crate) fn new(call: &Call, me: usize, members: usize) -> Plan {
        let buffer = call.input.as_ref().or(call.output.as_ref());
        let element = buffer.map_or(1, |buffer| buffer.dtype().size());
        let elements = call.elements();
        let bytes = elements * element;
        let ends = |counts: &[usize]| {
            let sum = |sum: &mut usize, count: &usize| {
                *sum += count;
                Some(*sum)
            };
            [0].into_iter().chain(counts.iter().scan(0, sum)).collect::<Vec<_>>()
        };
        let shape = match &call.op {
            Op::Barrier => Shape::Barrier,
            Op::AllGather => Shape::Gather,
            Op::AllToAll { send_counts, recv_counts } => {
                Shape::AllToAll { send: ends(send_counts), recv: ends(recv_counts) }
            }
            Op::ReduceScatter(_) => Shape::Scatter,
            Op::AllReduce(_) if bytes <= EAGER && bytes * (members - 1) <= AT_ONCE => Shape::ReduceAtOnce,
            Op::AllReduce(_) => Shape::ReduceSegments,
            Op::Broadcast { root } if members == 2 || bytes <= EAGER => Shape::BroadcastWhole { root: *root },
            Op::Broadcast { root } => Shape::BroadcastSegments { root: *root },
            Op::Send { .. } => Shape::Send,
            Op::Recv { .. } => Shape::Recv,
        };
        let reduce = match call.op {
            Op::AllReduce(reduce) | Op::ReduceScatter(reduce) => Some(reduce),
            _ => None,
        };
        let mut plan = Plan { shape, members, me, element, elements, lanes: 1, reduce };
        if matches!(plan.shape, Shape::Scatter | Shape::ReduceSegments) {
            plan.lanes = (plan.elements.div_ceil(members) * element).div_ceil(LANE).max(1);
        }
        plan
    }

    /// The bytes of a member's segment.
    fn segment(&self, member: usize) -> Range<usize> {
        let start = |member: usize| {
            let (whole, rest) = (self.elements / self.members, self.elements % self.members);
            (member * whole + member.min(rest)) * self.element
        };
        start(member)..start(member + 1)
    }

    /// The bytes of a lane of a member's segment.
    fn lane(&self, member: usize, lane: usize) -> Range<usize> {
        let Range { start, end } = self.segment(member);
        let step = LANE / self.element * self.element;
        (start + lane * step).min(end)..(start + (lane + 1) * step).min(end)
    }

    fn whole(&self) -> Range<usize> {
        0..self.elements * self.element
    }

    /// The range of the input that this member sends to another one; in the second stage, and in place, of the output.
    pub(crate) fn sends(&self, stage: usize, lane: usize, to: usize) -> Option<Range<usize>> {
        match (&self.shape, stage) {
            (Shape::Barrier, 0) => Some(0..0),
            (Shape::Gather, 0) => Some(0..self.elements / self.members * self.element),
            (Shape::AllToAll { send, .. }, 0) => Some(send[to] * self.element..send[to + 1] * self.element),
            (Shape::Scatter | Shape::ReduceSegments, 0) => Some(self.lane(to, lane)),
            (Shape::ReduceSegments, 1) => Some(self.lane(self.me, lane)),
            (Shape::ReduceAtOnce | Shape::Send, 0) => Some(self.whole()),
            (&(Shape::BroadcastWhole { root } | Shape::BroadcastSegments { root }), 0) if self.me != root => {
                (to == root).then_some(0..0)
            }
            (Shape::BroadcastWhole { .. }, 0) => Some(self.whole()),
            (Shape::BroadcastSegments { .. }, 0) => Some(self.segment(to)),
            (Shape::BroadcastSegments { root }, 1) => (to != *root).then(|| self.segment(self.me)),
            (Shape::Recv, 1) => Some(0..0),
            _ => None,
        }
    }

    /// What to do with what another member sends to this one.
    pub(crate) fn receives(&self, stage: usize, lane: usize, from: usize) -> Option<Dest> {
        match (&self.shape, stage) {
            (Shape::Barrier, 0) | (Shape::Send, 1) => Some(Dest::Nothing),
            (Shape::Gather, 0) => {
                let part = self.elements / self.members * self.element;
                Some(Dest::Output(from * part..(from + 1) * part))
            }
            (Shape::AllToAll { recv, .. }, 0) => {
                Some(Dest::Output(recv[from] * self.element..recv[from + 1] * self.element))
            }
            (Shape::Scatter | Shape::ReduceAtOnce | Shape::ReduceSegments, 0) => Some(Dest::Sum),
            (Shape::ReduceSegments, 1) => Some(Dest::Output(self.lane(from, lane))),
            (&(Shape::BroadcastWhole { root } | Shape::BroadcastSegments { root }), 0) if self.me == root => {
                Some(Dest::Nothing)
            }
            (Shape::BroadcastWhole { root }, 0) => (from == *root).then(|| Dest::Output(self.whole())),
            (Shape::BroadcastSegments { root }, 0) => (from == *root).then(|| Dest::Output(self.segment(self.me))),
            (Shape::BroadcastSegments { root }, 1) => (self.me != *root).then(|| Dest::Output(self.segment(from))),
            (Shape::Recv, 0) => Some(Dest::Output(self.whole())),
            _ => None,
        }
    }

    /// The bytes that are added up in a lane: where the sum goes in the output, and where this member's part of it is
    /// in its input.
    pub(crate) fn sums(&self, lane: usize) -> Option<(Range<usize>, Range<usize>)> {
        match self.shape {
            Shape::ReduceAtOnce => Some((self.whole(), self.whole())),
            Shape::ReduceSegments => Some((self.lane(self.me, lane), self.lane(self.me, lane))),
            Shape::Scatter => {
                let (own, start) = (self.lane(self.me, lane), self.segment(self.me).start);
                Some((own.start - start..own.end - start, own))
            }
            _ => None,
        }
    }

    /// What a member copies from its input to its output: ranges of both, of equal length.
    pub(crate) fn copies(&self) -> Option<(Range<usize>, Range<usize>)> {
        match &self.shape {
            Shape::Gather => {
                let part = self.elements / self.members * self.element;
                Some((0..part, self.me * part..(self.me + 1) * part))
            }
            Shape::AllToAll { send, recv } => {
                let of = |ends: &[usize]| ends[self.me] * self.element..ends[self.me + 1] * self.element;
                Some((of(send), of(recv)))
            }
            _ => None,
        }
    }

    /// The other members of the operation.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, members) = (self.me, self.members);
        // Begins with the next one, so that not all members send to the first one first.
        (1..members).map(move |step| (me + step) % members)
    }

    /// Bytes that a member sends to another one, where these need not be what the other one expects: their number is
    /// compared.
    pub(crate) fn is_uneven(&self) -> bool {
        matches!(self.shape, Shape::AllToAll { .. })
    }

    pub(crate) fn element(&self) -> usize {
        self.element
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_core::{Buffer, DType};

    fn calls(members: usize, count: usize) -> Vec<Vec<Call>> {
        let buffer = |count: usize| Some(Buffer::zeros(DType::Bf16, count));
        let same = |make: &dyn Fn() -> Call| (0..members).map(|_| make()).collect::<Vec<_>>();
        let part = |from: usize, to: usize| (from + 2 * to + count) % 5;
        let mut calls = vec![
            same(&|| Call::new(Op::Barrier, None, None)),
            same(&|| Call::new(Op::AllGather, buffer(count), buffer(members * count))),
            same(&|| Call::new(Op::ReduceScatter(ReduceOp::Sum), buffer(members * count), buffer(count))),
            same(&|| Call::new(Op::AllReduce(ReduceOp::Sum), None, buffer(count))),
            same(&|| Call::new(Op::Broadcast { root: members - 1 }, None, buffer(count))),
        ];
        calls.push(
            (0..members)
                .map(|me| {
                    let send_counts: Vec<_> = (0..members).map(|to| part(me, to)).collect();
                    let recv_counts: Vec<_> = (0..members).map(|from| part(from, me)).collect();
                    let [input, output] = [&send_counts, &recv_counts].map(|counts| buffer(counts.iter().sum()));
                    Call::new(Op::AllToAll { send_counts, recv_counts }, input, output)
                })
                .collect(),
        );
        if members == 2 {
            let [send, recv] = [Op::Send { to: 1, signature: 0 }, Op::Recv { from: 0, signature: 0 }];
            calls.push(vec![Call::new(send, buffer(count), None), Call::new(recv, None, buffer(count))]);
        }
        calls
    }

    /// What one member sends another one expects, of the same length; and every byte of an output is written once.
    #[test]
    fn plans_of_members_fit_together() {
        for (members, count) in [(1, 5), (2, 3), (2, 3_000_001), (3, 0), (3, 100_003), (5, 1_000_000), (9, 20_000)] {
            for calls in calls(members, count) {
                let plans: Vec<_> = calls.iter().enumerate().map(|(me, call)| Plan::new(call, me, members)).collect();
                let mut written: Vec<Vec<Range<usize>>> = vec![Vec::new(); members];
                for (me, plan) in plans.iter().enumerate() {
                    let op = calls[me].op.kind();
                    written[me].extend(plan.copies().map(|(_, to)| to));
                    for lane in 0..plan.lanes {
                        let sums = plan.sums(lane);
                        written[me].extend(sums.iter().map(|(to, _)| to.clone()));
                        for (from, stage) in plan.others().flat_map(|from| [(from, 0), (from, 1)]) {
                            let (sent, expected) =
                                (plans[from].sends(stage, lane, me), plan.receives(stage, lane, from));
                            assert_eq!(sent.is_some(), expected.is_some(), "{op} {members} {from} {me} {stage}");
                            let Some((sent, expected)) = sent.zip(expected) else { continue };
                            let length = match &expected {
                                Dest::Nothing => 0,
                                Dest::Output(range) => range.len(),
                                Dest::Sum => sums.as_ref().map_or(0, |(to, _)| to.len()),
                            };
                            assert_eq!(sent.len(), length, "{op} of {members}, {from} to {me}, stage {stage}");
                            written[me].extend(match expected {
                                Dest::Output(range) => Some(range),
                                _ => None,
                            });
                        }
                    }
                }
                for (me, mut written) in written.into_iter().enumerate() {
                    written.retain(|range| !range.is_empty());
                    written.sort_by_key(|range| range.start);
                    let output = calls[me].output.as_ref().map_or(0, Buffer::bytes);
                    let is_root = matches!(calls[me].op, Op::Broadcast { root } if root == me);
                    let mut end = 0;
                    for range in written {
                        assert_eq!(range.start, end, "{:?} of {members}", calls[me].op);
                        end = range.end;
                    }
                    assert_eq!(end, if is_root { 0 } else { output }, "{:?} of {members}", calls[me].op);
                }
            }
        }
    }
}
