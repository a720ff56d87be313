//! Ranks that are threads of one process.
//!
//! - **No thread spins, and there are no progress threads.** The members of an operation do its work: the one that
//!   arrives last starts, and waiting members are woken to help if there is enough to do. If no member waits, the last
//!   one does all of the work, so that operations started early are done by the time a rank waits for them.
//! - **Same bits every time.** Reductions have a fixed order (`reduce.rs`); how the work is cut does not matter.
//! - **Memory is owned.** An operation holds its buffers until it is over, also if a rank stops waiting, fails or
//!   panics; a rank owns the buffer that it gets back from `wait`. There are no borrowed slices to revoke.
//! - **Memory of devices** is not touched: the last member to arrive has the devices'
//!   [carriers](super::device::Carrier) queue the work.
//! - **Nothing hangs.** The first fault stops the world: every operation that is not done fails on every rank, with
//!   that fault. Disagreement, panics, ranks that have ended and deadlocks (`watch.rs`) are noticed at once; a rank
//!   without progress is noticed after [`Options::timeout`].
//!
//! A rank is one thread: its communicators may be used from others, but a wait on any thread counts as the rank's
//! wait, and two such ranks may be reported as a deadlock although a third thread would have resolved it.

mod operation;
mod reduce;
mod state;
mod stream;
mod watch;
mod work;
mod world;

use std::any::Any;
use std::fmt::{self, Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use self::world::{RankLife, ThreadComm, World};
use super::fault::grouped;
use super::{Activity, CommError, Communicator, Fault, Group};
use crate::mesh::Mesh;
use crate::pool;
use crate::rank::Rank;
use crate::sync;

/// Settings of a world of threads.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a rank that others wait for may show no progress: no operation started, no
    /// [`heartbeat`](Communicator::heartbeat).
    pub timeout: Duration,
}

impl Default for Options {
    /// One minute.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60) }
    }
}

/// The communicators of a world of `n` ranks, by rank: for ranks that run on threads of the caller. A rank that drops
/// all its communicators has ended, and ranks that need it get an error.
pub fn world(n: usize, options: Options) -> Vec<Arc<dyn Communicator>> {
    let world = Arc::new(World::new(n, options.timeout));
    (0..n).map(|rank| communicator(&world, rank)).collect()
}

fn communicator(world: &Arc<World>, rank: usize) -> Arc<dyn Communicator> {
    Arc::new(ThreadComm::of_world(RankLife::new(Arc::clone(world), rank)))
}

/// Runs `body` as `n` ranks, each on its own thread named `rank 0`, `rank 1`, ..., and returns their results.
///
/// If a rank fails or panics, those that need it get an error instead of waiting, and the error of the whole says which
/// rank failed first and why. A world without ranks is an error too.
///
/// ```
/// use meshwork_core::comm::thread::{self, Options};
/// use meshwork_core::{CommError, ReduceOp};
///
/// let sums = thread::run(4, Options::default(), |world| {
///     let mut x = [world.rank() as f32, 1.0];
///     world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
///     Ok::<_, CommError>(x)
/// })?;
/// assert_eq!(sums, [[6.0, 4.0]; 4]);
///
/// let failed = thread::run(2, Options::default(), |world| match world.rank() {
///     0 => Err("the disk is full".to_string()),
///     _ => world.barrier().map_err(|error| error.to_string()),
/// });
/// assert_eq!(failed.unwrap_err().rank, 0); // and not rank 1, which only stopped because of it
/// # Ok::<(), meshwork_core::comm::thread::WorldError<CommError>>(())
/// ```
pub fn run<T, E, F>(n: usize, options: Options, body: F) -> Result<Vec<T>, WorldError<E>>
where
    T: Send,
    E: Display + Send,
    F: Fn(Group) -> Result<T, E> + Sync,
{
    if n == 0 {
        let cause = "a world has at least one rank".to_owned();
        return Err(WorldError { rank: 0, cause, fault: None, ends: Vec::new() });
    }
    let world = Arc::new(World::new(n, options.timeout));
    let results: Vec<Mutex<Option<Result<T, E>>>> = (0..n).map(|_| Mutex::default()).collect();
    let panics = run_threads(&world, n, &|rank, group| {
        let result = body(group);
        let end = match &result {
            Ok(_) => Activity::Returned,
            Err(error) => Activity::Failed(error.to_string()),
        };
        *results[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        end
    });
    let end = |(result, panic): (Mutex<Option<Result<T, E>>>, Option<String>)| match (
        result.into_inner().unwrap_or_else(PoisonError::into_inner),
        panic,
    ) {
        (Some(result), None) => result.map_err(RankEnd::Error),
        (_, panic) => Err(RankEnd::Panic(panic.unwrap_or_default())),
    };
    let ends: Vec<Result<T, RankEnd<E>>> = results.into_iter().zip(panics).map(end).collect();
    if ends.iter().all(Result::is_ok) {
        return Ok(ends.into_iter().filter_map(Result::ok).collect());
    }
    let (rank, cause, fault) = world.first_failure();
    Err(WorldError { rank, cause, fault, ends: ends.into_iter().map(Result::err).collect() })
}

/// The threads of [`run`]: `body` says how its rank ended, and the result has the message of each rank that panicked or
/// did not start. Without type parameters, so that it is compiled once and not for each program.
fn run_threads(world: &Arc<World>, n: usize, body: &(dyn Fn(usize, Group) -> Activity + Sync)) -> Vec<Option<String>> {
    let groups: Vec<_> = (0..n).map(|rank| Group::from(communicator(world, rank))).collect();
    sync::scope(|scope| {
        let start = |(rank, group)| {
            // Outlives a thread that does not start, so that the report says this, and not that its communicators were
            // dropped.
            let _life = Group::clone(&group);
            let run = move || {
                // Lives longer than the body, so that a panic is reported with its message.
                let _life = Group::clone(&group);
                run_rank(world, rank, || body(rank, group))
            };
            let started = sync::spawn_scoped(scope, format!("rank {rank}"), run);
            started.map_err(|error| {
                // Reported at once, because the ranks already started may be waiting for this one.
                let error = format!("its thread did not start: {error}");
                world.end(rank, Activity::Failed(error.clone()));
                error
            })
        };
        let threads: Vec<_> = groups.into_iter().enumerate().map(start).collect();
        let join = |thread: Result<sync::ScopedJoinHandle<'_, _>, String>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| Some(message(&*panic))),
            Err(error) => Some(error),
        };
        threads.into_iter().map(join).collect()
    })
}

/// Runs `body` on every rank of a mesh, each on its own thread, and returns their results by world rank. Like [`run`],
/// but with a [`Rank`] that has joined the mesh instead of the world's group.
///
/// ```
/// use meshwork_core::comm::thread;
/// use meshwork_core::{Axis, CommError, Mesh, ReduceOp};
///
/// let mesh: Mesh = "dp=2,tp=2".parse()?;
/// let sums = thread::run_mesh(&mesh, |rank| {
///     let mut x = [rank.world_rank() as f32];
///     rank.group(Axis::Dp).all_reduce_slice(&mut x, ReduceOp::Sum)?;
///     Ok::<_, CommError>(x[0])
/// })?;
/// assert_eq!(sums, [2.0, 4.0, 2.0, 4.0]); // ranks 0 and 2 are a dp group, and 1 and 3 are
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn run_mesh<T, E, F>(mesh: &Mesh, body: F) -> Result<Vec<T>, WorldError<E>>
where
    T: Send,
    E: Display + Send + From<CommError>,
    F: Fn(Arc<Rank>) -> Result<T, E> + Sync,
{
    run_mesh_with(mesh, Options::default(), body)
}

/// [`run_mesh`] with options.
pub fn run_mesh_with<T, E, F>(mesh: &Mesh, options: Options, body: F) -> Result<Vec<T>, WorldError<E>>
where
    T: Send,
    E: Display + Send + From<CommError>,
    F: Fn(Arc<Rank>) -> Result<T, E> + Sync,
{
    run(mesh.world_size(), options, |world| body(Arc::new(Rank::new(mesh, Arc::clone(world.communicator()))?)))
}

/// Runs one rank, tells the world how it ended, and returns the message of a panic.
fn run_rank(world: &World, rank: usize, body: impl FnOnce() -> Activity) -> Option<String> {
    let _core = pool::Core::of_rank();
    // Unwind safe: the body is not used after a panic, and the bookkeeping of the world is always complete.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(end) => {
            world.end(rank, end);
            None
        }
        Err(panic) => {
            let message = message(&*panic);
            world.end(rank, Activity::Panicked(message.clone()));
            Some(message)
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

/// How a rank of [`run`] failed.
#[derive(Debug)]
pub enum RankEnd<E> {
    /// It returned this error.
    Error(E),
    /// It panicked with this message, or its thread could not be started.
    Panic(String),
}

impl<E: Display> Display for RankEnd<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankEnd::Error(error) => Display::fmt(error, f),
            RankEnd::Panic(message) => write!(f, "panicked: {message}"),
        }
    }
}

/// Why a world failed: the first cause, and how each rank ended.
pub struct WorldError<E> {
    /// The rank that failed first.
    pub rank: usize,
    /// The cause.
    pub cause: String,
    /// The fault that stopped the other ranks, if any was stopped.
    pub fault: Option<Arc<Fault>>,
    /// How each rank failed; `None` for ranks that returned without an error.
    pub ends: Vec<Option<RankEnd<E>>>,
}

impl<E: Display> Display for WorldError<E> {
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

impl<E: Display> Debug for WorldError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl<E: Display> std::error::Error for WorldError<E> {}
