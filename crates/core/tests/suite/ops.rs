//! Every operation, dtype and world size on the thread backend, against a naive oracle.

use std::ops::Range;

use half::{bf16, f16};
use meshwork_core::{Buffer, DType, Element, Group, ReduceOp};
use meshwork_testkit::{Rng, run_world};

/// World sizes: all small ones, odd ones with them, and one deep tree.
const SIZES: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16];

/// The naive side of an element type: reduction in f64, i128 or whatever makes it obvious.
trait Oracle: Element {
    fn random(rng: &mut Rng) -> Self;
    /// The fixed tree, by its definition.
    fn tree(op: ReduceOp, ranks: &[Self]) -> Self;
}

fn naive_tree<T: Copy>(ranks: &[T], f: &impl Fn(T, T) -> T) -> T {
    if let [one] = ranks {
        return *one;
    }
    let mut middle = 1;
    while middle * 2 < ranks.len() {
        middle *= 2;
    }
    f(naive_tree(&ranks[..middle], f), naive_tree(&ranks[middle..], f))
}

macro_rules! oracle {
    ($($t:ty: $random:expr, $add:expr, $max:expr, $min:expr;)*) => { $(impl Oracle for $t {
        fn random(rng: &mut Rng) -> $t {
            $random(rng)
        }
        fn tree(op: ReduceOp, ranks: &[$t]) -> $t {
            match op {
                ReduceOp::Sum => naive_tree(ranks, &$add),
                ReduceOp::Max => naive_tree(ranks, &$max),
                ReduceOp::Min => naive_tree(ranks, &$min),
            }
        }
    })* };
}

/// Of very different sizes, so that another order of additions gives another sum.
fn wide(rng: &mut Rng) -> f32 {
    rng.signed() * 10f32.powi(rng.below(7) as i32)
}

oracle! {
    f32: wide, |a, b| a + b, f32::max, f32::min;
    f64: |rng| f64::from(wide(rng)) / 3.0, |a, b| a + b, f64::max, f64::min;
    i32: |rng: &mut Rng| rng.next_u64() as i32, i32::wrapping_add, i32::max, i32::min;
    i64: |rng: &mut Rng| rng.next_u64() as i64, i64::wrapping_add, i64::max, i64::min;
    u8: |rng: &mut Rng| rng.next_u64() as u8, u8::wrapping_add, u8::max, u8::min;
}

macro_rules! half_oracle {
    ($($t:ty),*) => { $(impl Oracle for $t {
        fn random(rng: &mut Rng) -> $t {
            <$t>::from_f32(rng.signed() * 8.0)
        }
        fn tree(op: ReduceOp, ranks: &[$t]) -> $t {
            let ranks: Vec<f32> = ranks.iter().map(|x| x.to_f32()).collect();
            <$t>::from_f32(f32::tree(op, &ranks))
        }
    })* };
}
half_oracle!(bf16, f16);

/// What `rank` contributes: every rank can compute it for every other.
fn input<T: Oracle>(rank: usize, count: usize) -> Vec<T> {
    let mut rng = Rng::new((rank * 1_000_003 + count) as u64);
    (0..count).map(|_| T::random(&mut rng)).collect()
}

/// The elements `range` of the reduction of `count` elements.
fn reduced<T: Oracle>(op: ReduceOp, ranks: usize, count: usize, range: Range<usize>) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| input(rank, count)).collect();
    let mut column = Vec::with_capacity(ranks);
    let mut element = |i: usize| {
        column.clear();
        column.extend(inputs.iter().map(|input| input[i]));
        T::tree(op, &column)
    };
    range.map(&mut element).collect()
}

/// Runs every collective once with `count` elements per rank and compares.
fn check_collectives<T: Oracle>(group: &Group, count: usize) {
    let (n, rank) = (group.size(), group.rank());
    let zeros = |count| vec![T::zeroed(); count];
    for op in ReduceOp::ALL {
        let mut data = input::<T>(rank, count);
        group.all_reduce_slice(&mut data, op).unwrap();
        assert_eq!(data, reduced::<T>(op, n, count, 0..count), "all_reduce {op:?} of {} on {n}", T::DTYPE);

        // Every second rank out of place, from memory that is shared.
        let kept = Buffer::from_vec(input::<T>(rank, count));
        let reduced_all = match rank % 2 {
            0 => group.all_reduce_into(
                kept.clone(),
                Buffer::from_vec(vec![input::<T>(rank + 9, count + 1)[0]; count]),
                op,
            ),
            _ => group.all_reduce(Buffer::from_vec(input::<T>(rank, count)), op),
        };
        assert_eq!(reduced_all.unwrap().as_slice::<T>().unwrap(), data, "all_reduce {op:?} out of place on {n}");
        assert_eq!(kept.as_slice::<T>().unwrap(), input::<T>(rank, count), "the input stays as it is");

        let mut part = zeros(count);
        group.reduce_scatter_slice(&input::<T>(rank, n * count), &mut part, op).unwrap();
        let expected = reduced::<T>(op, n, n * count, rank * count..(rank + 1) * count);
        assert_eq!(part, expected, "reduce_scatter {op:?} on {n}");
    }

    let mut all = zeros(n * count);
    group.all_gather_slice(&input::<T>(rank, count), &mut all).unwrap();
    let expected: Vec<T> = (0..n).flat_map(|rank| input(rank, count)).collect();
    assert_eq!(all, expected, "all_gather of {} on {n}", T::DTYPE);

    for root in [0, n / 2, n - 1] {
        let mut data = input::<T>(rank, count);
        group.broadcast_slice(&mut data, root).unwrap();
        assert_eq!(data, input::<T>(root, count), "broadcast from {root} on {n}");
    }

    // Uneven: rank r sends (r + 2·peer + count) % 5 elements to a peer, some of them none.
    let part = |from: usize, to: usize| (from + 2 * to + count) % 5;
    let sends: Vec<_> = (0..n).map(|to| part(rank, to)).collect();
    let receives: Vec<_> = (0..n).map(|from| part(from, rank)).collect();
    let mut output = zeros(receives.iter().sum());
    let sent = input::<T>(rank, sends.iter().sum());
    group.all_to_all_slice(&sent, &mut output, &sends, &receives).unwrap();
    let expected: Vec<T> = (0..n)
        .flat_map(|from| {
            let all: usize = (0..n).map(|to| part(from, to)).sum();
            let before: usize = (0..rank).map(|to| part(from, to)).sum();
            input::<T>(from, all)[before..][..part(from, rank)].to_vec()
        })
        .collect();
    assert_eq!(output, expected, "all_to_all of {} on {n}", T::DTYPE);
}

fn check_messages<T: Oracle>(group: &Group, count: usize) {
    let (n, rank) = (group.size(), group.rank());
    if n == 1 {
        return; // nobody to talk to
    }
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let (mine, theirs) = (input::<T>(rank, count), input::<T>(previous, count));
    // A sender that keeps a clone keeps the elements: the message is copied.
    let buffer = Buffer::from_vec(mine.clone());
    let send = group.start_send(buffer.clone(), next, 5).unwrap();
    let mut data = vec![T::zeroed(); count];
    group.recv_slice(&mut data, previous, 5).unwrap();
    assert_eq!(data, theirs, "a message of {} on {n}", T::DTYPE);
    let mut sent = send.wait().unwrap();
    assert_eq!(sent.as_slice::<T>().unwrap(), mine);
    drop(buffer);
    assert!(sent.as_mut_slice::<T>().is_ok(), "a sent buffer comes back, and is unique again");

    // One that does not may get other memory back: the receiver has that of the sender.
    let buffer = Buffer::from_vec(mine);
    let at = |buffer: &Buffer| [buffer.as_bytes().unwrap().as_ptr() as usize as i64];
    let (mut from, old) = ([0], at(&buffer));
    let send = group.start_send(buffer, next, 6).unwrap();
    let received = group.recv(Buffer::zeros(T::DTYPE, count), previous, 6).unwrap();
    assert_eq!(received.as_slice::<T>().unwrap(), theirs, "a message of {} that moves on {n}", T::DTYPE);
    let mut sent = send.wait().unwrap();
    assert!(sent.as_mut_slice::<T>().is_ok() && sent.count() == count, "memory comes back for it");
    let send = group.start_send(Buffer::from_slice(&old), next, 7).unwrap();
    group.recv_slice(&mut from, previous, 7).unwrap();
    send.wait().unwrap();
    assert!(count == 0 || at(&received) == from, "nothing was copied");
}

fn check_dtype<T: Oracle>() {
    for n in SIZES {
        run_world(n, |group| {
            for count in [0, 1, 13, 1500] {
                check_collectives::<T>(&group, count);
                check_messages::<T>(&group, count);
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn f32_matches_the_oracle() {
    check_dtype::<f32>();
}

#[test]
fn f64_matches_the_oracle() {
    check_dtype::<f64>();
}

#[test]
fn bf16_matches_the_oracle() {
    check_dtype::<bf16>();
}

#[test]
fn f16_matches_the_oracle() {
    check_dtype::<f16>();
}

#[test]
fn integers_match_the_oracle() {
    check_dtype::<i32>();
    check_dtype::<i64>();
    check_dtype::<u8>();
}

/// Large enough to be cut into many pieces that several ranks do, with an odd rest.
#[test]
fn large_operations_match_the_oracle() {
    for n in [2, 3, 4] {
        run_world(n, |group| {
            check_collectives::<f32>(&group, 300_007);
            check_collectives::<bf16>(&group, 300_007);
            check_messages::<u8>(&group, 1_000_003);
        });
    }
}

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

/// Eight ranks in rows of 2 and columns of 4, as `tp` and `dp` of a mesh.
#[test]
fn groups_are_independent() {
    run_world(8, |world| {
        let rank = world.rank();
        let row: Vec<_> = (0..8).filter(|r| r / 2 == rank / 2).collect();
        let column: Vec<_> = (0..8).filter(|r| r % 2 == rank % 2).collect();
        let tp = world.split("tp", &row).unwrap();
        let dp = world.split("dp", &column).unwrap();
        assert_eq!((tp.name(), tp.size(), tp.rank(), tp.world_ranks()), ("tp", 2, rank % 2, &*row));
        assert_eq!((dp.name(), dp.size(), dp.rank(), dp.world_rank()), ("dp", 4, rank / 2, rank));
        for step in 0..50 {
            let mut x = [rank as i64, step];
            tp.all_reduce_slice(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [row.iter().sum::<usize>() as i64, 2 * step]);
            dp.all_reduce_slice(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [28, 8 * step]);
        }
        check_collectives::<f32>(&dp, 100 + rank % 2); // both columns at the same time, with different counts
        // A group of a group, in reverse order.
        let pair = if dp.rank() < 2 { [1, 0] } else { [3, 2] };
        let pair = dp.split("pair", &pair).unwrap();
        assert_eq!(pair.rank(), 1 - dp.rank() % 2);
        check_collectives::<i32>(&pair, 10);
    });
}

/// Slices of one buffer may be read by several operations at once, and the parts keep their places.
#[test]
fn inputs_may_be_slices_of_shared_memory() {
    run_world(2, |group| {
        let whole = Buffer::from_vec((0..8).map(|i| i + 10 * group.rank() as i32).collect());
        let halves = [whole.slice(0..4).unwrap(), whole.slice(4..8).unwrap()];
        let started = halves.map(|half| group.start_all_gather(half, Buffer::zeros(whole.dtype(), 8)).unwrap());
        let [low, high] = started.map(|op| op.wait().unwrap().as_slice::<i32>().unwrap().to_vec());
        assert_eq!(low, [0, 1, 2, 3, 10, 11, 12, 13]);
        assert_eq!(high, [4, 5, 6, 7, 14, 15, 16, 17]);
        assert!(whole.is_unique(), "the operations let go of their inputs");
    });
}
