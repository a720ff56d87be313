//! A world of ranks, and how it ended.
//!
//! A program is written for one rank, and [`World::run`] runs it as every rank that this process has: all of them, as
//! threads, or one of a world that other processes share.

use std::any::Any;
use std::error::Error;
use std::fmt::{self, Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use crate::comm::thread::{self as threads, Options};
use crate::comm::{Activity, CommError, Communicator, Ended, Fault, Group, grouped};
use crate::mesh::Mesh;
use crate::pool;
use crate::rank::Rank;

/// Where the ranks of a program are.
#[derive(Clone, Debug)]
pub enum World {
    /// This many threads of this process.
    Threads(usize),
    /// One rank is here, and its communicator of the world joins it to the others: of other processes, or on other
    /// threads of the caller.
    Joined(Arc<dyn Communicator>),
}

impl World {
    /// Runs `body` as every rank that this process has, and returns their results, by rank.
    ///
    /// If a rank fails or panics, those that need it get an error instead of waiting, and the error of the whole says
    /// which rank failed first and why: the same in every process. A process whose own rank ended well waits for the
    /// others, and fails with them. A world without ranks is an error too.
    ///
    /// ```
    /// use meshwork_core::{CommError, ReduceOp, World};
    ///
    /// let sums = World::Threads(4).run(|world| {
    ///     let mut x = [world.rank() as f32, 1.0];
    ///     world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
    ///     Ok::<_, CommError>(x)
    /// })?;
    /// assert_eq!(sums, [[6.0, 4.0]; 4]);
    ///
    /// let failed = World::Threads(2).run(|world| match world.rank() {
    ///     0 => Err("the disk is full".to_string()),
    ///     _ => world.barrier().map_err(|error| error.to_string()),
    /// });
    /// assert_eq!(failed.unwrap_err().rank, 0); // and not rank 1, which only stopped because of it
    /// # Ok::<(), meshwork_core::RunError>(())
    /// ```
    pub fn run<T, E, F>(&self, body: F) -> Result<Vec<T>, RunError>
    where
        T: Send,
        E: Into<Cause>,
        F: Fn(Group) -> Result<T, E> + Sync,
    {
        self.run_with(Options::default(), body)
    }

    /// [`run`](Self::run) with options for threads. A joined world has those of its communicator.
    pub fn run_with<T, E, F>(&self, options: Options, body: F) -> Result<Vec<T>, RunError>
    where
        T: Send,
        E: Into<Cause>,
        F: Fn(Group) -> Result<T, E> + Sync,
    {
        match self {
            World::Threads(n) => threads::run(*n, options, body),
            World::Joined(world) => {
                let (result, how) = contained(|| body(Group::from(world.clone())));
                ended(world, result, how).map(|value| vec![value])
            }
        }
    }

    /// [`run`](Self::run), with a [`Rank`] that has joined `mesh` instead of the group of the world.
    ///
    /// # Errors
    /// A world of another size than the mesh, and what [`run`](Self::run) refuses.
    pub fn run_mesh<T, E, F>(&self, mesh: &Mesh, body: F) -> Result<Vec<T>, RunError>
    where
        T: Send,
        E: Into<Cause> + From<CommError>,
        F: Fn(Arc<Rank>) -> Result<T, E> + Sync,
    {
        self.run(|world| body(Arc::new(Rank::new(mesh, world.communicator().clone())?)))
    }

    /// Whether rank 0 is here.
    pub fn leads(&self) -> bool {
        match self {
            World::Threads(_) => true,
            World::Joined(world) => world.rank() == 0,
        }
    }

    /// What this process makes once for its ranks, before they run. A failure, or a panic, ends the world as that of a
    /// rank does; a joined rank counts as making progress meanwhile.
    ///
    /// # Errors
    /// What `make` returns, as the error of the rank that is here; of threads, of a world of one rank.
    pub fn prepare<T: Send, E: Into<Cause>>(&self, make: impl FnOnce() -> Result<T, E> + Send) -> Result<T, RunError> {
        let World::Joined(world) = self else {
            let (made, how) = contained(make);
            return made.map_err(|end| RunError { rank: 0, cause: how.failure(0), fault: None, ends: vec![Some(end)] });
        };
        let (over, beats) = mpsc::channel::<()>();
        let (made, how) = thread::scope(|scope| {
            scope.spawn(move || {
                while beats.recv_timeout(BEAT) == Err(mpsc::RecvTimeoutError::Timeout) {
                    world.membership().heartbeat();
                }
            });
            let made = contained(make);
            drop(over);
            made
        });
        made.or_else(|end| ended(world, Err(end), how))
    }
}

/// How often a rank that prepares its run shows that it makes progress.
const BEAT: Duration = Duration::from_millis(50);

/// Any error, as [`RankEnd::Error`] keeps it: an error type, or a text.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Ends the rank of a joined world, and waits for the others.
fn ended<T>(world: &Arc<dyn Communicator>, result: Result<T, RankEnd>, how: Activity) -> Result<T, RunError> {
    let Ended { first, fault, ranks } = world.membership().end(how);
    let mut ends: Vec<_> = ranks.iter().map(RankEnd::elsewhere).collect();
    match result {
        Ok(value) if ends.iter().all(Option::is_none) => Ok(value),
        result => {
            if let Some(end) = ends.get_mut(world.rank()) {
                *end = result.err();
            }
            let (rank, cause) = first.unwrap_or_default();
            Err(RunError { rank, cause, fault, ends })
        }
    }
}

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
#[derive(Debug)]
pub enum RankEnd {
    /// It returned this error. Of ranks of other processes it is the text.
    Error(Cause),
    /// It panicked with this message, or its thread could not be started.
    Panic(String),
}

impl RankEnd {
    /// The failure of a rank that is not here.
    fn elsewhere(how: &Activity) -> Option<RankEnd> {
        match how {
            Activity::Returned => None,
            Activity::Failed(error) => Some(RankEnd::Error(error.clone().into())),
            Activity::Panicked(message) => Some(RankEnd::Panic(message.clone())),
            other => Some(RankEnd::Error(other.to_string().into())),
        }
    }
}

impl Display for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankEnd::Error(error) => Display::fmt(error, f),
            RankEnd::Panic(message) => write!(f, "panicked: {message}"),
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
        match self.ends.get(rank)? {
            Some(RankEnd::Error(error)) => error.downcast_ref(),
            _ => None,
        }
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
