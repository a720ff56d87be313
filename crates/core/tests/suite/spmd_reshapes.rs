//! Rules of reshapes against brute force: every value of up to five dims with up to twelve elements on a rank, with
//! extents of 1 in every place, cut over two and three ranks along every dim. What is accepted has the elements that
//! the ranks hold, and the extents that one rank would have; what is sound and can mean one thing alone is accepted;
//! what can mean several things is refused, and the error says how to say which.

use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, SpmdError, Ty, Types};
use std::collections::BTreeMap;
use std::ops::Range;

const MOST_ELEMENTS: usize = 12;

/// The cuts of a value: axis, dim, degree.
type Cuts<'a> = &'a [(Axis, usize, usize)];

/// Every list of up to `dims` extents with `product` elements.
fn shapes(product: usize, dims: usize) -> Vec<Vec<usize>> {
    let mut all = vec![];
    if product == 1 {
        all.push(vec![]);
    }
    if dims > 0 {
        for first in (1..=product).filter(|first| product.is_multiple_of(*first)) {
            let rest = shapes(product / first, dims - 1);
            all.extend(rest.into_iter().map(|rest| [&[first], &rest[..]].concat()));
        }
    }
    all
}

/// The extents over all ranks.
fn global(local: &[usize], cuts: Cuts<'_>) -> Vec<usize> {
    let mut extents = local.to_vec();
    cuts.iter().for_each(|&(_, dim, degree)| extents[dim] *= degree);
    extents
}

/// The places, in the row-major order of the whole, of the elements that the rank at `at`, a coordinate per cut, holds.
fn held(local: &[usize], cuts: Cuts<'_>, at: &[usize]) -> Vec<usize> {
    let extents = global(local, cuts);
    // Of one dim the slowest axis makes the outermost cut.
    let mut outermost: Vec<usize> = (0..cuts.len()).collect();
    outermost.sort_by_key(|&cut| std::cmp::Reverse(cuts[cut].0));
    let first = |dim: usize| {
        let of_dim = outermost.iter().filter(|&&cut| cuts[cut].1 == dim);
        of_dim.fold(0, |place, &cut| place * cuts[cut].2 + at[cut]) * local[dim]
    };
    let count = local.iter().product();
    let place = |mut element: usize| {
        let (mut place, mut stride) = (0, 1);
        for dim in (0..local.len()).rev() {
            place += (first(dim) + element % local[dim]) * stride;
            element /= local[dim];
            stride *= extents[dim];
        }
        place
    };
    (0..count).map(place).collect()
}

/// Whether each rank holds the same elements of the reshaped value as of the value.
fn sound(from: &[usize], old: Cuts<'_>, to: &[usize], new: Cuts<'_>) -> bool {
    let mut ranks: Vec<Vec<usize>> = vec![vec![]];
    for &(_, _, degree) in old {
        ranks = ranks.iter().flat_map(|rank| (0..degree).map(move |at| [&rank[..], &[at]].concat())).collect();
    }
    ranks.iter().all(|rank| held(from, old, rank) == held(to, new, rank))
}

fn operand(cuts: Cuts<'_>, ndim: usize) -> Operand<'static> {
    let types: Vec<(Axis, Ty)> = cuts.iter().map(|&(axis, dim, _)| (axis, Ty::Shard(dim))).collect();
    Operand::value("x", Types::new(&types), ndim)
}

fn dim_on(types: Types, axis: Axis) -> usize {
    types.get(axis).unwrap().dim().unwrap()
}

fn pairs(dims: usize) -> impl Iterator<Item = (Vec<usize>, Vec<usize>)> {
    (1..=MOST_ELEMENTS).flat_map(move |product| {
        let all = shapes(product, dims);
        all.clone().into_iter().flat_map(move |from| all.clone().into_iter().map(move |to| (from.clone(), to)))
    })
}

#[test]
fn a_reshape_accepts_what_means_one_thing_and_refuses_what_may_mean_several() {
    let mut met = BTreeMap::new();
    for (from, to) in pairs(5) {
        let kept = usize::from(!from.is_empty() && from.first() == to.first());
        for (dim, degree) in (0..from.len()).flat_map(|dim| [2, 3].map(|degree| (dim, degree))) {
            let cut = |dim| [(Axis::Tp, dim, degree)];
            let may_become = |to: &[usize]| -> Vec<usize> {
                let among = if dim < kept { 0..1 } else { kept..to.len() };
                among.filter(|&new| sound(&from, &cut(dim), to, &cut(new))).collect()
            };
            let (old, new) = (may_become(&from), may_become(&to));
            let what = format!("Shard({dim}) of {from:?} over {degree} ranks to {to:?}");
            let got = rules::reshape("reshape", operand(&cut(dim), from.len()), &from, &to);
            let unchanged = old.iter().position(|&old| old == dim).filter(|_| old.len() == new.len());
            let kind = match (&new[..], unchanged) {
                ([], _) => {
                    assert!(got.unwrap_err().problem.contains("would lie scattered over the new dims"), "{what}");
                    "scattered"
                }
                ([only], _) => {
                    assert_eq!(dim_on(got.unwrap(), Axis::Tp), *only, "{what}");
                    "only"
                }
                (_, Some(at)) => {
                    assert_eq!(dim_on(got.unwrap(), Axis::Tp), new[at], "{what}");
                    "unchanged"
                }
                _ => {
                    let SpmdError { problem, fix, .. } = got.unwrap_err();
                    let any = format!("any of dims {}..{} may be what becomes of it", new[0], new[0] + new.len());
                    assert!(problem.contains(&any), "{what}: {problem}");
                    assert_eq!(fix, "say which with unflatten, flatten, unsqueeze or squeeze");
                    "ambiguous"
                }
            };
            *met.entry(kind).or_insert(0) += 1;
        }
    }
    assert_eq!(met.len(), 4);
    assert!(met.values().all(|&cases| cases > 500), "{met:?}");
}

/// Each of the reshapes that name their dims: accepted if and only if one rank, which has the whole, gets the extents
/// that all ranks have together.
#[test]
fn a_regrouping_accepts_what_has_the_extents_of_one_rank_and_nothing_else() {
    let mut met = [0; 2];
    let all = (1..=MOST_ELEMENTS).flat_map(|product| shapes(product, 4));
    for from in all {
        let runs: Vec<Range<usize>> =
            (0..=from.len()).flat_map(|start| (start..=from.len()).map(move |end| start..end)).collect();
        for dims in runs {
            let elements: usize = from[dims.clone()].iter().product();
            let intos: Vec<Vec<usize>> = match dims.len() {
                0 => vec![vec![1]],        // unsqueeze
                1 => shapes(elements, 3),  // unflatten, squeeze
                _ => vec![vec![elements]], // flatten
            };
            for into in intos {
                let to = [&from[..dims.start], &into[..], &from[dims.end..]].concat();
                for (dim, degree) in (0..from.len()).flat_map(|dim| [2, 3].map(|degree| (dim, degree))) {
                    let cut = |dim| [(Axis::Tp, dim, degree)];
                    let all = global(&from, &cut(dim));
                    let right = (0..to.len()).find(|&new| {
                        let of_one_rank = global(&to, &cut(new));
                        let others = of_one_rank[..dims.start] == all[..dims.start]
                            && of_one_rank[dims.start + into.len()..] == all[dims.end..];
                        others && sound(&from, &cut(dim), &to, &cut(new))
                    });
                    let got =
                        rules::regroup("flatten", operand(&cut(dim), from.len()), &from, dims.clone(), into.len());
                    let what = format!("Shard({dim}) of {from:?} over {degree} ranks, dims {dims:?} to {into:?}");
                    assert_eq!(got.as_ref().ok().map(|types| dim_on(*types, Axis::Tp)), right, "{what}: {got:?}");
                    met[usize::from(right.is_some())] += 1;
                    if let Err(error) = got {
                        let says =
                            if into.is_empty() { "the other ranks have more of it" } else { "would lie scattered" };
                        assert!(error.problem.contains(says), "{what}: {error}");
                    }
                }
            }
        }
    }
    assert!(met.iter().all(|&cases| cases > 1000), "{met:?}");
}

/// Two axes cut different dims, or the same one: what is accepted is sound on all ranks, and what a rule accepts of
/// each axis alone is refused only where one dim would be cut outside in by the faster axis.
#[test]
fn a_reshape_of_a_value_that_two_axes_cut_is_sound() {
    let mut met = [0; 2];
    for (from, to) in pairs(4) {
        let both = (0..from.len()).flat_map(|a| (0..from.len()).map(move |b| (a, b)));
        for ((a, b), degrees) in both.flat_map(|dims| [[2, 2], [2, 3], [3, 2]].map(|degrees| (dims, degrees))) {
            let cuts = |a, b| [(Axis::Tp, a, degrees[0]), (Axis::Dp, b, degrees[1])];
            let alone = |cut| rules::reshape("reshape", operand(&[cut], from.len()), &from, &to).ok();
            let [tp, dp] = cuts(a, b);
            let (Some(tp), Some(dp)) = (alone(tp), alone(dp)) else { continue };
            let new = cuts(dim_on(tp, Axis::Tp), dim_on(dp, Axis::Dp));
            let right = sound(&from, &cuts(a, b), &to, &new);
            let got = rules::reshape("reshape", operand(&cuts(a, b), from.len()), &from, &to);
            let what = format!("Shard({a}) on tp and Shard({b}) on dp, degrees {degrees:?}, of {from:?} to {to:?}");
            assert_eq!(got.is_ok(), right, "{what}: {got:?}");
            met[usize::from(right)] += 1;
            match got {
                Ok(types) => assert_eq!(types, tp.with(Axis::Dp, dp.get(Axis::Dp).unwrap()), "{what}"),
                Err(error) => {
                    assert!(error.problem.ends_with("become one dim, and dp cuts outside of tp"), "{what}: {error}")
                }
            }
        }
    }
    assert!(met[0] > 100 && met[1] > 1000, "{met:?}");
}

/// A micro-batch of no samples, or a rank without tokens, has the types of any other.
#[test]
fn an_extent_of_zero_reshapes_as_an_unknown_one() {
    let reshaped = |dim, from: &[usize], to: &[usize]| {
        rules::reshape("reshape", operand(&[(Axis::Tp, dim, 2)], from.len()), from, to)
            .map(|types| dim_on(types, Axis::Tp))
    };
    for extent in [0, 3] {
        assert_eq!(reshaped(1, &[extent, 8, 32], &[extent, 8, 4, 8]), Ok(1));
        assert_eq!(reshaped(2, &[2, extent, 32], &[2, extent, 4, 8]), Ok(2));
        assert_eq!(reshaped(1, &[2, extent, 32], &[2, extent, 4, 8]), Ok(1));
        assert!(reshaped(2, &[2, extent, 8], &[2, extent, 1, 8]).is_err());
        assert!(reshaped(2, &[2, extent, 8], &[2, extent * 8]).is_err());
    }
}

#[test]
fn what_may_be_a_split_or_an_inserted_dim_is_refused_and_says_why() {
    let reshaped = |dim, from: &[usize], to: &[usize]| {
        rules::reshape("reshape", operand(&[(Axis::Tp, dim, 2)], from.len()), from, to)
    };
    assert_eq!(
        reshaped(2, &[2, 8, 8], &[2, 8, 1, 8]).unwrap_err().to_string(),
        "reshape: on axis tp, dim 2 of x is sharded, and any of dims 2..4 may be what becomes of it: from [2, 8, 8] to [2, 8, 1, 8], the \
         extents of one rank, a dim may have been split, merged, inserted or removed; say which with unflatten, flatten, unsqueeze or squeeze"
    );
    // It gave Shard(2), of global extents [2, 8, 2, 4, 8].
    assert!(reshaped(2, &[2, 8, 4, 8], &[2, 8, 1, 4, 8]).is_err());
    // A micro-batch of one with sequence parallelism, and the first single token of a decoder, were refused.
    assert_eq!(dim_on(reshaped(1, &[1, 8, 32], &[1, 8, 4, 8]).unwrap(), Axis::Tp), 1);
    assert_eq!(dim_on(reshaped(2, &[1, 1, 4, 8], &[1, 1, 32]).unwrap(), Axis::Tp), 2);
    assert_eq!(
        rules::regroup("squeeze", operand(&[(Axis::Tp, 2, 2)], 4), &[2, 8, 1, 8], 2..3, 0).unwrap_err().to_string(),
        "squeeze: on axis tp, dim 2 of x is sharded: the other ranks have more of it; all_gather x along dim 2 first"
    );
    assert_eq!(
        rules::regroup("flatten", operand(&[(Axis::Tp, 3, 2)], 4), &[2, 8, 4, 8], 2..4, 1).unwrap_err().to_string(),
        "flatten: on axis tp, dim 3 of x is sharded, and not the first of dims 2..4, which are merged: a rank's elements would lie scattered \
         over the new dims; transpose dim 3 to the front of those that it is merged with first, or all_gather x along it"
    );
}
