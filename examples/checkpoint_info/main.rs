//! Lists the contents of a checkpoint, verifies every byte, and compares it with another checkpoint:
//! `cargo run --release --example checkpoint_info -- DIR [--diff DIR2]`. docs/checkpoints.md describes the format.

#[path = "../shared/output.rs"]
mod output;

use clap::Parser;
use meshwork::checkpoint::{
    Checkpoint, Damage, ReadError, Summary, Unread, Unreadable, diff, folder_name, json_differences, steps,
};
use output::{BAD_INPUT, fail, show};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code for a damaged checkpoint.
const DAMAGED: u8 = 1;

/// Says what is in a checkpoint, and verifies every byte of it.
#[derive(Parser)]
#[command(after_help = "Exit code: 2 on bad input or what cannot be read now, 1 if the checkpoint is damaged, else 0.")]
struct Options {
    /// A checkpoint (DIR/step-00000010), or the folder of a run, whose newest one is taken
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Another one: says which tensors and which metadata differ, and by how much
    #[arg(long, value_name = "DIR2")]
    diff: Option<PathBuf>,
}

fn main() -> ExitCode {
    // On --help this exits with code 0, and on an invalid command line with code 2.
    let options = Options::parse();
    let first = match open(&options.dir) {
        Ok(checkpoint) => checkpoint,
        Err(code) => return code,
    };
    let Some(other) = options.diff else {
        let summary = match Summary::read(&first) {
            Ok(summary) => summary,
            Err(error) => return fail(BAD_INPUT, &error),
        };
        let shown = show(&summary);
        return if summary.damage.is_empty() { shown } else { ExitCode::from(DAMAGED) };
    };
    let second = match open(&other) {
        Ok(checkpoint) => checkpoint,
        Err(code) => return code,
    };
    let tensors = match diff(&first, &second) {
        Ok(tensors) => tensors,
        Err(ReadError::Unread(unread)) => return not_read(&unread),
        Err(error) => return fail(DAMAGED, &error),
    };
    let (a, b) = (first.index(), second.index());
    let mut text =
        format!("{}: step {}\n{}: step {}\n", first.path().display(), a.step, second.path().display(), b.step);
    let same = a.tensors.iter().filter(|of| tensors.iter().all(|other| other.name != of.tensor.name)).count();
    text += &format!("{} tensors differ, {same} are the same\n", tensors.len());
    tensors.iter().for_each(|tensor| text += &format!("  {tensor}\n"));
    let metadata = json_differences(&a.metadata, &b.metadata);
    text += &format!("{} values of the metadata differ\n", metadata.len());
    metadata.iter().for_each(|value| text += &format!("  {value}\n"));
    show(&text)
}

/// The checkpoint in a folder, or the newest one of a run.
fn open(dir: &Path) -> Result<Checkpoint, ExitCode> {
    let newest = steps(dir).map_err(|error| fail(BAD_INPUT, &format_args!("{}: {error}", dir.display())))?;
    let path = newest.first().map_or(dir.to_path_buf(), |&step| dir.join(folder_name(step)));
    Checkpoint::open(&path).map_err(|unread| {
        let missing = match &unread {
            Unread::Damage(damage) => matches!(damage, Damage::Missing { .. }),
            Unread::Unreadable(error) => {
                matches!(error, Unreadable::Io { source, .. } if source.kind() == ErrorKind::NotFound)
            }
        };
        match missing && newest.is_empty() {
            true => {
                let advice = "give a checkpoint, such as DIR/step-00000010, or a folder that holds some";
                fail(BAD_INPUT, &format_args!("{unread}; {advice}"))
            }
            false => not_read(&unread),
        }
    })
}

/// The exit code for damage, or for a file that cannot be read now.
fn not_read(unread: &Unread) -> ExitCode {
    match unread {
        Unread::Damage(damage) => fail(DAMAGED, damage),
        Unread::Unreadable(error) => fail(BAD_INPUT, error),
    }
}
