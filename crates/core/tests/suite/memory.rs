//! Blocks of host memory.

use meshwork_core::{Block, Buffer, DType, HostMemory, Recycle};
use std::sync::{Arc, Mutex};

const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

#[test]
fn blocks_of_any_size_are_aligned_zero_and_writable() {
    for bytes in [0, 1, 64, 65, PAGE - 1, PAGE, PAGE + 1, HUGE - 64, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE - 63] {
        let mut block = Block::zeroed(bytes);
        assert_eq!(block.bytes(), bytes.next_multiple_of(64));
        assert_eq!(block.as_slice().as_ptr().align_offset(64), 0);
        assert!(block.as_slice().iter().all(|&byte| byte == 0));
        block.as_mut_slice().fill(7);
        assert!(block.as_slice().iter().all(|&byte| byte == 7));
    }
}

#[test]
fn a_block_that_the_system_has_no_memory_for_is_none() {
    assert!(Block::try_zeroed(usize::MAX / 4).is_none());
    assert!(Block::try_zeroed(usize::MAX).is_none());
}

/// Parts of slabs never overlap, whatever was taken and dropped before, on any thread, and with more than one slab.
#[test]
fn blocks_alive_at_once_share_no_byte() {
    let fill = |seed: usize| {
        let mut blocks: Vec<(u8, Block)> = Vec::new();
        for turn in 0..150 {
            let (mark, bytes) = ((seed + turn) as u8, PAGE + (turn * 37 + seed) % 40 * PAGE * 11);
            let mut block = Block::zeroed(bytes);
            assert!(block.as_slice().iter().all(|&byte| byte == 0), "zero again");
            block.as_mut_slice().fill(mark);
            blocks.push((mark, block));
            if turn % 3 == 0 {
                blocks.swap_remove(turn * 7 % blocks.len());
            }
        }
        assert!(blocks.iter().all(|(mark, block)| block.as_slice().iter().all(|byte| byte == mark)));
    };
    std::thread::scope(|scope| (0..3).for_each(|seed| drop(scope.spawn(move || fill(seed * 83)))));
}

#[test]
fn blocks_come_back_once_when_the_last_buffer_goes() {
    #[derive(Debug, Default)]
    struct Arena(Mutex<Vec<Block>>);
    impl Recycle for Arena {
        fn recycle(&self, block: Block) {
            self.0.lock().unwrap().push(block);
        }
    }
    let arena = Arc::new(Arena::default());
    let memory = HostMemory::recycled(Block::zeroed(100), arena.clone());
    let buffer = Buffer::from_memory(Arc::new(memory), DType::U8, 100).unwrap();
    let half = buffer.slice(0..50).unwrap();
    drop(buffer);
    assert!(arena.0.lock().unwrap().is_empty());
    drop(half);
    assert_eq!(arena.0.lock().unwrap().iter().map(Block::bytes).collect::<Vec<_>>(), [128]);
}
