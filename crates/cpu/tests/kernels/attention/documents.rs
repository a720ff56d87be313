//! Packed sequences, against their documents one by one.

use super::grouped::Case;
use super::*;

/// The positions of documents of these lengths; the first document begins at position `begun`.
fn positions(lengths: &[usize], begun: usize) -> Vec<i32> {
    let document = |(at, &len): (usize, &usize)| (0..len).map(move |i| (i + if at == 0 { begun } else { 0 }) as i32);
    lengths.iter().enumerate().flat_map(document).collect()
}

/// Some rows of each of the samples of `[samples, rows, width]`.
fn rows(x: &[f32], seq: usize, width: usize, which: Range<usize>) -> Vec<f32> {
    x.chunks(seq * width).flat_map(|sample| &sample[which.start * width..which.end * width]).copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Each document has the same bits as a separate sequence, forward and in all gradients, at any place.
    #[test]
    fn a_document_has_the_bits_that_it_has_alone(
        lengths in prop::collection::vec(prop::sample::select(&[1_usize, 2, 15, 33, 130, 300][..]), 1..5),
        batch in 1..3_usize, used in 1..3_usize, size in 1..4_usize, turned: bool,
        precision in prop::sample::select(&Precision::ALL[..]),
    ) {
        let (seq, head_dim): (usize, usize) = (lengths.iter().sum(), 6);
        let case = Case::new([batch, seq, used, size], head_dim, [1, 0], turned);
        let tiles = f32::tiles(precision);
        let packing = Packing::new(&positions(&lengths, 0).repeat(batch), [batch, seq], true).unwrap();
        let masks = Masks { packing: Some(&packing), ..Masks::default() };
        let [q, kv, dout] = case.operands::<f32>();
        let [out, lse] = case.run_with(tiles, &q, &kv, masks);
        let [dq, dkv] = case.backward_with(tiles, &q, &kv, &dout, masks);
        let (width, kv_width) = (used * size * head_dim, case.kv_elements() / batch / seq);
        let mut first = 0;
        for len in lengths {
            let which = first..first + len;
            let of = |x: &[f32], width: usize| rows(x, seq, width, which.clone());
            let alone = Case::new([batch, len, used, size], head_dim, [1, 0], turned);
            let (q, kv, dout) = (of(&q, width), of(&kv, kv_width), of(&dout, width));
            let [want, want_lse] = alone.run_with(tiles, &q, &kv, Masks::default());
            prop_assert_eq!(want, of(&out, width));
            prop_assert_eq!(want_lse, rows(&lse, seq, 1, which.clone()));
            let [want_dq, want_dkv] = alone.backward_with(tiles, &q, &kv, &dout, Masks::default());
            prop_assert_eq!(want_dq, of(&dq, width));
            prop_assert_eq!(want_dkv, of(&dkv, kv_width));
            first += len;
        }
    }

    /// If documents attend to each other, rows rotated beforehand by their positions give the same.
    #[test]
    fn rotations_follow_the_positions(
        lengths in prop::collection::vec(1..40_usize, 1..5), begun in 0..9_usize, apart: bool,
    ) {
        let (seq, head_dim): (usize, usize) = (lengths.iter().sum::<usize>() + 9, 4);
        let lengths: Vec<usize> = lengths.into_iter().chain([9]).collect();
        let positions = positions(&lengths, begun.min(seq - lengths[0]));
        let packing = Packing::new(&positions, [1, seq], apart).unwrap();
        let tiles = f64::tiles(Precision::F32);
        let turned = Case::new([1, seq, 2, 2], head_dim, [0, 0], true);
        let still = Case::new([1, seq, 2, 2], head_dim, [0, 0], false);
        let [q, kv, dout] = turned.operands::<f64>();
        let masks = Masks { packing: Some(&packing), ..Masks::default() };
        let turn = |x: &[f64], heads: usize, only: usize, back: f64| -> Vec<f64> {
            let mut x = x.to_vec();
            for (row, x) in x.chunks_mut(heads * head_dim).enumerate() {
                x.chunks_mut(head_dim).take(only).for_each(|x| turned.turn(positions[row] as usize, x, back));
            }
            x
        };
        let (q_turned, kv_turned) = (turn(&q, 4, 4, 1.0), turn(&kv, 4, 2, 1.0));
        let found = turned.run_with(tiles, &q, &kv, masks);
        let wanted = still.run_with(tiles, &q_turned, &kv_turned, masks);
        super::assert_close(&found[0], &wanted[0], 1e-12);
        let [dq, dkv] = turned.backward_with(tiles, &q, &kv, &dout, masks);
        let [want_dq, want_dkv] = still.backward_with(tiles, &q_turned, &kv_turned, &dout, masks);
        super::assert_close(&dq, &turn(&want_dq, 4, 4, -1.0), 1e-11);
        super::assert_close(&dkv, &turn(&want_dkv, 4, 2, -1.0), 1e-11);
    }
}

/// Dropout depends on the index in the sequence: a packed sequence draws the same for its pairs as an unpacked one.
#[test]
fn dropout_is_that_of_the_whole_sequence() {
    let (d, drop) = (Dims::new([2, 150, 2, 8]), Some(dropout(0.4)));
    let qkv: Vec<f32> = values("qkv", 3 * elements(d));
    let dout: Vec<f32> = values("dout", elements(d));
    let places = positions(&[70, 80], 0).repeat(2);
    let run = |places: &[i32]| {
        let packing = Packing::new(places, [2, 150], true).unwrap();
        let masks = Masks { dropout: drop, packing: Some(&packing), ..Masks::default() };
        let (mut out, mut lse, mut dqkv) =
            (vec![f32::NAN; elements(d)], vec![f32::NAN; 600], vec![f32::NAN; qkv.len()]);
        forward(f32::tiles(Precision::F32), d, &qkv, &mut out, &mut lse, masks);
        backward(
            f32::tiles(Precision::F32),
            d,
            Saved { q: &qkv, kv: &qkv, out: &out, lse: &lse },
            &dout,
            &mut dqkv,
            masks,
        );
        [out, lse, dqkv]
    };
    let [out, lse, dqkv] = run(&places);
    // From the equations, with the pairs of two documents left out.
    let [want, want_lse] = super::naive_of(|x| x, d, &super::widen(&qkv), drop, &places);
    super::assert_close(&out, &want, 2e-5);
    super::assert_close(&lse, &want_lse, 2e-6);
    let want = super::naive_backward_of(|x| x, d, &super::widen(&qkv), &super::widen(&dout), drop, &places);
    super::assert_close(&dqkv, &want, 3e-5);
}
