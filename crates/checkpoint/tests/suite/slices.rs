//! Slices: what two have in common, the rest, small parts, and copies between blocks.

use meshwork_checkpoint::{Block, Slice, copy};
use proptest::prelude::*;

/// The index of every element of a slice in the whole tensor.
fn places(slice: &Slice) -> Vec<Vec<u64>> {
    slice.ranges().fold(vec![Vec::new()], |all, range| {
        all.iter().flat_map(|place| range.clone().map(move |at| [&place[..], &[at]].concat())).collect()
    })
}

fn slice(dims: usize) -> impl Strategy<Value = Slice> {
    prop::collection::vec((0u64..5, 0u64..5), dims)
        .prop_map(|ends| Slice::new(ends.into_iter().map(|(a, b)| a.min(b)..a.max(b))))
}

fn two() -> impl Strategy<Value = (Slice, Slice)> {
    (0usize..4).prop_flat_map(|dims| (slice(dims), slice(dims)))
}

proptest! {
    #[test]
    fn overlap_and_rest_make_up_the_slice((a, b) in two()) {
        let mut parts = a.minus(&b);
        parts.extend(a.overlap(&b));
        let mut found: Vec<_> = parts.iter().flat_map(places).collect();
        found.sort();
        prop_assert_eq!(found, places(&a)); // each index once
        prop_assert!(a.minus(&b).iter().all(|part| part.overlap(&b).is_none() && part.elements() > 0));
        prop_assert_eq!(a.contains(&b), places(&b).iter().all(|place| places(&a).contains(place)));
    }

    #[test]
    fn a_cut_slice_has_small_parts_in_order(a in (0usize..4).prop_flat_map(slice), most in 0u64..20) {
        let parts = a.cut(most);
        prop_assert_eq!(parts.iter().flat_map(places).collect::<Vec<_>>(), places(&a));
        if a.elements() > 0 {
            prop_assert!(parts.iter().all(|part| part.elements() <= most.max(1) && part.elements() > 0));
        }
    }

    #[test]
    fn runs_copy_each_element_to_its_place((a, b) in two(), padding in prop::collection::vec(0u64..3, 6)) {
        let Some(both) = a.overlap(&b) else { return Ok(()) };
        let grown = |slice: &Slice, by: &[u64]| -> Vec<u64> {
            slice.extents().iter().zip(by).map(|(extent, by)| extent + by).collect()
        };
        let extents = [grown(&a, &padding), grown(&b, &padding[3..])];
        let [from, to] = [(&a, &extents[0]), (&b, &extents[1])].map(|(of, extents)| Block::padded(of, extents.clone()));
        let place = |of: &Slice, extents: &[u64], at: &[u64]| {
            let places = at.iter().zip(of.ranges()).zip(extents);
            places.fold(0, |sum, ((at, range), extent)| sum * extent + (at - range.start)) as usize
        };
        let source: Vec<u64> = (1..=from.elements()).collect();
        let mut found = vec![0; to.elements() as usize];
        let mut wanted = found.clone();
        copy(&both, (&from, &source), (&to, &mut found));
        for at in places(&both) {
            wanted[place(&b, &extents[1], &at)] = source[place(&a, &extents[0], &at)];
        }
        prop_assert_eq!(found, wanted);
    }
}

#[test]
fn a_single_number_is_a_slice() {
    let one = Slice::whole(&[]);
    assert_eq!((one.elements(), one.to_string()), (1, "[]".to_owned()));
    assert_eq!(one.overlap(&one), Some(one.clone()));
    assert_eq!((one.minus(&one), one.cut(1)), (vec![], vec![one.clone()]));
}
