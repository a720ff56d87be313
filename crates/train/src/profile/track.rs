//! The spans of one rank, and their form between processes.

use meshwork_core::profile::{Class, Detail, Span};
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

/// A track between processes: its name, the names and the groups of its spans, and the spans with the places of both.
type Sent<Name, Group, Span> = (String, Vec<Name>, Vec<Group>, Vec<(usize, Option<usize>, Span)>);

/// The place of an item in a list, where it is added if it is new.
fn place<T: PartialEq>(list: &mut Vec<T>, item: T) -> usize {
    let at = list.iter().position(|other| *other == item);
    at.unwrap_or_else(|| {
        list.push(item);
        list.len() - 1
    })
}

impl Track {
    /// The numbers of its steps.
    pub fn steps(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().filter_map(|span| match span.detail {
            Detail::Step(step) if span.class == Class::Step => Some(step),
            _ => None,
        })
    }

    /// The track as bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (mut names, mut groups) = (Vec::new(), Vec::new());
        let span = |span| {
            let group = Span::meeting(span).map(|meeting| place(&mut groups, &meeting.group));
            (place(&mut names, span.name), group, span)
        };
        let spans = self.spans.iter().map(span).collect();
        let sent: Sent<&str, &Arc<_>, &Span> = (self.name.clone(), names, groups, spans);
        postcard::to_stdvec(&sent).unwrap_or_default()
    }

    /// The track that was [encoded](Self::encode) so. `names` are those known here: a new one stays in memory, as the
    /// names of operations do.
    pub(super) fn decode(bytes: &[u8], names: &mut BTreeSet<&'static str>) -> Self {
        let sent: Sent<String, Arc<_>, Span> = postcard::from_bytes(bytes).unwrap_or_default();
        let (name, sent_names, groups, spans) = sent;
        let known = |name: String| match names.get(&*name) {
            Some(&name) => name,
            None => {
                let name: &'static str = name.leak();
                names.insert(name);
                name
            }
        };
        let known: Vec<&'static str> = sent_names.into_iter().map(known).collect();
        let span = |(name, group, mut span): (usize, Option<usize>, Span)| {
            span.name = known.get(name)?;
            if let Detail::Meeting(meeting) = &mut span.detail {
                meeting.group = Arc::clone(groups.get(group?)?);
            }
            Some(span)
        };
        Self { name, spans: spans.into_iter().filter_map(span).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_core::DType;
    use meshwork_core::profile::Meeting;

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
