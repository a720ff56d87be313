//! The backward of a group of heads, on all rows of a sample or of a document.

use super::super::Float;
use super::ahead::{self, Ahead};
use super::heads::RowsMut;
use super::layout::{Call, Group, Next, QueryBlock};
use super::rows::{VECTOR, cap_scores, cap_slope};
use super::shift::Shift;
use super::tiles::{Left, Panels, Tiled};
use super::{BLOCK, Dims, STRIDE, blocks, copied_rows, panels, scratch};
use crate::kernels::matmul::Update;
use meshwork_core::simd::wide;
use std::ops::Range;

/// The gradients of `q`, `k` and `v` for a part. They, `out` and `dout` begin with the part's first row; `lse` begins
/// with the group's first row.
pub(super) fn part<T: Tiled>(
    call: &Call<'_, T>,
    place @ (group, rows): (Group, QueryBlock),
    [q, k, v, out, dout]: [&[T]; 5],
    lse: &[T],
    [mut q_grad, mut k_grad, mut v_grad]: [RowsMut<'_, T>; 3],
    to_next: Option<Next>,
) {
    let (tiles, head_dim, size) = (&call.tiles, call.dims.head_dim, call.groups.size);
    let (seq, keys, [q_tokens, k_tokens]) = (rows.queries.len, rows.keys.len, call.tokens(rows));
    let (q_row, k_row, v_row, out_row) = (call.layout.q.row, call.layout.k.row, call.layout.v.row, call.layout.out.row);
    // For longer heads there is no prefetch, and gradients are summed in scratch memory, where their rows are close
    // together.
    let in_place = ahead::stay::<T>(8, [seq.max(keys), head_dim]);
    let ([keys_by_feature, keys_by_row, by_row], square) =
        ([[head_dim, keys], [keys, head_dim], [seq, head_dim]].map(|d| tiles.packed_len(d)), BLOCK * STRIDE);
    let left = tiles.left_len([seq, head_dim]);
    // Then tiles read queries from scratch memory, too.
    let copied = !in_place && left == 0;
    let turned = |rows: usize, copied: bool| if copied || call.angles.is_some() { rows * head_dim } else { 0 };
    // Sums of dK and dV over heads that wait for their right neighbours; the first is in the memory of the gradient.
    let waiting = size.ilog2() as usize + 1;
    let apart = waiting - usize::from(in_place);
    let lens = [
        keys_by_feature,
        keys_by_feature,
        keys_by_row,
        by_row,
        by_row,
        square,
        square,
        if in_place { 0 } else { seq * head_dim },
        apart * 2 * keys * head_dim,
        seq,
        tiles.rows * STRIDE,
        left,
        left,
        tiles.left_len([BLOCK, BLOCK]),
        turned(keys, false),
        turned(seq, copied),
        if copied { seq * head_dim } else { 0 },
        if call.masks.cap.is_some() { tiles.rows * STRIDE } else { 0 },
    ];
    scratch::with(lens, |scratch| {
        let [
            kt,
            vt,
            ks,
            qs,
            gs,
            p,
            ds,
            dq,
            sums,
            dots,
            factors,
            q_words,
            g_words,
            words,
            k_turned,
            q_turned,
            g_copy,
            slopes,
        ] = scratch;
        let in_memory = [q, k, v, out, dout].map(<[T]>::as_ptr);
        let (k, k_read) = match call.angles {
            Some(angles) => {
                call.turn(angles, (group, k_tokens), (k, k_row), k_turned);
                (&*k_turned, head_dim)
            }
            None => (k, k_row),
        };
        let kt = tiles.pack([head_dim, keys], (k, (1, k_read)), kt);
        let vt = tiles.pack([head_dim, keys], (v, (1, v_row)), vt);
        let ks = tiles.pack([keys, head_dim], (k, (k_read, 1)), ks);
        for head in 0..size {
            let last = head + 1 == size;
            let to_next = to_next.filter(|_| in_place && last);
            let next_rows = to_next.map_or(seq, |next| next.rows);
            let next = to_next.map(|Next { distance: [in_q, in_kv, in_out], .. }| {
                let [q, k, v, out, dout] = in_memory;
                let gradients = [(&k_grad, in_kv, k_row), (&v_grad, in_kv, v_row), (&q_grad, in_q, q_row)];
                let [k_grad, v_grad, q_grad] = gradients.map(|(x, at, row)| (x.as_ptr().wrapping_add(at), row));
                let [k, v] = [(k, k_row), (v, v_row)].map(|(x, row)| (x.wrapping_add(in_kv), row));
                let [out, dout] = [out, dout].map(|x| (x.wrapping_add(in_out), out_row));
                [k, v, (q.wrapping_add(in_q), q_row), dout, out, k_grad, v_grad, q_grad]
            });
            let inside = (in_place && !last).then(|| {
                let [q, _, _, out, dout] = in_memory;
                let all = [(q, q_row), (dout, out_row), (out, out_row), (q_grad.as_ptr(), q_row)];
                all.map(|(x, row)| (x.wrapping_add((head + 1) * head_dim), row))
            });
            let next = if last { next.as_slice().as_flattened() } else { inside.as_slice().as_flattened() };
            let mut ahead = Ahead::new(next, [next_rows, head_dim]);

            let [q, out, dout] = [q, out, dout].map(|x| &x[head * head_dim..]);
            let (q, q_read) = match call.angles {
                Some(angles) => {
                    call.turn(angles, (group, q_tokens), (q, q_row), q_turned);
                    (&*q_turned, head_dim)
                }
                None if copied => (copied_rows(q, q_row, head_dim, q_turned), head_dim),
                None => (q, q_row),
            };
            let (g, g_row) = match copied {
                true => (copied_rows(dout, out_row, head_dim, g_copy), head_dim),
                false => (dout, out_row),
            };
            let qs = tiles.pack([seq, head_dim], (q, (q_read, 1)), qs);
            let gs = tiles.pack([seq, head_dim], (g, (g_row, 1)), gs);
            let q = tiles.left([seq, head_dim], (q, (q_read, 1)), q_words);
            tiles.dots(head_dim, [(g, g_row), (out, out_row)], dots);
            let g = tiles.left([seq, head_dim], (g, (g_row, 1)), g_words);
            let mut gradient = q_grad.part(0..seq, head * head_dim);
            let q_sums = if in_place { gradient.part(0..seq, 0) } else { RowsMut::new(dq, head_dim) };
            // The number of pending sums is the number of one bits in the number of finished heads.
            let slot = head.count_ones() as usize;
            let [k_sums, v_sums] = slots(slot, in_place, [&mut k_grad, &mut v_grad], sums, [keys, head_dim]);
            let operands = Operands { q, g, kt, vt, ks, qs, gs };
            let lse = &lse[head * call.dims.seq + rows.queries.first..][..seq];
            let (dropout, shift) = (call.head_dropout(place, head), call.shift(place, head));
            let values = Rows { lse, dots, dropout, shift };
            one_head(
                call,
                place,
                operands,
                values,
                [q_sums, k_sums, v_sums],
                [p, ds, factors, slopes, words],
                &mut ahead,
            );
            if !in_place {
                copy(dq, &mut gradient, head_dim);
            }
            for right in (slot - head.trailing_ones() as usize + 1..=slot).rev() {
                join(right, in_place, [&mut k_grad, &mut v_grad], sums, [keys, head_dim]);
            }
        }
        for right in (1..size.count_ones() as usize).rev() {
            join(right, in_place, [&mut k_grad, &mut v_grad], sums, [keys, head_dim]);
        }
        if !in_place {
            let (k_sums, v_sums) = sums[..2 * keys * head_dim].split_at(keys * head_dim);
            copy(k_sums, &mut k_grad, head_dim);
            copy(v_sums, &mut v_grad, head_dim);
        }
    });
}

/// The memory of the pending sums of dK and dV in this slot: the first in the gradients themselves or in scratch
/// memory, the others in scratch memory.
fn slots<'a, T>(
    slot: usize,
    in_place: bool,
    gradients: [&'a mut RowsMut<'_, T>; 2],
    sums: &'a mut [T],
    [seq, head_dim]: [usize; 2],
) -> [RowsMut<'a, T>; 2] {
    if in_place && slot == 0 {
        return gradients.map(|gradient| gradient.part(0..seq, 0));
    }
    let at = (slot - usize::from(in_place)) * 2 * seq * head_dim;
    let (k, v) = sums[at..][..2 * seq * head_dim].split_at_mut(seq * head_dim);
    [RowsMut::new(k, head_dim), RowsMut::new(v, head_dim)]
}

/// Adds the pending sums of slot `right` to the sums of the slot before it.
fn join<T: Float>(
    right: usize,
    in_place: bool,
    gradients: [&mut RowsMut<'_, T>; 2],
    sums: &mut [T],
    dims @ [seq, head_dim]: [usize; 2],
) {
    let at = (right - usize::from(in_place)) * 2 * seq * head_dim;
    let (before, from) = sums.split_at_mut(at);
    let from = from[..2 * seq * head_dim].chunks_exact(seq * head_dim);
    for (mut to, from) in slots(right - 1, in_place, gradients, before, dims).into_iter().zip(from) {
        wide(
            #[inline(always)]
            || {
                for (i, from) in from.chunks_exact(head_dim).enumerate() {
                    to.row(i)[..head_dim].iter_mut().zip(from).for_each(|(to, &from)| *to += from);
                }
            },
        );
    }
}

/// Copies contiguous rows to their places.
fn copy<T: Copy>(from: &[T], to: &mut RowsMut<'_, T>, head_dim: usize) {
    for (i, from) in from.chunks_exact(head_dim).enumerate() {
        to.row(i)[..head_dim].copy_from_slice(from);
    }
}

/// The operands of one head's products: `Q` and `dO` from the left, transposed `K` and `V`, and `K`, `Q` and `dO` from
/// the right.
struct Operands<'a, T> {
    q: Left<'a, T>,
    g: Left<'a, T>,
    kt: Panels<'a, T>,
    vt: Panels<'a, T>,
    ks: Panels<'a, T>,
    qs: Panels<'a, T>,
    gs: Panels<'a, T>,
}

/// Values of one head for each of its rows.
struct Rows<'a, T> {
    lse: &'a [T],
    /// `D` of the module's equations.
    dots: &'a [T],
    dropout: super::layout::HeadDropout,
    shift: Option<Shift<'a, T>>,
}

/// One head's sums for the gradients of `q`, `k` and `v`.
fn one_head<T: Tiled>(
    call: &Call<'_, T>,
    (group, part): (Group, QueryBlock),
    Operands { q, g, kt, vt, ks, qs, gs }: Operands<'_, T>,
    Rows { lse, dots, dropout, shift }: Rows<'_, T>,
    [mut q_sums, mut k_sums, mut v_sums]: [RowsMut<'_, T>; 3],
    [p, ds, factors, slopes, words]: [&mut [T]; 5],
    ahead: &mut Ahead<'_, T>,
) {
    let (tiles, scale, Dims { keys: in_sample, head_dim, .. }) = (&call.tiles, call.scale(), call.dims);
    let (seq, past, window) = (part.queries.len, part.past, call.masks.window);
    if window.is_some() {
        (0..seq).for_each(|i| q_sums.row(i)[..head_dim].fill(T::ZERO));
    }
    for keys in blocks(0..part.keys.len, BLOCK) {
        // The queries before these, and those behind, see none of the keys. Terms begin at an even one.
        let (begin, end) = (keys.start.saturating_sub(past) / 2 * 2, part.seeing(keys.end, window));
        if begin >= end {
            for sums in [&mut k_sums, &mut v_sums] {
                keys.clone().for_each(|key| sums.row(key)[..head_dim].fill(T::ZERO));
            }
        }
        for queries in blocks(begin..end.max(begin), BLOCK) {
            for rows in panels(queries.clone(), tiles.rows) {
                let (first, height) = (rows.start, rows.len());
                let live = keys.start..keys.end.min(past + rows.end);
                let at = (first - queries.start) * STRIDE;
                let (p, ds) = (&mut p[at..][..height * STRIDE], &mut ds[at..][..height * STRIDE]);
                // Whole vectors, for masked stores are slow on some CPUs; what lies behind the last key is replaced.
                let vectors = live.start..live.start + live.len().next_multiple_of(tiles.lanes);
                for (a, b, to) in [(q, kt, &mut *p), (g, vt, &mut *ds)] {
                    let b = (b, 0..head_dim, vectors.clone());
                    tiles.times(height, a.from(first, 0), b, RowsMut::new(to, STRIDE), Update::Overwrite, ahead);
                }
                let factors = dropout.map(|(mask, start)| {
                    for (i, factors) in rows.clone().zip(factors.chunks_exact_mut(STRIDE)) {
                        let start = start + (i * in_sample.sequence + keys.start) as u64;
                        mask.factors(start, &mut factors[..live.len()]);
                    }
                    &factors[..height * STRIDE]
                });
                factors.into_iter().for_each(|factors| multiply(ds, factors, STRIDE, live.len()));
                if let Some(cap) = call.masks.cap.map(T::from_f64) {
                    for (p, slopes) in p.chunks_exact_mut(STRIDE).zip(slopes.chunks_exact_mut(STRIDE)) {
                        let (p, slopes) = (&mut p[..live.len()], &mut slopes[..live.len()]);
                        cap_scores(scale, cap, p);
                        slopes.iter_mut().zip(p).for_each(|(slope, s)| *slope = cap_slope(scale, cap, *s));
                    }
                }
                if let Some(shift) = shift {
                    for (i, p) in rows.clone().zip(p.chunks_exact_mut(STRIDE)) {
                        shift.add(scale, &mut p[..live.len()], 1, i, live.start);
                    }
                }
                let of_scores = if shift.is_some() { T::ONE } else { scale };
                wide(
                    #[inline(always)]
                    || {
                        let rows = rows.clone().zip(p.chunks_exact_mut(STRIDE).zip(ds.chunks_exact_mut(STRIDE)));
                        for (i, (p, ds)) in rows {
                            let shown = live.len().min((past + i + 1).saturating_sub(keys.start));
                            let hidden = part.hidden_from(i, window).saturating_sub(keys.start);
                            softmax_backward([of_scores, scale], [lse[i], dots[i]], [p, ds], hidden..shown);
                        }
                    },
                );
                factors.into_iter().for_each(|factors| multiply(p, factors, STRIDE, live.len()));
                if call.masks.cap.is_some() {
                    multiply(ds, slopes, STRIDE, live.len());
                }
                let first_block = keys.start == 0 && window.is_none();
                let update = if first_block { Update::Overwrite } else { Update::Accumulate };
                let ds = tiles.left([height, live.len()], (ds, (STRIDE, 1)), words);
                let dq = q_sums.part(rows, 0);
                tiles.times(height, ds, (ks, live, 0..head_dim), dq, update, ahead);
            }
            let update = if queries.start == begin { Update::Overwrite } else { Update::Accumulate };
            for columns in panels(0..keys.len(), tiles.rows) {
                // Queries before these keys add nothing to them.
                let unseen = (keys.start + columns.start).saturating_sub(past + queries.start);
                let first = queries.start + unseen / 2 * 2;
                let at = (first - queries.start) * STRIDE + columns.start;
                for (scores, rows, sums) in [(&*p, gs, &mut v_sums), (&*ds, qs, &mut k_sums)] {
                    let terms = first..queries.end;
                    let a = tiles.left([columns.len(), terms.len()], (&scores[at..], (1, STRIDE)), words);
                    let sums = sums.part(keys.start + columns.start..keys.start + columns.end, 0);
                    tiles.times(columns.len(), a, (rows, terms, 0..head_dim), sums, update, ahead);
                }
            }
        }
    }
    if let Some(angles) = call.angles {
        // Each head is rotated back by itself, so ranks that share a group have the bits of one that holds all of it.
        let [queries, keys] = call.tokens(part);
        call.turn_back(angles, (group, queries), &mut q_sums);
        call.turn_back(angles, (group, keys), &mut k_sums);
    }
}

/// Turns the products of a row of `S` and of `dP` into `P` and `dS` where a key is `seen`; sets the others, up to a
/// whole vector behind them and one more, to zero.
#[inline(always)]
fn softmax_backward<T: Float>(
    [of_scores, scale]: [T; 2],
    [lse, d]: [T; 2],
    [p, ds]: [&mut [T]; 2],
    seen: Range<usize>,
) {
    let (p, ds) = (p.as_chunks_mut::<VECTOR>().0, ds.as_chunks_mut::<VECTOR>().0);
    let vectors = seen.end.div_ceil(VECTOR);
    for (at, (p, ds)) in p[..vectors].iter_mut().zip(&mut ds[..vectors]).enumerate() {
        let [hidden, shown] = [seen.start, seen.end].map(|key| key as i32 - (at * VECTOR) as i32);
        let probability: [T; VECTOR] = std::array::from_fn(|l| (p[l] * of_scores - lse).exp());
        let gradient: [T; VECTOR] = std::array::from_fn(|l| probability[l] * (ds[l] - d) * scale);
        (*p, *ds) = (probability, gradient);
        // Most vectors are seen whole, and need no comparisons.
        if hidden > 0 || shown < VECTOR as i32 {
            let is_seen = |l: usize| (hidden <= l as i32) & ((l as i32) < shown);
            // The row is not zeroed beforehand, because a load from memory just written by several stores stalls until
            // all of them are done.
            *p = std::array::from_fn(|l| if is_seen(l) { probability[l] } else { T::ZERO });
            *ds = std::array::from_fn(|l| if is_seen(l) { gradient[l] } else { T::ZERO });
        }
    }
    p[vectors] = [T::ZERO; VECTOR];
    ds[vectors] = [T::ZERO; VECTOR];
}

/// `x[i] *= by[i]` for the first `len` of each row.
fn multiply<T: Float>(x: &mut [T], by: &[T], stride: usize, len: usize) {
    wide!(for (x, by) in x.chunks_exact_mut(stride).zip(by.chunks_exact(stride)) {
        x[..len].iter_mut().zip(&by[..len]).for_each(|(x, by)| *x *= *by);
    });
}
