//! Invalid schedules, one per kind of fault, and the error of each.

use meshwork_pipeline::{Lowered, Schedule, Weights, check, forward_only, lower, parse_actions};

/// A hand-written schedule of `micros` micro-batches.
fn by_hand(placement: &[usize], micros: usize, rows: &[&str]) -> Schedule {
    Schedule {
        name: "by hand".to_string(),
        ranks: rows.len(),
        placement: placement.to_vec(),
        replicas: vec![1; placement.len()],
        micros,
        steps: 1,
        weights: Weights::Flush,
        actions: rows.iter().map(|row| parse_actions(row).unwrap()).collect(),
    }
}

/// Asserts the error of a schedule without messages.
#[track_caller]
fn refused(schedule: &Schedule, message: &str) {
    let error = check(schedule).unwrap_err();
    assert_eq!(error.to_string(), format!("schedule by hand: {message}"));
    assert_eq!(lower(schedule), Err(error), "lower refuses what check refuses");
}

/// Asserts the error of a schedule with messages.
#[track_caller]
fn refused_lowered(schedule: Schedule, message: &str) {
    let error = Lowered::new(schedule).unwrap_err();
    assert_eq!(error.to_string(), format!("schedule by hand: {message}"));
}

#[test]
fn the_schedules_that_the_lies_are_made_of_are_true() {
    check(&by_hand(&[0, 1], 2, &["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])).unwrap();
    Lowered::new(by_hand(&[0, 1], 1, &["0F0 0SF0 0RB0 0B0", "1RF0 1F0 1B0 1SB0"])).unwrap();
    Lowered::new(by_hand(&[0, 1], 2, &["0F0 0SF0 0F1 0SF1", "1RF0 1F0 1RF1 1F1"])).unwrap();
}

#[test]
fn shapes_that_are_no_pipeline() {
    let message = "nothing to run: 2 ranks, 2 stages, 0 micro-batches; each must be at least 1";
    refused(&by_hand(&[0, 1], 0, &["", ""]), message);
    let message = "nothing to run: 0 ranks, 0 stages, 1 micro-batches; each must be at least 1";
    refused(&by_hand(&[], 1, &[]), message);

    let mut rows = by_hand(&[0, 1], 1, &["0F0", "1F0"]);
    rows.actions.pop();
    refused(&rows, "1 lists of actions for 2 ranks; each rank has exactly one");

    let message = format!("stage 0 is placed on rank {}, but there are only ranks 0 to 1", usize::MAX);
    refused(&Schedule { replicas: vec![usize::MAX, 1], ..by_hand(&[5, 0], 1, &["1F0", "0F0"]) }, &message);
    let message = "stage 1 is placed on rank 2, but there are only ranks 0 to 1";
    refused(&by_hand(&[0, 2], 1, &["0F0", "1F0"]), message);
    let message = "rank 1 of 2 holds none of the 2 stages; each rank needs at least one";
    refused(&by_hand(&[0, 0], 1, &["0F0 1F0", ""]), message);
}

#[test]
fn actions_that_do_not_belong() {
    let message = "rank 1, step 2: 1F2 is out of range: stages go from 0 to 1, micro-batches from 0 to 1";
    refused(&by_hand(&[0, 1], 2, &["0F0 0F1", "1F0 1F1 1F2"]), message);
    let message = "rank 0, step 0: 2F0 is out of range: stages go from 0 to 1, micro-batches from 0 to 0";
    refused(&by_hand(&[0, 1], 1, &["2F0", "1F0"]), message);
    let message = "rank 0, step 1: 1F0 stands on rank 0, but stage 1 lives on rank 1";
    refused(&by_hand(&[0, 1], 1, &["0F0 1F0", ""]), message);
    let message =
        "rank 0, step 1: 0SF0 is a message; a schedule holds only computations until `lower` adds the messages";
    refused(&by_hand(&[0, 1], 1, &["0F0 0SF0", "1RF0 1F0"]), message);
    let message = "rank 0 runs 0F0 twice, at steps 0 and 2; it must run once";
    refused(&by_hand(&[0, 1], 2, &["0F0 0F1 0F0", "1F0 1F1"]), message);
}

#[test]
fn parts_that_nobody_runs() {
    let message = "rank 1 runs no backward of micro-batch 1 through stage 1 (1B1)";
    refused(&by_hand(&[0, 1], 2, &["0F0 0F1 0B0 0B1", "1F0 1F1 1B0"]), message);
    let message = "rank 0 runs no forward of micro-batch 1 through stage 0 (0F1)";
    refused(&by_hand(&[0, 1], 2, &["0F0 0B0 0B1", "1F0 1F1 1B0 1B1"]), message);
    // Found before anything of that size is allocated.
    let message = "rank 0 runs no forward of micro-batch 1 through stage 0 (0F1)";
    refused(&by_hand(&[0], usize::MAX, &["0F0 0B0"]), message);
    // A gradient sent by a backward that does not exist.
    let message = "rank 1 runs no backward of micro-batch 0 through stage 1 (1B0)";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0 0RB0", "1RF0 1F0 1SB0"]), message);
}

#[test]
fn results_used_before_they_exist() {
    let message = "rank 1, step 1: 1B1 stands before 1F1 (step 2), whose result it needs";
    refused(&by_hand(&[0, 1], 2, &["0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0"]), message);
    let message = "rank 0, step 0: 0B0 stands before 0F0 (step 1), whose result it needs";
    refused(&by_hand(&[0, 1], 1, &["0B0 0F0", "1F0 1B0"]), message);
    // A hand-over between two stages of one rank.
    let message = "rank 0, step 0: 1F0 stands before 0F0 (step 1), whose result it needs";
    refused(&by_hand(&[0, 0], 1, &["1F0 0F0"]), message);
    // With messages: a send before, a forward before its receive.
    let message = "rank 0, step 0: 0SF0 stands before 0F0 (step 1), whose result it needs";
    refused_lowered(by_hand(&[0, 1], 1, &["0SF0 0F0", "1RF0 1F0"]), message);
    let message = "rank 1, step 0: 1F0 stands before 1RF0 (step 1), whose result it needs";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0", "1F0 1RF0"]), message);
    let message = "rank 0, step 1: 0B0 stands before 0F0 (step 2), whose result it needs";
    refused_lowered(by_hand(&[0, 1], 1, &["0RB0 0B0 0F0 0SF0", "1RF0 1F0 1B0 1SB0"]), message);
    let message = "rank 0, step 2: 0B0 stands before 0RB0 (step 3), whose result it needs";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0 0B0 0RB0", "1RF0 1F0 1B0 1SB0"]), message);
    let message = "rank 1, step 2: 1SB0 stands before 1B0 (step 3), whose result it needs";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0 0RB0 0B0", "1RF0 1F0 1SB0 1B0"]), message);
}

#[test]
fn messages_with_one_end_or_none() {
    let message = "rank 1 receives 1RF0, but rank 0 never sends it (0SF0 is missing)";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0", "1RF0 1F0"]), message);
    let message = "rank 0 receives 0RB0, but rank 1 never sends it (1SB0 is missing)";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0 0RB0 0B0", "1RF0 1F0 1B0"]), message);
    let message = "rank 1 sends 1SB0, but rank 0 never receives it (0RB0 is missing)";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0 0B0", "1RF0 1F0 1B0 1SB0"]), message);
    let message = "activation of stage 0, micro-batch 0 crosses from rank 0 to rank 1 with no message: 0SF0 and 1RF0 \
                   are missing";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0", "1F0"]), message);
    let message = "gradient of stage 1, micro-batch 0 crosses from rank 1 to rank 0 with no message: 1SB0 and 0RB0 \
                   are missing";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0 0B0", "1RF0 1F0 1B0"]), message);
}

#[test]
fn messages_to_nobody() {
    let message = "rank 1, step 2: 1SF0 is a message to nobody: stage 2 does not exist or lives on the same rank";
    refused_lowered(by_hand(&[0, 1], 1, &["0F0 0SF0", "1RF0 1F0 1SF0"]), message);
    let message = "rank 0, step 0: 0RF0 is a message to nobody: there is no stage before the first";
    refused_lowered(by_hand(&[0, 1], 1, &["0RF0 0F0 0SF0", "1RF0 1F0"]), message);
    let message = "rank 0, step 1: 0SF0 is a message to nobody: stage 1 does not exist or lives on the same rank";
    refused_lowered(by_hand(&[0, 0], 1, &["0F0 0SF0 1RF0 1F0"]), message);
}

/// Each rank alone is in order; a transport that delivers in order would deliver micro-batch 0 instead of 1.
#[test]
fn messages_received_in_another_order() {
    let message = "message 0 from rank 0 to rank 1 is sent as 0SF0 but received as 1RF1; ranks must receive in the \
                   order in which the other sends";
    refused_lowered(by_hand(&[0, 1], 2, &["0F0 0SF0 0F1 0SF1", "1RF1 1F1 1RF0 1F0"]), message);

    // `lower` receives messages in the order of sending, even if they are consumed in another order.
    let lowered = lower(&by_hand(&[0, 1], 2, &["0F0 0F1", "1F1 1F0"])).unwrap();
    assert_eq!(lowered.actions(1), parse_actions("1RF0 1RF1 1F1 1F0").unwrap());
}

#[test]
fn a_deadlock_shows_who_waits_for_whom() {
    // Rank 0 wants a gradient back before it sends the next micro-batch, which rank 1 wants first.
    refused(
        &by_hand(&[0, 1], 2, &["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]),
        "ranks wait for each other in a circle:\n\
         rank 0 |  0F0  >0B0<  0F1   0B1\n\
         rank 1 |  1F0  >1F1<  1B0   1B1\n\
         rank 0, step 1: 0B0 waits for 1B0 of rank 1\n\
         rank 1, step 1: 1F1 waits for 0F1 of rank 0",
    );
    refused_lowered(
        by_hand(&[0, 1], 2, &["0F0 0SF0 0RB0 0B0 0F1 0SF1 0RB1 0B1", "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1"]),
        "ranks wait for each other in a circle:\n\
         rank 0 |  0F0    0SF0  >0RB0<  0B0    0F1    0SF1   0RB1   0B1\n\
         rank 1 |  1RF0   1F0   >1RF1<  1F1    1B0    1SB0   1B1    1SB1\n\
         rank 0, step 2: 0RB0 waits for 1SB0 of rank 1\n\
         rank 1, step 2: 1RF1 waits for 0SF1 of rank 0",
    );
}

#[test]
fn replicas() {
    let schedule = by_hand(&[0, 1], 2, &["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]);
    refused(
        &Schedule { replicas: vec![1], ..schedule.clone() },
        "replicas are [1]: each of the 2 stages needs one number of at least 1",
    );
    refused(
        &Schedule { replicas: vec![1, 0], ..schedule.clone() },
        "replicas are [1, 0]: each of the 2 stages needs one number of at least 1",
    );
    refused(
        &Schedule { replicas: vec![1, 2], ..schedule.clone() },
        "stage 1 is placed on rank 2, but there are only ranks 0 to 1",
    );
    // Micro-batch 1 of stage 0 is for its second replica.
    refused(
        &by_replicas(&[0, 2], &[2, 1], &["0F0 0F1 0B0 0B1", "", "1F0 1B0 1F1 1B1"]),
        "rank 0, step 1: 0F1 stands on rank 0, but stage 0 lives on rank 1",
    );
    let versions = by_replicas(&[0, 2], &[2, 1], &["0F0 0B0", "0F1 0B1", "1F0 1B0 1F1 1B1"]);
    refused(
        &Schedule { weights: Weights::Stash, ..versions },
        "stage 0 has replicas, and weights change while the schedule runs (stash): replicas would part; use flush, or one \
         rank for each stage",
    );
}

fn by_replicas(placement: &[usize], replicas: &[usize], rows: &[&str]) -> Schedule {
    Schedule { replicas: replicas.to_vec(), ..by_hand(placement, 2, rows) }
}

/// The grid shows only the steps around the deadlock; ranks that are done have no mark.
#[test]
fn a_deadlock_far_into_a_schedule_stays_readable() {
    let mut schedule = forward_only(&[0, 1, 2], 40);
    schedule.name = "by hand".to_string();
    (schedule.placement, schedule.replicas) = (vec![0, 1, 2, 1], vec![1; 4]);
    // Stage 3 is on rank 1; micro-batch 30 of stage 1 waits there for micro-batch 31 of stage 3.
    schedule.actions[1] = parse_actions(
        &(0..40).flat_map(|m| [if m == 30 { "3F31".into() } else { format!("1F{m}") }]).collect::<Vec<_>>().join(" "),
    )
    .unwrap();
    let rest: Vec<String> = (0..40).filter(|&m| m != 31).map(|m| format!("3F{m}")).collect();
    schedule.actions[1].extend(parse_actions(&format!("1F30 {}", rest.join(" "))).unwrap());

    let error = check(&schedule).unwrap_err().to_string();
    assert!(error.contains("(from step 26)\n"), "{error}");
    assert!(error.contains(">3F31<") && error.contains(">2F30<"), "{error}");
    assert!(error.contains("rank 1, step 30: 3F31 waits for 2F31 of rank 2"), "{error}");
    assert!(error.ends_with("rank 2, step 30: 2F30 waits for 1F30 of rank 1"), "{error}");
    assert!(error.lines().all(|line| line.len() < 150), "{error}");
}

/// The same with weights that change while it runs.
fn updating(weights: Weights, steps: usize, micros: usize, rows: &[&str]) -> Schedule {
    Schedule { weights, steps, ..by_hand(&(0..rows.len()).collect::<Vec<_>>(), micros, rows) }
}

#[test]
fn backwards_in_parts() {
    check(&by_hand(&[0, 1], 2, &["0F0 0F1 0I0 0B1 0W0", "1F0 1F1 1B0 1I1 1W1"])).unwrap();
    let message = "rank 0 runs no weight gradient of micro-batch 0 through stage 0 (0W0)";
    refused(&by_hand(&[0], 1, &["0F0 0I0"]), message);
    let message = "rank 0 runs no input gradient of micro-batch 0 through stage 0 (0I0)";
    refused(&by_hand(&[0], 1, &["0F0 0W0"]), message);
    let message = "rank 0, step 3: 0B0 is a whole backward, but its parts I or W run too; use either";
    refused(&by_hand(&[0], 1, &["0F0 0I0 0W0 0B0"]), message);
    let message = "rank 0, step 1: 0W0 stands before 0I0 (step 2), whose result it needs";
    refused(&by_hand(&[0], 1, &["0F0 0W0 0I0"]), message);
    // The previous stage waits for the input gradient, wherever the weight gradient is.
    refused(
        &by_hand(&[0, 1], 2, &["0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1F1 1I0 1W0 1B1"]),
        "ranks wait for each other in a circle:\n\
         rank 0 |  0F0  >0I0<  0F1   0I1   0W0   0W1\n\
         rank 1 |  1F0  >1F1<  1I0   1W0   1B1\n\
         rank 0, step 1: 0I0 waits for 1I0 of rank 1\n\
         rank 1, step 1: 1F1 waits for 0F1 of rank 0",
    );
}

#[test]
fn steps_that_do_not_add_up() {
    let message = "3 micro-batches in 2 optimizer steps; each step has the same number of them";
    refused(&Schedule { steps: 2, ..by_hand(&[0], 3, &["0F0 0F1 0F2"]) }, message);
    let message = "1 micro-batches in 0 optimizer steps; each step has the same number of them";
    refused(&Schedule { steps: 0, ..by_hand(&[0], 1, &["0F0"]) }, message);
    let message = "rank 0, step 2: 0B0 belongs to an older optimizer step than 0F1 before it; a stage ends a step before \
                   it starts the next";
    refused(&Schedule { steps: 2, ..by_hand(&[0], 2, &["0F0 0F1 0B0 0B1"]) }, message);
    // Two stages of a rank each have their own weights.
    let two = by_hand(&[0, 0], 2, &["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]);
    check(&Schedule { steps: 2, ..two }).unwrap();
}

#[test]
fn updates_where_they_do_not_belong() {
    check(&updating(Weights::Stash, 1, 2, &["0F0 0B0 0U0 0F1 0B1 0U1"])).unwrap();
    check(&updating(Weights::Stash, 1, 2, &["0F0 0F1 0B0 0B1 0U1"])).unwrap();
    let message = "rank 0, step 2: 0U0 updates weights inside a step; with weights \"flush\" that happens between steps, \
                   outside of the schedule";
    refused(&by_hand(&[0], 1, &["0F0 0B0 0U0"]), message);
    let message = "rank 0, step 1: 0U0 stands before 0B0 (step 2), whose result it needs";
    refused(&updating(Weights::Stash, 1, 1, &["0F0 0U0 0B0"]), message);
    let message = "rank 0, step 3: 0U1 stands before 0B0 (step 4), whose result it needs";
    refused(&updating(Weights::Stash, 1, 2, &["0F0 0F1 0B1 0U1 0B0"]), message);
    let message = "rank 0, step 5: 0U0 applies nothing new: gradients up to micro-batch 1 are applied already";
    refused(&updating(Weights::Stash, 1, 2, &["0F0 0F1 0B0 0B1 0U1 0U0"]), message);
    let message = "rank 0 never updates the weights of stage 0 with micro-batch 1 (0U1)";
    refused(&updating(Weights::Stash, 1, 2, &["0F0 0F1 0B0 0U0 0B1"]), message);
    refused(&updating(Weights::DoubleBuffered, 1, 2, &["0F0 0F1 0B0 0B1"]), message);
    let message = "rank 0, step 3: 0U0 stands inside a batch; with weights \"double_buffered\" updates follow the last of \
                   each 2 micro-batches";
    refused(&updating(Weights::DoubleBuffered, 1, 2, &["0F0 0F1 0B0 0U0 0B1 0U1"]), message);
    let message = "rank 0 never updates the weights of stage 0 with micro-batch 0 (0U0)";
    refused(&updating(Weights::DoubleBuffered, 2, 2, &["0F0 0F1 0B0 0B1 0U1"]), message);
}

/// With vertical sync every stage needs the version that the first one had; a stage that updates later must refuse.
#[test]
fn weights_that_are_yet_to_be_made() {
    let rows = ["0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1F1 1U0 1B1 1U1"];
    check(&updating(Weights::Stash, 1, 2, &rows)).unwrap();
    let message = "rank 1, step 2: 1F1 needs version 1 of the weights of stage 1, which has only 0 updates behind it by \
                   then";
    refused(&updating(Weights::VerticalSync, 1, 2, &rows), message);
}

/// One error each, from text to proof: typical faults of a user's own schedule.
#[test]
fn text_schedules_that_are_wrong() {
    let proved = |rows: &str| {
        let text = format!("name: mine\nranks: 2\nplacement: 0 1\nmicros: 2\n{rows}");
        check(&text.parse::<Schedule>().unwrap()).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(proved("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"), Ok(()));
    let message = "schedule mine: rank 1 runs no backward of micro-batch 1 through stage 1 (1B1)";
    assert_eq!(proved("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1"), Err(message.to_string()));
    let message = "schedule mine: rank 1 runs 1F0 twice, at steps 0 and 2; it must run once";
    assert_eq!(proved("rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F0 1F1 1B1"), Err(message.to_string()));
    let circle = proved("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1").unwrap_err();
    assert!(
        circle.starts_with("schedule mine: ranks wait for each other in a circle:\nrank 0 |  0F0  >0B0<"),
        "{circle}"
    );
}
