//! The memory of operations in flight between threads, and who does their work.

use meshwork_core::{Block, Buffer, CommError, DType, HostMemory, Recycle, ReduceOp, World};
use meshwork_testkit::run_world;
use std::sync::{Arc, Mutex};

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
    let failed = World::Threads(3).run(|group| match group.rank() {
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
    let failed = World::Threads(2).run(|group| match group.rank() {
        1 => Err("injected".to_owned()),
        _ => group.send(arena.buffer(10), 1, 0).map(drop).map_err(|e: CommError| e.to_string()),
    });
    assert_eq!(failed.unwrap_err().rank, 1);
    assert_eq!(arena.returned(), 1);
}
