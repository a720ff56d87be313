//! The model of `examples/custom_model`, which uses only the public API: any mesh gives the numbers of one rank, and in
//! canonical numerics its bits.

mod attention;

#[path = "../../examples/custom_model/main.rs"]
#[allow(dead_code)] // Its `main` runs in the example.
mod custom_model;

use custom_model::Parallel;
use meshwork::diff::{Location, Side, compare};
use meshwork::engine::{StateKey, WholeState};
use meshwork::optim::{Decay, LrSchedule, Sgd};
use meshwork::prelude::*;
use meshwork::train::profile::layers;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Losses and gradient norms of some steps, and the weights after them.
type Trained = (Vec<[f64; 2]>, BTreeMap<StateKey, Vec<f32>>);

/// A small one, and data for it.
fn parallel() -> (Arc<dyn Model>, Data) {
    let data = Data::from_tokens((0..4000).map(|at| at * at % 61).collect(), 16);
    (Arc::new(Parallel { vocab: 61, layers: 4, hidden: 32, seq: 16 }), data)
}

fn trained(mesh: &str, plan: &Plan, steps: u64) -> Trained {
    let (model, data) = parallel();
    trained_on(&model, &data, mesh, plan, steps)
}

fn trained_on(model: &Arc<dyn Model>, data: &dyn BatchSource, mesh: &str, plan: &Plan, steps: u64) -> Trained {
    let plan = Plan { mesh: mesh.parse().unwrap(), ..plan.clone() };
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
        let mut reports = Vec::new();
        trainer.train(data, steps, |report| reports.push(report))?;
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

/// On 1 to 4 ranks, which share 12 heads.
#[test]
#[cfg(feature = "testkit")]
fn its_block_and_its_operation_are_those_of_one_rank() {
    use custom_model::Block;
    use meshwork::testkit::check::{LayerInput, OpInput, check_layer, check_op};

    let squared = |v: &[Var]| v[0].relu().and_then(|inner| inner.mul(&inner));
    check_op("squared ReLU", &[OpInput::value("x", &[3, 5])], squared).unwrap();
    let x = LayerInput::value("x", &[2, 3, 96], Ty::Invariant);
    check_layer("block", &[x], |params, _| Block::new(params, 0, 96), |block, tape, v| block.forward(tape, &v[0]))
        .unwrap();
}

/// The tools know no more of a model than the engine does.
#[test]
fn its_meshes_are_compared_and_a_fault_is_found() {
    let (model, data) = parallel();
    let canonical = Plan { numerics: Numerics::Canonical { blocks: 8 }, ..Plan::default() };
    let side = |mesh: &str, plan: &Plan| {
        Side::from_model(model.clone(), Plan { mesh: mesh.parse().unwrap(), ..plan.clone() }, &data)
    };
    for mesh in ["dp=2,tp=2,pp=2", "dp=4", "tp=4"] {
        let fast = compare([&side("dp=1", &Plan::default()), &side(mesh, &Plan::default())], 2).unwrap();
        assert!(fast.unexplained.is_none() && fast.replicas.is_none() && fast.tensors() > 100, "{mesh}: {fast}");
        let same = compare([&side("dp=1", &canonical), &side(mesh, &canonical)], 2).unwrap();
        assert!(same.canonical && same.identical() && same.skipped.is_empty(), "{mesh}: {same}");
    }
    // tp rank 1 squares its share of the third block's network once too often.
    let wrong = side("tp=2,pp=2", &canonical).with_hook(|site, seen| {
        let here = site.coords.get(Axis::Tp) == 1 && (seen.op, seen.operand) == ("linear", None);
        if !here || seen.params != ["block.2.down"] {
            return Ok(None);
        }
        let squared: Vec<f32> = seen.tensor.to_vec::<f32>()?.into_iter().map(|x| x * x).collect();
        Tensor::from_slice(seen.tensor.device(), &squared, seen.tensor.shape()).map(Some)
    });
    let report = compare([&side("dp=1", &canonical), &wrong], 1).unwrap();
    let Some(Location::Op { name, layer, operand, .. }) = report.first.as_ref().map(|first| &first.place) else {
        panic!("{report}")
    };
    assert_eq!((&**name, &**layer, *operand), ("linear", "block.2", None), "{report}");
}

#[test]
fn its_layers_are_profiled() {
    let (model, data) = parallel();
    let profile = layers(&model, &Plan::default(), &data, Cpu::device(), &AtomicBool::new(false)).unwrap();
    let names: Vec<&str> = profile.layers().iter().map(|layer| &*layer.name).collect();
    assert_eq!(names, ["tokens, positions", "block.0", "block.1", "block.2", "block.3", "norm, head"]);
    assert!(profile.layers().iter().all(|layer| layer.forward_ms > 0.0 && layer.backward_ms > 0.0), "{profile}");
}

/// Both at once: a name of the prelude that is a module of the standard library too would be ambiguous here.
mod beside_the_standard_library {
    use meshwork::prelude::*;
    use std::*;

    #[test]
    fn the_prelude_hides_no_module_and_its_result_takes_any_error() {
        let named: Result<usize, num::ParseIntError> = "3".parse();
        let shape: Result<Tensor> = Tensor::from_slice(&Cpu::device(), &[1.0_f32], [1]);
        thread::yield_now();
        assert!(named == Ok(3) && shape.is_ok());
    }
}
