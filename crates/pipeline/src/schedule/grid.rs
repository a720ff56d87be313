//! Rows of cells in text: one row per rank.

use super::Action;
use super::needs::Graph;
use std::fmt::Write;

/// The place where each rank is stuck: its steps around there, with the stuck one marked `>2F0<`, and what that one
/// waits for.
pub(super) fn stuck_grid(graph: &Graph, reached: &[usize]) -> String {
    let schedule = graph.schedule;
    // A window of steps, the same for all ranks: a real schedule has thousands. A rank stuck to the right of it has
    // no mark in the grid, but its line below.
    const BEFORE: usize = 4;
    const WIDTH: usize = 16;
    let stuck = || reached.iter().zip(&schedule.actions).filter(|&(&step, row)| step < row.len());
    let first = stuck().map(|(&step, _)| step).min().unwrap_or(0).saturating_sub(BEFORE);

    let rows: Vec<Vec<String>> = schedule
        .actions
        .iter()
        .zip(reached)
        .map(|(row, &at)| {
            let mark = |(step, action): (usize, &Action)| {
                if step == at { format!(">{action}<") } else { format!(" {action} ") }
            };
            row.iter().enumerate().skip(first).take(WIDTH).map(mark).collect()
        })
        .collect();
    let has_run = |action: Action| {
        let rank = schedule.rank_of(action.stage, action.micro);
        schedule.actions[rank][..reached[rank]].contains(&action)
    };

    let mut text = String::new();
    if first > 0 {
        let _ = writeln!(text, "(from step {first})");
    }
    text.push_str(&grid(&rows));
    for (rank, (row, &at)) in schedule.actions.iter().zip(reached).enumerate() {
        if let Some(&action) = row.get(at) {
            let awaited = graph.needs(action).find(|&need| !has_run(need));
            let awaited = awaited.map_or(String::new(), |need| {
                format!(" waits for {need} of rank {}", schedule.rank_of(need.stage, need.micro))
            });
            let _ = writeln!(text, "rank {rank}, step {at}: {action}{awaited}");
        }
    }
    text.truncate(text.trim_end().len());
    text
}

/// Lines up one row of cells per rank; no white space at the end of a line.
pub(super) fn grid(rows: &[Vec<String>]) -> String {
    let width = rows.iter().flatten().map(String::len).max().unwrap_or(0);
    let digits = rows.len().saturating_sub(1).to_string().len();
    let mut text = String::new();
    for (rank, row) in rows.iter().enumerate() {
        let mut line = format!("rank {rank:>digits$} |");
        for cell in row {
            // Dashes continue from the previous cell.
            let joint = if cell.starts_with('-') { '-' } else { ' ' };
            let _ = write!(line, "{joint}{cell:<width$}");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
