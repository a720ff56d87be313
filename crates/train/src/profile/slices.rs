//! From the spans of all ranks to slices that add up.
//!
//! It takes the spans of all ranks to answer two questions:
//!
//! - *Did a rank wait for others, or for the communication itself?* A communication lasts from the moment at which its
//!   last member has arrived until the first member sees that it is over. While a rank stands still, that part of the
//!   time is communication. The time before is waiting, and so is the time after, in which the rank is woken up.
//! - *What did the machine spend its time on, when ranks share its cores?* At any moment each working rank gets an
//!   equal share of the machine. So does each communication that ranks stand still for; its ranks divide the share.
//!   Waiting ranks get none, unless all of them wait. [`machine_time`] sums these shares; over all slices they add up
//!   exactly to the step.

use meshwork_core::profile::{Class, Meeting, Span};
use std::collections::HashMap;

/// The kind of a slice of a rank's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SliceKind {
    /// The work of a span: a kernel, or a communication's own part of it.
    Work,
    /// Between spans: the tape, the optimizer's bookkeeping, memory.
    Rest,
    /// Standing still until other ranks arrive, or until the scheduler runs this rank again.
    Waiting,
    /// A communication beside other work of the rank. Not a part of its time.
    Hidden,
}

/// A stretch of a rank's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice<'a> {
    /// Its kind.
    pub kind: SliceKind,
    /// The span that it is, or is a part of; the step, if it lies between spans.
    pub span: &'a Span,
    /// Start, in nanoseconds.
    pub start: u64,
    /// End, in nanoseconds.
    pub end: u64,
}

impl Slice<'_> {
    /// Its length in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end - self.start
    }
}

/// The earliest start of a communication, and its end.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Course {
    complete: u64,
    over: u64,
}

/// Cuts the time of each rank into slices. Those that are not hidden follow each other without gap or overlap from the
/// start of each step to its end. `ranks` holds the spans of each rank in the order of their ends.
pub fn slices<'a>(ranks: &[&'a [Span]]) -> Vec<Vec<Slice<'a>>> {
    let courses = courses(ranks);
    ranks.iter().map(|spans| rank_slices(spans, &courses)).collect()
}

fn courses<'a>(ranks: &[&'a [Span]]) -> HashMap<&'a Meeting, Course> {
    let mut courses = HashMap::new();
    for spans in ranks {
        for (at, span) in spans.iter().enumerate() {
            let Some(meeting) = span.meeting() else { continue };
            let course: &mut Course = courses.entry(meeting).or_insert(Course { complete: 0, over: u64::MAX });
            match span.class {
                Class::Post => course.complete = course.complete.max(span.start),
                Class::Wait => course.over = course.over.min(span.end),
                // A flight that ended before its wait began was seen to be over.
                Class::Flight if spans.get(at + 1).is_some_and(|wait| span.end < wait.start) => {
                    course.over = course.over.min(span.end);
                }
                _ => {}
            }
        }
    }
    courses
}

fn rank_slices<'a>(spans: &'a [Span], courses: &HashMap<&Meeting, Course>) -> Vec<Slice<'a>> {
    let mut slices = Vec::with_capacity(2 * spans.len());
    let mut push = |kind, span, start, end| {
        if start < end {
            slices.push(Slice { kind, span, start, end });
        }
    };
    // Inner spans come before the step that they lie in.
    let mut inner: Vec<&Span> = Vec::new();
    for span in spans {
        let course = span.meeting().and_then(|meeting| courses.get(meeting));
        match (span.class, course) {
            (Class::Step, _) => {
                let mut at = span.start;
                for part in inner.drain(..) {
                    push(SliceKind::Rest, span, at, part.start);
                    match part.meeting().and_then(|meeting| courses.get(meeting)) {
                        Some(course) if part.class == Class::Wait => {
                            let begun = course.complete.clamp(part.start, part.end);
                            let over = course.over.clamp(begun, part.end);
                            push(SliceKind::Waiting, part, part.start, begun);
                            push(SliceKind::Work, part, begun, over);
                            push(SliceKind::Waiting, part, over, part.end);
                        }
                        _ => push(SliceKind::Work, part, part.start, part.end),
                    }
                    at = part.end;
                }
                push(SliceKind::Rest, span, at, span.end);
            }
            (Class::Action, _) => {}
            (Class::Flight, Some(course)) => {
                push(SliceKind::Hidden, span, span.start.max(course.complete), span.end.min(course.over));
            }
            _ => inner.push(span),
        }
    }
    slices
}

/// Per rank and slice, the nanoseconds of the whole machine that it took; 0 for hidden ones.
pub fn machine_time(ranks: &[Vec<Slice<'_>>]) -> Vec<Vec<f64>> {
    let mut ends: Vec<(u64, i64, i64)> = Vec::new(); // (time, more weight that works, more that waits)
    for slice in ranks.iter().flatten() {
        let (working, waiting) = weight(slice);
        ends.push((slice.start, working, waiting));
        ends.push((slice.end, -working, -waiting));
    }
    ends.sort_unstable();

    // The share of the machine that a weight of one has received by each time, if it works, or waits, from the
    // beginning.
    let mut clock: Vec<(u64, f64, f64)> = Vec::with_capacity(ends.len());
    let (mut work, mut wait, mut working, mut waiting, mut last) = (0.0, 0.0, 0, 0, 0);
    for (time, more_work, more_wait) in ends {
        let passed = (time - last) as f64;
        match (working, waiting) {
            (0, 0) => {}
            (0, weight) => wait += passed / weight as f64,
            (weight, _) => work += passed / weight as f64,
        }
        clock.push((time, work, wait));
        (working, waiting, last) = (working + more_work, waiting + more_wait, time);
    }
    let at = |time: u64| match clock.partition_point(|&(other, ..)| other < time) {
        place if place < clock.len() => clock[place],
        _ => (time, work, wait),
    };
    let share = |slice: &Slice<'_>| {
        let ((_, work, wait), (_, work_end, wait_end)) = (at(slice.start), at(slice.end));
        let (working, waiting) = weight(slice);
        working as f64 * (work_end - work) + waiting as f64 * (wait_end - wait)
    };
    ranks.iter().map(|slices| slices.iter().map(share).collect()).collect()
}

/// The weight of one rank, a number that groups of most sizes divide.
const RANK: i64 = 1 << 20;

/// The weight of a slice among those that work at its time, and among those that wait.
fn weight(slice: &Slice<'_>) -> (i64, i64) {
    match (slice.kind, slice.span.meeting()) {
        (SliceKind::Work, Some(meeting)) if slice.span.class == Class::Wait => {
            let members = if meeting.message.is_some() { 2 } else { meeting.group.1.len() };
            ((RANK / members as i64).max(1), 0)
        }
        (SliceKind::Work | SliceKind::Rest, _) => (RANK, 0),
        (SliceKind::Waiting, _) => (0, RANK),
        (SliceKind::Hidden, _) => (0, 0),
    }
}
