//! Errors that other trainers had in public, each tried as a small program; `docs/silent_errors.md` has the threads.

use crate::found::{CANONICAL, WIDTH, block, linears, param, plan, program, refused, right};
use crate::interpret::{self, Net};
use crate::program::{Block, Group, Instr, Map, Op, Param};
use meshwork_core::Axis;
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{
    LossScale, MixedPrecision, Numerics, Plan, Recompute, TrainError, TrainState, Trainer, WholeState,
};
use meshwork_engine::{Zero, ZeroStage};
use meshwork_nn::Model;
use meshwork_tensor::tape::HalfType;
use meshwork_tensor::{Init, Role};
use std::sync::{Arc, Mutex};

/// A plan under each stage of ZeRO.
fn stages(plan: &Plan) -> impl Iterator<Item = Plan> {
    let plan = plan.clone();
    ZeroStage::ALL.into_iter().map(move |stage| Plan { zero: Zero { stage, group: None }, ..plan.clone() })
}

fn instr(op: Op, args: &[usize]) -> Instr {
    Instr { op, args: args.to_vec() }
}

/// The gradient of one use went to the optimizer alone, or was divided once more: DeepSpeed's hooks counted a module's
/// backward once.
#[test]
fn a_module_used_twice_in_a_step_has_the_gradients_of_both_uses() {
    let linear = || Op::Linear { weight: 0, contract: 1 };
    let twice = || block(vec![param("a", &[WIDTH, WIDTH], Role::Weight)], &[linear(), Op::Map(Map::Tanh), linear()]);
    let halves = MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: false, loss_scale: LossScale::Fixed(8.0) };
    for (mesh, numerics, mixed, recompute) in [
        ("dp=2", Numerics::Fast, None, Recompute::None),
        ("dp=2,tp=2", Numerics::Fast, None, Recompute::Full),
        ("dp=2,pp=2", CANONICAL, Some(halves), Recompute::None),
        ("dp=2", CANONICAL, Some(halves), Recompute::Full),
    ] {
        for plan in stages(&Plan { mixed, recompute, ..plan(mesh, numerics) }) {
            right(program(vec![twice(), linears(&["b"], false)]), plan);
        }
    }
}

/// The factors of an adapter. The first has no gradient before the second has left zero, and the hook that summed it
/// over the replicas was skipped where the product added to the gradient in place: they split in the second step.
#[test]
fn a_factor_that_two_layers_share_is_the_same_on_all_ranks_behind_its_first_gradient() {
    let adapted = |base: &str, up: &str, tied| {
        let frozen = Param { group: Group::Frozen, ..param(base, &[WIDTH, WIDTH], Role::Weight) };
        let down = Param { tied, ..param("down", &[2, WIDTH], Role::Weight) };
        let up = Param { init: Init::Zeros, ..param(up, &[WIDTH, 2], Role::Weight) };
        let linear = |weight| Op::Linear { weight, contract: 1 };
        let code =
            vec![instr(linear(0), &[0]), instr(linear(1), &[0]), instr(linear(2), &[2]), instr(Op::Add, &[1, 3])];
        Block { params: vec![frozen, down, up], code }
    };
    let layers = || vec![adapted("base0", "up0", false), adapted("base1", "up1", true)];
    for mesh in ["dp=2", "dp=2,tp=2", "pp=2", "dp=2,pp=2"] {
        for plan in stages(&plan(mesh, Numerics::Fast)) {
            right(program(layers()), plan);
        }
    }
}

/// Only the first or the last micro-batch counted, what was added up was divided again for each, or it doubled where
/// nobody else had a share.
#[test]
fn gradients_of_several_micro_batches_add_up_under_every_stage_of_zero() {
    for (mesh, group, micros) in [("dp=2", None, 2), ("dp=2", Some(1), 2), ("tp=2", None, 4), ("pp=2", None, 4)] {
        // Stage 0 shares out nothing, in groups or not.
        for stage in ZeroStage::ALL.into_iter().filter(|&stage| group.is_none() || stage != ZeroStage::ALL[0]) {
            let zero = Zero { stage, group };
            let plan = Plan { zero, num_microbatches: Some(micros), ..plan(mesh, Numerics::Fast) };
            right(program(vec![linears(&["a"], false), linears(&["b"], false)]), plan);
        }
    }
}

/// A loss over the samples of all ranks was scaled by their number, or gathered without a gradient.
#[test]
fn what_reads_the_samples_of_all_ranks_has_the_gradient_of_one() {
    let code = vec![
        instr(Op::Linear { weight: 0, contract: 1 }, &[0]),
        instr(Op::AllGather(Axis::Dp, 0), &[1]),
        instr(Op::SampleMean, &[2]),
        instr(Op::Sub, &[1, 3]),
    ];
    let centred = Block { params: vec![param("a", &[WIDTH, WIDTH], Role::Weight)], code };
    for mesh in ["dp=2", "dp=4", "dp=2,tp=2", "dp=2,pp=2"] {
        for plan in stages(&Plan { num_microbatches: Some(1), ..plan(mesh, Numerics::Fast) }) {
            right(program(vec![centred.clone(), linears(&["b"], false)]), plan);
        }
    }
    // Where they are not gathered, the mean of each rank is no mean over the samples.
    let mut local = centred;
    local.code[1].op = Op::Same;
    refused(program(vec![local]), Plan { num_microbatches: Some(1), ..plan("dp=2", Numerics::Fast) });
}

/// Moments were not saved, or not found, and started from zero at the full rate.
#[test]
fn a_run_does_not_go_on_without_its_optimizer_states() {
    for plan in stages(&plan("dp=2,tp=2", Numerics::Fast)) {
        let model: Arc<dyn Model> = Arc::new(Net(Arc::new(program(vec![linears(&["a"], false)]))));
        let met: Mutex<Vec<TrainState>> = Mutex::default();
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device())?;
            let samples = trainer.samples();
            trainer.step(&interpret::batch(&program(vec![linears(&["a"], false)]), 1, 0, 4, samples))?;
            met.lock().unwrap().push(trainer.state()?);
            rank.world().barrier()?;
            let mut states = met.lock().unwrap().clone();
            trainer.load_state(&WholeState::merge(&states)?)?;
            states.iter_mut().for_each(|state| state.pieces.retain(|held| held.key.state.is_none()));
            Ok::<_, TrainError>(trainer.load_state(&WholeState::merge(&states)?).unwrap_err().to_string())
        });
        for error in ranks.unwrap_or_else(|error| panic!("{error}")) {
            assert!(error.contains("momentum_buffer"), "{error}");
        }
    }
}
