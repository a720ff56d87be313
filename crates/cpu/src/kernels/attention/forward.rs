//! The forward of a group of heads, on all rows of a sample or of a document.

use super::ahead::{self, Ahead};
use super::documents::Document;
use super::heads::RowsMut;
use super::layout::{Call, Group, Next, QueryBlock};
use super::rows::{SeenRows, VECTOR, cap_scores, softmax, softmax_row};
use super::tiles::{Left, MAX_WIDTH, Panels, Tiled, Tiles};
use super::{FORWARD_KEYS, aligned, blocks, copied_rows, panels, scratch};
use crate::kernels::matmul::Update;
use meshwork_core::simd::wide;
use std::ops::Range;

/// At most as many queries have a row of scores each: tiles would compute a vector of queries.
const FEW: usize = 2;

/// The `out` and `lse` of a part. `out`, `q`, `k` and `v` begin with the part's first row; `lse` begins with the
/// group's first row.
pub(super) fn part<T: Tiled>(
    call: &Call<'_, T>,
    place: (Group, QueryBlock),
    operands: [&[T]; 3],
    out: RowsMut<'_, T>,
    lse: &mut [T],
    to_next: Option<Next>,
) {
    match place.1.queries.len <= FEW {
        true => few(call, place, operands, out, lse),
        false => many(call, place, operands, out, lse, to_next),
    }
}

fn many<T: Tiled>(
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
    let (scale, width, window) = (call.scale(), tiles.width(), call.masks.window);
    let fetch = ahead::stay::<T>(4, [seq.max(keys), head_dim]);
    let copied = !fetch && tiles.left_len([1, 1]) == 0;
    let turned = |rows: usize, copied: bool| if copied || call.angles.is_some() { rows * head_dim } else { 0 };
    let lens = [
        tiles.left_len([keys, head_dim]),
        tiles.packed_len([head_dim, seq]),
        tiles.packed_len([keys, head_dim]),
        keys * width,
        tiles.left_len([width, keys]),
        keys,
        turned(keys, copied),
        turned(seq, false),
    ];
    scratch::with(lens, |[k_words, qt, vs, scores, p_words, factors, k_turned, q_turned]| {
        let in_memory = [q, k, v].map(<[T]>::as_ptr);
        let (k, k_read) = match call.angles {
            Some(angles) => {
                call.turn(angles, (group, k_tokens), (k, k_row), k_turned);
                (&*k_turned, head_dim)
            }
            None if copied => (copied_rows(k, k_row, head_dim, k_turned), head_dim),
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
            let (dropout, shift) = (call.head_dropout(place, head), call.shift(place, head));
            for queries in blocks(0..seq, width) {
                // From an even key on, where words of two terms begin.
                let from = rows.hidden_from(queries.start, window) / 2 * 2;
                let live = rows.seen_by(queries.end) - from;
                let scores = &mut scores[..live * width];
                products(tiles, (ks, rows, from), qt, queries.clone(), RowsMut::new(scores, width), &mut ahead);
                if let Some(cap) = call.masks.cap {
                    cap_scores(call.scale(), T::from_f64(cap), scores);
                }
                let scale = match shift {
                    None => scale,
                    Some(shift) => {
                        for (lane, i) in queries.clone().enumerate() {
                            shift.add(scale, &mut scores[lane..], width, i, from);
                        }
                        T::ONE
                    }
                };
                let mut inverses = [T::ZERO; MAX_WIDTH];
                for strip in (0..queries.len()).step_by(VECTOR) {
                    let first = queries.start + strip;
                    let own = rows.past + first - from;
                    let hidden = window.map_or(i32::MIN / 2, |window| (own + 1) as i32 - window.min(1 << 30) as i32);
                    let seen = SeenRows { own, hidden, skipped: from % FORWARD_KEYS };
                    let [lses, ones] = softmax(scale, &mut scores[strip..], width, seen);
                    lse[first..].iter_mut().zip(lses).for_each(|(to, lse)| *to = lse);
                    inverses[strip..][..VECTOR].copy_from_slice(&ones);
                }
                if let Some((mask, start)) = dropout {
                    for (lane, i) in queries.clone().enumerate() {
                        let factors = &mut factors[..live];
                        mask.factors(start + (i * call.dims.keys.sequence + from) as u64, factors);
                        scores[lane..].iter_mut().step_by(width).zip(factors).for_each(|(p, factor)| *p *= *factor);
                    }
                }
                let p = tiles.left([queries.len(), live], (scores, (1, width)), p_words);
                for panel in panels(queries.clone(), tiles.rows) {
                    let (first, height) = (panel.start - queries.start, panel.len());
                    let mut out = out.part(panel.clone(), 0);
                    for keys in aligned(from..rows.seen_by(panel.end), FORWARD_KEYS) {
                        let update = if keys.start == from { Update::Overwrite } else { Update::Accumulate };
                        let p = p.from(first, keys.start - from);
                        tiles.times(height, p, (vs, keys, 0..head_dim), out.part(0..height, 0), update, &mut ahead);
                    }
                }
                wide!(for (i, inverse) in queries.zip(inverses) {
                    out.row(i)[..head_dim].iter_mut().for_each(|o| *o *= inverse);
                });
            }
        }
    });
}

/// The same for few queries: a row of scores for each, and keys and values packed by blocks. Each sum has the order of
/// its terms that tiles of many queries have, and so the same bits.
fn few<T: Tiled>(
    call: &Call<'_, T>,
    place @ (group, rows): (Group, QueryBlock),
    [q, k, v]: [&[T]; 3],
    mut out: RowsMut<'_, T>,
    lse: &mut [T],
) {
    let (tiles, head_dim, size) = (&call.tiles, call.dims.head_dim, call.groups.size);
    let ([q_tokens, k_tokens], keys) = (call.tokens(rows), rows.keys.len);
    let (q_row, k_row, v_row) = (call.layout.q.row, call.layout.k.row, call.layout.v.row);
    let turned = |rows: usize| if call.angles.is_some() { rows * head_dim } else { 0 };
    let lens = [
        tiles.left_len([size, head_dim]),
        tiles.packed_len([head_dim, FORWARD_KEYS]),
        tiles.packed_len([FORWARD_KEYS, head_dim]),
        size * keys,
        tiles.left_len([size, FORWARD_KEYS]),
        keys,
        size,
        turned(size),
        turned(FORWARD_KEYS),
    ];
    scratch::with(lens, |[q_words, kt, vs, scores, p_words, factors, inverses, q_turned, k_turned]| {
        for i in 0..rows.queries.len {
            let hidden = rows.hidden_from(i, call.masks.window);
            let (from, live) = (hidden / 2 * 2, rows.seen_by(i + 1));
            let q = &q[i * q_row..];
            let q = match call.angles {
                None => q,
                Some(angles) => {
                    let token = Document { first: q_tokens.first + i, len: 1, position: q_tokens.position + i };
                    for (head, to) in q_turned.chunks_exact_mut(head_dim).enumerate() {
                        call.turn(angles, (group, token), (&q[head * head_dim..], q_row), to);
                    }
                    &*q_turned
                }
            };
            let q = tiles.left([size, head_dim], (q, (head_dim, 1)), q_words);
            for keys_of in aligned(from..live, FORWARD_KEYS) {
                let k = &k[keys_of.start * k_row..];
                let (k, k_read) = match call.angles {
                    None => (k, k_row),
                    Some(angles) => {
                        let Document { first, position, .. } = k_tokens;
                        let tokens = Document {
                            first: first + keys_of.start,
                            len: keys_of.len(),
                            position: position + keys_of.start,
                        };
                        call.turn(angles, (group, tokens), (k, k_row), k_turned);
                        (&*k_turned, head_dim)
                    }
                };
                let kt = tiles.pack([head_dim, keys_of.len()], (k, (1, k_read)), kt);
                let mut to = RowsMut::new(scores, keys);
                let (to, b) = (to.part(0..size, keys_of.start), (kt, 0..head_dim, 0..keys_of.len()));
                tiles.times(size, q, b, to, Update::Overwrite, &mut Ahead::new(&[], [0, 0]));
            }
            for head in 0..size {
                let scores = &mut scores[head * keys..][from..live];
                if let Some(cap) = call.masks.cap {
                    cap_scores(call.scale(), T::from_f64(cap), scores);
                }
                let shift = call.shift(place, head);
                shift.iter().for_each(|shift| shift.add(call.scale(), scores, 1, i, from));
                let scale = if shift.is_some() { T::ONE } else { call.scale() };
                let [sum, inverse] = softmax_row(scale, scores, hidden - from, from % FORWARD_KEYS);
                (lse[head * call.dims.seq + rows.queries.first + i], inverses[head]) = (sum, inverse);
                if let Some((mask, start)) = call.head_dropout(place, head) {
                    let factors = &mut factors[..scores.len()];
                    mask.factors(start + (i * call.dims.keys.sequence + from) as u64, factors);
                    scores.iter_mut().zip(factors).for_each(|(p, factor)| *p *= *factor);
                }
            }
            let mut out = out.part(i..i + 1, 0);
            let out = &mut out.row(0)[..size * head_dim];
            for keys_of in aligned(from..live, FORWARD_KEYS) {
                let vs = tiles.pack([keys_of.len(), head_dim], (&v[keys_of.start * v_row..], (v_row, 1)), vs);
                let p = tiles.left([size, keys_of.len()], (&scores[keys_of.start..], (keys, 1)), p_words);
                let update = if keys_of.start == from { Update::Overwrite } else { Update::Accumulate };
                let b = (vs, 0..keys_of.len(), 0..head_dim);
                tiles.times(size, p, b, RowsMut::new(out, head_dim), update, &mut Ahead::new(&[], [0, 0]));
            }
            for (out, inverse) in out.chunks_exact_mut(head_dim).zip(&*inverses) {
                out.iter_mut().for_each(|o| *o *= *inverse);
            }
        }
    });
}

/// The products of the keys from `from` up to a panel of queries of `part`, a row each, with those queries: the pairs
/// that the mask keeps, and more up to a tile's edges.
fn products<T: Tiled>(
    tiles: &Tiles<T>,
    (keys, part, from): (Left<'_, T>, QueryBlock, usize),
    right: Panels<'_, T>,
    queries: Range<usize>,
    mut to: RowsMut<'_, T>,
    ahead: &mut Ahead<'_, T>,
) {
    // From the keys on that the first vector of queries sees, the second alone does.
    let second = queries.start + tiles.lanes;
    let (middle, end) = (part.seen_by(second.min(queries.end)), part.seen_by(queries.end));
    for (seen, first) in [(from..middle, queries.start), (middle..end, second)] {
        if !seen.is_empty() {
            let b = (right, 0..right.terms, first..queries.end.next_multiple_of(tiles.lanes));
            let to = to.part(seen.start - from..seen.end - from, first - queries.start);
            tiles.times(seen.len(), keys.from(seen.start, 0), b, to, Update::Overwrite, ahead);
        }
    }
}
