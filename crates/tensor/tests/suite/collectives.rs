//! Every collective on worlds of rank threads: values and gradients equal a naive oracle that sees all ranks, exactly,
//! and forward and backward are adjoint.

use crate::common::naive::{Array, concat, max, pad, slice, sum};
use crate::common::{NoParams, dot, input, integers, on_mesh, tape_of, to_f64};
use meshwork_core::{Axes, Axis, Mesh, Rank, Ty, Types};
use meshwork_tensor::meta::Meta;
use meshwork_tensor::tape::{Seed, Weights};
use meshwork_tensor::{Error, Result, Tensor, Var};
use std::sync::Arc;

type Run = Box<dyn Fn(&Var, Axes) -> Result<Var> + Sync>;
type Oracle = Box<dyn Fn(&[Array], usize) -> Array + Sync>;

/// One collective: its types, the operation, and its expected effect on the values and gradients of the ranks of an
/// axis, or of several.
struct Case {
    name: String,
    from: Ty,
    to: Ty,
    run: Run,
    forward: Oracle,
    backward: Oracle,
}

fn case(
    name: impl Into<String>,
    (from, to): (Ty, Ty),
    run: impl Fn(&Var, Axes) -> Result<Var> + Sync + 'static,
    forward: impl Fn(&[Array], usize) -> Array + Sync + 'static,
    backward: impl Fn(&[Array], usize) -> Array + Sync + 'static,
) -> Case {
    let (run, forward, backward) = (Box::new(run), Box::new(forward), Box::new(backward));
    Case { name: name.into(), from, to, run, forward, backward }
}

/// Every extent is divided by 2, 3 and 4.
const SHAPE: [usize; 3] = [12, 36, 24];

fn cases() -> Vec<Case> {
    use Ty::{Invariant as I, Partial as P, Replicate as R, Shard as S, Varying as V};
    let own = |parts: &[Array], me: usize| parts[me].clone();
    let total = |parts: &[Array], _: usize| sum(parts);
    let mut cases = vec![
        case("copy", (I, R), |x, axis| x.copy(axis), own, total),
        case("all_reduce", (P, I), |x, axis| x.all_reduce(axis), total, own),
        case("all_reduce_replicate", (P, R), |x, axis| x.all_reduce_replicate(axis), total, total),
        case("as_partial", (V, P), |x, axis| x.as_partial(axis), own, own),
    ];
    for d in 0..SHAPE.len() {
        let part = move |parts: &[Array], me: usize| slice(&parts[me], d, me, parts.len());
        let part_of_sum = move |parts: &[Array], me: usize| slice(&sum(parts), d, me, parts.len());
        let joined = move |parts: &[Array], _: usize| concat(parts, d);
        let padded = move |parts: &[Array], me: usize| pad(&parts[me], d, me, parts.len());
        let name = |collective: &str| format!("{collective} of dim {d}");
        cases.extend([
            case(name("all_gather"), (S(d), R), move |x, axis| x.all_gather(axis, d), joined, part_of_sum),
            case(name("all_gather_invariant"), (S(d), I), move |x, axis| x.all_gather_invariant(axis, d), joined, part),
            case(name("reduce_scatter"), (P, S(d)), move |x, axis| x.reduce_scatter(axis, d), part_of_sum, joined),
            case(name("split"), (I, S(d)), move |x, axis| x.split(axis, d), part, joined),
            case(name("slice"), (R, S(d)), move |x, axis| x.slice(axis, d), part, padded),
        ]);
        for to in (0..SHAPE.len()).filter(|&to| to != d) {
            let exchange = |gathered: usize, cut: usize| {
                move |parts: &[Array], me: usize| slice(&concat(parts, gathered), cut, me, parts.len())
            };
            cases.push(case(
                format!("all_to_all of dims {d} and {to}"),
                (S(d), S(to)),
                move |x, axis| x.all_to_all(axis, d, to),
                exchange(d, to),
                exchange(to, d),
            ));
        }
    }
    cases
}

/// The part of a value of type `ty` that the rank at place `at` of the axes' group holds: its own, or the same as every
/// other rank.
fn held(name: &str, shape: &[usize], ty: Ty, rank: &Rank, axes: Axes, at: usize) -> Array {
    // Ranks of other groups hold other values: on the other axes everything is Varying.
    let group = rank.group_over(&axes).world_ranks()[0];
    let key = match ty {
        Ty::Replicate | Ty::Invariant => format!("{name} {group}"),
        Ty::Shard(_) | Ty::Varying | Ty::Partial => format!("{name} {group} {at}"),
    };
    Array { shape: shape.to_vec(), data: integers(&key, shape.iter().product()) }
}

fn array(tensor: &Tensor) -> Array {
    Array { shape: tensor.shape().to_vec(), data: to_f64(tensor) }
}

/// `(⟨A x, g⟩, ⟨x, Aᵀ g⟩)` of this rank, counted by types: Invariant values once, everything else on every rank.
fn check(case: &Case, rank: &Arc<Rank>, axes: Axes) -> (f64, f64) {
    let (n, me) = (rank.group_over(&axes).size(), rank.group_over(&axes).rank());
    let varying = Types::all(rank.mesh(), Ty::Varying);
    let types = |ty: Ty| axes.iter().fold(varying, |types, &axis| types.with(axis, ty));
    let name = format!("{} over {axes:?} of {}, rank {}", case.name, rank.mesh(), rank.world_rank());

    let xs: Vec<Array> = (0..n).map(|at| held("x", &SHAPE, case.from, rank, axes, at)).collect();
    let tape = tape_of(rank);
    let x = input(&tape, &xs[me].data, &SHAPE, types(case.from));
    let y = (case.run)(&x, axes).unwrap();
    assert_eq!(y.types(), types(case.to), "{name}: types");
    assert_eq!(array(y.tensor()), (case.forward)(&xs, me), "{name}: values");

    let gs: Vec<Array> = (0..n).map(|at| held("g", &y.shape(), case.to.dual(), rank, axes, at)).collect();
    let seed = Tensor::from_slice(tape.device(), &gs[me].data, y.shape()).unwrap();
    tape.backward(&y, Seed::typed(seed, y.types().dual()), Weights::Now, &mut NoParams).unwrap();
    let dx = array(&tape.take_grad(&x).unwrap());
    assert_eq!(dx, (case.backward)(&gs, me), "{name}: gradient");

    let counts = |ty: Ty| if ty == Ty::Invariant && me > 0 { 0.0 } else { 1.0 };
    (counts(case.to) * dot(&to_f64(y.tensor()), &gs[me].data), counts(case.from) * dot(&xs[me].data, &dx.data))
}

fn check_all<A: Into<Axes> + Copy>(mesh: &str, axes: &[A]) {
    let cases = cases();
    let axes: Vec<Axes> = axes.iter().map(|&axes| axes.into()).collect();
    let sums = on_mesh(mesh, |rank| {
        let pairs = cases.iter().flat_map(|case| axes.iter().map(|&axes| check(case, &rank, axes)));
        pairs.collect::<Vec<_>>()
    });
    let labels = cases.iter().flat_map(|case| axes.iter().map(move |axes| format!("{} over {axes:?}", case.name)));
    for (i, label) in labels.enumerate() {
        let left: f64 = sums.iter().map(|rank| rank[i].0).sum();
        let right: f64 = sums.iter().map(|rank| rank[i].1).sum();
        assert_eq!(left, right, "{label} of {mesh}: ⟨A x, g⟩ and ⟨x, Aᵀ g⟩");
        assert_ne!(left, 0.0, "{label} of {mesh}: nothing was compared");
    }
}

#[test]
fn two_ranks() {
    check_all("tp=2", &[Axis::Tp]);
}

#[test]
fn three_ranks() {
    check_all("tp=3", &[Axis::Tp]);
}

#[test]
fn four_ranks() {
    check_all("dp=4", &[Axis::Dp]);
}

#[test]
fn each_axis_of_a_mesh_of_two() {
    check_all("tp=2,dp=2", &[Axis::Tp, Axis::Dp]);
    check_all("tp=3,dp=2", &[Axis::Tp, Axis::Dp]);
}

#[test]
fn two_axes_at_once() {
    check_all("dp=4,ep=2", &[Axis::DATA]);
    check_all("tp=2,dp=2", &[[Axis::Dp, Axis::Tp]]);
    check_all("dp=2,ep=1", &[Axis::DATA]); // one of degree 1
}

#[test]
fn on_one_rank_every_collective_is_the_identity_and_says_nothing() {
    on_mesh("tp=1", |rank| {
        for case in cases() {
            check(&case, &rank, Axis::Tp.into());
            let x = held("x", &SHAPE, case.from, &rank, Axis::Tp.into(), 0);
            assert_eq!((case.forward)(std::slice::from_ref(&x), 0), x, "{}", case.name);
        }
        assert!(rank.log().drain().is_empty());
    });
}

#[test]
fn the_maximum_is_taken_over_the_ranks_and_lets_no_gradient_through() {
    for ty in [Ty::Varying, Ty::Shard(1)] {
        on_mesh("tp=3,dp=2", |rank| {
            let shape = [2, 3];
            let xs: Vec<Array> = (0..3).map(|at| held("x", &shape, ty, &rank, Axis::Tp.into(), at)).collect();
            let tape = tape_of(&rank);
            let types = Types::all(rank.mesh(), Ty::Varying);
            let x = input(&tape, &xs[rank.coords().get(Axis::Tp)].data, &shape, types.with(Axis::Tp, ty));
            let y = x.max_reduce(Axis::Tp).unwrap();
            assert_eq!(y.types(), types.with(Axis::Tp, Ty::Invariant));
            assert_eq!(array(y.tensor()), max(&xs));
            assert_eq!(array(x.tensor()), xs[rank.coords().get(Axis::Tp)], "the input is left as it was");
            let seed = y.tensor().clone();
            let error = tape.backward(&y, seed, Weights::Now, &mut NoParams).unwrap_err();
            assert_eq!(error.to_string(), "backward: the output depends on nothing that needs a gradient");
        });
    }
}

#[test]
fn a_gradient_that_is_used_twice_is_not_reduced_in_place() {
    on_mesh("tp=2", |rank| {
        let tape = tape_of(&rank);
        let x = input(&tape, &[1.0, 2.0], &[2], Types::all(rank.mesh(), Ty::Invariant));
        // Both terms get the same gradient tensor, which copy's backward sums over the ranks.
        let y = x.copy(Axis::Tp).unwrap();
        let sum = y.add(&x.copy(Axis::Tp).unwrap()).unwrap();
        let seed = Tensor::from_slice(tape.device(), &[1.0, 10.0], [2]).unwrap();
        tape.backward(&sum, Seed::typed(seed.clone(), sum.types().dual()), Weights::Now, &mut NoParams).unwrap();
        assert_eq!(to_f64(&tape.take_grad(&x).unwrap()), [4.0, 40.0]);
        assert_eq!(to_f64(&seed), [1.0, 10.0]);
    });
}

/// A shapes-only value on rank 0 of a mesh, for refusals.
fn value(mesh: &str, types: &[(Axis, Ty)], shape: &[usize]) -> Var {
    let rank = Arc::new(Rank::recording(&mesh.parse::<Mesh>().unwrap(), 0).unwrap());
    input(&crate::common::tape_on(&rank, Meta::device()), &vec![0.0; shape.iter().product()], shape, Types::new(types))
}

#[test]
fn every_collective_refuses_every_other_type() {
    for (degree, case) in ["tp=1", "tp=2"].into_iter().flat_map(|degree| cases().into_iter().map(move |c| (degree, c)))
    {
        let all = [Ty::Replicate, Ty::Invariant, Ty::Shard(0), Ty::Shard(1), Ty::Shard(2), Ty::Varying, Ty::Partial];
        for ty in all.into_iter().filter(|&ty| ty != case.from) {
            let error = (case.run)(&value(degree, &[(Axis::Tp, ty)], &SHAPE), Axis::Tp.into()).unwrap_err().to_string();
            let begins = format!("on axis tp, x is {ty} and ");
            assert!(error.contains(&begins) && error.contains(&format!(" takes {}; ", case.from)), "{error}");
        }
        let error =
            (case.run)(&value("dp=2", &[(Axis::Dp, case.from)], &SHAPE), Axis::Tp.into()).unwrap_err().to_string();
        assert!(error.ends_with("on axis tp, x does not lie on this axis; use a mesh that has it"), "{error}");
    }
}

#[test]
fn an_all_to_all_from_a_dim_to_itself_is_refused() {
    for degree in ["tp=1", "tp=2"] {
        let x = value(degree, &[(Axis::Tp, Ty::Shard(1))], &SHAPE);
        assert_eq!(
            x.all_to_all(Axis::Tp, 1, 1).unwrap_err().to_string(),
            "all_to_all: on axis tp, dim 1 would be gathered and cut at once; drop this all_to_all: x is Shard(1) already"
        );
    }
}

#[test]
fn a_dim_that_does_not_exist_is_refused() {
    let x = value("tp=2", &[(Axis::Tp, Ty::Invariant)], &SHAPE);
    let error = x.split(Axis::Tp, 3).unwrap_err().to_string();
    assert_eq!(error, "split: on axis tp, x has 3 dims and no dim 3; name a dim below 3");
}

/// [2, 12], each element its place.
fn places() -> Vec<f64> {
    (0..24).map(f64::from).collect()
}

/// The columns of [`places`] that the rank with this number of so many holds.
fn columns(rank: usize, ranks: usize) -> Vec<f64> {
    let held = 12 / ranks;
    (0..2).flat_map(|row| (0..held).map(move |column| (row * 12 + rank * held + column) as f64)).collect()
}

#[test]
fn cuts_of_one_dim_nest_with_the_slowest_axis_outermost_and_are_undone_from_the_inside() {
    on_mesh("tp=2,cp=3", |rank| {
        let tape = tape_of(&rank);
        let (tp, cp) = (rank.coords().get(Axis::Tp), rank.coords().get(Axis::Cp));
        let x = input(&tape, &places(), &[2, 12], Types::all(rank.mesh(), Ty::Invariant));
        let outer = x.split(Axis::Cp, 1).unwrap();
        assert_eq!(to_f64(outer.tensor()), columns(cp, 3));
        let inner = outer.split(Axis::Tp, 1).unwrap();
        let at_once = x.split([Axis::Tp, Axis::Cp], 1).unwrap();
        for cut in [&inner, &at_once] {
            assert_eq!(to_f64(cut.tensor()), columns(cp * 2 + tp, 6));
            let in_turn = cut.all_gather_invariant(Axis::Tp, 1).unwrap();
            assert_eq!(to_f64(in_turn.tensor()), columns(cp, 3));
            assert_eq!(to_f64(in_turn.all_gather_invariant(Axis::Cp, 1).unwrap().tensor()), places());
            assert_eq!(to_f64(cut.all_gather_invariant([Axis::Cp, Axis::Tp], 1).unwrap().tensor()), places());
        }
        let refused = |result: Result<Var>| result.unwrap_err().to_string();
        assert_eq!(
            refused(inner.all_gather(Axis::Cp, 1)),
            "all_gather: on axis cp, dim 1 is also cut over tp, inside of the cut over cp; gather it over tp first, or over both at once"
        );
        assert_eq!(
            refused(x.split(Axis::Tp, 1).unwrap().split(Axis::Cp, 1)),
            "split: on axis cp, dim 1 is cut over tp, and a cut over cp is outside of that; gather it over tp first, or cut it over cp \
             before tp"
        );
        assert!(refused(inner.all_to_all(Axis::Cp, 1, 0)).contains("inside of the cut over cp"));
    });
}

/// Each of dp and ep said to gather over the other first, though one has degree 1.
#[test]
fn an_axis_of_degree_1_is_never_in_the_way() {
    for (mesh, wide) in [("dp=2,ep=1", Axis::Dp), ("dp=2,ep=2", Axis::Ep), ("dp=1", Axis::Dp)] {
        on_mesh(mesh, |rank| {
            let types = Axis::DATA
                .into_iter()
                .fold(Types::all(rank.mesh(), Ty::Invariant), |types, axis| types.with(axis, Ty::Shard(0)));
            let (at, ranks) = (rank.data_group().rank(), rank.data_group().size());
            let samples: Vec<f64> = places().chunks(24 / ranks).nth(at).unwrap().to_vec();
            let tape = tape_of(&rank);
            let x = input(&tape, &samples, &[12 / ranks, 2], types);
            let all = x.all_gather(wide, 0).unwrap();
            assert_eq!((to_f64(all.tensor()), all.types()), (places(), types.with(wide, Ty::Replicate)));
            for axis in Axis::DATA.into_iter().filter(|axis| *axis != wide) {
                assert_eq!(to_f64(x.all_gather(axis, 0).unwrap().tensor()), samples, "the identity over {axis}");
            }
            let all = x.all_gather(Axis::DATA, 0).unwrap();
            assert_eq!(to_f64(all.tensor()), places());
            assert_eq!(to_f64(all.slice(Axis::DATA, 0).unwrap().tensor()), samples);
        });
    }
}

#[test]
fn samples_are_gathered_in_the_order_of_the_batch_over_both_data_axes() {
    let refused = on_mesh("dp=4,ep=2", |rank| {
        let types = Types::new(&[(Axis::Ep, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0))]);
        let at = rank.mesh().data_rank(rank.coords());
        let tape = tape_of(&rank);
        let x = input(&tape, &places()[6 * at..6 * at + 6], &[3, 2], types);
        let in_turn = x.all_gather(Axis::Ep, 0).unwrap().all_gather(Axis::Dp, 0).unwrap();
        for all in [in_turn, x.all_gather(Axis::DATA, 0).unwrap()] {
            assert_eq!(to_f64(all.tensor()), places());
        }
        x.all_gather(Axis::Dp, 0).unwrap_err().to_string()
    });
    assert_eq!(
        refused[0],
        "all_gather: on axis dp, dim 0 is also cut over ep, inside of the cut over dp; gather it over ep first, or over both at once"
    );
}

#[test]
fn axes_of_other_types_are_refused_and_axes_that_the_mesh_lacks_count_for_nothing() {
    let x = value("dp=4,ep=2", &[(Axis::Ep, Ty::Invariant), (Axis::Dp, Ty::Shard(0))], &SHAPE);
    let error = x.all_gather(Axis::DATA, 0).unwrap_err().to_string();
    assert!(error.starts_with("all_gather: on axis ep, x is Invariant and all_gather takes Shard(0)"), "{error}");
    let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Dp, 2)]).unwrap(), 0).unwrap());
    let tape = crate::common::tape_on(&rank, Meta::device());
    let x = input(&tape, &[0.0; 4], &[2, 2], Types::new(&[(Axis::Dp, Ty::Shard(0))]));
    assert_eq!(x.all_gather(Axis::DATA, 0).unwrap().shape()[..], [4, 2]);
    let error = x.all_gather(Axis::Tp, 0).unwrap_err().to_string();
    assert_eq!(error, "all_gather: on axis tp, x does not lie on this axis; use a mesh that has it");
}

#[test]
fn a_dim_that_the_degree_does_not_divide_cannot_be_cut() {
    let refused = |ty: Ty, run: fn(&Var) -> Result<Var>| {
        let error = run(&value("tp=3", &[(Axis::Tp, ty)], &[2, 4])).unwrap_err();
        assert!(matches!(error, Error::Placement { dim: 1, extent: 4, axis: Axis::Tp, degree: 3, .. }), "{error}");
        error.to_string()
    };
    refused(Ty::Partial, |x| x.reduce_scatter(Axis::Tp, 1));
    refused(Ty::Replicate, |x| x.slice(Axis::Tp, 1));
    refused(Ty::Shard(0), |x| x.all_to_all(Axis::Tp, 0, 1));
    assert_eq!(
        refused(Ty::Invariant, |x| x.split(Axis::Tp, 1)),
        "split: dim 1 of extent 4 cannot be cut over tp=3: the degree must divide it: 1, 2, 4"
    );
}
