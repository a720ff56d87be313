//! How waits, communication and work share the time of ranks.

use meshwork_core::profile::{Class, Detail, Meeting, Span};
use meshwork_train::profile::{Slice, SliceKind, machine_time, slices};
use std::sync::Arc;

fn span(class: Class, start: u64, end: u64) -> Span {
    Span { class, name: "op", detail: Detail::None, dtype: None, start, end, flops: 0, bytes: 0 }
}

/// A part in the first all_reduce of two ranks.
fn part(class: Class, start: u64, end: u64) -> Span {
    let group = Arc::new(("tp".to_owned(), vec![0, 1]));
    Span { detail: Detail::Meeting(Meeting { group, message: None, seq: 0 }), ..span(class, start, end) }
}

fn shown(slices: &[Slice<'_>]) -> Vec<(SliceKind, Class, u64, u64)> {
    slices.iter().map(|slice| (slice.kind, slice.span.class, slice.start, slice.end)).collect()
}

#[test]
fn a_wait_is_cut_where_the_last_rank_comes_and_where_the_first_one_is_done() {
    let early =
        [part(Class::Post, 10, 12), part(Class::Flight, 12, 12), part(Class::Wait, 12, 50), span(Class::Step, 0, 60)];
    let late = [
        span(Class::Product, 5, 30),
        part(Class::Post, 30, 40),
        part(Class::Flight, 40, 40),
        part(Class::Wait, 40, 41),
        span(Class::Step, 0, 60),
    ];
    let slices = slices(&[&early, &late]);
    let wanted = [
        (SliceKind::Rest, Class::Step, 0, 10),
        (SliceKind::Work, Class::Post, 10, 12),
        (SliceKind::Waiting, Class::Wait, 12, 30),
        (SliceKind::Work, Class::Wait, 30, 41),
        (SliceKind::Waiting, Class::Wait, 41, 50),
        (SliceKind::Rest, Class::Step, 50, 60),
    ];
    assert_eq!(shown(&slices[0]), wanted);
    let wanted = [
        (SliceKind::Rest, Class::Step, 0, 5),
        (SliceKind::Work, Class::Product, 5, 30),
        (SliceKind::Work, Class::Post, 30, 40),
        (SliceKind::Work, Class::Wait, 40, 41),
        (SliceKind::Rest, Class::Step, 41, 60),
    ];
    assert_eq!(shown(&slices[1]), wanted);

    // While rank 0 waits, rank 1 has the machine; while it stands still for the all_reduce, it counts half.
    let times = machine_time(&slices);
    let near = |got: f64, wanted: f64| assert!((got - wanted).abs() < 1e-9, "{got}, not {wanted}");
    near(times[0][2], 0.0);
    near(times[0][3], 10.0 / 3.0 + 0.5);
    near(times[1][1], 2.5 + 1.0 + 18.0); // 5 to 10 beside the rest of rank 0, 10 to 12 beside its start, then alone
    near(times.iter().flatten().sum(), 60.0);
}

#[test]
fn a_communication_is_hidden_from_the_coming_of_the_last_rank_until_it_is_seen_to_be_over() {
    let early = [
        part(Class::Post, 0, 1),
        span(Class::Product, 1, 30),
        part(Class::Flight, 1, 25),
        part(Class::Wait, 30, 31),
        span(Class::Step, 0, 31),
    ];
    let late =
        [part(Class::Post, 20, 21), part(Class::Flight, 21, 22), part(Class::Wait, 22, 26), span(Class::Step, 0, 31)];
    let slices = slices(&[&early, &late]);
    let hidden = |slices: &[Slice<'_>]| -> Vec<_> {
        slices.iter().filter(|slice| slice.kind == SliceKind::Hidden).map(|slice| (slice.start, slice.end)).collect()
    };
    assert_eq!(hidden(&slices[0]), [(20, 25)]);
    assert_eq!(hidden(&slices[1]), [(21, 22)]);
    // Rank 1 cannot know before its wait ends. The communication ends at 25, when rank 0 saw it end.
    assert_eq!(
        shown(&slices[1])[4..6],
        [(SliceKind::Work, Class::Wait, 22, 25), (SliceKind::Waiting, Class::Wait, 25, 26)]
    );
}

#[test]
fn where_all_wait_the_time_is_theirs() {
    let ranks = [
        [part(Class::Post, 0, 0), part(Class::Flight, 0, 0), part(Class::Wait, 0, 8), span(Class::Step, 0, 8)],
        [part(Class::Post, 8, 8), part(Class::Flight, 8, 8), part(Class::Wait, 8, 8), span(Class::Step, 4, 8)],
    ];
    let cut = slices(&[&ranks[0], &ranks[1][3..]]);
    assert_eq!(shown(&cut[1]), [(SliceKind::Rest, Class::Step, 4, 8)]);
    let alone = slices(&[&ranks[0], &ranks[1][..3]]); // rank 1 is between steps
    assert_eq!(machine_time(&alone), [vec![8.0], vec![]]);
}
