//! Fields that ranks cut along the sequence: each rank's tokens of whole sequences.

use meshwork_core::{Axes, Axis, DType, Mesh, Ty, World};
use meshwork_cpu::Cpu;
use meshwork_nn::{Batch, Field};
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Error, Params, Result, Tape, Var};
use std::sync::Arc;

/// On each rank of a mesh what `f` makes of a tape.
fn on_ranks<T: Send>(mesh: &str, f: impl Fn(&Tape) -> Result<T> + Sync) -> Vec<T> {
    let mesh: Mesh = mesh.parse().unwrap();
    let ranks = World::threads(&mesh).run_mesh(&mesh, |rank| {
        let (all, device) = (Arc::new(Declarations::new()), Cpu::device());
        let params = Arc::new(Params::new(all, rank.mesh(), rank.coords(), &device, &[], 7)?);
        f(&Tape::new(rank, params, device, Mode::Train, Position::default()))
    });
    ranks.unwrap()
}

/// Two samples of five tokens of two numbers each: sample · 100 + token · 10 + number.
fn batch() -> Batch {
    let values = (0..20).map(|at| (at / 10 * 100 + at / 2 % 5 * 10 + at % 2) as f32);
    let ids = (0..10).map(|at| at / 5 * 100 + at % 5 + 1);
    Batch::new(2).with("x", [5, 2], values.collect()).unwrap().with("ids", [5], ids.collect::<Vec<i32>>()).unwrap()
}

fn x(over: impl Into<Axes>) -> Field {
    Field::new("x", DType::F32, [5, 2]).sequence(0, over)
}

/// What the values of sample 0 are, of a rank that holds so many tokens of two numbers.
fn tokens(var: &Var) -> Vec<f32> {
    let held = var.shape()[1];
    var.tensor().to_vec::<f32>().unwrap()[..2 * held].chunks(2).map(|token| token[0] / 10.0).collect()
}

#[test]
fn ranks_have_their_slices_the_slowest_axis_outermost_and_know_where_the_sequence_ends() {
    let cut = |axes: &'static [Axis]| {
        move |tape: &Tape| {
            let var = batch().var(tape, &x(axes))?;
            let slowest = *axes.last().unwrap();
            let types = axes.iter().map(|&axis| var.ty(axis)).collect::<Vec<_>>();
            assert!(types.iter().all(|ty| *ty == Ty::Shard(1)) && var.ty(Axis::Dp) == Ty::Shard(0), "{types:?}");
            let whole = var.all_gather_invariant(axes, 1)?.tensor().to_vec::<f32>()?;
            assert_eq!(whole, batch().values::<f32>("x")?, "the padding is cut off again");
            Ok((tokens(&var), var.padding().extent(slowest)))
        }
    };
    let two = on_ranks("dp=1,cp=2", cut(&[Axis::Cp]));
    assert_eq!(two, [(vec![0.0, 1.0, 2.0], Some(5)), (vec![3.0, 4.0, 0.0], Some(5))]);
    // tp=0, cp=0; tp=1, cp=0; tp=0, cp=1; tp=1, cp=1: the last has nothing but padding.
    let four = on_ranks("dp=1,tp=2,cp=2", cut(&[Axis::Tp, Axis::Cp]));
    let held: Vec<_> = four.into_iter().map(|(tokens, _)| tokens).collect();
    assert_eq!(held, [[0.0, 1.0], [2.0, 3.0], [4.0, 0.0], [0.0, 0.0]]);
    let five = on_ranks("dp=1,cp=5", cut(&[Axis::Cp]));
    assert!(five.iter().all(|(_, padded)| padded.is_none()), "ranks divide the sequence");
    let held: Vec<_> = five.into_iter().flat_map(|(tokens, _)| tokens).collect();
    assert_eq!(held, [0.0, 1.0, 2.0, 3.0, 4.0]);
}

/// By its name a field is whole, and so it is over axes that the mesh lacks, and of one rank.
#[test]
fn a_field_is_whole_by_its_name_and_where_no_axis_cuts_it() {
    on_ranks("dp=1,cp=2", |tape| {
        assert_eq!((batch().var(tape, "x")?.ty(Axis::Cp), batch().var(tape, "x")?.shape()[1]), (Ty::Invariant, 5));
        assert_eq!(batch().var(tape, &x(Axis::Tp))?.shape()[1], 5);
        Ok(())
    });
    on_ranks("dp=1,cp=1", |tape| {
        let ids = batch().var(tape, &Field::ids("ids", [5], 0..200).sequence(0, Axis::Cp))?;
        assert_eq!((ids.ty(Axis::Cp), ids.padding().extent(Axis::Cp)), (Ty::Shard(1), None));
        assert_eq!(ids.tensor().to_vec::<i32>()?, batch().values::<i32>("ids")?);
        Ok(())
    });
}

#[test]
fn a_sequence_that_cannot_be_cut_so_is_refused_by_its_name() {
    let refused = |field: Field, says: &str| {
        on_ranks("dp=2,cp=2", |tape| {
            let error = batch().var(tape, &field).unwrap_err();
            assert!(matches!(error, Error::Shape { op: "batch", .. }) && error.to_string().contains(says), "{error}");
            Ok(())
        });
    };
    refused(x(Axis::Dp), "x cannot be cut over dp, which cuts the samples: use tp or cp");
    refused(x([Axis::Cp, Axis::Ep]), "x cannot be cut over ep");
    refused(Field::new("x", DType::F32, [5, 2]).sequence(2, Axis::Cp), "x has 2 dims, and no dim 2 for a sequence");
    refused(Field::new("x", DType::F32, [6, 2]).sequence(0, Axis::Cp), "x is f32 of [5, 2] for each sample");
    refused(
        Field::new("y", DType::F32, [5, 2]).sequence(0, Axis::Cp),
        "there is no field \"y\"; the batch has [\"x\", \"ids\"]",
    );
}

/// What would compute with the zeros behind the end refuses them.
#[test]
fn an_operation_that_would_count_the_padding_refuses_it() {
    on_ranks("dp=1,cp=2", |tape| {
        let error = batch().var(tape, &x(Axis::Cp))?.softmax().unwrap_err().to_string();
        assert!(error.contains("5") && error.contains("the zeros would count as elements"), "{error}");
        Ok(())
    });
}

#[test]
fn ids_that_the_model_does_not_have_are_refused_on_entry() {
    let fields = [Field::ids("tokens", [3], 0..5), Field::ids("targets", [3], i32::MIN..5)];
    let refused = |tokens: [i32; 6], targets: [i32; 6]| {
        let batch = Batch::new(2).with("tokens", [3], tokens.to_vec())?.with("targets", [3], targets.to_vec())?;
        batch.require(&fields, 2)
    };
    assert!(refused([0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, -1]).is_ok());
    for (tokens, targets, says) in [
        (
            [0, 1, 2, 3, 5, 0],
            [0; 6],
            "batch: tokens has the id 5 at place 1 of sample 1: the model takes ids from 0 to 4",
        ),
        (
            [0, 1, -1, 3, 0, 0],
            [0; 6],
            "batch: tokens has the id -1 at place 2 of sample 0: the model takes ids from 0 to 4",
        ),
        (
            [0; 6],
            [0, 0, 0, 5, 0, 0],
            "batch: targets has the id 5 at place 0 of sample 1: the model takes ids below 5, negative ones masked",
        ),
    ] {
        assert_eq!(refused(tokens, targets).unwrap_err().to_string(), says);
    }
}

#[test]
fn a_field_replaces_its_namesake() {
    let batch = Batch::new(2).with("pair", [2], vec![1.0f64; 4]).unwrap();
    let other = batch.with("pair", [2], vec![7.0f64; 4]).unwrap();
    assert_eq!(other.values::<f64>("pair").unwrap(), [7.0; 4]);
}
