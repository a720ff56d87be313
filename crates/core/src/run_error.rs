//! How the ranks of a run failed: the one error of a world, and of the preparations of its processes.

use crate::comm::{Activity, Fault, grouped};
use crate::pool;
use std::any::Any;
use std::error::Error;
use std::fmt::{self, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Any error, as [`RankEnd::Error`] keeps it: an error type, or a text.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Runs the body of a rank, which may panic: its result, and how it ended.
pub(crate) fn contained<T, E: Into<Cause>>(body: impl FnOnce() -> Result<T, E>) -> (Result<T, RankEnd>, Activity) {
    let _core = pool::Core::of_rank();
    // Unwind safe: the body is not used after a panic, and the bookkeeping of a world is always complete.
    match catch_unwind(AssertUnwindSafe(|| body().map_err(E::into))) {
        Ok(Ok(value)) => (Ok(value), Activity::Returned),
        Ok(Err(error)) => {
            let how = Activity::Failed(error.to_string());
            (Err(RankEnd::Error(error)), how)
        }
        Err(panic) => {
            let message = message(&*panic);
            (Err(RankEnd::Panic(message.clone())), Activity::Panicked(message))
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

/// How a rank failed.
#[derive(thiserror::Error)]
pub enum RankEnd {
    /// It returned this error. Of ranks of other processes it is the text.
    #[error("{0}")]
    Error(Cause),
    /// It panicked with this message, or its thread could not be started.
    #[error("panicked: {0}")]
    Panic(String),
}

crate::debug_as_display!(RankEnd);

impl RankEnd {
    /// The failure of a rank that is not here.
    pub(crate) fn elsewhere(how: &Activity) -> Option<RankEnd> {
        match how {
            Activity::Returned => None,
            Activity::Failed(error) => Some(RankEnd::Error(error.clone().into())),
            Activity::Panicked(message) => Some(RankEnd::Panic(message.clone())),
            Activity::Computing | Activity::Waiting => Some(RankEnd::Error(format!("has not ended, and {how}").into())),
            Activity::Left | Activity::Lost(_) => Some(RankEnd::Error(how.to_string().into())),
        }
    }
}

/// Why a world failed: the first cause, and how each rank ended.
pub struct RunError {
    /// The rank that failed first.
    pub rank: usize,
    /// The cause.
    pub cause: String,
    /// The fault that stopped the other ranks, if any was stopped.
    pub fault: Option<Arc<Fault>>,
    /// How each rank failed; `None` for ranks that returned without an error.
    pub ends: Vec<Option<RankEnd>>,
}

impl RunError {
    /// The error that `rank` returned, if it ran in this process and returned an error of this type.
    pub fn error_of<E: Error + 'static>(&self, rank: usize) -> Option<&E> {
        if let Some(RankEnd::Error(error)) = self.ends.get(rank)? { error.downcast_ref() } else { None }
    }

    /// The errors that ranks returned, by rank.
    pub fn errors<E: Error + 'static>(&self) -> impl Iterator<Item = &E> {
        (0..self.ends.len()).filter_map(|rank| self.error_of(rank))
    }
}

crate::debug_as_display!(RunError);

impl Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a world of {} ranks failed: {}", self.ends.len(), self.cause)?;
        let cause = self.fault.as_ref().map_or(String::new(), |fault| first_line(&fault.cause()));
        let stopped = self.ends.iter().enumerate().filter(|(rank, _)| *rank != self.rank).filter_map(|(rank, end)| {
            // The first line: the rest of a communication error is the report of all ranks.
            let text = first_line(&end.as_ref()?.to_string());
            let place = without_cause(&text, &cause);
            let several = place.replacen(&format!(" group of world rank {rank},"), " group,", 1);
            Some((rank, format!("stopped: {place}"), format!("stopped: {several}")))
        });
        let reports = self.fault.as_ref().map_or(Vec::new(), |fault| fault.report_lines());
        reports.into_iter().chain(grouped(stopped)).try_for_each(|line| write!(f, "\n  {line}"))
    }
}

impl Error for RunError {}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// The message of a rank without its end, if that is the `cause` with which the whole report begins.
fn without_cause<'a>(text: &'a str, cause: &str) -> &'a str {
    match text.strip_suffix(cause) {
        Some(place) if !cause.is_empty() => {
            place.rsplit_once(" stopped because").map_or(place, |(place, _)| place).trim_end_matches([':', ' '])
        }
        _ => text,
    }
}
