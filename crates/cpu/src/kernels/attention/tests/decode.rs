//! New tokens after cached ones, against the whole sequence at once.

use super::super::*;
use super::grouped::Case;
use super::{assert_close, elements, values};
use meshwork_tensor::Precision;
use proptest::prelude::*;

proptest! {
    /// A sequence in passes of any number of tokens has the outputs of the whole sequence, and the cache its rotated
    /// keys; cache memory beyond the tokens is never read.
    #[test]
    fn passes_of_any_length_are_the_whole_sequence(
        (batch, used, size) in (1..3usize, 1..3usize, 1..4usize),
        passes in prop::collection::vec(1..6usize, 1..5),
        head_dim in prop::sample::select(vec![2usize, 8, 20]),
        (before, after, spare) in (0..2usize, 0..2usize, 0..3usize),
        turned: bool,
    ) {
        let seq: usize = passes.iter().sum();
        let case = Case::new([batch, seq, used, size], head_dim, [before, after], turned);
        let (whole, groups) = (case.dims, case.groups);
        let (q, kv) = (values::<f64>("q", elements(whole)), values::<f64>("kv", case.kv_elements()));
        let angles = case.angles::<f64>();
        let angles = turned.then_some(Angles(&angles));
        let (mut expected, mut lse) = (vec![f64::NAN; q.len()], vec![f64::NAN; batch * whole.heads * seq]);
        grouped_forward(f64::tiles(Precision::F32), whole, groups, angles, [&q, &kv], &mut expected, &mut lse, Masks::default());

        let capacity = seq + spare;
        let [row, width] = [2 * groups.kv_heads * head_dim, whole.heads * head_dim];
        let mut cache = vec![f64::NAN; batch * capacity * row];
        let mut past = 0;
        for seq_now in passes {
            let dims = Dims { seq: seq_now, keys: Keys::of(capacity, past), ..whole };
            let new = |x: &[f64], width: usize| -> Vec<f64> {
                x.chunks(seq * width).flat_map(|sample| &sample[past * width..][..seq_now * width]).copied().collect()
            };
            append(dims, groups, angles, &new(&kv, row), &mut cache);
            let mut out = vec![f64::NAN; batch * seq_now * width];
            attend(dims, groups, angles, &new(&q, width), &cache, &mut out);
            assert_close(&out, &new(&expected, width), 1e-12);
            past += seq_now;
        }
        let filled = cache.iter().filter(|x| x.is_finite()).count();
        prop_assert_eq!(filled, batch * seq * row);
    }
}

#[test]
#[should_panic(expected = "5 tokens in a cache of 4")]
fn a_full_cache_takes_no_token() {
    let dims = Dims { keys: Keys::of(4, 3), ..Dims::of([1, 2, 1, 2]) };
    append(dims, Groups::alone(dims), None, &[0f32; 8], &mut [0f32; 16]);
}
