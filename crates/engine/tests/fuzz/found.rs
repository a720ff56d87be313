//! Errors of ours that the fuzzer found, each as a small program of its own.

use crate::case::{Case, Way};
use crate::program::{Block, Cut, Data, Group, Instr, Op, Param, Program, Terms};
use crate::run::{self, Ended};
use crate::verdict::{self, Fate};
use meshwork_core::{Axis, Ty};
use meshwork_engine::{
    Numerics, Plan, ScheduleSpec, StateKey, StatePiece, TrainState, Verify, WholeState, Zero, ZeroStage,
};
use meshwork_optim::Sgd;
use meshwork_tensor::param::{LocalSlice, Piece};
use meshwork_tensor::{Init, Role, Shape};

pub const WIDTH: usize = 4;

pub fn param(name: &str, dims: &[usize], role: Role) -> Param {
    let (group, init) = (Group::Usual, Init::Normal { std: 0.5 });
    Param {
        name: name.to_owned(),
        dims: dims.to_vec(),
        wider: None,
        cut: None,
        padded: false,
        role,
        init,
        group,
        tied: false,
    }
}

/// `x ← x · Wᵀ` for each of these weights `[WIDTH, WIDTH]`, in turn.
pub fn linears(names: &[&str], tied: bool) -> Block {
    let params = names.iter().map(|name| Param { tied, ..param(name, &[WIDTH, WIDTH], Role::Weight) }).collect();
    let op = |weight: usize| Instr { op: Op::Linear { weight, contract: 1 }, args: vec![weight] };
    Block { params, code: (0..names.len()).map(op).collect() }
}

pub fn block(params: Vec<Param>, code: &[Op]) -> Block {
    let instr = |(at, op): (usize, &Op)| Instr { op: op.clone(), args: vec![at] };
    Block { params, code: code.iter().enumerate().map(instr).collect() }
}

/// A regression of `[seq, WIDTH]` on as many targets, whose activations are whole.
pub fn program(layers: Vec<Block>) -> Program {
    let cut = Cut { axis: Axis::Tp, ty: Ty::Invariant, width: WIDTH };
    let same = || block(Vec::new(), &[Op::Same]);
    let cuts = vec![cut; layers.len() + 1];
    let targets = Instr { op: Op::Targets, args: vec![0] };
    let loss = Instr { op: Op::SquaredError, args: vec![0, 1] };
    let loss = Block { params: Vec::new(), code: vec![targets, loss] };
    let blocks = std::iter::once(same()).chain(layers).chain([same(), loss]).collect();
    Program { data: Data::Floats { width: WIDTH }, seq: 4, blocks, cuts, terms: Terms::Right }
}

pub fn plan(mesh: &str, numerics: Numerics) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: 4,
        num_microbatches: Some(2),
        numerics,
        optimizer: Sgd { momentum: 0.5, weight_decay: 0.0 }.into(),
        max_norm: 0.0,
        verify: Verify::Every(1),
        ..Plan::default()
    }
}

pub fn case(program: Program, plan: Plan) -> Case {
    let alone =
        Plan { mesh: "dp=1".parse().unwrap(), schedule: ScheduleSpec::default(), partition: vec![], ..plan.clone() };
    Case { seed: 1, way: Way::Trainer { load: false }, program, plan, alone }
}

pub const CANONICAL: Numerics = Numerics::Canonical { blocks: 4 };

#[track_caller]
pub fn right(program: Program, plan: Plan) {
    if let Fate::Wrong(why) = verdict::fate(&case(program, plan)) {
        panic!("{why}");
    }
}

/// A flat buffer of one element lies whole in the slice of the first rank that shares it out: that rank did not gather
/// it, and claimed other replicas in verify mode, while the others waited for it.
#[test]
fn a_buffer_whose_elements_lie_in_one_slice_is_shared_out_by_all_ranks() {
    let params =
        [("down", &[1, WIDTH][..], Role::Weight), ("bias", &[1], Role::Bias), ("up", &[WIDTH, 1], Role::Weight)];
    let narrow = block(
        params.map(|(name, dims, role)| param(name, dims, role)).to_vec(),
        &[Op::LinearBias { weight: 0, bias: 1 }, Op::Linear { weight: 2, contract: 1 }],
    );
    for stage in ZeroStage::ALL {
        for numerics in [Numerics::Fast, CANONICAL] {
            let zero = Zero { stage, group: None };
            right(program(vec![narrow.clone()]), Plan { zero, ..plan("dp=2", numerics) });
        }
    }
}

/// What a program on a mesh is refused with.
#[track_caller]
pub fn refused(program: Program, plan: Plan) -> String {
    match run::on_mesh(&case(program, plan)) {
        Ended::Refused(text) | Ended::Claim(text) => text,
        other => panic!("{other:?}"),
    }
}

/// Each stage makes its gradients ready in an order of its own. The sums over both stages were taken in that order, and
/// so were the gradients of one weight added to those of the other. Verify mode compared the weights in the order of
/// their declaration, and complained where they were right.
#[test]
fn two_weights_that_stages_tie_in_different_orders_are_summed_each_with_itself() {
    for numerics in [Numerics::Fast, CANONICAL] {
        for [first, second] in [["a", "b"], ["b", "a"]] {
            let layers = vec![linears(&["a", "b"], false), linears(&[first, second], true)];
            right(program(layers), plan("pp=2", numerics));
        }
    }
}

/// Two groups of ranks that share weights: [0, 1] and [0, 1, 2].
#[test]
fn weights_that_different_stages_share_do_not_wait_for_each_other() {
    let layers = vec![linears(&["a", "b"], false), linears(&["b", "a"], true), linears(&["b"], true)];
    right(program(layers), plan("dp=2,pp=3", Numerics::Fast));
}

/// Three uses on two ranks and more: the sum over uses was that over ranks, in another order than on one rank, or
/// between buffers of different sizes.
#[test]
fn the_uses_of_a_tied_weight_are_summed_in_the_order_of_one_rank() {
    let three = vec![linears(&["a"], false), linears(&["a"], true), linears(&["a"], true)];
    right(program(three.clone()), plan("pp=3", CANONICAL));
    right(program(three.clone()), Plan { partition: vec![2, 1], ..plan("pp=2", CANONICAL) });
    right(program(three), Plan { partition: vec![1, 2], ..plan("dp=2,pp=2", CANONICAL) });
}

/// The gradient of beta was that of another number of blocks than its sum took, beyond the end of the buffer.
#[test]
fn a_norm_of_which_one_vector_is_frozen_trains_in_canonical_numerics() {
    for frozen in 0..2 {
        let mut params = vec![param("gamma", &[WIDTH], Role::Norm), param("beta", &[WIDTH], Role::Norm)];
        params[frozen].group = Group::Frozen;
        let norm = block(params, &[Op::LayerNorm { gamma: 0, beta: Some(1) }]);
        right(program(vec![norm]), plan("dp=2", CANONICAL));
    }
}

/// Each rank rounds the sum over its slice of the tokens: the bits depended on the mesh, and nothing said so.
#[test]
fn canonical_numerics_refuse_the_weight_of_a_sequence_that_is_cut() {
    let split = |op: Op, params: Vec<Param>| {
        program(vec![block(params, &[Op::Split(Axis::Tp, 1), op, Op::AllGatherInvariant(Axis::Tp, 1)])])
    };
    let weight = || split(Op::Linear { weight: 0, contract: 1 }, vec![param("w", &[WIDTH, WIDTH], Role::Weight)]);
    for mesh in ["tp=2", "dp=1"] {
        let text = refused(weight(), plan(mesh, CANONICAL));
        assert!(
            text.contains(
                "linear has no canonical numerics: the gradient of a parameter would be a sum over slices of the tokens, in an order \
                 that depends on the mesh; use it on a value whose tokens are whole on each rank: all_gather first, or cut the features"
            ),
            "{text}"
        );
    }
    right(weight(), plan("tp=2", Numerics::Fast));
    // Biases are summed in blocks of the sequence, and rows of positions by one rank each.
    right(split(Op::Bias { bias: 0 }, vec![param("b", &[WIDTH], Role::Bias)]), plan("tp=2", CANONICAL));
    right(split(Op::Positions { table: 0 }, vec![param("at", &[4, WIDTH], Role::Weight)]), plan("tp=2", CANONICAL));
}

/// A rank without a micro-batch failed with a bucket that waited for its gradients.
#[test]
fn replicas_of_a_stage_need_a_micro_batch_each_and_have_no_canonical_order() {
    let two = || program(vec![linears(&["a"], false), linears(&["b"], false)]);
    let plan = |replicas: &[usize], micros, numerics| Plan {
        schedule: ScheduleSpec::Replicated(replicas.to_vec()),
        num_microbatches: Some(micros),
        ..plan("pp=3", numerics)
    };
    right(two(), plan(&[1, 2], 2, Numerics::Fast));
    let text = refused(two(), plan(&[1, 2], 1, Numerics::Fast));
    assert!(
        text.contains(
            "stages on [1, 2] ranks take micro-batches in turn, and 2 replicas of a stage need one each of 1: use more micro-batches"
        ),
        "{text}"
    );
    let text = refused(two(), plan(&[1, 2], 2, CANONICAL));
    assert!(text.contains("none holds a whole subtree of the samples"), "{text}");
}

/// Notes have no types: the buffers of tp ranks went apart.
#[test]
fn a_statistic_of_a_value_that_tp_cuts_is_found() {
    let centred = |ops: &[Op]| program(vec![block(vec![param("rate", &[WIDTH], Role::Buffer)], ops)]);
    let (split, gather, note) =
        (Op::Split(Axis::Tp, 1), Op::AllGatherInvariant(Axis::Tp, 1), Op::Centred { buffer: 0 });
    right(centred(&[split.clone(), gather.clone(), note.clone()]), plan("tp=2", Numerics::Fast));
    let first_step = Plan { verify: Verify::FirstStep, ..plan("tp=2", Numerics::Fast) };
    let text = refused(centred(&[split, note, gather]), first_step);
    assert!(
        text.contains(
            "step 1: the statistics of rate should be the same over tp, and ranks 0, 1 have different bits; note the same values on \
             all ranks that hold the same samples: gather what the axis cuts before Tape::note"
        ),
        "{text}"
    );
}

/// Each mesh would divide the loss by another number.
#[test]
fn terms_that_do_not_add_up_over_samples_are_found() {
    let with = |terms| Program { terms, ..program(vec![linears(&["a"], false)]) };
    right(with(Terms::Twice), plan("dp=2", Numerics::Fast));
    for verify in [Verify::FirstStep, Verify::Off] {
        let ended = run::on_mesh(&case(with(Terms::One), Plan { verify, ..plan("dp=2", Numerics::Fast) }));
        match (verify, ended) {
            (Verify::Off, Ended::Numbers(_)) => {}
            (_, Ended::Claim(text)) => assert_eq!(
                text,
                "step 1: the loss of samples 0..2 of this rank has 1 terms, and those of the samples one by one add up to 2; count in \
                 Model::loss_terms the terms of each sample, whatever samples there are beside it"
            ),
            (verify, other) => panic!("{verify:?}: {other:?}"),
        }
    }
}

/// A mistake in the model of one rank panicked where the states of all were merged.
#[test]
fn a_state_of_which_ranks_have_other_dims_is_refused() {
    let state = |rank: usize, rows: usize| {
        let dims = Shape::new(&[rows, 2]);
        let key = StateKey { parameter: "w".to_owned(), state: None };
        let piece = Piece { rank, dims, slice: LocalSlice::whole(dims), values: vec![0.0; 2 * rows] };
        TrainState { step: 0, updates: 0, pieces: vec![StatePiece { key, piece }] }
    };
    let error = WholeState::merge(&[state(0, 2), state(1, 4)]).unwrap_err().to_string();
    assert!(error.contains("it has the dims [2, 2] on rank 0 and [4, 2] on rank 1"), "{error}");
}

/// One sample, one token and one head on each rank: what is cut was taken for a dim behind the first.
#[test]
fn extents_of_one_have_the_types_of_any_other() {
    let views = |inner: usize| {
        let (split, gather) = (Op::Split(Axis::Tp, 1), Op::AllGatherInvariant(Axis::Tp, 1));
        let view = [Op::SplitDim { dim: 2, inner }, Op::Transpose(1, 2), Op::Transpose(1, 2), Op::MergeDims { dim: 2 }];
        block(Vec::new(), &[&[split][..], &view[..], &[gather][..]].concat())
    };
    for inner in [1, 2, WIDTH] {
        let one = || Program { seq: 2, ..program(vec![views(inner), linears(&["a"], false)]) };
        for (mesh, micros) in [("tp=2", 4), ("dp=2,tp=2", 2), ("dp=4", 1)] {
            right(one(), Plan { num_microbatches: Some(micros), ..plan(mesh, Numerics::Fast) });
        }
    }
}
