//! The profile as a timeline, in the trace event format that <https://ui.perfetto.dev> and `chrome://tracing` open.
//!
//! There is one track per rank. It shows steps, which contain the actions of the schedule, which contain operations.
//! Where a rank waits for others the slice says `for ..`. Communication behind other work is shown beside the tracks.
//! Times are in microseconds; FLOPs and bytes are among the arguments.

use super::Profile;
use super::slices::{SliceKind, slices};
use super::table::label;
use crate::error::OutputError;
use serde::Serialize;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes the timeline of a profile to a file, in the place of any old one.
pub fn write_trace(profile: &Profile, path: &Path) -> Result<(), OutputError> {
    let write = || {
        let mut file = BufWriter::new(File::create(path)?);
        serde_json::to_writer(&mut file, &json!({ "displayTimeUnit": "ms", "traceEvents": events(profile) }))?;
        file.flush()
    };
    write().map_err(OutputError::writing("a timeline", path))
}

pub(super) fn write(path: &Path, picture: &[u8]) -> Result<(), OutputError> {
    std::fs::write(path, picture).map_err(OutputError::writing("a picture of the pipeline", path))
}

/// One event. `ph` is `M` for names, `X` for a span, `b` and `e` for the ends of a span that may overlap others.
#[derive(Serialize)]
struct Event {
    ph: char,
    pid: usize,
    tid: usize,
    name: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    cat: &'static str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<usize>,
    #[serde(skip_serializing_if = "Value::is_null")]
    args: Value,
}

impl Event {
    fn new(ph: char, rank: usize, name: String, ns: u64) -> Self {
        Self { ph, pid: 0, tid: rank, name, cat: "", ts: ns as f64 / 1e3, dur: None, id: None, args: Value::Null }
    }
}

fn events(profile: &Profile) -> Vec<Event> {
    let args = |of: Event, args| Event { args, ..of };
    let mut events = vec![args(Event::new('M', 0, "process_name".into(), 0), json!({ "name": "meshwork" }))];
    for (rank, track) in profile.tracks.iter().enumerate() {
        events.push(args(Event::new('M', rank, "thread_name".into(), 0), json!({ "name": track.name })));
        events.push(args(Event::new('M', rank, "thread_sort_index".into(), 0), json!({ "sort_index": rank })));
    }
    let micros = |from: u64, to: u64| Some((to - from) as f64 / 1e3);
    let spans: Vec<_> = profile.tracks.iter().map(|track| &track.spans[..]).collect();
    let mut flights = 0;
    for (rank, (spans, slices)) in spans.iter().zip(slices(&spans)).enumerate() {
        for span in spans.iter().filter(|span| span.class.is_frame()) {
            let event = Event::new('X', rank, span.label(), span.start);
            events.push(Event { cat: "frame", dur: micros(span.start, span.end), ..event });
        }
        for slice in slices {
            let args = match slice.kind {
                SliceKind::Work => json!({ "flops": slice.span.flops, "bytes": slice.span.bytes }),
                _ => Value::Null,
            };
            let event = |ph, at| Event::new(ph, rank, label(&slice), at);
            match slice.kind {
                SliceKind::Rest => {}
                SliceKind::Work | SliceKind::Waiting => {
                    let cat = if slice.kind == SliceKind::Work { "work" } else { "waiting" };
                    let dur = micros(slice.start, slice.end);
                    events.push(Event { cat, dur, args, ..event('X', slice.start) });
                }
                SliceKind::Hidden => {
                    let (cat, id) = ("behind other work", Some(flights));
                    let args = json!({ "rank": rank });
                    events.push(Event { cat, id, args, ..event('b', slice.start) });
                    events.push(Event { cat, id, ..event('e', slice.end) });
                    flights += 1;
                }
            }
        }
    }
    events
}
