//! Products whose sums are cut into blocks and added up in the [tree].
//!
//! A block is a product of only its terms. The sums of a strip of rows of C stay in the cache until the other blocks
//! are done: the first sum of a strip is in C itself, the others are in memory kept by each thread.

use super::{BLOCKS, Epilogue, Factors, MatmulOperand, PACKED, Packed, Precision, ROWS, Update};
use super::{assert_inside, few_rows, gemm_shared, pack, serial};
use crate::kernels::gemm;
use crate::kernels::{Float, pointwise};
use meshwork_core::{Block, pool};
use meshwork_tensor::tape::Terms;
use std::cell::RefCell;
use std::ops::Range;

/// Elements of a strip of C. A tree of eight blocks has up to four such sums at a time, which stay in the L2 cache.
const WAITING: usize = 1 << 15;

/// Up to this many elements, B is packed faster than another thread wakes up.
const PACKED_ALONE: usize = 1 << 16;

/// Rows of a tile: a strip has a multiple of them.
const TILE: usize = 14;

thread_local! {
    /// Memory for the packed operands of products that this thread started.
    static KEPT: RefCell<Vec<Block>> = const { RefCell::new(Vec::new()) };
}

/// One product in a sum of products.
#[derive(Clone, Copy, Debug)]
pub struct Summand<'a, T> {
    /// Length of its sums.
    pub k: usize,
    /// `[m, k]`.
    pub a: MatmulOperand<'a, T>,
    /// `[k, n]`.
    pub b: MatmulOperand<'a, T>,
    /// How its sums are cut into blocks.
    pub terms: Terms,
}

/// A run of consecutive terms of a product that belong to one block.
struct Run<'a, T> {
    a: MatmulOperand<'a, T>,
    b: MatmulOperand<'a, T>,
    len: usize,
}

/// `C = A · B` for a row-major C, shared with the threads that are free: like [`gemm_shared`], but with the order of
/// sums of the product's `terms`.
///
/// Panics as [`gemm_shared`] does.
pub fn gemm_blocks<T: Float>(factors: Factors<'_, T>, c: &mut [T], terms: Terms) {
    let Factors { precision, dims: [m, n, k], a, b } = factors;
    gemm_sum(precision, [m, n], &[Summand { k, a, b, terms }], c);
}

/// `C = Σ A_i · B_i` for a row-major C of m rows and n columns, all cut into the same number of blocks: block l is the
/// sum of their blocks l, one after the other, as if they were one product with longer sums whose block l has all these
/// terms.
///
/// Panics as [`gemm_shared`] does, and if the numbers of blocks differ.
pub fn gemm_sum<T: Float>(precision: Precision, [m, n]: [usize; 2], all: &[Summand<'_, T>], c: &mut [T]) {
    let blocks = all.first().map_or(1, |first| first.terms.blocks);
    assert!(all.iter().all(|summand| summand.terms.blocks == blocks), "products of equal numbers of blocks");
    if all.iter().all(|summand| summand.terms == Terms::WHOLE) {
        for (i, &Summand { k, a, b, .. }) in all.iter().enumerate() {
            let update = if i > 0 { Update::Accumulate } else { Update::Overwrite };
            gemm_shared(Factors { precision, dims: [m, n, k], a, b }, c, update, Epilogue::Nothing);
        }
        return;
    }
    let mut runs: Vec<Vec<Run<'_, T>>> = (0..blocks).map(|_| Vec::new()).collect();
    for &Summand { k, a, b, terms } in all {
        Factors { precision, dims: [m, n, k], a, b }.check();
        for (block, parts) in runs.iter_mut().zip(terms.runs(k)) {
            block.extend(parts.map(|run| Run { a: a.from(0, run.start), b: b.from(run.start, 0), len: run.len() }));
        }
    }
    sum_runs(precision, [m, n], &runs, c);
}

/// Like [`gemm_blocks`], but with a block for each of these ranges of terms, of any length. A block without terms is a
/// sum of zero.
///
/// Panics as [`gemm_shared`] does.
pub fn gemm_runs<T: Float>(factors: Factors<'_, T>, c: &mut [T], blocks: &[Range<usize>]) {
    factors.check();
    let Factors { precision, dims: [m, n, k], a, b } = factors;
    assert!(blocks.iter().all(|block| block.end <= k), "blocks of at most {k} terms");
    let run = |run: &Range<usize>| vec![Run { a: a.from(0, run.start), b: b.from(run.start, 0), len: run.len() }];
    sum_runs(precision, [m, n], &blocks.iter().map(run).collect::<Vec<_>>(), c);
}

/// The sum of at least one block, each with the same number of runs. The operands have been checked.
fn sum_runs<T: Float>(precision: Precision, [m, n]: [usize; 2], runs: &[Vec<Run<'_, T>>], c: &mut [T]) {
    let (blocks, k) = (runs.len(), runs.iter().flatten().map(|run| run.len).sum::<usize>());
    assert_inside("C", m, n, (n, 1), c.len());
    let c = &mut c[..m * n];
    // A block of one run with at most `K_BLOCK` terms can be added directly to the sum of its left neighbour, with the
    // same bits.
    let at_once = runs.iter().all(|block| block.len() == 1 && (1..=gemm::K_BLOCK).contains(&block[0].len));
    if few_rows::few(m) {
        return few_rows::by_columns([m, n, k], c, Update::Overwrite, |first, columns, c| {
            add_up(c, blocks, at_once, |block, c, update| {
                for (i, &Run { a, b, len }) in runs[block].iter().enumerate() {
                    let update = if i > 0 { Update::Accumulate } else { update };
                    let part = Factors { precision, dims: [m, columns, len], a, b: b.from(0, first) };
                    serial(part, None, (c, (columns, 1)), update, Epilogue::Nothing);
                }
            });
        });
    }
    if n * k > 4 * PACKED {
        // B is too large to be packed as a whole for every strip of C. The blocks are then so long that C need not stay
        // in the cache.
        return add_up(c, blocks, at_once, |block, c, update| {
            for (i, &Run { a, b, len }) in runs[block].iter().enumerate() {
                let update = if i > 0 { Update::Accumulate } else { update };
                gemm_shared(Factors { precision, dims: [m, n, len], a, b }, c, update, Epilogue::Nothing);
            }
        });
    }
    let mut kept = KEPT.take();
    let mut packed: Vec<Packed> = Vec::new();
    if let Some(path) = T::path(precision) {
        let room = |run: &Run<'_, T>| Packed { dims: [run.len, n], memory: kept.pop().unwrap_or_default() };
        packed.extend(runs.iter().flatten().map(room));
        // All runs are packed at once, because a single run would be too little work to share.
        let parts = packed.iter_mut().zip(runs.iter().flatten()).flat_map(|(packed, run)| {
            let b = run.b;
            packed.parts(path).map(move |part| (b, part))
        });
        if n * k < PACKED_ALONE {
            parts.for_each(|(b, part)| pack(path, b, part));
        } else {
            pool::for_each(parts, |(b, part)| pack(path, b, part));
        }
    }
    let of_block = runs[0].len();
    let even = m.div_ceil(pool::threads() * BLOCKS).next_multiple_of(TILE);
    let rows = (WAITING / n.max(1)).clamp(ROWS, even.max(ROWS)) / TILE * TILE;
    pool::for_each(c.chunks_mut((rows * n).max(1)).enumerate(), |(strip, c)| {
        add_up(c, blocks, at_once, |block, c, update| {
            for (i, &Run { a, b, len }) in runs[block].iter().enumerate() {
                let update = if i > 0 { Update::Accumulate } else { update };
                let part = Factors { precision, dims: [c.len() / n, n, len], a: a.from(strip * rows, 0), b };
                serial(part, packed.get(block * of_block + i), (c, (n, 1)), update, Epilogue::Nothing);
            }
        });
    });
    // All memory is kept, even if this product needed less, because the next product may have more blocks.
    kept.extend(packed.into_iter().map(|packed| packed.memory));
    KEPT.set(kept);
}

/// Writes to `c` the sum of the blocks that `product(block, to, update)` computes.
fn add_up<T: Float>(c: &mut [T], blocks: usize, at_once: bool, product: impl Fn(usize, &mut [T], Update)) {
    // Not borrowed while other work may run on this thread.
    let mut free = T::sums().take();
    // Pending sums, which wait for their right neighbours, with their numbers of blocks; the first is C itself.
    let mut waiting: Vec<(usize, Option<Vec<T>>)> = Vec::new();
    fn join<T: Float>(waiting: &mut Vec<(usize, Option<Vec<T>>)>, c: &mut [T], free: &mut Vec<Vec<T>>) {
        let Some((blocks, Some(right))) = waiting.pop() else { return };
        if let Some((left_blocks, left)) = waiting.last_mut() {
            *left_blocks += blocks;
            let len = c.len();
            pointwise::add_assign(left.as_mut().map_or(c, |left| &mut left[..len]), &right[..len]);
        }
        free.push(right);
    }
    for block in 0..blocks {
        let right = block % 2 == 1;
        if let (true, true, Some((of, left))) = (right, at_once, waiting.last_mut()) {
            *of = 2;
            let len = c.len();
            product(block, left.as_mut().map_or(&mut *c, |left| &mut left[..len]), Update::Accumulate);
        } else if waiting.is_empty() {
            product(block, c, Update::Overwrite);
            waiting.push((1, None));
        } else {
            let mut sum = free.pop().unwrap_or_default();
            if sum.len() < c.len() {
                sum.resize(c.len(), T::ZERO);
            }
            product(block, &mut sum[..c.len()], Update::Overwrite);
            waiting.push((1, Some(sum)));
        }
        while let [.., (left, _), (right, _)] = waiting[..]
            && left == right
        {
            join(&mut waiting, c, &mut free);
        }
    }
    while waiting.len() > 1 {
        join(&mut waiting, c, &mut free);
    }
    T::sums().set(free);
}
