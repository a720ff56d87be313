//! Weights that are no numbers are found by what uses them next, and named on every rank.

use super::{batch, llama, on};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, ScheduleSpec, TrainError, Trainer, Zero, ZeroStage};
use meshwork_optim::{AdamW, LrSchedule};

/// What every rank ends with, once the update of step 1 has made weights infinite.
fn after_a_wild_step(
    mesh: &str,
    schedule: &str,
    stage: usize,
    next: impl Fn(&mut Trainer) -> Result<(), TrainError> + Sync,
) -> Vec<String> {
    let plan = Plan {
        optimizer: AdamW::default().into(),
        lr: LrSchedule { base: 1e39, ..Plan::default().lr },
        schedule: ScheduleSpec::named(schedule).unwrap(),
        zero: Zero { stage: ZeroStage::ALL[stage], group: None },
        max_norm: 0.0,
        ..on(mesh, Numerics::Fast)
    };
    let errors = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(llama(), &plan, rank, Cpu::device())?;
        trainer.step(&batch(0, trainer.samples()))?; // its loss and norm are finite
        Ok::<_, TrainError>(next(&mut trainer).expect_err("weights are infinite").to_string())
    });
    errors.unwrap_or_else(|error| panic!("{mesh}: {error}"))
}

/// Something that uses weights.
type Use<'a> = &'a (dyn Fn(&mut Trainer) -> Result<(), TrainError> + Sync);

/// Whatever uses the weights next names the parameter, on every rank.
#[test]
fn weights_that_an_update_made_infinite_are_found_by_what_uses_them() {
    let wanted = "after step 1 embed_tokens.weight has elements that are not finite: go on from an earlier checkpoint, with a lower \
                  learning rate, or from other weights";
    for (mesh, schedule, stage) in [("dp=1", "1f1b", 0), ("dp=2,tp=2,pp=2", "1f1b", 1), ("dp=2,pp=2", "zb_h2", 3)] {
        let step = |trainer: &mut Trainer| trainer.step(&batch(1, trainer.samples())).map(|_| ());
        let evaluation = |trainer: &mut Trainer| trainer.evaluate([batch(1, trainer.samples())]).map(|_| ());
        let prediction = |trainer: &mut Trainer| trainer.predict(&batch(1, 0..2), 3, 5).map(|_| ());
        let saving = |trainer: &mut Trainer| trainer.require_finite();
        let all: [(&str, Use<'_>); 4] =
            [("a step", &step), ("an evaluation", &evaluation), ("a prediction", &prediction), ("saving", &saving)];
        for (what, next) in all {
            let errors = after_a_wild_step(mesh, schedule, stage, next);
            assert!(errors.iter().all(|error| error == wanted), "{what} on {mesh}: {errors:#?}");
        }
    }
    // The state itself is refused on the rank that holds such weights.
    let errors = after_a_wild_step("dp=1", "1f1b", 0, |trainer| trainer.state().map(|_| ()));
    assert_eq!(errors, [wanted]);
}

/// A weight that is read as no number, in part, or with more than the slice has, is refused, whichever rank reads it.
#[test]
fn weights_that_are_no_numbers_are_not_loaded() {
    let plan = on("dp=1", Numerics::Fast);
    let whole = "elements for a slice of ";
    for (more, number, told) in
        [(0, f32::NAN, "it has elements that are not finite"), (-1, 0.0, whole), (1, 0.0, whole)]
    {
        let loaded = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(llama(), &plan, rank, Cpu::device())?;
            trainer.load_weights(|spec, slice| {
                let mut values = vec![0.0; slice.stored.count()];
                if spec.name == "layers.1.mlp.down.weight" {
                    values[7] = number;
                    values.resize(values.len().saturating_add_signed(more), 0.0);
                }
                Ok::<_, String>(values)
            })
        });
        let error = loaded.unwrap_err().to_string();
        assert!(error.contains("parameter layers.1.mlp.down.weight: ") && error.contains(told), "{error}");
    }
}
