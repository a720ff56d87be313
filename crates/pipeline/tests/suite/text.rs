//! The text form: written schedules can be read back, and errors name the line and token.

use meshwork_pipeline::{Generator, Schedule, Shape, check};

#[test]
fn every_schedule_round_trips() {
    for generator in Generator::ALL {
        for pp in 1..=4 {
            for virtual_stages in 1..=3 {
                let shape = Shape { pp, virtual_stages, micros: 2 * pp };
                let Ok(schedule) = generator.build_steps(shape, 2) else {
                    continue;
                };
                assert_eq!(schedule.to_string().parse(), Ok(schedule.clone()), "\n{schedule}");
            }
        }
    }
}

#[test]
fn a_schedule_written_by_hand() {
    let text = "
        # Two chunks on one rank, and half a backward each.
        name: my own # one
        placement: 0 0
        rank 0: 0F0 1F0  1I0 0I0  1W0 0W0
        ranks: 1
        micros: 1
    ";
    let schedule: Schedule = text.parse().unwrap();
    assert_eq!((&*schedule.name, schedule.steps), ("my own # one", 1));
    assert_eq!(check(&schedule).unwrap().peaks, [2]);
    let odd = Schedule { name: "two\nlines".to_string(), ..schedule };
    assert_eq!(odd.to_string().parse::<Schedule>().unwrap().name, "two lines");
}

#[track_caller]
fn refused(text: &str, message: &str) {
    assert_eq!(text.parse::<Schedule>().unwrap_err().to_string(), message);
}

#[test]
fn what_is_no_schedule_is_refused_by_line_and_token() {
    let head = "name: x\nranks: 2\nplacement: 0 1\nmicros: 1\n";
    refused("", "\"ranks\" is missing; a schedule needs it");
    refused("ranks: 0", "\"name\" is missing; a schedule needs it");
    refused("hello", "line 1: \"hello\" is no field: expected key: value, as in micros: 8 or rank 0: 0F0 0B0");
    refused(
        "name: x\ncolour: red",
        "line 2: \"colour\" is no key: expected name, ranks, placement, replicas, micros, steps, weights, or rank and its number",
    );
    refused(
        "rank one: 0F0",
        "line 1: \"rank one\" is no key: expected name, ranks, placement, replicas, micros, steps, weights, or rank and its number",
    );
    refused("name: x\nranks: two", "line 2: ranks: \"two\" is not valid: expected a whole number");
    refused("name: x\nname: y", "line 2: \"name\" is given a second time; once is enough");
    refused(&format!("{head}rank 0: 0F0\nrank 0: 0B0"), "line 6: \"rank 0\" is given a second time; once is enough");
    refused(&format!("{head}rank 0: 0F0\n"), "\"rank 1\" is missing; a schedule needs it");
    refused(&format!("{head}rank 1: 0F0\n"), "\"rank 0\" is missing; a schedule needs it");
    refused(&format!("{head}rank 0: 0F0\nrank 1: 1F0\nrank 2: 2F0"), "line 7: rank 2: there are only ranks 0 to 1");
    refused("ranks: 0\nrank 0: 0F0", "line 2: rank 0: there are no ranks");
    refused(
        &format!("{head}rank 0: 0F0 0B0\nrank 1: 1F0 1X0"),
        "line 6: item 2: \"1X0\" is no action: expected stage, kind (F, B, I, W, U, SF, RF, SB, RB) and micro-batch, as in \
         2F0 or 2SF0",
    );
    let rows = "rank 0: 0F0\nrank 1: 1F0\n";
    refused(
        &format!("name: x\nranks: 2\nplacement: 0 -1\nmicros: 1\n{rows}"),
        "line 3: placement: \"-1\" is not valid: expected the rank of each stage, as in 0 1 1 0",
    );
    refused(
        &format!("{head}{rows}weights: stale"),
        "line 7: weights: \"stale\" is not valid: expected flush, stash, vertical_sync, double_buffered",
    );
    refused(&format!("name: x\nranks: 2\nplacement: 0 1\n{rows}"), "\"micros\" is missing; a schedule needs it");
    refused(
        "ranks: 99999999999999999999",
        "line 1: ranks: \"99999999999999999999\" is not valid: expected a whole number",
    );
    // Nothing of a size stated in a text is allocated before the text has that many items.
    refused("name: x\nranks: 1000000000000\nplacement: 0\nmicros: 1", "\"rank 0\" is missing; a schedule needs it");
}
