//! Values assembled from slices, shares and replicas, where the whole is known.

use super::*;
use meshwork_core::{DType, Mesh, Types};
use meshwork_engine::program::{self, Op};
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::tape::Padding;

/// A program of one operation with one value, in micro-batches of 2 samples, whose true extent over tp is `extent`
/// where its shards are padded.
pub(in super::super) fn program(mesh: &str, types: &[(Axis, Ty)], local: &[usize], extent: Option<usize>) -> Program {
    let padding = Padding::new(extent.map(|extent| (Axis::Tp, extent)));
    let types = Types::new(types);
    let (shape, dtype) = (Shape::new(local), DType::F32);
    let value = Value { operand: None, part: 0, maker: None, types, padding, shape, dtype };
    let op = Op {
        name: "op",
        layer: "layer".to_owned(),
        stage: 0,
        number: 0,
        params: vec!["w".to_owned()],
        makers: Vec::new(),
        scalars: Vec::new(),
        values: vec![value],
    };
    let mesh: Mesh = mesh.parse().unwrap();
    Program {
        run: program::Program { mesh, ops: vec![op], constants: Vec::new() },
        parameters: Vec::new(),
        samples: 2,
        batch: 8,
        stored: DType::F32,
    }
}

/// The records of all ranks in each micro-batch, with the elements `value(coords, first sample, place)`.
pub(in super::super) fn records(
    program: &Program,
    micros: usize,
    value: impl Fn(Coords, u64, usize) -> f32,
) -> Vec<Record> {
    let shape = program.run.ops[0].values[0].shape;
    let count = shape.count();
    let on = |rank: usize, micro: usize| {
        let coords = program.run.mesh.coords(rank);
        let first_sample = (coords.get(Axis::Dp) * micros + micro) as u64 * 2;
        let values = (0..count).map(|place| value(coords, first_sample, place)).collect();
        Record { rank, micro, first_sample, dims: shape.to_vec(), values: Values::F32(values) }
    };
    // Not in the order of the ranks.
    let ranks = (0..program.run.mesh.world_size()).rev();
    ranks.flat_map(|rank| (0..micros).map(move |micro| (rank, micro))).map(|(rank, micro)| on(rank, micro)).collect()
}

fn numbers(piece: &GlobalPiece) -> &[f32] {
    f32::slice(&piece.values).unwrap()
}

#[test]
fn slices_join_and_fall_into_samples() {
    // [2, 3, 2] of [8, 6, 2]: element (sample, row, column) is 100·sample + 10·row + column.
    let program = program("dp=2,tp=2", &[(Axis::Tp, Ty::Shard(1)), (Axis::Dp, Ty::Shard(0))], &[2, 3, 2], None);
    let records = records(&program, 2, |coords, first, place| {
        let (sample, row, column) = (first as usize + place / 6, coords.get(Axis::Tp) * 3 + place / 2 % 3, place % 2);
        (100 * sample + 10 * row + column) as f32
    });
    let (pieces, differ) = assemble(&program, (0, 0), &records, &TokenPlaces::default());
    assert_eq!(differ, None);
    assert!(pieces.keys().copied().eq((0..8).map(Unit::Sample)));
    for (unit, piece) in &pieces {
        let Unit::Sample(sample) = *unit else { unreachable!() };
        let wanted: Vec<f32> = (0..12).map(|at| (100 * sample as usize + 10 * (at / 2) + at % 2) as f32).collect();
        assert_eq!((numbers(piece), &piece.dims[..]), (&wanted[..], &[6, 2][..]), "sample {sample}");
        assert_eq!((piece.dp, piece.micro), (sample as usize / 4, sample as usize / 2 % 2));
    }
}

#[test]
fn a_dim_cut_twice_joins_as_it_was_cut() {
    let types = [(Axis::Tp, Ty::Shard(1)), (Axis::Cp, Ty::Shard(1)), (Axis::Dp, Ty::Shard(0))];
    let program = program("tp=2,cp=3,dp=1", &types, &[2, 2], None);
    // The cut over cp, the slower axis, is the outer one.
    let records = records(&program, 1, |coords, _, place| {
        ((coords.get(Axis::Cp) * 2 + coords.get(Axis::Tp)) * 2 + place % 2) as f32
    });
    let (pieces, _) = assemble(&program, (0, 0), &records, &TokenPlaces::default());
    let wanted: Vec<f32> = (0..12).map(|at| at as f32).collect();
    assert_eq!(numbers(&pieces[&Unit::Sample(1)]), wanted);
}

#[test]
fn shares_add_up_in_the_tree_of_reductions() {
    let shares = [1e8f32, 3.3, -1e8, 7.7, 0.1];
    let program = program("tp=5,dp=1", &[(Axis::Tp, Ty::Partial), (Axis::Dp, Ty::Shard(0))], &[2], None);
    let records = records(&program, 1, |coords, _, _| shares[coords.get(Axis::Tp)]);
    let (pieces, _) = assemble(&program, (0, 0), &records, &TokenPlaces::default());
    let [a, b, c, d, e] = shares;
    assert_eq!(numbers(&pieces[&Unit::Sample(0)]), [((a + b) + (c + d)) + e]);
    assert_ne!(((a + b) + (c + d)) + e, shares.iter().sum::<f32>(), "the values must tell orders apart");
}

#[test]
fn padding_is_cut_off() {
    let types = [(Axis::Tp, Ty::Shard(1)), (Axis::Dp, Ty::Shard(0))];
    for (extent, wanted) in [(Some(7), 7), (None, 8)] {
        let program = program("tp=4,dp=1", &types, &[2, 2], extent);
        let records = records(&program, 1, |coords, _, place| (coords.get(Axis::Tp) * 2 + place % 2) as f32);
        let (pieces, _) = assemble(&program, (0, 0), &records, &TokenPlaces::default());
        let numbers = numbers(&pieces[&Unit::Sample(1)]);
        assert_eq!(numbers, (0..wanted).map(|at| at as f32).collect::<Vec<_>>());
        assert_eq!(pieces[&Unit::Sample(1)].dims, [wanted]);
    }
}

#[test]
fn what_has_no_samples_stays_whole_and_values_of_their_own_lie_side_by_side() {
    // One number per micro-batch, as of a loss.
    let sums = program("dp=2", &[(Axis::Dp, Ty::Partial)], &[1], None);
    let records_of = |program: &Program| records(program, 2, |_, first, place| first as f32 + place as f32);
    let (pieces, _) = assemble(&sums, (0, 0), &records_of(&sums), &TokenPlaces::default());
    let units: Vec<Unit> = pieces.keys().copied().collect();
    assert_eq!(units, [0, 2, 4, 6].map(|first| Unit::Micro(first, 2)));
    // Two numbers per micro-batch, though that is its number of samples.
    let two = program("dp=2", &[(Axis::Dp, Ty::Partial)], &[2], None);
    let (pieces, _) = assemble(&two, (0, 0), &records_of(&two), &TokenPlaces::default());
    assert!(pieces.keys().copied().eq([0, 2, 4, 6].map(|first| Unit::Micro(first, 2))));
    // One number per sample.
    let each = program("dp=2", &[(Axis::Dp, Ty::Shard(0))], &[2], None);
    let (pieces, _) = assemble(&each, (0, 0), &records_of(&each), &TokenPlaces::default());
    assert!(
        pieces
            .iter()
            .map(|(&unit, piece)| (unit, numbers(piece)[0]))
            .eq((0..8).map(|at| (Unit::Sample(at), at as f32)))
    );
    // Whole over dp: one value, of all dp ranks together.
    let whole = program("dp=2", &[(Axis::Dp, Ty::Invariant)], &[2], None);
    let (pieces, differ) =
        assemble(&whole, (0, 0), &records(&whole, 1, |_, _, place| place as f32), &TokenPlaces::default());
    assert_eq!((pieces.keys().copied().collect::<Vec<_>>(), differ), (vec![Unit::Micro(0, 2)], None));

    let varying = program("tp=3,dp=1", &[(Axis::Tp, Ty::Varying), (Axis::Dp, Ty::Partial)], &[1], None);
    let (pieces, _) = assemble(
        &varying,
        (0, 0),
        &records(&varying, 1, |coords, _, _| coords.get(Axis::Tp) as f32),
        &TokenPlaces::default(),
    );
    let piece = &pieces[&Unit::Micro(0, 2)];
    assert_eq!((numbers(piece), &piece.dims[..]), (&[0.0, 1.0, 2.0][..], &[3, 1][..]));
}

#[test]
fn replicas_that_differ_are_told_with_ranks_and_place() {
    let types = [(Axis::Tp, Ty::Invariant), (Axis::Dp, Ty::Shard(0))];
    let program = program("tp=3,dp=2", &types, &[2, 4], None);
    // Rank 5 is tp rank 2, dp rank 1.
    let records = records(&program, 2, |coords, first, place| {
        let wrong = coords == program.run.mesh.coords(5) && first == 6 && place == 6;
        if wrong { 2.0 } else { 1.0 }
    });
    let (pieces, differ) = assemble(&program, (0, 0), &records, &TokenPlaces::default());
    let found = differ.unwrap();
    assert_eq!((found.ranks, found.unit, &found.index[..]), ([3, 5], Some(Unit::Sample(7)), &[7, 2][..]));
    assert_eq!((found.values, found.differing, found.micro), ([1.0, 2.0], 1, Some(1)));
    assert_eq!(numbers(&pieces[&Unit::Sample(7)]), [1.0; 4], "the first replica goes on");
}

#[test]
fn a_parameter_is_put_together_from_pieces() {
    // [2, 3], columns cut over two ranks with padding on the second; rank 2 is a replica of rank 1.
    let dims = Shape::new(&[2, 3]);
    let held = |rank: usize, columns: std::ops::Range<usize>, values: &[f32]| -> Held {
        let slice = LocalSlice { stored: Shape::new(&[2, 2]), ranges: vec![0..2, columns] };
        let vectors = vec![Vec::new(), vec![param::Piece { rank, dims, slice, values: values.to_vec() }]];
        Held { rank, vectors, sets: Vec::new() }
    };
    let all = [
        held(0, 0..2, &[0.0, 1.0, 3.0, 4.0]),
        held(1, 2..3, &[2.0, 9.0, 5.0, 9.0]),
        held(2, 2..3, &[2.0, 8.0, 5.5, 8.0]),
    ];
    let (found, differ) = whole(&all[..2], 1, dims).unwrap();
    assert_eq!((found, differ), ((0..6).map(|at| Some(at as f32)).collect(), None));
    let (found, differ) = whole(&all, 1, dims).unwrap();
    let differ = differ.unwrap();
    assert_eq!((differ.ranks, &differ.index[..], differ.values), ([1, 2], &[1, 2][..], [5.0, 5.5]));
    assert_eq!(found[5], Some(5.0));
    let (found, _) = whole(&all[1..2], 1, dims).unwrap();
    assert_eq!(found.iter().flatten().count(), 2, "what no rank holds is missing");
    assert_eq!(whole(&all, 0, dims), None, "a vector that no rank has");
}
