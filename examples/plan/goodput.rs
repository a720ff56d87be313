//! How often to save, and the share of time that trains, for 8 to 100,000 cards: `--goodput`.

use crate::chart::{Axes, Curve, Marks, plot};
use crate::options::Options;
use crate::picture;
use meshwork::plan::PlanError;
use meshwork::plan::goodput::{Failures, Times};

/// Cards of a run.
const CARDS: [usize; 10] = [8, 64, 512, 1024, 4096, 8192, 16384, 32768, 65536, 100_000];

/// Ways to recover: seconds, where they are not given, and what they are.
const RECOVERIES: [(f64, &str); 3] = [
    (600.0, "all ranks start again from a checkpoint (10 minutes, as FT-HSDP says of its old way)"),
    (180.0, "replicas go on, and one joins again (3 minutes, as FT-HSDP says of its new way)"),
    (0.2, "survivors go on from memory (0.2 s, a tiny model on two cores: docs/clusters.md)"),
];

/// Points of a curve.
const POINTS: i32 = 60;

/// The table, with a picture where one is asked for.
pub fn goodput(options: &Options) -> Result<String, PlanError> {
    let failures = options.card_hours.map_or_else(Failures::published, |hours| Ok(Failures::of_card(hours)))?;
    let given = options.recover.map(|seconds| (seconds, "as given"));
    let recoveries = given.map_or(RECOVERIES.to_vec(), |one| vec![one]);
    let times = |recover: f64| Times { save: options.save, write: options.write, recover };
    let mut text = format!(
        "a checkpoint stops training for {} s and is written {} s behind it; times are of the best interval\n",
        options.save, options.write
    );
    for (recover, what) in &recoveries {
        text += &format!("\n{what}\n{:>9} {:>14} {:>14} {:>8}\n", "cards", "failure every", "save every", "trains");
        for cards in CARDS {
            let between = 3600.0 * failures.hours(cards);
            let best = times(*recover).best(between);
            let share = 100.0 * best.share;
            text += &format!("{cards:>9} {:>14} {:>14} {share:>7.2}%\n", span(between), span(best.interval));
        }
    }
    if let Some(path) = &options.picture {
        let curve = |run: usize, recover: f64| {
            let point = |at: i32| {
                let cards = 8.0 * (100_000.0_f64 / 8.0).powf(f64::from(at) / f64::from(POINTS));
                let share = times(recover).best(3600.0 * failures.hours(cards.round() as usize)).share;
                (cards.log10(), 100.0 * share)
            };
            Curve { run, points: (0..=POINTS).map(point).collect(), marks: Marks::Line }
        };
        let curves: Vec<Curve> =
            recoveries.iter().enumerate().map(|(run, (recover, _))| curve(run, *recover)).collect();
        let title = "Share of time that trains, by the number of cards";
        let axes = Axes { x: "cards", y: "% of the time trains", powers: true };
        let legend: Vec<&str> = recoveries.iter().map(|(_, what)| *what).collect();
        picture::write_page(path, title, &plot(title, axes, &curves), &legend, "")?;
    }
    Ok(text)
}

fn span(seconds: f64) -> String {
    match seconds {
        86_400.0.. => format!("{:.1} days", seconds / 86_400.0),
        3600.0.. => format!("{:.1} h", seconds / 3600.0),
        60.0.. => format!("{:.1} min", seconds / 60.0),
        _ => format!("{seconds:.1} s"),
    }
}
