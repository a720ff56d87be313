//! Fits a system's constants to half of its published runs, and says how far the other half is off.

use crate::count::Counter;
use crate::error::{PlanError, named};
use crate::plan::Keys;
use crate::system::{Constants, System};
use crate::table::{Row, Table};

/// Published runs by file.
const PUBLISHED: [(&str, &str); 5] = [
    ("vtrain.toml", include_str!("../published/vtrain.toml")),
    ("vtrain_single.toml", include_str!("../published/vtrain_single.toml")),
    ("llm_foundry.toml", include_str!("../published/llm_foundry.toml")),
    ("korthikanti_2022.toml", include_str!("../published/korthikanti_2022.toml")),
    ("zero_bubble.toml", include_str!("../published/zero_bubble.toml")),
];

/// A table of published runs with the rows that are fitted, the even ones, and the rows that test.
#[derive(Debug)]
pub struct Published {
    /// The name of the table.
    pub name: String,
    /// The rows, in order.
    pub rows: Vec<Row>,
}

/// How far predictions are off: shares of what was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Errors {
    /// Rows.
    pub rows: usize,
    /// The error that half of the rows do not exceed.
    pub median: f64,
    /// The error that nine of ten rows do not exceed.
    pub ninth_decile: f64,
    /// The largest.
    pub most: f64,
    /// Pairs of runs of one model, batch and number of cards, and the share of them that are predicted in the measured
    /// order. Runs that are measured within 1% of each other are no pair.
    pub pairs: u32,
    /// See `pairs`.
    pub ordered: f64,
    /// Rows that are predicted to fit; all of them ran.
    pub fit: usize,
}

/// The published runs of a system, of which half are fitted.
///
/// # Errors
/// A table that cannot be predicted.
pub fn published(system: &System, counter: &mut Counter) -> Result<Vec<Published>, PlanError> {
    read(&system.published, system, counter)
}

/// The published runs of a system of which none is fitted.
///
/// # Errors
/// As [`published`].
pub fn checked(system: &System, counter: &mut Counter) -> Result<Vec<Published>, PlanError> {
    read(&system.checked, system, counter)
}

fn read(files: &[(String, Vec<String>)], system: &System, counter: &mut Counter) -> Result<Vec<Published>, PlanError> {
    let mut all = Vec::new();
    for (file, tables) in files {
        let text = named("file", &PUBLISHED, file)?;
        for name in tables {
            let table = Table::from_toml(file, text, name)?;
            let rows = table.rows(name, &Keys::new(), system, counter)?.into_iter().collect::<Result<_, _>>()?;
            all.push(Published { name: name.clone(), rows });
        }
    }
    Ok(all)
}

/// Every second row.
pub fn half(rows: &[Row], tests: bool) -> Vec<&Row> {
    rows.iter().skip(usize::from(tests)).step_by(2).collect()
}

/// The errors of a system on these rows.
///
/// # Errors
/// A pipeline that its schedule does not take.
pub fn errors(system: &System, rows: &[&Row]) -> Result<Errors, PlanError> {
    let mut points = Vec::new();
    let mut fit = 0;
    for row in rows {
        let step = row.job.predict(system, &row.cluster)?;
        fit += usize::from(step.fits);
        points.extend(row.measured.map(|measured| (*row, step.seconds, measured)));
    }
    let mut off: Vec<f64> = points.iter().map(|(_, predicted, measured)| (predicted / measured - 1.0).abs()).collect();
    off.sort_by(f64::total_cmp);
    let quantile =
        |share: f64| off.get(((off.len().max(1) - 1) as f64 * share).round() as usize).copied().unwrap_or(0.0);
    let (mut pairs, mut ordered) = (0_u32, 0_u32);
    for (at, (one, predicted, measured)) in points.iter().enumerate() {
        for (other, others_predicted, others_measured) in &points[at + 1..] {
            let same = one.cluster == other.cluster && one.same_work(other);
            if same && (measured / others_measured - 1.0).abs() > 0.01 {
                pairs += 1;
                ordered += u32::from((predicted > others_predicted) == (measured > others_measured));
            }
        }
    }
    Ok(Errors {
        rows: off.len(),
        median: quantile(0.5),
        ninth_decile: quantile(0.9),
        most: quantile(1.0),
        pairs,
        ordered: f64::from(ordered) / f64::from(pairs.max(1)),
        fit,
    })
}

/// Relative errors beyond this count less and less: a few odd runs do not decide.
const OUTLIER: f64 = 0.05;

/// What a constant can be. Rows alone do not say: a smaller share of the peak and fewer bytes between products give
/// much the same times.
fn possible(name: &str) -> (f64, f64) {
    match name {
        // Shares of a peak, or of a link.
        "products" | "unaligned" | "attention" | "memory" | "inside" | "between" | "gradients" => (0.0, 1.0),
        // Fused operations move at least half of the bytes that ours move, and those that are not fused a few times as
        // many.
        "passes" => (0.5, 4.0),
        _ => (0.0, f64::INFINITY),
    }
}

/// Rounds of the search, and how much each changes a constant at first, in logarithms.
const ROUNDS: usize = 40;
const FIRST_STEP: f64 = 0.3;

/// The system with the constants that fit the rows of these tables best: a search along one constant after the other,
/// with steps that shrink where no step is better. A table counts as much as another, however many rows it has. The
/// same rows give the same constants.
///
/// # Errors
/// As [`errors`].
pub fn fit(system: &System, tables: &[Vec<&Row>]) -> Result<System, PlanError> {
    let cost = |constants: &Constants| -> Result<f64, PlanError> {
        let mut mean = 0.0;
        for rows in tables {
            for row in rows {
                let Some(measured) = row.measured else { continue };
                let step = row.job.with(system, constants, &row.cluster)?;
                let off = (step.seconds / measured).ln() / OUTLIER;
                mean += ((1.0 + off * off).sqrt() - 1.0) / rows.len() as f64;
            }
        }
        Ok(mean)
    };
    let mut best = system.constants;
    for name in &system.fitted {
        let (low, high) = possible(name);
        best.set(name, best.get(name).unwrap_or(0.0).clamp(low, high));
    }
    let mut least = cost(&best)?;
    let mut steps: Vec<f64> = vec![FIRST_STEP; system.fitted.len()];
    for _ in 0..ROUNDS {
        for (name, step) in system.fitted.iter().zip(&mut steps) {
            let mut better = false;
            for signed in [*step, -*step] {
                let mut tried = best;
                let value = best.get(name).unwrap_or(0.0) * f64::exp(signed);
                let (low, high) = possible(name);
                tried.set(name, value.clamp(low, high));
                let sum = cost(&tried)?;
                if sum < least {
                    (best, least, better) = (tried, sum, true);
                    break;
                }
            }
            *step *= if better { 1.3 } else { 0.5 };
        }
    }
    // Three digits: no constant is known better.
    for name in &system.fitted {
        let value = best.get(name).unwrap_or(0.0);
        best.set(name, format!("{value:.2e}").parse().unwrap_or(value));
    }
    Ok(System { constants: best, ..system.clone() })
}

impl Row {
    /// Whether another row is of the same model, sequences, batch and cards.
    fn same_work(&self, other: &Self) -> bool {
        let of = |row: &Self| {
            let config = &row.job.config;
            let sizes = &config.model;
            let world = config.parallelism.world_size();
            (sizes.hidden_size, sizes.num_layers, sizes.seq_len, config.training.global_batch_size, world)
        };
        of(self) == of(other)
    }
}
