//! The model of `examples/custom_model`, which uses only the public API: any mesh gives the numbers of one rank, and in
//! canonical numerics its bits.

#[path = "../../examples/custom_model/main.rs"]
#[allow(dead_code)] // Its `main` runs in the example.
mod custom_model;

use custom_model::Parallel;
use meshwork::engine::{Numerics, StateKey, StepReport, TrainError, WholeState};
use meshwork::optim::{Decay, LrSchedule, Sgd};
use meshwork::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Losses and gradient norms of some steps, and the weights after them.
type Trained = (Vec<[f64; 2]>, BTreeMap<StateKey, Vec<f32>>);

fn trained(mesh: &str, plan: &Plan, steps: u64) -> Trained {
    let model: Arc<dyn Model> = Arc::new(Parallel { vocab: 61, layers: 4, hidden: 32, seq: 16 });
    let data = Data::from_tokens((0..4000).map(|at| at * at % 61).collect(), 16);
    let plan = Plan { mesh: mesh.parse().unwrap(), ..plan.clone() };
    let ranks = thread::run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
        let step = |step| trainer.step(&data.batch(step, plan.global_batch_size, trainer.samples()));
        let reports = (0..steps).map(step).collect::<Result<Vec<StepReport>, TrainError>>()?;
        Ok::<_, TrainError>((reports, trainer.state()?))
    });
    let (reports, states): (Vec<_>, Vec<_>) =
        ranks.unwrap_or_else(|error| panic!("{mesh}: {error}")).into_iter().unzip();
    let whole = WholeState::merge(&states).unwrap();
    let vectors = whole.keys().map(|key| (key.clone(), whole.vector(key).unwrap().to_vec())).collect();
    (reports[0].iter().map(|report| [report.loss, report.grad_norm]).collect(), vectors)
}

/// Plain gradient descent with rate 1 and no clipping: the step is the gradient, so that nothing hides a wrong scale.
#[test]
fn any_mesh_gives_the_loss_norm_and_weights_of_one_rank() {
    let lr = LrSchedule { base: 1.0, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 };
    let plan = Plan { optimizer: Sgd::default().into(), lr, max_norm: 0.0, ..Plan::default() };
    let (wanted, weights) = trained("dp=1", &plan, 1);
    for mesh in ["dp=2,tp=2,pp=2", "dp=4", "tp=4", "pp=4", "tp=2,pp=2", "dp=2,pp=4"] {
        let (got, got_weights) = trained(mesh, &plan, 1);
        for (got, wanted) in got.as_flattened().iter().zip(wanted.as_flattened()) {
            assert!((got - wanted).abs() <= 1e-6 * wanted, "{mesh}: {got}, on one rank {wanted}");
        }
        for (key, wanted) in &weights {
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let off = norm(&mut got_weights[key].iter().zip(wanted).map(|(got, wanted)| f64::from(got - wanted)));
            let size = norm(&mut wanted.iter().map(|&wanted| f64::from(wanted)));
            assert!(off <= 1e-5 * size, "{mesh}: {key} is off by {off} of {size}");
        }
    }
}

#[test]
fn canonical_numerics_give_the_bits_of_one_rank() {
    let plan = Plan { numerics: Numerics::Canonical { blocks: 8 }, ..Plan::default() };
    let wanted = trained("dp=1", &plan, 3);
    for mesh in ["dp=2,tp=2,pp=2", "tp=4,pp=2", "dp=4", "pp=4"] {
        assert!(trained(mesh, &plan, 3) == wanted, "{mesh}");
    }
}
