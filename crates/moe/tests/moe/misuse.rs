//! Wrong programs and wrong settings: each is refused, with what would be valid.

use crate::world::{ALONE, Case, EP, How, declarations, layer, params};
use meshwork_core::{Axis, Rank, Ty, Types};
use meshwork_cpu::Cpu;
use meshwork_moe::balance::{Load, switch_loss};
use meshwork_moe::dispatch::{Chosen, Dispatch};
use meshwork_moe::{AuxLossScope, ExpertGroups, MoeConfig, MoeError, Overflow, Router, RouterKind};
use meshwork_tensor::op::RowGroups;
use meshwork_tensor::tape::{Mode, Position};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Role, Tape, Tensor, Var};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

const HIDDEN: usize = 4;
const EXPERTS: usize = 4;

/// A tape of rank 0 of tp=2 and two ranks of experts, with a weight of experts cut in these ways, and a router's.
fn tape(placements: &[(&'static str, &[usize], Placement)]) -> (Tape, BTreeMap<&'static str, ParamId>) {
    let rank = Arc::new(Rank::recording(&How { tp: 2, ep: 2, ..ALONE }.mesh(), 0).unwrap());
    let (device, mut declared) = (Cpu::device(), Declarations::new());
    let mut ids = BTreeMap::new();
    for (name, dims, placement) in placements {
        ids.insert(*name, declared.declare(*name, dims, placement.clone(), Role::Weight, Init::Zeros).unwrap());
    }
    let params = params(declared, &rank, &device);
    (Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default()), ids)
}

fn value(tape: &Tape, shape: &[usize], tp: Ty, ep: Ty) -> Var {
    let count = shape.iter().product::<usize>();
    let tensor = Tensor::from_slice(tape.device(), &vec![0.5_f32; count], shape).unwrap();
    tape.input(tensor, Types::new(&[(Axis::Tp, tp), (EP, ep), (Axis::Dp, samples(shape))]))
}

/// The type over the rest of dp: tokens `[b, s, h]` are cut there, and rows `[rows, h]` vary.
fn samples(shape: &[usize]) -> Ty {
    if shape.len() == 2 { Ty::Varying } else { Ty::Shard(0) }
}

/// Two tokens of one sample on this rank, with experts 0 and 1, 2 and 3. Without a peer: only what needs no exchange
/// can be made.
fn chosen(tape: &Tape) -> Chosen {
    Chosen {
        experts: Tensor::from_slice(tape.device(), &[0, 1, 2, 3], [1, 2, 2]).unwrap(),
        num_experts: EXPERTS,
        types: Types::new(&[(Axis::Tp, Ty::Invariant), (EP, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0))]),
        capacity: None,
        top_k: 2,
    }
}

fn error<T>(result: meshwork_tensor::Result<T>) -> String {
    result.err().expect("this must be refused").to_string()
}

#[test]
fn a_routers_weight_is_not_cut_over_the_experts() {
    let (tape, ids) = tape(&[("router", &[EXPERTS, HIDDEN], Placement::replicated().shard(EP, 0))]);
    let weight = tape.param(ids["router"]).unwrap();
    let x = value(&tape, &[1, 2, HIDDEN], Ty::Invariant, Ty::Shard(0));
    let refused = error(x.linear(&weight, 1));
    assert!(refused.contains("on axis ep, x is Shard(0) and weight is Shard(0)"), "{refused}");
}

#[test]
fn rows_meet_the_experts_of_their_rank() {
    let (experts, whole) = (Placement::replicated().shard(EP, 0), Placement::replicated());
    let (tape, ids) = tape(&[
        ("cut", &[EXPERTS, 6, HIDDEN], experts),
        ("whole", &[EXPERTS, 6, HIDDEN], whole),
        ("over tp", &[EXPERTS, 6, HIDDEN], Placement::replicated().shard(EP, 0).shard(Axis::Tp, 1)),
    ]);
    let rows = |tp, ep| value(&tape, &[3, HIDDEN], tp, ep);
    let sample = 0..1;
    let groups = Rc::new(RowGroups::new(EP, vec![sample], vec![vec![1], vec![2]]));
    let product = |x: &Var, name: &str| x.grouped_linear(&tape.param(ids[name])?, 1, &groups);
    let y = product(&rows(Ty::Invariant, Ty::Varying), "cut").unwrap();
    assert_eq!(y.types(), Types::new(&[(Axis::Tp, Ty::Invariant), (EP, Ty::Varying), (Axis::Dp, Ty::Varying)]));
    for (refused, say) in [
        (
            error(product(&rows(Ty::Invariant, Ty::Shard(0)), "cut")),
            "on axis ep, x are Shard(0), and the rows of groups are those of their experts",
        ),
        (error(product(&rows(Ty::Invariant, Ty::Invariant), "cut")), "rows meant for others; dispatch them"),
        // The gradient of a whole weight would be summed over all of dp.
        (
            error(product(&rows(Ty::Invariant, Ty::Varying), "whole")),
            "weight is Replicate, and the rows are those of this rank's experts",
        ),
        (
            error(product(&rows(Ty::Invariant, Ty::Varying), "over tp")),
            "copy(I→R) x before this column-parallel product",
        ),
    ] {
        assert!(refused.contains(say), "{refused}");
    }
}

#[test]
fn results_are_combined_where_their_tokens_are() {
    let (tape, _) = tape(&[]);
    // On one rank, so that no peer is needed.
    let alone = Arc::new(Rank::recording(&ALONE.mesh(), 0).unwrap());
    let params = params(Declarations::new(), &alone, tape.device());
    let tape = Tape::new(alone, Arc::new(params), tape.device().clone(), Mode::Train, Position::default());
    let dispatch = Dispatch::new(&tape, &chosen(&tape), EP).unwrap();
    let tokens = |tp, ep| value(&tape, &[1, 2, HIDDEN], tp, ep);
    let x = tokens(Ty::Invariant, Ty::Shard(0));
    let weights = value(&tape, &[1, 2, 2], Ty::Invariant, Ty::Shard(0));
    let mut rows = None;
    let results = dispatch.through(&x, |of_experts, _| Ok(rows.insert(of_experts.clone()).clone())).unwrap();
    let rows = rows.unwrap();
    assert_eq!((rows.ty(EP), results.ty(EP)), (Ty::Varying, Ty::Shard(0)));
    let refused = error(dispatch.combine(&rows, &weights));
    assert!(
        refused.contains("results are Varying: they are still on the ranks of their experts; give them back first"),
        "{refused}"
    );
    dispatch.combine(&results, &weights).unwrap();
    assert!(error(dispatch.combine(&results, &weights)).contains("before they were sent, or twice"));

    for (tp, ep, say) in [
        (Ty::Invariant, Ty::Invariant, "x is Invariant: an expert would get the same token from every rank"),
        (Ty::Shard(1), Ty::Shard(0), "all_gather_invariant x along dim 1 first"),
        (Ty::Partial, Ty::Shard(0), "x is Partial"),
        (Ty::Replicate, Ty::Shard(0), "its experts were chosen of Invariant"),
    ] {
        let refused = error(dispatch.through(&tokens(tp, ep), |rows, _| Ok(rows.clone())));
        assert!(refused.contains(say), "{refused}");
    }
    // Rows whose sum over tp has not been taken.
    let partial = value(&tape, &[4, HIDDEN], Ty::Partial, Ty::Varying);
    assert!(error(dispatch.through(&x, |_, _| Ok(partial.clone()))).contains("all_reduce them over tp first"));
}

/// Behind `copy` every rank of tp would add the same loss.
#[test]
fn a_loss_is_not_counted_once_for_each_rank_of_tp() {
    let (tape, _) = tape(&[]);
    let scores = value(&tape, &[1, 2, EXPERTS], Ty::Invariant, Ty::Shard(0));
    let load = Load::of_sequences(&chosen(&tape).experts, EXPERTS).unwrap();
    let loss = switch_loss(&scores, &load).unwrap();
    tape.add_loss("moe_aux_loss", 0.1, &loss).unwrap();
    let copied = switch_loss(&scores.copy(Axis::Tp).unwrap(), &load).unwrap();
    let refused = error(tape.add_loss("moe_aux_loss", 0.1, &copied));
    assert!(
        refused.contains("on axis tp, the auxiliary loss is Replicate: each rank would add a gradient of its own"),
        "{refused}"
    );
    // Nor on parts of a sequence.
    let parts = value(&tape, &[1, 2, EXPERTS], Ty::Shard(1), Ty::Shard(0));
    assert!(error(switch_loss(&parts, &load)).contains("needs whole sequences"));
}

/// The bias is a buffer that nothing but the statistic of the whole batch changes.
#[test]
fn a_bias_is_not_updated_from_local_counts() {
    let mut declared = Declarations::new();
    let config = MoeConfig { router: RouterKind::Bias, bias_update_rate: 0.1, ..MoeConfig::default() };
    let router = Router::new(&mut declared, "router", HIDDEN, config, Init::Zeros).unwrap();
    let bias = router.bias().unwrap();
    assert_eq!(declared.spec(bias).role, Role::Buffer);
    assert!(declared.spec(bias).group.frozen, "no gradient, no update rule");
    let statistics = declared.statistics();
    assert_eq!(statistics.len(), 1);
    assert_eq!(statistics[0].buffers, [router.tokens(), bias]);
    // The rule sees the sums over the batch alone: those of two ranks that are even together move nothing.
    let rule = &statistics[0].rule;
    let sums: Vec<f64> =
        rule.terms(1.0, &[4.0, 0.0]).iter().zip(rule.terms(1.0, &[0.0, 4.0])).map(|(a, b)| a + b).collect();
    let mut buffers = [vec![0.0; 2], vec![0.0; 2]];
    rule.update(&sums, &mut buffers);
    assert_eq!(buffers, [vec![4.0, 4.0], vec![0.0, 0.0]]);
}

#[test]
fn settings_that_cannot_be_are_named() {
    let of = |config: MoeConfig, ep| config.check(ep).err().map(|wrong| wrong[0].to_string()).unwrap_or_default();
    let config = MoeConfig::default();
    assert_eq!(of(config, 4), "");
    let groups = |groups, top_groups, best| MoeConfig { groups: ExpertGroups { groups, top_groups, best }, ..config };
    for (config, ep, say) in [
        (MoeConfig { num_experts: 0, ..config }, 1, "num_experts is 0"),
        (
            config,
            3,
            "8 experts cannot be spread over ep=3: each rank holds the same number; degrees that divide them are 1, 2, 4, 8",
        ),
        (MoeConfig { top_k: 9, ..config }, 1, "top_k is 9: with router topk and 8 experts it is from 1 to 8"),
        (MoeConfig { top_k: 0, ..config }, 1, "top_k is 0"),
        (MoeConfig { router: RouterKind::Switch, ..config }, 1, "top_k is 2: with router switch and 8 experts it is 1"),
        (MoeConfig { router: RouterKind::Gshard, top_k: 1, ..config }, 1, "it is 2, of two experts or more"),
        (groups(3, 1, 1), 1, "8 experts are no 3 groups of one size; use 1, 2, 4, 8 groups"),
        (groups(4, 5, 1), 1, "top_groups is 5 of 4; choose from 1 to 4"),
        (groups(4, 1, 3), 1, "sums its 3 best of 2 experts"),
        (groups(8, 1, 1), 1, "1 of 8 groups have 1 experts, and top_k is 2"),
        (
            MoeConfig { router: RouterKind::ExpertChoice, overflow: Overflow::Reroute, ..config },
            1,
            "overflow is reroute, and router expert_choice leaves nothing over",
        ),
        (MoeConfig { capacity_factor: -1.0, ..config }, 1, "capacity_factor is -1: a number of at least 0"),
        (MoeConfig { capacity_factor: f64::NAN, ..config }, 1, "capacity_factor is NaN"),
        (MoeConfig { jitter: 1.0, ..config }, 1, "jitter is 1: a number from 0 to below 1"),
        (MoeConfig { bias_update_rate: 0.1, ..config }, 1, "bias_update_rate is 0.1, and router topk has none"),
        (
            MoeConfig { router: RouterKind::ExpertChoice, aux_loss_coeff: 0.1, ..config },
            1,
            "its experts take equal numbers",
        ),
    ] {
        let found = of(config, ep);
        assert!(found.contains(say), "{found:?} does not say {say:?}");
    }
    assert_eq!(MoeConfig { top_k: 9, jitter: -1.0, ..config }.check(3).unwrap_err().len(), 3, "all at once");
}

/// What only the layer can see.
#[test]
fn layers_that_cannot_be_are_refused() {
    let refuse = |case: Case, how: How| error(layer(&case, &mut declarations(&case), &how.mesh()));
    let case = Case::default();
    assert!(
        refuse(case, How { ep: 3, ..ALONE }).contains(&MoeError::Indivisible { num_experts: 4, ep: 3 }.to_string())
    );
    assert!(refuse(Case { dims: [8, 6, 12, 15], ..case }, How { tp: 2, ..ALONE }).contains("15 inner features"));
    let global = MoeConfig { aux_loss_scope: AuxLossScope::GlobalBatch, ..case.config };
    assert!(refuse(Case { config: global, canonical: true, ..case }, ALONE).contains("use aux_loss_scope sequence"));
    // Three experts of each rank are no subtree of six.
    let rank = Arc::new(Rank::recording(&How { ep: 2, ..ALONE }.mesh(), 0).unwrap());
    let device = Cpu::device();
    let params = params(Declarations::canonical(8), &rank, &device);
    let tape = Tape::new(rank, Arc::new(params), device, Mode::Train, Position::default());
    let six = Chosen { num_experts: 6, ..chosen(&tape) };
    assert!(error(Dispatch::new(&tape, &six, EP)).contains("6 experts fit degrees [1, 3, 6]"));
}
