//! Timelines as a trace that Perfetto and chrome://tracing open.

use super::{Action, Timeline};
use std::fmt::Write;

/// Writes timelines as a trace in the JSON form of Chrome's Trace Event Format: a process per timeline, a track per
/// rank, an event per action. `microseconds` is how many of them a timeline's unit of time has.
///
/// ```
/// use meshwork_pipeline::{Costs, chrome_trace, gpipe, simulate};
///
/// let schedule = gpipe(1, 1);
/// let timeline = simulate(&schedule, &Costs::unit(&schedule))?;
/// assert_eq!(
///     chrome_trace(&[&timeline], 1000.0),
///     r#"{"displayTimeUnit":"ms","traceEvents":[
/// {"ph":"M","name":"process_name","pid":0,"args":{"name":"gpipe"}},
/// {"ph":"M","name":"thread_name","pid":0,"tid":0,"args":{"name":"rank 0"}},
/// {"ph":"X","name":"0F0","cat":"forward","pid":0,"tid":0,"ts":0,"dur":1000,"args":{"stage":0,"micro":0}},
/// {"ph":"X","name":"0B0","cat":"backward","pid":0,"tid":0,"ts":1000,"dur":2000,"args":{"stage":0,"micro":0}}
/// ]}
/// "#
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn chrome_trace(timelines: &[&Timeline], microseconds: f64) -> String {
    let mut events = Vec::new();
    for (pid, timeline) in timelines.iter().enumerate() {
        let (name, origin) = (quoted(&timeline.name), timeline.start());
        events.push(format!(r#"{{"ph":"M","name":"process_name","pid":{pid},"args":{{"name":{name}}}}}"#));
        for (rank, row) in timeline.ranks.iter().enumerate() {
            events.push(format!(
                r#"{{"ph":"M","name":"thread_name","pid":{pid},"tid":{rank},"args":{{"name":"rank {rank}"}}}}"#
            ));
            for interval in row {
                let action @ Action { kind, stage, micro } = interval.action;
                let start = (interval.start - origin) * microseconds;
                let length = (interval.end - interval.start) * microseconds;
                events.push(format!(
                    r#"{{"ph":"X","name":"{action}","cat":"{}","pid":{pid},"tid":{rank},"ts":{start},"dur":{length},"args":{{"stage":{stage},"micro":{micro}}}}}"#,
                    kind.in_words()
                ));
            }
        }
    }
    format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"))
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => _ = write!(quoted, "\\u{:04x}", u32::from(c)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
