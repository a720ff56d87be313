//! The interpreter against a serial run: a small network, one thread per rank, channels between them. Asynchronous
//! schedules against a serial simulation of the published update equations, bit for bit.

#[cfg(feature = "channel")]
mod channel;
mod network;

use meshwork_pipeline::{
    Generator, Lowered, Schedule, Shape, Weights, forward_only, gpipe, lower, one_f_one_b_replicated, parse_actions,
};
use network::{Fault, Outcome, pipeline, run_alone, serial, serial_updates};

#[test]
fn gradients_equal_the_serial_run_bit_for_bit() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
        for (pp, virtual_stages) in [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (2, 3), (1, 4), (3, 4)] {
            for micros in [1, 2, 3, 4, 5, 8, 11, 12] {
                let Ok(schedule) = generator.build(Shape { pp, virtual_stages, micros }) else {
                    continue;
                };
                let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
                assert_eq!(outcome, serial(micros), "{} pp={pp} v={virtual_stages} m={micros}", generator.name());
            }
        }
    }
}

/// A hand-made schedule of two chunks per rank, once crossing ranks at every stage, once as a V whose turn stays
/// on one rank and is handed over without a message.
#[test]
fn several_stages_per_rank() {
    let looped = Schedule {
        name: "looped".to_string(),
        ranks: 2,
        placement: vec![0, 1, 0, 1],
        replicas: vec![1, 1, 1, 1],
        micros: 2,
        steps: 1,
        weights: Weights::Flush,
        actions: vec![
            parse_actions("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1").unwrap(),
            parse_actions("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1").unwrap(),
        ],
    };
    let turned = Schedule {
        name: "turned".to_string(),
        placement: vec![0, 1, 1, 0],
        replicas: vec![1, 1, 1, 1],
        actions: vec![
            parse_actions("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1").unwrap(),
            parse_actions("1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1").unwrap(),
        ],
        ..looped.clone()
    };
    for (schedule, crossings) in [(looped, 3), (turned, 2)] {
        let lowered = lower(&schedule).unwrap();
        let outcome = pipeline(&lowered, Fault::None).unwrap();
        assert_eq!(outcome, serial(2), "{}", schedule.name);
        let messages = lowered.schedule().actions.iter().flatten().filter(|a| a.kind.is_send()).count();
        assert_eq!(messages, crossings * 2 * 2, "{}", schedule.name);
    }
}

#[test]
fn forward_only_gives_the_losses_and_touches_no_gradient() {
    for placement in [vec![0], vec![0, 1, 2], vec![0, 1, 0, 1], vec![0, 1, 1, 0]] {
        let outcome = pipeline(&lower(&forward_only(&placement, 5)).unwrap(), Fault::None).unwrap();
        let Outcome { losses, grads, .. } = serial(5);
        assert_eq!(outcome.losses, losses);
        assert_eq!(outcome.grads, vec![0.0; grads.len()]);
    }
}

/// Each replica has a share of the losses and gradients, which add up to those of the serial run.
#[test]
fn replicas_share_the_micro_batches_of_their_stage() {
    for replicas in [vec![3, 1], vec![1, 3], vec![2, 2], vec![2, 1, 3], vec![4], vec![1, 2, 1]] {
        for micros in [6, 7, 12] {
            let schedule = one_f_one_b_replicated(&replicas, micros);
            let lowered = lower(&schedule).unwrap_or_else(|error| panic!("{error}"));
            let outcome = pipeline(&lowered, Fault::None).unwrap();
            let wanted = serial(micros);
            assert_eq!(outcome.losses, wanted.losses, "{replicas:?} m={micros}");
            let each = wanted.grads.len() / replicas.len();
            let mut start = 0;
            for (stage, &count) in replicas.iter().enumerate() {
                for (at, wanted) in wanted.grads[stage * each..(stage + 1) * each].iter().enumerate() {
                    let sum: f32 = (0..count).map(|replica| outcome.grads[start + replica * each + at]).sum();
                    assert!((sum - wanted).abs() < 1e-5, "{replicas:?} m={micros}, stage {stage}: {sum} and {wanted}");
                }
                start += count * each;
            }
        }
    }
}

/// Asserts that the rank at fault says `message`, and that the others end: nothing hangs. They end with the error that
/// a neighbour has ended (at which message depends on timing), or with success, if all messages that they wait for had
/// been sent.
#[track_caller]
fn fails(lowered: &Lowered, fault: Fault, message: &str) {
    let errors = pipeline(lowered, fault).unwrap_err();
    let (gone, own): (Vec<_>, Vec<_>) = errors.into_iter().partition(|error| error.ends_with("is gone"));
    assert_eq!(own, [message], "{gone:#?}");
}

#[test]
fn a_failing_stage_is_named_and_its_peers_end() {
    for generator in [Generator::Gpipe, Generator::OneFOneB] {
        let lowered = lower(&generator.build(generator.shape(4, 8)).unwrap()).unwrap();
        fails(
            &lowered,
            Fault::Backward { stage: 2, micro: 3 },
            "stage 2, backward of micro-batch 3 on pp rank 2: loss is not finite",
        );
        fails(
            &lowered,
            Fault::Forward { stage: 0, micro: 5 },
            "stage 0, forward of micro-batch 5 on pp rank 0: loss is not finite",
        );
    }
}

#[test]
fn a_stage_that_breaks_its_contract_is_named() {
    let lowered = lower(&gpipe(2, 2)).unwrap();
    fails(
        &lowered,
        Fault::Silent { stage: 0 },
        "stage 0, forward of micro-batch 0 on pp rank 0: returned nothing, but stage 1 waits for its activation; only \
         the last stage may return nothing",
    );
    fails(
        &lowered,
        Fault::SilentBack { stage: 1 },
        "stage 1, backward of micro-batch 0 on pp rank 1: returned nothing, but stage 0 waits for its gradient; only \
         the first stage may return nothing",
    );
    fails(
        &lowered,
        Fault::Talkative { stage: 1 },
        "stage 1, forward of micro-batch 0 on pp rank 1: returned the activation of the last stage, which nobody \
         takes; it must return nothing",
    );
}

#[test]
fn stages_that_do_not_match_the_schedule_are_refused() {
    let lowered = lower(&forward_only(&[0, 1, 1, 0], 1)).unwrap();
    assert_eq!(run_alone(&lowered, 2, &[]), "pp rank 2 is none of the schedule's 2: they go from 0 to 1");
    assert_eq!(
        run_alone(&lowered, 0, &[0]),
        "pp rank 0 holds 2 of the stages ([0, 3]), but 1 were given; give each of them once, in stage order"
    );
}

#[test]
fn a_transport_that_fails_is_named() {
    let lowered = lower(&forward_only(&[0, 1], 1)).unwrap();
    assert_eq!(
        run_alone(&lowered, 0, &[0]),
        "stage 0, send of the activation of micro-batch 0 on pp rank 0: rank 1 is gone"
    );
    assert_eq!(
        run_alone(&lowered, 1, &[1]),
        "stage 1, receive of the activation of micro-batch 0 on pp rank 1: rank 0 is gone"
    );
    let lowered = lower(&forward_only(&[0], 1)).unwrap();
    assert_eq!(run_alone(&lowered, 0, &[0]), "pp rank 0, waiting for its sends after the last action: nobody is there");
}

const STAGES: [usize; 4] = [1, 2, 3, 4];

fn stream(generator: Generator, pp: usize, micros: usize, steps: usize) -> Schedule {
    generator.build_steps(Shape { pp, virtual_stages: 1, micros }, steps).unwrap()
}

/// PipeDream (Narayanan et al. 2019, section 3.3), stages counted from 0:
/// w(t+1) = w(t) - lr · ∇f(w_0(t-n+1), ..., w_s(t-n+1+s), ..., w_{n-1}(t)), with w(0) before the start.
#[test]
fn pipedream_is_its_equation() {
    for pp in STAGES {
        for steps in 1..=3 {
            let micros = pp + 2;
            let schedule = stream(Generator::PipeDream, pp, micros, steps);
            let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
            let oracle = serial_updates(steps * micros, 1, pp, |stage, t| (t + stage + 1).saturating_sub(pp));
            assert_eq!(outcome, oracle, "pp={pp} steps={steps}");
        }
    }
}

/// With vertical sync (the same section): ∇f(w_0(t-n+1), ..., w_{n-1}(t-n+1)).
#[test]
fn vertical_sync_is_its_equation() {
    for pp in STAGES {
        let micros = 3 * pp;
        let schedule = Schedule { weights: Weights::VerticalSync, ..stream(Generator::PipeDream, pp, micros, 1) };
        let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
        assert_eq!(outcome, serial_updates(micros, 1, pp, |_, t| (t + 1).saturating_sub(pp)), "pp={pp}");
    }
}

/// PipeDream-2BW (Narayanan et al. 2021, section 3.1): W(t+1) = W(t) - lr · ∇f(W(t-1)), the gradient over the m
/// micro-batches of batch t; W(-1) is W(0).
#[test]
fn pipedream_2bw_is_its_equation() {
    for pp in STAGES {
        for steps in 1..=4 {
            let micros = pp + 1;
            let schedule = stream(Generator::PipeDream2Bw, pp, micros, steps);
            let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
            let oracle = serial_updates(steps * micros, micros, pp, |_, k| (k / micros).saturating_sub(1));
            assert_eq!(outcome, oracle, "pp={pp} steps={steps}");
        }
    }
}
