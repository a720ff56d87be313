//! The spans of one rank, and their form between processes.

use meshwork_core::DType;
use meshwork_core::profile::{Class, Detail, Meeting, Span};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The spans of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Track {
    /// `rank 0 (dp=0,tp=0,pp=0)`
    pub name: String,
    /// Spans, in the order of their ends.
    pub spans: Vec<Span>,
}

/// The common parts of the spans of a track: the head of its form between ranks, of which the rest is ten numbers for
/// each span.
#[derive(Default, Serialize, Deserialize)]
struct Head {
    name: String,
    kinds: Vec<(Class, String, Option<DType>)>,
    groups: Vec<(String, Vec<usize>)>,
}

/// The place of an item in a list, where it is added if it is new.
fn place<T: PartialEq>(list: &mut Vec<T>, item: T) -> u64 {
    let at = list.iter().position(|other| *other == item);
    at.unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    }) as u64
}

impl Track {
    /// The numbers of its steps.
    pub fn steps(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().filter_map(|span| match span.detail {
            Detail::Step(step) if span.class == Class::Step => Some(step),
            _ => None,
        })
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let (mut head, mut spans) = (Head { name: self.name.clone(), ..Head::default() }, Vec::new());
        for span in &self.spans {
            let kind = place(&mut head.kinds, (span.class, span.name.to_owned(), span.dtype));
            let [detail, a, b, c, d] = match &span.detail {
                Detail::None => [0; 5],
                Detail::Step(step) => [1, *step, 0, 0, 0],
                Detail::Part { stage, micro } => [2, *stage as u64, *micro as u64, 0, 0],
                Detail::Product([m, n, k]) => [3, *m as u64, *n as u64, *k as u64, 0],
                Detail::Meeting(Meeting { group, message, seq }) => {
                    let group = place(&mut head.groups, (**group).clone());
                    let (is_message, (from, to)) = (message.is_some(), message.unwrap_or_default());
                    [4 + u64::from(is_message), group, *seq, from as u64, to as u64]
                }
            };
            spans.push([kind, detail, a, b, c, d, span.start, span.end, span.flops, span.bytes]);
        }
        let head = serde_json::to_vec(&head).unwrap_or_default();
        [&(head.len() as u64).to_le_bytes(), &*head, bytemuck::cast_slice(&spans)].concat()
    }

    /// The track that was [encoded](Self::encode) so. `names` are those known here: a new one stays in memory, as the
    /// names of operations do.
    pub(super) fn decode(bytes: &[u8], names: &mut BTreeSet<&'static str>) -> Self {
        let (length, rest) = bytes.split_first_chunk().unwrap_or((&[0; 8], &[]));
        let (head, spans) = rest.split_at_checked(u64::from_le_bytes(*length) as usize).unwrap_or_default();
        let Head { name, kinds, groups } = serde_json::from_slice(head).unwrap_or_default();
        let spans: Vec<[u64; 10]> = bytemuck::pod_collect_to_vec(spans);
        let mut known = |name: String| match names.get(&*name) {
            Some(&name) => name,
            None => {
                let name: &'static str = name.leak();
                names.insert(name);
                name
            }
        };
        let kinds: Vec<_> = kinds.into_iter().map(|(class, name, dtype)| (class, known(name), dtype)).collect();
        let groups: Vec<_> = groups.into_iter().map(Arc::new).collect();
        let span = |[kind, detail, a, b, c, d, start, end, flops, bytes]: [u64; 10]| {
            let &(class, name, dtype) = kinds.get(kind as usize)?;
            let detail = match detail {
                0 => Detail::None,
                1 => Detail::Step(a),
                2 => Detail::Part { stage: a as usize, micro: b as usize },
                3 => Detail::Product([a, b, c].map(|extent| extent as usize)),
                _ => {
                    let message = (detail == 5).then_some((c as usize, d as usize));
                    Detail::Meeting(Meeting { group: groups.get(a as usize)?.clone(), message, seq: b })
                }
            };
            Some(Span { class, name, detail, dtype, start, end, flops, bytes })
        };
        Self { name, spans: spans.into_iter().filter_map(span).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_track_is_the_same_in_another_process() {
        let group = Arc::new(("dp".to_owned(), vec![1, 3]));
        let meeting = |message, seq| Detail::Meeting(Meeting { group: group.clone(), message, seq });
        let details = [
            Detail::None,
            Detail::Step(7),
            Detail::Part { stage: 1, micro: 2 },
            Detail::Product([3, 4, 5]),
            meeting(None, 6),
            meeting(Some((1, 3)), 0),
        ];
        let span = |(at, detail): (usize, Detail)| {
            let (class, name) = if at % 2 == 0 { (Class::Wait, "recv") } else { (Class::Product, "gemm nt") };
            let (dtype, start) = ((at > 2).then_some(DType::Bf16), u64::MAX - at as u64);
            Span { class, name, detail, dtype, start, end: u64::MAX, flops: at as u64, bytes: 1 << 60 }
        };
        let track = Track { name: "rank 1".to_owned(), spans: details.into_iter().enumerate().map(span).collect() };
        for known in [BTreeSet::new(), BTreeSet::from(["recv", "gemm nt"])] {
            assert_eq!(Track::decode(&track.encode(), &mut known.clone()), track);
        }
    }
}
