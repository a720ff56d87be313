//! From the spans of all ranks to slices that add up.
//!
//! Two questions that no rank can answer alone:
//!
//! - *Did a rank wait for others, or for the communication itself?* A communication goes on from the moment at which its
//!   last member has come until the first member sees that it is over. Of the time in which a rank stands still, that part
//!   is communication; what comes before is waiting, and so is what comes after, in which the rank is woken up.
//! - *What did the machine spend its time on, when ranks share its cores?* At any moment each rank that does something is
//!   given an equal share of the machine; ranks that wait are given none, unless all of them wait.
//!   [`machine_time`] sums these shares, so that over all slices they make up the step, no more and no less.

use meshwork_core::profile::{Class, Meeting, Span};
use std::collections::HashMap;

/// What a slice of a rank's time is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The work of a span: a kernel, or a communication's own part of it.
    Work,
    /// Between spans: the tape, the optimizer's bookkeeping, memory.
    Rest,
    /// Standing still until other ranks come, or until the scheduler lets this one go on.
    Waiting,
    /// A communication that goes on beside other work of the rank. Not a part of its time.
    Hidden,
}

/// A stretch of a rank's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice<'a> {
    /// What it is.
    pub kind: Kind,
    /// The span that it is (a part of); the step, where it lies between spans.
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

/// When a communication could begin, and when it was over.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Course {
    complete: u64,
    over: u64,
}

/// Per rank, its time in slices: those not hidden follow each other without gap or overlap from the start of each step to
/// its end. `ranks` holds the spans of each rank in the order of their ends.
pub fn settle<'a>(ranks: &[&'a [Span]]) -> Vec<Vec<Slice<'a>>> {
    let courses = courses(ranks);
    ranks.iter().map(|spans| slices(spans, &courses)).collect()
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

fn slices<'a>(spans: &'a [Span], courses: &HashMap<&Meeting, Course>) -> Vec<Slice<'a>> {
    let mut slices = Vec::with_capacity(2 * spans.len());
    let mut push = |kind, span, start, end| {
        if start < end {
            slices.push(Slice { kind, span, start, end });
        }
    };
    // Leaves come before the step that they lie in.
    let mut leaves: Vec<&Span> = Vec::new();
    for span in spans {
        let course = span.meeting().and_then(|meeting| courses.get(meeting));
        match (span.class, course) {
            (Class::Step, _) => {
                let mut at = span.start;
                for leaf in leaves.drain(..) {
                    push(Kind::Rest, span, at, leaf.start);
                    match leaf.meeting().and_then(|meeting| courses.get(meeting)) {
                        Some(course) if leaf.class == Class::Wait => {
                            let begun = course.complete.clamp(leaf.start, leaf.end);
                            let over = course.over.clamp(begun, leaf.end);
                            push(Kind::Waiting, leaf, leaf.start, begun);
                            push(Kind::Work, leaf, begun, over);
                            push(Kind::Waiting, leaf, over, leaf.end);
                        }
                        _ => push(Kind::Work, leaf, leaf.start, leaf.end),
                    }
                    at = leaf.end;
                }
                push(Kind::Rest, span, at, span.end);
            }
            (Class::Action, _) => {}
            (Class::Flight, Some(course)) => {
                push(Kind::Hidden, span, span.start.max(course.complete), span.end.min(course.over));
            }
            _ => leaves.push(span),
        }
    }
    slices
}

/// Per rank and slice, the nanoseconds of the whole machine that it took; 0 for hidden ones.
pub fn machine_time(ranks: &[Vec<Slice<'_>>]) -> Vec<Vec<f64>> {
    let mut ends: Vec<(u64, i64, i64)> = Vec::new(); // (time, how many more work, how many more wait)
    for slice in ranks.iter().flatten() {
        let (working, waiting) = match slice.kind {
            Kind::Work | Kind::Rest => (1, 0),
            Kind::Waiting => (0, 1),
            Kind::Hidden => continue,
        };
        ends.push((slice.start, working, waiting));
        ends.push((slice.end, -working, -waiting));
    }
    ends.sort_unstable();

    // What one rank that works, or waits, from the beginning would have got by each time.
    let mut clock: Vec<(u64, f64, f64)> = Vec::with_capacity(ends.len());
    let (mut work, mut wait, mut working, mut waiting, mut last) = (0.0, 0.0, 0, 0, 0);
    for (time, more_work, more_wait) in ends {
        let passed = (time - last) as f64;
        match (working, waiting) {
            (0, 0) => {}
            (0, ranks) => wait += passed / ranks as f64,
            (ranks, _) => work += passed / ranks as f64,
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
        match slice.kind {
            Kind::Work | Kind::Rest => work_end - work,
            Kind::Waiting => wait_end - wait,
            Kind::Hidden => 0.0,
        }
    };
    ranks.iter().map(|slices| slices.iter().map(share).collect()).collect()
}
