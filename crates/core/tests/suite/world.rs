//! Worlds that are joined by communicators of threads, and what a process makes before it runs.

use meshwork_core::comm::thread::{Options, world};
use meshwork_core::{CommError, ReduceOp, World};
use std::thread;
use std::time::Duration;

const PATIENT: Options = Options { timeout: Duration::from_secs(600) };

/// Runs `body` as the ranks of joined worlds, each on a thread of its own: what each of them gets.
fn joined<T: Send, R: Send>(n: usize, body: impl Fn(World) -> Result<T, R> + Sync) -> Vec<Result<T, R>> {
    thread::scope(|scope| {
        let start = |comm| scope.spawn(|| body(World::Joined(vec![comm])));
        let ranks: Vec<_> = world(n, PATIENT).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_joined_world_gives_the_result_of_its_own_rank() {
    let results = joined(3, |world| {
        let leads = world.leads();
        world.run(|world| {
            let mut x = [world.rank() as i64];
            world.all_reduce_slice(&mut x, ReduceOp::Sum)?;
            Ok::<_, CommError>((world.rank(), x[0], leads))
        })
    });
    let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(results, [[(0, 3, true)], [(1, 3, false)], [(2, 3, false)]]);
}

/// What threads lack before they run is the error of one rank.
#[test]
fn what_is_prepared_for_threads_fails_as_a_world_of_one_rank() {
    let alone = World::Threads(4).prepare(|| Err::<(), _>("no such device")).unwrap_err();
    assert_eq!(alone.to_string(), "a world of 1 ranks failed: rank 0 returned an error: no such device");
    let panicked = World::Threads(4).prepare(|| -> Result<(), CommError> { panic!("out of cheese") }).unwrap_err();
    assert_eq!(panicked.cause, "rank 0 panicked: out of cheese");
    assert_eq!(World::Threads(4).prepare(|| Ok::<_, CommError>(3)).unwrap(), 3);
}
