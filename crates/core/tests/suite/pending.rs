//! Operations in flight: several at a time, waited for in any order or not at all; the same bits whatever the timing.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use meshwork_core::comm::thread::{Options, run};
use meshwork_core::{Block, Buffer, CommError, DType, Group, HostMemory, Recycle, ReduceOp};
use meshwork_testkit::{Rng, run_world};

#[test]
fn operations_complete_in_any_order_of_waits() {
    for n in [2, 3, 8] {
        run_world(n, |group| {
            let mut rng = Rng::new(group.rank() as u64); // each rank waits in an order of its own
            for _ in 0..20 {
                let start = |i: i32| {
                    let buffer = Buffer::from_vec(vec![i; 1 + 5000 * (i as usize % 3)]);
                    (i, group.start_all_reduce(buffer, ReduceOp::Sum).unwrap())
                };
                let mut started: Vec<_> = (0..12).map(start).collect();
                rng.shuffle(&mut started);
                for (i, op) in started {
                    let result = op.wait().unwrap();
                    assert!(result.as_slice::<i32>().unwrap().iter().all(|&x| x == i * n as i32));
                }
            }
        });
    }
}

#[test]
fn a_started_bucket_is_done_when_its_last_rank_starts_it() {
    run_world(2, |group| {
        let big = || Buffer::from_vec(vec![1.0f32; 1 << 20]);
        if group.rank() == 1 {
            let mut nothing = [0u8];
            group.recv_slice(&mut nothing, 0, 0).unwrap(); // rank 0 has started, and does not wait
        }
        let op = group.start_all_reduce(big(), ReduceOp::Sum).unwrap();
        if group.rank() == 0 {
            group.send_slice(&[0u8], 1, 0).unwrap();
            group.recv_slice(&mut [0u8], 1, 0).unwrap(); // still does not wait for the sum
        } else {
            assert!(op.is_done(), "no other thread was there to do it");
            group.send_slice(&[0u8], 0, 0).unwrap();
        }
        let sum = op.wait().unwrap();
        assert!(sum.is_unique());
        assert!(sum.as_slice::<f32>().unwrap().iter().all(|&x| x == 2.0));
    });
}

#[test]
fn dropping_a_pending_operation_only_detaches() {
    run_world(4, |group| {
        for i in 0..100 {
            let op = group.start_all_reduce(Buffer::from_vec(vec![1i32; 10_000]), ReduceOp::Sum).unwrap();
            // Another rank each time drops its handle, while the others still need its elements.
            if i % 4 == group.rank() {
                drop(op);
            } else {
                assert!(op.wait().unwrap().as_slice::<i32>().unwrap().iter().all(|&x| x == 4));
            }
        }
        // A message whose sender is long done.
        match group.rank() {
            0 => drop(group.start_send(Buffer::from_vec(vec![7u8; 100]), 1, 1).unwrap()),
            1 => {
                thread::sleep(Duration::from_millis(5));
                let mut bytes = [0u8; 100];
                group.recv_slice(&mut bytes, 0, 1).unwrap();
                assert_eq!(bytes, [7; 100]);
            }
            _ => {}
        }
    });
}

/// Counts the returned blocks.
#[derive(Debug, Default)]
struct Arena(Mutex<Vec<Block>>);

impl Arena {
    fn buffer(self: &Arc<Arena>, count: usize) -> Buffer {
        let memory = HostMemory::recycled(Block::zeroed(4 * count), self.clone());
        Buffer::from_memory(Arc::new(memory), DType::F32, count).unwrap()
    }

    fn returned(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Recycle for Arena {
    fn recycle(&self, block: Block) {
        self.0.lock().unwrap().push(block);
    }
}

#[test]
fn the_memory_of_a_detached_operation_goes_when_the_operation_is_over() {
    let arena = Arc::new(Arena::default());
    run_world(2, |group| {
        drop(group.start_all_gather(arena.buffer(10), arena.buffer(20)).unwrap());
        if group.rank() == 0 {
            drop(group.start_send(arena.buffer(10), 1, 0).unwrap());
        } else {
            drop(group.start_recv(arena.buffer(10), 0, 0).unwrap());
        }
        group.barrier().unwrap();
        assert_eq!(arena.returned(), 6);
    });
}

#[test]
fn the_memory_of_a_failed_operation_goes_too() {
    let arena = Arc::new(Arena::default());
    let failed = run(3, Options::default(), |group| match group.rank() {
        2 => Err("injected".to_owned()),
        _ => {
            let op = group.start_all_reduce(arena.buffer(10), ReduceOp::Sum).map_err(|e: CommError| e.to_string())?;
            op.wait().map(drop).map_err(|e| e.to_string())
        }
    });
    assert_eq!(failed.unwrap_err().rank, 2);
    assert_eq!(arena.returned(), 2);
}

/// A message that moves trades memory, so that each arena gets back as much as it gave, and no more.
#[test]
fn memory_that_a_message_trades_goes_back_in_equal_parts() {
    let arenas = [(); 2].map(|()| Arc::new(Arena::default()));
    let (sent, received) = (Mutex::new(0), Mutex::new(0));
    let at = |buffer: &Buffer| buffer.as_bytes().unwrap().as_ptr() as usize;
    run_world(2, |group| {
        let arena = &arenas[group.rank()];
        let buffer = arena.buffer(10);
        match group.rank() {
            0 => {
                *sent.lock().unwrap() = at(&buffer);
                drop(group.send(buffer, 1, 0).unwrap());
            }
            _ => {
                let buffer = group.recv(buffer, 0, 0).unwrap();
                *received.lock().unwrap() = at(&buffer);
                assert_eq!(arena.returned(), 0, "the receiver has it");
            }
        }
        assert_eq!(arena.returned(), 1);
    });
    assert_eq!(*sent.lock().unwrap(), *received.lock().unwrap(), "nothing was copied");
}

/// The sender of a message that is never received gets its own memory back.
#[test]
fn a_message_that_moves_to_a_rank_that_fails_stays_with_its_sender() {
    let arena = Arc::new(Arena::default());
    let failed = run(2, Options::default(), |group| match group.rank() {
        1 => Err("injected".to_owned()),
        _ => group.send(arena.buffer(10), 1, 0).map(drop).map_err(|e: CommError| e.to_string()),
    });
    assert_eq!(failed.unwrap_err().rank, 1);
    assert_eq!(arena.returned(), 1);
}

#[test]
fn messages_arrive_in_order_whatever_the_order_of_waits() {
    run_world(2, |group| {
        let zeros = || Buffer::from_vec(vec![0i32]);
        if group.rank() == 0 {
            let send = |i: i32| group.start_send(Buffer::from_vec(vec![i]), 1, i as u64).unwrap();
            for op in (0..100).map(send).collect::<Vec<_>>() {
                op.wait().unwrap();
            }
        } else {
            let recv = |i: i32| (i, group.start_recv(zeros(), 0, i as u64).unwrap());
            for (i, op) in (0..100).map(recv).collect::<Vec<_>>().into_iter().rev() {
                assert_eq!(op.wait().unwrap().as_slice::<i32>().unwrap(), [i]);
            }
        }
    });
}

/// A training-like mix of operations, with delays drawn from `seed`; gives the bits of all results.
fn mix(group: &Group, seed: u64) -> Vec<u32> {
    let mut delays = Rng::new(seed * 1000 + group.rank() as u64);
    let mut data = Rng::new(group.rank() as u64);
    let mut bits = Vec::new();
    for step in 0..6 {
        let count = [7, 1000, 150_000][step % 3];
        let values: Vec<f32> = (0..count).map(|_| data.signed() * 1e3).collect();
        thread::sleep(Duration::from_micros(delays.below(300) as u64));
        let sum = group.start_all_reduce(Buffer::from_slice(&values), ReduceOp::Sum).unwrap();
        thread::sleep(Duration::from_micros(delays.below(300) as u64));
        let mut part = vec![0.0; count / group.size()];
        let whole = &values[..part.len() * group.size()];
        group.reduce_scatter_slice(whole, &mut part, ReduceOp::Sum).unwrap();
        let sum = sum.wait().unwrap();
        bits.extend(sum.as_slice::<f32>().unwrap().iter().chain(&part).map(|x| x.to_bits()));
    }
    bits
}

#[test]
fn delays_never_change_bits() {
    for n in [2, 3, 5] {
        let first = run_world(n, |group| mix(&group, 0));
        for seed in 1..8 {
            assert!(first == run_world(n, |group| mix(&group, seed)), "{n} ranks, seed {seed}");
        }
    }
}

/// More ranks than cores, thousands of dependent operations: only possible if waiting ranks leave the cores alone.
#[test]
fn sixteen_ranks_do_many_small_operations() {
    run_world(16, |group| {
        for i in 0..1000 {
            let mut x = [i, group.rank() as i32];
            group.all_reduce_slice(&mut x, ReduceOp::Sum).unwrap();
            assert_eq!(x, [16 * i, 120]);
        }
    });
}

/// The documented rule for threads: a rank's communicators work from several threads of it.
#[test]
fn a_rank_may_start_operations_on_one_thread_and_wait_on_another() {
    run_world(2, |group| {
        let op = group.start_all_reduce(Buffer::from_vec(vec![1i32; 5]), ReduceOp::Sum).unwrap();
        let sum = thread::scope(|scope| scope.spawn(|| op.wait().unwrap()).join().unwrap());
        assert_eq!(sum.as_slice::<i32>().unwrap(), [2; 5]);
    });
}
