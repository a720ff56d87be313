//! The interpreter against a serial run: a small network, one thread per rank, channels between them.

mod network;

use meshwork_pipeline::{Generator, Lowered, Schedule, Weights, forward_only, gpipe, lower, parse_actions};
use network::{Fault, Outcome, pipeline, run_alone, serial};

#[test]
fn gradients_equal_the_serial_run_bit_for_bit() {
    for generator in [Generator::Gpipe, Generator::OneFOneB] {
        for pp in 1..=4 {
            for micros in [1, 2, 3, 4, 5, 8, 11] {
                let Ok(schedule) = generator.build(generator.shape(pp, micros)) else {
                    continue;
                };
                let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
                assert_eq!(outcome, serial(micros), "{} pp={pp} m={micros}", generator.name());
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
        let Outcome { losses, grads } = serial(5);
        assert_eq!(outcome.losses, losses);
        assert_eq!(outcome.grads, vec![0.0; grads.len()]);
    }
}

/// Asserts that the rank at fault says `message`, and that the others end: nothing hangs. They end by learning that a
/// neighbour is gone, at which message depends on timing, or with success, if all that they wait for had been sent.
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
