//! New tokens after cached ones, against the whole sequence at once.

use super::grouped::Case;
use super::*;

proptest! {
    /// A sequence in passes of any number of tokens has the bits of the whole sequence, whatever window there is, and
    /// the cache its rotated keys; cache memory beyond the tokens is never read.
    #[test]
    fn passes_of_any_length_are_the_whole_sequence(
        (batch, used, size) in (1..3usize, 1..3usize, 1..4usize),
        passes in prop::collection::vec(prop_oneof![1..6usize, 200..300usize], 1..5),
        head_dim in prop::sample::select(vec![2usize, 8, 20]),
        (before, after, spare) in (0..2usize, 0..2usize, 0..3usize),
        turned: bool,
        window in prop::option::of(1..300usize),
        precision in prop::sample::select(Precision::ALL.to_vec()),
    ) {
        let seq: usize = passes.iter().sum();
        let case = Case::new([batch, seq, used, size], head_dim, [before, after], turned);
        let (whole, groups, masks) = (case.dims, case.groups, Masks { window, ..Masks::default() });
        let (q, kv) = (values::<f32>("q", elements(whole)), values::<f32>("kv", case.kv_elements()));
        let [expected, expected_lse] = case.run_with(f32::tiles(precision), &q, &kv, masks);

        let capacity = seq + spare;
        let [row, width] = [2 * groups.kv_heads * head_dim, whole.heads * head_dim];
        let (mut cache, angles) = (vec![f32::NAN; batch * capacity * row], case.angles::<f32>());
        let mut past = 0;
        for seq_now in passes {
            let dims = Dims { seq: seq_now, keys: Keys::new(capacity, past), ..whole };
            let new = |x: &[f32], rows: usize, width: usize| -> Vec<f32> {
                x.chunks(rows * width).flat_map(|sample| &sample[past * width..][..seq_now * width]).copied().collect()
            };
            let turn = |x: Vec<f32>, all, heads| {
                let mut to = x.clone();
                if turned {
                    turn(Angles(&angles[past * head_dim..]), [seq_now, all, heads, head_dim], &x, &mut to);
                }
                to
            };
            let kv = turn(new(&kv, seq, row), 2 * groups.kv_heads, groups.kv_heads);
            for (sample, kv) in kv.chunks(seq_now * row).enumerate() {
                cache[(sample * capacity + past) * row..][..seq_now * row].copy_from_slice(kv);
            }
            let q = turn(new(&q, seq, width), whole.heads, whole.heads);
            let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; batch * whole.heads * seq_now]);
            grouped_forward(f32::tiles(precision), dims, groups, None, [&q, &cache], &mut out, &mut lse, masks, None);
            prop_assert_eq!(&out, &new(&expected, seq, width));
            prop_assert_eq!(&lse, &new(&expected_lse, seq, 1));
            past += seq_now;
        }
        let filled = cache.iter().filter(|x| x.is_finite()).count();
        prop_assert_eq!(filled, batch * seq * row);
    }
}
