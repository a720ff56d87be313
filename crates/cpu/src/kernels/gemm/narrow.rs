//! Tiles of few columns, one vector wide, where rows of A are read in place: products with the small side of an
//! adapter.
//!
//! One vector a row has half the multiplications of two, so that a tile as high as the others does not hide their
//! latency, and finding an element of A takes as long as multiplying it. These tiles are higher. With many registers
//! they multiply some words of a row one after the other: the address of a row serves all of them.

/// The function `$name` for vectors of these instructions: tiles of at most one vector of columns and of one of these
/// heights. Rows of A are contiguous; B is packed. A turn multiplies `$words` words, in parts that go from row to row.
macro_rules! narrow {
    (
        $name:ident, $of_height:ident, $feature:literal, $words:literal words [$($part:literal)*], [$($height:literal)*],
        $zero:ident, $all:ident, $load:ident, $add:ident, $fmadd:ident, $first_lanes:ident, $masked:ident, $store:ident
    ) => {
        /// [`Micro::narrow`](super::Micro::narrow).
        ///
        /// # Safety
        /// As there.
        #[target_feature(enable = $feature)]
        unsafe fn $name(tile: &Tile) {
            match tile.rows {
                // SAFETY: the caller's promise; the height is the tile's.
                $($height => unsafe { $of_height::<$height>(tile) },)*
                rows => unreachable!("a narrow tile of {rows} rows"),
            }
        }

        /// The same for tiles of R rows.
        ///
        /// # Safety
        /// As there, the tile having that many.
        #[target_feature(enable = $feature)]
        unsafe fn $of_height<const R: usize>(tile: &Tile) {
            let (mut a, mut b, mut ahead) = (quads::<R>(tile), tile.b, tile.ahead.0);
            let mut sums = [$zero(); R];
            // A macro, because a function might not be inlined, and the sums would be in memory.
            macro_rules! words {
                ($count:literal) => {
                    let mut columns = [$zero(); $count];
                    for (l, columns) in columns.iter_mut().enumerate() {
                        _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                        ahead = ahead.wrapping_add(tile.ahead.1);
                        // SAFETY: a whole row of the packed B.
                        *columns = unsafe { $load(b.wrapping_add(l * tile.b_step)) };
                    }
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let row = a[i / 4].wrapping_add(i % 4 * tile.a_row);
                        for (l, columns) in columns.iter().enumerate() {
                            // SAFETY: this element of A.
                            *sum = $fmadd($all(unsafe { *row.wrapping_add(l) }), *columns, *sum);
                        }
                    }
                    for quad in &mut a {
                        *quad = quad.wrapping_add($count);
                    }
                    b = b.wrapping_add($count * tile.b_step);
                };
            }
            for _ in 0..tile.words / $words {
                $(words!($part);)*
            }
            for _ in 0..tile.words % $words {
                words!(1);
            }
            let mask = $first_lanes(tile.columns);
            for (i, sum) in sums.into_iter().enumerate() {
                let to = tile.c.wrapping_add(i * tile.c_row);
                // SAFETY: row i of C, masked to its columns.
                unsafe { $store(to, mask, if tile.add { $add($masked(mask, to), sum) } else { sum }) };
            }
        }
    };
}
