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
