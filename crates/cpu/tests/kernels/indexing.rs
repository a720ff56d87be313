//! Elements chosen along a dim, by index.

use super::oracle::values;
use meshwork_cpu::kernels::indexing::*;
use meshwork_tensor::kernel::Picks;
use proptest::prelude::*;

proptest! {
    /// With many equal numbers, and some that are not one.
    #[test]
    fn the_first_of_the_largest(outer in 0..4_usize, extent in 1..9_usize, inner in 1..6_usize, nans: bool) {
        let x: Vec<f32> = values::<f32>("x", outer * extent * inner).iter().map(|x| x.round()).collect();
        let x: Vec<f32> = x.into_iter().enumerate().map(|(i, x)| if nans && i % 7 == 3 { f32::NAN } else { x }).collect();
        let mut out = vec![-1; outer * inner];
        argmax(&x, extent, inner, &mut out);
        for (at, &found) in out.iter().enumerate() {
            let along = |e: usize| x[(at / inner * extent + e) * inner + at % inner];
            let nan = (0..extent).find(|&e| along(e).is_nan());
            let most = (0..extent).map(along).fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(Some(found as usize), nan.or_else(|| (0..extent).find(|&e| along(e) == most)));
        }
    }

    #[test]
    fn picks_and_their_sums(
        outer in 0..4_usize, extent in 1..6_usize, inner in 0..4_usize, count in 0..7_usize, each: bool, first in 0..2_usize,
    ) {
        let picks = Picks { outer, extent, inner, count, each };
        let indices = if each { picks.taken() } else { count };
        let index: Vec<i32> = (0..indices).map(|i| ((i * 7 + i / 3) % extent) as i32).collect();
        prop_assert_eq!(outside(&index, extent), None);
        let (x, dy): (Vec<f32>, Vec<f32>) = (values("x", picks.from()), values("dy", picks.taken()));
        let (mut y, mut dx) = (vec![9.0; picks.taken()], vec![9.0; picks.from()]);
        // Slabs from `first` on, as a thread has them.
        let first = first.min(outer);
        pick(&x, &index, picks, first, &mut y[first * count * inner..]);
        pick_backward(&dy, &index, picks, first, &mut dx[first * extent * inner..]);
        let mut want = vec![0.0; picks.from()];
        for o in first..outer {
            for j in 0..count {
                for i in 0..inner {
                    let e = index[if each { (o * count + j) * inner + i } else { j }] as usize;
                    let (at, from) = ((o * count + j) * inner + i, (o * extent + e) * inner + i);
                    prop_assert_eq!(y[at], x[from]);
                    want[from] += dy[at];
                }
            }
        }
        prop_assert_eq!(&dx[first * extent * inner..], &want[first * extent * inner..]);
    }
}

#[test]
fn what_lies_outside() {
    assert_eq!(outside(&[0, 2, 3, -1], 3), Some((2, 3)));
    assert_eq!(outside(&[0, -1], 3), Some((1, -1)));
    assert_eq!(outside(&[0], 0), Some((0, 0)));
}
