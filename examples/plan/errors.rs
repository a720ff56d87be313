//! How far predictions are off on published runs: `--errors` and `--fit`.

use crate::output::tell;
use meshwork::plan::fit::{self, Errors};
use meshwork::plan::table::Row;
use meshwork::plan::{Constants, Counter, PlanError, System};

/// The constants of a system, fitted to the even rows of its published runs, and the errors with them.
pub fn fitted(system: &str) -> Result<String, PlanError> {
    let system = System::known(system)?;
    let published = fit::published(&system, &mut Counter::default())?;
    let tables: Vec<_> = published.iter().map(|table| fit::half(&table.rows, false)).collect();
    let rows: usize = tables.iter().map(Vec::len).sum();
    tell(&format_args!("fitting {} constants to {rows} rows", system.fitted.len()));
    let fitted = fit::fit(&system, &tables)?;
    let mut shown = String::from("[constants]\n");
    for name in Constants::NAMES {
        shown += &format!("{name} = {:?}\n", fitted.constants.get(name).unwrap_or_default());
    }
    for table in &published {
        shown += &halves(&fitted, table)?;
    }
    Ok(shown)
}

/// The table of errors of every system with published runs.
pub fn errors() -> Result<String, PlanError> {
    let mut shown = String::from(
        "| system | table | rows | median | 9 of 10 | most | pairs in order | fit |\n|---|---|---|---|---|---|---|---|\n",
    );
    for name in System::names() {
        let system = System::known(name)?;
        let mut counter = Counter::default();
        for table in fit::published(&system, &mut counter)? {
            shown += &halves(&system, &table)?;
        }
        for table in fit::checked(&system, &mut counter)? {
            let rows: Vec<_> = table.rows.iter().collect();
            shown += &line(&system, &format!("{}, none fitted", table.name), &rows)?;
        }
    }
    Ok(shown)
}

fn halves(system: &System, table: &fit::Published) -> Result<String, PlanError> {
    let half = |what: &str, tests| line(system, &format!("{}, {what}", table.name), &fit::half(&table.rows, tests));
    Ok(half("fitted", false)? + &half("tested", true)?)
}

/// The errors on some rows, as a row of the table.
fn line(system: &System, what: &str, rows: &[&Row]) -> Result<String, PlanError> {
    let Errors { rows, median, ninth_decile, most, pairs, ordered, fit } = fit::errors(system, rows)?;
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let order = if pairs == 0 { "none".to_owned() } else { format!("{} of {pairs}", percent(ordered)) };
    Ok(format!(
        "| {} | {what} | {rows} | {} | {} | {} | {order} | {fit} of {rows} |\n",
        system.name,
        percent(median),
        percent(ninth_decile),
        percent(most),
    ))
}
