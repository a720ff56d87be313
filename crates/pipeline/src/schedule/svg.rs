//! Timelines as pictures that look like the figures of the papers.

use super::ActionKind::{Backward, Forward, InputGradient, Update, WeightGradient};
use super::{Action, ActionKind, Interval, Timeline};
use std::fmt::Write;

/// Fill of each kind: the colours of Okabe and Ito (2008), which colour-blind readers can tell apart.
const FILLS: [(ActionKind, [u8; 3]); 4] = [
    (Forward, [86, 180, 233]),
    (Backward, [0, 158, 115]),
    (InputGradient, [230, 159, 0]),
    (WeightGradient, [204, 121, 167]),
];
const UPDATE_FILL: &str = "#222";

/// Sizes in pixels.
const ROW: f64 = 26.0;
const LEFT: f64 = 64.0;
const MARGIN: f64 = 12.0;
const TITLE: f64 = 24.0;
const LEGEND: f64 = 30.0;
const GAP: f64 = 18.0;
/// The shortest action is as wide as this, if the picture then is no wider than `WIDEST`.
const CELL: f64 = 22.0;
const WIDEST: f64 = 2400.0;
/// Width of a letter of a title.
const LETTER: f64 = 6.6;
/// Width of a digit of a micro-batch number.
const DIGIT: f64 = 7.0;

/// Draws timelines below each other, on one scale of time: with a row per rank and a box per action with its
/// micro-batch. Chunks after the first have lighter shades, and updates are dark bars. A thick line marks where a rank
/// of a synchronous schedule starts another optimizer step.
///
/// To compare a prediction with a measured run, give both in the same unit of time. Numbers are left out where boxes
/// become too narrow; the picture's tooltips still have them.
///
/// ```
/// use meshwork_pipeline::{Costs, simulate, svg, zb_v};
///
/// let schedule = zb_v(4, 8);
/// let picture = svg(&[&simulate(&schedule, &Costs::unit(&schedule))?]);
/// assert!(picture.starts_with("<svg xmlns="));
/// assert!(picture.contains("<title>7I3: input gradient of micro-batch 3 through stage 7, from 17 to 18</title>"));
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn svg(timelines: &[&Timeline]) -> String {
    let longest = timelines.iter().map(|timeline| timeline.makespan()).fold(0.0, f64::max);
    let intervals = || timelines.iter().flat_map(|timeline| timeline.ranks.iter().flatten());
    let lengths = intervals().map(|interval| interval.end - interval.start).filter(|&length| length > 0.0);
    let shortest = lengths.fold(f64::INFINITY, f64::min);
    // Pixels per unit of time, finite where times are subnormal too.
    let scale = match longest > 0.0 {
        true => (CELL / shortest).min((WIDEST - LEFT - MARGIN) / longest).min(f64::MAX),
        false => 1.0,
    };
    let legend = Legend::new(timelines);
    let widest = timelines.iter().map(|timeline| timeline.name.chars().count() + facts(timeline).chars().count()).max();
    let titles = 2.0 * MARGIN + LETTER * widest.unwrap_or(0) as f64;
    let width = (LEFT + longest * scale + MARGIN).max(legend.width()).max(titles);

    let mut body = String::new();
    let mut top = MARGIN;
    for timeline in timelines {
        top = panel(&mut body, timeline, scale, top) + GAP;
    }
    legend.draw(&mut body, top);
    let height = top + LEGEND;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} \
         {height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}</svg>\n"
    )
}

/// The text after the name of a timeline.
fn facts(timeline: &Timeline) -> String {
    let peaks = timeline.peak_activations().into_iter().fold(0.0, f64::max);
    let (span, bubble) = (number(timeline.span()), 100.0 * timeline.bubble_of_total());
    format!("span {span}, bubble {bubble:.1}% of it, at most {} activations on a rank", number(peaks))
}

/// Draws one timeline from `top` on, and returns where it ends.
fn panel(body: &mut String, timeline: &Timeline, scale: f64, top: f64) -> f64 {
    let (origin, first, width) = (timeline.start(), top + TITLE, timeline.makespan() * scale);
    let _ = writeln!(
        body,
        "<text x=\"{MARGIN}\" y=\"{:.1}\"><tspan font-weight=\"bold\">{}</tspan> <tspan fill=\"#555\">{}</tspan></text>",
        top + 13.0,
        escaped(&timeline.name),
        facts(timeline),
    );
    for (rank, row) in timeline.ranks.iter().enumerate() {
        let y = first + rank as f64 * ROW;
        let _ = writeln!(body, "<text x=\"{MARGIN}\" y=\"{:.1}\">rank {rank}</text>", y + 17.0);
        let _ = writeln!(body, "<g transform=\"translate({LEFT} {y:.1})\">");
        let _ = writeln!(body, "<rect width=\"{width:.2}\" height=\"{ROW}\" fill=\"#f0f0f0\"/>");
        let held: Vec<usize> =
            (0..timeline.placement.len()).filter(|&stage| timeline.placement[stage] == rank).collect();
        Row { intervals: row, held, micros_per_step: timeline.micros_per_step, origin, scale }.draw(body);
        body.push_str("</g>\n");
    }
    let bottom = first + timeline.ranks.len() as f64 * ROW;
    let _ = writeln!(
        body,
        "<rect x=\"{LEFT}\" y=\"{first:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"none\" stroke=\"#333\"/>",
        width,
        bottom - first
    );
    bottom
}

/// The actions of one rank.
struct Row<'a> {
    intervals: &'a [Interval],
    /// The stages of the rank.
    held: Vec<usize>,
    micros_per_step: usize,
    origin: f64,
    scale: f64,
}

impl Row<'_> {
    fn draw(&self, body: &mut String) {
        let of = |update: bool| {
            let computed = self.intervals.iter().filter(|interval| !interval.action.kind.is_message());
            computed.filter(move |interval| (interval.action.kind == Update) == update)
        };
        let narrowest = of(false).map(|interval| self.width(interval)).fold(f64::INFINITY, f64::min);
        // Borders must not cover narrow boxes.
        let border = if narrowest < 4.0 { 0.1 } else { 0.6 };
        let _ = writeln!(body, "<g stroke=\"#333\" stroke-width=\"{border}\">");
        for interval in of(false) {
            let fill = shade(interval.action.kind, self.chunk(interval), self.held.len());
            self.bar(body, interval, self.x(interval), self.width(interval), &fill);
        }
        body.push_str("</g>\n");
        if of(true).next().is_none() {
            for interval in of(false).filter(|interval| self.starts_step(interval)) {
                let x = self.x(interval);
                let _ = writeln!(body, "<path d=\"M{x:.2} 0v{ROW}\" stroke=\"#000\" stroke-width=\"3\"/>");
            }
        }
        // They are drawn even if they take no time: as bars over the boxes beside them.
        for interval in of(true) {
            self.bar(body, interval, self.x(interval) - 1.5, self.width(interval).max(4.0), UPDATE_FILL);
        }
        body.push_str("<g text-anchor=\"middle\" pointer-events=\"none\">\n");
        for interval in of(false) {
            let (text, width) = (interval.action.micro.to_string(), self.width(interval));
            if text.len() as f64 * DIGIT <= width - 2.0 {
                let _ = writeln!(body, "<text x=\"{:.2}\" y=\"17\">{text}</text>", self.x(interval) + width / 2.0);
            }
        }
        body.push_str("</g>\n");
    }

    fn x(&self, interval: &Interval) -> f64 {
        (interval.start - self.origin) * self.scale
    }

    fn width(&self, interval: &Interval) -> f64 {
        (interval.end - interval.start) * self.scale
    }

    fn chunk(&self, interval: &Interval) -> usize {
        self.held.iter().position(|&stage| stage == interval.action.stage).unwrap_or(0)
    }

    fn starts_step(&self, interval: &Interval) -> bool {
        let Action { kind, micro, .. } = interval.action;
        kind == Forward && self.chunk(interval) == 0 && micro > 0 && micro.is_multiple_of(self.micros_per_step)
    }

    /// A box with its tooltip.
    fn bar(&self, body: &mut String, interval: &Interval, x: f64, width: f64, fill: &str) {
        let action @ Action { kind, stage, micro } = interval.action;
        let [start, end] = [interval.start, interval.end].map(|time| number(time - self.origin));
        let _ = writeln!(
            body,
            "<rect x=\"{x:.2}\" width=\"{width:.2}\" height=\"{ROW}\" fill=\"{fill}\"><title>{action}: {} of \
             micro-batch {micro} through stage {stage}, from {start} to {end}</title></rect>",
            kind.in_words()
        );
    }
}

/// The fill of a kind in one of several chunks: the further down the model, the lighter.
fn shade(kind: ActionKind, chunk: usize, chunks: usize) -> String {
    let Some((_, rgb)) = FILLS.iter().find(|(known, _)| *known == kind) else {
        return UPDATE_FILL.to_string();
    };
    let towards_white = if chunks > 1 { 0.55 * chunk as f64 / (chunks - 1) as f64 } else { 0.0 };
    let mixed = rgb.map(|colour| (f64::from(colour) + (255.0 - f64::from(colour)) * towards_white).round() as u8);
    format!("#{:02x}{:02x}{:02x}", mixed[0], mixed[1], mixed[2])
}

/// The legend of a picture's colours: the kinds that occur, in the shades of the largest number of chunks.
struct Legend {
    entries: Vec<(ActionKind, usize)>,
}

impl Legend {
    fn new(timelines: &[&Timeline]) -> Self {
        let chunks_of = |timeline: &Timeline| {
            let on = |rank| timeline.placement.iter().filter(|&&home| home == rank).count();
            (0..timeline.ranks.len()).map(on).max().unwrap_or(1)
        };
        let chunks_with = |kind| {
            let has =
                |timeline: &&&Timeline| timeline.ranks.iter().flatten().any(|interval| interval.action.kind == kind);
            timelines.iter().filter(has).map(|timeline| chunks_of(timeline)).max()
        };
        let kinds = FILLS.iter().map(|&(kind, _)| kind).chain([Update]);
        Self { entries: kinds.filter_map(|kind| Some((kind, chunks_with(kind)?))).collect() }
    }

    /// The width of each entry: its swatches and its words.
    fn widths(&self) -> impl Iterator<Item = f64> {
        self.entries
            .iter()
            .map(|&(kind, chunks)| 22.0 * chunks as f64 + 7.0 * Self::words(kind, chunks).len() as f64 + 20.0)
    }

    fn width(&self) -> f64 {
        LEFT + self.widths().sum::<f64>()
    }

    fn words(kind: ActionKind, chunks: usize) -> String {
        match (kind, chunks) {
            (Update, _) | (_, 1) => kind.in_words().to_string(),
            (_, 2) => format!("{}, first and second chunk", kind.in_words()),
            _ => format!("{}, chunks 1 to {chunks}", kind.in_words()),
        }
    }

    fn draw(&self, body: &mut String, top: f64) {
        let mut left = LEFT;
        for (&(kind, chunks), width) in self.entries.iter().zip(self.widths()) {
            let swatches = if kind == Update { 1 } else { chunks };
            for chunk in 0..swatches {
                let _ = writeln!(
                    body,
                    "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"18\" height=\"14\" fill=\"{}\" stroke=\"#333\" \
                     stroke-width=\"0.6\"/>",
                    left + 20.0 * chunk as f64,
                    shade(kind, chunk, chunks)
                );
            }
            let _ = writeln!(
                body,
                "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left + 20.0 * swatches as f64 + 4.0,
                top + 11.5,
                Self::words(kind, chunks)
            );
            left += width;
        }
    }
}

/// A number without the noise of its last bits.
fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// Text for XML, where control characters have no place.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars().filter(|c| !c.is_control()) {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            c => escaped.push(c),
        }
    }
    escaped
}
