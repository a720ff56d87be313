//! The number of messages that must be able to wait, against a naive run with bounded channels.

use meshwork_pipeline::{Generator, Lowered, breadth_first, lower};
use std::collections::VecDeque;

/// Whether all ranks reach their ends, if a send waits while `room` messages wait for the same receiver.
fn ends(lowered: &Lowered, room: usize) -> bool {
    let schedule = lowered.schedule();
    let mut channels = vec![vec![VecDeque::new(); schedule.ranks]; schedule.ranks];
    let mut at = vec![0; schedule.ranks];
    loop {
        let before = at.clone();
        for rank in 0..schedule.ranks {
            let Some(&action) = lowered.actions(rank).get(at[rank]) else {
                continue;
            };
            let can = match (action.tag(), action.counterpart()) {
                (Some(tag), Some(other)) => {
                    let peer = schedule.placement[other.stage];
                    if action.kind.is_send() {
                        let channel = &mut channels[rank][peer];
                        let can = channel.len() < room;
                        if can {
                            channel.push_back(tag);
                        }
                        can
                    } else {
                        let received = channels[peer][rank].pop_front();
                        assert!(received.is_none_or(|received| received == tag), "{action} takes another message");
                        received.is_some()
                    }
                }
                _ => true,
            };
            at[rank] += usize::from(can);
        }
        if at == before {
            return (0..schedule.ranks).all(|rank| at[rank] == lowered.actions(rank).len());
        }
    }
}

#[test]
fn the_proof_finds_the_fewest_that_do() {
    for generator in Generator::ALL {
        for (pp, micros) in [(1, 2), (2, 2), (2, 4), (2, 7), (3, 6), (4, 4), (4, 8), (4, 16), (5, 10), (8, 16)] {
            let Ok(schedule) = generator.build_steps(generator.shape(pp, micros), 2) else {
                continue;
            };
            let lowered = lower(&schedule).unwrap();
            let enough = lowered.report().in_flight;
            let at = format!("{} pp={pp} m={micros}: {enough}", generator.name());
            assert!(ends(&lowered, enough), "{at} are not enough");
            assert!(enough == 1 || !ends(&lowered, enough - 1), "{at} are more than needed");
            assert!(enough >= 1, "{at}");
        }
    }
}

/// Schedules with one flow of messages between neighbours need only a rendezvous before the next send. A V has two
/// flows, and in breadth-first the way back to the first rank has to hold the messages for which that rank is not
/// ready.
#[test]
fn what_the_published_schedules_need() {
    let need =
        |generator: Generator| lower(&generator.build(generator.shape(4, 16)).unwrap()).unwrap().report().in_flight;
    let needs = Generator::ALL.map(need);
    assert_eq!(needs, [1, 1, 1, 4, 1, 1, 2, 2, 1, 1]);
    assert_eq!(lower(&breadth_first(4, 2, 64)).unwrap().report().in_flight, 16);
}
