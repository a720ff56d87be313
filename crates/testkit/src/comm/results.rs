//! Every operation, element type and size of a world, against a naive oracle.

use super::{Worlds, cases, passes};
use crate::Rng;
use meshwork_core::{Buffer, Cause, Element, Group, ReduceOp, ReductionOrder, bf16, f16};
use std::ops::Range;

cases![every_type, large_operations, groups_are_independent, inputs_may_be_slices_of_shared_memory];

/// World sizes: all small ones, odd ones with them, and one deep tree.
const SIZES: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16];

/// The naive side of an element type: reduction in f64, i128 or whatever makes it obvious.
trait Oracle: Element {
    fn random(rng: &mut Rng) -> Self;
    /// A small integer: its sums are the same in any order.
    fn small(rng: &mut Rng) -> Self;
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
        fn small(rng: &mut Rng) -> $t {
            rng.below(8) as $t
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
        fn small(rng: &mut Rng) -> $t {
            <$t>::from_f32(rng.below(8) as f32)
        }
        fn tree(op: ReduceOp, ranks: &[$t]) -> $t {
            let ranks: Vec<f32> = ranks.iter().map(|x| x.to_f32()).collect();
            <$t>::from_f32(f32::tree(op, &ranks))
        }
    })* };
}
half_oracle!(bf16, f16);

/// The inputs of a large operation repeat with this period. It is prime, so that no two pieces hold the same elements.
const PERIOD: usize = 4093;

/// The inputs of all ranks of a group, which every rank can compute, and their reductions.
struct Inputs {
    ranks: usize,
    /// Whether the group adds up in the tree: elsewhere sums are exact in any order.
    in_tree: bool,
}

impl Inputs {
    fn new(group: &Group) -> Inputs {
        Inputs { ranks: group.size(), in_tree: group.reduction_order() == ReductionOrder::BalancedTree }
    }

    /// The elements of a rank: its period, repeated.
    fn elements<T: Oracle>(&self, rank: usize, count: usize) -> Vec<T> {
        self.period(rank, count).into_iter().cycle().take(count).collect()
    }

    /// The first [`PERIOD`] elements of a rank, drawn at random.
    fn period<T: Oracle>(&self, rank: usize, count: usize) -> Vec<T> {
        let mut rng = Rng::new((rank * 1_000_003 + count) as u64);
        let draw = |_| if self.in_tree { T::random(&mut rng) } else { T::small(&mut rng) };
        (0..count.min(PERIOD)).map(draw).collect()
    }

    /// The elements `range` of the reduction of `count` elements.
    fn reduced<T: Oracle>(&self, op: ReduceOp, count: usize, range: Range<usize>) -> Vec<T> {
        let inputs: Vec<Vec<T>> = (0..self.ranks).map(|rank| self.period(rank, count)).collect();
        let column = |i: usize| inputs.iter().map(|input| input[i]).collect::<Vec<_>>();
        let period: Vec<T> = (0..count.min(PERIOD)).map(|i| T::tree(op, &column(i))).collect();
        range.map(|i| period[i % PERIOD]).collect()
    }
}

/// Runs every collective once with `count` elements per rank and compares.
fn collectives<T: Oracle>(group: &Group, count: usize) -> Result<(), Cause> {
    let (n, rank, inputs) = (group.size(), group.rank(), Inputs::new(group));
    let zeros = |count| vec![T::zeroed(); count];
    for op in ReduceOp::ALL {
        let mut data = inputs.elements::<T>(rank, count);
        group.all_reduce_slice(&mut data, op)?;
        assert_eq!(data, inputs.reduced::<T>(op, count, 0..count), "all_reduce {op:?} of {} on {n}", T::DTYPE);

        // Every second rank out of place, from memory that is shared.
        let kept = Buffer::from_vec(inputs.elements::<T>(rank, count));
        let other = inputs.elements::<T>(rank + 9, count + 1)[0];
        let reduced = match rank % 2 {
            0 => group.all_reduce_into(kept.clone(), Buffer::from_vec(vec![other; count]), op)?,
            _ => group.all_reduce(Buffer::from_vec(inputs.elements::<T>(rank, count)), op)?,
        };
        assert_eq!(reduced.as_slice::<T>()?, data, "all_reduce {op:?} out of place on {n}");
        assert_eq!(kept.as_slice::<T>()?, inputs.elements::<T>(rank, count), "the input stays as it is");

        let mut part = zeros(count);
        group.reduce_scatter_slice(&inputs.elements::<T>(rank, n * count), &mut part, op)?;
        let expected = inputs.reduced::<T>(op, n * count, rank * count..(rank + 1) * count);
        assert_eq!(part, expected, "reduce_scatter {op:?} on {n}");
    }

    let mut all = zeros(n * count);
    group.all_gather_slice(&inputs.elements::<T>(rank, count), &mut all)?;
    let expected: Vec<T> = (0..n).flat_map(|rank| inputs.elements(rank, count)).collect();
    assert_eq!(all, expected, "all_gather of {} on {n}", T::DTYPE);

    for root in [0, n / 2, n - 1] {
        let mut data = inputs.elements::<T>(rank, count);
        group.broadcast_slice(&mut data, root)?;
        assert_eq!(data, inputs.elements::<T>(root, count), "broadcast from {root} on {n}");
    }

    // Even, and uneven: rank r sends (r + 2·peer + count) % 5 elements to a peer, some of them none.
    for even in [true, false] {
        let part = |from: usize, to: usize| if even { count } else { (from + 2 * to + count) % 5 };
        let sends: Vec<_> = (0..n).map(|to| part(rank, to)).collect();
        let receives: Vec<_> = (0..n).map(|from| part(from, rank)).collect();
        let mut output = zeros(receives.iter().sum());
        let sent = inputs.elements::<T>(rank, sends.iter().sum());
        group.all_to_all_slice(&sent, &mut output, &sends, &receives)?;
        let from = |from: usize| {
            let [all, before] = [n, rank].map(|end| (0..end).map(|to| part(from, to)).sum::<usize>());
            inputs.elements::<T>(from, all)[before..][..part(from, rank)].to_vec()
        };
        assert_eq!(output, (0..n).flat_map(from).collect::<Vec<_>>(), "all_to_all of {} on {n}", T::DTYPE);
    }
    Ok(())
}

fn messages<T: Oracle>(group: &Group, count: usize) -> Result<(), Cause> {
    let (n, rank, inputs) = (group.size(), group.rank(), Inputs::new(group));
    if n == 1 {
        return Ok(()); // nobody to talk to
    }
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let (mine, theirs) = (inputs.elements::<T>(rank, count), inputs.elements::<T>(previous, count));
    // A sender that keeps a clone keeps the elements: the message is copied.
    let buffer = Buffer::from_vec(mine.clone());
    let send = group.start_send(buffer.clone(), next, 5)?;
    let mut data = vec![T::zeroed(); count];
    group.recv_slice(&mut data, previous, 5)?;
    assert_eq!(data, theirs, "a message of {} on {n}", T::DTYPE);
    let mut sent = send.wait()?;
    assert_eq!(sent.as_slice::<T>()?, mine);
    drop(buffer);
    assert!(sent.as_mut_slice::<T>().is_ok(), "a sent buffer comes back, and is unique again");

    // One that does not may get other memory back.
    let send = group.start_send(Buffer::from_vec(mine), next, 6)?;
    let received = group.recv(Buffer::zeros(T::DTYPE, count), previous, 6)?;
    assert_eq!(received.as_slice::<T>()?, theirs, "a message of {} that moves on {n}", T::DTYPE);
    let mut sent = send.wait()?;
    assert!(sent.as_mut_slice::<T>().is_ok() && sent.count() == count, "memory comes back for it");
    Ok(())
}

fn every_type(worlds: &dyn Worlds) {
    fn check<T: Oracle>(group: &Group) -> Result<(), Cause> {
        for count in [0, 1, 13, 1500] {
            collectives::<T>(group, count)?;
            messages::<T>(group, count)?;
            group.barrier()?;
        }
        Ok(())
    }
    for n in SIZES.into_iter().filter(|&n| n <= worlds.most()) {
        passes(worlds, n, |group| {
            check::<f32>(group)?;
            check::<f64>(group)?;
            check::<bf16>(group)?;
            check::<f16>(group)?;
            check::<i32>(group)?;
            check::<i64>(group)?;
            check::<u8>(group)
        });
    }
}

/// Large enough to be cut into many pieces, with an odd rest.
fn large_operations(worlds: &dyn Worlds) {
    for n in [2, 3, 4] {
        passes(worlds, n, |group| {
            collectives::<f32>(group, 300_007)?;
            collectives::<bf16>(group, 300_007)?;
            messages::<u8>(group, 1_000_003)
        });
    }
}

/// Ranks in rows of 2 and columns of half of them, as `tp` and `dp` of a mesh.
fn groups_are_independent(worlds: &dyn Worlds) {
    let n = worlds.most().min(8);
    passes(worlds, n, |world| {
        let rank = world.rank();
        let row: Vec<_> = (0..n).filter(|r| r / 2 == rank / 2).collect();
        let column: Vec<_> = (0..n).filter(|r| r % 2 == rank % 2).collect();
        let (tp, dp) = (world.split("tp", &row)?, world.split("dp", &column)?);
        assert_eq!((tp.name(), tp.size(), tp.rank(), tp.world_ranks()), ("tp", 2, rank % 2, &*row));
        assert_eq!((dp.name(), dp.size(), dp.rank(), dp.world_rank()), ("dp", n / 2, rank / 2, rank));
        assert_eq!(dp.reduction_order(), world.reduction_order());
        for step in 0..50 {
            let mut x = [rank as i64, step];
            tp.all_reduce_slice(&mut x, ReduceOp::Sum)?;
            assert_eq!(x, [row.iter().sum::<usize>() as i64, 2 * step]);
            dp.all_reduce_slice(&mut x, ReduceOp::Sum)?;
            assert_eq!(x, [(n * (n - 1) / 2) as i64, n as i64 * step]);
            // Both at once, which are waited for in another order on each rank.
            let start = |group: &Group| group.start_all_reduce(Buffer::from_slice(&[rank as i64]), ReduceOp::Max);
            let (in_row, in_column) = (start(&tp)?, start(&dp)?);
            let (of_row, of_column) = if rank % 3 == 0 {
                let of_column = in_column.wait()?;
                (in_row.wait()?, of_column)
            } else {
                (in_row.wait()?, in_column.wait()?)
            };
            assert_eq!(of_row.as_slice::<i64>()?, [row[1] as i64]);
            assert_eq!(of_column.as_slice::<i64>()?, [column[n / 2 - 1] as i64]);
        }
        collectives::<f32>(&dp, 100 + rank % 2)?; // both columns at the same time, with different counts
        // A group of a group, in reverse order.
        let half = dp.rank() / 2 * 2;
        let pair = dp.split("pair", &[half + 1, half])?;
        assert_eq!(pair.rank(), 1 - dp.rank() % 2);
        collectives::<i32>(&pair, 10)
    });
}

/// Slices of one buffer may be read by several operations at once, and the parts keep their places.
fn inputs_may_be_slices_of_shared_memory(worlds: &dyn Worlds) {
    passes(worlds, 2, |group| {
        let whole = Buffer::from_vec((0..8).map(|i| i + 10 * group.rank() as i32).collect());
        let halves = [whole.slice(0..4)?, whole.slice(4..8)?];
        let [low, high] = halves.map(|half| group.start_all_gather(half, Buffer::zeros(whole.dtype(), 8)));
        let (low, high) = (low?.wait()?, high?.wait()?);
        assert_eq!(low.as_slice::<i32>()?, [0, 1, 2, 3, 10, 11, 12, 13]);
        assert_eq!(high.as_slice::<i32>()?, [4, 5, 6, 7, 14, 15, 16, 17]);
        assert!(whole.is_unique(), "the operations let go of their inputs");
        Ok(())
    });
}
