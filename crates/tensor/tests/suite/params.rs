//! Declarations, and the slices and pieces of parameters; the axes over which gradients are summed.

use meshwork_core::{Axis, Ty, Types};
use meshwork_tensor::param::{Conflict, LocalSlice, Matrices, ParamGroup, Piece, assemble, reduction_axes};
use meshwork_tensor::{Declarations, Init, Placement, Role, Shape};
use std::ops::Range;

const INIT: Init = Init::Normal { std: 0.02 };

fn table(dim: usize) -> (&'static str, [usize; 2], Placement) {
    ("wte.weight", [256, 128], Placement::replicated().shard(Axis::Tp, dim))
}

#[test]
fn layers_that_tie_a_parameter_must_agree() {
    let mut all = Declarations::new();
    let (name, dims, vocab) = table(0);
    let first = all.tie(name, &dims, vocab.clone(), Role::Weight, INIT).unwrap();
    assert_eq!(all.undeclared().map(|spec| &*spec.name).collect::<Vec<_>>(), [name]);
    assert_eq!(all.declare(name, &dims, vocab.clone(), Role::Weight, INIT).unwrap(), first, "in any order");
    assert_eq!(all.tie(name, &dims, vocab, Role::Weight, INIT).unwrap(), first);
    assert_eq!(all.undeclared().count(), 0);
    let (_, _, hidden) = table(1);
    assert_eq!(
        all.tie(name, &dims, hidden, Role::Weight, INIT).unwrap_err().to_string(),
        "parameter wte.weight is tied to itself as [256, 128] Shard(0) on tp and as [256, 128] Shard(1) on tp: tied parameters \
         agree in everything"
    );
}

#[test]
fn a_name_is_declared_once() {
    let mut all = Declarations::new();
    let (name, dims, vocab) = table(0);
    all.declare(name, &dims, vocab.clone(), Role::Weight, INIT).unwrap();
    assert_eq!(
        all.declare(name, &dims, vocab, Role::Weight, INIT).unwrap_err().to_string(),
        "parameter wte.weight: two layers declare this name: they would share it on one stage, and hold one each when cut apart; \
         give each layer a name of its own, or tie them with Declarations::tie in the second"
    );
}

#[test]
fn matrices_have_rows_and_columns() {
    let refused = |stacked, columns| {
        let (whole, group) = (Placement::replicated(), ParamGroup::hidden(Matrices::new(stacked, columns)));
        Declarations::new().declare_in("w", &[2, 4, 4], whole, Role::Weight, INIT, group).unwrap_err().to_string()
    };
    assert_eq!(
        refused(1, 2),
        "parameter w: 1 dims number its matrices and 2 are columns, of 3 dims; leave a dim or more for the rows, and of a weight \
         have one or more for the columns"
    );
    assert!(refused(1, 0).contains("0 are columns"));
}

#[test]
fn an_axis_cuts_one_dim() {
    let both = Placement::replicated().shard(Axis::Tp, 1).shard(Axis::Tp, 0);
    assert_eq!(
        Declarations::new().declare("w", &[4, 4], both, Role::Weight, INIT).unwrap_err().to_string(),
        "parameter w: tp cuts dim 0 and dim 1: a rank would hold the blocks of a diagonal alone; cut one dim over tp, and the \
         other over another axis"
    );
    let none = Placement::replicated().shard(Axis::Tp, 2);
    assert_eq!(
        Declarations::new().declare("w", &[4, 4], none, Role::Weight, INIT).unwrap_err().to_string(),
        "parameter w: tp cuts dim 2, and it has only 2 dims; cut a dim below 2"
    );
}

/// A parameter without dims, such as the temperature of a loss, panicked.
#[test]
fn a_number_is_one_run() {
    let (mut runs, number) = (Vec::new(), LocalSlice { stored: Shape::new(&[]), ranges: Vec::new() });
    number.for_each_run(Shape::new(&[]), |global, local| runs.push((global, local)));
    assert_eq!(runs, [(0, 0..1)]);
}

/// Every range of arrays of up to four dims, padded ones too: the boxes lie one after the other, and a piece of
/// each holds exactly the elements of the range.
#[test]
fn boxes_are_the_elements_of_a_range_once_and_in_order() {
    let slice =
        |stored: &[usize], ranges: &[Range<usize>]| LocalSlice { stored: Shape::new(stored), ranges: ranges.to_vec() };
    for (dims, slice) in [
        (vec![7], slice(&[4], std::slice::from_ref(&(3..7)))),
        (vec![4, 3], slice(&[4, 3], &[0..4, 0..3])),
        (vec![2, 5, 3], slice(&[2, 3, 3], &[0..2, 2..5, 0..3])),
        (vec![2, 5, 3], slice(&[2, 3, 3], &[0..2, 3..5, 0..3])), // a row of padding in each
        (vec![2, 3, 2, 2], slice(&[2, 3, 2, 2], &[0..2, 0..3, 0..2, 0..2])),
    ] {
        let (dims, count) = (Shape::new(&dims), slice.stored.count());
        let whole: Vec<f32> = (1..=dims.count()).map(|element| element as f32).collect();
        let here = Piece::cut(0, dims, slice.clone(), &whole).values;
        for (start, end) in (0..=count).flat_map(|start| (start..=count).map(move |end| (start, end))) {
            let boxes = slice.boxes(start..end);
            assert!(boxes.len() <= 2 * dims.len().max(1), "{start}..{end} of {slice:?}: {boxes:?}");
            let pieces: Vec<Piece> = boxes.iter().map(|(part, _)| Piece::cut(0, dims, part.clone(), &whole)).collect();
            let values: Vec<f32> = pieces.iter().flat_map(|piece| piece.values.clone()).collect();
            assert_eq!(values, here[start..end], "{start}..{end} of {slice:?}");
            assert!(
                boxes.iter().try_fold(start, |at, (_, place)| (at == place.start).then_some(place.end)) == Some(end)
            );
            let (assembled, conflict) = assemble(dims, &pieces);
            let held = assembled.into_iter().flatten().count();
            assert_eq!((held, conflict), (here[start..end].iter().filter(|&&value| value != 0.0).count(), None));
        }
    }
}

fn piece(rank: usize, range: Range<usize>, values: &[f32]) -> Piece {
    let slice = LocalSlice { stored: Shape::new(&[values.len()]), ranges: vec![range] };
    Piece { rank, dims: Shape::new(&[4]), slice, values: values.to_vec() }
}

#[test]
fn what_nobody_holds_is_missing() {
    let (whole, conflict) = assemble(Shape::new(&[4]), &[piece(0, 1..3, &[5.0, 6.0])]);
    assert_eq!((whole, conflict), (vec![None, Some(5.0), Some(6.0), None], None));
}

#[test]
fn the_first_element_in_conflict_is_told_with_its_holders() {
    let pieces = [piece(3, 1..3, &[5.0, 6.0]), piece(5, 0..4, &[1.0, 7.0, 8.0, -0.0]), piece(6, 3..4, &[0.0])];
    let (_, conflict) = assemble(Shape::new(&[4]), &pieces);
    assert_eq!(conflict, Some(Conflict { element: 1, ranks: [3, 5], values: [5.0, 7.0], count: 2 }));
}

#[test]
fn gradients_are_summed_where_the_parameter_was_read_replicate() {
    let read = |dp, tp| Types::new(&[(Axis::Dp, dp), (Axis::Tp, tp)]);
    assert_eq!(reduction_axes(read(Ty::Replicate, Ty::Shard(0))), [Axis::Dp]);
    assert_eq!(reduction_axes(read(Ty::Replicate, Ty::Replicate)), [Axis::Dp, Axis::Tp]);
    assert_eq!(reduction_axes(read(Ty::Invariant, Ty::Replicate)), [Axis::Tp]);
    assert_eq!(reduction_axes(Types::NONE), []);
}
