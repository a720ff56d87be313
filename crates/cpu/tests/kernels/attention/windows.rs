//! Sliding windows, against the equations and against calls without one.

use super::grouped::Case;
use super::*;

/// Tokens whose documents begin where their windows do: the equations of a window.
fn as_documents(d: Dims, positions: &[i32], window: usize) -> Vec<i32> {
    positions.iter().map(|&position| position.min(window as i32 - 1)).take(d.batch * d.seq).collect()
}

/// Every kind of tiles at windows at the edges of vectors, tiles and blocks, with dropout and without.
#[test]
fn windows_follow_the_equations() {
    for (shape, windows) in [
        ([1, 1, 1, 1], &[1_usize, 2][..]),
        ([2, 13, 1, 31], &[1, 3, 13]),
        ([1, 140, 2, 17], &[1, 16, 31, 127, 129]),
        ([1, 300, 1, 20], &[1, 2, 33, 128, 256, 299]),
        ([1, 2 * FORWARD_KEYS + 1, 1, 8], &[15, 255, 257, 512]),
    ] {
        let d = Dims::new(shape);
        let (qkv, dout): (Vec<f32>, Vec<f32>) = (values("qkv", 3 * elements(d)), values("dout", elements(d)));
        for &window in windows {
            let positions = as_documents(d, &one_document(d), window);
            for dropout in [None, Some(dropout(0.2))] {
                let masks = Masks { dropout, window: Some(window), ..Masks::default() };
                let [want, want_lse] = naive_of(|x| x, d, &widen(&qkv), dropout, &positions);
                let want_dqkv = naive_backward_of(|x| x, d, &widen(&qkv), &widen(&dout), dropout, &positions);
                for tiles in Tiles::all(Precision::F32) {
                    let (mut out, mut lse) = (vec![f32::NAN; elements(d)], vec![f32::NAN; d.batch * d.heads * d.seq]);
                    forward(tiles, d, &qkv, &mut out, &mut lse, masks);
                    assert_close(&out, &want, 5e-6);
                    assert_close(&lse, &want_lse, 2e-6);
                    let saved = Saved { q: &qkv, kv: &qkv, out: &out, lse: &lse };
                    let mut dqkv = vec![f32::NAN; qkv.len()];
                    backward(tiles, d, saved, &dout, &mut dqkv, masks);
                    assert_close(&dqkv, &want_dqkv, 2e-5);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A window of the whole sequence has the bits of none. Within documents a window has the bits that it has in each
    /// of them alone; its queries have the same bits in any call.
    #[test]
    fn bits_do_not_depend_on_where_a_window_is_computed(
        lengths in prop::collection::vec(prop::sample::select(&[1_usize, 2, 33, 130, 300][..]), 1..4),
        (used, size) in (1..3_usize, 1..4_usize), turned: bool, cut in 0.0..1.0,
        window in prop::sample::select(&[1_usize, 2, 17, 128, 129, 255][..]),
        precision in prop::sample::select(&Precision::ALL[..]),
    ) {
        let (seq, head_dim): (usize, usize) = (lengths.iter().sum(), 6);
        let case = Case::new([1, seq, used, size], head_dim, [1, 0], turned);
        let tiles = f32::tiles(precision);
        let [q, kv, dout] = case.operands::<f32>();
        let run = |case: Case, operands: [&[f32]; 3], masks| {
            let [out, lse] = case.run_with(tiles, operands[0], operands[1], masks);
            let [dq, dkv] = case.backward_with(tiles, operands[0], operands[1], operands[2], masks);
            [out, lse, dq, dkv]
        };
        let all = Masks { window: Some(seq), ..Masks::default() };
        prop_assert_eq!(run(case, [&q, &kv, &dout], all), run(case, [&q, &kv, &dout], Masks::default()));

        let positions: Vec<i32> = lengths.iter().flat_map(|&len| 0..len as i32).collect();
        let packing = Packing::new(&positions, [1, seq], true).unwrap();
        let of_window = Masks { window: Some(window), ..Masks::default() };
        let masks = Masks { packing: Some(&packing), ..of_window };
        let [out, lse, dq, dkv] = run(case, [&q, &kv, &dout], masks);
        let (width, kv_width) = (used * size * head_dim, case.kv_elements() / seq);
        let mut first = 0;
        for len in lengths {
            let of = |x: &[f32], width: usize| x[first * width..(first + len) * width].to_vec();
            let alone = Case::new([1, len, used, size], head_dim, [1, 0], turned);
            let (q, kv, dout) = (of(&q, width), of(&kv, kv_width), of(&dout, width));
            let [want, _, want_dq, want_dkv] = run(alone, [&q, &kv, &dout], of_window);
            prop_assert_eq!([&of(&out, width), &of(&dq, width), &of(&dkv, kv_width)], [&want, &want_dq, &want_dkv]);
            first += len;
        }
        let at = (cut * seq as f64) as usize;
        let slice = case.slice(seq - at, Keys::new(seq, at));
        let [part, part_lse, part_dq, _] = run(slice, [&q[at * width..], &kv, &dout[at * width..]], masks);
        prop_assert_eq!([&part[..], &part_dq], [&out[at * width..], &dq[at * width..]]);
        let want_lse: Vec<f32> = lse.chunks(seq).flat_map(|lse| &lse[at..]).copied().collect();
        prop_assert_eq!(part_lse, want_lse);
    }

    /// Two blocks of keys join by their log-sum-exps. Of the block before the queries those outside of all windows need
    /// not be there; a query that sees none has the output 0, the log-sum-exp -infinity and no gradient.
    #[test]
    fn blocks_within_a_window_join_by_their_log_sum_exps(
        (used, size) in (1..3usize, 1..3usize), (first, second) in (1..300usize, 1..200usize), window in 1..300usize,
    ) {
        let (seq, tokens) = (first + second, first..first + second);
        let case = Case::new([1, seq, used, size], 8, [0, 0], false);
        let (q, kv) = (values::<f64>("q", elements(case.dims)), values::<f64>("kv", case.kv_elements()));
        let masks = Masks { window: Some(window), ..Masks::default() };
        let run = |case: Case, q: &[f64], kv: &[f64]| case.run_with(f64::tiles(Precision::F32), q, kv, masks);
        let (width, kv_width) = (case.dims.heads * 8, case.kv_elements() / seq);
        let [want, _] = run(case, &q, &kv);
        let q = &q[first * width..];
        let needed = (first + 1).saturating_sub(window)..first;
        let before = case.slice(second, Keys::new(needed.len(), first - needed.start));
        let own = case.slice(second, Keys::new(second, 0));
        let [b, lse_b] = run(own, q, &kv[first * kv_width..]);
        if needed.is_empty() {
            assert_close(&b, &want[tokens.start * width..], 1e-12);
            return Ok(());
        }
        let of_needed = &kv[needed.start * kv_width..needed.end * kv_width];
        let [a, lse_a] = run(before, q, of_needed);
        let dout = values::<f64>("dout", a.len());
        let [dq, _] = before.backward_with(f64::tiles(Precision::F32), q, of_needed, &dout, masks);
        let heads = case.dims.heads;
        let join = |at: usize| {
            let (row, head) = (at / 8 / heads, at / 8 % heads);
            let lse = head * second + row;
            if row + 1 >= window {
                assert_eq!([a[at], lse_a[lse], dq[at]], [0.0, f64::NEG_INFINITY, 0.0]);
            }
            let share = 1.0 / (1.0 + (lse_b[lse] - lse_a[lse]).exp());
            share * a[at] + (1.0 - share) * b[at]
        };
        assert_close(&(0..a.len()).map(join).collect::<Vec<_>>(), &want[tokens.start * width..], 1e-12);
    }
}

#[test]
#[should_panic(expected = "a window of no keys")]
fn a_window_of_no_keys_is_refused() {
    let d = Dims::new([1, 2, 1, 2]);
    let masks = Masks { window: Some(0), ..Masks::default() };
    forward(f32::tiles(Precision::F32), d, &[0.0; 12], &mut [0.0; 4], &mut [0.0; 2], masks);
}
