//! Shards that the degree does not divide: gathered they are the whole, and what would count their padding is refused.

use crate::common::{ids, on_tp};
use meshwork_core::{Axis, Mesh, Rank, Ty};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use meshwork_testkit::check::{LayerInput, check_layer};
use std::sync::Arc;

const IN: usize = 5;
/// Features that neither 4 nor, with one more, 2 and 3 ranks share evenly.
const OUT: [usize; 3] = [6, 7, 2];

fn cut(params: &mut Declarations, name: &str, dims: &[usize], dim: usize) -> Result<ParamId> {
    let placement = Placement::replicated().shard(Axis::Tp, dim);
    params.declare(name, dims, placement, Role::Weight, Init::Normal { std: 0.5 })
}

/// `w [out, 5]` and `b [out]`, both cut along their first dim.
fn column(params: &mut Declarations, out: usize) -> Result<[ParamId; 2]> {
    Ok([cut(params, "w", &[out, IN], 0)?, cut(params, "b", &[out], 0)?])
}

fn x() -> [LayerInput; 1] {
    [LayerInput::value("x", &[3, IN], Ty::Invariant)]
}

/// `x · wᵀ + b`, padded where tp does not divide the features.
fn features(tape: &Tape, [w, b]: [ParamId; 2], x: &Var) -> Result<Var> {
    x.copy(Axis::Tp)?.linear_bias(&tape.param(w)?, &tape.param(b)?, 1)
}

/// A layer on 1 to 4 ranks gives the output and the gradients of one rank.
#[track_caller]
fn check(name: &str, forward: impl Fn(&Tape, [ParamId; 2], &Var) -> Result<Var> + Sync) {
    for out in OUT {
        let declare = |params: &mut Declarations, _: &Mesh| column(params, out);
        let checked = check_layer(&format!("{name}, {out} features"), &x(), declare, |layer, tape, v| {
            forward(tape, *layer, &v[0])
        });
        checked.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_padded_shard_is_gathered_as_its_true_extent() {
    check("all_gather", |tape, layer, x| {
        let y = features(tape, layer, x)?.all_gather_invariant(Axis::Tp, 1)?;
        assert_eq!(y.shape()[1], tape.param(layer[0])?.padding().extent(Axis::Tp).unwrap_or(y.shape()[1]));
        y.exp()?.softmax() // counts every column
    });
    check("all_gather to Replicate", |tape, layer, x| {
        let y = features(tape, layer, x)?.all_gather(Axis::Tp, 1)?.gelu()?;
        y.slice(Axis::Tp, 0).or_else(|_| Ok(y)) // 3 rows: where the degree divides them
    });
}

#[test]
fn zeros_stay_zeros_through_what_maps_zero_to_zero() {
    check("chain", |tape, layer, x| {
        let y = features(tape, layer, x)?;
        let y = y.gelu()?.mul(&y)?.sub(&y.tanh()?)?.scale(-3.0)?;
        let y = y.add(&y.silu()?)?.map("cube", |x| x * x * x, |x, _| 3.0 * x * x)?.relu()?;
        y.dropout(0.4, "layer")?.all_gather_invariant(Axis::Tp, 1)
    });
}

/// Three heads of two features, which 2 and 4 ranks do not share evenly.
#[test]
fn reshapes_keep_the_true_extent_of_heads_and_of_the_features_in_them() {
    let declare = |params: &mut Declarations, _: &Mesh| cut(params, "w", &[3, 2, IN], 0);
    let checked = check_layer("heads", &x(), declare, |&w, tape, v| {
        let heads = v[0].copy(Axis::Tp)?.linear(&tape.param(w)?, 1)?; // [b, heads, 2]
        let features = heads.flatten(1..3)?.gelu()?;
        let heads = features.unflatten(1, &[features.shape()[1] / 2, 2])?.transpose(1, 2)?.unsqueeze(1)?;
        let second = heads.narrow(2, 1..2)?.squeeze(2)?.reshape(&[3, heads.shape()[3]])?; // [b, heads]
        let features = heads.squeeze(1)?.transpose(1, 2)?.flatten(1..3)?.all_gather_invariant(Axis::Tp, 1)?;
        assert_eq!((features.shape()[1], second.padding().extent(Axis::Tp).unwrap_or(3)), (6, 3));
        features.softmax()?.concat(&second.all_gather_invariant(Axis::Tp, 1)?.softmax()?, 1)
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
    for refusal in on_six(4, |_, y| y.unflatten(1, &[1, 2])?.exp()) {
        let refusal = refusal.unwrap_err();
        assert!(
            refusal.starts_with("exp: x has 3 elements along dim 1 over tp=4, padded with zeros to 4"),
            "{refusal}"
        );
    }
}

#[test]
fn a_head_that_is_partly_padding_is_refused() {
    let declare = |params: &mut Declarations, _: &Mesh| column(params, 7);
    let checked = check_layer("halves", &x(), declare, |layer, tape, v| {
        let y = features(tape, *layer, &v[0])?;
        y.unflatten(1, &[y.shape()[1], 1])?.flatten(1..3)?.all_gather_invariant(Axis::Tp, 1)
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
    let refused = on_tp_ranks(4, |rank| {
        let mut all = Declarations::new();
        let layer = column(&mut all, 7).unwrap();
        let (layout, device) = ([all.ids().collect()], Cpu::device());
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
        let x = Tensor::from_slice(tape.device(), &[0.5_f32; 3 * IN], [3, IN]).unwrap();
        let y = features(&tape, layer, &tape.input(x, on_tp(Ty::Invariant))).unwrap();
        y.unflatten(1, &[1, 2]).unwrap_err().to_string()
    });
    assert_eq!(
        refused[0],
        "unflatten: x has 7 elements along dim 1 over tp=4, padded with zeros to 8, and unflatten would end inside of an index of dim 1; \
         extents of which 7 elements fill a whole number, or all_gather x over tp first"
    );
}

/// Padding lies at the end of the whole, however many axes cut it.
#[test]
fn a_dim_that_two_axes_cut_is_gathered_as_its_true_extent() {
    let mesh: Mesh = "tp=2,cp=2".parse().unwrap();
    for extent in [5, 7, 8] {
        let run = |world: &meshwork_core::Group| {
            let rank = Arc::new(Rank::new(&mesh, Arc::clone(world.communicator())).unwrap());
            let mut all = Declarations::new();
            let placement = Placement::replicated().shard(Axis::Tp, 1).shard(Axis::Cp, 1);
            let w = all.declare("w", &[2, extent], placement, Role::Weight, Init::Normal { std: 1.0 }).unwrap();
            let (all, device) = (Arc::new(all), Cpu::device());
            let layout = [vec![w]];
            let whole = Params::new(all.clone(), &Mesh::default(), Default::default(), &device, &layout, 3).unwrap();
            let params = Params::new(all, rank.mesh(), rank.coords(), &device, &layout, 3).unwrap();
            let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
            let w_here = tape.param(w).unwrap();
            let in_turn = w_here.all_gather(Axis::Tp, 1).unwrap();
            assert_eq!(in_turn.padding().extent(Axis::Cp), (extent < 8).then_some(extent));
            for gathered in [
                in_turn.all_gather(Axis::Cp, 1),
                w_here.all_gather([Axis::Tp, Axis::Cp], 1),
                w_here
                    .flatten(1..2)
                    .unwrap()
                    .unsqueeze(1)
                    .unwrap()
                    .all_gather([Axis::Tp, Axis::Cp], 2)
                    .unwrap()
                    .squeeze(1),
            ] {
                let gathered = gathered.unwrap();
                assert_eq!(
                    (&gathered.shape()[..], gathered.tensor().to_vec::<f32>().unwrap()),
                    (&[2, extent][..], whole.read(w).unwrap())
                );
            }
        };
        meshwork_testkit::run_world(4, |world| run(&world));
    }
}

#[test]
fn a_product_over_a_padded_dim_is_the_sum_of_the_real_ones() {
    for out in OUT {
        let declare = |params: &mut Declarations, _: &Mesh| {
            let [w, b] = column(params, out)?;
            Ok((w, b, cut(params, "down", &[4, out], 1)?))
        };
        let checked = check_layer(&format!("mlp, {out} features"), &x(), declare, |&(w, b, down), tape, v| {
            features(tape, [w, b], &v[0])?.gelu()?.linear(&tape.param(down)?, 1)?.all_reduce(Axis::Tp)
        });
        checked.unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Runs `body` on every rank of a mesh whose only axis is tp.
fn on_tp_ranks<T: Send>(degree: usize, body: impl Fn(Arc<Rank>) -> T + Sync) -> Vec<T> {
    let mesh = Mesh::new([(Axis::Tp, degree)]).unwrap();
    meshwork_testkit::run_world(degree, |world| {
        body(Arc::new(Rank::new(&mesh, Arc::clone(world.communicator())).expect("every rank joins")))
    })
}

/// What each rank of `tp=degree` says to a program on six features.
fn on_six(
    degree: usize,
    program: impl Fn(&Tape, &Var) -> Result<Var> + Sync,
) -> Vec<std::result::Result<Vec<usize>, String>> {
    on_tp_ranks(degree, |rank| {
        let mut all = Declarations::new();
        let layer = column(&mut all, 6).unwrap();
        let (layout, device) = ([all.ids().collect()], Cpu::device());
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
        let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
        let x = Tensor::from_slice(tape.device(), &[0.5_f32; 3 * IN], [3, IN]).unwrap();
        let y = features(&tape, layer, &tape.input(x, on_tp(Ty::Invariant))).unwrap();
        program(&tape, &y).map(|y| y.shape().to_vec()).map_err(|error| error.to_string())
    })
}

#[test]
fn what_would_count_the_padding_is_refused_with_the_degrees_that_have_none() {
    type Program = fn(&Tape, &Var) -> Result<Var>;
    let counting: [(&str, Program); 8] = [
        ("exp", |_, y| y.exp()),
        ("sigmoid", |_, y| y.sigmoid()),
        ("div", |_, y| y.div(y)),
        ("mean", |_, y| y.mean(1)),
        ("mean_squared_error", |_, y| y.mean_squared_error(y)),
        ("cosine", |_, y| y.map("cosine", f64::cos, |x, _| -x.sin())),
        ("max_reduce", |_, y| y.max_reduce(Axis::Tp)),
        ("all_to_all", |_, y| y.all_to_all(Axis::Tp, 1, 0)),
    ];
    for (op, program) in counting {
        for refusal in on_six(4, program) {
            let refusal = refusal.unwrap_err();
            let begin = format!(
                "{op}: x has 6 elements along dim 1 over tp=4, padded with zeros to 8, and the zeros would count as "
            );
            assert!(refusal.starts_with(&begin), "{refusal}");
            let valid = "all_gather x over tp first, which gives the 6, or use a degree that divides them: 1, 2, 3, 6";
            assert!(refusal.ends_with(valid), "{refusal}");
        }
        // Nothing is padded; all_to_all needs rows that divide.
        let even = on_six(3, program).remove(0);
        assert!(even.is_ok(), "{op}: {even:?}");
        let mended = on_six(4, |tape, y| match op {
            "max_reduce" | "all_to_all" => y.all_gather_invariant(Axis::Tp, 1),
            _ => program(tape, &y.all_gather_invariant(Axis::Tp, 1)?),
        });
        assert!(mended[3].is_ok(), "{op}: {:?}", mended[3]);
    }
}

#[test]
fn shards_of_different_extents_do_not_mix_though_each_rank_stores_as_many() {
    // Over four ranks 6 and 8 features are both stored as 2.
    let refused = on_six(4, |tape, y| {
        let eight = Tensor::zeros(tape.device(), y.tensor().dtype(), [3, 2])?;
        y.add(&tape.input(eight, on_tp(Ty::Shard(1))))
    });
    assert_eq!(
        refused[0].as_ref().unwrap_err(),
        "add: x has 6 elements along dim 1 over tp=4, padded with zeros to 8, and y has 8; operands of one extent"
    );
}

#[test]
fn a_vocabulary_that_is_not_the_tables_is_refused_on_every_degree() {
    for (degree, told) in [(1, 8), (2, 5), (3, 7), (4, 8), (4, 5)] {
        let refused = on_six(degree, |tape, logits| {
            let targets = ids(tape, &[0, 1, 2], &[3], on_tp(Ty::Invariant));
            logits.vocab_parallel_cross_entropy(&targets, Axis::Tp, told)
        });
        let refusal = refused[0].as_ref().unwrap_err();
        let problem = format!("vocab_parallel_cross_entropy: logits has 6 elements along dim 1 over tp={degree}");
        assert!(refusal.starts_with(&problem) && refusal.contains(&format!("was told {told}")), "{refusal}");
    }
    let right = on_six(4, |tape, logits| {
        let targets = ids(tape, &[0, 1, 5], &[3], on_tp(Ty::Invariant));
        logits.vocab_parallel_cross_entropy(&targets, Axis::Tp, 6)
    });
    assert_eq!(right[0], Ok(vec![3]));

    for told in [5, 8] {
        let refused = on_tp_ranks(4, |rank| {
            let mut all = Declarations::new();
            let table = cut(&mut all, "table", &[6, IN], 0).unwrap();
            let (layout, device) = ([all.ids().collect()], Cpu::device());
            let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 0).unwrap();
            let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
            let tokens = ids(&tape, &[0, 1, 2], &[3], on_tp(Ty::Invariant));
            let found = tokens.vocab_parallel_embedding(&tape.param(table).unwrap(), Axis::Tp, told);
            found.map(|_| ()).map_err(|error| error.to_string())
        });
        let refusal = refused[0].as_ref().unwrap_err();
        assert!(
            refusal.starts_with("vocab_parallel_embedding: table has 6 elements along dim 0 over tp=4"),
            "{refusal}"
        );
    }
}
