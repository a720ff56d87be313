//! Operations so large that threads do them in another way. All sizes and types are cases of `conformance`.

use meshwork_core::{Buffer, DType, ReduceOp};
use meshwork_testkit::run_world;

/// So large that writes bypass the caches. Sums of small integers are exact in any order.
#[test]
fn very_large_operations_leave_no_element_out() {
    let (n, count) = (4, (7 << 18) + 13);
    run_world(n, |group| {
        let value = |rank: usize, i: usize| (rank * 1000 + i % 251) as f32;
        let of = |rank: usize, at: usize, count: usize| (at..at + count).map(|i| value(rank, i)).collect::<Vec<_>>();
        let sum = |at: usize, count: usize| {
            let sum = |i| (0..n).map(|rank| value(rank, i)).sum();
            (at..at + count).map(sum).collect::<Vec<f32>>()
        };
        let rank = group.rank();
        let room = |count| Buffer::zeros(DType::F32, count);
        let whole = Buffer::from_vec(of(rank, 0, n * count));
        let reduced = group.all_reduce_into(whole.clone(), room(n * count), ReduceOp::Sum).unwrap();
        assert!(reduced.as_slice::<f32>().unwrap() == sum(0, n * count));
        drop(reduced);
        let part = group.reduce_scatter(whole, room(count), ReduceOp::Sum).unwrap();
        assert!(part.as_slice::<f32>().unwrap() == sum(rank * count, count));
        let all = group.all_gather(part, room(n * count)).unwrap();
        assert!(all.as_slice::<f32>().unwrap() == sum(0, n * count));
    });
}
