//! The parameters of low-rank adapters, and what merging them adds.

use meshwork_compress::Values;
use meshwork_core::Axis;
use meshwork_tensor::param::{AdapterSpec, Adapters, Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Init, ParamId, ParamSpec, Placement, Role};
use std::collections::BTreeMap;
use std::sync::Arc;

fn weight(dims: &[usize], cut: usize, matrices: Matrices) -> ParamSpec {
    let mut all = Declarations::new();
    let (placement, group) = (Placement::replicated().shard(Axis::Tp, cut), ParamGroup::hidden(matrices));
    let id = all.declare_in("w", dims, placement, Role::Weight, Init::Zeros, group).unwrap();
    all.spec(id).clone()
}

fn adapter(matrix: Option<usize>) -> AdapterSpec {
    AdapterSpec { a: "a".to_owned(), b: "b".to_owned(), matrix }
}

#[test]
fn a_is_cut_as_the_inputs_and_b_as_the_outputs() {
    let shown = |weight: &ParamSpec, matrix| {
        let [a, b] = adapter(matrix).specs(weight, 4).unwrap();
        [a, b].map(|spec| format!("{:?} {}", spec.dims, spec.placement))
    };
    let qkv = weight(&[3, 4, 8, 32], 1, Matrices::new(1, 1));
    assert_eq!(shown(&qkv, None), ["[4, 32] replicated", "[3, 4, 8, 4] Shard(1) on tp"]);
    assert_eq!(shown(&qkv, Some(2)), ["[4, 32] replicated", "[4, 8, 4] Shard(0) on tp"]);
    let gate_up = weight(&[64, 2, 32], 0, Matrices::new(0, 1).interleaved(1));
    assert_eq!(shown(&gate_up, Some(1)), ["[4, 32] replicated", "[64, 4] Shard(0) on tp"]);
    let out = weight(&[32, 4, 8], 1, Matrices::new(0, 2));
    assert_eq!(shown(&out, None), ["[4, 4, 8] Shard(1) on tp", "[32, 4] replicated"]);
    // Of experts, which axes share out: A and B of each.
    let experts = |dims: &[usize], matrices, cut| {
        let mut experts = weight(dims, cut, matrices);
        experts.placement = experts.placement.shard(Axis::Ep, 0);
        experts
    };
    let gate_up = experts(&[8, 64, 2, 32], Matrices::new(1, 1).interleaved(1), 1);
    assert_eq!(shown(&gate_up, Some(1)), ["[8, 4, 32] Shard(0) on ep", "[8, 64, 4] Shard(1) on tp, Shard(0) on ep"]);
    let down = experts(&[8, 32, 64], Matrices::new(1, 1), 2);
    assert_eq!(shown(&down, None), ["[8, 4, 64] Shard(2) on tp, Shard(0) on ep", "[8, 32, 4] Shard(0) on ep"]);
    assert_eq!(adapter(None).specs(&down, 4).unwrap()[0].group.matrices, Some(Matrices::new(1, 1)));
    // Where features are whole, canonical numerics sum over them in the blocks of those that are cut.
    let shared_out = Placement::replicated().shard(Axis::Ep, 0);
    let whole = ParamSpec { placement: shared_out.clone().summed_in_blocks(2), ..down };
    let [a, b] = adapter(None).specs(&whole, 4).unwrap();
    assert_eq!((a.placement, b.placement), (shared_out.clone().summed_in_blocks(2), shared_out));
    // One in √(4 · 8) of the inputs, as PyTorch's kaiming_uniform_ with a = √5.
    assert_eq!(adapter(None).specs(&out, 4).unwrap()[0].init, Init::Uniform { bound: 1.0 / 32f32.sqrt() });
}

#[test]
fn what_has_no_adapter_is_refused_with_what_is_valid() {
    let refused = |weight: &ParamSpec, matrix, rank| adapter(matrix).specs(weight, rank).unwrap_err().to_string();
    let out = weight(&[32, 4, 8], 1, Matrices::new(0, 2));
    let error = refused(&out, None, 33);
    assert!(error.contains("has rank 33") && error.contains("use a rank of 1 to 32"), "{error}");
    let error = refused(&out, Some(0), 4);
    assert!(error.contains("holds no matrix 0"), "{error}");
    let experts = weight(&[8, 64, 32], 0, Matrices::new(1, 1));
    let error = refused(&experts, Some(1), 4);
    assert!(error.contains("holds no matrix 1"), "{error}");
    let error = refused(&experts, None, 33);
    assert!(error.contains("no adapter of a matrix of [64] outputs and [32] inputs has rank 33"), "{error}");
    let table = ParamSpec { group: ParamGroup::for_role(Role::Weight), ..out };
    let error = refused(&table, None, 4);
    assert!(error.contains("name weights of linear layers"), "{error}");
}

/// Keys and values of 2 outputs each, of 3 inputs; and gate and up, whose outputs take turns.
#[test]
fn a_product_is_added_to_the_rows_of_its_matrix() {
    let of = Adapters { rank: 1, scale: 2.0, ..Adapters::default() };
    let merged = |cut: usize, matrices, matrix| {
        let (weight, mut values) = (weight(&[2, 2, 3], cut, matrices), vec![0.0; 12]);
        adapter(matrix).merge(&weight, &of, [&[1.0, 2.0, 3.0], &[1.0, 10.0]], &mut values).unwrap();
        values
    };
    let behind = merged(1, Matrices::new(1, 1), Some(1));
    assert_eq!(behind, [0., 0., 0., 0., 0., 0., 2., 4., 6., 20., 40., 60.]);
    // Two experts of two outputs: A and B of each.
    let (of_each, mut values) = (weight(&[2, 2, 3], 0, Matrices::new(1, 1)), vec![0.0; 12]);
    let [a, b] = [[1., 2., 3., 5., 6., 7.].as_slice(), &[1., 10., 100., 1000.]];
    adapter(None).merge(&of_each, &of, [a, b], &mut values).unwrap();
    assert_eq!(values, [2., 4., 6., 20., 40., 60., 1000., 1200., 1400., 10_000., 12_000., 14_000.]);
    let between = merged(0, Matrices::new(0, 1).interleaved(1), Some(1));
    assert_eq!(between, [0., 0., 0., 2., 4., 6., 0., 0., 0., 20., 40., 60.]);
}

/// As QLoRA: matrices of linear layers, with an adapter or without; no table, no norm, no adapter.
#[test]
fn frozen_matrices_alone_are_stored_in_fewer_bits() {
    let base = Some(Values::Bf16);
    let of = BTreeMap::from([("w".to_owned(), vec![adapter(None)])]);
    let adapters = Arc::new(Adapters { rank: 2, scale: 1.0, of, base, ..Adapters::default() });
    let mut all = Declarations::new();
    let whole = Placement::replicated;
    all.adapting(&adapters, |all| {
        let matrix = ParamGroup::hidden(Matrices::new(0, 1));
        let id = all.declare_in("w", &[4, 8], whole(), Role::Weight, Init::Zeros, matrix)?;
        all.declare_in("without", &[4, 8], whole(), Role::Weight, Init::Zeros, matrix)?;
        all.declare("table", &[4, 8], whole(), Role::Weight, Init::Zeros)?;
        all.declare("norm", &[8], whole(), Role::Norm, Init::Ones)?;
        all.adapters_of(id).map(drop)
    })
    .unwrap();
    all.declare_in("outside", &[4, 8], whole(), Role::Weight, Init::Zeros, ParamGroup::hidden(Matrices::new(0, 1)))
        .unwrap();
    let packed: Vec<&str> = all.specs().iter().filter(|spec| spec.packed == base).map(|spec| &*spec.name).collect();
    assert_eq!(packed, ["w", "without"]);
    let flats = all.flats();
    let names = |flat: &[ParamId]| flat.iter().map(|&id| all.spec(id).name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&flats[0]), ["table", "norm", "a", "b", "outside"]);
    assert_eq!(names(&flats[1]), ["w", "without"]);
}

#[test]
fn only_adapters_are_trained() {
    let of = BTreeMap::from([("w".to_owned(), vec![adapter(None)])]);
    let adapters = Arc::new(Adapters { rank: 2, scale: 1.0, of, ..Adapters::default() });
    let mut all = Declarations::new();
    let group = ParamGroup::hidden(Matrices::new(0, 1));
    all.adapting(&adapters, |all| {
        let id = all.declare_in("w", &[4, 8], Placement::replicated(), Role::Weight, Init::Zeros, group)?;
        all.adapters_of(id).map(drop)
    })
    .unwrap();
    let frozen: Vec<_> = all.specs().iter().map(|spec| (&*spec.name, spec.group.frozen)).collect();
    assert_eq!(frozen, [("w", true), ("a", false), ("b", false)]);
}
