//! Types, their signatures, and the tables of the rules.

use meshwork_core::Ty::{self, Invariant as I, Partial as P, Replicate as R, Shard as S, Varying as V};
use meshwork_core::rules::{Operand, add, contract, resolve_reads};
use meshwork_core::{Axis, DType, SpmdError, Types};

#[test]
fn a_signature_tells_types_shapes_and_dtypes_apart() {
    let types = Types::new(&[(Axis::Tp, Ty::Partial), (Axis::Dp, Ty::Shard(0))]);
    let other = types.with(Axis::Tp, Ty::Invariant);
    let of = |types: Types, shape: &[usize]| types.signature(DType::F32, shape);
    assert_ne!(of(types, &[2, 3]), of(other, &[2, 3]));
    assert_ne!(of(types, &[2, 3]), of(types, &[3, 2]));
    assert_ne!(of(types, &[2, 3]), types.signature(DType::Bf16, &[2, 3]));
}

#[test]
fn the_dual_of_the_dual_is_the_type() {
    for ty in [Ty::Replicate, Ty::Invariant, Ty::Shard(2), Ty::Varying, Ty::Partial] {
        assert_eq!(ty.dual().dual(), ty);
    }
}

#[test]
fn a_loss_that_is_partial_on_dp_is_not_final() {
    let loss = Types::new(&[(Axis::Tp, Ty::Invariant), (Axis::Dp, Ty::Partial)]);
    assert_eq!(
        loss.require_final("loss").unwrap_err().to_string(),
        "loss: on axis dp, the value is Partial: no rank holds the true one; all_reduce it over dp first"
    );
    loss.with(Axis::Dp, Ty::Invariant).require_final("loss").unwrap();
}

fn on(ty: Ty) -> Types {
    Types::new(&[(Axis::Tp, ty)])
}

fn x(ty: Ty) -> Operand<'static> {
    Operand::value("x", on(ty), 3)
}

fn w(ty: Ty) -> Operand<'static> {
    Operand::parameter("weight", on(ty), 2)
}

fn ok(result: Result<Types, SpmdError>) -> Ty {
    result.unwrap().get(Axis::Tp).unwrap()
}

#[test]
fn the_table_of_contractions() {
    for (tx, tw, want) in
        [(I, I, I), (R, R, R), (V, R, V), (P, R, P), (S(0), R, S(0)), (S(1), R, S(1)), (R, S(0), S(2)), (S(2), S(1), P)]
    {
        assert_eq!(ok(contract("linear", x(tx), w(tw), 1)), want, "{tx} {tw}");
    }
    for (tx, tw, say) in [
        (I, S(0), "copy(I→R) x before this column-parallel product"),
        (R, S(1), "a sharded weight used as if whole"),
        (I, S(1), "a sharded weight used as if whole"),
        (S(2), R, "the contracted dim 2 of x is sharded"),
        (S(0), S(0), "would need communication"),
        (S(0), I, "x is Shard(0) and weight is Invariant"),
        (P, S(0), "before its reduction"),
        (P, P, "product of sums"),
    ] {
        let error = contract("linear", x(tx), w(tw), 1).unwrap_err().to_string();
        assert!(error.starts_with("linear: on axis tp, ") && error.contains(say), "{tx} {tw}: {error}");
    }
}

#[test]
fn the_table_of_sums() {
    let bias = |ty| Operand::parameter("bias", on(ty), 1);
    for (tx, tb, want) in [(I, I, I), (R, R, R), (S(0), R, S(0)), (S(1), R, S(1)), (S(2), S(0), S(2)), (V, R, V)] {
        assert_eq!(ok(add("bias", x(tx), bias(tb))), want);
    }
    for (tx, tb, say) in [
        (P, R, "counted once per rank"),
        (P, I, "counted once per rank"),
        (S(2), R, "do not hold the same elements"),
        (S(1), I, "split(I→S) bias along dim 1"),
        (I, R, "copy(I→R) x"),
    ] {
        let error = add("bias", x(tx), bias(tb)).unwrap_err().to_string();
        assert!(error.contains(say), "{error}");
    }
    assert_eq!(ok(add("add", x(P), x(P))), P);
    assert!(add("add", x(P), x(R)).is_err());
    assert!(add("add", x(S(0)), x(S(1))).is_err());
}

#[test]
fn a_parameter_is_read_invariant_only_where_all_else_is() {
    let types = Types::new(&[(Axis::Tp, R), (Axis::Dp, R)]);
    let data = Types::new(&[(Axis::Tp, I), (Axis::Dp, S(0))]);
    let mut operands = [Operand::value("x", data, 3), Operand::parameter("gamma", types, 1)];
    resolve_reads(&mut operands);
    assert_eq!(operands[1].types, Types::new(&[(Axis::Tp, I), (Axis::Dp, R)]));
    // Without another operand, nothing shows that all ranks do the same work.
    let mut alone = [Operand::parameter("gamma", types, 1)];
    resolve_reads(&mut alone);
    assert_eq!(alone[0].types, types);
}

#[test]
fn values_on_different_meshes_do_not_mix() {
    assert_eq!(ok(contract("linear", x(I), w(I), 4)), I, "more dims than there are do not panic");
    let error = add("add", x(I), Operand::value("y", Types::NONE, 3)).unwrap_err();
    assert!(error.to_string().contains("y does not lie on this axis"), "{error}");
}
