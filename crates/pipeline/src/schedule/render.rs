//! Pictures of schedules in text, laid out as the papers' figures are.

use super::grid::grid;
use super::{Action, CheckError, Costs, Interval, Schedule, Timeline, simulate};
use std::fmt::Write;

/// Draws a schedule without messages: one row per rank, one column per unit of time, blank where the rank idles, for
/// forwards, input gradients and weight gradients of 1 each; whole backwards stretch over two columns.
///
/// With one stage per rank the row says the stage and a cell shows kind and micro-batch; with several per rank a
/// cell shows the whole action.
///
/// ```
/// use meshwork_pipeline::{forward_only, gpipe, render};
///
/// assert_eq!(
///     render(&gpipe(3, 2))?,
///     "rank 0 | F0 F1                   B0--- B1---\n\
///      rank 1 |    F0 F1          B0--- B1---\n\
///      rank 2 |       F0 F1 B0--- B1---\n"
/// );
/// assert_eq!(
///     render(&forward_only(&[0, 1, 0], 2))?,
///     "rank 0 | 0F0 0F1 2F0 2F1\n\
///      rank 1 |     1F0 1F1\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn render(schedule: &Schedule) -> Result<String, CheckError> {
    Ok(text_grid(&simulate(schedule, &Costs::unit(schedule))?))
}

/// Draws a timeline in text. A column is as wide in time as the shortest action, so that each has a cell of its own;
/// longer ones are dashed through to their end. Actions that take no time are left out.
///
/// If that would take more than 500 columns and more than four times as many as a rank has actions, a column is wider,
/// and a line below the grid says how wide. A shorter action then still takes a column, and may move the following ones
/// to the right.
///
/// ```
/// use meshwork_pipeline::{Costs, gpipe, simulate, text_grid};
///
/// let schedule = gpipe(1, 1);
/// let grid = text_grid(&simulate(&schedule, &Costs::per_rank(&schedule, 1e9, 1.0, 1.0))?);
/// assert!(grid.starts_with("rank 0 | F0---") && grid.len() < 2000);
/// assert!(grid.ends_with("(a column is 2000000.004 units of time; what is shorter takes a column all the same)\n"));
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn text_grid(timeline: &Timeline) -> String {
    let lasting = |interval: &&Interval| interval.end > interval.start && !interval.action.kind.is_message();
    let lengths = timeline.ranks.iter().flatten().filter(lasting).map(|interval| interval.end - interval.start);
    let shortest = lengths.fold(f64::INFINITY, f64::min);
    let actions = timeline.ranks.iter().map(|rank| rank.iter().filter(lasting).count()).max().unwrap_or(0);
    let most = MOST_COLUMNS.max(4 * actions);
    let column = shortest.max(timeline.makespan() / most as f64);
    let origin = timeline.start();
    // Times are sums of costs, so a time that should fall on a column's edge may have been rounded to just below it.
    let at = |time: f64| (((time - origin) / column + 1e-6).floor() as usize).min(most);
    let stage_is_rank = timeline.placement.iter().enumerate().all(|(stage, &rank)| stage == rank);
    let label = |action: Action| {
        let text = action.to_string();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(0);
        if stage_is_rank { text[digits..].to_string() } else { text }
    };
    let cells = timeline.ranks.iter().flatten().filter(lasting);
    let width = cells.map(|interval| label(interval.action).len()).max().unwrap_or(0);
    let mut rows = Vec::new();
    for rank in &timeline.ranks {
        let mut cells: Vec<String> = Vec::new();
        for interval in rank.iter().filter(lasting) {
            cells.resize(at(interval.start).max(cells.len()), String::new());
            let columns = at(interval.end).saturating_sub(cells.len()).max(1);
            let text = label(interval.action);
            cells.push(if columns > 1 { format!("{text:-<width$}") } else { text });
            cells.extend((1..columns).map(|_| "-".repeat(width)));
        }
        rows.push(cells);
    }
    let mut text = grid(&rows);
    if column > shortest {
        let _ = writeln!(text, "(a column is {column} units of time; what is shorter takes a column all the same)");
    }
    text
}

/// Grids of more columns than this are drawn on a coarser scale, unless a rank has more actions than that.
const MOST_COLUMNS: usize = 500;
