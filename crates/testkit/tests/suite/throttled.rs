//! The time of a slow link.

use meshwork_core::{Buffer, CommError, Group, Mesh, Rank, ReduceOp, World};
use meshwork_testkit::throttled::communicator;
use std::time::Instant;

/// Runs two ranks over a link of 1 MB/s: the seconds of `work` on the slowest.
fn seconds(work: impl Fn(&Group) -> Result<Vec<f32>, CommError> + Sync, wanted: &[f32]) -> f64 {
    let ranks = World::Threads(2).run(|world| {
        let mesh: Mesh = "dp=2".parse().unwrap();
        let rank = Rank::new(&mesh, communicator(world.communicator().clone(), 1e6)).unwrap();
        let begun = Instant::now();
        assert_eq!(work(rank.data_group())?, wanted);
        Ok::<_, CommError>(begun.elapsed().as_secs_f64())
    });
    ranks.unwrap_or_else(|error| panic!("{error}")).into_iter().fold(0.0, f64::max)
}

/// 40 kB take 40 ms, also where they are sent by two operations at a time, and values are the same as of the
/// communicator behind it.
#[test]
fn operations_take_the_time_of_their_bytes() {
    let all = vec![2.0; 5000];
    let one = |group: &Group| {
        let mut values = vec![1.0; 5000];
        group.all_reduce_slice(&mut values, ReduceOp::Sum)?;
        Ok(values)
    };
    // 2 b / 2 of 20 kB.
    assert!(seconds(one, &all) >= 0.02);
    let both = |group: &Group| {
        let start = || group.start_all_reduce(Buffer::from_vec(vec![1.0_f32; 5000]), ReduceOp::Sum);
        let (first, second) = (start()?, start()?);
        _ = first.wait()?;
        Ok(second.wait()?.as_slice::<f32>()?.to_vec())
    };
    assert!(seconds(both, &all) >= 0.04);
}
