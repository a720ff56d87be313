//! Text that fits the terminal.

use console::Term;

/// Columns that every terminal is taken to have.
pub const COLUMNS: usize = 80;

/// Columns of standard output: [`COLUMNS`], or more where a terminal has more.
pub fn columns() -> usize {
    Term::stdout().size_checked().map_or(COLUMNS, |(_, columns)| COLUMNS.max(columns.into()))
}

/// The text with every line of more than `columns` broken at spaces. What follows goes below the second column of the
/// line, if two spaces or more set one off, else two further in than the line. A word that is longer stays whole.
///
/// ```
/// use meshwork_train::terminal::fit;
///
/// assert_eq!(fit("  memory   12 MiB of weights; 82 MiB\n", 24), "  memory   12 MiB of\n           weights; 82\n           MiB\n");
/// ```
pub fn fit(text: &str, columns: usize) -> String {
    text.split_inclusive('\n').map(|line| fit_line(line, columns)).collect()
}

fn fit_line(line: &str, columns: usize) -> String {
    let text = line.trim_end();
    if text.chars().count() <= columns {
        return line.to_owned();
    }
    let indent = text.chars().take_while(|&c| c == ' ').count();
    let shown: Vec<char> = text.chars().collect();
    // The second column begins behind the last run of spaces in the first half.
    let gap = |&at: &usize| shown[at - 2..at] == [' ', ' '] && shown[at] != ' ';
    let second = (indent + 2..columns / 2).rev().find(gap).filter(|&at| at > indent);
    let (hang, mut fitted) = (second.unwrap_or(indent + 2), String::new());
    let mut used = 0;
    for (at, word) in text.split_inclusive(' ').enumerate() {
        let bare = word.trim_end().chars().count();
        if at > 0 && bare > 0 && used + bare > columns && used > hang {
            fitted.truncate(fitted.trim_end().len());
            fitted += "\n";
            fitted += &" ".repeat(hang);
            used = hang;
        }
        fitted += word;
        used += word.chars().count();
    }
    fitted.truncate(fitted.trim_end().len());
    fitted + &line[text.len()..]
}
