//! Time against memory of all plans, as a page and as a picture alone: `--picture`.

use crate::chart::{Axes, Curve, Marks, plot};
use meshwork::plan::search::{Found, Keys, Plan};
use meshwork::plan::{Cluster, PlanError};
use std::fs;
use std::path::Path;

const STYLE: &str = include_str!("../report/style.css");

/// The colours of a picture alone, for programs that know no variables of styles.
const ALONE: &str = "svg { background: #fff; font: 13px sans-serif } polyline { fill: none; stroke-width: 1.8 } \
     .grid { stroke: #dcdce3; fill: none } .tick { fill: #6b6b76; font-size: 11px } \
     .s0 { stroke: #2563c9 } .s1 { stroke: #d2691e } .s2 { stroke: #1d8a52 } .s3 { stroke: #b3276b } \
     .f0 { fill: #2563c9 } .f1 { fill: #d2691e } .f2 { fill: #1d8a52 } .f3 { fill: #b3276b } .f4 { fill: #7a5bd0 }";

/// Points that are drawn of all plans: of each cell of such a grid, one.
const CELLS: f64 = 90.0;

/// Plans this much slower than the best, or larger than a card, are not drawn: they would press the others into a
/// corner.
const SLOWEST: f64 = 2.0;
const LARGEST: f64 = 2.0;

/// Writes the page of a search, and the picture beside it.
pub fn write(path: &Path, found: &Found, cluster: &Cluster, model: &str) -> Result<(), PlanError> {
    let title =
        format!("{model} on {} {} cards: seconds of a step against GB of a card", cluster.cards(), cluster.card.name);
    let front: Vec<&Plan> = found.front.iter().filter(|plan| plan.step.seconds <= slowest(found)).collect();
    let best: Vec<&Plan> = found.best.iter().collect();
    let same = same(best.iter().chain(&front).map(|plan| &plan.keys));
    let keys: Vec<String> = same.iter().map(|(key, value)| escaped(&format!("{key} = {value}"))).collect();
    let tables = format!(
        "<p>All of them have {}.</p>{}{}",
        keys.join(", "),
        table("The best plan of each mesh, with the bytes of a dry run", &best, &same),
        table("Plans that no other beats in both, with estimated bytes", &front, &same)
    );
    let legend = [
        "fits",
        "too large",
        "no other is faster and smaller",
        "memory of a card",
        "the best of each mesh, in the order of the list",
    ];
    write_page(path, &title, &draw(found, cluster), &legend, &tables)
}

/// Seconds up to which plans are drawn.
fn slowest(found: &Found) -> f64 {
    SLOWEST * found.best.first().or(found.smallest.as_ref()).map_or(0.0, |plan| plan.step.seconds)
}

/// Writes a page with a picture and what follows it to `path`, and the picture alone beside it. `legend` names the
/// curves in their order.
pub fn write_page(path: &Path, title: &str, svg: &str, legend: &[&str], rest: &str) -> Result<(), PlanError> {
    let names: String =
        legend.iter().enumerate().map(|(at, name)| format!("<span class=\"swatch b{at}\"></span>{name}<br>")).collect();
    let page = format!(
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content=\"width=device-width, \
         initial-scale=1\"><title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>\
         <figure>{svg}</figure><p>{names}</p>{rest}</main></body></html>\n"
    );
    // Alone it brings its colours, and the names of its curves as text.
    let text: String = legend
        .iter()
        .enumerate()
        .map(|(at, name)| format!("<text class=\"tick f{at}\" x=64 y={}>{name}</text>", 292 + 16 * at))
        .collect();
    let text = format!("<text class=tick x=64 y=274>{title}</text>{text}");
    let height = 284 + 16 * legend.len();
    let svg = svg.replacen("0 0 640 260", &format!("0 0 640 {height}"), 1);
    let head = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"960\" ";
    let alone = svg.replacen("<svg ", head, 1).replacen('>', &format!("><style>{ALONE}</style>"), 1);
    let alone = quoted(&alone.replace("</svg>", &format!("{text}</svg>\n")));
    for (path, text) in [(path.to_owned(), page), (path.with_extension("svg"), alone)] {
        fs::write(&path, text).map_err(|error| PlanError::File {
            file: path.display().to_string(),
            problem: error.to_string(),
            valid: "name a file in a folder that exists".into(),
        })?;
    }
    Ok(())
}

fn draw(found: &Found, cluster: &Cluster) -> String {
    let card = cluster.card.memory / 1e9;
    let (slowest, largest) = (slowest(found), LARGEST * card);
    let of = |plan: &Plan| (plan.step.memory / 1e9, plan.step.seconds);
    let inside = |(memory, seconds): &(f64, f64)| *seconds <= slowest && *memory <= largest;
    let shown: Vec<(f64, f64)> =
        found.points.iter().map(|[seconds, bytes]| (bytes / 1e9, *seconds)).filter(inside).collect();
    let (fits, large): (Vec<_>, Vec<_>) = thinned(&shown).into_iter().partition(|(memory, _)| *memory <= card);
    // From small to large; a plan is as fast as the last smaller one until there is room for the next.
    let mut front: Vec<(f64, f64)> = Vec::new();
    for (memory, seconds) in found.front.iter().rev().map(of).filter(inside) {
        front.extend(front.last().map(|last| (memory, last.1)));
        front.push((memory, seconds));
    }
    let ends = |pick: fn(f64, f64) -> f64, from: f64| shown.iter().map(|point| point.1).fold(from, pick);
    let wall = vec![(card, ends(f64::min, f64::INFINITY)), (card, ends(f64::max, 0.0))];
    let best: Vec<(f64, f64)> = found.best.iter().map(of).filter(inside).collect();
    let curves = [
        (fits, Marks::Specks),
        (large, Marks::Specks),
        (front, Marks::Line),
        (wall, Marks::Line),
        (best, Marks::Numbers),
    ];
    let curves = curves.into_iter().enumerate().map(|(run, (points, marks))| Curve { run, points, marks });
    let axes = Axes { x: "GB", y: "seconds of a step", powers: false };
    plot("Seconds of a step against GB of a card", axes, &curves.collect::<Vec<_>>())
}

/// One point of each cell of a grid.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let most = points.iter().fold((0.0_f64, 0.0_f64), |most, point| (most.0.max(point.0), most.1.max(point.1)));
    let cell = |point: &(f64, f64)| ((point.0 / most.0 * CELLS) as i64, (point.1 / most.1 * CELLS) as i64);
    let mut seen = std::collections::BTreeSet::new();
    points.iter().filter(|point| seen.insert(cell(point))).copied().collect()
}

/// The keys that all of these have with the same value.
fn same<'a>(mut all: impl Iterator<Item = &'a Keys>) -> Keys {
    let mut same = all.next().cloned().unwrap_or_default();
    for keys in all {
        same.retain(|key, value| keys.get(key) == Some(value));
    }
    same
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Plans, each with the keys that are its own.
fn table(title: &str, plans: &[&Plan], same: &Keys) -> String {
    let row = |(at, plan): (usize, &&Plan)| {
        let mut own = (*plan).clone();
        own.keys.retain(|key, _| !same.contains_key(key));
        let command = escaped(&own.command(""));
        format!("<tr><td>{}<td>{:.3}<td>{:.1}<td>{command}", at + 1, plan.step.seconds, plan.step.memory / 1e9)
    };
    let rows: String = plans.iter().enumerate().map(row).collect();
    format!(
        "<h2>{title}</h2><div class=wide><table><thead><tr><th><th>seconds<th>GB<th>mesh and keys</thead><tbody>{rows}\
         </tbody></table></div>"
    )
}

/// The same with quotes around every value of an attribute.
fn quoted(svg: &str) -> String {
    let mut text = String::new();
    for part in svg.split_inclusive([' ', '>']) {
        match part.split_once('=') {
            Some((name, value))
                if !value.starts_with('"') && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') =>
            {
                let end = value.len() - 1;
                text += &format!("{name}=\"{}\"{}", &value[..end], &value[end..]);
            }
            _ => text += part,
        }
    }
    text
}
