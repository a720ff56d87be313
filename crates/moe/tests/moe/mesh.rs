//! The same numbers on every mesh: close to those of one rank in fast numerics, and its bits in canonical ones.

use crate::world::{ALONE, Case, EP, How, Outcome, run};
use meshwork_core::{Axis, Ty};
use meshwork_moe::{AuxLossScope, ExpertGroups, MoeConfig, Overflow, RouterKind};

const MESHES: [How; 10] = [
    How { dp: 2, ..ALONE },
    How { ep: 2, ..ALONE },
    How { ep: 2, dp: 2, ..ALONE },
    How { tp: 2, ep: 2, dp: 2, micros: 2, ..ALONE },
    How { ep: 4, ..ALONE },
    How { ep: 2, micros: 2, ..ALONE },
    How { tp: 2, ..ALONE },
    How { tp: 2, ep: 2, ..ALONE },
    How { tp: 2, ep: 2, sequence_parallel: true, deferred: true, ..ALONE },
    How { ep: 4, micros: 2, deferred: true, ..ALONE },
];

fn routers() -> Vec<MoeConfig> {
    let of = MoeConfig { num_experts: 8, aux_loss_coeff: 0.1, z_loss_coeff: 0.05, ..MoeConfig::default() };
    let groups = ExpertGroups { groups: 4, top_groups: 2, best: 2 };
    vec![
        of,
        MoeConfig { top_k: 3, capacity_factor: 1.0, normalise: false, ..of },
        MoeConfig { router: RouterKind::Switch, top_k: 1, capacity_factor: 1.0, jitter: 0.1, ..of },
        MoeConfig { router: RouterKind::Gshard, capacity_factor: 1.0, ..of },
        MoeConfig { capacity_factor: 0.75, overflow: Overflow::Reroute, ..of },
        MoeConfig { router: RouterKind::ExpertChoice, aux_loss_coeff: 0.0, ..of },
        MoeConfig { router: RouterKind::Bias, top_k: 4, groups, bias_update_rate: 0.01, routed_scaling: 2.5, ..of },
    ]
}

fn assert_near(what: &str, got: &[f32], want: &[f32], all: f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut got.iter().zip(want).map(|(&got, &want)| f64::from(got) - f64::from(want)));
    let bound = 1e-5 * norm(&mut want.iter().map(|&x| f64::from(x))).max(1e-4 * all);
    assert!(got.len() == want.len() && apart <= bound, "{what}: {apart:e} apart, and {bound:e} is allowed");
}

fn assert_same(what: &str, got: &Outcome, want: &Outcome) {
    let all = want.params.values().flatten().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    assert_near(&format!("{what}: output"), &got.output, &want.output, 0.0);
    assert_near(&format!("{what}: gradient of x"), &got.dx, &want.dx, 0.0);
    assert!(got.params.keys().eq(want.params.keys()));
    for (name, want) in &want.params {
        assert_near(&format!("{what}: {name}"), &got.params[name], want, all);
    }
    // Nothing here lies so close to another choice that rounding flips it.
    assert_eq!(got.load, want.load, "{what}");
    for (name, want) in &want.reports {
        for (got, want) in got.reports[name].iter().zip(want) {
            assert!((got - want).abs() <= 1e-5 * want.abs().max(1.0), "{what}: {name} is {got}, alone {want}");
        }
    }
}

#[test]
fn meshes_agree_with_one_rank() {
    for config in routers() {
        for swiglu in [false, true] {
            let case = Case { config, swiglu, ..Case::default() };
            let want = run(&case, ALONE);
            for how in MESHES {
                assert_same(&format!("{} {how:?}", config.router), &run(&case, how), &want);
            }
        }
    }
}

/// In canonical numerics nothing differs, to the last bit: choices, losses, gradients.
#[test]
fn meshes_have_the_bits_of_one_rank() {
    for config in routers() {
        for swiglu in [false, true] {
            let case = Case { config, swiglu, canonical: true, ..Case::default() };
            let want = run(&case, ALONE);
            for how in MESHES {
                let got = run(&case, how);
                let what = format!("{} {how:?}", config.router);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&got.output), bits(&want.output), "{what}: output");
                assert_eq!(bits(&got.dx), bits(&want.dx), "{what}: gradient of x");
                for (name, want) in &want.params {
                    assert_eq!(bits(&got.params[name]), bits(want), "{what}: gradient of {name}");
                }
                assert_eq!((&got.load, &got.reports), (&want.load, &want.reports), "{what}");
            }
        }
    }
}

/// Adapters are where their experts are, whole or cut.
#[test]
fn adapters_of_experts_agree_with_one_rank() {
    for (swiglu, over_tp, canonical) in
        [false, true].into_iter().flat_map(|a| [(a, false, false), (a, false, true), (a, true, false), (a, true, true)])
    {
        let case = Case { swiglu, over_tp, canonical, adapted: true, ..Case::default() };
        let want = run(&case, ALONE);
        let trained: Vec<&str> = want.params.keys().map(|name| name.rsplit('.').next().unwrap_or_default()).collect();
        assert_eq!(trained, ["a", "b", "a", "b", "weight"], "of the router: {:?}", want.params.keys());
        for how in MESHES {
            let got = run(&case, how);
            assert_same(&format!("{how:?}"), &got, &want);
            if canonical {
                assert_eq!(
                    (got.output, got.dx, got.params),
                    (want.output.clone(), want.dx.clone(), want.params.clone())
                );
            }
        }
    }
}

/// Whole experts do the same work on every rank of tp.
#[test]
fn experts_may_be_whole_on_ranks_of_tp() {
    for canonical in [false, true] {
        let case = Case { over_tp: false, canonical, ..Case::default() };
        let want = run(&case, ALONE);
        for how in MESHES {
            let got = run(&case, how);
            assert_same(&format!("{how:?}"), &got, &want);
            if canonical {
                assert_eq!(
                    (got.output, got.dx, got.params),
                    (want.output.clone(), want.dx.clone(), want.params.clone())
                );
            }
        }
    }
}

/// The gradient of an expert is a sum over the ranks that hold it, never over the axis that cuts the experts; the
/// router's is a sum over all ranks with other samples.
#[test]
fn gradients_are_summed_over_those_that_hold_a_parameter() {
    let got = run(&Case::default(), How { tp: 2, ep: 2, dp: 2, ..ALONE });
    let ty = |name: &str, axis| got.types[name].get(axis).unwrap();
    for name in ["experts.up.weight", "experts.down.weight", "experts.up.bias", "experts.down.bias"] {
        assert_eq!((ty(name, EP), ty(name, Axis::Dp)), (Ty::Shard(0), Ty::Partial), "{name}");
    }
    assert_eq!(ty("experts.up.weight", Axis::Tp), Ty::Shard(1));
    assert_eq!(ty("experts.down.weight", Axis::Tp), Ty::Shard(2));
    assert_eq!(ty("experts.down.bias", Axis::Tp), Ty::Invariant);
    let router = [EP, Axis::Dp, Axis::Tp].map(|axis| ty("router.weight", axis));
    assert_eq!(router, [Ty::Partial, Ty::Partial, Ty::Invariant]);
}

/// A token goes to a rank once, and its results come back one by one; then the same backward.
#[test]
fn bytes_are_those_of_the_formula() {
    let case = Case::default();
    let [batch, seq, hidden, _] = case.dims;
    assert_eq!(run(&case, ALONE).bytes, 0.0);
    for (ep, top_k) in [(2, 1), (4, 1), (2, 4), (4, 2)] {
        let case = Case { config: MoeConfig { top_k, ..case.config }, ..case };
        let got = run(&case, How { ep, ..ALONE });
        let tokens = batch * seq / ep;
        // What goes both ways, forward and backward, if every choice goes to another rank; and the integers of the
        // announcement and of the choices.
        let most = |rows: f64| 2.0 * rows * (hidden * 4) as f64;
        let announced = (ep - 1) * 4 * (1 + batch / ep * (1 + case.config.num_experts / ep));
        let to_other_ranks = (tokens * top_k.min(ep)) as f64;
        let integers = announced as f64 + to_other_ranks * (top_k * 4) as f64;
        let bound = most(to_other_ranks) + most((tokens * top_k) as f64) + integers;
        assert!(got.bytes > 0.0 && got.bytes <= bound, "ep={ep}, k={top_k}: {} bytes, at most {bound}", got.bytes);
        if (ep, top_k) == (2, 4) {
            // Every token goes to the other rank, once for two experts, and two results come back.
            let exact = most(tokens as f64) + most(2.0 * tokens as f64) + announced as f64 + (tokens * 16) as f64;
            assert_eq!(got.bytes, exact);
        }
    }
}

/// Counts of all sequences make another loss than those of each, and the same on every mesh of one micro-batch.
#[test]
fn the_load_of_the_global_batch() {
    let config = MoeConfig { aux_loss_scope: AuxLossScope::GlobalBatch, aux_loss_coeff: 0.1, ..Case::default().config };
    let case = Case { config, ..Case::default() };
    let want = run(&case, ALONE);
    let of_sequences = run(&Case::default(), ALONE);
    assert_ne!(want.reports["moe_aux_loss"], of_sequences.reports["moe_aux_loss"]);
    // N Σ f P over the batch.
    let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
    assert!(
        mean(&want.reports["moe_aux_loss"]) >= 0.99
            && mean(&want.reports["moe_aux_loss"]) < mean(&of_sequences.reports["moe_aux_loss"])
    );
    for how in [How { ep: 2, dp: 2, ..ALONE }, How { tp: 2, ep: 4, ..ALONE }] {
        assert_same(&format!("{how:?}"), &run(&case, how), &want);
    }
}

#[test]
fn the_opaque_device_has_the_same_bits() {
    for config in routers() {
        for how in [ALONE, How { tp: 2, ep: 2, dp: 2, ..ALONE }] {
            let case = Case { config, ..Case::default() };
            let (got, want) = (run(&case, How { opaque: true, ..how }), run(&case, how));
            assert_eq!(got, want, "{} {how:?}", config.router);
        }
    }
}
