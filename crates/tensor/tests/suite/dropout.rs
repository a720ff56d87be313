//! Dropout is by global position: the dropped elements do not depend on the mesh or the micro-batches.

use crate::common::{alone, input, on_mesh, on_tp, tape_of, tape_on, to_f64, values};
use meshwork_core::{Axis, Mesh, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{Mode, Position, Tape};
use meshwork_tensor::{Declarations, Params, Var};
use std::sync::Arc;

const SHAPE: [usize; 3] = [4, 6, 12];

fn at(rank: &Arc<Rank>, position: Position, mode: Mode) -> Tape {
    let device = Cpu::device();
    let params = Params::new(Arc::new(Declarations::new()), rank.mesh(), rank.coords(), &device, &[], 0).unwrap();
    Tape::new(Arc::clone(rank), Arc::new(params), device, mode, position)
}

fn ones(tape: &Tape, shape: &[usize], types: Types) -> Var {
    input(tape, &vec![1.0; shape.iter().product()], shape, types)
}

fn mask(x: &Var) -> Vec<f64> {
    to_f64(x.dropout(0.5, "mlp").unwrap().tensor())
}

fn whole() -> Vec<f64> {
    let tape = tape_of(&alone());
    mask(&ones(&tape, &SHAPE, Types::NONE))
}

#[test]
fn a_rank_drops_of_its_slice_what_one_rank_drops_of_the_whole() {
    for (mesh, dim) in [("tp=2", 1), ("tp=3", 1), ("tp=2", 2), ("tp=4", 2)] {
        on_mesh(mesh, |rank| {
            let tape = tape_of(&rank);
            let mut local = SHAPE;
            local[dim] /= rank.mesh().degree(Axis::Tp);
            let slice = mask(&ones(&tape, &local, on_tp(Ty::Shard(dim))));
            // The reference: the whole mask, cut by split.
            let dropped = ones(&tape_of(&rank), &SHAPE, on_tp(Ty::Invariant)).dropout(0.5, "mlp").unwrap();
            assert_eq!(to_f64(dropped.tensor()), whole(), "the same on every rank where the value is the same");
            assert_eq!(slice, to_f64(dropped.split(Axis::Tp, dim).unwrap().tensor()), "{mesh}, dim {dim}");
        });
    }
}

#[test]
fn a_micro_batch_drops_what_the_whole_batch_drops_of_its_samples() {
    let per_sample = SHAPE[1] * SHAPE[2];
    for first in 0..SHAPE[0] as u64 {
        let position =
            Position { first_sample: crate::common::POSITION.first_sample + first, ..crate::common::POSITION };
        let tape = at(&alone(), position, Mode::Train);
        let alone = mask(&ones(&tape, &[1, SHAPE[1], SHAPE[2]], Types::NONE));
        assert_eq!(alone, whole()[first as usize * per_sample..][..per_sample], "sample {first}");
    }
}

/// A weight of which each data-parallel rank dropped other elements was typed the same on all of them, and was not.
#[test]
fn ranks_with_other_samples_drop_the_same_of_what_is_the_same_on_them() {
    let first = crate::common::POSITION.first_sample;
    for mesh in ["dp=2", "dp=4,ep=2", "dp=2,tp=2"] {
        let found = on_mesh(mesh, |rank| {
            let each = SHAPE[0] / rank.mesh().data_degree();
            let first_sample = first + (rank.mesh().data_rank(rank.coords()) * each) as u64;
            let position = Position { first_sample, rank_samples: each as u64, ..crate::common::POSITION };
            let whole = Types::all(rank.mesh(), Ty::Invariant);
            let cut = whole.with(Axis::Dp, Ty::Shard(0)).with(Axis::Ep, Ty::Shard(0));
            let own = ones(&at(&rank, position, Mode::Train), &[each, SHAPE[1], SHAPE[2]], cut);
            let dropped = own.dropout(0.5, "mlp").unwrap().all_gather_invariant(Axis::DATA, 0).unwrap();
            let again = ones(&at(&rank, position, Mode::Train), &[each, SHAPE[1], SHAPE[2]], cut);
            let gathered = mask(&again.all_gather_invariant(Axis::DATA, 0).unwrap());
            assert_eq!(to_f64(dropped.tensor()), gathered, "before the gather and after it, {mesh}");
            // Nobody says how many samples the others have.
            let alone = Position { rank_samples: 0, ..position };
            (gathered, mask(&ones(&at(&rank, alone, Mode::Train), &SHAPE, whole)))
        });
        for (gathered, weight) in &found {
            assert_eq!((gathered, weight), (&whole(), &found[0].1), "{mesh}");
        }
    }
}

/// Each rank dropped the elements of the first.
#[test]
fn ranks_that_cut_dim_0_beside_the_samples_drop_what_one_rank_drops() {
    on_mesh("tp=2,dp=2", |rank| {
        let each = SHAPE[0] / 2;
        let first_sample = crate::common::POSITION.first_sample + (rank.mesh().data_rank(rank.coords()) * each) as u64;
        let tape = at(&rank, Position { first_sample, ..crate::common::POSITION }, Mode::Train);
        let types = Types::all(rank.mesh(), Ty::Invariant).with(Axis::Dp, Ty::Shard(0)).with(Axis::Ep, Ty::Shard(0));
        let x = ones(&tape, &[each, SHAPE[1], SHAPE[2]], types).split(Axis::Tp, 0).unwrap();
        let dropped = x.dropout(0.5, "mlp").unwrap().all_gather_invariant([Axis::Tp, Axis::Dp, Axis::Ep], 0).unwrap();
        assert_eq!(to_f64(dropped.tensor()), whole());
    });
}

#[test]
fn another_step_seed_or_layer_drops_other_elements() {
    let at_position = |position| mask(&ones(&at(&alone(), position, Mode::Train), &SHAPE, Types::NONE));
    let here = crate::common::POSITION;
    assert_eq!(at_position(here), whole());
    assert_ne!(at_position(Position { step: here.step + 1, ..here }), whole());
    assert_ne!(at_position(Position { seed: here.seed + 1, ..here }), whole());
    let tape = tape_of(&alone());
    assert_ne!(to_f64(ones(&tape, &SHAPE, Types::NONE).dropout(0.5, "attn").unwrap().tensor()), whole());
}

#[test]
fn evaluating_drops_nothing() {
    let tape = at(&alone(), crate::common::POSITION, Mode::Evaluate);
    assert!(mask(&ones(&tape, &SHAPE, Types::NONE)).iter().all(|&value| value == 1.0));
}

#[test]
fn attention_drops_by_global_head() {
    const QKV: [usize; 5] = [2, 3, 3, 4, 2];
    let qkv = values("qkv", QKV.iter().product());
    let p = Some((0.4, "attn"));
    on_mesh("tp=4", |rank| {
        let whole = || input(&tape_of(&rank), &qkv, &QKV, on_tp(Ty::Invariant));
        let slice = whole().split(Axis::Tp, 3).unwrap().causal_attention(None, p).unwrap();
        assert_eq!(slice.types(), on_tp(Ty::Shard(2)));
        let reference = whole().causal_attention(None, p).unwrap().split(Axis::Tp, 2).unwrap();
        assert_eq!(to_f64(slice.tensor()), to_f64(reference.tensor()));
    });
}

/// Two axes that cut one dim nest as placements do: the fastest axis outside.
#[test]
fn two_axes_that_cut_one_dim_tile_the_mask() {
    let mesh: Mesh = "tp=2,dp=2".parse().unwrap();
    let mut tiled = vec![0.0; SHAPE[0] * SHAPE[1] * SHAPE[2]];
    for world_rank in 0..4 {
        let rank = Arc::new(Rank::recording(&mesh, world_rank).unwrap());
        let part = rank.coords().get(Axis::Dp) * 2 + rank.coords().get(Axis::Tp); // the slowest axis outermost
        let tape = tape_on(&rank, Cpu::device());
        let cut = Types::new(&[(Axis::Tp, Ty::Shard(2)), (Axis::Dp, Ty::Shard(2))]);
        let local = mask(&ones(&tape, &[SHAPE[0], SHAPE[1], SHAPE[2] / 4], cut));
        for (row, part_of_row) in tiled.chunks_mut(SHAPE[2]).zip(local.chunks(SHAPE[2] / 4)) {
            row[part * part_of_row.len()..][..part_of_row.len()].copy_from_slice(part_of_row);
        }
    }
    assert_eq!(tiled, whole());
}
