//! Schedules as the papers draw them: rows are ranks, columns units of time, blanks are bubbles.

use meshwork_pipeline::{Generator, Schedule, Weights, forward_only, lower, one_f_one_b, parse_actions, render, zb_h1};

/// Compares with a picture given line by line.
fn assert_picture(schedule: &Schedule, picture: &[&str]) {
    let rendered = render(schedule).unwrap();
    assert_eq!(rendered.lines().collect::<Vec<_>>(), picture, "\n{rendered}");
}

/// The grids of one file: each has a line with the micro-batches, then a line per rank.
fn assert_grids(generator: Generator, file: &str) {
    let mut grids = String::new();
    for micros in [8, 4] {
        if let Ok(schedule) = generator.build(generator.shape(4, micros)) {
            grids.push_str(&format!("{} micro-batches\n{}", micros, render(&schedule).unwrap()));
        }
    }
    assert!(grids == file, "{} is drawn as\n{grids}", generator.name());
}

/// Each over 4 ranks, as in the figures of its paper: 8 micro-batches, and 4 if it takes that few.
#[test]
fn every_schedule_looks_like_its_figure() {
    assert_grids(Generator::Gpipe, include_str!("../grids/gpipe.txt"));
    assert_grids(Generator::OneFOneB, include_str!("../grids/1f1b.txt"));
    assert_grids(Generator::Interleaved, include_str!("../grids/interleaved_1f1b.txt"));
    assert_grids(Generator::BreadthFirst, include_str!("../grids/breadth_first.txt"));
    assert_grids(Generator::ZbH1, include_str!("../grids/zb_h1.txt"));
    assert_grids(Generator::ZbH2, include_str!("../grids/zb_h2.txt"));
    assert_grids(Generator::ZbV, include_str!("../grids/zb_v.txt"));
    assert_grids(Generator::DualPipeV, include_str!("../grids/dualpipe_v.txt"));
    assert_grids(Generator::PipeDream, include_str!("../grids/pipedream.txt"));
    assert_grids(Generator::PipeDream2Bw, include_str!("../grids/pipedream_2bw.txt"));
}

/// By hand: the warm-up has all micro-batches if the way to the last rank and back is longer than their number.
#[test]
fn fewer_micro_batches_than_ranks() {
    assert_picture(
        &one_f_one_b(4, 2),
        &[
            "rank 0 | F0 F1                         B0---    B1---",
            "rank 1 |    F0 F1                B0---    B1---",
            "rank 2 |       F0 F1       B0---    B1---",
            "rank 3 |          F0 B0--- F1 B1---",
        ],
    );
    assert_picture(
        &zb_h1(4, 2),
        &[
            "rank 0 | F0 F1                I0 W0 I1 W1",
            "rank 1 |    F0 F1          I0    I1 W0 W1",
            "rank 2 |       F0 F1    I0    I1 W0 W1",
            "rank 3 |          F0 I0 F1 I1 W0 W1",
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
        replicas: vec![1, 1, 1, 1],
        micros: 2,
        steps: 1,
        weights: Weights::Flush,
        actions: vec![
            parse_actions("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1").unwrap(),
            parse_actions("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1").unwrap(),
        ],
    };
    assert_picture(
        &schedule,
        &[
            "rank 0 | 0F0 0F1 2F0 2F1         2B0----     2B1---- 0B0---- 0B1----",
            "rank 1 |     1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1----",
        ],
    );
}

/// The actions of rank 1 of 4: receives come right before, and sends right after, the actions that they belong to.
#[test]
fn lowered_1f1b_reads_as_a_program() {
    let lowered = lower(&one_f_one_b(4, 4)).unwrap();
    let text: Vec<String> = lowered.actions(1).iter().map(|a| a.to_string()).collect();
    let program = "1RF0 1F0 1SF0  1RF1 1F1 1SF1  1RF2 1F2 1SF2  1RB0 1B0 1SB0 \
                   1RF3 1F3 1SF3  1RB1 1B1 1SB1  1RB2 1B2 1SB2  1RB3 1B3 1SB3";
    assert_eq!(text, program.split_whitespace().collect::<Vec<_>>());
}
