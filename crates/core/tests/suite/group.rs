//! What [`Group`] adds to a backend: checks, the log, groups of one rank; and the backend that only records.

use meshwork_core::comm::record;
use meshwork_core::{Buffer, CommError, CommLog, DType, Group, Memory, OpKind, Record, ReduceOp};
use meshwork_testkit::run_world;
use std::sync::Arc;

/// Rank 1 of a `tp` group of four, alone.
fn recorded() -> Group {
    Group::from(record::communicator("tp", 1, vec![4, 5, 6, 7]).unwrap())
}

fn f32s(count: usize) -> Buffer {
    Buffer::zeros(DType::F32, count)
}

/// Memory that has a size and no bytes.
#[derive(Debug)]
struct Meta(usize);

impl Memory for Meta {
    fn bytes(&self) -> usize {
        self.0
    }
}

fn meta(dtype: DType, count: usize) -> Buffer {
    Buffer::from_memory(Arc::new(Meta(count * dtype.size())), dtype, count).unwrap()
}

#[test]
fn wrong_calls_are_refused_with_what_would_be_valid() {
    let group = recorded();
    let place = "on the tp group of world rank 5 (4 ranks): ";
    let check = |result: Result<Buffer, CommError>, op: &str, problem: &str| {
        assert_eq!(result.unwrap_err().to_string(), format!("{op} {place}{problem}"));
    };
    check(
        group.reduce_scatter(f32s(10), f32s(2), ReduceOp::Sum),
        "reduce_scatter",
        "the input has 10 elements, it must have a multiple of 4",
    );
    check(
        group.reduce_scatter(f32s(8), f32s(3), ReduceOp::Sum),
        "reduce_scatter",
        "the output has 3 elements, it must have 2",
    );
    check(group.all_gather(f32s(3), f32s(16)), "all_gather", "the input has 3 elements, it must have 4");
    check(
        group.all_gather(f32s(1), Buffer::zeros(DType::I32, 4)),
        "all_gather",
        "the input is f32 and the output i32: they must be equal",
    );
    check(group.broadcast(f32s(1), 4), "broadcast", "root 4 is not in the group, it must be below 4");
    check(group.send(f32s(1), 9, 0), "send", "peer 9 is not in the group, it must be below 4");
    check(group.recv(f32s(1), 1, 0), "recv", "rank 1 cannot exchange messages with itself");
    let all_to_all = |sends: &[usize], receives: &[usize]| group.all_to_all(f32s(4), f32s(4), sends, receives);
    check(all_to_all(&[1; 3], &[1; 4]), "all_to_all", "send_counts has 3 entries, it must have 4, one for each rank");
    check(all_to_all(&[1; 4], &[1, 1, 1, 2]), "all_to_all", "the output has 4 elements, it must have 5");
    check(
        all_to_all(&[usize::MAX, usize::MAX, 2, 4], &[1; 4]),
        "all_to_all",
        "the input has 4 elements, it must have 18446744073709551615",
    );
    check(all_to_all(&[1; 4], &[0, 2, 1, 1]), "all_to_all", "rank 1 sends 1 elements to itself but expects 2");
    assert!(group.log().drain().is_empty(), "refused calls are no communication");
}

#[test]
fn a_shared_output_is_refused_and_a_shared_input_is_not() {
    run_world(2, |group| {
        let output = f32s(4);
        let keep = output.clone();
        let error = group.start_all_reduce(output, ReduceOp::Sum).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "all_reduce on the world group of world rank {}: \
                 the output's memory is shared: drop its clones and slices first",
                group.rank()
            )
        );
        assert!(matches!(error, CommError::BufferShared { op: OpKind::AllReduce, .. }));
        group.all_gather(keep.clone(), f32s(8)).unwrap();
        // A refused call does not count, so both ranks still agree on the next operation.
        group.all_reduce(keep, ReduceOp::Sum).unwrap();
    });
}

#[test]
fn memory_that_is_not_on_the_host_is_refused_by_threads() {
    run_world(2, |group| {
        let error = group.start_all_reduce(meta(DType::F32, 4), ReduceOp::Sum).unwrap_err();
        let expected = "the memory of this buffer (4 of f32) is not on the host";
        assert_eq!(error.to_string(), expected);
    });
}

#[test]
fn split_members_must_make_sense() {
    let group = recorded();
    let check = |members: &[usize], problem: &str| {
        let place = "off the tp group of world rank 5";
        let expected = format!("cannot split x = {members:?} {place}: {problem}");
        assert_eq!(group.split("x", members).unwrap_err().to_string(), expected);
    };
    check(&[0, 2], "rank 1, which calls, must be among the members");
    check(&[1, 4], "rank 4 is not in the group, it must be below 4");
    check(&[1, 0, 1], "rank 1 is named twice");
    let pair = group.split("x", &[3, 1]).unwrap();
    assert_eq!((pair.rank(), pair.world_ranks(), pair.world_rank()), (1, &[7, 5][..], 5));
}

/// The same calls for every rank and backend; `make` makes buffers.
fn calls(group: &Group, make: impl Fn(DType, usize) -> Buffer) {
    let (n, next) = (group.size(), (group.rank() + 1) % group.size());
    let previous = (group.rank() + n - 1) % n;
    group.all_reduce(make(DType::F32, 100), ReduceOp::Sum).unwrap();
    group.reduce_scatter(make(DType::Bf16, 100), make(DType::Bf16, 25), ReduceOp::Sum).unwrap();
    group.all_gather(make(DType::F64, 25), make(DType::F64, 100)).unwrap();
    group.broadcast(make(DType::I32, 100), 2).unwrap();
    let counts = [5; 4];
    group.all_to_all(make(DType::U8, 20), make(DType::U8, 20), &counts, &counts).unwrap();
    let send = group.start_send(make(DType::F32, 10), next, 3).unwrap();
    group.recv(make(DType::F32, 10), previous, 3).unwrap();
    send.wait().unwrap();
    group.barrier().unwrap();
}

#[test]
fn the_log_holds_logical_bytes_the_same_for_every_backend() {
    let expected = [
        (OpKind::AllReduce, DType::F32, 100, 600.0),
        (OpKind::ReduceScatter, DType::Bf16, 100, 150.0),
        (OpKind::AllGather, DType::F64, 100, 600.0),
        (OpKind::Broadcast, DType::I32, 100, 300.0),
        (OpKind::AllToAll, DType::U8, 15, 15.0),
        (OpKind::Send, DType::F32, 10, 40.0),
        (OpKind::Recv, DType::F32, 10, 0.0),
        (OpKind::Barrier, DType::U8, 0, 0.0),
    ];
    let check = |log: &CommLog, group: &str| {
        assert_eq!(log.bytes_by_group()[group], 1705.0);
        let records = log.drain();
        let bytes: Vec<_> = records.iter().map(|r| (r.op, r.dtype, r.elements, r.bytes())).collect();
        assert_eq!(bytes, expected);
        assert!(records.iter().all(|r: &Record| r.group == group && r.ranks == 4));
        assert!(log.drain().is_empty());
    };
    run_world(4, |world| {
        let tp = world.split("tp", &[0, 1, 2, 3]).unwrap();
        calls(&tp, Buffer::zeros);
        check(world.log(), "tp"); // groups of one rank share a log
    });
    let group = recorded();
    calls(&group, meta);
    check(group.log(), "tp");
}

#[test]
fn a_group_of_one_rank_does_the_identity_and_logs_nothing() {
    run_world(2, |world| {
        let rank = world.rank();
        let one = world.split("tp", &[rank]).unwrap();
        let data = [1.5f32, -2.0, rank as f32];
        for op in ReduceOp::ALL {
            let mut x = data;
            one.all_reduce_slice(&mut x, op).unwrap();
            assert_eq!(x, data);
            let mut y = [0.0; 3];
            one.reduce_scatter_slice(&data, &mut y, op).unwrap();
            assert_eq!(y, data);
        }
        let (mut x, mut y, mut z) = (data, [0.0; 3], [0.0; 3]);
        one.broadcast_slice(&mut x, 0).unwrap();
        one.all_gather_slice(&data, &mut y).unwrap();
        one.all_to_all_slice(&data, &mut z, &[3], &[3]).unwrap();
        assert_eq!([x, y, z], [data; 3]);
        one.barrier().unwrap();
        // The checks are the same as in larger groups.
        assert!(one.broadcast(f32s(1), 1).is_err());
        assert!(one.send(f32s(1), 0, 0).is_err());
        let shared = f32s(1);
        assert!(one.all_reduce(shared.clone(), ReduceOp::Sum).is_err());
        drop(shared);
        assert!(one.log().drain().is_empty());
    });
    // Without host bytes there is nothing to copy.
    let one = Group::from(record::communicator("tp", 0, vec![3]).unwrap());
    let output = one.all_gather(meta(DType::F32, 7), meta(DType::F32, 7)).unwrap();
    assert!(!output.is_host() && output.count() == 7);
    assert!(one.log().drain().is_empty());
}
