//! A random case: a program, and the plan of a run of it on a mesh.

use crate::generate::{self, Target};
use crate::program::{Data, Program};
use meshwork_core::{Axis, Mesh, tree};
use meshwork_engine::{
    Compress, LossScale, MixedPrecision, Numerics, Plan, Recompute, Samples, ScheduleSpec, Verify, Zero, ZeroStage,
};
use meshwork_optim::{Decay, LrSchedule, Sgd};
use meshwork_pipeline::Generator;
use meshwork_tensor::Precision;
use meshwork_tensor::tape::{Encoding, HalfType};
use meshwork_testkit::Rng;

/// What runs a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A trainer, which may load other weights and states between two steps.
    Trainer { load: bool },
    /// A loop that the user wrote on tapes, which has no stages and its own update.
    Loop,
    /// A decoder, which goes through the tokens of the samples in several passes.
    Decoder,
}

/// A program and its runs.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it was drawn from.
    pub seed: u64,
    pub way: Way,
    pub program: Program,
    /// On a mesh.
    pub plan: Plan,
    /// On one rank.
    pub alone: Plan,
}

/// A case of a seed.
pub fn case(seed: u64, attempt: u64) -> Case {
    let mut rng = Rng::new(seed.wrapping_add(attempt << 48).wrapping_mul(0x2545_f491_4f6c_dd1d));
    let way = match rng.below(8) {
        0 | 1 => Way::Loop,
        2 => Way::Decoder,
        load => Way::Trainer { load: load == 3 },
    };
    let mut plan = loop {
        if let Some(plan) = plan(&mut rng, seed).filter(|plan| fits(way, plan)) {
            break plan;
        }
    };
    if way == Way::Loop {
        plan = Plan { optimizer: Sgd { momentum: 0.0, weight_decay: 0.0 }.into(), max_norm: 0.0, ..plan };
    }
    // What reads the samples of all ranks has to have all samples at once.
    let gathers =
        plan.blocks().is_none() && way != Way::Decoder && plan.num_microbatches == Some(1) && rng.below(2) == 0;
    let stages = plan.schedule.stages(plan.mesh.degree(Axis::Pp));
    let target = Target { mesh: &plan.mesh, blocks: plan.blocks(), layers: stages, way, gathers };
    let program = generate::program(&mut rng, &target);
    // An axis over which nothing is cut is refused.
    if !program.cuts_over(Axis::Cp) {
        plan.mesh = mesh([Axis::Dp, Axis::Tp, Axis::Cp, Axis::Pp].map(|axis| match axis {
            Axis::Cp => 1,
            axis => plan.mesh.degree(axis),
        }));
    }
    // So few words are alike on two ranks now and then.
    let held = plan.global_batch_size / plan.mesh.data_degree() * program.seq;
    if held < 8 && matches!(program.data, Data::Tokens { .. }) {
        plan.samples = Samples::MayRepeat;
    }
    if rng.below(2) == 0 {
        plan.partition = (0..stages).map(|_| 0).collect();
        (0..program.layers()).for_each(|_| plan.partition[rng.below(stages)] += 1);
    }
    let divisors: Vec<usize> =
        (1..=plan.global_batch_size).filter(|n| plan.global_batch_size.is_multiple_of(*n)).collect();
    let alone = Plan {
        mesh: mesh([1; 4]),
        schedule: ScheduleSpec::default(),
        partition: Vec::new(),
        num_microbatches: Some(if gathers { 1 } else { rng.pick(&divisors) }),
        recompute: Recompute::None,
        ..plan.clone()
    };
    Case { seed, way, program, plan, alone }
}

/// Whether a plan goes with what runs it: loops have one stage and the numerics of their sums.
fn fits(way: Way, plan: &Plan) -> bool {
    match way {
        Way::Trainer { .. } => true,
        Way::Loop => plan.mesh.degree(Axis::Pp) == 1 && plan.blocks().is_none(),
        Way::Decoder => plan.mixed.is_none() && !matches!(plan.schedule, ScheduleSpec::Replicated(_)),
    }
}

/// As it is read from a configuration: with every axis, of degree 1 if need be.
fn mesh([dp, tp, cp, pp]: [usize; 4]) -> Mesh {
    format!("dp={dp},tp={tp},cp={cp},pp={pp}").parse().expect("four axes")
}

/// A random plan of two to eight ranks, if what was drawn goes together.
fn plan(rng: &mut Rng, seed: u64) -> Option<Plan> {
    let degrees = [[1, 1, 2, 2, 3, 4], [1, 2, 2, 2, 3, 4], [1, 1, 1, 1, 2, 3], [1, 1, 2, 2, 3, 4]];
    let degrees @ [dp, tp, cp, pp] = degrees.map(|of| rng.pick(&of));
    let ranks: usize = degrees.iter().product();
    // Worlds of few ranks are quicker, and as wrong.
    if !(2..=8).contains(&ranks) || (ranks > 4 && rng.below(3) > 0) {
        return None;
    }
    let generator = rng.pick(&Generator::ALL);
    let replicated = pp > 1 && rng.below(8) == 0;
    let schedule = match replicated {
        true => {
            let first = 1 + rng.below(pp - 1);
            ScheduleSpec::Replicated(vec![first, pp - first])
        }
        false => ScheduleSpec::Named { generator, virtual_stages: None, vertical_sync: false },
    };
    let (micros, micro_batch) = (1 + rng.below(4), 1 + rng.below(3));
    let global_batch_size = dp * micros * micro_batch;
    let blocks = rng.pick(&[4, 8]);
    // Replicas of a stage need a micro-batch each, and have no canonical order of samples.
    let canonical = !replicated && rng.below(3) == 0;
    let fits = tree::fits(blocks, tp) && tree::fits(blocks, cp) && tree::fits(global_batch_size, dp);
    if !generator.is_synchronous() || (canonical && !fits) {
        return None;
    }
    let plan = Plan {
        mesh: mesh(degrees),
        schedule,
        partition: Vec::new(),
        global_batch_size,
        num_microbatches: Some(micros),
        numerics: if canonical { Numerics::Canonical { blocks } } else { Numerics::Fast },
        precision: match (canonical, if canonical { 0 } else { rng.below(8) }) {
            (false, 0) => Precision::Bf16,
            (false, 1) => Precision::Tf32,
            _ => Precision::F32,
        },
        recompute: rng.pick(&[
            Recompute::None,
            Recompute::Selective,
            Recompute::Stage,
            Recompute::Full,
            Recompute::Sqrt,
            Recompute::Layers(1),
        ]),
        // In fast numerics an error in the last bit may become one of 16 bits.
        saved: match seed % 4 {
            0 => vec![Encoding::Sparse],
            1 if canonical => vec![Encoding::Half(HalfType::Bf16)],
            2 if canonical => vec![Encoding::Half(HalfType::Bf16), Encoding::Sparse],
            _ => Vec::new(),
        },
        mixed: (canonical && seed.is_multiple_of(5)).then_some(MixedPrecision {
            dtype: rng.pick(&[HalfType::Bf16, HalfType::F16]),
            reduce_in_half: false,
            loss_scale: LossScale::Fixed(8.0),
        }),
        // The momentum after the first step is the gradient, as it was clipped.
        optimizer: Sgd { momentum: 0.5, weight_decay: 0.0 }.into(),
        lr: LrSchedule { base: 0.125, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: rng.pick(&[0.0, 0.5]),
        seed,
        scatter_gather: rng.below(2) == 0,
        zero: Zero { stage: ZeroStage::ALL[seed as usize % 4], group: None },
        offload: None,
        compress: Compress::default(), // what it loses has no run of one rank to be compared with
        virtual_cuts: Vec::new(),
        samples: Samples::Distinct,
        verify: rng.pick(&[Verify::FirstStep, Verify::Every(1)]),
    };
    plan.build_schedule().is_ok().then_some(plan)
}
