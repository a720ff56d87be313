//! Worlds of rank threads.

use meshwork_core::{Cause, Group, World};

/// Runs `body` as `n` ranks on threads and returns their results, by rank.
///
/// ```
/// use meshwork_core::ReduceOp;
///
/// let sums = meshwork_testkit::run_world(3, |world| {
///     let mut x = [world.rank() as i32];
///     world.all_reduce_slice(&mut x, ReduceOp::Sum).unwrap();
///     x[0]
/// });
/// assert_eq!(sums, [3, 3, 3]);
/// ```
///
/// # Panics
///
/// If a rank panics, with the rank that did so first, why, and what the others were doing.
pub fn run_world<T: Send>(n: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    try_run_world(n, |group| Ok::<T, std::convert::Infallible>(body(group)))
}

/// As [`run_world`], for a body that returns errors.
///
/// # Panics
///
/// If a rank panics or returns an error, with the rank that did so first, why, and what the others were doing.
pub fn try_run_world<T: Send, E: Into<Cause>>(n: usize, body: impl Fn(Group) -> Result<T, E> + Sync) -> Vec<T> {
    World::Threads(n).run(body).unwrap_or_else(|error| panic!("{error}"))
}
