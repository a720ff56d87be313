//! Launch geometry: the number of blocks of threads for a kernel.

/// Threads of every block: `THREADS` in `cuda/meshwork.cuh`.
pub const THREADS: u32 = 256;

/// Threads of a warp.
const WARP: u64 = 32;

/// Threads that sum one block of a row in the CPU's order, and elements of such a block: `cuda/rows.cuh`.
const ROW_LANES: u64 = 16;
const ROW_BLOCK: u64 = 1024;

/// For `HeldRows`: most bytes of shared memory, threads that sum a block of a row, most of these in a block of threads,
/// and unused elements after each block of a row: `cuda/cross_entropy.cu`.
const HELD_BYTES: u64 = 100_608;
const HELD_LANES: u64 = 8;
const HELD_HALVES: u64 = 64;
const HELD_GAP: u64 = 16;

/// For `Rounds` and `Parts`: elements of a thread, most threads of a block, and most rows that a block holds:
/// `cuda/norm.cuh`.
const ROUND_EACH: u64 = 8;
const ROUND_THREADS: u64 = 1024;
const ROUND_ROWS: u64 = 64;

/// How a grid covers elements. Each kernel has one; [`launch`](Self::launch) makes the grid from the sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Geometry {
    /// One thread per `each` neighbouring elements of `items`; `width` is not used.
    Elements {
        /// Elements per thread.
        each: u32,
    },
    /// One thread per `each` neighbouring elements of `items` rows of `width`; no thread crosses into the next row.
    RowVectors {
        /// Elements per thread.
        each: u32,
    },
    /// `items` rows of `width` elements, one team of half warps per row, one half warp for each block of a row.
    Rows,
    /// As `Rows`, but 8 threads take a block of a row, so that blocks have 128 threads; rows of more than 16,384
    /// elements have a block of 256 threads each, and rows of more than 32,768 a block of 512. A block has shared
    /// memory for its rows, at most 100,608 bytes: `cuda/cross_entropy.cu`.
    HeldRows {
        /// Bytes of an element.
        bytes: u32,
    },
    /// `items` rows of `width` elements. A block takes as many rows as give each thread eight elements, at most 64, and
    /// the launch allocates shared memory for all of them: `cuda/norm.cuh`. Rows of more than 8192 elements are
    /// launched as in `Rows`.
    Rounds,
    /// One block of threads for each of `items` and each 256 of `width` columns.
    Columns,
    /// `items` parts of up to 64 rows of `width` elements, one block of threads each. The block takes its rows in
    /// rounds, each as in `Rounds`, and has shared memory for two numbers an element. Rows have at most 8192 elements.
    Parts,
    /// One warp for each of `items`; `width` is not used.
    Warps,
    /// One warp, whatever the sizes.
    OneWarp,
    /// One block of threads for each of `items` heads (or tiles) and each `rows` of `width` positions (or columns).
    Tiles {
        /// Positions per block.
        rows: u32,
    },
    /// As `Tiles`, with dynamic shared memory, because more than the 48 KiB of static shared memory are needed, and a
    /// number of threads of their own.
    TensorTiles {
        /// Threads of a block.
        threads: u32,
        /// Positions per block.
        rows: u32,
        /// Bytes of dynamic shared memory of a block.
        shared: u32,
    },
}

/// A grid and its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launch {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block, besides the static shared memory of the source.
    pub shared: u32,
}

impl Geometry {
    /// The grid for the sizes of a call, whose meaning depends on the variant. `None` if there is nothing to do, or if
    /// the grid would be too large: 2^31 - 1 blocks in x, 65,535 in y.
    ///
    /// ```
    /// use meshwork_kernels::{Geometry, Launch};
    ///
    /// // Rows of 768 elements: 16 to a block of threads.
    /// assert_eq!(Geometry::Rows.launch(100, 768), Some(Launch { grid: [7, 1, 1], block: [256, 1, 1], shared: 0 }));
    /// assert_eq!(Geometry::Rows.launch(100, 50_257).map(|launch| launch.grid), Some([100, 1, 1]));
    /// assert_eq!(Geometry::Elements { each: 1 }.launch(0, 0), None);
    /// ```
    pub fn launch(self, items: u64, width: u64) -> Option<Launch> {
        let (block, shared) = match self {
            Self::OneWarp => (WARP as u32, 0),
            Self::Rounds if width <= ROUND_EACH * ROUND_THREADS => {
                (round_threads(width, 256), round_bytes(round_threads(width, 256)))
            }
            Self::Parts if width <= ROUND_EACH * ROUND_THREADS => {
                (round_threads(width, 512), 2 * round_bytes(round_threads(width, 512)))
            }
            Self::Parts => return None,
            Self::Rounds => (THREADS, 0),
            Self::HeldRows { bytes } => {
                let gaps = HELD_GAP * width.div_ceil(ROW_BLOCK);
                let held = rows_per_block(width) * (width.next_multiple_of(32) + gaps) * u64::from(bytes);
                let halves = width.div_ceil(ROW_BLOCK).clamp(u64::from(THREADS) / ROW_LANES, HELD_HALVES);
                ((HELD_LANES * halves.next_power_of_two()) as u32, held.min(HELD_BYTES) as u32)
            }
            Self::TensorTiles { threads, shared, .. } => (threads, shared),
            _ => (THREADS, self.shared()),
        };
        let (x, y) = match self {
            Self::Elements { each } => (items.div_ceil(u64::from(THREADS) * u64::from(each)), 1),
            Self::RowVectors { each } => ((items * width.div_ceil(u64::from(each))).div_ceil(u64::from(THREADS)), 1),
            Self::Rows | Self::HeldRows { .. } => (items.div_ceil(rows_per_block(width)), 1),
            Self::Rounds if block == THREADS && width > ROUND_EACH * u64::from(THREADS) => (items, 1),
            Self::Rounds => (items.div_ceil((ROUND_EACH * u64::from(block) / width.max(1)).clamp(1, ROUND_ROWS)), 1),
            Self::Columns => (items, width.div_ceil(u64::from(THREADS))),
            Self::Warps => (items.div_ceil(u64::from(THREADS) / WARP), 1),
            Self::OneWarp => (1, 1),
            Self::Parts => (items, 1),
            Self::Tiles { rows } | Self::TensorTiles { rows, .. } => (items, width.div_ceil(u64::from(rows))),
        };
        let fits = (1..1 << 31).contains(&x) && (1..1 << 16).contains(&y);
        fits.then_some(Launch { grid: [x as u32, y as u32, 1], block: [block, 1, 1], shared })
    }

    /// Most bytes of dynamic shared memory of a launch.
    pub fn shared(self) -> u32 {
        match self {
            Self::TensorTiles { shared, .. } => shared,
            Self::HeldRows { .. } => HELD_BYTES as u32,
            Self::Rounds => round_bytes(ROUND_THREADS as u32),
            Self::Parts => 2 * round_bytes(ROUND_THREADS as u32),
            _ => 0,
        }
    }
}

/// Threads of a block that holds at least one row with eight elements per thread: a power of two, at least `least`.
fn round_threads(width: u64, least: u64) -> u32 {
    width.div_ceil(ROUND_EACH).clamp(least, ROUND_THREADS).next_power_of_two() as u32
}

/// An f32 for each element of a round, with a gap after every 32.
const fn round_bytes(threads: u32) -> u32 {
    let elements = ROUND_EACH as u32 * threads;
    4 * (elements + elements / 32)
}

/// Rows per block of threads; each row has a power of two of half warps, as in `team_halves`.
fn rows_per_block(n: u64) -> u64 {
    let halves = u64::from(THREADS) / ROW_LANES;
    halves / n.div_ceil(ROW_BLOCK).clamp(1, halves).next_power_of_two()
}

/// How rows are cut for the gradients of biases and gains: blocks of rows into parts of up to 64. Kernels whose names
/// end in `parts` sum the rows of each part; `sum_blocks` then sums the parts of each block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowParts {
    /// The first row of each part, then the number of rows.
    pub rows: Vec<i64>,
    /// The first part of each block, then the number of parts.
    pub parts: Vec<i64>,
}

impl RowParts {
    /// The parts for blocks with these numbers of rows.
    ///
    /// ```
    /// let cut = meshwork_kernels::RowParts::new([100, 10]);
    /// assert_eq!(cut.rows, [0, 64, 100, 110]);
    /// assert_eq!(cut.parts, [0, 2, 3]);
    /// ```
    pub fn new(blocks: impl IntoIterator<Item = u32>) -> Self {
        const PART: u32 = 64;
        let mut cut = Self { rows: vec![0], parts: vec![0] };
        let mut end = 0;
        for rows in blocks {
            for first in (0..rows).step_by(PART as usize) {
                cut.rows.push(end + i64::from((first + PART).min(rows)));
            }
            end += i64::from(rows);
            cut.parts.push(cut.rows.len() as i64 - 1);
        }
        cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_cover_their_items() {
        let grid = |geometry: Geometry, items, width| geometry.launch(items, width).map(|launch| launch.grid);
        assert_eq!(grid(Geometry::Elements { each: 4 }, 1025, 0), Some([2, 1, 1]));
        assert_eq!(grid(Geometry::Columns, 7, 257), Some([7, 2, 1]));
        assert_eq!(grid(Geometry::RowVectors { each: 4 }, 7, 129), Some([1, 1, 1]));
        assert_eq!(grid(Geometry::RowVectors { each: 8 }, 128, 17), Some([2, 1, 1]));
        assert_eq!(grid(Geometry::Warps, 9, 0), Some([2, 1, 1]));
        assert_eq!(grid(Geometry::Tiles { rows: 32 }, 6, 33), Some([6, 2, 1]));
        let tiles = Geometry::TensorTiles { threads: 128, rows: 128, shared: 98_304 };
        let launch = Launch { grid: [6, 2, 1], block: [128, 1, 1], shared: 98_304 };
        assert_eq!(tiles.launch(6, 129), Some(launch));
        let rounds =
            |width| Geometry::Rounds.launch(100, width).map(|launch| (launch.grid[0], launch.block[0], launch.shared));
        assert_eq!(rounds(1), Some((2, 256, 8448)));
        assert_eq!(rounds(768), Some((50, 256, 8448)));
        assert_eq!(rounds(2049), Some((100, 512, 16_896)));
        assert_eq!(rounds(8192), Some((100, 1024, 33_792)));
        assert_eq!(rounds(8193), Some((100, 256, 0)));
        let held = |width| Geometry::HeldRows { bytes: 2 }.launch(100, width);
        let held = |width| held(width).map(|launch| (launch.grid[0], launch.block[0], launch.shared));
        assert_eq!(held(1), Some((7, 128, 1536)));
        assert_eq!(held(8192), Some((50, 128, 33_280)));
        assert_eq!(held(8193), Some((100, 128, 16_736)));
        assert_eq!(held(16_385), Some((100, 256, 33_376)));
        assert_eq!(held(50_257), Some((100, 512, 100_608)));
        assert_eq!(held(128_256), Some((100, 512, 100_608)));
        let parts = |width| Geometry::Parts.launch(9, width).map(|launch| (launch.block[0], launch.shared));
        assert_eq!(
            [1, 4096, 4097, 8192, 8193].map(parts),
            [Some((512, 33_792)), Some((512, 33_792)), Some((1024, 67_584)), Some((1024, 67_584)), None]
        );
        assert_eq!(Geometry::OneWarp.launch(5, 5).map(|launch| launch.block), Some([32, 1, 1]));
        for (n, rows) in [(1, 16), (1024, 16), (1025, 8), (2049, 4), (4097, 2), (8193, 1), (1 << 40, 1)] {
            assert_eq!(rows_per_block(n), rows, "{n}");
        }
    }

    #[test]
    fn what_no_grid_has_is_none() {
        assert_eq!(Geometry::Columns.launch(1, 256 * 65_536), None);
        assert_eq!(Geometry::Elements { each: 1 }.launch(1 << 39, 0), None);
        assert_eq!(Geometry::Tiles { rows: 32 }.launch(0, 8), None);
    }
}
