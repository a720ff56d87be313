//! Curves and bars as SVG. Colours come from the page: `stroke` and `fill` of the classes `s0` to `s5`, one per run.

use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
/// Around the plot: right, top, bottom. The left margin has room for the numbers of the y axis.
const MARGIN: [f64; 3] = [30.0, 12.0, 30.0];
/// Width of a character of these numbers on a narrow page, where they are largest.
const CHARACTER: f64 = 11.0;
/// Number of points drawn per curve; more would not be visible. Of neighbouring points, the lowest and the highest are
/// kept.
const POINTS: usize = 800;

/// A curve of one run.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    /// The run.
    pub(super) run: usize,
    /// (step, value), by step.
    pub(super) points: Vec<(f64, f64)>,
    /// What is drawn of them.
    pub(super) marks: Marks,
}

/// What is drawn of the points of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "specks and numbers are for pictures of plans")]
pub(super) enum Marks {
    Line,
    Dots,
    /// Small dots that show through each other, for thousands of points.
    Specks,
    /// Circles with the number of each point, from 1.
    Numbers,
}

/// What axes say.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Axes<'a> {
    /// Behind the numbers of the x axis.
    pub(super) x: &'a str,
    /// Above those of the y axis.
    pub(super) y: &'a str,
    /// The values of x are powers of ten.
    pub(super) powers: bool,
}

/// Maps values to places on the picture, with ticks.
struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// A scale over the finite values.
    fn over(values: impl Iterator<Item = f64> + Clone, start: f64, end: f64) -> Self {
        let finite = values.filter(|value| value.is_finite());
        let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
        let (from, to) = match (low.is_finite(), high - low) {
            (false, _) => (0.0, 1.0),
            // One value: a range around it.
            (true, spread) if spread <= 0.0 => (low - low.abs().max(1e-9) * 0.5, low + low.abs().max(1e-9) * 0.5),
            _ => (low, high),
        };
        Self { from, to, start, end }
    }

    fn at(&self, value: f64) -> f64 {
        self.start + (value - self.from) / (self.to - self.from) * (self.end - self.start)
    }

    /// Round numbers within the range, about `count` of them.
    fn ticks(&self, count: f64) -> Vec<f64> {
        let step = round_step((self.to - self.from) / count);
        let first = (self.from / step).ceil() as i64;
        let last = (self.to / step).floor() as i64;
        (first..=last.min(first.saturating_add(50))).map(|at| at as f64 * step).collect()
    }
}

/// The next of 1, 2, 5, 10, 20, ... of any decimal power.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|round| *round >= step * 0.999).unwrap_or(step)
}

/// Formats a number for readers: 1.2k, 3M, 2e-5.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    let trim = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    match size {
        0.0 => "0".to_owned(),
        1e12.. => format!("{value:.1e}"),
        1e9.. => format!("{}G", trim(format!("{:.2}", value / 1e9))),
        1e6.. => format!("{}M", trim(format!("{:.2}", value / 1e6))),
        1e4.. => format!("{}k", trim(format!("{:.1}", value / 1e3))),
        1e-3.. => trim(format!("{value:.4}")),
        _ => format!("{value:.1e}"),
    }
}

/// The curves over their steps. `title` is for screen readers.
pub(super) fn lines(title: &str, curves: &[Curve]) -> String {
    plot(title, Axes::default(), curves)
}

/// The same with names of the axes.
pub(super) fn plot(title: &str, axes: Axes, curves: &[Curve]) -> String {
    let [right, top, bottom] = MARGIN;
    let top = if axes.y.is_empty() { top } else { top + 14.0 };
    let all = || curves.iter().flat_map(|curve| curve.points.iter());
    let y = Scale::over(all().map(|point| point.1), HEIGHT - bottom, top);
    let mut svg = open(title);
    let left = frame(&mut svg, &y, &short);
    let x = Scale::over(all().map(|point| point.0), left, WIDTH - right);
    let mut text = |anchor: &str, x: f64, y: f64, text: &str| {
        if !text.is_empty() {
            _ = write!(svg, "<text class=tick text-anchor={anchor} x={x:.1} y={y:.1}>{text}</text>");
        }
    };
    let room = CHARACTER * axes.x.len() as f64;
    // The name of the axis is at its end; a number that reaches into it is left out.
    for tick in x.ticks(5.0).into_iter().filter(|&tick| x.at(tick) < WIDTH - room) {
        text("middle", x.at(tick), HEIGHT - 10.0, &short(if axes.powers { 10f64.powf(tick) } else { tick }));
    }
    text("end", WIDTH - 2.0, HEIGHT - 10.0, axes.x);
    text("start", 2.0, 12.0, axes.y);
    for Curve { run, points, marks } in curves {
        let class = run % 6;
        if *marks != Marks::Line {
            for (at, (step, value)) in points.iter().enumerate().filter(|(_, (_, value))| value.is_finite()) {
                let (x, y) = (x.at(*step), y.at(*value));
                _ = match marks {
                    Marks::Line | Marks::Dots => write!(svg, "<circle class=\"f{class}\" cx={x:.1} cy={y:.1} r=3.5 />"),
                    Marks::Specks => {
                        write!(svg, "<circle class=\"f{class}\" cx={x:.1} cy={y:.1} r=1.6 opacity=0.5 />")
                    }
                    Marks::Numbers => write!(
                        svg,
                        "<circle class=\"f{class}\" cx={x:.1} cy={y:.1} r=6 /><text fill=#fff font-size=9 \
                         text-anchor=middle x={x:.1} y={:.1}>{}</text>",
                        y + 3.2,
                        at + 1
                    ),
                };
            }
            continue;
        }
        // A value that is not a number breaks the line.
        for part in thinned(points).split(|(_, value)| !value.is_finite()).filter(|part| !part.is_empty()) {
            let places: Vec<String> =
                part.iter().map(|(step, value)| format!("{:.1},{:.1}", x.at(*step), y.at(*value))).collect();
            _ = write!(svg, "<polyline class=\"s{class}\" points=\"{}\" />", places.join(" "));
        }
    }
    svg.push_str("</svg>");
    svg
}

/// A bar for each label and run, from zero.
pub(super) fn bars(title: &str, labels: &[String], runs: &[Vec<f64>], unit: impl Fn(f64) -> String) -> String {
    let [right, top, bottom] = MARGIN;
    let most = runs.iter().flatten().copied().filter(|value| value.is_finite()).fold(0.0, f64::max);
    let y = Scale { from: 0.0, to: if most > 0.0 { most } else { 1.0 }, start: HEIGHT - bottom, end: top };
    let mut svg = open(title);
    let left = frame(&mut svg, &y, &unit);
    let slot = (WIDTH - left - right) / labels.len().max(1) as f64;
    let bar = slot * 0.8 / runs.len().max(1) as f64;
    for (at, label) in labels.iter().enumerate() {
        let start = left + slot * (at as f64 + 0.1);
        for (run, values) in runs.iter().enumerate() {
            let Some(value) = values.get(at).filter(|value| value.is_finite()) else { continue };
            let (place, class) = (y.at(*value), run % 6);
            _ = write!(
                svg,
                "<rect class=\"f{class}\" x={:.1} y={place:.1} width={:.1} height={:.1}><title>{label}: {}</title></rect>",
                start + bar * run as f64,
                (bar - 1.0).max(0.5),
                HEIGHT - bottom - place,
                unit(*value)
            );
        }
        // Every label if there is room, else some.
        if at % labels.len().div_ceil(10) == 0 {
            let middle = start + slot * 0.4;
            _ = write!(svg, "<text class=tick text-anchor=middle x={middle:.1} y={:.1}>{label}</text>", HEIGHT - 10.0);
        }
    }
    svg.push_str("</svg>");
    svg
}

fn open(title: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=img aria-label=\"{title}\">")
}

/// Lines and numbers of the y axis. Returns the left edge of the plot.
fn frame(svg: &mut String, y: &Scale, unit: &dyn Fn(f64) -> String) -> f64 {
    let [right, ..] = MARGIN;
    let ticks = y.ticks(4.0);
    let widest = ticks.iter().map(|&tick| unit(tick).chars().count()).max().unwrap_or(0);
    let left = (widest as f64 * CHARACTER + 12.0).max(64.0);
    for tick in ticks {
        let at = y.at(tick);
        _ = write!(svg, "<path class=grid d=\"M{left} {at:.1}H{:.1}\" />", WIDTH - right);
        _ = write!(svg, "<text class=tick text-anchor=end x={:.1} y={:.1}>{}</text>", left - 6.0, at + 4.0, unit(tick));
    }
    left
}

/// At most about [`POINTS`] of the points: of each group of neighbours the lowest and the highest, and every NaN.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let group = points.len().div_ceil(POINTS / 2);
    if group <= 2 {
        return points.to_vec();
    }
    let ends = |group: &[(f64, f64)]| {
        let mut kept: Vec<(f64, f64)> = group.iter().copied().filter(|(_, value)| !value.is_finite()).collect();
        let finite = || group.iter().copied().filter(|(_, value)| value.is_finite());
        kept.extend(finite().min_by(|a, b| a.1.total_cmp(&b.1)));
        kept.extend(finite().max_by(|a, b| a.1.total_cmp(&b.1)));
        kept.sort_by(|a, b| a.0.total_cmp(&b.0));
        kept
    };
    points.chunks(group).flat_map(ends).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let ticks = |from, to| Scale { from, to, start: 0.0, end: 1.0 }.ticks(4.0);
        assert_eq!(ticks(0.0, 10.0), [0.0, 5.0, 10.0]);
        assert_eq!(ticks(2.29, 5.54), [3.0, 4.0, 5.0]);
        assert!(ticks(0.0, 3e-4).len() >= 3);
        assert_eq!([0.0, 12_345.0, 3e-4, 2.5, 1.5e9, -7e6].map(short), ["0", "12.3k", "3.0e-4", "2.5", "1.5G", "-7M"]);
    }

    #[test]
    fn spikes_survive_thinning_and_what_is_no_number_breaks_the_line() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|step| (f64::from(step), 1.0)).collect();
        points[5001].1 = 9.0;
        let thin = thinned(&points);
        assert!(thin.len() <= POINTS + 2 && thin.contains(&(5001.0, 9.0)));
        points[7000].1 = f64::NAN;
        let svg = lines("loss", &[Curve { run: 0, points, marks: Marks::Line }]);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        // One point, or none, must not divide by zero.
        for points in [vec![(3.0, 2.0)], vec![], vec![(1.0, f64::NAN)]] {
            let svg = lines("loss", &[Curve { run: 0, points, marks: Marks::Dots }]);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
