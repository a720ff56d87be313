//! Token and position embeddings.
//!
//! A token table may be a shard: it holds the rows of the vocabulary from `first_row` on; its length determines their
//! number. Ids outside the shard (negative ones too) look up zeros and leave no gradient, so that the sum over the
//! shards is the whole lookup; the caller must check that ids are in the vocabulary.

use super::pointwise::{add_assign, bias, bias_backward};
use super::prelude::*;
use super::round::{Loaded, read};

/// `out[i, h] = table[ids[i] - first_row, h]`, zeros for ids outside. Overwrites `out[ids, h]`.
pub fn lookup<T: Float>(ids: &[i32], table: Loaded<'_, T>, first_row: usize, h: usize, out: Stored<'_, T>) {
    let rows = row_count(table.len(), h);
    assert_eq!(out.len(), ids.len() * h, "elements of out against {} ids of {h}", ids.len());
    for (&id, out) in ids.iter().zip(out.chunks(h)) {
        match local_row(id, first_row, rows) {
            Some(row) => {
                read([table.part(row * h..(row + 1) * h)], |[row]| out.write(|out: &mut [T]| out.copy_from_slice(row)));
            }
            None => out.write(|out| out.fill(T::ZERO)),
        }
    }
}

/// `dtable[ids[i] - first_row, h] += dout[i, h]` for the ids inside, in the order of `i`.
pub fn lookup_backward<T: Float>(ids: &[i32], dout: Loaded<'_, T>, first_row: usize, h: usize, dtable: &mut [T]) {
    let rows = row_count(dtable.len(), h);
    assert_eq!(dout.len(), ids.len() * h, "elements of dout against {} ids of {h}", ids.len());
    for (&id, dout) in ids.iter().zip(dout.chunks(h)) {
        if let Some(row) = local_row(id, first_row, rows) {
            read([dout], |[dout]| add_assign(&mut dtable[row * h..][..h], dout));
        }
    }
}

/// [`lookup_backward`] with the ids cut into `blocks` of one length: each is summed in the order of `i`, from zero, and
/// the blocks are added up in the [tree](meshwork_core::tree). A block without a word does not touch the word's row,
/// which gives the same bits as adding zeros, because no such sum is a negative zero.
pub fn lookup_backward_tree<T: Float>(
    ids: &[i32],
    dout: Loaded<'_, T>,
    first_row: usize,
    h: usize,
    blocks: usize,
    dtable: &mut [T],
) {
    let rows = row_count(dtable.len(), h);
    assert_eq!(dout.len(), ids.len() * h, "elements of dout against {} ids of {h}", ids.len());
    assert!(ids.len().is_multiple_of(blocks), "{} ids are no {blocks} blocks of one length", ids.len());
    let block_len = ids.len() / blocks;
    let held = |(i, &id): (usize, &i32)| Some((local_row(id, first_row, rows)?, i));
    let mut hits: Vec<(usize, usize)> = ids.iter().enumerate().filter_map(held).collect();
    hits.sort_unstable();
    // For one word: the blocks that contain it, and their sums.
    let (mut having, mut sums): (Vec<usize>, Vec<T>) = (Vec::new(), Vec::new());
    for hits in hits.chunk_by(|a, b| a.0 == b.0) {
        having.clear();
        sums.clear();
        for &(_, i) in hits {
            if having.last() != Some(&(i / block_len)) {
                having.push(i / block_len);
                sums.resize(having.len() * h, T::ZERO);
            }
            let at = sums.len() - h;
            read([dout.part(i * h..(i + 1) * h)], |[dout]| add_assign(&mut sums[at..], dout));
        }
        while having.len() > 1 {
            // One level up, sums of the same subtree are added.
            let mut kept = 0;
            for next in 0..having.len() {
                let subtree = having[next] / 2;
                if kept > 0 && having[kept - 1] == subtree {
                    let (left, right) = sums.split_at_mut(next * h);
                    add_assign(&mut left[(kept - 1) * h..][..h], &right[..h]);
                } else {
                    sums.copy_within(next * h..(next + 1) * h, kept * h);
                    having[kept] = subtree;
                    kept += 1;
                }
            }
            having.truncate(kept);
        }
        add_assign(&mut dtable[hits[0].0 * h..][..h], &sums[..h]);
    }
}

/// `out[b, i, h] = x[b, i, h] + table[first + i, h]` for sequences of `s`. Overwrites `out[b, s, h]`.
pub fn add_positions<T: Float>(x: &[T], table: &[T], first: usize, s: usize, h: usize, out: &mut [T]) {
    bias(x, &table[position_range(table.len(), first, s, h)], out);
}

/// `dtable[first + i, h] += Σ_b dout[b, i, h]`, the sequences one after another; other rows do not change.
pub fn add_positions_backward<T: Float>(dout: &[T], first: usize, s: usize, h: usize, dtable: &mut [T]) {
    let used = position_range(dtable.len(), first, s, h);
    bias_backward(dout, &mut dtable[used]);
}

/// The number of rows of a table, which must be complete.
fn row_count(len: usize, h: usize) -> usize {
    assert!(h > 0 && len.is_multiple_of(h), "{len} elements are no rows of {h}");
    len / h
}

/// The row of a shard that holds `id`, if it does.
fn local_row(id: i32, first_row: usize, rows: usize) -> Option<usize> {
    let row = usize::try_from(id).ok()?.checked_sub(first_row)?;
    (row < rows).then_some(row)
}

/// The range of rows `first .. first + s` in a table of `len` elements.
fn position_range(len: usize, first: usize, s: usize, h: usize) -> Range<usize> {
    let (from, to) = (first * h, (first + s) * h);
    assert!(to <= len, "positions {first} .. {} in a table of {len} elements, {h} a row", first + s);
    from..to
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{check_gradient, dot, values};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Two shards give the rows of the whole table and its gradient, bit for bit, wherever it is cut.
        #[test]
        fn shards_add_up_to_the_whole(ids in prop::collection::vec(0..12_i32, 0..30), h in 1..40_usize, cut in 0..=12_usize) {
            let (table, dout): (Vec<f32>, Vec<f32>) = (values("w", 12 * h), values("dout", ids.len() * h));
            let get = |first: usize, rows: usize| {
                let mut out = vec![9.0; ids.len() * h];
                lookup(&ids, Loaded::Full(&table[first * h..][..rows * h]), first, h, Stored::Full(&mut out));
                out
            };
            let whole = get(0, 12);
            for (i, &id) in ids.iter().enumerate() {
                prop_assert_eq!(&whole[i * h..][..h], &table[id as usize * h..][..h]);
            }
            let (low, high) = (get(0, cut), get(cut, 12 - cut));
            let sum: Vec<f32> = low.iter().zip(&high).map(|(a, b)| a + b).collect();
            prop_assert_eq!(sum, whole);

            let mut dtable = table.clone();
            lookup_backward(&ids, Loaded::Full(&dout), 0, h, &mut dtable);
            for j in 0..table.len() {
                let terms = ids.iter().zip(dout.iter().skip(j % h).step_by(h));
                let want = terms.filter(|(id, _)| **id as usize == j / h).fold(table[j], |sum, (_, g)| sum + g);
                prop_assert_eq!(dtable[j], want);
            }
            let mut parts = table.clone();
            let (low, high) = parts.split_at_mut(cut * h);
            lookup_backward(&ids, Loaded::Full(&dout), 0, h, low);
            lookup_backward(&ids, Loaded::Full(&dout), cut, h, high);
            prop_assert_eq!(parts, dtable);
        }

        #[test]
        fn positions_add_rows_and_sum_sequences(b in 0..4_usize, s in 0..6_usize, h in 1..20_usize, first in 0..3_usize) {
            let rows = first + s + 1;
            let (x, table): (Vec<f32>, Vec<f32>) = (values("x", b * s * h), values("wpe", rows * h));
            let mut out = vec![9.0; x.len()];
            add_positions(&x, &table, first, s, h, &mut out);
            let mut dtable = table.clone();
            add_positions_backward(&x, first, s, h, &mut dtable);
            for (i, row) in out.chunks(h).enumerate() {
                let position = first + i % s;
                prop_assert!((0..h).all(|j| row[j] == x[i * h + j] + table[position * h + j]));
            }
            for (row, got) in dtable.chunks(h).enumerate() {
                for j in 0..h {
                    let used = (first..first + s).contains(&row);
                    let at = |sample: usize| x[(sample * s + row - first) * h + j];
                    let old = table[row * h + j];
                    let want = if used { (0..b).fold(old, |sum, sample| sum + at(sample)) } else { old };
                    prop_assert_eq!(got[j], want);
                }
            }
        }
    }

    #[test]
    fn leaves_add_up_in_the_tree() {
        let (blocks, block_len, words, h) = (7, 9, 5, 3);
        for run in 0..20 {
            let ids: Vec<i32> =
                (0..blocks * block_len).map(|i| ((i * (run + 3) + i * i / 4) % 11) as i32 - 2).collect();
            let dout: Vec<f32> = values(&format!("dout {run}"), ids.len() * h);
            // Dense blocks, added up by the definition of the tree.
            let dense: Vec<Vec<f32>> = (0..blocks)
                .map(|block| {
                    let mut dtable = vec![0.0; words * h];
                    let of = block * block_len..(block + 1) * block_len;
                    lookup_backward(&ids[of.clone()], Loaded::Full(&dout[of.start * h..of.end * h]), 1, h, &mut dtable);
                    dtable
                })
                .collect();
            let mut dtable = vec![0.0; words * h];
            lookup_backward_tree(&ids, Loaded::Full(&dout), 1, h, blocks, &mut dtable);
            let (mut tree_differs, mut order) = (false, vec![0.0; words * h]);
            lookup_backward(&ids, Loaded::Full(&dout), 1, h, &mut order);
            for j in 0..words * h {
                let column: Vec<f32> = dense.iter().map(|block| block[j]).collect();
                let want = meshwork_core::tree::sum(&column, |a, b| a + b).unwrap();
                assert_eq!(dtable[j].to_bits(), want.to_bits(), "run {run}, element {j}");
                tree_differs |= dtable[j] != order[j];
            }
            assert!(tree_differs, "the values must tell orders apart");
        }
    }

    #[test]
    fn negative_and_foreign_ids_give_zeros_and_no_gradient() {
        let (ids, table) = ([-1, 3, 7, i32::MIN, i32::MAX], [1.0_f32; 8]);
        let mut out = [9.0; 10];
        lookup(&ids, Loaded::Full(&table), 4, 2, Stored::Full(&mut out));
        assert_eq!(out, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        let mut dtable = table;
        lookup_backward(&ids, Loaded::Full(&out), 4, 2, &mut dtable);
        assert_eq!(dtable, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
    }

    #[test]
    fn gradients_match_finite_differences() {
        let (ids, h) = ([4, 2, 9, 4, 3, 5], 3);
        let (table, dout): (Vec<f64>, Vec<f64>) = (values("w", 4 * h), values("dout", ids.len() * h));
        let apply = |f: &dyn Fn(&mut [f64])| {
            let mut out = vec![9.0; dout.len()];
            f(&mut out);
            dot(&out, &dout)
        };
        let mut dtable = vec![0.0; table.len()];
        lookup_backward(&ids, Loaded::Full(&dout), 2, h, &mut dtable);
        check_gradient(&table, &dtable, |t| apply(&|out| lookup(&ids, Loaded::Full(t), 2, h, Stored::Full(out))));
        let mut dtable = vec![0.0; table.len()];
        add_positions_backward(&dout, 1, 2, h, &mut dtable);
        check_gradient(&table, &dtable, |t| apply(&|out| add_positions(&dout, t, 1, 2, h, out)));
    }

    #[test]
    #[should_panic(expected = "positions 3 .. 5 in a table of 8 elements, 2 a row")]
    fn positions_beyond_the_table_are_refused() {
        add_positions(&[0.0_f32; 4], &[0.0; 8], 3, 2, 2, &mut [0.0; 4]);
    }
}
