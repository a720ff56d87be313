//! Schedules as the papers draw them: rows are ranks, columns units of time, blanks are bubbles.

use meshwork_pipeline::{Schedule, forward_only, gpipe, lower, one_f_one_b, parse_actions, render};

/// Compares with a picture given line by line.
fn assert_picture(schedule: &Schedule, picture: &[&str]) {
    let rendered = render(schedule).unwrap();
    assert_eq!(rendered.lines().collect::<Vec<_>>(), picture, "\n{rendered}");
}

#[test]
fn gpipe_4_ranks_8_micros() {
    assert_picture(
        &gpipe(4, 8),
        &[
            "rank 0 | F0 F1 F2 F3 F4 F5 F6 F7                   B0 B1 B2 B3 B4 B5 B6 B7",
            "rank 1 |    F0 F1 F2 F3 F4 F5 F6 F7             B0 B1 B2 B3 B4 B5 B6 B7",
            "rank 2 |       F0 F1 F2 F3 F4 F5 F6 F7       B0 B1 B2 B3 B4 B5 B6 B7",
            "rank 3 |          F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
        ],
    );
}

#[test]
fn one_f_one_b_4_ranks_8_micros() {
    assert_picture(
        &one_f_one_b(4, 8),
        &[
            "rank 0 | F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7",
            "rank 1 |    F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5    B6    B7",
            "rank 2 |       F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6    B7",
            "rank 3 |          F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
        ],
    );
}

#[test]
fn forward_only_3_ranks_5_micros() {
    assert_picture(
        &forward_only(&[0, 1, 2], 5),
        &["rank 0 | F0 F1 F2 F3 F4", "rank 1 |    F0 F1 F2 F3 F4", "rank 2 |       F0 F1 F2 F3 F4"],
    );
}

#[test]
fn several_stages_per_rank_show_the_stage() {
    let schedule = Schedule {
        name: "two chunks".to_string(),
        ranks: 2,
        placement: vec![0, 1, 0, 1],
        micros: 2,
        actions: vec![
            parse_actions("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1").unwrap(),
            parse_actions("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1").unwrap(),
        ],
    };
    assert_picture(
        &schedule,
        &["rank 0 | 0F0 0F1 2F0 2F1     2B0     2B1 0B0 0B1", "rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
    );
}

/// What rank 1 of 4 really does: receives stand right before, sends right after what they belong to.
#[test]
fn lowered_1f1b_reads_as_a_program() {
    let lowered = lower(&one_f_one_b(4, 4)).unwrap();
    let text: Vec<String> = lowered.actions(1).iter().map(|a| a.to_string()).collect();
    let program = "1RF0 1F0 1SF0  1RF1 1F1 1SF1  1RF2 1F2 1SF2  1RB0 1B0 1SB0 \
                   1RF3 1F3 1SF3  1RB1 1B1 1SB1  1RB2 1B2 1SB2  1RB3 1B3 1SB3";
    assert_eq!(text, program.split_whitespace().collect::<Vec<_>>());
}
