//! The page.

use super::chart::{Curve, Marks, bars, lines, short};
use super::run::{Run, Step};
use std::collections::BTreeSet;
use std::fmt::Write;

const STYLE: &str = include_str!("style.css");

/// An HTML page about these runs; differences between their configurations come first.
pub fn page(runs: &[Run]) -> String {
    let title = runs.iter().map(|run| escaped(&run.name)).collect::<Vec<_>>().join(", ");
    let mut html = format!(
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>"
    );
    summary(&mut html, runs);
    html.push_str("<div class=charts>");
    let mut train: Vec<Curve> = curves(runs, |step| step.loss);
    train.extend(runs.iter().enumerate().filter(|(_, run)| !run.validation.is_empty()).map(|(at, run)| {
        let points = run.validation.iter().map(|(&step, &loss)| (step as f64, loss)).collect();
        Curve { run: at, points, marks: Marks::Dots }
    }));
    let dots = runs.iter().any(|run| !run.validation.is_empty());
    figure(&mut html, if dots { "Loss; dots: validation" } else { "Loss" }, |title| lines(title, &train));
    figure(&mut html, "Gradient norm, before clipping", |title| lines(title, &curves(runs, |step| step.grad_norm)));
    figure(&mut html, "Tokens per second", |title| lines(title, &curves(runs, |step| step.tokens_per_s)));
    figure(&mut html, "Time of a step, ms", |title| lines(title, &curves(runs, |step| step.step_ms)));
    figure(&mut html, "Learning rate", |title| lines(title, &curves(runs, |step| step.lr)));
    memory(&mut html, runs);
    communication(&mut html, runs);
    html.push_str("</div>");
    runs.iter().enumerate().for_each(|(at, run)| mesh(&mut html, at, run));
    configuration(&mut html, runs);
    html.push_str("</main></body></html>\n");
    html
}

fn figure(html: &mut String, title: &str, svg: impl Fn(&str) -> String) {
    _ = write!(html, "<figure><figcaption>{title}</figcaption>{}</figure>", svg(title));
}

fn curves(runs: &[Run], of: impl Fn(&Step) -> f64) -> Vec<Curve> {
    let points = |run: &Run| run.steps.iter().map(|(&step, numbers)| (step as f64, of(numbers))).collect();
    runs.iter().enumerate().map(|(at, run)| Curve { run: at, points: points(run), marks: Marks::Line }).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Formats bytes for readers.
fn bytes(value: f64) -> String {
    match value {
        1073741824.0.. => format!("{:.2} GiB", value / 1073741824.0),
        1048576.0.. => format!("{:.1} MiB", value / 1048576.0),
        1024.0.. => format!("{:.1} KiB", value / 1024.0),
        _ => format!("{value:.0} B"),
    }
}

fn summary(html: &mut String, runs: &[Run]) {
    html.push_str(
        "<div class=wide><table><thead><tr><th>run<th>mesh<th>parameters<th>steps<th>last loss<th>validation<th>tokens/s<th>peak of a \
         rank<th>time</thead><tbody>",
    );
    for (at, run) in runs.iter().enumerate() {
        let (last, numbers) =
            run.steps.last_key_value().map_or((0, Step::default()), |(&step, last)| (step, last.clone()));
        let peak = run.on_mesh().flat_map(|step| step.peak_bytes.iter().copied()).fold(0.0, f64::max);
        let speed = median(run.steps.values().map(|step| step.tokens_per_s).collect());
        let validation = run.validation.values().next_back().map_or("–".to_owned(), |loss| format!("{loss:.4}"));
        let time = run.seconds.map_or("did not end".to_owned(), |seconds| format!("{seconds:.1} s"));
        _ = write!(
            html,
            "<tr><td><span class=\"swatch b{}\"></span>{}<td>{}<td>{}<td>{last}<td>{:.4}<td>{validation}<td>{}<td>{}<td>{time}",
            at % 6,
            escaped(&run.name),
            run.mesh_text(),
            short(run.parameters as f64),
            numbers.loss,
            short(speed.round()),
            bytes(peak),
        );
    }
    html.push_str("</tbody></table></div>");
}

/// Bars of bytes, in the unit of the longest, so that the numbers beside the lines are round.
fn byte_bars(html: &mut String, title: &str, labels: &[String], mut all: Vec<Vec<f64>>) {
    let most = all.iter().flatten().copied().fold(0.0, f64::max);
    let units = [("GiB", 1_073_741_824.0), ("MiB", 1_048_576.0), ("KiB", 1024.0)];
    let (unit, size) = units.into_iter().find(|(_, size)| most >= *size).unwrap_or(("B", 1.0));
    all.iter_mut().flatten().for_each(|value| *value /= size);
    figure(html, title, |title| bars(title, labels, &all, |value| format!("{} {unit}", short(value))));
}

fn memory(html: &mut String, runs: &[Run]) {
    let peaks = |run: &Run| -> Vec<f64> {
        let ranks = run.on_mesh().map(|step| step.peak_bytes.len()).max().unwrap_or(0);
        let of = |rank: usize| run.on_mesh().filter_map(|step| step.peak_bytes.get(rank).copied()).fold(0.0, f64::max);
        (0..ranks).map(of).collect()
    };
    let all: Vec<Vec<f64>> = runs.iter().map(peaks).collect();
    let ranks = all.iter().map(Vec::len).max().unwrap_or(0);
    let labels: Vec<String> = (0..ranks).map(|rank| rank.to_string()).collect();
    byte_bars(html, &format!("Peak memory of each rank{}", on_last_mesh(runs)), &labels, all);
}

fn communication(html: &mut String, runs: &[Run]) {
    let axes: Vec<String> = {
        let named = runs.iter().flat_map(|run| run.on_mesh().flat_map(|step| &step.comm_bytes));
        let mut seen = BTreeSet::new();
        named.filter(|(axis, _)| seen.insert(axis)).map(|(axis, _)| axis.clone()).collect()
    };
    let of = |run: &Run| -> Vec<f64> {
        let mean = |axis: &String| {
            let sent = run.on_mesh().flat_map(|step| step.comm_bytes.iter().filter(|(name, _)| name == axis));
            sent.map(|(_, bytes)| bytes).sum::<f64>() / run.on_mesh().count().max(1) as f64
        };
        axes.iter().map(mean).collect()
    };
    let all: Vec<Vec<f64>> = runs.iter().map(of).collect();
    let labels: Vec<String> = axes.iter().map(|axis| escaped(axis)).collect();
    byte_bars(html, &format!("Communication of a rank in a step, by axis{}", on_last_mesh(runs)), &labels, all);
}

/// The note for runs of which one continued on another mesh.
fn on_last_mesh(runs: &[Run]) -> &'static str {
    if runs.iter().any(Run::moved) { ", on its last mesh" } else { "" }
}

/// Ranks to draw; more would be too small to read.
const MOST_RANKS: u64 = 512;

/// The ranks of a mesh: a column of boxes for each stage, a row for each replica, tensor-parallel ranks side by side.
fn mesh(html: &mut String, at: usize, run: &Run) {
    let [dp, tp, pp, cp] = ["dp", "tp", "pp", "cp"].map(|axis| run.degree(axis));
    let world = dp.saturating_mul(tp).saturating_mul(pp).saturating_mul(cp);
    _ = write!(
        html,
        "<h2><span class=\"swatch b{}\"></span>Mesh of {}: {}</h2>",
        at % 6,
        escaped(&run.name),
        run.mesh_text()
    );
    if run.moved() {
        let before = run.before.iter().map(|(step, mesh)| format!("from step {step} on {mesh}")).collect::<Vec<_>>();
        let since = if run.since > 0 {
            format!("from step {} on this mesh", run.since)
        } else {
            "then on this mesh".to_owned()
        };
        _ = write!(html, "<p>It trained {}, and {since}.</p>", escaped(&before.join(", ")));
    }
    if world > MOST_RANKS {
        _ = write!(html, "<p>{world} ranks: too many to draw.</p>");
        return;
    }
    let inner = tp * cp;
    html.push_str("<div class=wide><div class=mesh>");
    for stage in 0..pp {
        _ = write!(html, "<div class=stage><b>{}</b>", if pp > 1 { format!("pp {stage}") } else { "ranks".to_owned() });
        for replica in 0..dp {
            html.push_str("<div class=replica>");
            if dp > 1 {
                _ = write!(html, "<i>dp {replica}</i>");
            }
            for rank in 0..inner {
                // tp is numbered fastest, then cp, dp, pp.
                _ = write!(html, "<span class=rank>{}</span>", (stage * dp + replica) * inner + rank);
            }
            html.push_str("</div>");
        }
        html.push_str("</div>");
    }
    html.push_str("</div></div>");
}

fn configuration(html: &mut String, runs: &[Run]) {
    let keys: BTreeSet<&String> = runs.iter().flat_map(|run| run.config.keys()).collect();
    let value = |run: &Run, key: &String| run.config.get(key).map_or("–".to_owned(), |value| escaped(value));
    let differs = |key: &&&String| runs.iter().any(|run| value(run, key) != value(&runs[0], key));
    let table = |html: &mut String, keys: Vec<&String>| {
        html.push_str("<div class=wide><table><thead><tr><th>key");
        runs.iter().for_each(|run| _ = write!(html, "<th>{}", escaped(&run.name)));
        html.push_str("</thead><tbody>");
        for key in keys {
            _ = write!(html, "<tr><td>{}", escaped(key));
            runs.iter().for_each(|run| _ = write!(html, "<td>{}", value(run, key)));
        }
        html.push_str("</tbody></table></div>");
    };
    let different: Vec<&String> = keys.iter().filter(differs).copied().collect();
    if runs.len() > 1 && !different.is_empty() {
        html.push_str("<h2>Configuration: differences</h2>");
        table(html, different);
    }
    html.push_str("<details><summary>Configuration: all keys</summary>");
    table(html, keys.into_iter().collect());
    html.push_str("</details>");
}

/// Text for HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
