//! The forward of a group of heads, on all rows of a sample or of a document.

use super::ahead::{self, Ahead};
use super::heads::RowsMut;
use super::layout::{Call, Group, Next, QueryBlock};
use super::rows::{VECTOR, softmax};
use super::tiles::{Left, MAX_WIDTH, Panels, Tiled, Tiles};
use super::{FORWARD_KEYS, blocks, panels, scratch};
use crate::kernels::matmul::Update;
use std::ops::Range;

/// The `out` and `lse` of a part. `out`, `q`, `k` and `v` begin with the part's first row; `lse` begins with the
/// group's first row.
pub(super) fn part<T: Tiled>(
    call: &Call<'_, T>,
    place @ (group, rows): (Group, QueryBlock),
    [q, k, v]: [&[T]; 3],
    mut out: RowsMut<'_, T>,
    lse: &mut [T],
    to_next: Option<Next>,
) {
    let (tiles, head_dim, size) = (&call.tiles, call.dims.head_dim, call.groups.size);
    let (seq, keys, [q_tokens, k_tokens]) = (rows.queries.len, rows.keys.len, call.tokens(rows));
    let (q_row, k_row, v_row, out_row) = (call.layout.q.row, call.layout.k.row, call.layout.v.row, call.layout.out.row);
    let (scale, width) = (call.scale(), tiles.width());
    let fetch = ahead::stay::<T>(4, [seq.max(keys), head_dim]);
    let turned = |rows: usize| if call.angles.is_some() { rows * head_dim } else { 0 };
    let lens = [
        tiles.left_len([keys, head_dim]),
        tiles.packed_len([head_dim, seq]),
        tiles.packed_len([keys, head_dim]),
        keys * width,
        tiles.left_len([width, keys]),
        keys,
        turned(keys),
        turned(seq),
    ];
    scratch::with(lens, |[k_words, qt, vs, scores, p_words, factors, k_turned, q_turned]| {
        let in_memory = [q, k, v].map(<[T]>::as_ptr);
        let (k, k_read) = match call.angles {
            Some(angles) => {
                call.turn(angles, (group, k_tokens), (k, k_row), k_turned);
                (&*k_turned, head_dim)
            }
            None => (k, k_row),
        };
        let ks = tiles.left([keys, head_dim], (k, (k_read, 1)), k_words);
        let vs = tiles.pack([keys, head_dim], (v, (v_row, 1)), vs);
        for (head, lse) in lse.chunks_mut(call.dims.seq.max(1)).enumerate() {
            let lse = &mut lse[rows.queries.range()];
            // The next head's rows: within the group, only those of its queries and outputs.
            let last = head + 1 == size;
            let [next_q, next_k, next_v] = in_memory;
            let (next_head, to_next) = (head_dim * (head + 1), to_next.filter(|_| last && fetch));
            let next_rows = to_next.map_or(seq, |next| next.rows);
            let next = to_next.map(|Next { distance: [in_q, in_kv, in_out], .. }| {
                let (k, v) = (next_k.wrapping_add(in_kv), next_v.wrapping_add(in_kv));
                let (q, out) = (next_q.wrapping_add(in_q), out.as_ptr().wrapping_add(in_out));
                [(k, k_row), (q, q_row), (v, v_row), (out, out_row)]
            });
            let inside = (fetch && !last)
                .then(|| [(next_q.wrapping_add(next_head), q_row), (out.as_ptr().wrapping_add(next_head), out_row)]);
            let next = if last { next.as_slice().as_flattened() } else { inside.as_slice().as_flattened() };
            let mut ahead = Ahead::new(next, [next_rows, head_dim]);

            let q = &q[head * head_dim..];
            let (q, q_read) = match call.angles {
                Some(angles) => {
                    call.turn(angles, (group, q_tokens), (q, q_row), q_turned);
                    (&*q_turned, head_dim)
                }
                None => (q, q_row),
            };
            let qt = tiles.pack([head_dim, seq], (q, (1, q_read)), qt);
            let mut out = out.part(0..seq, head * head_dim);
            let dropout = call.head_dropout(place, head);
            for queries in blocks(0..seq, width) {
                let live = rows.seen_by(queries.end);
                let scores = &mut scores[..live * width];
                products(tiles, (ks, rows), qt, queries.clone(), RowsMut::new(scores, width), &mut ahead);
                let mut inverses = [T::ZERO; MAX_WIDTH];
                for strip in (0..queries.len()).step_by(VECTOR) {
                    let first = queries.start + strip;
                    let [lses, ones] = softmax(scale, &mut scores[strip..], width, rows.past + first);
                    lse[first..].iter_mut().zip(lses).for_each(|(to, lse)| *to = lse);
                    inverses[strip..][..VECTOR].copy_from_slice(&ones);
                }
                if let Some((mask, start)) = dropout {
                    for (lane, i) in queries.clone().enumerate() {
                        let factors = &mut factors[..live];
                        mask.factors(start + (i * call.dims.keys.sequence) as u64, factors);
                        scores[lane..].iter_mut().step_by(width).zip(factors).for_each(|(p, factor)| *p *= *factor);
                    }
                }
                let p = tiles.left([queries.len(), live], (scores, (1, width)), p_words);
                for panel in panels(queries.clone(), tiles.rows) {
                    let (first, height) = (panel.start - queries.start, panel.len());
                    let mut out = out.part(panel.clone(), 0);
                    for keys in blocks(0..rows.seen_by(panel.end), FORWARD_KEYS) {
                        let update = if keys.start == 0 { Update::Overwrite } else { Update::Accumulate };
                        let p = p.from(first, keys.start);
                        tiles.times(height, p, (vs, keys, 0..head_dim), out.part(0..height, 0), update, &mut ahead);
                    }
                    for (r, inverse) in inverses[first..][..height].iter().enumerate() {
                        out.row(r)[..head_dim].iter_mut().for_each(|o| *o *= *inverse);
                    }
                }
            }
        }
    });
}

/// The products of all keys up to a panel of queries of `part`, a row each, with those queries: the pairs that the mask
/// keeps, and more up to a tile's edges.
fn products<T: Tiled>(
    tiles: &Tiles<T>,
    (keys, part): (Left<'_, T>, QueryBlock),
    right: Panels<'_, T>,
    queries: Range<usize>,
    mut to: RowsMut<'_, T>,
    ahead: &mut Ahead<'_, T>,
) {
    // From the keys on that the first vector of queries sees, the second alone does.
    let second = queries.start + tiles.lanes;
    let (middle, end) = (part.seen_by(second.min(queries.end)), part.seen_by(queries.end));
    for (seen, first) in [(0..middle, queries.start), (middle..end, second)] {
        for rows in panels(seen, tiles.rows) {
            let b = (right, 0..right.terms, first..queries.end.next_multiple_of(tiles.lanes));
            let to = to.part(rows.clone(), first - queries.start);
            tiles.times(rows.len(), keys.from(rows.start, 0), b, to, Update::Overwrite, ahead);
        }
    }
}
