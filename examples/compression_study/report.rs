//! The results as Markdown and as pictures.

use crate::conclusions::{Mean, Scored, TASKS, answers};
use crate::results::Results;
use crate::settings::{self, PERCENT, top};
use crate::tasks::Scores;
use std::fmt::Write;

/// Marks around the results in the document.
const MARKS: [&str; 2] = ["<!-- results of compression_study -->", "<!-- end of results -->"];

/// The document with these results between its marks.
///
/// # Errors
/// A document without marks.
pub fn renewed(document: &str, results: &Results) -> Result<String, String> {
    let missing = || format!("the document has no marks {} and {}", MARKS[0], MARKS[1]);
    let (before, rest) = document.split_once(MARKS[0]).ok_or_else(missing)?;
    let (_, after) = rest.split_once(MARKS[1]).ok_or_else(missing)?;
    Ok(format!("{before}{}\n\n{}\n{}{after}", MARKS[0], markdown(results), MARKS[1]))
}

/// The mean and the spread of the scores of a setting, and the number of diverged runs.
fn score(results: &Results, task: &str, setting: &str, of: fn(Scores) -> Option<f64>) -> String {
    let all: Vec<_> = results.of(task, setting).map(|(_, scores)| of(scores)).collect();
    let finite: Vec<f64> = all.iter().flatten().copied().collect();
    let diverged = match all.len() - finite.len() {
        0 => String::new(),
        some => format!(" ({some} of {} diverged)", all.len()),
    };
    match (Mean::of(&finite), &finite[..]) {
        (Some(Mean { mean, error }), _) => format!("{mean:.3} ± {:.3}{diverged}", error * (finite.len() as f64).sqrt()),
        (None, [one]) => format!("{one:.3}{diverged}"),
        (None, _) if all.is_empty() => "–".to_owned(),
        (None, _) => "diverged".to_owned(),
    }
}

/// The tables.
pub fn markdown(results: &Results) -> String {
    let tasks: Vec<&Scored> = TASKS.iter().filter(|of| results.of(of.task, "none").next().is_some()).collect();
    let mut out = String::from("| conclusion of Rudakov et al. | task | here | numbers |\n|---|---|---|---|\n");
    for answer in answers(results) {
        // Writing to a string cannot fail.
        _ = writeln!(out, "| {} | {} | **{}** | {} |", answer.claim, answer.task, answer.verdict, answer.numbers);
    }
    for Scored { task, unit, .. } in tasks {
        _ = write!(
            out,
            "\n{task}: {unit}, mean ± standard deviation.\n\n| setting | seeds | compressed at inference | not |\n|---|---|---|---|\n"
        );
        for name in settings::all(4, 1).into_iter().map(|setting| setting.name) {
            if results.of(task, &name).next().is_some() {
                let [on, off] = [|scores: Scores| scores.on, |scores: Scores| scores.off];
                let (on, off) = (score(results, task, &name, on), score(results, task, &name, off));
                let seeds = results.of(task, &name).count();
                _ = writeln!(out, "| {name} | {seeds} | {on} | {off} |");
            }
        }
    }
    out
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;

/// The score over the share that TopK keeps, with and without compression at inference, one panel per task.
pub fn picture(results: &Results) -> String {
    let tasks: Vec<&Scored> = TASKS.iter().filter(|of| results.of(of.task, "none").next().is_some()).collect();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        WIDTH * tasks.len() as f64
    );
    for (at, of) in tasks.iter().enumerate() {
        panel(&mut out, results, of, WIDTH * at as f64);
    }
    out + "</svg>\n"
}

fn panel(out: &mut String, results: &Results, of: &Scored, left: f64) {
    let points = |use_: fn(Scores) -> Option<f64>| -> Vec<(usize, Mean)> {
        let names = std::iter::once("none".to_owned()).chain(PERCENT.map(top));
        let mean = |(at, name): (usize, String)| {
            let values: Vec<f64> = results.of(of.task, &name).filter_map(|(_, scores)| use_(scores)).collect();
            let alone = values.first().filter(|_| values.len() == 1).map(|&mean| Mean { mean, error: 0.0 });
            Some((at, Mean::of(&values).or(alone)?))
        };
        names.enumerate().filter_map(mean).collect()
    };
    let lines =
        [("compressed at inference", "#0b6", points(|scores| scores.on)), ("not", "#c30", points(|scores| scores.off))];
    let all = || lines.iter().flat_map(|(_, _, points)| points.iter().map(|(_, mean)| mean.mean));
    let (low, high) = all().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    let span = (high - low).max(1e-9);
    let x = |at: usize| left + 55.0 + at as f64 * (WIDTH - 80.0) / PERCENT.len() as f64;
    let y = |value: f64| HEIGHT - 45.0 - (value - low) / span * (HEIGHT - 90.0);
    _ = writeln!(out, "<text x=\"{}\" y=\"18\" font-weight=\"bold\">{}: {}</text>", left + 55.0, of.task, of.unit);
    for value in [low, (low + high) / 2.0, high] {
        let at = y(value);
        _ = writeln!(
            out,
            "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" \
             y=\"{:.1}\" text-anchor=\"end\">{value:.2}</text>",
            x(0),
            x(PERCENT.len()),
            x(0) - 6.0,
            at + 4.0
        );
    }
    let labels = std::iter::once("none".to_owned()).chain(PERCENT.map(|percent| format!("{percent}%")));
    for (at, label) in labels.enumerate() {
        _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>", x(at), HEIGHT - 26.0);
    }
    for (number, (name, colour, points)) in lines.iter().enumerate() {
        let path: Vec<_> = points.iter().map(|(at, mean)| format!("{:.1},{:.1}", x(*at), y(mean.mean))).collect();
        _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for (at, mean) in points {
            let (up, down) = (y(mean.mean + 2.0 * mean.error), y(mean.mean - 2.0 * mean.error));
            _ = writeln!(
                out,
                "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{up:.1}\" y2=\"{down:.1}\" stroke=\"{colour}\"/><circle \
                 cx=\"{0:.1}\" cy=\"{1:.1}\" r=\"3\" fill=\"{colour}\"/>",
                x(*at),
                y(mean.mean)
            );
        }
        let at = left + 55.0 + 150.0 * number as f64;
        _ = writeln!(out, "<text x=\"{at:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>", HEIGHT - 8.0);
    }
}
